"""From the columns of a row to the preference pair that the trainer gets, and what can be wrong with one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trl_algos.data.prompts import (
    PromptForm,
    filled,
    mapped,
    mapping_problems,
    system_message,
    template_fields,
    template_problems,
)
from trl_algos.errors import nearest
from trl_algos.preference_algorithms import preference_keys
from trl_algos.preference_rows import ID_SIDES, NUMBERS, SIDES, kind_of_side, row_problem

# What others call the sides, for the hint.
_LIKELY = {
    "chosen": ("preferred", "better", "accepted", "winner", "response_chosen"),
    "rejected": ("dispreferred", "worse", "refused", "loser", "response_rejected"),
}


def sides_of(columns: Iterable[str], form: PromptForm) -> tuple[str, str]:
    """The columns that hold the two sides: token ids where there are some and may be, else text or messages."""
    return ID_SIDES if form.token_ids and {*ID_SIDES} <= {*columns} else SIDES


def pair_column_problems(key: str, source: str, columns: Sequence[str], form: PromptForm) -> list[str]:
    """What a form of pairs asks of the columns in vain.

    Args:
        key: the recipe's key that names the data.
        source: the data set, for the message.
        columns: its columns, before renaming.
        form: a form without problems of its own.
    """
    problems = list(mapping_problems(source, columns, form))
    if problems:
        return problems
    new = mapped(columns, form)
    return [
        *template_problems(source, columns, form),
        *_missing_sides(key, source, new, form),
        *(_settings_on_ids(source, form) if sides_of(new, form) == ID_SIDES else ()),
    ]


def _missing_sides(key: str, source: str, columns: Sequence[str], form: PromptForm) -> Iterator[str]:
    missing = [side for side in sides_of(columns, form) if side not in columns]
    if not missing:
        return
    if {*ID_SIDES} <= {*columns}:
        takers = ", ".join(preference_keys("reward_model"))
        yield (
            f"`{key}`: {source!r} holds pairs of token ids ({' and '.join(map(repr, ID_SIDES))}), which are for "
            f"{takers} alone; give `chosen` and `rejected` as text or messages."
        )
        return
    has = f"`{key}`: {source!r} has no column {' and no '.join(map(repr, missing))}, but {', '.join(columns)}; "
    hints = {side: _likely(side, columns) for side in missing}
    found = ", ".join(f"{side}: {hint}" for side, hint in hints.items() if hint)
    if found:
        yield f"{has}say which it is, such as `column_mapping: {{{found}}}`."
    elif "prompt" in columns and len(missing) == len(SIDES):
        yield f"{has}prompts without pairs of answers are for algorithms that sample, such as grpo."
    else:
        yield f"{has}a preference pair needs `chosen` and `rejected`; rename columns by `column_mapping`."


def _likely(side: str, columns: Sequence[str]) -> str:
    free = [column for column in columns if column not in (*SIDES, "prompt")]
    known = next((name for name in _LIKELY[side] if name in free), "")
    return known or nearest(side, free).partition("'")[2].partition("'")[0]


def _settings_on_ids(source: str, form: PromptForm) -> Iterator[str]:
    settings = {
        "prompt_template": form.template,
        "system_prompt": form.system,
        "conversational": form.conversational,
    }
    for key, value in settings.items():
        if value is not None:
            yield f"`{key}`: {value!r} is not used: {source!r} holds token ids, to which nothing is added."


def used_columns(columns: Sequence[str], form: PromptForm) -> list[str]:
    """Columns that a pair is made of.

    Args:
        columns: of the rows, renamed already.
        form: how to make it.
    """
    prompt = template_fields(form.template) if form.template is not None else ["prompt"]
    wanted = dict.fromkeys([*prompt, *sides_of(columns, form), *NUMBERS])
    return [column for column in wanted if column in columns]


def made_pair(row: Mapping[str, Any], form: PromptForm) -> dict[str, Any]:
    """The pair of a row whose columns are renamed already: `prompt` where there is one, both sides, and numbers.

    Text becomes messages where the form says so: the prompt the user's, each side the assistant's. A system message
    goes in front of the prompt, or of both sides where the prompt is part of these.

    Args:
        row: values by column.
        form: how to make it.

    Raises:
        ValueError: there is no pair in the row that TRL could use; the message says why.
    """
    sides = sides_of(row, form)
    pair = {key: row[key] for key in ("prompt", *sides) if key in row}
    pair |= {key: _number(row[key]) for key in NUMBERS if key in row}
    if form.template is not None:
        pair["prompt"] = filled(form.template, row)
    if sides == ID_SIDES:
        pair.pop("prompt", None)
    problem = row_problem(pair, sides)
    if problem:
        raise ValueError(problem.removesuffix("."))
    if kind_of_side(pair[sides[0]]) == "messages":
        _check_messages(pair, form)
    return pair | (_messages(pair, form) if form.as_messages else {})


def _number(value: Any) -> Any:
    """The number that a text spells, as CSV files have them; `row_problem` judges everything else."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_messages(pair: Mapping[str, Any], form: PromptForm) -> None:
    if form.conversational is False:
        raise ValueError("the pair is of messages, but `conversational` is false")
    for side in SIDES if "prompt" in pair else ():
        if _said(pair[side][0]) == _said(pair["prompt"][0]):
            raise ValueError(
                f"`{side}` begins with the prompt, which stands in `prompt`, too; put that one aside by "
                "`column_mapping: {other_name: prompt}`"
            )


