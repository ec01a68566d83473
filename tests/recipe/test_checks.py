"""What `check` finds: each message with its key and place, and all of them together."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_algos.data import bundled_model_path
from trl_algos.errors import ConfigError
from trl_algos.recipe import checks
from trl_algos.recipe.arguments import build
from trl_algos.recipe.checks import checked_recipe, data_spec
from trl_algos.recipe.measured import needs_test_split
from trl_algos.recipe.reading import read_recipe
from trl_algos.recipe.summary import summary

SETTINGS: dict[str, Any] = {
    "algorithm": "dapo",
    "overlong_buffer": 0,
    "model_name_or_path": "arithmetic-lm",
    "dataset_name": "arithmetic",
    "reward_funcs": ["exact_match"],
    "use_cpu": True,
    "bf16": False,
}


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Problems of a good recipe with changes; None takes a key out."""
    monkeypatch.chdir(tmp_path)
    # What is installed here is another matter, with a test of its own.
    monkeypatch.setattr(checks, "_PACKAGES", {"use_vllm": checks._PACKAGES["use_vllm"]})

    def found(*words: str, processes: int | None = None, **changes: Any) -> list[str]:
        settings = {key: value for key, value in {**SETTINGS, **changes}.items() if value is not None}
        Path("recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        try:
            checked_recipe("recipe.yaml", words, processes)
        except ConfigError as error:
            return error.problems
        return []

    return found


def line_of(key: str) -> int:
    lines = Path("recipe.yaml").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.startswith(f"{key}:"))


def test_a_good_recipe_has_no_problem(found: Callable[..., list[str]]) -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_name_or_path": "./nowhere"}, "'./nowhere'"),
        ({"model_name_or_path": "arithmetic-ml"}, "arithmetic-lm"),
        ({"reward_model_name_or_path": "./nowhere"}, "'./nowhere'"),
        ({"dataset_name": "nowhere.jsonl"}, "there is no file or folder 'nowhere.jsonl'"),
        ({"dataset_name": "notes.txt"}, "'.txt'"),
        ({"dataset_test_split": "dev", "held_out_prompts": 4}, "'dev' is not a split"),
        ({"reward_funcs": ["exact_mach"]}, "Did you mean 'exact_match'?"),
        ({"reward_funcs": ["accuracy_reward"]}, "solution"),
        ({"reward_weights": [1.0, 2.0]}, "2 weights for 1 reward"),
        ({"reward_normalization": True}, "there is no reward model"),
        ({"output_dir": "notes.txt"}, "is a file"),
        ({"output_dir": " "}, "is empty"),
        ({"resume_from_checkpoint": "nowhere"}, "is not a folder"),
        ({"deepspeed": "nowhere.json"}, "cannot be read"),
        ({"deepspeed": "notes.txt"}, "is not valid JSON"),
        ({"report_to": "trakio"}, "trackio"),
        ({"use_vllm": True}, "pip install"),
        ({"load_in_4bit": True}, "set `use_peft`"),
        ({"lora_target_modules": ["q_porj"], "use_peft": True}, "Did you mean 'q_proj'?"),
        ({"system_prompt": "Add."}, "chat template"),
        ({"conversational": True}, "chat template"),
        ({"dataset_parameters": {"size": 0.5}}, "size"),
        ({"held_out_prompts": 9, "dataset_parameters": {"test_size": 4}}, "4 test prompts"),
        ({"dataset_parameters": {"size": 7}, "per_device_train_batch_size": 64}, "takes 8 prompts"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_one_problem_with_its_place(found: Callable[..., list[str]], changes: dict[str, Any], says: str) -> None:
    Path("notes.txt").write_text("notes")
    (message,) = found(**changes)
    key = next(iter(changes))
    assert message.startswith(f"recipe.yaml:{line_of(key)}: `{key}`: ")
    assert says in message


def test_reward_models_may_be_adapters_and_need_figures_to_be_normalised_by(
    found: Callable[..., list[str]], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    AutoTokenizer.from_pretrained(bundled_model_path()).save_pretrained("adapter")
    base = AutoModelForSequenceClassification.from_pretrained(bundled_model_path(), num_labels=1)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS")).save_pretrained("adapter")
    assert found(reward_model_name_or_path="adapter") == []
    (message,) = found(reward_model_name_or_path="adapter", reward_normalization=True)
    assert message.startswith(f"recipe.yaml:{line_of('reward_normalization')}: `reward_normalization`: ")
    assert "'adapter' has no `reward_mean` and no `reward_std`" in message
    Path("adapter/reward_model.json").write_text('{"reward_mean": 0.1, "reward_std": 2.0}')
    assert found(reward_model_name_or_path="adapter", reward_normalization=True) == []
    config = Path("adapter/adapter_config.json")
    config.write_text(config.read_text().replace(bundled_model_path(), "./gone"))
    (message,) = found(reward_model_name_or_path="adapter")
    assert message.startswith(f"recipe.yaml:{line_of('reward_model_name_or_path')}: `reward_model_name_or_path`: ")
    assert "'./gone'" in message


@pytest.mark.parametrize(
    ("missing", "key"),
    [("model_name_or_path", "model_name_or_path"), ("dataset_name", "dataset_name"), ("reward_funcs", "reward_funcs")],
)
def test_what_every_recipe_needs(found: Callable[..., list[str]], missing: str, key: str) -> None:
    (message,) = found(**{missing: None})
    assert message.startswith(f"`{key}`: not set")


def test_packages_that_are_not_installed(found: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    package = (bool, "no_such_module", "no-such-package")
    monkeypatch.setattr(checks, "_PACKAGES", {"use_liger_kernel": package, "deepspeed": package})
    (message,) = found(use_liger_kernel=True)
    assert message.startswith(f"recipe.yaml:{line_of('use_liger_kernel')}: `use_liger_kernel`: True needs a package")
    assert message.endswith("`pip install no-such-package`.")


def test_both_quantisations_at_once(found: Callable[..., list[str]]) -> None:
    (message,) = found(use_peft=True, load_in_4bit=True, load_in_8bit=True)
    assert "`load_in_8bit`: true together with `load_in_4bit`" in message


def test_problems_of_every_kind_come_together(found: Callable[..., list[str]]) -> None:
    """Keys, types, settings, model, data, rewards; a key of the wrong type is complained of once."""
    messages = found(
        bta=1,
        seed="x",
        epsilon=2.0,
        model_name_or_path="./nowhere",
        dataset_name="nowhere.jsonl",
        reward_funcs=["exact_mach", "nowhere.py:f"],
        dataset_parameters=[1],
    )
    keys = [message.split("`")[1] for message in messages]
    assert sorted(keys) == [
        *("bta", "dataset_name", "dataset_parameters", "epsilon", "model_name_or_path"),
        *("reward_funcs", "reward_funcs", "seed"),
    ]


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"critic": "shared"}, True),
        ({"use_peft": True}, True),  # whose critic is an adapter
        ({"critic": "separate", "use_peft": True}, False),
        ({}, False),  # a critic of its own
    ],
)
def test_dropout_with_a_critic_on_the_policys_layers(
    found: Callable[..., list[str]], settings: dict[str, Any], refused: bool
) -> None:
    messages = found(algorithm="ppo", overlong_buffer=None, disable_dropout=False, **settings)
    assert [message.split("`")[1] for message in messages] == ["disable_dropout"] * refused
    assert found(algorithm="ppo", overlong_buffer=None, **settings) == []


