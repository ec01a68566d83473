"""Runs to be compared: read from their folders, grouped by settings, and averaged over seeds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trl_algos.errors import ConfigError, nearest
from trl_algos.run.folder import METRICS_FILE, RECIPE_FILE, read_metrics

SAME_GROUP = ("seed", "data_seed", "output_dir", "run_name")
"""Settings that runs of one group may differ in."""

_OPTIONS = {
    "output": "give the file to write",
    "metrics": "name logged metrics",
    "by": "name the settings that make a group",
}
_STATE_FILE = "trainer_state.json"
_LABEL_SETTINGS = 4
_PARTS = ("advantage_estimator", "surrogate", "ratio_level", "aggregation", "kl_placement", "kl_estimator")


@dataclass(frozen=True)
class PlotArguments:
    """What `trl-algos plot` was told, under the names of `compare_runs`'s arguments."""

    runs: list[str]
    output: str | None = None
    metrics: list[str] | None = None
    by: list[str] | None = None


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells it.

    Args:
        name: The folder as it was given.
        settings: Every setting as resolved; empty where the folder has no recipe.
        log: The log entries.
    """

    name: str
    settings: Mapping[str, Any]
    log: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone, and what sets them apart from other groups."""

    label: str
    runs: Sequence[Run]


def plot_arguments(words: Sequence[str]) -> PlotArguments:
    """Read the words after `trl-algos plot`: `RUN... [--output FILE] [--metrics a b] [--by a b]`.

    `--output` takes one word, the others all words up to the next option; `--option=word` is the same.

    Raises:
        ConfigError: With every problem: no run, an unknown option, one without words or given twice.
    """
    runs: list[str] = []
    options: dict[str, list[str]] = {}
    problems: list[str] = []
    target = runs
    for word in words:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            if name not in _OPTIONS:
                allowed = [f"--{option}" for option in _OPTIONS]
                problems.append(
                    f"`--{name}`: there is no such option, only {', '.join(allowed)}.{nearest(f'--{name}', allowed)}"
                )
            elif name in options:
                problems.append(f"`--{name}` is given twice.")
            target = options.setdefault(name, [])
            target += [value] if has_value else []
        else:
            target.append(word)
        if target is options.get("output") and target:
            target = runs  # what follows the file is a run again
    problems += [f"`--{name}`: nothing follows it; {_OPTIONS[name]}." for name in _OPTIONS if options.get(name) == []]
    if not runs:
        problems.append("`RUN`: name at least one run folder, before `--metrics` and `--by`.")
    if problems:
        raise ConfigError(problems)
    output = options["output"][0] if "output" in options else None
    return PlotArguments(runs, output, options.get("metrics"), options.get("by"))


def read_runs(names: Sequence[str]) -> list[Run]:
    """The runs in the folders `names`.

    Metrics come from `metrics.jsonl`, or else from the state that the trainer saved: that of the folder itself, or of
    its newest checkpoint.

    Raises:
        ConfigError: With a message for each folder that is missing, given twice, or without metrics.
    """
    runs: list[Run] = []
    problems = [] if names else ["`runs`: none given; name at least one run folder."]
    for place, name in enumerate(names):
        if any(Path(name).resolve() == Path(other).resolve() for other in names[:place]):
            problems.append(f"`runs`: {name!r} is given twice.")
            continue
        try:
            runs.append(_read_run(name))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return runs


def _read_run(name: str) -> Run:
    folder = Path(name)
    if not folder.is_dir():
        siblings = [str(path) for path in folder.parent.glob("*") if path.is_dir()]
        raise ConfigError([f"`runs`: {name!r} is not a folder.{nearest(name, siblings)}"])
    log = _read_log(folder)
    if not log:
        raise ConfigError([f"`runs`: {name!r} has neither {METRICS_FILE} with entries nor a checkpoint with some."])
    return Run(name, _read_settings(folder), log)


