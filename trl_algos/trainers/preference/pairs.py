"""Preference pairs before training: rows that are none are refused, those that teach nothing dropped and counted."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from datasets import IterableDataset

from trl_algos.errors import ConfigError, counted
from trl_algos.preference_rows import ID_SIDES, NUMBERS, SIDES, SOURCE, row_problem

_SHOWN = 3

Judge = Callable[[Mapping[str, Any]], str | None]
"""Tokenised row -> why it teaches nothing, or None."""


def checked_pairs(dataset: Any, name: str, sides: tuple[str, str] = SIDES) -> Any:
    """The data set, once every row of it is a pair; a stream is checked row by row as it is read.

    Args:
        dataset: rows with text or messages, or with token ids under `sides`.
        name: what the user calls it: train, eval, or a key.
        sides: columns of the two sides.

    Raises:
        ConfigError: a row lacks a side, or a side is neither text nor messages; names the first rows.
    """
    if isinstance(dataset, IterableDataset):
        return dataset.map(_checked_row, with_indices=True, fn_kwargs={"name": name, "sides": sides})
    columns = [key for key in (*sides, "prompt", *NUMBERS, SOURCE) if key in dataset.column_names]
    missing = [side for side in sides if side not in columns]
    if missing:
        raise ConfigError(
            [
                f"`{name}` data has no column `{'`, `'.join(missing)}` (it has {', '.join(dataset.column_names)}); a "
                "pair needs `chosen` and `rejected`, and may have a `prompt`."
            ]
        )
    if not len(dataset):
        raise ConfigError([f"`{name}` data has no rows."])
    found = ((place, row_problem(row, sides)) for place, row in enumerate(dataset.select_columns(columns)))
    _refuse(name, [(place, problem) for place, problem in found if problem])
    return dataset


def _checked_row(row: dict[str, Any], place: int, name: str, sides: tuple[str, str]) -> dict[str, Any]:
    problem = row_problem(row, sides)
    if problem:
        _refuse(name, [(place, problem)])
    return row


def check_vocabulary(dataset: Any, name: str, size: int) -> Any:
    """The data set with `ID_SIDES`, once every id is one of the vocabulary; a stream is checked as it is read.

    Args:
        dataset: rows with token ids.
        name: what the user calls it.
        size: of the vocabulary.

    Raises:
        ConfigError: an id is none of the model's tokens; names the first rows.
    """
    if isinstance(dataset, IterableDataset):
        return dataset.map(_in_vocabulary, with_indices=True, fn_kwargs={"name": name, "size": size})
    found = ((place, _id_problem(row, size)) for place, row in enumerate(dataset.select_columns(list(ID_SIDES))))
    _refuse(name, [(place, problem) for place, problem in found if problem])
    return dataset


def _in_vocabulary(row: dict[str, Any], place: int, name: str, size: int) -> dict[str, Any]:
    problem = _id_problem(row, size)
    if problem:
        _refuse(name, [(place, problem)])
    return row


def _id_problem(row: Mapping[str, Any], size: int) -> str | None:
    wrong = [(key, token) for key in ID_SIDES for token in row[key] if not 0 <= token < size]
    return f"`{wrong[0][0]}` has token {wrong[0][1]}, but the model has tokens 0 to {size - 1}." if wrong else None


def _refuse(name: str, problems: list[tuple[int, str]]) -> None:
    """Raise `ConfigError` where there are problems (place of the row, what it has), naming the first."""
    if problems:
        more = len(problems) - _SHOWN
        told = [f"`{name}` data, row {place}: {problem}" for place, problem in problems[:_SHOWN]]
        raise ConfigError([*told, *([f"... and {counted(more, 'more row')}."] if more > 0 else [])])


def teaching_pairs(dataset: Any, name: str, judge: Judge, warn: bool) -> tuple[Any, Counter[str]]:
    """The rows that `judge` finds nothing against, and how many were dropped for which reason.

    Args:
        dataset: tokenised rows.
        name: what the user calls it.
        judge: says why a row teaches nothing.
        warn: whether this process says what was dropped.

    Returns:
        The rows, and reason -> count. Those of a stream are counted as this process reads them, each time anew.

    Raises:
        ConfigError: no row is left.
    """
    dropped: Counter[str] = Counter()
    if isinstance(dataset, IterableDataset):
        return dataset.filter(_counting(judge, dropped)), dropped
    verdicts = [judge(row) for row in dataset]
    kept = [place for place, verdict in enumerate(verdicts) if verdict is None]
    dropped.update(verdict for verdict in verdicts if verdict is not None)
    if not dropped:
        return dataset, dropped
    message = f"`{name}` data: {dropped.total()} of {counted(len(verdicts), 'pair')} dropped ({_reasons(dropped)})."
    if not kept:
        raise ConfigError([f"{message} Nothing is left to train on."])
    if warn:
        warnings.warn(message, UserWarning, stacklevel=2)
    return dataset.select(kept), dropped


def _counting(judge: Judge, dropped: Counter[str]) -> Callable[[Mapping[str, Any]], bool]:
    def keeps(row: Mapping[str, Any]) -> bool:
        verdict = judge(row)
        if verdict is not None:
            dropped[verdict] += 1
        return verdict is None

    return keeps


def nothing_left(name: str, dropped: Mapping[str, int]) -> str:
    """Message for data that give no batch to train on.

    Args:
        name: what the user calls them.
        dropped: reason -> number of pairs that a stream has dropped for it.
    """
    if not dropped:
        return f"`{name}` data fill no batch to train on."
    total = counted(sum(dropped.values()), "pair")
    return f"`{name}` data: {total} dropped as the stream was read ({_reasons(dropped)}). Nothing is left to train on."


def warn_of_dropped(name: str, dataset: Any, dropped: Mapping[str, int]) -> None:
    """Say what a stream has dropped so far; of other data it has been said before."""
    if isinstance(dataset, IterableDataset) and dropped:
        total = counted(sum(dropped.values()), "pair")
        message = f"`{name}` data: {total} dropped as the stream was read ({_reasons(dropped)})."
        warnings.warn(message, UserWarning, stacklevel=2)


def _reasons(dropped: Mapping[str, int]) -> str:
    return "; ".join(f"{count}: {reason}" for reason, count in dropped.items())


def without_limit(args: Any) -> Any:
    """`args` for TRL's preparation without `max_length`, so that the judge finds what is too long, and counts it."""
    own = copy.copy(args)
    own.max_length = None
    return own


