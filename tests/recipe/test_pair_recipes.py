"""Recipes on preference pairs as they are read: keys, kinds, and those that TRL's own commands take."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trl_algos import BradleyTerryConfig, ConfigError, PreferenceConfig
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS, preference_keys
from trl_algos.recipe import schema
from trl_algos.recipe.arguments import Arguments, build
from trl_algos.recipe.reading import Recipe, read_recipe
from trl_algos.settings.kinds import kind_of

ON_CPU = ("--use_cpu", "--report_to=none", "--output_dir=unused")


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Recipe]:
    def read(text: str, *words: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return read_recipe(str(path), [*ON_CPU, *words])

    return read


@pytest.fixture
def problems(read: Callable[..., Recipe], tmp_path: Path) -> Callable[..., list[str]]:
    """Problems of a recipe, with FILE in the place of the path."""

    def problems(text: str, *words: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            read(text, *words)
        return [message.replace(str(tmp_path / "recipe.yaml"), "FILE") for message in error.value.problems]

    return problems


@pytest.mark.parametrize("key", PREFERENCE_ALGORITHMS)
def test_the_kind_follows_from_the_algorithm(key: str, read: Callable[..., Recipe]) -> None:
    recipe = read(f"algorithm: {key}")
    arguments = build(recipe)
    cls = BradleyTerryConfig if key == "bradley_terry" else PreferenceConfig
    assert recipe.kind == arguments.kind == kind_of(key)
    assert type(arguments.trainer) is cls
    assert arguments.trainer.algorithm == key
    assert arguments.run.held_out_pairs == 0
    assert arguments.model.lora_task_type == ("SEQ_CLS" if key == "bradley_terry" else "CAUSAL_LM")


def test_an_option_can_change_the_kind(read: Callable[..., Recipe]) -> None:
    assert read("seed: 1").kind == "policy"
    assert read("algorithm: grpo\nseed: 1", "--algorithm=dpo").kind == "preference"
    assert read("algorithm: dpo\nbeta: 0.2", "--algorithm=grpo").kind == "policy"


def test_rows_files_and_options_in_their_order(read: Callable[..., Recipe]) -> None:
    assert build(read("algorithm: cdpo")).trainer.label_smoothing == 0.1
    assert build(read("algorithm: cdpo\nlabel_smoothing: 0.2")).trainer.label_smoothing == 0.2
    assert build(read("algorithm: cdpo\nlabel_smoothing: 0.2", "--label_smoothing=0.3")).trainer.label_smoothing == 0.3
    assert build(read("algorithm: bradley_terry")).trainer.learning_rate == 1e-4  # TRL's default
    assert build(read("algorithm: dpo\nmax_length: 8.0")).trainer.max_length == 8
    assert build(read("algorithm: dpo\nmax_length:")).trainer.max_length is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "algorithm: dpo\nnum_generations: 8",
            "FILE:2: `num_generations`: belongs to algorithms that sample (grpo, dr_grpo, dapo, ...); dpo trains on "
            "pairs.",
        ),
        (
            "algorithm: bradley_terry\nbeta: 0.1",
            "FILE:2: `beta`: belongs to algorithms that sample (grpo, dr_grpo, dapo, ...) and policies trained on "
            "preference pairs (dpo, ipo, cdpo, ...); bradley_terry trains a reward model on pairs.",
        ),
        (
            "algorithm: dapo\nheld_out_pairs: 8",
            "FILE:2: `held_out_pairs`: belongs to policies trained on preference pairs (dpo, ipo, cdpo, ...) and "
            "reward models (bradley_terry); dapo samples.",
        ),
        (
            "max_length: 8",
            "FILE:1: `max_length`: belongs to policies trained on preference pairs (dpo, ipo, cdpo, ...) and reward "
            "models (bradley_terry); `algorithm` is not set, so this one samples.",
        ),
        ("algorithm: dpo\nrpo_alpha: 1", "FILE:2: `rpo_alpha`: is `nll_coef` of `algorithm: rpo`."),
        (
            "algorithm: dpo\nmax_prompt_length: 8",
            "FILE:2: `max_prompt_length`: is not part of TRL 1.16: `max_length` holds for prompt and completion "
            "together.",
        ),
        ("algorithm: dpo\nbetta: 1", "FILE:2: `betta`: there is no such setting. Did you mean `beta`?"),
        (
            "algorithm: dpo\nmax-length: 8",
            "FILE:2: `max-length`: there is no such setting. Did you mean `max_length`?",
        ),
        ("algorithm: dpo\nbeta: high", "FILE:2: `beta`: 'high' is a str; it must be a number."),
        ("algorithm: dpo\nbeta: 0", "FILE:2: `beta`: 0.0 is out of range; it must be above 0."),
        (
            "algorithm: dpo\nnll_coef: 1",
            "FILE:2: `nll_coef`: 1.0 has no effect with `algorithm` dpo; those with it: rpo.",
        ),
        (
            "algorithm: ipo\nlabel_smoothing: 0.1",
            "FILE:2: `label_smoothing`: 0.1 has no effect with `algorithm` ipo; those with it: cdpo, robust_dpo.",
        ),
        (
            "algorithm: bradley_terry\nmax_length: 1",
            "FILE:2: `max_length`: 1 is out of range; it must be a whole number of tokens, 2 or more.",
        ),
        ("algorithm: dpo\nlora_r: 8", "FILE:2: `lora_r`: 8 is not used: `use_peft` is not set."),
        ("algorithm: dpo\nsave_strategy: best", "FILE:2: `save_strategy`: best needs evaluations to compare; set "),
        ("algorithm: dpo\nper_device_train_batch_size: 0", "FILE:2: `per_device_train_batch_size`: 0 is out of range"),
        ("algorithm: bradley_terry\nlearning_rate: -1", "FILE:2: `learning_rate`: -1.0 is out of range"),
        (
            "algorithm: bradley_terry\nload_best_model_at_end: true\neval_strategy: epoch",
            "FILE:2: `load_best_model_at_end`: needs `eval_strategy` (epoch) and `save_strategy` (steps) to be equal",
        ),
        ("algorithm: dpo\nbf16: true\nfp16: true", "FILE:3: `fp16`: true together with `bf16`"),
        ("algorithm: dpo\naccelerator_config: {even_batch: true}", "FILE:2: `accelerator_config`: there is no 'even_"),
        ("algorithm: dpo\ndataloader_prefetch_factor: 2", "FILE:2: `dataloader_prefetch_factor`: is not used without"),
        ("algorithm: dpo\nlabel_smoothing_factor: 0.1", "FILE:2: `label_smoothing_factor`: 0.1 has no effect"),
        ("algorithm: dpo\nref_model_sync_steps: 8", "FILE:2: `ref_model_sync_steps`: 8 has no effect unless"),
        (
            "algorithm: dpo\nsync_ref_model: true\nprecompute_ref_log_probs: true",
            "FILE:2: `sync_ref_model`: true moves the reference",
        ),
        (
            "algorithm: dpo\nliger_kernel_config: {fused_linear_cross_entropy: true}",
            "FILE:2: `liger_kernel_config`: fused_linear_cross_entropy cannot be used",
        ),
        ("algorithm: bradley_terry\npad_token: <pad>", "FILE:2: `pad_token`: '<pad>' decides where scores are read"),
    ],
)
def test_one_message_by_key(problems: Callable[..., list[str]], text: str, message: str) -> None:
    (found,) = problems(text)
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("loss_type", "instead"),
    [
        ("ipo", "Set `algorithm: ipo`."),
        ("robust", "Set `algorithm: robust_dpo`."),
        ("[sigmoid, sft]", "Set `algorithm: rpo`."),
        ("hinge", "There are dpo, ipo, cdpo, robust_dpo, rpo."),
    ],
)
def test_a_loss_type_is_answered(problems: Callable[..., list[str]], loss_type: str, instead: str) -> None:
    (message,) = problems(f"algorithm: dpo\nloss_type: {loss_type}")
    assert "is replaced by `algorithm`" in message
    assert message.endswith(instead)


def test_a_loss_type_without_an_algorithm_is_answered(problems: Callable[..., list[str]]) -> None:
    (message,) = problems("loss_type: sigmoid")
    assert message == "FILE:1: `loss_type`: 'sigmoid' is `algorithm: dpo`, on pairs."


@pytest.mark.parametrize("key", ["bradly_terry", "robust-dpo", "cdppo"])
def test_of_an_unknown_algorithm_only_that_is_said(problems: Callable[..., list[str]], key: str) -> None:
    (message,) = problems(f"algorithm: {key}\nmax_length: 8\nlabel_smoothing: 0.1\nheld_out_pairs: 2")
    assert message.startswith(f"FILE:1: `algorithm`: {key!r} is not one of grpo, ")
    assert "Did you mean" in message


PLAIN_DPO = """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
dataset_train_split: train
learning_rate: 5.0e-6
num_train_epochs: 1
per_device_train_batch_size: 2
max_steps: 1000
gradient_accumulation_steps: 8
eval_strategy: steps
eval_steps: 50
output_dir: Qwen2-0.5B-DPO
remove_unused_columns: false
loss_type: sigmoid
beta: 0.1
max_length: 1024
truncation_mode: keep_start
precompute_ref_log_probs: true
precompute_ref_batch_size: 4
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
load_in_4bit: true
gradient_checkpointing: true
bf16: true
logging_steps: 25
"""
"""As TRL's `scripts/dpo.py` shows it, with further keys of `trl dpo --config`."""

