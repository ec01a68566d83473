"""What a run leaves in its folder besides the model: file names, safe writing and reading; no heavy import."""

import json
import math
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import yaml

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from trl_algos._version import __version__
from trl_algos.errors import ConfigError
from trl_algos.settings.public import public_settings

RECIPE_FILE = "recipe.yaml"
"""Every setting as resolved; training it again repeats the run."""

METRICS_FILE = "metrics.jsonl"
"""One JSON object per log entry."""

SUMMARY_FILE = "training_summary.json"
"""Figures before and after, settings, and under `versions` what `versions()` says."""

PLOT_FILE = "reward.png"

PAIR_PLOT_FILE = "preference.png"
"""The plot of a run on preference pairs."""

RECORDS = (RECIPE_FILE, METRICS_FILE, SUMMARY_FILE, PLOT_FILE, PAIR_PLOT_FILE)
"""All that is moved away before another run starts in the folder."""

PREVIOUS_FOLDER = "previous"

LOCK_FILE = ".in_use"

_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "deepspeed",
    "bitsandbytes",
    "vllm",
    "math-verify",
    "reasoning-gym",
)

_NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def versions() -> dict[str, str]:
    """Versions of this package, of Python, and of the packages in use that are installed."""
    found = {"trl_algos": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_recipe(folder: str | Path, settings: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Path:
    """Write `settings` as a recipe that can be trained again.

    Left out are secrets; None, unless the setting's default is something else; `resume_from_checkpoint`, since to
    train it again is to start again; `local_rank`, which each process has from its launcher; and
    `generation_batch_size` beside `steps_per_generation`, which says the same and which TRL takes only alone.

    Args:
        folder: The run folder; made if missing.
        settings: Every setting as resolved.
        defaults: Default of each setting, where it has one.

    Returns:
        The file, `recipe.yaml` in `folder`.
    """
    skipped = {"resume_from_checkpoint", "local_rank"}
    if settings.get("steps_per_generation") is not None:
        skipped.add("generation_batch_size")
    defaults = defaults or {}
    kept = {
        name: _without_none(value)
        for name, value in sorted(public_settings(settings).items())
        if name not in skipped and (value is not None or defaults.get(name) is not None)
    }
    path = Path(folder) / RECIPE_FILE
    write_text(path, recipe_text(kept))
    return path


def recipe_text(settings: Mapping[str, Any]) -> str:
    """Plain values as the text of a recipe."""
    text = yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=119)
    return f"# Every setting of the run, as trl_algos {__version__} resolved it.\n{text}"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


class _Dumper(yaml.SafeDumper):
    """Safe YAML that quotes text such as `1e-6`: YAML 1.1 needs no quotes there, but recipes read it as a number."""


def _write_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        float(text)
    except ValueError:
        return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_Dumper.add_representer(str, _write_str)


def write_text(path: str | Path, text: str) -> None:
    """Write a whole file or, if that fails, leave what was there: a reader never sees half of it.

    Args:
        path: The file; its folder is made if missing.
        text: What it shall hold.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def take_folder(folder: str | Path) -> TextIO | None:
    """Keep other runs out of a folder for as long as the file returned is open; a killed process lets go of it.

    Raises:
        ConfigError: another run is in it.
    """
    if fcntl is None:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = (Path(folder) / LOCK_FILE).open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError([f"`output_dir`: another run is in {str(folder)!r}; name another folder."]) from None
    return file


def keep_previous(folder: str | Path, names: Iterable[str] = RECORDS) -> Path | None:
    """Move the records of an earlier run to `previous/1`, `previous/2`, ... before a new one starts in its folder.

    Only records move. Checkpoints and the model stay where they are, and a new run that saves at the same steps
    overwrites them. On one process only, and not when a run is resumed: its records go on.

    Args:
        folder: The run folder; it need not exist.
        names: Files to move, where they exist.

    Returns:
        Where the records are now, or None where there were none.
    """
    folder = Path(folder)
    records = [folder / name for name in names if (folder / name).is_file()]
    if not records:
        return None
    taken = [int(path.name) for path in (folder / PREVIOUS_FOLDER).glob("*") if path.name.isdecimal()]
    target = folder / PREVIOUS_FOLDER / str(max(taken, default=0) + 1)
    target.mkdir(parents=True)
    for record in records:
        os.replace(record, target / record.name)
    return target


def metrics_line(entry: Mapping[str, Any]) -> str:
    """One line of `metrics.jsonl`, in strict JSON: NaN and infinities, which it lacks, are the texts of that name."""
    return json.dumps(strict_json(entry), allow_nan=False) + "\n"


def strict_json(value: Any) -> Any:
    """`value` with the texts `NaN`, `Infinity` and `-Infinity` in the place of these numbers, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The entries of a `metrics.jsonl`, with NaN and infinities as numbers again.

    The last line may be torn, as a killed process leaves it; it is left out then.

    Args:
        path: The file.

    Returns:
        One dictionary per line; each has an integer `step`.

    Raises:
        ConfigError: The file cannot be read, or a line of it is no log entry.
    """
    try:
        # Torn in the middle of a letter, the last line is not even text.
        lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}."]) from error
    entries = []
    for number, line in enumerate(lines, start=1):
        entry = _metrics_entry(line)
        if entry is not None:
            entries.append(entry)
        elif line.strip() and number < len(lines):
            raise ConfigError([f"{path}:{number}: is no log entry (a JSON object with a `step`): {line[:60]!r}."])
    return entries


def _metrics_entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return None
    return {key: _NOT_NUMBERS.get(value, value) if isinstance(value, str) else value for key, value in entry.items()}
