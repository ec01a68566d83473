"""Tasks that generate their prompts, and the parameters they take; nothing heavy is imported to check them."""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_algos.data.arithmetic_task import SOURCES, Split, operand_pairs
from trl_algos.errors import nearest

REASONING_PREFIX = "reasoning_gym/"
SIZE_KEYS: dict[Split, str] = {"train": "size", "test": "test_size"}
"""Splits of a generated task, with the parameter that says how many prompts each has."""

# Least and largest value of what every task takes.
_RANGES = {"size": (1, 1_000_000), "test_size": (1, 1_000_000), "seed": (0, 2**63 - 1)}
# The table of pairs is made in memory.
_MAX_OPERAND = 999
_MAX_REPEATS = 1_000
# Pairs up to this operand are counted at once.
_COUNTED_OPERAND = 199

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def task_columns(name: str) -> list[str]:
    """Columns of a generated task's rows."""
    if name.startswith(REASONING_PREFIX):
        return ["prompt", "answer", "entry", "task"]
    return ["prompt", "chosen", "rejected"] if name == "arithmetic_preferences" else ["prompt", "answer"]


def name_problems(key: str, name: str) -> list[str]:
    """What is wrong with the name of a task of reasoning_gym.

    Args:
        key: the recipe's key, for the message.
        name: `reasoning_gym/<task>`.
    """
    task = name.removeprefix(REASONING_PREFIX)
    if not find_spec("reasoning_gym"):
        return [f'`{key}`: {name!r} needs the package reasoning_gym: pip install "trl-algos[tasks]".']
    if task not in reasoning_tasks():
        hint = nearest(name, [REASONING_PREFIX + known for known in reasoning_tasks()])
        return [f"`{key}`: {task!r} is not one of the {len(reasoning_tasks())} tasks of reasoning_gym.{hint}"]
    return []


@cache
def reasoning_tasks() -> dict[str, Path]:
    """Source file of every task of reasoning_gym, by name; none where the package is missing.

    Read from the sources, because importing them all takes seconds. The task `composite` is not among them: it takes
    other tasks as objects, which a recipe cannot write.
    """
    spec = find_spec("reasoning_gym")
    tasks = {}
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            name = re.search(r"^DATASET_NAME\s*=\s*[\"'](\w+)[\"']", text, re.MULTILINE)
            if name and "register_dataset(" in text:
                tasks[name[1]] = path
    return tasks


def task_parameters(name: str) -> dict[str, str]:
    """Parameters of a generated task with the text of their types.

    Args:
        name: a key of `SOURCES`, or `reasoning_gym/<task>` with a known task.
    """
    if name in SOURCES:
        found = inspect.signature(SOURCES[name]).parameters.values()
        own = {p.name: inspect.formatannotation(p.annotation) for p in found if p.name != "split"}
    else:
        own = _config_fields(reasoning_tasks()[name.removeprefix(REASONING_PREFIX)])
    return own | {"size": "int", "test_size": "int", "seed": "int"}


def _config_fields(path: Path) -> dict[str, str]:
    """Fields of the config that a file of reasoning_gym registers: `register_dataset(name, task, config, ...)`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    config = next(ast.unparse(call.args[2]) for call in calls if ast.unparse(call.func) == "register_dataset")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == config]
    return {
        ast.unparse(line.target): ast.unparse(line.annotation)
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign)
    }


def parameter_problems(name: str, parameters: Mapping[Any, Any]) -> list[str]:
    """What is wrong with the parameters of a generated task, as far as can be told without generating.

    Args:
        name: a key of `SOURCES`, or `reasoning_gym/<task>` with a known task.
        parameters: the recipe's `dataset_parameters`.

    Returns:
        One message per problem.
    """
    known = task_parameters(name)
    problems = []
    for parameter, value in parameters.items():
        if parameter not in known:
            hint = nearest(parameter, known)
            reason = f"{name} has no parameter {parameter!r}; it has {', '.join(sorted(known))}.{hint}"
        else:
            reason = _value_problem(parameter, value, known[parameter])
        if reason:
            problems.append(f"`dataset_parameters`: {reason}")
    if name in SOURCES and not problems:
        problems += _arithmetic_problems(parameters)
    return problems


def _value_problem(parameter: str, value: Any, annotation: str) -> str:
    allowed = _misfit(annotation, value)
    if allowed:
        return f"{parameter}: {value!r} is a {type(value).__name__}; it must be {allowed}."
    return _out_of_range(parameter, value, *_RANGES[parameter]) if parameter in _RANGES else ""


def _out_of_range(parameter: str, value: int, least: int, largest: int) -> str:
    if least <= value <= largest:
        return ""
    return f"{parameter}: {value!r} is out of range; it must be between {least} and {largest}."


def _misfit(annotation: str, value: Any) -> str:
    """What a value of this type must be, or nothing where `value` is one or the type is none that we know."""
    optional = re.fullmatch(r"(?:typing\.)?Optional\[(.*)\]", annotation)
    if optional:
        return "" if value is None else _misfit(optional[1], value)
    if annotation in _TYPES:
        fits = isinstance(value, _TYPES[annotation]) and (annotation == "bool") == isinstance(value, bool)
        return "" if fits else _WORDS[annotation]
    if re.match(r"(typing\.)?(list|tuple|Sequence)\b", annotation, re.IGNORECASE):
        return "" if isinstance(value, list | tuple) else "a list"
    literal = re.fullmatch(r"(?:typing\.)?Literal(\[.*\])", annotation)
    if literal:
        choices = ast.literal_eval(literal[1])
        return "" if value in choices else "one of " + ", ".join(map(str, choices))
    return ""


def _arithmetic_problems(parameters: Mapping[str, Any]) -> Iterator[str]:
    max_operand = parameters.get("max_operand", 99)
    problem = _out_of_range("max_operand", max_operand, 1, _MAX_OPERAND)
    problem = problem or _out_of_range("repeats", parameters.get("repeats", 1), 1, _MAX_REPEATS)
    if problem:
        yield f"`dataset_parameters`: {problem}"
        return
    wanted = {split: parameters[key] for split, key in SIZE_KEYS.items() if key in parameters}
    for split, size in wanted.items() if max_operand <= _COUNTED_OPERAND else ():
        count = len(operand_pairs(split, max_operand))
        if size > count:
            yield (
                f"`dataset_parameters`: {SIZE_KEYS[split]}: {size!r} is too many; there are {count} {split} prompts "
                f"with operands up to {max_operand}."
            )
