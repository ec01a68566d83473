"""Data sources that a recipe can name: prompts with verifiable answers, made on the spot, without a network."""

import hashlib
import random
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from datasets import Dataset

Split = Literal["train", "test"]
SPLITS: tuple[str, ...] = get_args(Split)

# One operand pair in so many is held out.
_HELD_OUT_ONE_IN = 5


def is_held_out(a: int, b: int) -> bool:
    """Whether the operand pair `{a, b}` belongs to the held-out split.

    The rule is fixed: the SHA-256 digest of `"lo,hi"`, the operands in ascending order and in decimal, is read as a
    big-endian integer; pairs for which it is a multiple of 5 are held out. It knows no order, so `a+b` and `b+a` fall
    on the same side, and it depends on nothing else, so a pair never changes sides.

    Args:
        a: First operand.
        b: Second operand.

    Returns:
        `True` for about one pair in five.
    """
    low, high = sorted((a, b))
    digest = hashlib.sha256(f"{low},{high}".encode()).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0


def arithmetic(split: Split, size: int | None = None, max_operand: int = 99, seed: int = 0) -> "Dataset":
    """Addition prompts with exact answers, such as `"47+85="` and `"132"`.

    Every ordered pair of operands from 0 to `max_operand` occurs once, in one of the two splits (see `is_held_out`):
    with the defaults about 8,000 training and 2,000 held-out prompts.

    Args:
        split: `"train"` or `"test"`.
        size: Number of prompts to keep, the first ones of the shuffled table. `None` keeps all.
        max_operand: Largest operand. The bundled model knows operands up to 99.
        seed: Seed of the shuffle. It does not change which prompts belong to which split.

    Returns:
        A dataset with the string columns `prompt` and `answer`.

    Raises:
        ValueError: If `split` is unknown, or if the split has fewer than `size` prompts.
    """
    from datasets import Dataset

    if split not in get_args(Split):
        raise ValueError(f"`split` must be one of {', '.join(get_args(Split))}, but is {split!r}.")
    pairs = operand_pairs(split, max_operand)
    if size is not None and not 0 < size <= len(pairs):
        raise ValueError(f"`size` must be between 1 and {len(pairs)}, the prompts in {split!r}, but is {size}.")
    random.Random(seed).shuffle(pairs)
    pairs = pairs[:size]
    return Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})


def arithmetic_preferences(
    split: Split, size: int | None = None, repeats: int = 1, max_operand: int = 99, seed: int = 0
) -> "Dataset":
    """Preference pairs of sums: the right one, and a wrong one that resembles it.

    Args:
        split: `"train"` or `"test"`; no prompt of one, nor its mirror image, is in the other (see `is_held_out`).
        size: Number of prompts. `None` takes all.
        repeats: Pairs for each prompt, each with a wrong sum of its own draw.
        max_operand: Largest operand.
        seed: Seed of the order of the prompts and of the wrong sums.

    Returns:
        A dataset with the string columns `prompt`, `chosen` and `rejected`.

    Raises:
        ValueError: `repeats` is below 1, or as in `arithmetic`.
    """
    from datasets import Dataset

    if repeats < 1:
        raise ValueError(f"`repeats` must be 1 or more, but is {repeats}.")
    table = arithmetic(split, size, max_operand, seed)
    chance = random.Random(seed)
    rows = [row for _ in range(repeats) for row in table]
    return Dataset.from_dict(
        {
            "prompt": [row["prompt"] for row in rows],
            "chosen": [row["answer"] for row in rows],
            "rejected": [wrong_sum(row["answer"], chance) for row in rows],
        }
    )


def wrong_sum(answer: str, chance: random.Random) -> str:
    """Another text than `answer`, with another digit (three times in five), one digit more, or one less."""
    place, digit = chance.randrange(len(answer)), chance.choice("0123456789")
    before, after = answer[:place], answer[place + 1 :]
    changed = [before + digit + after] * 3 + [before + digit + answer[place:], before + after]
    text = chance.choice(changed)
    return wrong_sum(answer, chance) if text in (answer, "") else text


def operand_pairs(split: Split, max_operand: int = 99) -> list[tuple[int, int]]:
    """Every ordered pair of operands of a split of `arithmetic`, in ascending order.

    Args:
        split: `"train"` or `"test"`.
        max_operand: Largest operand.
    """
    return list(_operand_pairs(split, max_operand))


@lru_cache(maxsize=4)  # thousands of hashes, which checks and both splits ask for again
def _operand_pairs(split: Split, max_operand: int) -> tuple[tuple[int, int], ...]:
    operands = range(max_operand + 1)
    held_out = split == "test"
    return tuple((a, b) for a in operands for b in operands if is_held_out(a, b) == held_out)


def bundled_model_path() -> str:
    """Folder of the bundled language model and its tokenizer, to be passed to `from_pretrained`.

    The model has 83,000 parameters and continues the prompts of `arithmetic`. It is pretrained on the training split
    only, and about a third of its sampled answers to held-out prompts are right; the `README.md` in the folder has the
    figures.
    """
    return str(files("trl_algos") / "bundled" / "arithmetic-lm")


SOURCES: dict[str, Callable[..., "Dataset"]] = {
    "arithmetic": arithmetic,
    "arithmetic_preferences": arithmetic_preferences,
}
"""Data sources by the name that a recipe gives; each takes the split as its first argument."""

BUNDLED_MODELS: dict[str, Callable[[], str]] = {"arithmetic-lm": bundled_model_path}
"""Folders of bundled models by the name that a recipe gives as `model_name_or_path`."""
