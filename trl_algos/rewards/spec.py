"""From what a recipe's `reward_funcs` says to reward functions: checked without running any code, then loaded.

An entry is a name of `REWARDS`, `path/to/file.py:function` or `package.module.function`; or a block of `name` and
keyword settings for that function. A path may also lead to a class: its instance, made with the settings, is the
function.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trl_algos.errors import ConfigError, unknown_name
from trl_algos.rewards.calls import call_problems, last_part, passed_columns, setting_problems
from trl_algos.rewards.importing import file_and_function, import_function
from trl_algos.rewards.names import REWARDS, RewardFunction
from trl_algos.rewards.settings import PASSED, parameters_of
from trl_algos.rewards.source import read_signature

Spec = str | Mapping[str, Any]


class NamedReward(NamedTuple):
    """A reward function that a recipe can name, for help: its name, what it is in a line, and its settings."""

    name: str
    summary: str
    settings: str


@dataclass(frozen=True)
class _Entry:
    name: str
    settings: dict[str, Any]


def reward_names() -> list[NamedReward]:
    """All reward functions that go by a name, with the first line of their docstring and their settings."""
    found = []
    for name, function in REWARDS.items():
        settings = ", ".join(map(str, _own_settings(function).values())).replace("collections.abc.", "")
        found.append(NamedReward(name, (function.__doc__ or "").partition("\n")[0], settings))
    return found


def reward_problems(specs: Sequence[Spec] | Spec | None, columns: Sequence[str] | None = None) -> list[str]:
    """What is wrong with a recipe's `reward_funcs`, as far as it shows without running the user's code.

    Args:
        specs: the entries.
        columns: columns of the data set; None where they are not known.

    Returns:
        One message for each problem.
    """
    specs = _as_list(specs)
    if not specs:
        return ["`reward_funcs`: is empty; give the name or path of at least one reward function."]
    problems: list[str] = []
    entries: list[_Entry] = []
    for spec in specs:
        try:
            entry = _entry(spec)
            if entry in entries:
                raise ConfigError(["stands there twice."])
            entries.append(entry)
            found = _entry_problems(entry, columns)
        except ConfigError as error:
            found = error.problems
        problems += _prefixed(spec, found)
    twice = [column for column in columns or () if column in PASSED[:2]]
    problems += [f"`reward_funcs`: the data set has a column {c!r}, which is what TRL passes itself." for c in twice]
    return problems


def logged_names(specs: Sequence[Spec] | Spec | None) -> list[str]:
    """The names that reward functions have in metrics, `rewards/NAME/mean`, read off their entries."""
    names = []
    for spec in _as_list(specs):
        try:
            name = _entry(spec).name
        except ConfigError:  # complained of as an entry
            continue
        names.append(REWARDS[name].__name__ if name in REWARDS else last_part(name))
    return _distinct(names)


def load_reward(spec: Spec) -> RewardFunction:
    """One reward function; see `load_rewards`."""
    return load_rewards([spec])[0]


def load_rewards(specs: Sequence[Spec] | Spec | None, columns: Sequence[str] | None = None) -> list[RewardFunction]:
    """The reward functions of a recipe's `reward_funcs`, in their order, with the settings bound.

    Settings win over columns of the same name. Async functions stay async. Each keeps the `__name__` that TRL logs
    under; where two would share one, the later ones get `_2`, `_3` and so on.

    Args:
        specs: the entries.
        columns: columns of the data set; None where they are not known.

    Raises:
        ConfigError: with all problems, those that only show on import included.
    """
    problems = reward_problems(specs, columns)
    if problems:
        raise ConfigError(problems)
    files: dict[Path, Any] = {}
    loaded: list[tuple[Any, dict[str, Any], str]] = []
    for spec in _as_list(specs):
        try:
            loaded.append(_loaded(_entry(spec), files, columns))
        except ConfigError as error:
            problems += _prefixed(spec, error.problems)
    if problems:
        raise ConfigError(problems)
    names = _distinct([name for _, _, name in loaded])
    return [_bound(function, settings, name) for (function, settings, _), name in zip(loaded, names, strict=True)]


def _as_list(specs: Sequence[Spec] | Spec | None) -> list[Spec]:
    if isinstance(specs, str | Mapping):
        return [specs]
    return list(specs or ())


def _prefixed(spec: Any, problems: list[str]) -> list[str]:
    """Messages that begin with key and entry; those that do so by themselves stay."""
    name = spec.get("name", dict(spec)) if isinstance(spec, Mapping) else spec
    return [p if p.startswith("`reward_funcs`") else f"`reward_funcs`: {name!r}: {p}" for p in problems]


def _entry(spec: Any) -> _Entry:
    if isinstance(spec, Mapping):
        settings = dict(spec)
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError([f"needs a `name`, the name or path of a reward function, but has {name!r}."])
        if not all(isinstance(key, str) for key in settings):
            raise ConfigError(["the names of settings must be text."])
        return _Entry(name.strip(), settings)
    if not isinstance(spec, str):
        raise ConfigError([f"is of type {type(spec).__name__}; it must be a name, or a block of `name` and settings."])
    return _Entry(spec.strip(), {})


def _entry_problems(entry: _Entry, columns: Sequence[str] | None) -> list[str]:
    if not _is_path(entry.name):
        return _named_problems(entry, columns)
    signature = read_signature(entry.name)
    if signature.is_class:
        return [
            *setting_problems(entry.name, entry.settings, signature.build),
            *call_problems(entry.name, {}, signature.call, columns),
        ]
    return [
        *setting_problems(entry.name, entry.settings, signature.call, may_be_columns=True),
        *call_problems(entry.name, entry.settings, signature.call, columns),
    ]


def _is_path(name: str) -> bool:
    """Whether an entry is a path; refuses those that look like one but cannot be."""
    if file_and_function(name):
        return True
    if name.endswith(".py"):
        raise ConfigError([f"names a file but no function; write {name}:function."])
    if name in REWARDS or "." not in name:
        return False
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(["is neither `path/to/file.py:function` nor `package.module.function`."])
    return True


def _named_problems(entry: _Entry, columns: Sequence[str] | None) -> list[str]:
    """Problems with one of our own functions: it checks its settings itself when it is called on no completions."""
    if entry.name not in REWARDS:
        known = unknown_name("reward_funcs", entry.name, REWARDS)
        raise ConfigError([f"{known} Own ones: path/to/file.py:function, or package.module.function."])
    function = REWARDS[entry.name]
    parameters = parameters_of(function) or []
    settable = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    passed = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    problems = [
        *setting_problems(entry.name, entry.settings, settable),
        *call_problems(entry.name, entry.settings, passed, columns),
    ]
    if problems:
        return problems
    own = _own_settings(function)
    if columns is None:
        needed = [p.name for p in parameters if p.required and p.name not in PASSED]
        columns = [*needed, entry.settings.get("column", own["column"].default if "column" in own else "")]
    row_wise = {*passed_columns(columns), "prompts", "completions", "completion_ids"} - own.keys()
    rows: dict[str, Any] = {name: [] for name in row_wise}
    try:
        function(**(rows | entry.settings))
    except ConfigError as error:
        return error.problems
    return []


def _own_settings(function: RewardFunction) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _loaded(entry: _Entry, files: dict[Path, Any], columns: Sequence[str] | None) -> tuple[Any, dict[str, Any], str]:
    """A function, the keywords to bind, and its name; checked again by the signature that it turned out to have."""
    if not _is_path(entry.name):
        defaults = {name: p.default for name, p in _own_settings(REWARDS[entry.name]).items()}
        function = REWARDS[entry.name]
        return function, defaults | entry.settings, function.__name__
    found, settings = import_function(entry.name, files), entry.settings
    if isinstance(found, type):
        problems = setting_problems(entry.name, entry.settings, parameters_of(found))
        if not problems:
            found, settings = _instance(found, settings), {}
    elif not callable(found):
        raise ConfigError([f"is a {type(found).__name__}, not a function."])
    else:
        problems = setting_problems(entry.name, entry.settings, parameters_of(found), may_be_columns=True)
    problems = problems or call_problems(entry.name, settings, parameters_of(found), columns)
    if problems:
        raise ConfigError(problems)
    return found, settings, _name(found, last_part(entry.name))


def _instance(cls: type, settings: dict[str, Any]) -> Any:
    try:
        made = cls(**settings)
    except Exception as error:  # the user's constructor may raise anything
        raise ConfigError([f"cannot be made: {type(error).__name__}: {error}"]) from error
    if not callable(made):
        raise ConfigError([f"is a class without `__call__`, so that no instance is a function: {cls.__name__}."])
    return made


def _name(function: Any, otherwise: str) -> str:
    """The name that TRL logs under; a lambda has none of its own."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return otherwise if name == "<lambda>" else name


def _distinct(names: list[str]) -> list[str]:
    """`names`, where those that came before get `_2`, `_3` and so on."""
    taken: list[str] = []
    for name in names:
        candidates = (name if count == 1 else f"{name}_{count}" for count in range(1, len(names) + 2))
        taken.append(next(candidate for candidate in candidates if candidate not in taken))
    return taken


def _bound(function: Any, settings: dict[str, Any], name: str) -> RewardFunction:
    """`function` under the name and with the settings, which win over columns of the same names."""
    if not settings and getattr(function, "__name__", None) == name:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **(kwargs | settings))

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **(kwargs | settings))

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)
    bound: Any = call_async if is_async else call
    bound.__name__, bound.__doc__ = name, function.__doc__
    return bound
