"""Recipes that sample by vLLM: every key reaches TRL's config as it stands, and what cannot run is said by `check`."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_algos.errors import ConfigError
from trl_algos.recipe import schema
from trl_algos.recipe.arguments import build
from trl_algos.recipe.checks import checked_recipe
from trl_algos.recipe.reading import read_recipe

RECIPE: dict[str, Any] = {
    "algorithm": "dapo",
    "overlong_buffer": 0,
    "model_name_or_path": "arithmetic-lm",
    "dataset_name": "arithmetic",
    "reward_funcs": ["exact_match"],
    "output_dir": "runs/never",
    "use_cpu": True,
    "bf16": False,
    "use_vllm": True,
}
SHARED = {
    "vllm_model_impl": "transformers",
    "vllm_structured_outputs_regex": r"\d+",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 2.5,
    "vllm_importance_sampling_clip_min": 0.4,
}
MODES: dict[str, dict[str, Any]] = {
    "colocate": {
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": 2048,
        "vllm_tensor_parallel_size": 2,
    },
    "server": {
        "vllm_server_base_url": "http://127.0.0.1:9001",
        "vllm_server_host": "127.0.0.1",
        "vllm_server_port": 9001,
        "vllm_server_timeout": 30.0,
        "vllm_group_port": 9002,
    },
}


def written(**settings: Any) -> str:
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | settings))
    return "recipe.yaml"


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def installed(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """Have vLLM looked for with this outcome; nothing is imported by the search."""
    find, there = importlib.util.find_spec, importlib.util.find_spec("json")
    spec = there if is_there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: spec if name == "vllm" else find(name, *rest))


def test_every_key_of_vllm_is_tried_here() -> None:
    keys = {key for key in schema.settings("policy") if key.startswith("vllm_")}
    assert keys == {"vllm_mode", "vllm_importance_sampling_cap", *SHARED, *MODES["colocate"], *MODES["server"]}


@pytest.mark.parametrize("mode", MODES)
def test_every_key_reaches_trl_unchanged(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, True)
    settings = {"vllm_mode": mode, **SHARED, **MODES[mode]}
    recipe = checked_recipe(written(**settings), [], num_processes=2)
    assert recipe.part("trainer").items() >= settings.items()
    settings.pop("vllm_tensor_parallel_size", None)  # of which this one process could have no second part
    args = build(read_recipe(written(**settings))).trainer
    assert args.use_vllm is True
    assert {key: getattr(args, key) for key in settings} == settings
    defaults = schema.defaults("policy", "trainer")
    others = {key for key in defaults if key.startswith("vllm_")} - settings.keys()
    assert {key: getattr(args, key) for key in others} == {key: defaults[key] for key in others}


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_installed_is_named(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, False)
    with pytest.raises(ConfigError) as caught:
        checked_recipe(written(vllm_mode=mode), [])
    (problem,) = caught.value.problems
    assert problem.endswith('`use_vllm`: True needs a package that is not installed: `pip install "trl-algos[vllm]"`.')


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_tensor_parallel_size": 3}, "`vllm_tensor_parallel_size`: 3 does not divide 2 processes"),
        ({"load_in_8bit": True, "use_peft": True}, "`load_in_8bit`: true, which vLLM cannot have"),
    ],
)
def test_what_vllm_cannot_do_beside_training_is_said(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, True)
    with pytest.raises(ConfigError) as caught:
        checked_recipe(written(**settings, vllm_mode="colocate"), [], num_processes=2)
    (problem,) = caught.value.problems
    assert message in problem
    others = {key: value for key, value in settings.items() if not key.startswith("vllm_")}
    read_recipe(written(**others, vllm_mode="server"), (), 2)