PLAIN_REWARD = """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/ultrafeedback_binarized
output_dir: Qwen2-0.5B-Reward-LoRA
per_device_train_batch_size: 8
num_train_epochs: 1
learning_rate: 1.0e-4
eval_strategy: steps
eval_steps: 50
max_length: 2048
center_rewards_coefficient: 0.01
use_peft: true
lora_task_type: SEQ_CLS
lora_r: 32
lora_alpha: 16
bf16: true
"""
"""The same of `scripts/reward.py`."""


def classes_of_trl(kind: str, text: str, tmp_path: Path) -> Any:
    """What TRL's own parser makes of a recipe."""
    from trl import DatasetMixtureConfig, DPOConfig, ModelConfig, RewardConfig, ScriptArguments, TrlParser

    (tmp_path / "plain.yaml").write_text(text)
    config = DPOConfig if kind == "preference" else RewardConfig
    parser = TrlParser((ScriptArguments, config, ModelConfig, DatasetMixtureConfig))
    words = ["--config", f"{tmp_path}/plain.yaml", "--use_cpu", "--report_to=none"]
    return parser.parse_args_and_config(words, fail_with_unknown_args=False)


@pytest.mark.parametrize(("key", "text"), [("dpo", PLAIN_DPO), ("bradley_terry", PLAIN_REWARD)])
def test_a_plain_recipe_of_trl_needs_the_algorithm_alone(
    key: str, text: str, read: Callable[..., Recipe], tmp_path: Path
) -> None:
    arguments: Arguments = build(read(f"algorithm: {key}\n{text}"))
    parts = (arguments.run, arguments.trainer, arguments.model)
    theirs_in = classes_of_trl(arguments.kind, text, tmp_path)[:3]
    for line in text.strip().splitlines():
        name = line.partition(":")[0]
        if name == "output_dir":
            continue
        (ours,) = [getattr(part, name) for part in parts if hasattr(part, name)]
        (theirs,) = [getattr(part, name) for part in theirs_in if hasattr(part, name)]
        assert ours == theirs, name


