"""What a recipe says about its data, and every mistake in it that can be found before anything is loaded."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from trl_algos.data.arithmetic_task import SOURCES
from trl_algos.data.entries import entry_problems
from trl_algos.data.prompts import PromptForm, form_problems, mapped
from trl_algos.data.sources import kind_of, known_splits, source_problems
from trl_algos.data.tables import Table
from trl_algos.data.tasks import parameter_problems


@dataclass(frozen=True)
class DataSpec:
    """The keys of a recipe that are about data.

    Args:
        dataset_name: a bundled task, `reasoning_gym/<task>`, a file (.json, .jsonl, .csv, .parquet, .arrow), a folder
            made by `save_to_disk`, a folder of data files, or a data set of the Hub.
        dataset_config: configuration of a data set of the Hub.
        dataset_train_split: split to train on.
        dataset_test_split: split to measure.
        dataset_streaming: read files and data sets of the Hub while training, instead of before.
        datasets: several data sets in a row, instead of `dataset_name`: blocks of `path`, `name`, `data_dir`,
            `data_files`, `split`, `columns`, `fraction`, as in TRL.
        streaming: the same as `dataset_streaming`, for `datasets`.
        test_split_size: rows that are taken out of the training split for the test split, as a share or a number.
        dataset_parameters: parameters of a generated task: `size`, `test_size`, `seed`, and its own.
        dataset_test_name: another data set or file for the test split.
        column_mapping: new names of columns, with the old ones.
        prompt_template: format string over the renamed columns that makes the column `prompt`.
        system_prompt: text of a system message that is put in front of every prompt.
        conversational: make messages of text: the prompt the user's, the sides of a pair the assistant's; by default
            where there is a system prompt.
        rows: what a row is: `prompts` or `pairs`. It follows from the algorithm and is no key of a recipe.
        token_ids: whether pairs may be of token ids, as reward models take them. It follows from the algorithm, too.
    """

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    datasets: list[dict[str, Any]] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None
    dataset_parameters: dict[str, Any] | None = None
    dataset_test_name: str | None = None
    column_mapping: dict[str, str] | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    conversational: bool | None = None
    rows: str = "prompts"
    token_ids: bool = False

    @property
    def prompt_form(self) -> PromptForm:
        """How prompts or pairs are made of rows."""
        mapping = self.column_mapping or {}
        made = self.prompt_template, self.system_prompt, self.conversational
        return PromptForm(mapping, *made, self.rows, self.token_ids)


def data_problems(spec: DataSpec, needs_test: bool) -> list[str]:
    """Everything wrong with the data that can be found on this machine, without loading or generating it.

    Args:
        spec: what the recipe says.
        needs_test: whether something measures the test split.

    Returns:
        One message per problem, in the order of the recipe's keys. Empty is no promise: data sets of the Hub, and rows
        beyond the first hundred, show themselves only when they are loaded.
    """
    problems = _type_problems(spec)
    if problems:
        return problems
    if not spec.dataset_name and not spec.datasets:
        known = ", ".join(("a file", "a folder", "a data set of the Hub", "reasoning_gym/<task>", *SOURCES))
        return [f"`dataset_name`: not set; give one of {known}."]
    if spec.dataset_name and spec.datasets:
        return ["`dataset_name`: set besides `datasets`; leave out one of them."]
    problems += entry_problems(spec.datasets, spec.streaming)
    for key in ("dataset_name", "dataset_test_name"):
        problems += source_problems(key, getattr(spec, key)) if getattr(spec, key) else []
    problems += form_problems(spec.prompt_form)
    if problems:
        return problems
    problems += [*_unused_settings(spec, needs_test), *_test_problems(spec, needs_test)]
    if spec.dataset_parameters and spec.dataset_name and kind_of(spec.dataset_name) == "task":
        problems += parameter_problems(spec.dataset_name, spec.dataset_parameters)
    for table in tables(spec, needs_test):
        problems += table.problems(spec.prompt_form)
    return list(dict.fromkeys(problems + _unequal_columns(spec)))


def local_columns(spec: DataSpec) -> list[str] | None:
    """Columns that rows will have after renaming and with their prompt.

    Args:
        spec: a spec without problems.

    Returns:
        Their names, or None where only loading the data tells.
    """
    for table in tables(spec, needs_test=False):
        columns = table.columns()
        if columns is not None:
            return mapped(columns, spec.prompt_form)
    return None


def local_messages(spec: DataSpec) -> str | None:
    """Key and name of the first data whose rows are messages already, where they lie here: `` `key`: 'name' ``.

    Args:
        spec: a spec without problems.
    """
    if spec.prompt_template is not None and spec.rows == "prompts":
        return None  # the prompt is made of it
    found = (table for table in tables(spec, needs_test=False) if table.holds_messages(spec.prompt_form))
    return next((f"`{table.key}`: {table.name!r}" for table in found), None)


def tables(spec: DataSpec, needs_test: bool) -> list[Table]:
    """The tables that are read: the training rows or their parts, then the test rows where they are a table apart.

    Args:
        spec: a spec whose names are without problems.
        needs_test: whether something measures the test split.
    """
    found = [
        Table("datasets", "datasets", entry["path"], entry.get("split") or "train", entry.get("columns"))
        for entry in spec.datasets
    ]
    if spec.dataset_name:
        found.append(Table("dataset_name", "dataset_train_split", spec.dataset_name, spec.dataset_train_split))
    return found + _test_tables(spec, needs_test)


def _test_tables(spec: DataSpec, needs_test: bool) -> list[Table]:
    key = "dataset_test_name" if spec.dataset_test_name else "dataset_name"
    name = spec.dataset_test_name or spec.dataset_name
    if not needs_test or not name or spec.test_split_size is not None:
        return []
    if known_splits(name) == []:
        return [Table(key, key, name, "train")]
    return [Table(key, "dataset_test_split", name, spec.dataset_test_split)]


def unequal_columns(first: tuple[str, list[str]], other: tuple[str, list[str]]) -> str:
    """The message for two entries of `datasets`, by path and columns, that cannot follow each other."""
    return (
        f"`datasets`: {other[0]!r} has the columns {', '.join(other[1])}, but {first[0]!r} has {', '.join(first[1])}; "
        "select equal ones by `columns`."
    )


_TEXT = ((str, type(None)), "text")
_FLAG = ((bool,), "true or false")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(
        ("dataset_name", "dataset_config", "dataset_test_name", "prompt_template", "system_prompt"), _TEXT
    ),
    **dict.fromkeys(("dataset_train_split", "dataset_test_split"), ((str,), "text")),
    **dict.fromkeys(("dataset_streaming", "streaming"), _FLAG),
    "conversational": ((bool, type(None)), "true or false"),
    "datasets": ((list,), "a list of blocks with a `path`"),
    "dataset_parameters": ((dict, type(None)), "a block of `name: value` lines"),
    "column_mapping": ((dict, type(None)), "a block of `new name: old name` lines"),
    "test_split_size": ((int, float, type(None)), "a number"),
}


def _type_problems(spec: DataSpec) -> list[str]:
    """Values that are not of a key's type, for specs that no recipe's reader has checked."""
    problems = [
        f"`{key}`: {getattr(spec, key)!r} is a {type(getattr(spec, key)).__name__}; it must be {allowed}."
        for key, (types, allowed) in _TYPES.items()
        if not isinstance(getattr(spec, key), types)
    ]
    for new, old in (spec.column_mapping or {}).items() if not problems else ():
        if not (isinstance(new, str) and isinstance(old, str)):
            problems.append(f"`column_mapping`: {new!r}: {old!r} must be the new name and the old name of a column.")
    return problems


def _unused_settings(spec: DataSpec, needs_test: bool) -> Iterator[str]:
    """Settings that would have no effect."""
    kind = kind_of(spec.dataset_name) if spec.dataset_name else None
    test_name = spec.dataset_test_name or spec.dataset_name
    has_test_splits = test_name is not None and known_splits(test_name) != []
    rules = [
        ("dataset_config", kind in ("hub", "folder"), "only data sets of the Hub have configurations"),
        ("dataset_train_split", kind is not None, "each entry of `datasets` has a `split` of its own"),
        (
            "dataset_test_split",
            spec.test_split_size is None and has_test_splits,
            "the test data have no splits to choose from",
        ),
        (
            "dataset_streaming",
            kind in ("file", "folder", "hub"),
            f"{spec.dataset_name!r} cannot be read as a stream" if kind else "`datasets` has `streaming`",
        ),
        ("streaming", kind is None, "it belongs to `datasets`; set `dataset_streaming`"),
        ("test_split_size", kind != "task", "a generated task has a test split; set `test_size` in its parameters"),
        ("dataset_parameters", kind == "task", "only generated tasks take parameters"),
        ("dataset_test_name", needs_test, f"nothing measures it; set `held_out_{spec.rows}` or `eval_strategy`"),
    ]
    defaults = {f.name: f.default for f in fields(DataSpec)}
    for key, is_used, why in rules:
        value = getattr(spec, key)
        if not is_used and value != defaults[key]:
            yield f"`{key}`: {value!r} is not used: {why}."
    if spec.dataset_test_name and "test_size" in (spec.dataset_parameters or {}):
        yield "`dataset_parameters`: test_size is not used: the test split is `dataset_test_name`."
    if spec.dataset_test_name and spec.test_split_size is not None:
        yield "`test_split_size`: set besides `dataset_test_name`; leave out one of them."


def _test_problems(spec: DataSpec, needs_test: bool) -> Iterator[str]:
    """A test split that cannot be taken out of the rows, or is not there."""
    size = spec.test_split_size
    if size is not None and not 0 < size < 1 and not (size >= 1 and float(size).is_integer()):
        yield f"`test_split_size`: {size!r} is out of range; it must be a share between 0 and 1, or a number of rows."
    if size is not None and (spec.streaming or spec.dataset_streaming):
        yield "`test_split_size`: cannot be used with a stream, whose number of rows is unknown."
    is_one_table = not spec.dataset_name or known_splits(spec.dataset_name) == []
    if needs_test and is_one_table and not spec.dataset_test_name and size is None:
        source = "`datasets`" if spec.datasets else repr(spec.dataset_name)
        yield (
            f"`test_split_size`: not set, but the test split is measured and {source} has none; set it, or "
            "`dataset_test_name`."
        )


def _unequal_columns(spec: DataSpec) -> list[str]:
    """Entries of `datasets` whose columns, where they are known, differ."""
    known = [(table.name, table.columns()) for table in tables(spec, needs_test=False) if spec.datasets]
    found = [(name, columns) for name, columns in known if columns is not None]
    return [unequal_columns(found[0], other) for other in found[1:] if set(other[1]) != set(found[0][1])]
