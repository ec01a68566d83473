"""From the columns of a row to the prompt that the trainer gets, and what can be wrong with one."""

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_algos.errors import nearest
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS
from trl_algos.preference_rows import SIDES

Prompt = str | list[dict[str, Any]]

# What TRL passes to every reward function itself: a column of that name would be passed twice, or be lost.
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

# A message has at least one of them besides its role.
_CONTENT = {"content", "tool_calls"}

# Columns that often hold the prompt, for the hint.
_LIKELY = ("question", "problem", "query", "instruction", "input", "text", "messages")


@dataclass(frozen=True)
class PromptForm:
    """How a prompt is made of a row.

    Args:
        mapping: new names of columns, with the old ones.
        template: format string over the renamed columns; None where the column `prompt` is the prompt.
        system: text of a system message to put in front.
        conversational: whether text becomes messages; None: only where there is a system message.
        rows: "prompts" or "pairs".
        token_ids: whether a pair may be of token ids, in columns of their own.
    """

    mapping: Mapping[str, str]
    template: str | None = None
    system: str | None = None
    conversational: bool | None = None
    rows: str = "prompts"
    token_ids: bool = False

    @property
    def as_messages(self) -> bool:
        """Whether text becomes lists of messages."""
        return self.system is not None if self.conversational is None else self.conversational


def template_fields(template: str) -> list[str]:
    """Columns that a template names, in its order.

    Args:
        template: format string such as `"Question: {question}"`; `{{` and `}}` stand for braces.

    Raises:
        ValueError: it is no valid format string, or has fields that are no plain names.
    """
    names = []
    for _, name, layout, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if not name or name.isdigit():
            raise ValueError(f"{{{name}}} names no column; write {{column}}, and {{{{ }}}} for braces in the text")
        if set(name) & set(".[]{") or "{" in (layout or "") or conversion not in (None, "r", "s", "a"):
            raise ValueError(f"{{{name}}} is not the plain name of a column; write {{{{ }}}} for braces in the text")
        names.append(name)
    return names


def form_problems(form: PromptForm) -> list[str]:
    """What is wrong with a form in itself, whatever the columns."""
    problems = []
    old_names = list(form.mapping.values())
    for old in dict.fromkeys(name for name in old_names if old_names.count(name) > 1):
        problems.append(f"`column_mapping`: {old!r} gets two new names; a column has one.")
    if form.template is not None:
        try:
            if not template_fields(form.template):
                problems.append(
                    f"`prompt_template`: {form.template!r} names no column, so that all prompts would be the same; "
                    "write the column's name in braces, such as {question}."
                )
        except ValueError as error:
            problems.append(f"`prompt_template`: {form.template!r} is not a template: {error}.")
    if form.system is not None and not form.system.strip():
        problems.append("`system_prompt`: is empty; leave it out for none.")
    if form.system is not None and form.conversational is False:
        problems.append("`conversational`: false, but `system_prompt` is a message; leave out one of them.")
    return problems


def mapped(columns: Sequence[str], form: PromptForm) -> list[str]:
    """Columns after renaming, and with the prompt that the template makes."""
    new_names = {old: new for new, old in form.mapping.items()}
    renamed = [new_names.get(column, column) for column in columns]
    return renamed + (["prompt"] if form.template is not None and "prompt" not in renamed else [])


