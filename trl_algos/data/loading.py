"""From what a recipe says about data to the data sets that the trainer takes."""

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trl_algos.data.files import BUILDERS, first_rows
from trl_algos.data.forms import changes, columns_to_read, form_column_problems, made_columns, row_problems
from trl_algos.data.generated import generated
from trl_algos.data.prompts import PromptForm
from trl_algos.data.sources import kind_of, known_splits, local_path
from trl_algos.data.spec import DataSpec, data_problems, tables, unequal_columns
from trl_algos.data.tables import Table
from trl_algos.errors import ConfigError

T = TypeVar("T")
AnyDataset = Any
"""A `Dataset`, or an `IterableDataset` where the recipe asks for a stream; importing the library takes a second."""

# Rows of a stream that are looked at before training.
_STREAM_ROWS = 100
_SPLIT_SEED = 0


def load_data(spec: DataSpec, needs_test: bool) -> tuple[AnyDataset, AnyDataset | None]:
    """The training and the test data, with prompts, or pairs of answers to them, in the form that the recipe asks for.

    Args:
        spec: what the recipe says.
        needs_test: whether something measures the test split.

    Returns:
        Both, the latter None where there is none or nothing needs it. Streams stay streams. All columns are kept, for
        the reward functions.

    Raises:
        ConfigError: with everything that `data_problems` finds, or else what only loading the data shows.
    """
    problems = data_problems(spec, needs_test)
    if problems:
        raise ConfigError(problems)
    found = tables(spec, needs_test)
    if spec.datasets:
        train, tests = _mixture(spec, found[: len(spec.datasets)]), found[len(spec.datasets) :]
    else:
        train, tests = _prepared(_loaded(found[0], spec), found[0], spec.prompt_form), found[1:]
    if spec.test_split_size is not None:
        return _split_in_two(train, spec.test_split_size)
    return train, _prepared(_loaded(tests[0], spec), tests[0], spec.prompt_form) if tests else None


def column_names(dataset: AnyDataset) -> list[str]:
    """Names of the columns; those of a stream that does not know them are read from its first row."""
    return dataset.column_names if dataset.column_names is not None else list(next(iter(dataset), {}))


# Loading


def _loaded(table: Table, spec: DataSpec, entry: Mapping[str, Any] | None = None) -> AnyDataset:
    """A table as it is, without an own prompt yet."""
    kind = kind_of(table.name)
    if kind == "task":
        parameters = spec.dataset_parameters if table.key == "dataset_name" else None
        return generated(table.name, parameters or {}, "test" if table.split == "test" else "train")
    dataset = _saved(table) if kind == "saved" else _built(table, spec, entry or {})
    if hasattr(dataset, "__len__") and not len(dataset):
        raise ConfigError([f"`{table.key}`: {table.name!r} holds no rows."])
    return dataset


def _saved(table: Table) -> AnyDataset:
    from datasets import load_from_disk

    folder = local_path(table.name)
    return _attempt(table, lambda: load_from_disk(str(folder / table.split if known_splits(table.name) else folder)))


def _built(table: Table, spec: DataSpec, entry: Mapping[str, Any]) -> AnyDataset:
    """What the `datasets` library loads: files, folders of files, and data sets of the Hub."""
    from datasets import load_dataset

    kind, path = kind_of(table.name), local_path(table.name)
    settings: dict[str, Any] = {key: entry.get(key) for key in ("name", "data_dir", "data_files")}
    settings |= {"path": table.name, "split": table.split}
    settings["streaming"] = spec.streaming if spec.datasets else spec.dataset_streaming
    if table.key == "dataset_name":
        settings["name"] = spec.dataset_config
    if kind == "file":
        builder = BUILDERS[path.suffix.lower()]
        settings |= {"path": builder, "data_files": str(path)}
        settings |= _csv_settings(path) if builder == "csv" else {}
    elif kind == "folder":
        settings["path"] = str(path)
    if kind in ("file", "folder") and not settings["streaming"]:
        settings["cache_dir"] = str(_cache_folder(path))
    return _attempt(table, lambda: load_dataset(**settings))


def _csv_settings(path: Path) -> dict[str, Any]:
    """Values stay the text that stands in the file: "007" is no number, and "NA" is not missing."""
    from datasets import Features, Value

    columns = first_rows(path).columns
    return {"features": Features({name: Value("string") for name in columns}), "keep_default_na": False}


def _cache_folder(path: Path) -> Path:
    """A folder for the converted data of a file or folder, named by their content.

    By itself the library tells files apart by their time of change, which copying tools may keep.
    """
    import datasets

    digest = hashlib.sha256()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.relative_to(path)} {content}\n".encode())
    return Path(datasets.config.HF_DATASETS_CACHE) / "trl_algos" / digest.hexdigest()[:32]


def _attempt(table: Table, load: Callable[[], T]) -> T:
    """What `load` returns; whatever it raises becomes one line that names the setting."""
    try:
        return load()
    except Exception as error:  # the library raises its own, pyarrow's and the network's errors
        reason = _one_line(error.__cause__ if type(error).__name__ == "DatasetGenerationError" else error)
        key, subject = table.key, repr(table.name)
        if table.key == "dataset_name" and reason.startswith(("Config name is missing", "BuilderConfig")):
            key = "dataset_config"
        elif reason.startswith(("Unknown split", "Bad split", "Instruction")):
            key, subject = table.split_key, f"{table.split!r} of {table.name!r}"
            if key == "dataset_test_split":
                reason = reason.rstrip(".") + "; `test_split_size` takes rows of the training split instead"
        elsewhere = " There is no file or folder of that name here." if kind_of(table.name) == "hub" else ""
        raise ConfigError([f"`{key}`: {subject} cannot be loaded: {reason.rstrip('.')}.{elsewhere}"]) from error


