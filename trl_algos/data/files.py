"""The first rows of data on this machine, read without the `datasets` library: mistakes show before it is loaded."""

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""Builder of the `datasets` library for each kind of data file."""

# Characters of a JSON file that are looked at, unless they do not hold a whole line.
_PREFIX = 4_000_000


@dataclass(frozen=True)
class FirstRows:
    """The beginning of a data set.

    Args:
        columns: names of all columns seen.
        rows: where each row stands, such as `line 3`, and its values.
    """

    columns: list[str]
    rows: list[tuple[str, dict[str, Any]]]


def first_rows(path: Path, limit: int = 100) -> FirstRows:
    """The first rows of a data file.

    Args:
        path: a file with one of the endings of `BUILDERS`.
        limit: most rows to read.

    Raises:
        ValueError: it is empty, or no file of its kind; the message says where, in one line.
    """
    readers = {"json": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows, "arrow": _arrow_rows}
    try:
        found = readers[BUILDERS[path.suffix.lower()]](path, limit)
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8 text") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from error
    if not found.rows:
        raise ValueError("holds no rows")
    return found


def saved_splits(folder: Path) -> list[str] | None:
    """Splits of a folder made by `save_to_disk`; empty for a data set without splits, None for any other folder.

    Args:
        folder: the folder.

    Raises:
        ValueError: its list of splits cannot be read.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _json_file(folder / "dataset_dict.json").get("splits")
        return [str(split) for split in splits or []]
    return [] if (folder / "state.json").is_file() else None


def first_saved_rows(folder: Path, limit: int = 100) -> FirstRows:
    """The first rows of a data set, or of one split, that `save_to_disk` made.

    Args:
        folder: the folder with its `state.json`.
        limit: most rows to read.

    Raises:
        ValueError: it is empty or damaged.
    """
    files = _json_file(folder / "state.json").get("_data_files") or []
    if not files:
        raise ValueError("holds no rows")
    return first_rows(folder / str(files[0].get("filename")), limit)


def _json_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"has a {path.name} that cannot be read") from error
    if not isinstance(value, dict):
        raise ValueError(f"has a {path.name} that is not an object")
    return value


def _json_rows(path: Path, limit: int) -> FirstRows:
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(_PREFIX)
        is_list = text.lstrip().startswith("[")
        if not is_list and "\n" not in text:
            text += file.read()
        is_whole = not file.read(1)
    if is_list:
        values = _list_items(text, is_whole)
    else:
        values = _line_values(text if is_whole else text[: text.rfind("\n") + 1])
    rows = []
    for where, value in itertools.islice(values, limit):
        if not isinstance(value, dict):
            raise ValueError(f'{where} is not an object (`{{"column": value, ...}}`), but {type(value).__name__}')
        rows.append((where, value))
    return FirstRows(list(dict.fromkeys(name for _, row in rows for name in row)), rows)


def _line_values(text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not one JSON object: {error}") from error


def _list_items(text: str, is_whole: bool) -> Iterator[tuple[str, Any]]:
    """Items of one JSON list; the last one may be cut off where the text is only its beginning."""
    decoder, place = json.JSONDecoder(), text.index("[") + 1
    for number in itertools.count(1):
        place = _after_space(text, place)
        if text[place : place + 1] == "]" and number == 1:
            return
        try:
            value, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            if is_whole:
                raise ValueError(f"is not valid JSON: {error.msg}: line {error.lineno}") from error
            return
        yield f"row {number}", value
        place = _after_space(text, place)
        if text[place : place + 1] != ",":
            if is_whole and text[place : place + 1] != "]":
                raise ValueError(f"is not valid JSON: no comma after row {number}")
            return
        place += 1


def _after_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _csv_rows(path: Path, limit: int) -> FirstRows:
    csv.field_size_limit(2**31 - 1)  # the default refuses long prompts
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            # Names as pandas gives them: the index that it writes has none.
            columns = [name or f"Unnamed: {place}" for place, name in enumerate(next(reader, []))]
            lines = [(f"line {reader.line_num}", values) for values in itertools.islice(filter(None, reader), limit)]
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num} is not valid CSV: {error}") from error
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise ValueError(f"names the column {twice[0]!r} twice")
    for where, values in lines:
        if len(values) > len(columns):
            raise ValueError(f"{where} has more values than the {len(columns)} columns")
    return FirstRows(
        columns, [(where, dict(itertools.zip_longest(columns, values, fillvalue=""))) for where, values in lines]
    )


def _parquet_rows(path: Path, limit: int) -> FirstRows:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=limit), None)
            return _batch_rows(file.schema_arrow.names, batch, limit)
    except pyarrow.ArrowException as error:
        raise ValueError("is not a Parquet file, or damaged") from error


def _arrow_rows(path: Path, limit: int) -> FirstRows:
    """Both of Arrow's formats: streams, as `save_to_disk` writes, and files."""
    import pyarrow

    with pyarrow.OSFile(str(path)) as source:
        try:
            stream = pyarrow.ipc.open_stream(source)
            return _batch_rows(stream.schema.names, next(iter(stream), None), limit)
        except pyarrow.ArrowException:
            source.seek(0)
        try:
            file = pyarrow.ipc.open_file(source)
            batch = file.get_batch(0) if file.num_record_batches else None
            return _batch_rows(file.schema.names, batch, limit)
        except pyarrow.ArrowException as error:
            raise ValueError("is not an Arrow file, or damaged") from error


def _batch_rows(columns: list[str], batch: Any, limit: int) -> FirstRows:
    rows = batch.slice(0, limit).to_pylist() if batch is not None else []
    return FirstRows(list(columns), [(f"row {number}", row) for number, row in enumerate(rows, 1)])