def _read_log(folder: Path) -> list[dict[str, Any]]:
    if (folder / METRICS_FILE).is_file():
        return read_metrics(folder / METRICS_FILE)
    checkpoints = [
        path for path in folder.glob(f"checkpoint-*/{_STATE_FILE}") if path.parent.name.split("-")[1].isdecimal()
    ]
    checkpoints.sort(key=lambda path: int(path.parent.name.split("-")[1]))
    states = [*checkpoints, folder / _STATE_FILE]
    state = next((path for path in reversed(states) if path.is_file()), None)
    if state is None:
        return []
    try:
        return json.loads(state.read_text(encoding="utf-8"))["log_history"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{state}: is no state of a trainer: {error}"]) from error


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / RECIPE_FILE
    if not path.is_file():
        return {}
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"{path}: is not valid YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(settings, dict):
        raise ConfigError([f"{path}: must hold `key: value` lines, but holds {settings!r}."])
    return settings


def grouped(runs: Sequence[Run], by: Sequence[str] | None = None) -> list[Group]:
    """Runs of the same settings together, in the order of their first runs.

    Args:
        runs: The runs; one without a recipe is a group of its own.
        by: Settings that make a group; by default all but `SAME_GROUP`.

    Raises:
        ConfigError: No run has a setting that `by` names.
    """
    known = sorted({str(key) for run in runs for key in run.settings})
    unknown = [key for key in by or () if key not in known]
    if unknown:
        raise ConfigError([f"`by`: {key!r} is not a setting of these runs.{nearest(key, known)}" for key in unknown])
    keys = [key for key in known if key not in SAME_GROUP] if by is None else list(by)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        identity = json.dumps([run.settings.get(key) for key in keys], sort_keys=True, default=str)
        groups.setdefault(identity if run.settings else run.name, []).append(run)
    names = _group_names(list(groups.values()), keys)
    return [Group(name + _seeds_note(members), members) for name, members in zip(names, groups.values(), strict=True)]


def _group_names(groups: list[list[Run]], keys: list[str]) -> list[str]:
    """The settings in which the groups differ, or the folders where these do not tell them apart."""
    settings = [group[0].settings for group in groups]
    differing = [key for key in keys if any(other.get(key) != settings[0].get(key) for other in settings)]
    differing = [key for key in differing if not _follows_from_algorithm(key, settings)]
    differing.sort(key=lambda key: key != "algorithm")
    shown, more = differing[:_LABEL_SETTINGS], len(differing) - _LABEL_SETTINGS
    names = [
        ", ".join(f"{key} {_value_text(one.get(key))}" for key in shown) + (f", {more} more" if more > 0 else "")
        for one in settings
    ]
    if shown and all(settings) and len(set(names)) == len(names):
        return names
    return _folder_names(groups)


def _follows_from_algorithm(key: str, settings: list[Mapping[str, Any]]) -> bool:
    """Whether `key` is decided by the algorithm, as its row says: GSPO's other `epsilon` need not be named."""
    if all(one.get("algorithm") == settings[0].get("algorithm") for one in settings):
        return False
    # Only here, because it loads torch.
    from trl_algos.algorithms import (
        ALGORITHMS,
        COMMON_DEFAULTS,
        SETTING_OF_PARAMETER,
        surrogate_settings,
        surrogates,
    )
    from trl_algos.settings.critic import CRITIC_SETTINGS

    decided = {*_PARTS, *COMMON_DEFAULTS, *CRITIC_SETTINGS, *SETTING_OF_PARAMETER.values()}
    decided.update(*map(surrogate_settings, surrogates().values()))
    values: dict[str, Any] = {}
    for one in settings:
        algorithm, value = str(one.get("algorithm")), one.get(key)
        defaults = ALGORITHMS[algorithm].all_defaults if algorithm in ALGORITHMS else COMMON_DEFAULTS
        usual = defaults.get(key, value)
        if key not in decided or value not in (usual, None) or values.setdefault(algorithm, value) != value:
            return False
    return True


def _folder_names(groups: list[list[Run]]) -> list[str]:
    bases = [Path(run.name).resolve().name for group in groups for run in group]
    short = len(set(bases)) == len(bases)
    return [", ".join(Path(run.name).resolve().name if short else run.name for run in group) for group in groups]


def _value_text(value: Any) -> str:
    if value is None:
        return "unset"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _seeds_note(runs: list[Run]) -> str:
    if len(runs) == 1:
        return ""
    seeds = {(run.settings.get("seed"), run.settings.get("data_seed")) for run in runs}
    return f" ({len(runs)} {'seeds' if len(seeds) == len(runs) else 'runs'}: mean, min to max)"
