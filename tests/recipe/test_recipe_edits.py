"""Recipes edited at random: always a plan, or a message that names a key; never a traceback, never a file written."""

import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_algos.cli import main
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS
from trl_algos.recipe import schema
from trl_algos.recipe.arguments import build
from trl_algos.recipe.reading import read_recipe
from trl_algos.settings.kinds import kind_of

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
EDITS, SHARDS = 2000, 8
EDITS_OF_PAIRS, SHARDS_OF_PAIRS = 1000, 4
ON_CPU = {"use_cpu": True, "bf16": False}

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 8, 64, 10**400, 0.5, -0.5, 1.5, 1e-6, 1e300, float("nan"), float("inf")),
    *(
        "",
        " ",
        "no",
        "off",
        "false",
        "true",
        "null",
        "none",
        "1e-6",
        "1e2",
        "8.0",
        "seven",
        "a: b",
        "../x",
        "{",
        "{a}",
    ),
    *("token", "sequence", "clip", "k3", "steps", "epoch", "dapo", "arithmetic", "exact_match", "missing.py:score"),
    *([], [1], ["a", "b"], [None], [[1]], {}, {"a": 1}, {"name": "exact_match"}, [{"name": 1}], [{"path": "x"}]),
    *("ü", "\t", "a\nb", "%s", "{0}", "{prompt}", "\\", "~", "-", "2024-01-01", "0x10", "0o7", "1_000", ".inf"),
)


ON_PAIRS: dict[str, Any] = {
    "model_name_or_path": "arithmetic-lm",
    "dataset_name": "arithmetic_preferences",
    "dataset_parameters": {"size": 64, "test_size": 16},
    "max_length": 32,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine",
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "held_out_pairs": 8,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "use_peft": True,
    "lora_r": 8,
    "output_dir": "runs/pairs",
}


def recipes_on_pairs() -> list[dict[str, Any]]:
    return [{"algorithm": key, **ON_PAIRS} for key in PREFERENCE_ALGORITHMS]


def recipes_of_policies() -> list[dict[str, Any]]:
    recipes = [yaml.safe_load(path.read_text()) for path in RECIPES]
    return [recipe for recipe in recipes if kind_of(recipe.get("algorithm")) == "policy"]


def edited(recipes: list[dict[str, Any]], random_: random.Random) -> str:
    """The text of a recipe with one to three edits: of keys, of values, or of the text itself."""
    settings = {**random_.choice(recipes), **ON_CPU}
    for _ in range(random_.randint(1, 3)):
        random_.choice(EDITS_OF_SETTINGS)(settings, random_)
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    return edited_text(text, random_) if random_.random() < 0.2 else text


def set_value(settings: dict[str, Any], random_: random.Random) -> None:
    settings[random_.choice(list(settings))] = random_.choice(VALUES)


def add_key(settings: dict[str, Any], random_: random.Random) -> None:
    settings[random_.choice(list(schema.settings(kind_of(settings.get("algorithm")))))] = random_.choice(VALUES)


def add_good_key(settings: dict[str, Any], random_: random.Random) -> None:
    """A key with its own default, or with twice as much."""
    setting = random_.choice(list(schema.settings(kind_of(settings.get("algorithm"))).values()))
    number = isinstance(setting.default, int | float) and not isinstance(setting.default, bool)
    settings[setting.name] = setting.default * random_.choice((1, 2)) if number else setting.default


def misspell(settings: dict[str, Any], random_: random.Random) -> None:
    key = random_.choice(list(settings))
    place = random_.randrange(len(key))
    wrong = random_.choice(
        (key[:place] + key[place + 1 :], key.replace("_", "-"), key[: place + 1], key.upper(), key + "s")
    )
    settings[wrong] = settings.pop(key)


def drop(settings: dict[str, Any], random_: random.Random) -> None:
    if len(settings) > 1:
        del settings[random_.choice(list(settings))]


EDITS_OF_SETTINGS: tuple[Callable[[dict[str, Any], random.Random], None], ...] = (
    set_value,
    set_value,
    add_key,
    add_key,
    add_good_key,
    misspell,
    drop,
)


def edited_text(text: str, random_: random.Random) -> str:
    lines = text.splitlines()
    place = random_.randrange(len(lines))
    kind = random_.randrange(5)
    if kind == 0:
        lines.insert(place, random_.choice(lines))  # a key twice
    elif kind == 1:
        lines[place] = " " * random_.randint(1, 4) + lines[place]
    elif kind == 2:
        lines[place] = lines[place].replace(":", random_.choice(("", " ", "::", "=")), 1)
    elif kind == 3:
        cut = random_.randrange(len(lines[place]) + 1)
        lines[place] = lines[place][:cut] + random_.choice("\t\x00{}[]&*!|>'\"%@`#,?:-") + lines[place][cut:]
    else:
        del lines[place:]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_an_edited_recipe_gives_a_plan_or_a_message(
    shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    check_edits(recipes_of_policies(), range(shard, EDITS, SHARDS), capsys)


@pytest.mark.parametrize("shard", range(SHARDS_OF_PAIRS))
def test_an_edited_recipe_on_pairs_gives_a_plan_or_a_message(
    shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    check_edits(recipes_on_pairs(), range(shard, EDITS_OF_PAIRS, SHARDS_OF_PAIRS), capsys)


def check_edits(recipes: list[dict[str, Any]], numbers: range, capsys: pytest.CaptureFixture[str]) -> None:
    """Every edit of these numbers, in the working folder."""
    path, plans = Path("recipe.yaml"), 0
    for number in numbers:
        text = edited(recipes, random.Random(number))
        path.write_text(text, encoding="utf-8")
        code = main(["check", "recipe.yaml"])
        out, err = capsys.readouterr()
        assert sorted(Path().iterdir()) == [path], f"edit {number} wrote a file"
        if code == 0:
            plans += 1
            check_that_it_builds(number)
        else:
            assert code == 2, number
            assert out == "", number
            for message in err.splitlines()[1:]:
                assert re.match(r"  (recipe\.yaml(:\d+)?: |`)", message), f"edit {number}: {message}"
    assert len(numbers) * 0.05 < plans < len(numbers) * 0.7


def check_that_it_builds(number: int) -> None:
    """A recipe that `check` lets through is one that TRL and transformers take."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            build(read_recipe("recipe.yaml", ["--use_cpu", "--bf16=false", "--tf32=null"]))
        except Exception as error:
            raise AssertionError(f"edit {number}: {error}") from error