def test_what_only_plain_recipes_of_reward_models_say_is_refused_elsewhere(problems: Callable[..., list[str]]) -> None:
    (message,) = problems("algorithm: dpo\ncenter_rewards_coefficient: 0.1")
    assert "`center_rewards_coefficient`: belongs to reward models (bradley_terry); dpo trains on pairs." in message


@pytest.mark.parametrize("key", preference_keys("policy"))
def test_what_a_run_writes_down_can_be_read_again(key: str, read: Callable[..., Recipe]) -> None:
    """Every resolved value, as `write_recipe` puts it into the run's folder."""
    first = read(f"algorithm: {key}")
    config, names = build(first).trainer, ("beta", "label_smoothing", "nll_coef")
    words = [f"--{name}={getattr(config, name)}" for name in names]
    again = build(read(f"algorithm: {key}\nloss_type: {config.loss_type}", *words)).trainer
    assert [getattr(again, name) for name in names] == [getattr(config, name) for name in names]
    assert again.loss_type == config.loss_type


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("algorithm: dpo\nlearning_rate: -1\nnum_generations: 3\n")
    code = (
        "import sys\nfrom trl_algos.cli import main\nassert main(['check', 'recipe.yaml']) == 2\n"
        "sys.exit(bool({'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_no_key_of_a_kind_is_unknown_to_all() -> None:
    for kind in schema.PARTS:
        assert set(schema.settings(kind)) <= set(schema.every_key())
        assert all(kind in schema.kinds_with(key) for key in schema.settings(kind))
