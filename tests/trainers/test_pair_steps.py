"""What ends a run on preference pairs with a message: losses that are not finite, no pair, no such metric, bad ids."""

from pathlib import Path
from typing import Any

import preference_pairs as pairs
import pytest
import tiny
import torch
from datasets import Dataset
from torch import nn

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer
from trl_algos.errors import ConfigError

KINDS = ["policy", "reward model"]


def trainer_of(kind: str, folder: Path, data: Any = None, held_out: Any = None, **settings: Any) -> Any:
    common = {"train_dataset": pairs.dataset() if data is None else data, "eval_dataset": held_out}
    common["processing_class"] = tiny.tokenizer()
    settings = pairs.settings(folder, **settings)
    if kind == "policy":
        return PreferenceTrainer(tiny.llama(0), tiny.llama(1), PreferenceConfig(**settings), **common)
    return BradleyTerryTrainer(pairs.classifier(), BradleyTerryConfig(**settings), **common)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def break_embeddings(trainer: Any, row: int = 99) -> None:
    """NaN where one letter is embedded."""
    embeddings: nn.Embedding = trainer.model.get_input_embeddings()
    with torch.no_grad():
        embeddings.weight[row] = torch.nan


# Numbers that are not finite


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_that_is_not_finite_stops_before_the_step(kind: str, micro_batches: int, tmp_path: Path) -> None:
    """The letter comes in one row alone, so that with two micro-batches one of them is finite."""
    sizes = {"gradient_accumulation_steps": micro_batches, "per_device_train_batch_size": 4 // micro_batches}
    trainer = trainer_of(kind, tmp_path, **sizes)
    break_embeddings(trainer, tiny.tokenizer()("z")["input_ids"][0])
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match=r"^The loss of step 1 is nan; the weights were not updated\. A "):
        trainer.train()
    assert all(torch.equal(before[name].nan_to_num(), w.nan_to_num()) for name, w in weights(trainer).items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_huge_learning_rate_stops_at_the_next_step(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path, learning_rate=1e38, optim="sgd", max_steps=4)
    with pytest.raises(FloatingPointError, match=r"^The loss of step 2 is (nan|inf)"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_margin_that_overflows_is_named(tmp_path: Path) -> None:
    """A margin that float32 does not hold by its row; one that it holds, but whose sum over a batch it does not."""
    with pytest.raises(ConfigError, match=r"row 0: `margin` must be a number below 3\.4e38"):
        trainer_of("reward model", tmp_path, pairs.dataset([row | {"margin": 1e39} for row in pairs.ROWS]))
    trainer = trainer_of("reward model", tmp_path, pairs.dataset([row | {"margin": 3e38} for row in pairs.ROWS]))
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match=r"^The loss of step 1 is inf; .*`margin`"):
        trainer.train()
    assert all(torch.equal(before[name], weight) for name, weight in weights(trainer).items())


@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_stops_before_the_step(kind: str, limit: float, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path, max_grad_norm=limit)
    trainer.model.get_input_embeddings().weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match=r"^The norm of the model's gradients in step 1 is (inf|nan);"):
        trainer.train()
    assert all(torch.equal(before[name], weight) for name, weight in weights(trainer).items())


# No pair is left


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_whose_pairs_are_all_dropped_ends_the_run(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": letter, "rejected": letter} for letter in "abc"]
    data = pairs.dataset(rows).to_iterable_dataset()
    trainer = trainer_of(kind, tmp_path, data, save_strategy="epoch")
    with pytest.raises(
        ConfigError, match=r"`train` data: 3 pairs dropped .*3: chosen and rejected are equal.*Nothing"
    ):
        trainer.train()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# The best model


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_that_there_is_not_is_named(kind: str, tmp_path: Path) -> None:
    best = {"save_strategy": "best", "metric_for_best_model": "margni", "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(kind, tmp_path, held_out=pairs.dataset(), **best)
    message = r"^`metric_for_best_model`: 'margni' is no metric of this evaluation, which has .*eval_loss"
    with pytest.raises(ConfigError, match=message):
        trainer.train()


def test_ties_alone_have_no_accuracy(tmp_path: Path) -> None:
    best = {"save_strategy": "best", "metric_for_best_model": "accuracy", "eval_strategy": "steps", "eval_steps": 1}
    held_out = pairs.dataset([row | {"preference": 0.5} for row in pairs.ROWS])
    trainer = trainer_of("reward model", tmp_path, held_out=held_out, **best)
    found = trainer.evaluate()
    assert not {"eval_accuracy", "eval_margin", "eval_brier", "eval_calibration_error"} & found.keys()
    assert {"eval_loss", "eval_reward_mean"} <= found.keys()
    with pytest.raises(ConfigError, match=r"^`metric_for_best_model`: 'accuracy' is no metric of this evaluation"):
        trainer.train()


# Each pair once


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_figures_do_not_depend_on_batches(kind: str, tmp_path: Path) -> None:
    """Seven pairs in batches of one, two, three and seven; the loss is the mean of those of the pairs alone."""
    rows = [{"prompt": "p" * i, "chosen": "abcdefg"[: 1 + i], "rejected": "xyz"[: 1 + i % 3]} for i in range(7)]
    per_batch = {"eval_entropy", "eval_mean_token_accuracy", "eval_logits/chosen", "eval_logits/rejected"}
    found = []
    for size in (1, 2, 3, 7):
        trainer = trainer_of(kind, tmp_path, held_out=pairs.dataset(rows), per_device_eval_batch_size=size)
        logged = trainer.evaluate()
        timed = ("runtime", "per_second", "preparation_time")
        found.append({k: v for k, v in logged.items() if not k.endswith(timed) and k not in per_batch})
    assert all(other == pytest.approx(found[0], abs=1e-5, rel=1e-5) for other in found[1:])
    each = [trainer.evaluate(pairs.dataset([row]))["eval_loss"] for row in rows]
    assert max(each) - min(each) > 0.02
    assert found[1]["eval_loss"] == pytest.approx(sum(each) / 7, abs=1e-5)


# Token ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streamed", [True, False])
def test_token_ids_as_sides_are_refused(kind: str, streamed: bool, tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": [5], "chosen": [6], "rejected": [7]}])
    with pytest.raises(ConfigError, match=r"row 0: `chosen` must be text .*`chosen_ids` and `rejected_ids`"):
        trainer_of(kind, tmp_path, data.to_iterable_dataset() if streamed else data).train()


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("token", [99_999, 258, -5])
def test_ids_beyond_the_vocabulary_are_refused(token: int, streamed: bool, tmp_path: Path) -> None:
    rows = [{"chosen_ids": [5, 257], "rejected_ids": [6]}, {"chosen_ids": [0, 7], "rejected_ids": [token, 8]}]
    data = Dataset.from_list(rows)
    reason = f"has token {token}, but the model has tokens 0 to 257" if token >= 0 else "must be a list of token ids"
    with pytest.raises(ConfigError, match=f"row 1: `rejected_ids` {reason}"):
        trainer_of("reward model", tmp_path, data.to_iterable_dataset() if streamed else data).train()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
