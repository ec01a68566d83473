"""Rows of prompts and rows of pairs: what is read of each, made of it, and wrong with it, by the form's `rows`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trl_algos.data.pairs import made_pair, pair_column_problems, pair_problems, used_columns
from trl_algos.data.prompts import PromptForm, column_problems, made_prompt, prompt_problems, template_fields
from trl_algos.preference_rows import NUMBERS


def form_column_problems(key: str, source: str, columns: Sequence[str], form: PromptForm) -> list[str]:
    """What the form asks of the columns in vain.

    Args:
        key: the recipe's key that names the data.
        source: the data set, for the message.
        columns: its columns, before renaming.
        form: a form without problems of its own.
    """
    judge = pair_column_problems if form.rows == "pairs" else column_problems
    return judge(key, source, columns, form)


def row_problems(source: str, rows: Iterable[tuple[str, Mapping[str, Any]]], form: PromptForm) -> list[str]:
    """One message for all rows that cannot be used.

    Args:
        source: key and name of the data, with which the message begins.
        rows: where each row stands, and its values under the new names.
        form: how rows are made.
    """
    judge = pair_problems if form.rows == "pairs" else prompt_problems
    return judge(source, rows, form)


def columns_to_read(columns: Sequence[str], form: PromptForm) -> list[str]:
    """Columns that a row is made of.

    Args:
        columns: of the rows, renamed already.
        form: a form that fits them.
    """
    if form.rows == "pairs":
        return used_columns(columns, form)
    return list(dict.fromkeys(template_fields(form.template))) if form.template is not None else ["prompt"]


def made_columns(row: Mapping[str, Any], form: PromptForm) -> dict[str, Any]:
    """The columns that are made of a row without problems."""
    return made_pair(row, form) if form.rows == "pairs" else {"prompt": made_prompt(row, form)}


def changes(row: Mapping[str, Any], form: PromptForm) -> bool:
    """Whether rows such as this one hold something else than is made of them."""
    numbers_as_text = form.rows == "pairs" and any(isinstance(row.get(key), str) for key in NUMBERS)
    return form.template is not None or form.as_messages or numbers_as_text
