"""A user's function is judged by its source; nothing of it is run."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reward_files

from trl_algos.rewards.spec import reward_problems

COLUMNS = ["prompt", "answer"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with `mine.py`; what is imported from it is forgotten afterwards."""
    with reward_files.working_folder(tmp_path, monkeypatch):
        yield tmp_path


def problem(spec: Any, columns: list[str] | None = COLUMNS) -> str:
    """The one problem with one entry."""
    (found,) = reward_problems([spec], columns)
    assert found.startswith("`reward_funcs`: ")
    return found


# Files


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py:scor", "mine.py defines no 'scor'. Did you mean 'score'?"),
        ("mine.py:zzzzz", "mine.py defines no 'zzzzz'.$"),
        ("mine.py:", "names no function; write mine.py:function"),
        ("mime.py:score", "mime.py cannot be read: No such file or directory. Did you mean 'mine.py'?"),
        ("no/mine.py:score", "no/mine.py cannot be read: No such file"),
        ("mine.py:needy", "needy needs a column 'solution', but the data set has prompt, answer.$"),
        ("mine.py:keyed", "keyed needs a column 'level', but the data set has prompt, answer.$"),
        ("mine.py:by_prompt", "by_prompt needs a column 'prompt', .* Did you mean 'prompts'?"),
        ("mine.py:by_position", "by_position takes 'completions' by position only"),
        ("mine.py:closed", r"closed must take `\*\*kwargs`: TRL also passes prompts, completion_ids, "),
        ("mine.py:Silent", "'Silent' is a class without `__call__`"),
        ("mine.py:Judge", "needs the setting `model`"),
        ("mine.py:text", "'text' is 'x', not a function"),
        ({"name": "mine.py:score", "scal": 2}, "`scal`: there is no such setting; it has scale. Did you mean 'scale'"),
        ({"name": "mine.py:score", "scale": "x"}, "`scale`: 'x' is a str; it must be a number."),
        ({"name": "mine.py:score", "prompts": "x"}, "`prompts`: is no setting"),
        ({"name": "mine.py:Judge", "model": 3}, "`model`: 3 is a int; it must be text."),
        ({"name": "mine.py:Judge", "model": "m", "vote": 3}, "`vote`: there is no such setting; it has model, votes."),
        ({"name": "mine.py:short", "scale": 3}, "`scale`: there is no such setting; it has none."),
    ],
)
def test_a_function_of_a_file_that_cannot_run(spec: Any, message: str, folder: Path) -> None:
    assert re.search(message, problem(spec))


@pytest.mark.parametrize(
    "spec",
    [
        "mine.py:score",
        {"name": "mine.py:score", "scale": 2},
        {"name": "mine.py:needy", "solution": 2},
        {"name": "mine.py:keyed", "level": 2},
        {"name": "mine.py:Judge", "model": "m", "votes": 3},
        *(f"mine.py:{name}" for name in ("all_of_it", "later", "cached", "decorated", "Waiting", "short", "made")),
        *(f"mine.py:{name}" for name in ("inner", "Counter")),
    ],
)
def test_a_function_of_a_file_that_can_as_far_as_its_source_tells(spec: Any, folder: Path) -> None:
    assert reward_problems([spec], COLUMNS) == []


def test_without_columns_only_what_is_sure_is_told(folder: Path) -> None:
    assert reward_problems(["mine.py:needy", "mine.py:all_of_it"]) == []
    assert "by position only" in problem("mine.py:by_position", None)
    with_more = problem("mine.py:all_of_it", [*COLUMNS, "topic"])
    assert "TRL also passes topic." in with_more


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from os.path import *\n", "join"),
        ("def __getattr__(name): return print\n", "anything"),
        ("globals()['made'] = print\n", "made"),
        ("try:\n    from x import score\nexcept ImportError:\n    score = None\n", "score"),
        ("try:\n    import x\nexcept ImportError:\n    def f(completions, **kwargs): ...\n", "f"),
        ("if 1:\n    def f(a): ...\nelse:\n    def f(completions, **kwargs): ...\n", "f"),
        ("class A(Base):\n    pass\n", "A"),
        ("a, b = print, print\n", "b"),
        ("f: object = print\n", "f"),
        ("for f in [print]:\n    g = f\n", "g"),
        ("match 1:\n    case 1:\n        g = print\n", "g"),
    ],
)
def test_what_only_running_would_tell_is_not_guessed(source: str, name: str, folder: Path) -> None:
    (folder / "other.py").write_text(source)
    assert reward_problems([f"other.py:{name}"], COLUMNS) == []


