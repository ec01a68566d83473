"""Dynamic sampling: groups that teach are looked for until a batch is full; what was sampled is accounted for."""
