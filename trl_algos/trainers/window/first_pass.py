"""Old log-probs from the first pass that trains on a batch: until it is over they are the current ones.

With several passes over a generation batch TRL scores the batch before the first one. Where a generation batch is one
optimizer step, that first pass is made by the policy that has sampled, and gives the same numbers. Until then NaN
stands for them (`known_old_logps`), so the first ratio is exactly 1, which two passes in bfloat16 do not give.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from trl_algos.trainers.sampling.old_logps import known_old_logps
from trl_algos.trainers.window.rows import Batch, is_plain, joined

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


@contextmanager
def deferring_old_logps(trainer: "PolicyTrainer") -> Iterator[None]:
    """Spare TRL's method for a generated batch the pass for old log-probs, where another pass has them."""
    trainer._defers_old_logps = _are_asked_for(trainer) and (
        _first_pass_has_them(trainer) or trainer.scores_with_values
    )
    try:
        yield
    finally:
        trainer._defers_old_logps = False


def _are_asked_for(trainer: "PolicyTrainer") -> bool:
    """Whether TRL's method makes a pass for them, and can do without what it gives."""
    engine_corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    return trainer.model.training and trainer.num_iterations > 1 and not engine_corrected


def _first_pass_has_them(trainer: "PolicyTrainer") -> bool:
    args = trainer.args
    return (
        bool(args.reuse_first_pass)
        and args.steps_per_generation == args.gradient_accumulation_steps
        and bool(args.disable_dropout)  # else a training pass is not what scoring gives
        and trainer.charges_kl_to != "reward"  # which is reckoned before the first pass
    )


def keep_old_logps(trainer: "PolicyTrainer", batch: Batch, logps: Tensor) -> None:
    """Write a first pass' log-probs into the buffered rows that the next passes will be made from.

    Args:
        trainer: in a training pass.
        batch: some rows of the buffer, whose old log-probs may be NaN.
        logps: (B, T) in nats, current policy.
    """
    old_logps = batch.get("old_per_token_logps")
    if old_logps is None or not trainer.model.training or "rollout_row" not in batch or not old_logps.isnan().any():
        return
    known, width = known_old_logps(batch, logps), old_logps.shape[1]
    for buffered in trainer._buffered_inputs or ():
        rows, sources = (buffered["rollout_row"][:, None] == batch["rollout_row"][None]).nonzero(as_tuple=True)
        buffered["old_per_token_logps"][rows, :width] = known[sources]


def fill_old_logps(trainer: "PolicyTrainer") -> None:
    """Score the buffered rows whose old log-probs are NaN now: the policy changes before they are trained on."""
    args, names = trainer.args, ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    missing = [
        batch
        for batch in trainer._buffered_inputs or ()
        if batch.get("old_per_token_logps") is not None and bool(batch["old_per_token_logps"].isnan().any())
    ]
    if not missing:
        return
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs):
        if all(is_plain(batch) for batch in missing):
            rows = joined(
                [{name: batch[name] for name in names} for batch in missing], trainer._tokenizer.pad_token_id
            )
            whole = trainer.score(trainer.model, rows, batch_size=args.per_device_train_batch_size).logps
            scored = whole.split([len(batch["completion_ids"]) for batch in missing])
        else:  # images belong to a micro-batch, whose own pass has them
            scored = tuple(trainer.score(trainer.model, batch).logps for batch in missing)
    for batch, logps in zip(missing, scored, strict=True):
        batch["old_per_token_logps"] = known_old_logps(batch, logps[:, : batch["completion_ids"].shape[1]])
