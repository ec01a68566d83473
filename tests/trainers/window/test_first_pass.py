"""Rows that wait for a later step get the old log-probs of the policy as it is, each its own."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trl_algos.trainers.window.first_pass import fill_old_logps
from trl_algos.trainers.window.rows import Batch

NAN = float("nan")


def rows(prompts: list[list[int]], completions: list[list[int]], old: list[list[float]] | None) -> Batch:
    ids, answers = torch.tensor(prompts), torch.tensor(completions)
    batch = {"prompt_ids": ids, "prompt_mask": (ids > 0).long()}
    batch |= {"completion_ids": answers, "completion_mask": (answers > 0).long()}
    return batch | ({} if old is None else {"old_per_token_logps": torch.tensor(old)})


def score(model: Any, batch: Batch, batch_size: int) -> SimpleNamespace:
    """What tells every token and its prompt apart."""
    last = batch["prompt_ids"][:, -1:] * batch["prompt_mask"][:, -1:]
    return SimpleNamespace(logps=-(batch["completion_ids"] + 100.0 * last) * batch["completion_mask"])


def test_each_row_gets_its_own_and_what_is_known_is_kept() -> None:
    """Batches of other widths lie between; the second one has all that it needs."""
    batches = [
        rows([[0, 2], [3, 4]], [[5, 6, 0], [7, 8, 9]], [[NAN, NAN, NAN], [-1.0, -2.0, NAN]]),
        rows([[5]], [[6]], [[-0.5]]),
        rows([[0, 0, 9]], [[3]], [[NAN]]),
        rows([[1]], [[2]], None),
    ]
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(per_device_train_batch_size=2, gradient_checkpointing_kwargs=None),
        model=SimpleNamespace(is_gradient_checkpointing=False),
        score=score,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _buffered_inputs=batches,
    )
    fill_old_logps(trainer)
    found: list[Tensor | None] = [batch.get("old_per_token_logps") for batch in batches]
    assert found[0] is not None
    assert found[0].tolist() == [[-205.0, -206.0, 0.0], [-1.0, -2.0, -409.0]]
    assert found[1] is not None
    assert found[1].tolist() == [[-0.5]]
    assert found[2] is not None
    assert found[2].tolist() == [[-903.0]]
    assert found[3] is None