def image_columns(datasets: Iterable[Any]) -> list[str]:
    """Columns of images in data sets: each rows, a stream (whose columns may not be known), sets by name, or None."""
    found = set()
    for data in datasets:
        for part in data.values() if isinstance(data, Mapping) else (data,):
            found |= {"image", "images"} & set(getattr(part, "column_names", None) or ())
    return sorted(found)


def policy_judge(max_length: int | None, truncation_mode: str) -> Judge:
    """Judge of rows with `prompt_ids`, `chosen_ids` and `rejected_ids`, cut as TRL's collator cuts them."""

    def judge(row: Mapping[str, Any]) -> str | None:
        if max_length is not None and truncation_mode == "keep_start" and len(row["prompt_ids"]) >= max_length:
            return f"the prompt fills `max_length` ({max_length})"
        sides = [_cut(row["prompt_ids"], row[f"{side}_ids"], max_length, truncation_mode) for side in SIDES]
        # The first token of a sequence is predicted by nothing.
        if not all(any(mask[1:]) for _, mask in sides):
            return "no completion token is left"
        return "chosen and rejected are equal" if sides[0] == sides[1] else None

    return judge


def _cut(
    prompt: list[int], completion: list[int], max_length: int | None, truncation_mode: str
) -> tuple[list[int], list[int]]:
    ids, mask = prompt + completion, [0] * len(prompt) + [1] * len(completion)
    if max_length is None:
        return ids, mask
    part = slice(None, max_length) if truncation_mode == "keep_start" else slice(-max_length, None)
    return ids[part], mask[part]


def score_judge(max_length: int | None, pad_token_id: int) -> Judge:
    """Judge of rows with `chosen_ids` and `rejected_ids`, of which what is too long for TRL is left out.

    It raises `ConfigError` for a row that ends with the padding token: a sequence classifier reads the score at the
    last token that is none.
    """

    def judge(row: Mapping[str, Any]) -> str | None:
        chosen, rejected = row["chosen_ids"], row["rejected_ids"]
        if not (chosen and rejected):
            return "no token is left"
        if max_length is not None and max(len(chosen), len(rejected)) > max_length:
            return f"longer than `max_length` ({max_length})"
        if chosen == rejected:
            return "chosen and rejected are equal"
        if pad_token_id in (chosen[-1], rejected[-1]):
            raise ConfigError(
                [
                    f"`processing_class`: a text ends with token {pad_token_id}, which is the padding token, too, so "
                    "that its score would be read before it. Set `pad_token` of the tokenizer to a token of its "
                    "vocabulary that no text ends with."
                ]
            )
        return None

    return judge