def column_problems(key: str, source: str, columns: Sequence[str], form: PromptForm) -> list[str]:
    """What a form of prompts asks of the columns in vain.

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
    problems += template_problems(source, columns, form)
    if "prompt" not in new:
        likely = next((name for name in _LIKELY if name in new), next(iter(new), "question"))
        pairs = f" Its preference pairs are for {', '.join(PREFERENCE_ALGORITHMS)}." if {*SIDES} <= {*new} else ""
        problems.append(
            f"`{key}`: {source!r} has no column 'prompt', but {', '.join(new) or 'none at all'}; say what the prompt "
            f'is, such as `prompt_template: "{{{likely}}}"` or `column_mapping: {{prompt: {likely}}}`.{pairs}'
        )
    for name in RESERVED_COLUMNS:
        if name in new:
            problems.append(
                f"`{key}`: {source!r} has a column {name!r}, which is what TRL passes to reward functions under that "
                f"name; rename it by `column_mapping: {{other_name: {name}}}`."
            )
    return problems


def template_problems(source: str, columns: Sequence[str], form: PromptForm) -> Iterator[str]:
    """Columns that the template names and that are not there.

    Args:
        source: the data set, for the message.
        columns: its columns, before renaming.
        form: a form whose mapping is without problems.
    """
    there = [column for column in mapped(columns, form) if column in columns or column in form.mapping]
    for name in template_fields(form.template) if form.template is not None else ():
        if name not in there:
            yield (
                f"`prompt_template`: {{{name}}} is not a column of {source!r}, which has {', '.join(there)}."
                f"{nearest(name, there)}"
            )


def mapping_problems(source: str, columns: Sequence[str], form: PromptForm) -> Iterator[str]:
    """Columns that cannot be renamed.

    Args:
        source: the data set, for the message.
        columns: its columns, before renaming.
        form: a form without problems of its own.
    """
    for new, old in form.mapping.items():
        if old not in columns:
            hint = f" It is `new: old`: write `{old}: {new}`." if new in columns else nearest(old, columns)
            yield f"`column_mapping`: {old!r} is not a column of {source!r}, which has {', '.join(columns)}.{hint}"
        elif new != old and new in columns and new not in form.mapping.values():
            yield f"`column_mapping`: {source!r} has a column {new!r} already, so {old!r} cannot take that name."


def renamed_row(row: Mapping[str, Any], form: PromptForm) -> dict[str, Any]:
    """A row with the new names of its columns."""
    new_names = {old: new for new, old in form.mapping.items()}
    return {new_names.get(column, column): value for column, value in row.items()}


def made_prompt(row: Mapping[str, Any], form: PromptForm) -> Prompt:
    """The prompt of a row whose columns are renamed already.

    Args:
        row: values by column.
        form: how to make it.

    Raises:
        ValueError: there is no prompt in the row that TRL could use; the message says why.
    """
    prompt = row.get("prompt") if form.template is None else filled(form.template, row)
    if prompt is None:
        raise ValueError("the prompt is null")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        messages = [{"role": "user", "content": prompt}]
        return [*system_message(form, messages), *messages] if form.as_messages else prompt
    _check_messages(prompt)
    if form.conversational is False:
        raise ValueError("the prompt is a list of messages, but `conversational` is false")
    if form.system is not None and prompt[0]["role"] == "system":
        raise ValueError("the prompt starts with a system message already, so `system_prompt` cannot be put in front")
    return [*system_message(form, prompt), *prompt]


def filled(template: str, row: Mapping[str, Any]) -> str:
    """The template's text for a row.

    Raises:
        ValueError: a value is missing, or cannot be laid out.
    """
    for name in template_fields(template):
        value = row.get(name)
        if value is None or not isinstance(value, str | int | float):
            kind = "null" if value is None else f"a {type(value).__name__}, which a template cannot lay out"
            raise ValueError(f"{name} is {kind}")
    try:
        return template.format_map(row)
    except ValueError as error:
        raise ValueError(f"`prompt_template` does not fit: {error}") from error


def system_message(form: PromptForm, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system message, its content in parts where those of the others are."""
    if form.system is None:
        return []
    in_parts = any(isinstance(message.get("content"), list) for message in messages)
    return [{"role": "system", "content": [{"type": "text", "text": form.system}] if in_parts else form.system}]


def _check_messages(prompt: Any) -> None:
    if not isinstance(prompt, list):
        raise ValueError(f"the prompt is a {type(prompt).__name__}, not text nor a list of messages")
    if not prompt:
        raise ValueError("the prompt is an empty list")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not {*message} & _CONTENT:
            raise ValueError(f"the prompt holds {message!r:.80}, which is not a message with a role and content")
    if not any(message.get("content") for message in prompt):
        raise ValueError("the prompt's messages are all empty")


def prompt_problems(source: str, rows: Iterable[tuple[str, Mapping[str, Any]]], form: PromptForm) -> list[str]:
    """One message for all rows whose prompt cannot be used: the first of them, and how many there are.

    Args:
        source: key and name of the data, with which the message begins.
        rows: where each row stands, and its values under the new names.
        form: how prompts are made.
    """
    first, count, kind = "", 0, None
    for where, row in rows:
        try:
            prompt = made_prompt(row, form)
            kind = kind or type(prompt)
            if type(prompt) is not kind:
                raise ValueError("the prompt is text in some rows and a list of messages in others")
        except ValueError as error:
            count += 1
            first = first or f"{where}: {error}"
    others = f"; {count} rows cannot be used" if count > 1 else ""
    return [f"{source}: {first}{others}."] if count else []