def test_a_check_runs_nothing(folder: Path) -> None:
    (folder / "other.py").write_text("raise SystemExit\ndef f(completions, **kwargs): return []\n")
    assert reward_problems(["other.py:f", "other.f"], COLUMNS) == []
    assert "other" not in sys.modules


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(:\n    pass\n", "bad.py:1: SyntaxError: invalid syntax"),
        ("\n\nx = '\n", "bad.py:3: SyntaxError: unterminated string"),
        ("f = 1\x00\n", "null bytes"),
        (b"f = '\xff'\n", "utf-8"),
    ],
)
def test_a_file_that_is_no_python_is_told_with_the_line(source: str | bytes, reason: str, folder: Path) -> None:
    (folder / "bad.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    assert reason in problem("bad.py:f")


# Dotted paths


@pytest.fixture
def package(folder: Path) -> Path:
    top = folder / "my_package"
    (top / "inner" / "space").mkdir(parents=True)
    (top / "__init__.py").write_text("raise RuntimeError('run')\n")
    (top / "inner" / "__init__.py").write_text("from .scores import score as exported\n")
    (top / "inner" / "scores.py").write_text(reward_files.SOURCE)
    (top / "inner" / "space" / "deep.py").write_text("def f(completions, **kwargs): return []\n")
    return top


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_package.inner.scores.scor", "scores.py defines no 'scor'. Did you mean 'score'?"),
        (
            "my_package.inner.score.score",
            "the package 'my_package.inner' has no module 'score'. Did you mean",
        ),
        ("my_package.iner.scores.score", "the package 'my_package' has no module 'iner'. Did you mean 'inner'?"),
        ("my_package.inner.scores.needy", "needy needs a column 'solution'"),
        ("my_package.inner.space.deep.g", "deep.py defines no 'g'"),
        ("my_pakage.inner.scores.score", "there is no module 'my_pakage'"),
        ("trl_algos.rewards.matching.numeric_mach", "Did you mean 'numeric_match'?"),
    ],
)
def test_a_module_is_found_without_being_run(name: str, message: str, package: Path) -> None:
    assert message in problem(name)
    assert "my_package" not in sys.modules


@pytest.mark.parametrize(
    "name",
    [
        "my_package.inner.scores.score",
        "my_package.inner.exported",
        "my_package.inner.space.deep.f",
        "trl_algos.rewards.matching.exact_match",
        "trl_algos.rewards.shape.length",
        "trl.rewards.accuracy_reward",
        "trl.rewards.no_such_thing",
        "os.path.join",
        "math.sin",
        "sys.nothing",
        "numpy.linalg.norm",
    ],
)
def test_what_is_there_or_cannot_be_told_passes(name: str, package: Path) -> None:
    assert reward_problems([name]) == []


@pytest.mark.parametrize("trick", ["import sys\nsys.modules['tricky.more'] = sys\n", "__path__.append('elsewhere')\n"])
def test_a_package_that_makes_modules_is_believed(trick: str, folder: Path) -> None:
    (folder / "tricky").mkdir()
    (folder / "tricky" / "__init__.py").write_text(trick)
    assert reward_problems(["tricky.more.f"]) == []


def test_a_module_that_is_loaded_already_is_what_an_import_gives(folder: Path) -> None:
    (folder / "json.py").touch()
    assert reward_problems(["json.dumps"]) == []


def test_a_compiled_module_is_believed(folder: Path) -> None:
    from importlib.machinery import EXTENSION_SUFFIXES

    (folder / "fast").mkdir()
    (folder / "fast" / "__init__.py").touch()
    (folder / "fast" / f"scores{EXTENSION_SUFFIXES[0]}").touch()
    assert reward_problems(["fast.scores.f"]) == []
    assert "has no module 'score'" in problem("fast.score.f")
