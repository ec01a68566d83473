"""Log-probs of completions under the policy that sampled them, kept for those that are trained on later."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from trl_algos.trainers.sampling.groups import Completion, Group

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def add_old_logps(trainer: "PolicyTrainer", groups: Sequence[Group]) -> None:
    """Give `old_logps` to the groups that have none yet: the current policy has sampled them, the next one has not.

    The rows are shared out over the ranks; every rank makes equally many passes.

    Args:
        trainer: whose policy is asked.
        groups: equal on all ranks.
    """
    new = [group for group in groups if group.old_logps is None]
    rows = [completion for group in new for completion in group.completions]
    if not rows:
        return
    share = -(-len(rows) // trainer.accelerator.num_processes)
    first = share * trainer.accelerator.process_index
    own = [rows[min(i, len(rows) - 1)] for i in range(first, first + share)]
    size = trainer.args.per_device_train_batch_size
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        scored = trainer.score(trainer.model, _batch(trainer, own), batch_size=size).logps.tolist()
    logps = gather_object([row[: len(c.completion_ids)] for row, c in zip(scored, own, strict=True)])
    for i, group in enumerate(new):
        size = len(group.completions)
        group.old_logps = logps[i * size : (i + 1) * size]


def put_old_logps(output: dict[str, Any], old_logps: Sequence[list[float] | None]) -> None:
    """Write kept log-probs over those in `output`; where it has none, NaN stands for the current policy's.

    Args:
        output: a generated batch of B rows.
        old_logps: one entry per row; None = just sampled.
    """
    if all(row is None for row in old_logps):
        return
    current = output.get("old_per_token_logps")
    if current is None:
        current = torch.full(output["completion_ids"].shape, torch.nan, device=output["completion_ids"].device)
    kept = current.clone()
    for place, row in enumerate(old_logps):
        if row is not None:
            kept[place] = 0.0  # padding
            kept[place, : len(row)] = torch.tensor(row, dtype=kept.dtype, device=kept.device)
    output["old_per_token_logps"] = kept


def lacks_old_logps(inputs: dict[str, Any]) -> bool:
    """Whether some of the log-probs before the update are those of the policy as it is now."""
    old_logps = inputs.get("old_per_token_logps")
    return old_logps is None or bool(old_logps.isnan().any())


def known_old_logps(inputs: dict[str, Any], logps: Tensor) -> Tensor:
    """(B, T) log-probs before the update, detached: those kept, else the current ones `logps`."""
    old_logps = inputs.get("old_per_token_logps")
    if old_logps is None:
        return logps.detach()
    return torch.where(old_logps.isnan(), logps.detach(), old_logps)


def _batch(trainer: "PolicyTrainer", completions: Sequence[Completion]) -> dict[str, Tensor]:
    """A padded batch, as the forward pass takes it."""
    device, fill = trainer.accelerator.device, trainer._tokenizer.pad_token_id
    batch = {}
    for name, side in (("prompt", "left"), ("completion", "right")):
        ids = [torch.tensor(getattr(c, f"{name}_ids")) for c in completions]
        batch[f"{name}_ids"] = pad(ids, padding_value=fill, padding_side=side).to(device)
        ones = [torch.ones_like(row) for row in ids]
        batch[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side).to(device)
    return batch
