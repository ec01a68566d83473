"""A recipe's file and command-line words as plain values, with where each one stands; no heavy import."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trl_algos.errors import nearest


@dataclass(frozen=True)
class Value:
    """One setting as it was written.

    Args:
        value: what YAML makes of it.
        text: the scalar as it stands, for fields that hold text: `1.10` and `no` are names there. None for blocks.
        where: `file:line: `; empty for the command line.
        bare: whether it is an option without a value.
    """

    value: Any
    text: str | None
    where: str
    bare: bool = False


class _Loader(yaml.SafeLoader):
    """Safe YAML with YAML 1.2's numbers, which takes no key twice: YAML 1.1 has `1e-6` as text and `010` as 8."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice in it (line {line})")
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        return int(node.value, 0) if re.match("[-+]?0[xo]", node.value) else int(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0] not in _NUMBERS]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Resolvers are asked in turn: whole numbers come first.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(\d+|0x[0-9a-fA-F]+|0o[0-7]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def read_files(path: str, problems: list[str]) -> dict[str, Value]:
    """Top-level keys of a recipe and of those that it extends; what cannot be read is added to `problems`.

    `extends: base.yaml` names a recipe, relative to the folder of the one that says so, whose keys hold wherever the
    recipe has none of its own. A key is taken over whole, blocks included.
    """
    return _with_base(Path(path), (), problems)


def _with_base(path: Path, extending: tuple[Path, ...], problems: list[str]) -> dict[str, Value]:
    """Keys of a recipe over those of its base; `extending` are the recipes that led here."""
    own = read_file(str(path), problems)
    if "extends" not in own:
        return own
    named = own.pop("extends")
    if named.value is None and named.text in ("null", "~"):  # a base switched off
        return own
    chain = (*extending, path.resolve())
    base = path.parent / (named.text or "")
    if not (named.text or "").strip():
        problems.append(f"{named.where}`extends`: {named.value!r} is not the name of a recipe.")
    elif not base.is_file():
        problems.append(
            f"{named.where}`extends`: there is no file {named.text!r} beside the recipe.{_nearest_file(base)}"
        )
    elif base.resolve() in chain:
        problems.append(f"{named.where}`extends`: {named.text!r} leads back to a recipe that extends it.")
    else:
        return _with_base(base, chain, problems) | own
    return own


def read_file(path: str, problems: list[str]) -> dict[str, Value]:
    """Top-level keys of a YAML mapping; what cannot be read is added to `problems`."""
    try:
        node = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}.{_nearest_file(Path(path))}")
        return {}
    except RecursionError:
        problems.append(f"{path}: is nested too deeply.")
        return {}
    except (yaml.YAMLError, ValueError) as error:
        problems.append(f"{path}{_line_of(error)}: is not valid YAML: {_one_line(error)}")
        return {}
    if not isinstance(node, yaml.MappingNode) or not node.value:
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a text"
        kind = "empty" if node is None or isinstance(node, yaml.MappingNode) else kind
        problems.append(f"{path}: must hold `key: value` lines, but is {kind}.")
        return {}
    return dict(_entries(path, node, problems))


def _entries(path: str, node: yaml.MappingNode, problems: list[str]) -> Iterator[tuple[str, Value]]:
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{path}:{line}: a key must be a name, not a list or a block.")
            continue
        key = str(key_node.value)
        if key in lines:
            problems.append(f"{path}:{line}: `{key}` stands here again; it was set in line {lines[key]}.")
        lines.setdefault(key, line)
        text = value_node.value if isinstance(value_node, yaml.ScalarNode) else None
        try:
            _check_size(value_node)
            value = _texts(value_node) if key == "env" else _construct(value_node)
        except (yaml.YAMLError, ValueError, TypeError) as error:
            problems.append(f"{path}:{line}: `{key}`: {_one_line(error)}")
            continue
        yield key, Value(value, text, f"{path}:{line}: ")


def _check_size(node: yaml.Node) -> None:
    """Refuse values that hold themselves, or so much that nobody wrote it: aliases repeat what they stand for."""
    left, waiting = _MOST_NODES, [(node, 0)]
    while waiting:
        here, depth = waiting.pop()
        left -= 1
        if left < 0 or depth > _DEEPEST:
            raise ValueError("is nested too deeply, or too long; does it hold itself by an alias?")
        parts = here.value if isinstance(here, yaml.CollectionNode) else ()
        for part in parts:
            waiting += [(child, depth + 1) for child in (part if isinstance(part, tuple) else (part,))]


_MOST_NODES, _DEEPEST = 10_000, 50


def _texts(node: yaml.Node) -> Any:
    """A block as names and texts: `WANDB_MODE: off` sets no truth value. Anything else as YAML has it."""
    if not isinstance(node, yaml.MappingNode):
        return _construct(node)
    for name, value in node.value:
        if not isinstance(value, yaml.ScalarNode) or value.tag.endswith("null"):
            raise ValueError(f"{name.value!r} must be a text.")
    return {name.value: value.value for name, value in node.value}


def _construct(node: yaml.Node) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def read_words(words: Sequence[str], problems: list[str]) -> dict[str, Value]:
    """Settings from command-line words: `--key value`, `--key=value`, `--flag`, `--list a b`."""
    texts: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, has_value, value = word[2:].partition("=")
            if key in texts:
                problems.append(f"`--{key}` is given twice.")
            texts[key] = [value] if has_value else []
        elif key:
            texts[key].append(word)
        else:
            problems.append(f"{word!r} is not an option; write `--key value`.")
    return {key: _option(parts) for key, parts in texts.items()}


def _option(texts: list[str]) -> Value:
    if not texts:
        return Value(True, "true", "", bare=True)
    values = [_option_value(text) for text in texts]
    return Value(values[0], texts[0], "") if len(values) == 1 else Value(values, None, "")


def _option_value(text: str) -> Any:
    """YAML's reading of one word, and the word itself where YAML can make nothing of it."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return text
    # What YAML takes for a comment is text here: `--system_prompt "# Rules"`.
    return text if value is None and text.strip() not in ("", "~", "null", "Null", "NULL") else value


def environment(values: dict[str, Value], problems: list[str]) -> dict[str, str]:
    """The `env` block: names and values of environment variables; it is taken out of `values`."""
    block = values.pop("env", Value({}, None, ""))
    if not isinstance(block.value, dict | None):
        problems.append(f"{block.where}`env`: must be a block of `NAME: value` lines.")  # its value may be a secret
        return {}
    variables = {str(name): str(value) for name, value in (block.value or {}).items()}
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            problems.append(f"{block.where}`env`: {name!r} cannot be the name of a variable, or not with its value.")
    return variables


def _nearest_file(path: Path) -> str:
    """The hint at a file beside a missing one whose name is almost its."""
    if path.exists() or not path.parent.is_dir():
        return ""
    return nearest(str(path), [str(path.parent / other.name) for other in path.parent.glob("*.y*ml")])


def _line_of(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _one_line(error: Exception) -> str:
    """What is wrong, without YAML's drawing of the place."""
    told = [getattr(error, "context", None), getattr(error, "problem", None)]
    return ": ".join(part for part in told if part) or " ".join(str(error).split())
