"""The tables that a recipe's data consist of, and what the first rows of each tell."""

from dataclasses import dataclass

from trl_algos.data.files import FirstRows
from trl_algos.data.forms import form_column_problems, row_problems
from trl_algos.data.pairs import sides_of
from trl_algos.data.prompts import PromptForm, renamed_row
from trl_algos.data.sources import kind_of, known_splits, source_rows
from trl_algos.data.tasks import task_columns
from trl_algos.errors import nearest
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS
from trl_algos.preference_rows import SIDES, kind_of_side


@dataclass(frozen=True)
class Table:
    """One table: the training rows, one entry of `datasets`, or the test rows.

    Args:
        key: the recipe's key that names it.
        split_key: the key that says which split.
        name: a name without problems.
        split: the split.
        selected: columns to keep; None for all.
    """

    key: str
    split_key: str
    name: str
    split: str
    selected: list[str] | None = None

    def first_rows(self) -> FirstRows | None:
        """The first rows with all columns, no rows of a generated task, or None where only loading tells.

        Raises:
            ValueError: they cannot be read; the message says why, in one line.
        """
        if kind_of(self.name) == "task":
            return FirstRows(task_columns(self.name), [])
        return source_rows(self.name, self.split)

    def holds_messages(self, form: PromptForm) -> bool:
        """Whether the first row is of messages as it stands, as far as can be told without loading.

        Args:
            form: how prompts or pairs are made of the rows; the form of data without problems.
        """
        try:
            found = self.first_rows()
        except ValueError:
            return False
        row = renamed_row(found.rows[0][1], form) if found and found.rows else {}
        sides = ("prompt",) if form.rows == "prompts" else sides_of(row, form)
        return any(kind_of_side(row.get(side)) == "messages" for side in sides)

    def columns(self) -> list[str] | None:
        """Columns that are kept, or None where only loading tells."""
        if self.selected is not None:
            return self.selected
        try:
            found = self.first_rows()
        except ValueError:
            return None
        return found.columns if found else None

    def problems(self, form: PromptForm) -> list[str]:
        """What is wrong with the split, the columns and the first rows.

        Args:
            form: how prompts or pairs are made of them.
        """
        problem = self._split_problem() or self._task_problem(form)
        if problem:
            return [problem]
        try:
            found = self.first_rows()
        except ValueError as error:
            return [f"`{self.key}`: {self.name!r} {error}."]
        if found is None:
            return []
        missing = [column for column in self.selected or () if column not in found.columns]
        if missing:
            return [self._missing_column(column, found.columns) for column in missing]
        columns = found.columns if self.selected is None else self.selected
        # What a line of JSON leaves out is null in the table.
        rows = ((where, renamed_row({name: row.get(name) for name in columns}, form)) for where, row in found.rows)
        return form_column_problems(self.key, self.name, columns, form) or row_problems(
            f"`{self.key}`: {self.name!r}", rows, form
        )

    def _task_problem(self, form: PromptForm) -> str:
        """Generated pairs where prompts are wanted; of other data the prompts of pairs are as good as any."""
        if form.rows == "pairs" or kind_of(self.name) != "task" or not {*SIDES} <= {*task_columns(self.name)}:
            return ""
        return (
            f"`{self.key}`: {self.name!r} makes preference pairs, which are for {', '.join(PREFERENCE_ALGORITHMS)}; "
            "an algorithm that samples takes 'arithmetic'."
        )

    def _split_problem(self) -> str:
        splits = known_splits(self.name)
        if splits and self.split not in splits:
            return (
                f"`{self.split_key}`: {self.split!r} is not a split of {self.name!r}, which has {', '.join(splits)}."
            )
        if splits == [] and self.split.partition("[")[0] != "train":
            return f"`{self.split_key}`: {self.split!r} is not a split of {self.name!r}, which has only train."
        return ""

    def _missing_column(self, column: str, columns: list[str]) -> str:
        return (
            f"`{self.key}`: `columns`: {column!r} is not a column of {self.name!r}, which has {', '.join(columns)}."
            f"{nearest(column, columns)}"
        )
