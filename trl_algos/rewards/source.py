"""A user's own reward function: found, and its signature read without running anything."""

import ast
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from trl_algos.errors import ConfigError, nearest
from trl_algos.rewards.importing import file_and_function, reason
from trl_algos.rewards.settings import Parameter, parameters_in_source

_Definition = ast.stmt | ast.expr


@dataclass(frozen=True)
class Signature:
    """How a reward function is called.

    Args:
        call: the parameters that TRL fills; None where only running the code would tell.
        build: those of the constructor, where it is a class whose instance is the function.
        is_class: whether it is one.
    """

    call: list[Parameter] | None
    build: list[Parameter] | None = None
    is_class: bool = False


UNKNOWN = Signature(None)
"""Of what cannot be told without running the code."""


def read_signature(name: str) -> Signature:
    """The signature of the function that `file.py:function` or `package.module.function` stands for.

    Nothing is run. Where the source alone does not tell, as for decorated functions, it is `UNKNOWN`.

    Raises:
        ConfigError: there is no such file, module or function, or it is no function.
    """
    in_file = file_and_function(name)
    if in_file:
        return _signature_in_file(*in_file)
    module, _, function = name.rpartition(".")
    file = _module_file(module)
    return _signature_in_file(file, function) if file else UNKNOWN


def _signature_in_file(path: Path, name: str) -> Signature:
    if not name:
        raise ConfigError([f"names no function; write {path}:function."])
    tree = _parsed(path)
    definitions: dict[str, list[_Definition]] = defaultdict(list)
    for defined, node in _definitions(tree.body):
        definitions[defined].append(node)
    if name not in definitions:
        if _defines_by_running(tree):
            return UNKNOWN
        functions = [
            defined for defined, nodes in definitions.items() if not isinstance(nodes[0], ast.Import | ast.ImportFrom)
        ]
        raise ConfigError([f"{path} defines no {name!r}.{nearest(name, functions)}"])
    return _signature(name, definitions[name][0]) if len(definitions[name]) == 1 else UNKNOWN


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        folder = path.parent
        near = nearest(path.name, [file.name for file in folder.glob("*.py")]) if folder.is_dir() else ""
        raise ConfigError([f"{path} cannot be read: {error.strerror}.{near}"]) from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError([reason(error, path)]) from None


def _definitions(statements: list[ast.stmt]) -> Iterator[tuple[str, _Definition]]:
    """Names that top-level statements bind, and what to; also of those within `if`, `try` and the like."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            simple = len(targets) == 1 and isinstance(targets[0], ast.Name)
            names = (child for target in targets for child in ast.walk(target) if isinstance(child, ast.Name))
            yield from ((child.id, node.value if simple else node) for child in names)
        else:
            yield from _definitions([*_blocks(node)])


def _blocks(node: ast.stmt) -> Iterator[ast.stmt]:
    for field in ("body", "orelse", "finalbody"):
        yield from getattr(node, field, [])
    for branch in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield from branch.body


def _defines_by_running(tree: ast.Module) -> bool:
    """Whether a module may have names that its source does not show."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return True
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return True
        if isinstance(node, ast.Name) and node.id in ("globals", "vars", "setattr", "exec"):
            return True
    return _changes_modules(tree)


def _changes_modules(tree: ast.Module) -> bool:
    """Whether a module may bring others with it that are no files of its own, or be replaced itself."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "modules")
        or (isinstance(node, ast.Name) and node.id == "__path__")
        for node in ast.walk(tree)
    )


def _signature(name: str, node: _Definition) -> Signature:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return UNKNOWN if node.decorator_list else Signature(parameters_in_source(node.args))
    if isinstance(node, ast.Lambda):
        return Signature(parameters_in_source(node.args))
    if isinstance(node, ast.ClassDef):
        return _class_signature(node)
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.List | ast.Tuple | ast.Dict | ast.Set):
        raise ConfigError([f"{name!r} is {ast.unparse(node)[:60]}, not a function."])
    return UNKNOWN


def _class_signature(node: ast.ClassDef) -> Signature:
    """Parameters of constructor and call without `self`; None for what a base class or a decorator may add."""
    methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}
    is_plain = not (node.bases or node.keywords or node.decorator_list or "__new__" in methods)
    if is_plain and "__call__" not in {name for name, _ in _definitions(node.body)}:
        raise ConfigError([f"{node.name!r} is a class without `__call__`, so that no instance is a function."])

    def parameters(method: str) -> list[Parameter] | None:
        if method not in methods:
            return [] if is_plain and method == "__init__" else None
        own = methods[method]
        return None if own.decorator_list or node.decorator_list else parameters_in_source(own.args)[1:]

    return Signature(parameters("__call__"), parameters("__init__"), is_class=True)


def _module_file(module: str) -> Path | None:
    """Source file of a module, found as an import would, which does not run any of it; None where that cannot be told.

    Raises:
        ConfigError: there is no such module.
    """
    top, *rest = module.split(".")
    file, folders = _top_module(top)
    for place, part in enumerate(rest):
        parent = ".".join([top, *rest[:place]])
        if not folders or (file and _changes_modules(_parsed(file))):
            return None  # a module that is no package may still stand for one, as `os.path` does
        names = [path.stem for folder in folders for path in folder.glob("*") if path.suffix == ".py" or path.is_dir()]
        if _has_compiled(part, folders):
            return None
        file, folders = _find(part, folders)
        if file is None and not folders:
            raise ConfigError([f"the package {parent!r} has no module {part!r}.{nearest(part, names)}"])
    return file


def _top_module(name: str) -> tuple[Path | None, list[Path]]:
    """File and folders of a top-level module; a module that is loaded already is what an import would give."""
    places = [Path.cwd(), *map(Path, sys.path)]
    file, folders = (None, []) if name in (*sys.modules, *sys.builtin_module_names) else _find(name, places)
    if file:
        return file, folders
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None, folders
    if spec is None and not folders:
        raise ConfigError([f"there is no module {name!r}, neither in this folder nor installed."])
    if spec is None:
        return None, folders
    origin = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    return origin, [Path(folder) for folder in spec.submodule_search_locations or ()]


def _find(name: str, places: list[Path]) -> tuple[Path | None, list[Path]]:
    """File of a module or package in one of the folders, and the folders that its own modules lie in."""
    for place in places:
        package = place / name / "__init__.py"
        if package.is_file():
            return package, [package.parent]
        if (place / f"{name}.py").is_file():
            return place / f"{name}.py", []
    return None, [place / name for place in places if (place / name).is_dir()]


def _has_compiled(name: str, places: list[Path]) -> bool:
    return any((place / f"{name}{suffix}").exists() for place in places for suffix in EXTENSION_SUFFIXES)
