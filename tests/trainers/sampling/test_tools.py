"""Completions of several turns: tools that are called while a round is sampled, and environments with a reset."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl
from datasets import Dataset
from scripted import Script
from trl import GRPOTrainer

TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


def talker() -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def call(number: int) -> str:
    return f'<tool_call>\n{{"name": "doubled", "arguments": {{"number": {number}}}}}\n</tool_call>'


def digits(prompt_ids: list[int]) -> list[int]:
    """The numbers that the text of a prompt holds."""
    text = tiny.tokenizer().decode(prompt_ids)
    return [int(word) for word in text.replace("<", " ").replace(">", " ").split() if word.isdecimal()]


class Talk:
    """First turns call the tool with the prompt's number; the second ones say the tool's answer, or 0."""

    def __init__(self, right: dict[int, list[bool]]) -> None:
        self.right, self.turns, self.answers = right, 0, {number: 0 for number in right}

    def __call__(self, trainer: Any, prompt_ids: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        self.turns += 1
        encode = trainer.processing_class
        texts = []
        for ids in prompt_ids:
            number, *later = [n for n in digits(ids) if n in self.right or (n % 2 == 0 and n // 2 in self.right)]
            if not later:
                texts.append(call(number))
                continue
            place = self.answers[number]
            self.answers[number] += 1
            options = self.right[number]
            texts.append(str(2 * number if options[place % len(options)] else 0))
        return [encode(text)["input_ids"] + [tiny.EOS] for text in texts], None


def doubled(number: int) -> int:
    """Twice a number.

    Args:
        number: The number.

    Returns:
        Twice of it.
    """
    return 2 * number


def says_the_double(prompts: Any, completions: Any, **_: Any) -> list[float]:
    found = []
    for prompt, messages in zip(prompts, completions, strict=True):
        number = next(int(word) for word in prompt[-1]["content"].split() if word.isdecimal())
        found.append(float(messages[-1]["content"].strip() == str(2 * number)))
    return found


SETTINGS = {"max_completion_length": 400, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
RIGHT = {11: [True, True], 13: [True, False], 17: [False, False], 19: [False, True]}
"""Whether the completions of a prompt end well; two of four teach."""


def roomy() -> Any:
    model = tiny.llama(seed=1)
    model.config.max_position_embeddings = 4096  # TRL ends a talk there
    return model


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"double {n} please"}] for n in RIGHT]})


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Talk:
    made = Talk(RIGHT)
    monkeypatch.setattr(
        GRPOTrainer, "_generate_single_turn", lambda self, *args, **kwargs: made(self, *args, **kwargs)
    )
    return made


def trained_texts(run: Script) -> list[str]:
    decode = tiny.tokenizer().decode
    return [decode(ids) for batch in run.batches for ids in batch["completion_ids"][batch["rollout_row"].argsort()]]


def test_tools(talk: Talk, tmp_path: Path) -> None:
    options = {
        "model": roomy(),
        "tools": [doubled],
        "train_dataset": prompts(),
        "rollout_func": None,
        "processing_class": talker(),
    }
    run = Script({}, tmp_path, max_steps=1, trainer=options | {"reward_funcs": says_the_double}, **SETTINGS).train()
    texts = trained_texts(run)
    assert [next(n for n in RIGHT if f": {n}" in text) for text in texts] == [13, 13, 19, 19]
    assert all("tool_response" in text for text in texts)
    (batch,) = run.batches
    holes = batch["completion_mask"].bool() & ~batch["tool_mask"].bool()
    assert (holes.sum(1) > 5).all()  # what the tool said is not learned
    assert run.table()["uninformative_groups"]["all_right"] == 1
    assert run.table()["uninformative_groups"]["all_wrong"] == 1
    assert run.table()["trained"]["tokens"] == int((batch["tool_mask"] * batch["completion_mask"]).sum())
    assert run.logged("tools/call_frequency") == [1.0]
    assert talk.turns == 2 * run.logged("sampling/rounds")[0]


class Room:
    """An environment that adds to the prompt, counts its resets and judges by what it was asked."""

    resets: list[str] = []  # noqa: RUF012 - of all rooms

    def reset(self, prompt: Any = None, **_: Any) -> str:
        self.asked = prompt[-1]["content"]
        self.calls = 0
        Room.resets.append(self.asked)
        return " now"

    def doubled(self, number: int) -> int:
        """Twice a number.

        Args:
            number: The number.

        Returns:
            Twice of it.
        """
        self.calls += 1
        return 2 * number


def counted(prompts: Any, completions: Any, environments: list[Room], **_: Any) -> list[float]:
    assert all(room.calls == 1 for room in environments)
    assert all(room.asked in prompt[-1]["content"] for room, prompt in zip(environments, prompts, strict=True))
    return says_the_double(prompts, completions)


def test_environments(talk: Talk, tmp_path: Path) -> None:
    """Each is reset once for each completion sampled, and not for the batch that is made of those kept."""
    Room.resets.clear()
    options = {"environment_factory": Room, "train_dataset": prompts(), "rollout_func": None}
    options |= {"model": roomy(), "processing_class": talker(), "reward_funcs": counted}
    run = Script({}, tmp_path, max_steps=1, trainer=options, **SETTINGS).train()
    assert [next(n for n in RIGHT if f": {n}" in text) for text in trained_texts(run)] == [13, 13, 19, 19]
    assert len(Room.resets) == run.table()["completions"]
    (batch,) = run.batches
    asked = [tiny.tokenizer().decode(ids) for ids in batch["prompt_ids"][batch["rollout_row"].argsort()]]
    assert all("please now" in text for text in asked)
    assert torch.isfinite(batch["advantages"]).all()
    assert run.trainer.environments is not None
