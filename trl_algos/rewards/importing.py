"""A user's own reward function, imported by the path that a recipe gives."""

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError


def file_and_function(name: str) -> tuple[Path, str] | None:
    """The two parts of `path/to/file.py:function`; None where a name is no such path."""
    path, separator, function = name.rpartition(":")
    return (Path(path), function) if separator and path.endswith(".py") else None


def import_function(name: str, files: dict[Path, Any]) -> Any:
    """What `file.py:function` or `package.module.function` leads to, imported.

    Args:
        name: the path.
        files: modules made from files so far, so that each file is run once; it is added to.

    Raises:
        ConfigError: importing it raised, whatever it was, or there is no such name in it.
    """
    in_file = file_and_function(name)
    try:
        if in_file:
            path, function = in_file[0].resolve(), in_file[1]
            if path not in files:
                files[path] = _run_file(path)
            module = files[path]
        else:
            path, (module_name, _, function) = None, name.rpartition(".")
            with _importable(Path.cwd()):
                module = importlib.import_module(module_name)
        return getattr(module, function)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        raise ConfigError([f"cannot be loaded: {reason(error, path)}"]) from error


def _run_file(path: Path) -> Any:
    """The module that a file makes, known to `sys.modules` under its whole path, where dataclasses and pickle look."""
    name = re.sub(r"\W", "_", f"reward_file_{path}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importable(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """First in `sys.path` for the time of an import, then last, for what functions import when they are called."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def reason(error: BaseException, path: Path | None) -> str:
    """What an import raised, with the line: in the file at `path` if it passed there, else where it was raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith("<frozen")]
    inside = [frame for frame in theirs if path and os.path.realpath(frame.filename) == os.path.realpath(path)]
    at = (inside if path else theirs)[-1:]
    return f"{at[0].filename}:{at[0].lineno}: {text}" if at else text
