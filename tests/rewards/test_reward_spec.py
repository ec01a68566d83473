import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reward_files
from trl.trainer.utils import get_callable_name, is_async_callable

from trl_algos.errors import ConfigError
from trl_algos.rewards import REWARDS
from trl_algos.rewards.spec import load_reward, load_rewards, reward_names, reward_problems

COLUMNS = ["prompt", "answer"]
PASSED_BY_TRL: dict[str, Any] = {
    "prompts": ["p"],
    "completions": ["5"],
    "completion_ids": [[5]],
    "trainer_state": None,
    "log_extra": None,
    "log_metric": None,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with `mine.py`; what is imported from it is forgotten afterwards."""
    with reward_files.working_folder(tmp_path, monkeypatch):
        yield tmp_path


# Named ones


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_mach", "'exact_mach' is not one of exact_match, .* Did you mean 'exact_match'?"),
        ({"name": "numeric_mach", "tolerance": 1}, "'numeric_mach' is not one of .* Did you mean 'numeric_match'?"),
        ({"name": "numeric_match", "tolerence": 1}, "no such setting; it has column, tolerance. Did you mean 'tol"),
        ({"name": "numeric_match", "tolerance": "1e-4"}, "`tolerance`: '1e-4' is a str; it must be a number."),
        ({"name": "numeric_match", "tolerance": True}, "`tolerance`: True is a bool; it must be a number."),
        ({"name": "numeric_match", "tolerance": -1}, "`tolerance`: -1 is out of range; it must be 0 or more."),
        ({"name": "numeric_match", "column": "solution"}, "`column`: there is no column 'solution' .* has answer."),
        ({"name": "numeric_match", "column": "answers"}, "Did you mean 'answer'?"),
        ({"name": "numeric_match", "column": "prompt"}, "`column`: there is no column 'prompt'"),
        ({"name": "numeric_match", "column": 1}, "`column`: 1 is a int; it must be text."),
        ({"name": "numeric_match", "completions": []}, "`completions`: is no setting, since TRL passes it."),
        ({"name": "exact_match", "ignore_case": "yes"}, "`ignore_case`: 'yes' is a str; it must be true or false."),
        ("regex_match", "needs the setting `pattern`: {name: regex_match, pattern: ...}"),
        ({"name": "regex_match", "pattern": "("}, "`pattern`: '\\(' is not a regular expression"),
        ({"name": "regex_match", "pattern": "a", "group": 1}, "`group`: 1 is out of range; it must be one of 0."),
        ({"name": "regex_match", "pattern": "a", "group": 1.5}, "`group`: 1.5 .* a whole number or text or null."),
        ({"name": "format_tags", "tags": "think"}, "`tags`: 'think' is a str; it must be a list of texts."),
        ({"name": "length", "best": 1.5, "worst": 3}, "`best`: 1.5 is a float; it must be a whole number."),
        ("reasoning_gym", "`column`: there is no column 'entry'"),
        ("accuracy_reward", "accuracy_reward needs a column 'solution', but the data set has prompt, answer."),
        ({"name": "get_soft_overlong_punishment", "soft_punish_cache": 2000}, "`soft_punish_cache`: 2000 is out of"),
        ("get_cosine_scaled_reward", "needs the setting `max_len`|needs a column 'solution'"),
    ],
)
def test_a_named_function_that_cannot_run(spec: Any, message: str) -> None:
    found = reward_problems([spec], COLUMNS)
    assert found
    assert all(re.search(message, line) for line in found), found
    assert all(line.startswith("`reward_funcs`: ") for line in found)


@pytest.mark.parametrize(
    "spec",
    [
        "exact_match",
        {"name": "numeric_match", "tolerance": 0},
        {"name": "regex_match", "pattern": "a"},
        {"name": "regex_match", "pattern": "(a)", "group": 1},
        {"name": "format_tags", "tags": ["a", "b"], "partial": True},
        {"name": "length", "best": 1, "worst": 3},
        {"name": "get_repetition_penalty_reward", "ngram_size": 2},
        "repetition",
        "math_verify",
        "think_format_reward",
        "get_soft_overlong_punishment",
    ],
)
def test_a_named_function_that_can(spec: Any) -> None:
    assert reward_problems([spec], COLUMNS) == []
    assert reward_problems(spec, None) == []


def test_columns_that_are_not_known_are_not_missed() -> None:
    specs = ["accuracy_reward", "reasoning_gym", {"name": "exact_match", "column": "x"}]
    assert reward_problems(specs) == []


def test_a_column_that_is_called_as_a_setting_does_not_take_its_place() -> None:
    columns = [*COLUMNS, "tolerance", "tags"]
    assert reward_problems(["numeric_match", "format_tags"], columns) == []
    strict, tags = load_rewards([{"name": "numeric_match", "tolerance": 0.5}, "format_tags"], columns)
    assert strict(**PASSED_BY_TRL, answer=["4"], tolerance=["0"]) == [1.0]
    tagged = PASSED_BY_TRL | {"completions": ["<think>a</think><answer>b</answer>"]}
    assert tags(**tagged, answer=["4"], tags=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "is empty"),
        (None, "is empty"),
        ([3], "3: is of type int; it must be a name, or a block"),
        ([None], "None: is of type NoneType"),
        ([["exact_match"]], "is of type list"),
        ([{"nam": "exact_match"}], "needs a `name`, .* but has None"),
        ([{"name": 3}], "needs a `name`, .* but has 3"),
        ([{"name": "exact_match", 3: 4}], "names of settings must be text"),
        (["exact_match", "exact_match"], "'exact_match': stands there twice"),
        ([{"name": "exact_match"}, " exact_match "], "stands there twice"),
        (["mine.py"], "'mine.py': names a file but no function; write mine.py:function"),
        (["a..b"], "'a..b': is neither"),
        (["some-thing.x"], "is neither"),
    ],
)
def test_entries_that_are_none(specs: Any, message: str) -> None:
    (found,) = reward_problems(specs, COLUMNS)
    assert found.startswith("`reward_funcs`: ")
    with pytest.raises(ConfigError, match=message):
        load_rewards(specs)


def test_one_function_may_stand_there_with_several_settings() -> None:
    specs = ["numeric_match", {"name": "numeric_match", "tolerance": 0.1}, {"name": "numeric_match", "tolerance": 0.2}]
    assert reward_problems(specs) == []


def test_a_column_with_the_name_of_what_trl_passes_is_told() -> None:
    assert "has a column 'completions'" in reward_problems(["exact_match"], ["prompt", "answer", "completions"])[0]


def test_all_problems_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_rewards(["exact_mach", "exact_match", "nowhere.py:f", {"name": "length"}])
    assert len(caught.value.problems) == 4  # `length` lacks two settings


def test_every_named_function_is_described() -> None:
    described = {reward.name: reward for reward in reward_names()}
    assert described.keys() == REWARDS.keys()
    assert all(reward.summary for reward in described.values())
    assert described["numeric_match"].settings == "column: str = 'answer', tolerance: float = 1e-06"
    assert described["format_tags"].settings.startswith("tags: Sequence[str] = ('think', 'answer'), strict: bool")


# Imports


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module\ndef f(completions, **kwargs): ...\n", "bad.py:1: ModuleNotFoundError: No module"),
        ("def f(completions, **kwargs): ...\n\nx = 1 / 0\n", "bad.py:3: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('stop')\ndef f(completions, **kwargs): ...\n", "bad.py:2: SystemExit: stop"),
        ("import broken\ndef f(completions, **kwargs): ...\n", "broken.py:2: SyntaxError"),
        ("\nimport failing\ndef f(completions, **kwargs): ...\n", "bad.py:2: RuntimeError: inside"),
        ("f = 3 + 4\n", "is a int, not a function"),
        ("import functools\nf = functools.reduce(lambda a, b: a, [lambda a: a])\n", "f must take `**kwargs`"),
        ("class f:\n    def __init__(self): raise OSError('no key')\n    def __call__(self, **k): ...\n", "no key"),
        ("class f(list):\n    pass\n", "is a class without `__call__`"),
        ("def __getattr__(name): raise AttributeError(name)\n", "AttributeError: f"),
    ],
)
def test_what_an_import_raises_becomes_a_message_with_the_line(source: str, reason: str, folder: Path) -> None:
    (folder / "bad.py").write_text(source)
    (folder / "failing.py").write_text("raise RuntimeError('inside')\n")
    (folder / "broken.py").write_text("x = 1\ndef g(:\n")
    with pytest.raises(ConfigError) as caught:
        load_reward("bad.py:f")
    assert str(caught.value).startswith("`reward_funcs`: 'bad.py:f': ")
    assert reason in str(caught.value)


def test_a_keyboard_interrupt_during_an_import_ends_it(folder: Path) -> None:
    (folder / "bad.py").write_text("def f(completions, **kwargs): ...\nraise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_reward("bad.py:f")


def test_the_signature_is_checked_again_once_it_is_known(folder: Path) -> None:
    (folder / "other.py").write_text("from mine import needy, score\n")
    assert reward_problems(["other.py:needy"], COLUMNS) == []
    with pytest.raises(ConfigError, match="needy needs a column 'solution'"):
        load_rewards(["other.py:needy"], COLUMNS)
    with pytest.raises(ConfigError, match="`scal`: there is no such setting; it has scale"):
        load_reward({"name": "other.py:score", "scal": 2.0})


def test_functions_load_with_their_settings(folder: Path) -> None:
    specs = [
        "mine.py:score",
        {"name": "mine.py:score", "scale": 2.0},
        {"name": "mine.score", "scale": 3.0},
        {"name": "mine.py:Judge", "model": "m", "votes": 7},
        "mine.py:short",
        "mine.py:made",
        {"name": "mine.py:decorated", "scale": 6.0},
        {"name": "mine.py:needy", "solution": [8]},
        "mine.py:all_of_it",
        {"name": "numeric_match", "tolerance": 0.5},
        "exact_match",
    ]
    loaded = load_rewards(specs, COLUMNS)
    rewards = [function(**PASSED_BY_TRL, answer=["4"]) for function in loaded]
    assert rewards == [[1.0], [2.0], [3.0], [7.0], [3.0], [4.0], [6.0], [8.0], [1.0], [1.0], [0.0]]
    names = [get_callable_name(function) for function in loaded]
    assert names == [
        *("score", "score_2", "score_3", "Judge", "short", "score_4", "call", "needy", "all_of_it"),
        *("numeric_match", "exact_match"),
    ]


def test_settings_win_over_columns(folder: Path) -> None:
    bound = load_reward({"name": "mine.py:score", "scale": 2.0})
    assert bound(**PASSED_BY_TRL, scale=["column"]) == [2.0]


def test_names_that_are_taken_are_passed_over(folder: Path) -> None:
    (folder / "other.py").write_text("def score_2(completions, **kwargs): return []\n")
    loaded = load_rewards(["mine.py:score", "other.py:score_2", {"name": "mine.py:score", "scale": 2.0}])
    assert [function.__name__ for function in loaded] == ["score", "score_2", "score_3"]


@pytest.mark.parametrize(
    ("spec", "reward"),
    [("mine.py:later", 1.0), ({"name": "mine.py:later", "scale": 3.0}, 3.0), ("mine.py:Waiting", 2.0)],
)
def test_async_functions_stay_async(spec: Any, reward: float, folder: Path) -> None:
    function: Callable[..., Any] = load_reward(spec)
    assert is_async_callable(function)
    assert asyncio.run(function(**PASSED_BY_TRL)) == [reward]
    assert not is_async_callable(load_reward("mine.py:score"))


def test_a_function_without_settings_is_itself(folder: Path) -> None:
    assert load_reward("mine.score") is sys.modules["mine"].score


def test_a_file_is_run_once_for_all_its_functions(folder: Path) -> None:
    (folder / "other.py").write_text(
        "open('runs', 'a').write('x')\ndef f(completions, **kwargs): ...\ndef g(completions, **kwargs): ...\n"
    )
    load_rewards(["other.py:f", "./other.py:g"])
    assert (folder / "runs").read_text() == "x"


def test_a_file_finds_its_neighbours_and_does_not_hide_others(folder: Path) -> None:
    package = folder / "rewards"
    package.mkdir()
    (package / "neighbour.py").write_text("value = 3.0\n")
    (package / "late.py").write_text("value = 4.0\n")
    (package / "json.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour import value\n"
        "@dataclass\n"
        "class Row:\n"
        "    x: int\n"
        "def f(completions, **kwargs):\n"
        "    from late import value as later\n"
        "    return [value + later]\n"
    )
    before = sys.path.copy()
    assert load_reward("rewards/json.py:f")(**PASSED_BY_TRL) == [7.0]
    assert sys.path == [*before, str(package)]
    import json

    assert json.loads("1") == 1


def test_a_module_of_the_working_folder_loads(folder: Path) -> None:
    (folder / "failing.py").write_text("raise RuntimeError('run')\ndef score(completions, **kwargs): ...\n")
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(folder))]
    assert load_reward("mine.score")(**PASSED_BY_TRL) == [1.0]
    with pytest.raises(ConfigError, match=r"failing\.py:1: RuntimeError: run"):
        load_reward("failing.score")


def test_checks_load_nothing_heavy() -> None:
    code = """
import sys
from trl_algos.rewards.spec import reward_names, reward_problems
assert reward_names()
specs = ["math_verify", "reasoning_gym", "accuracy_reward", "repetition", "trl.rewards.accuracy_reward", "torch.f.g"]
reward_problems([*specs, {"name": "get_cosine_scaled_reward", "max_len": 5}], ["solution", "entry", "answer"])
heavy = {"torch", "transformers", "trl", "datasets", "peft", "accelerate", "reasoning_gym", "math_verify", "sympy"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_own_settings_have_types() -> None:
    """A setting without one could not be checked."""
    for name, function in REWARDS.items():
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.annotation is not parameter.empty, name