def _said(message: Mapping[str, Any]) -> tuple[Any, Any]:
    return message["role"], message["content"]


def _messages(pair: Mapping[str, Any], form: PromptForm) -> dict[str, Any]:
    if kind_of_side(pair["chosen"]) == "text":
        if "prompt" not in pair:
            raise ValueError("there is no `prompt`, without which text cannot become messages")
        prompt = [{"role": "user", "content": pair["prompt"]}]
        answers = {side: [{"role": "assistant", "content": pair[side]}] for side in SIDES}
        return {"prompt": [*system_message(form, prompt), *prompt], **answers}
    return {key: _with_system(key, pair[key], form) for key in (("prompt",) if "prompt" in pair else SIDES)}


def _with_system(key: str, messages: list[dict[str, Any]], form: PromptForm) -> list[dict[str, Any]]:
    role = messages[0]["role"]
    if form.system is not None and role in ("system", "assistant"):
        what = "a system message" if role == "system" else "an answer, before which there is no prompt"
        raise ValueError(f"`{key}` begins with {what}, so `system_prompt` cannot be put in front")
    return [*system_message(form, messages), *messages]


def pair_problems(source: str, rows: Iterable[tuple[str, Mapping[str, Any]]], form: PromptForm) -> list[str]:
    """One message for all rows that are no pairs, or for pairs that are all of equal sides, which teach nothing.

    Args:
        source: key and name of the data, with which the message begins.
        rows: where each row stands, and its values under the new names.
        form: how pairs are made.
    """
    first, wrong, equal, total, kind = "", 0, 0, 0, None
    for where, row in rows:
        total += 1
        try:
            pair = made_pair(row, form)
            chosen, rejected = (pair[side] for side in sides_of(row, form))
            kind = kind or kind_of_side(chosen)
            if kind_of_side(chosen) != kind:
                raise ValueError(f"the pair is of {kind_of_side(chosen)}, but of {kind} in other rows")
            equal += chosen == rejected
        except ValueError as error:
            wrong += 1
            first = first or f"{where}: {error}"
    if wrong:
        others = f"; {wrong} rows cannot be used" if wrong > 1 else ""
        return [f"{source}: {first}{others}."]
    if total and equal == total:
        return [f"{source}: chosen and rejected are equal in all {total} rows looked at, which teach nothing."]
    return []