def test_an_unknown_algorithm_hides_nothing(found: Callable[..., list[str]]) -> None:
    messages = found(algorithm="dappo", lora_r=0, num_generations=7, dataset_name="nowhere.jsonl", use_peft=True)
    assert [message.split("`")[1] for message in messages] == [
        *("algorithm", "num_generations", "lora_r", "dataset_name"),
    ]


def test_batches_are_judged_for_the_launch(found: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"per_device_train_batch_size": 3, "num_generations": 6}
    assert found(**sizes)
    assert found(**sizes, processes=2) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert found(**sizes) == []


def test_a_file_that_lies_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths count from the working folder: the message says where the file is."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "mine.py").write_text("def score(completions, **kwargs): return [1.0] * len(completions)\n")
    (folder / "mine.jsonl").write_text('{"prompt": "1+1="}\n')
    changes = {"reward_funcs": ["mine.py:score"], "dataset_name": "mine.jsonl"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**SETTINGS, **changes}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        checked_recipe("recipes/recipe.yaml", [])
    assert [message.endswith("the folder that the command is run in.") for message in error.value.problems] == [
        True
    ] * 2
    monkeypatch.chdir(folder)
    assert checked_recipe("recipe.yaml", []).values["dataset_name"] == "mine.jsonl"


def test_a_recipe_is_not_changed_by_what_is_built_of_it(found: Callable[..., list[str]]) -> None:
    """TRL turns the entries of `datasets` into objects, in the list that it is given."""
    assert found(dataset_name=None, datasets=[{"path": "arithmetic"}, {"path": "arithmetic"}]) == []
    recipe = read_recipe("recipe.yaml")
    build(recipe)
    assert data_spec(recipe).datasets == [{"path": "arithmetic"}, {"path": "arithmetic"}]


@pytest.mark.parametrize(
    ("settings", "needed"),
    [({}, False), ({"held_out_prompts": 1}, True), ({"eval_strategy": "steps", "eval_steps": 5}, True)],
)
def test_when_the_test_split_is_needed(settings: dict[str, Any], needed: bool) -> None:
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    assert needs_test_split(read_recipe(None, ["--algorithm=dapo", *words]).values) is needed


# The summary


def test_weights_of_another_kind_are_no_problem(found: Callable[..., list[str]], tmp_path: Path) -> None:
    """Only safetensors tell their shapes; a model of pickled weights trains all the same."""
    folder = Path(shutil.copytree(bundled_model_path(), tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x" * 100)
    assert found(model_name_or_path="model") == []
    assert any("Memory: not estimated." in line for line in summary(checked_recipe("recipe.yaml", [])))


def test_an_unset_algorithm_is_a_doubt(found: Callable[..., list[str]]) -> None:
    assert found(algorithm=None, overlong_buffer=None) == []
    lines = summary(checked_recipe("recipe.yaml", []))
    assert any(line.startswith("  Doubt: `algorithm` is not set, so it is grpo") for line in lines)
    assert found(max_steps=1) == []
    assert not any("Doubt" in line for line in summary(checked_recipe("recipe.yaml", [])))


def test_a_model_that_lies_elsewhere_is_not_estimated(found: Callable[..., list[str]]) -> None:
    assert found(model_name_or_path="some/model") == []
    assert summary(checked_recipe("recipe.yaml", []))[-1].endswith("the model does not lie here.")


def test_json_settings_may_stand_in_a_file(found: Callable[..., list[str]]) -> None:
    Path("accelerator.json").write_text(json.dumps({"split_batches": False}))
    assert found(accelerator_config="accelerator.json") == []
    (message,) = found(accelerator_config={"split_batchs": False})
    assert "Did you mean 'split_batches'?" in message
