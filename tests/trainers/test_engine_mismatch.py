"""A rollout engine whose log-probs differ from the trainer's: a stand-in for vLLM with its own probabilities."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from trl_algos import PolicyConfig, PolicyTrainer

ANSWERS = [[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, tiny.EOS]]
# ln(train / engine) of each token; the last row could not be scored at its second token.
LOG_RATIOS = [[0.0, 0.1, -0.1], [2.0, 2.0, 2.0], [math.log(8), -math.log(4), -math.log(2)], [0.0, math.nan, 0.0]]


class Engine:
    """Returns fixed completions with log-probs that are off from the trainer's by `LOG_RATIOS`."""

    def __init__(self) -> None:
        self.temperature = 1.0
        self.temperatures: list[float] = []
        self.trainer: PolicyTrainer

    def sync_weights(self) -> None:
        """Nothing to sync."""

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any) -> tuple[Any, ...]:
        self.temperatures.append(self.temperature)
        answers = (ANSWERS * len(prompts))[: len(prompts)]
        ids = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)])
        with torch.no_grad():
            logits = self.trainer.model(ids).logits[:, -4:-1]
        logps = logits.log_softmax(-1).gather(-1, ids[:, -3:, None]).squeeze(-1)
        off = (LOG_RATIOS * len(prompts))[: len(prompts)]
        engine = (logps - torch.tensor(off)).tolist()
        logprobs = [[[None if math.isnan(x) else x] for x in row] for row in engine]
        return prompts, answers, logprobs, None


def run(folder: Path, **settings: Any) -> tuple[PolicyTrainer, list[dict[str, Any]]]:
    """Two optimizer steps' worth of micro-batches from one generation of four rows; returns what was trained on."""
    args = PolicyConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=3,
        max_steps=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    trainer = PolicyTrainer(
        tiny.llama(scale=1.0),
        lambda completions, **kw: [1.0, 0.0, 1.0, 0.0][: len(completions)] * (len(completions) // 4 or 1),
        args,
        train_dataset=tiny.prompts(4),
        processing_class=tiny.tokenizer(),
    )
    engine = Engine()
    engine.trainer = trainer
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, engine, -1
    seen: list[dict[str, Any]] = []
    original = trainer._compute_loss

    def spy(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        seen.append(inputs)
        return original(model, inputs)

    trainer._compute_loss = spy
    trainer.train()
    return trainer, seen


def in_order(batch: dict[str, Any], key: str) -> torch.Tensor:
    return batch[key][batch["rollout_row"].argsort()]


@pytest.mark.parametrize(
    ("mode", "low", "expected"),
    [
        ("token_truncate", None, [[1, 1.105171, 0.904837], [2, 2, 2], [2, 0.25, 0.5], [1, 1, 1]]),
        ("token_mask", 0.5, [[1, 1.105171, 0.904837], [0, 0, 0], [0, 0, 0.5], [1, 1, 1]]),
        # Geometric means 1, 7.389, 1, 1: the second row is out, the others keep their token ratios, capped.
        ("sequence_mask", 0.5, [[1, 1.105171, 0.904837], [0, 0, 0], [2, 0.25, 0.5], [1, 1, 1]]),
        ("sequence_truncate", None, [[1, 1, 1], [2, 2, 2], [1, 1, 1], [1, 1, 1]]),
    ],
)
def test_off_1_weights_of_each_mode(mode: str, low: float | None, expected: list[list[float]], tmp_path: Path) -> None:
    trainer, (batch,) = run(
        tmp_path,
        algorithm="dapo",
        overlong_buffer=0,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=2.0,
        vllm_importance_sampling_clip_min=low,
    )
    weights = in_order(batch, "importance_sampling_ratio")
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32), atol=2e-5, rtol=0)
    # On-policy every ratio is 1, so the loss is -sum(w A) over 12 tokens.
    advantages = in_order(batch, "advantages")
    log = trainer.state.log_history[0]
    assert log["policy_loss"] == pytest.approx(-(weights * advantages[:, None]).sum().item() / 12, abs=1e-6)
    assert log["policy/ratio/max"] == pytest.approx(1.0, abs=1e-5)
    for name, value in (("mean", weights.mean()), ("min", weights.min()), ("max", weights.max())):
        assert log[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(value.item(), abs=1e-5)


def test_engine_ratio_is_logged_apart_from_the_update_ratio(tmp_path: Path) -> None:
    trainer, _ = run(
        tmp_path,
        algorithm="dapo",
        overlong_buffer=0,
        vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_clip_max=2.0,
        vllm_importance_sampling_clip_min=0.5,
    )
    log = trainer.state.log_history[0]
    assert log["sampling/engine_ratio/max"] == pytest.approx(8.0, rel=1e-4)
    assert log["sampling/engine_ratio/min"] == pytest.approx(0.25, rel=1e-4)
    assert log["sampling/engine_ratio/p50"] == pytest.approx(1.0, rel=1e-4)
    assert log["policy/ratio/p50"] == pytest.approx(1.0, abs=1e-5)
    # Row 2 is gated as a whole, and two tokens of row 3.
    assert log["policy/gated_sequences"] == pytest.approx(1 / 4)
    assert log["policy/gated_tokens"] == pytest.approx(2 / 12)


def test_dis_takes_its_ratio_to_the_engine(tmp_path: Path) -> None:
    """Band (0.7, 6): e^2 and 8 are above, 1/4 and 1/2 below; a token without engine log-prob has ratio 1."""
    trainer, (batch,) = run(tmp_path, algorithm="dis")
    assert "importance_sampling_ratio" not in batch
    ratios = torch.tensor(LOG_RATIOS).nan_to_num(0.0).exp()
    kept = torch.where((ratios > 0.7) & (ratios < 6.0), ratios, 0.0)
    advantages = in_order(batch, "advantages")
    log = trainer.state.log_history[0]
    assert log["policy_loss"] == pytest.approx(-(kept * advantages[:, None]).sum().item() / 12, abs=1e-5)
    assert log["clip_ratio/high_mean"] == pytest.approx(4 / 12)
    assert log["clip_ratio/low_mean"] == pytest.approx(2 / 12)
    # On-policy, so the update ratio is 1: the mismatch shows where it belongs.
    assert log["policy/ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert log["sampling/engine_ratio/max"] == pytest.approx(8.0, rel=1e-4)


def test_remax_asks_the_engine_for_greedy_tokens_and_puts_the_temperature_back(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, algorithm="remax", beta=0.0)
    assert trainer.vllm_generation.temperatures == [1.0, 0.0]
    assert trainer.vllm_generation.temperature == 1.0


def test_any_surrogate_can_take_its_ratio_to_the_engine(tmp_path: Path) -> None:
    """Clip to [0.8, 1.28]: on-policy, so the ratio is the engine's mismatch."""
    settings = {"ratio_reference": "engine", "vllm_importance_sampling_correction": False, "overlong_buffer": 0}
    trainer, (batch,) = run(tmp_path, algorithm="dapo", **settings)
    ratios = torch.tensor(LOG_RATIOS).nan_to_num(0.0).exp()
    advantages = in_order(batch, "advantages")[:, None]
    terms = torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.28) * advantages)
    assert trainer.state.log_history[0]["policy_loss"] == pytest.approx(-terms.sum().item() / 12, abs=1e-5)
