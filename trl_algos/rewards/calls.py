"""Whether TRL's call of a reward function would go well, told from parameters, settings and columns."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from trl_algos.errors import nearest
from trl_algos.rewards.settings import PASSED, Parameter, type_problem

_SOMETIMES_PASSED = "environments"
_COLUMNS_NOT_PASSED = ("prompt", "completion", "completion_ids")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def passed_columns(columns: Sequence[str]) -> list[str]:
    """The columns of a data set that TRL passes on to reward functions."""
    return [column for column in columns if column not in _COLUMNS_NOT_PASSED]


def last_part(name: str) -> str:
    """The function's own name in the path that a recipe gives."""
    return name.replace(":", ".").rpartition(".")[2]


def setting_problems(
    reward: str, settings: Mapping[str, Any], parameters: list[Parameter] | None, may_be_columns: bool = False
) -> list[str]:
    """Settings that a function has not, or of another type; and those that are missing where no column can serve.

    Args:
        reward: what the recipe calls the function.
        settings: those that the recipe gives.
        parameters: of the function or of the class's constructor; None where they are not known.
        may_be_columns: TRL calls what has these parameters, so that columns may fill them.

    Returns:
        One message for each problem.
    """
    if parameters is None:
        return []
    named = {p.name: p for p in parameters if p.kind in _NAMED and p.name not in (*PASSED, _SOMETIMES_PASSED)}
    open_ended = not may_be_columns and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    problems = []
    for name, value in settings.items():
        if name in PASSED:
            problems.append(f"`{name}`: is no setting, since TRL passes it.")
        elif name not in named and not open_ended:
            kinds = ", ".join(named) or "none"
            problems.append(f"`{name}`: there is no such setting; it has {kinds}.{nearest(name, named)}")
        elif name in named and (wanted := type_problem(value, named[name].annotation)):
            problems.append(f"`{name}`: {value!r} is a {type(value).__name__}; it must be {wanted}.")
    if not may_be_columns:
        missing = [name for name, p in named.items() if p.required and name not in settings]
        problems += [f"needs the setting `{name}`: {{name: {reward}, {name}: ...}}." for name in missing]
    return problems


def call_problems(
    reward: str, settings: Mapping[str, Any], parameters: list[Parameter] | None, columns: Sequence[str] | None
) -> list[str]:
    """Why TRL's call of a function would fail: what it asks for and does not get, or gets and does not take.

    Args:
        reward: what the recipe calls the function.
        settings: those that the recipe gives.
        parameters: of the function; None where they are not known.
        columns: columns of the data set; None where they are not known.

    Returns:
        One message for each problem.
    """
    if parameters is None:
        return []
    name, given = last_part(reward), passed_columns(columns or ())
    problems = [
        f"{name} takes {p.name!r} by position only, but TRL passes keywords."
        for p in parameters
        if p.kind is inspect.Parameter.POSITIONAL_ONLY and p.required
    ]
    named = {p.name: p for p in parameters if p.kind in _NAMED}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        untaken = [keyword for keyword in (*PASSED, *given) if keyword not in named]
        if untaken:
            problems.append(f"{name} must take `**kwargs`: TRL also passes {', '.join(untaken)}.")
    if columns is None:
        return problems
    available = (*PASSED, _SOMETIMES_PASSED, *settings, *given)
    for missing in (p.name for p in named.values() if p.required and p.name not in available):
        hint = nearest(missing, (*PASSED, *given), cutoff=0.75)
        problems.append(f"{name} needs a column {missing!r}, but the data set has {', '.join(columns)}.{hint}")
    return problems
