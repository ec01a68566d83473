"""A recipe whose `model_name_or_path` is an adapter: what follows from it, and what keeps a run from going on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, LlamaForCausalLM

from trl_algos.cli import main
from trl_algos.data import bundled_model_path
from trl_algos.errors import ConfigError
from trl_algos.models.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trl_algos.recipe.checks import checked_recipe
from trl_algos.recipe.continued import SOURCE

WORDS = {
    "algorithm": "ppo",
    "dataset_name": "arithmetic",
    "reward_funcs": "numeric_match",
    "use_cpu": "true",
    "bf16": "false",
    "held_out_prompts": 0,
}


def words_of(folder: Path, **more: Any) -> list[str]:
    words = WORDS | {"output_dir": folder / "run", "model_name_or_path": folder / "adapter"} | more
    return [f"--{key}={value}" for key, value in words.items()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds `adapter`, on the bundled model, and `base`, another one."""
    model = LlamaForCausalLM.from_pretrained(bundled_model_path())
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], use_dora=True, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(bundled_model_path()).save_pretrained(tmp_path / "adapter")
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path


def test_the_settings_of_lora_follow(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = checked_recipe(None, words_of(folder))
    wanted = {
        "use_peft": True,
        "lora_r": 4,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "use_dora": True,
        "use_rslora": False,
        "lora_target_modules": ["q_proj", "v_proj"],
    }
    assert {key: recipe.values[key] for key in wanted} == wanted
    assert {recipe.sources[key] for key in wanted} == {SOURCE}
    assert recipe.values["critic"] == "adapter"  # as beside any policy with LoRA
    same = {"use_peft": "true", "lora_r": 4, "lora_target_modules": "[v_proj, q_proj]", "use_dora": "true"}
    assert checked_recipe(None, words_of(folder, **same)).values["lora_r"] == 4
    assert main(["check", "--config", str(_file(folder))]) == 0
    told = capsys.readouterr().out
    assert "\n  adapter " in told  # in the memory beside the base, which lies here
    assert "not estimated" not in told


def _file(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    words = [word.removeprefix("--").split("=", 1) for word in words_of(folder)]
    path.write_text("".join(f"{key}: {value}\n" for key, value in words))
    return path


def changed(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter" / ADAPTER_CONFIG
        values = {key: str(value).format(folder=folder) if value else value for key, value in changes.items()}
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def untouched(folder: Path) -> None:
    pass


def cut_short(folder: Path) -> None:
    path = folder / "adapter" / ADAPTER_WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])


CASES: list[tuple[Callable[[Path], None], dict[str, Any], str]] = [
    (untouched, {"use_peft": "false"}, "`use_peft`: false, but '{folder}/adapter' is an adapter"),
    (untouched, {"lora_r": 8}, "`lora_r`: 8, but 4 in the adapter"),
    (untouched, {"use_dora": "false"}, "`use_dora`: False, but True in the adapter"),
    (untouched, {"lora_target_modules": "[q_proj]"}, "`lora_target_modules`: ['q_proj'], but ['q_proj', 'v_proj']"),
    (untouched, {"output_dir": "{folder}/adapter"}, "`output_dir`: '{folder}/adapter' is where the adapter lies"),
    (
        untouched,
        {"algorithm": "bradley_terry", "dataset_name": "arithmetic_preferences"},
        "is an adapter of CAUSAL_LM, and bradley_terry trains SEQ_CLS; make a model of it by `trl-algos merge`",
    ),
    (changed(base_model_name_or_path="{folder}/base"), {}, "is of another base model than '{folder}/base'"),
    (changed(base_model_name_or_path="{folder}/gone"), {}, "there is no folder '{folder}/gone'."),
    (changed(base_model_name_or_path=None), {}, "does not name its base model"),
    (changed(peft_type="LOHA"), {}, "holds an adapter of LOHA, and not LoRA's."),
    (cut_short, {}, f"{ADAPTER_WEIGHTS} is not whole"),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_keeps_a_run_from_going_on_is_one_message(case: int, folder: Path) -> None:
    spoil, more, message = CASES[case]
    spoil(folder)
    more = {key: str(value).format(folder=folder) for key, value in more.items()}
    words = words_of(folder, **more)
    if more.get("algorithm") == "bradley_terry":
        words = [word for word in words if not word.startswith(("--reward_funcs", "--held_out_prompts"))]
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError) as error:
        checked_recipe(None, words)
    (problem,) = error.value.problems
    assert problem.startswith("`")
    assert message.format(folder=folder) in problem
    assert sorted(folder.rglob("*")) == before
