"""What a reward function does wrong is told with its name, the completion, the step and the last checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from trl_algos import PolicyConfig, PolicyTrainer, RewardError


def trainer(folder: Path, reward: Any, **settings: Any) -> PolicyTrainer:
    args = PolicyConfig(
        output_dir=str(folder),
        algorithm="dapo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        report_to="none",
        disable_tqdm=True,
        **({"max_steps": 1, "save_strategy": "no"} | settings),
    )
    data = tiny.prompts(8)
    return PolicyTrainer(tiny.llama(), reward, args, train_dataset=data, processing_class=tiny.tokenizer())


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0, 2.0], "returned 2 rewards for 4 completions"),
        ("good", "returned a str"),
        (None, "returned a NoneType"),
        (1.0, "returned a float"),
        ([1.0, "2", 0.0, 0.0], "returned '2' for completion 1; it must be a number or None"),
        ([1.0, [2.0, 3.0], 0.0, 0.0], "for completion 1; it must be a number or None"),
        ([0.0, 0.0, 0.0, float("inf")], "returned inf for completion 3; it must be finite"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_wrong_return(returned: Any, says: str, is_async: bool, tmp_path: Path) -> None:
    def plain(completions: list[str], **kwargs: Any) -> Any:
        return returned

    async def later(completions: list[str], **kwargs: Any) -> Any:
        return returned

    function = later if is_async else plain
    with pytest.raises(RewardError, match=f"'{function.__name__}' ") as error:
        trainer(tmp_path, function).train()
    assert says in str(error.value)
    assert "step 1; no checkpoint was saved" in str(error.value)


def test_a_function_that_raises(tmp_path: Path) -> None:
    """In the third step, with a checkpoint of the second to go on from."""
    calls: list[int] = []

    def fragile(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("answer")
        return [float(len(text)) for text in completions]

    run = trainer(tmp_path, fragile, max_steps=4, save_strategy="steps", save_steps=2)
    with pytest.raises(
        RewardError, match=r"'fragile' raised KeyError: 'answer'. It was step 3; .*checkpoint-2"
    ) as error:
        run.train()
    assert isinstance(error.value.__cause__, KeyError)  # with the traceback of the function itself


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, list])
def test_a_right_return_of_any_kind(kind: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, lambda completions, **kwargs: kind([1.0, 0.0, 1.0, 0.0]), logging_steps=1)
    run.train()
    assert run.state.log_history[0]["reward"] == 0.5


def test_the_name_of_a_function_stays(tmp_path: Path) -> None:
    class Judge:
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [0.0] * len(completions)

    def length(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    assert trainer(tmp_path, [Judge(), length]).reward_func_names == ["Judge", "length"]
