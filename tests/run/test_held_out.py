import copy
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset

from trl_algos import PolicyConfig, PolicyTrainer
from trl_algos.run.held_out import held_out_rewards
from trl_algos.trainers.side_rollout import one_completion_rewards

PROMPTS = [f"question {i}" for i in range(5)]  # one more than two evaluation batches of two


def by_number(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Reward 1 for questions 0 and 3: it does not depend on the completion."""
    return [float(prompt in (PROMPTS[0], PROMPTS[3])) for prompt in prompts]


def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def make(folder: Path, *rewards: Callable[..., Any], **settings: Any) -> PolicyTrainer:
    args = PolicyConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        algorithm="dr_grpo",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    data = tiny.prompts(4, answer=["a"] * 4)
    return PolicyTrainer(tiny.llama(), list(rewards), args, train_dataset=data, processing_class=tiny.tokenizer())


@pytest.fixture
def trainer(tmp_path: Path) -> PolicyTrainer:
    return make(tmp_path, by_number, right)


def greedy_texts(trainer: PolicyTrainer) -> list[str]:
    """Greedy completions by `generate` alone, one prompt at a time."""
    tokenizer, texts = trainer.processing_class, []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        output = trainer.model.generate(**ids, do_sample=False, max_new_tokens=4)
        texts.append(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def questions(answers: list[str] | None = None) -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, "answer": answers or ["none of these"] * 5})


def test_known_means(trainer: PolicyTrainer):
    """Two of five questions score 1 whatever the answer; three of five greedy answers are made the right ones."""
    answers = greedy_texts(trainer)
    assert len(set(answers)) > 1
    figures = held_out_rewards(trainer, questions([*answers[:3], "x", "y"]), samples=3)
    assert figures.greedy == {"by_number": pytest.approx(0.4), "right": pytest.approx(0.6)}
    assert figures.sampled["by_number"] == pytest.approx(0.4)
    assert figures.sampled.keys() == figures.greedy.keys()


def test_every_prompt_is_sampled_as_often_as_asked(tmp_path: Path):
    seen: list[str] = []

    def record(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(text)) for text in completions]

    held_out_rewards(make(tmp_path, record), questions(), samples=3)
    assert seen[:5] == PROMPTS  # greedy first, once each
    assert seen[5:] == [prompt for prompt in PROMPTS for _ in range(3)]


def test_unscored_completions_leave_the_mean(tmp_path: Path):
    """None for question 0: the mean over the others is 1 of 4; a function that scores nothing has no mean."""

    def partly(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None if prompt == PROMPTS[0] else float(prompt == PROMPTS[3]) for prompt in prompts]

    def never(completions: list[str], **kwargs: Any) -> list[None]:
        return [None] * len(completions)

    figures = held_out_rewards(make(tmp_path, partly, never), questions())
    for kind in ("greedy", "sampled"):
        assert getattr(figures, kind)["partly"] == pytest.approx(0.25)
        assert torch.tensor(getattr(figures, kind)["never"]).isnan()


def test_sampling_is_seeded(tmp_path: Path):
    def letters(completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(map(ord, text)) / 1000 for text in completions]

    trainer = make(tmp_path, letters)
    first = held_out_rewards(trainer, questions(), samples=2, seed=1)
    torch.rand(7)  # what came before does not matter
    assert held_out_rewards(trainer, questions(), samples=2, seed=1) == first
    other = held_out_rewards(trainer, questions(), samples=2, seed=2)
    assert other.sampled != first.sampled
    assert other.greedy == first.greedy != first.sampled


def state(trainer: PolicyTrainer) -> dict[str, Any]:
    """Everything that a measurement might disturb, copied."""
    return {
        "training": [module.training for module in trainer.model.modules()],
        "random": torch.get_rng_state().tolist(),
        "metrics": {mode: dict(values) for mode, values in copy.deepcopy(trainer._metrics).items()},
        "logs": {
            name: list(v) if isinstance(v, deque) else dict(v) for name, v in copy.deepcopy(trainer._logs).items()
        },
        "pending": (dict(trainer._pending_extra_logs), dict(trainer._pending_metrics)),
        "sizes": (trainer.num_generations, trainer.num_generations_eval, trainer.greedy),
        "generation": (copy.deepcopy(trainer.generation_kwargs), trainer.generation_config.to_dict()),
        "tokens": trainer.state.num_input_tokens_seen,
        "step": (trainer._step, trainer.state.global_step),
        "weights": [parameter.detach().clone().tolist() for parameter in trainer.model.parameters()],
        "gradients": [parameter.grad is None for parameter in trainer.model.parameters()],
    }


@pytest.mark.parametrize("training", [True, False])
def test_the_trainer_is_left_as_it_was(trainer: PolicyTrainer, training: bool):
    trainer.model.train(training)
    for mode in ("train", "eval"):
        trainer._metrics[mode]["reward"].append(0.5)
    trainer._logs["prompt"].append("a prompt")
    config, before = trainer.generation_config, state(trainer)
    held_out_rewards(trainer, questions(), samples=2)
    after = state(trainer)
    for name, value in before.items():
        assert after[name] == value, name
    assert trainer.generation_config is config
    trainer._metrics["eval"]["new"].append(1.0)  # still makes a list for a new name


def test_the_model_is_in_evaluation_mode_meanwhile(tmp_path: Path):
    """Dropout off, and whatever else a model does in training only."""
    modes: set[bool] = set()

    def watch(completions: list[str], **kwargs: Any) -> list[float]:
        modes.update(module.training for module in trainer.model.modules())
        return [0.0] * len(completions)

    trainer = make(tmp_path, watch)
    trainer.model.train()
    held_out_rewards(trainer, questions())
    assert modes == {False}


@pytest.mark.parametrize("greedy", [True, False])
def test_completions_beside_training_leave_no_trace(trainer: PolicyTrainer, greedy: bool):
    """As a greedy baseline is made, in training mode, where TRL would count their tokens and log them."""
    trainer.model.train()
    trainer._metrics["train"]["reward"].append(0.5)
    before = state(trainer)
    torch.manual_seed(3)
    rewards = one_completion_rewards(trainer, questions().to_list(), greedy)
    torch.set_rng_state(torch.tensor(before["random"], dtype=torch.uint8))
    assert rewards[:, 0].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert state(trainer) == before


def test_the_trainer_is_left_as_it_was_after_an_error(tmp_path: Path):
    def broken(completions: list[str], **kwargs: Any) -> list[float]:
        raise RuntimeError("no reward today")

    trainer = make(tmp_path, broken)
    trainer.model.train()
    before = state(trainer)
    with pytest.raises(RuntimeError, match="no reward today"):
        held_out_rewards(trainer, questions())
    assert state(trainer) == before


def test_training_is_the_same_with_and_without_a_measurement(tmp_path: Path):
    """The weights after a step do not tell whether something was measured before it."""

    def letters(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    def weights(measured: bool) -> list[Any]:
        trainer = make(tmp_path, letters, learning_rate=1e-2)
        if measured:
            held_out_rewards(trainer, questions(), samples=2)
        trainer.train()
        assert trainer.state.log_history[0]["num_tokens"] > 0
        return [parameter.detach() for parameter in trainer.model.parameters()]

    plain, measured = weights(False), weights(True)
    start = list(tiny.llama().parameters())
    assert any(not torch.equal(a, b) for a, b in zip(plain, start, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True))