def _one_line(error: BaseException | None) -> str:
    text = " ".join(str(error).split()) if error is not None else ""
    return text or type(error).__name__


# Prompts


def _prepared(dataset: AnyDataset, table: Table, form: PromptForm) -> AnyDataset:
    """The data with columns renamed and prompts made, after a look at all rows, or at the first ones of a stream.

    Raises:
        ConfigError: a column is missing, or there are rows whose prompt cannot be used.
    """
    columns = _attempt(table, lambda: column_names(dataset))
    problems = form_column_problems(table.key, table.name, columns, form)
    if problems:
        raise ConfigError(problems)
    dataset = dataset.rename_columns({old: new for new, old in form.mapping.items() if old != new})
    renamed = {old: new for new, old in form.mapping.items()}
    used = columns_to_read([renamed.get(column, column) for column in columns], form)
    rows = _attempt(table, lambda: row_problems(f"`{table.key}`: {table.name!r}", _rows(dataset, used), form))
    if rows:
        raise ConfigError(rows)
    return _remade(dataset, used, form) if changes(next(_rows(dataset, used))[1], form) else dataset


def _rows(dataset: AnyDataset, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = dataset.select_columns(columns)
    rows = rows if hasattr(rows, "__len__") else rows.take(_STREAM_ROWS)
    number = 0
    for batch in rows.iter(batch_size=1000):
        for values in zip(*(batch[column] for column in columns), strict=True):
            number += 1
            yield f"row {number}", dict(zip(columns, values, strict=True))


def _remade(dataset: AnyDataset, used: list[str], form: PromptForm) -> AnyDataset:
    from datasets import Dataset, concatenate_datasets

    if not isinstance(dataset, Dataset):
        return dataset.map(made_columns, fn_kwargs={"form": form})
    # In memory, and the made columns alone: a cache would outlive a change of what makes them.
    made = dataset.select_columns(used).map(
        made_columns, fn_kwargs={"form": form}, remove_columns=used, keep_in_memory=True, load_from_cache_file=False
    )
    others = [column for column in dataset.column_names if column not in made.column_names]
    return concatenate_datasets([made, dataset.select_columns(others)], axis=1) if others else made


# Several data sets, and a test split taken out of the rows


def _mixture(spec: DataSpec, parts: list[Table]) -> AnyDataset:
    """The entries of `datasets`, one after the other, each as long as its `fraction` says."""
    from datasets import concatenate_datasets

    loaded = [_selected(table, _loaded(table, spec, entry)) for table, entry in zip(parts, spec.datasets, strict=True)]
    fractions = [entry.get("fraction") for entry in spec.datasets]
    if None not in fractions:
        loaded = [
            part.select(range(rows)) for part, rows in zip(loaded, mixture_sizes(loaded, fractions), strict=True)
        ]
    used = [
        (table, part) for table, part in zip(parts, loaded, strict=True) if not hasattr(part, "__len__") or len(part)
    ]
    prepared = [_prepared(part, table, spec.prompt_form) for table, part in used]
    names = [(table.name, part.column_names) for (table, _), part in zip(used, prepared, strict=True)]
    known = [(name, columns) for name, columns in names if columns is not None]
    unequal = [unequal_columns(known[0], other) for other in known[1:] if set(other[1]) != set(known[0][1])]
    if unequal:
        raise ConfigError(unequal)
    try:
        return concatenate_datasets(prepared)
    except (TypeError, ValueError) as error:  # columns of different types
        raise ConfigError([f"`datasets`: the entries cannot follow each other: {_one_line(error)}"]) from error


def mixture_sizes(parts: list[Any], fractions: list[Any]) -> list[int]:
    """Rows of each part of a mixture, by TRL's rule: the shares are exact, and no part gives more than it has.

    Args:
        parts: data sets with a length.
        fractions: their shares, which need not sum to one; at least one is above 0.
    """
    weights = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(part) / weight for part, weight in zip(parts, weights, strict=True) if weight > 0)
    return [round(weight * total) for weight in weights]


def _selected(table: Table, dataset: AnyDataset) -> AnyDataset:
    if table.selected is None:
        return dataset
    selected = table.selected
    return _attempt(table, lambda: dataset.select_columns(selected))


def _split_in_two(dataset: AnyDataset, size: float) -> tuple[AnyDataset, AnyDataset]:
    """Training and test rows, shuffled alike in every run and in every process of one."""
    count = math.ceil(size * len(dataset)) if size < 1 else int(size)
    if count >= len(dataset):
        raise ConfigError([f"`test_split_size`: {size!r} leaves no rows to train on; there are {len(dataset)}."])
    rows = list(range(len(dataset)))
    random.Random(_SPLIT_SEED).shuffle(rows)
    return dataset.select(rows[count:]), dataset.select(rows[:count])
