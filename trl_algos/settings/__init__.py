"""Which settings follow from those that were set, and which cannot run; plain values, no torch, no TRL."""
