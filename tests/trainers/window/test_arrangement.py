"""The passes of an optimizer step in a trainer: how many there are, and what they compute."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch

from trl_algos import PolicyConfig, PolicyTrainer
from trl_algos.trainers.rollout import Scores

LENGTHS = [[2, 9, 4, 1], [6, 6, 3, 12]]
"""Tokens of the completions of the two prompts."""


class Counting(PolicyTrainer):
    """Keeps the shape and the rows of each pass that trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passes: list[dict[str, Any]] = []
        self.scored = 0

    def score(self, model: Any, inputs: dict[str, Any], batch_size: int | None = None) -> Scores:
        if torch.is_grad_enabled():
            self.passes.append({**inputs, "step": self.state.global_step})
        return super().score(model, inputs, batch_size)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        known = self._defers_old_logps
        if model is self.model and not torch.is_grad_enabled() and not known:
            self.scored += 1
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)


def completions() -> dict[str, list[list[int]]]:
    return {
        f"prompt {p}:": [[20 + 5 * p + i] * (length - 1) + [tiny.EOS] for i, length in enumerate(row)]
        for p, row in enumerate(LENGTHS)
    }


def first_prompt_differs(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Rewards of the first prompt's rows differ; the second's are alike."""
    return [float(i % 2) if "0" in prompt else 1.0 for i, prompt in enumerate(prompts)]


def made(
    folder: Any,
    reward: Callable[..., list[float]] = first_prompt_differs,
    model_folder: str | None = None,
    **settings: Any,
) -> Counting:
    config = {
        "output_dir": str(folder),
        "algorithm": "grpo",
        "beta": 0.0,
        "num_generations": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_completion_length": 16,
        "max_steps": 1,
        "shuffle_dataset": False,
        "learning_rate": 0.1,
        "optim": "sgd",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
    }
    trainer = Counting(
        model_folder or tiny.llama(),
        reward,
        PolicyConfig(**config | settings),
        train_dataset=tiny.prompts(2),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout(completions()),
    )
    trainer.train()
    return trainer


def test_rows_without_an_advantage_are_not_computed(tmp_path: Any) -> None:
    trainer = made(tmp_path)
    assert [len(batch["advantages"]) for batch in trainer.passes] == [2, 2]
    assert all(bool((batch["advantages"] != 0).all()) for batch in trainer.passes)
    logged = trainer.state.log_history[0]
    assert logged["policy/skipped_rows"] == 0.5
    assert logged["policy/effective_sequences"] == 0.5
    assert logged["policy/learned_tokens"] == sum(map(sum, LENGTHS))


@pytest.mark.parametrize("settings", [{"entropy_coef": 0.1}, {"skip_idle_rows": False}], ids=str)
def test_rows_that_another_term_pulls_at_are_computed(settings: dict[str, Any], tmp_path: Any) -> None:
    trainer = made(tmp_path, **settings)
    assert sum(len(batch["advantages"]) for batch in trainer.passes) == 8


def test_rows_with_a_kl_are_computed(tmp_path: Any, model_folder: str) -> None:
    trainer = made(tmp_path, beta=0.1, model_folder=model_folder)
    assert sum(len(batch["advantages"]) for batch in trainer.passes) == 8


def test_padded_passes_are_no_longer_than_their_rows(tmp_path: Any) -> None:
    trainer = made(tmp_path, skip_idle_rows=False, padding_free=False)
    widths = [batch["completion_ids"].shape[1] for batch in trainer.passes]
    assert widths == [12, 6, 4, 2]  # by length, two at a time: 12 9 | 6 6 | 4 3 | 2 1
    computed = sum(batch["completion_ids"].numel() + batch["prompt_ids"].numel() for batch in trainer.passes)
    assert computed == 2 * (12 + 6 + 4 + 2) + 8 * trainer.passes[0]["prompt_ids"].shape[1]


def test_as_many_passes_as_the_tokens_need(tmp_path: Any) -> None:
    trainer = made(tmp_path, skip_idle_rows=False, max_tokens_per_micro_batch=1)
    assert [len(batch["advantages"]) for batch in trainer.passes] == [1] * 8
    trainer = made(tmp_path, skip_idle_rows=False, max_tokens_per_micro_batch=10_000)
    assert [len(batch["advantages"]) for batch in trainer.passes] == [8]


def test_nothing_to_learn_is_one_token(tmp_path: Any) -> None:
    trainer = made(tmp_path, reward=lambda completions, **_: [1.0] * len(completions))
    (batch,) = trainer.passes
    assert batch["prompt_ids"].shape == batch["completion_ids"].shape == (1, 1)
    assert trainer.state.log_history[0]["policy_loss"] == 0.0
    logged = trainer.state.log_history[0]
    assert logged["policy/skipped_rows"] == 1.0
    assert logged["policy/effective_tokens"] == 0.0
    # Means and quantiles over the rows that are computed, of which there are none.
    assert not {"entropy", "policy/approx_kl", "policy/ratio/p50", "clip_ratio/high_mean"} & logged.keys()
    assert all(math.isfinite(value) for value in logged.values())


def test_the_first_pass_gives_the_old_log_probs(tmp_path: Any) -> None:
    """One scoring pass fewer, ratio exactly 1 in the first step, and the same log-probs in the second."""
    runs = {
        reused: made(tmp_path, reuse_first_pass=reused, num_iterations=2, max_steps=2, skip_idle_rows=False)
        for reused in (True, False)
    }
    assert [runs[reused].scored for reused in (True, False)] == [0, 1]
    first, second = (runs[True].state.log_history[step] for step in (0, 1))
    assert first["policy/ratio/min"] == first["policy/ratio/max"] == 1.0
    assert second["policy/ratio/max"] > 1.001
    kept, scored = (
        {
            (int(row), place): float(logps)
            for batch in runs[reused].passes
            if batch["step"] == 1
            for row, values, mask in zip(
                batch["rollout_row"], batch["old_per_token_logps"], batch["completion_mask"], strict=True
            )
            for place, logps in enumerate(values[mask.bool()])
        }
        for reused in (True, False)
    )
    assert len(kept) == sum(map(sum, LENGTHS))
    assert kept == pytest.approx(scored, abs=1e-5)


def test_a_batch_of_two_steps_is_scored_before_the_first(tmp_path: Any) -> None:
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}
    trainer = made(tmp_path, **settings)
    assert trainer.scored == 1
    assert not any(batch["old_per_token_logps"].isnan().any() for batch in trainer.passes)
