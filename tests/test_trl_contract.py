"""The private names of TRL that we rely on, checked against the installed TRL: what fails here moved in TRL."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer

from trl_algos import PolicyTrainer, PPOTrainer, _compat
from trl_algos.trainers.checkpointing import WholeCheckpoints
from trl_algos.trainers.public_uploads import PublicUploads

INSTALLED = f"TRL {version('trl')}"
PACKAGE = Path(_compat.__file__).parent
PREFERENCE_SOURCES = [
    PACKAGE / "trainers" / "preference_trainer.py",
    PACKAGE / "trainers" / "bradley_terry_trainer.py",
    *sorted((PACKAGE / "trainers" / "preference").glob("*.py")),
]
"""Those on TRL's `DPOTrainer` and `RewardTrainer`: see `test_preference_contract.py`."""
TRAINER_SOURCES = [
    *(path for path in sorted((PACKAGE / "trainers").rglob("*.py")) if path not in PREFERENCE_SOURCES),
    PACKAGE / "run" / "held_out.py",
]
RUN_SOURCES = sorted((PACKAGE / "run").glob("*.py"))
LISTED = {
    *_compat.GRPO_TRAINER_METHODS,
    *_compat.GRPO_TRAINER_ATTRIBUTES,
    "_get_per_token_logps_and_entropies",
}
PUBLIC_OF_TRANSFORMERS = {"accelerator", "args", "hub_model_id", "is_world_process_zero", "model", "state"}
# Exist only with a vLLM engine.
ENGINE_ATTRIBUTES = {"vllm_generation"}


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion) % 3) for completion in completions]


def trl_trainer(model: Any = None, rollout_func: Any = None, **settings: Any) -> GRPOTrainer:
    """TRL's own trainer, not ours, on a tiny model."""
    args = GRPOConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    return GRPOTrainer(
        model or tiny.llama(),
        reward,
        args=args,
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout_func,
    )


@pytest.fixture(scope="module")
def trained() -> GRPOTrainer:
    trainer = trl_trainer()
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", _compat.GRPO_TRAINER_METHODS)
def test_methods_have_the_listed_parameters(name: str):
    assert hasattr(GRPOTrainer, name), f"{INSTALLED} has no GRPOTrainer.{name} any more; we override or call it."
    found = tuple(inspect.signature(getattr(GRPOTrainer, name)).parameters)
    listed = _compat.GRPO_TRAINER_METHODS[name]
    assert found == listed, f"{INSTALLED}: GRPOTrainer.{name} takes {found}; _compat.py lists {listed}."


def test_log_probs_are_taken_from_the_listed_leading_parameters():
    """What follows the listed ones is passed by name with None for text, so it must be optional."""
    parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    leading = tuple(parameters)[: len(_compat.LOGPS_PARAMETERS)]
    assert leading == _compat.LOGPS_PARAMETERS, (
        f"{INSTALLED}: _get_per_token_logps_and_entropies starts with {leading}; "
        f"_compat.py lists {_compat.LOGPS_PARAMETERS}."
    )
    for name in list(parameters)[len(leading) :]:
        assert parameters[name].default is None, f"{INSTALLED}: `{name}` is new and has default {parameters[name]}."


@pytest.mark.parametrize("name", _compat.GRPO_TRAINER_ATTRIBUTES)
def test_attributes_exist(name: str, trained: GRPOTrainer):
    if name in ENGINE_ATTRIBUTES:
        assert f"self.{name} = " in inspect.getsource(GRPOTrainer), f"{INSTALLED} sets no attribute `{name}` any more."
    else:
        assert hasattr(trained, name), f"{INSTALLED}: a trained GRPOTrainer has no attribute `{name}` any more."


def test_helpers_can_be_imported():
    """Every private TRL module that trainers and runs import from, with the names taken; all must be listed."""
    taken = set()
    for path in {*TRAINER_SOURCES, *RUN_SOURCES}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl."):
                for alias in node.names:
                    taken.add(alias.name)
                    assert hasattr(importlib.import_module(node.module), alias.name), (
                        f"{INSTALLED} has no {node.module}.{alias.name} any more."
                    )
    assert taken == set(_compat.TRAINER_UTILS)


def test_helpers_take_what_we_pass():
    from trl.models.utils import disable_gradient_checkpointing
    from trl.trainer.utils import use_adapter

    inspect.signature(use_adapter).bind("model", adapter_name=None)
    inspect.signature(disable_gradient_checkpointing).bind("model", {})


# What TRL's methods return


def rows(trainer: GRPOTrainer, count: int = 4) -> list[dict[str, Any]]:
    return [{"prompt": f"prompt {i // 2}:"} for i in range(count)]


def test_generated_keys(trained: GRPOTrainer):
    trained.model.train()
    output = trained._generate_and_score_completions(rows(trained))
    missing = set(_compat.GENERATED_KEYS) - output.keys()
    assert not missing, f"{INSTALLED}: _generate_and_score_completions returns no {missing} any more."
    completions = output["completion_ids"].shape
    assert output["completion_mask"].shape == completions
    assert output["prompt_mask"].shape == output["prompt_ids"].shape
    assert output["advantages"].shape == (4,)
    assert len(completions) == 2


def test_keys_that_come_with_a_setting(model_folder: str):
    """The reference's log-probs with beta, the old ones with several passes, the engine's with a rollout's own."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = tiny.fixed_rollout({f"prompt {i}:": [[5, 6, 7, 8], [9, 1]] for i in range(8)}, env_mask=True)(
            prompts, trainer
        )
        return {**output, "logprobs": [[-1.0] * len(ids) for ids in output["completion_ids"]]}

    trainer = trl_trainer(model_folder, rollout, beta=0.1, num_iterations=2)
    trainer.model.train()
    output = trainer._generate_and_score_completions(rows(trainer))
    expected = {"ref_per_token_logps", "old_per_token_logps", "sampling_per_token_logps", "tool_mask"}
    assert expected <= output.keys(), f"{INSTALLED} no longer returns {expected - output.keys()}."
    for key in expected:
        assert output[key].shape == (4, 4), key
    assert output["tool_mask"].tolist()[0] == [1, 0, 1, 1]
    assert output["sampling_per_token_logps"][0].tolist() == [-1.0] * 4


def test_keys_that_we_read_are_keys_that_trl_writes():
    """Keys of a batch in our sources, less those that we write ourselves, are put there by TRL."""
    ours = {"rollout_row", "loss_divisor", "window_tokens", "old_values", "returns", "positive"}
    read: set[str] = set()
    for path in TRAINER_SOURCES:
        if path.parent.name == "packing":  # whose inputs are those of a model
            continue
        read |= set(batch_keys(ast.parse(path.read_text())))
    assert {"completion_ids", "ref_per_token_logps", "importance_sampling_ratio"} <= read  # the scan finds them
    gone = read - ours - keys_of_trl()
    assert not gone, f"{INSTALLED}: _generate_and_score_completions no longer writes {sorted(gone)}."


def keys_of_trl() -> set[str]:
    """Keys that TRL's `_generate_and_score_completions` puts into its output."""
    keys = set()
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            if ast.unparse(node.targets[0]) == "output":
                keys |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys |= {getattr(node.slice, "value", None)} if ast.unparse(node.value) == "output" else set()
    return keys


def batch_keys(tree: ast.AST) -> Iterator[str]:
    """String constants by which something called inputs, output, batch or part is indexed or asked."""
    batches = {"inputs", "output", "batch", "part"}
    for node in ast.walk(tree):
        key: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in batches:
            key = node.slice
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in batches
        ):
            key = node.args[0]
        elif isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Name):
            key = node.left if node.comparators[0].id in batches else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value not in ROLLOUT_KEYS:
            yield key.value


# Of a data row, of what a rollout function returns, and of the arguments of an advantage function.
ROLLOUT_KEYS = {"prompt", "logprobs", "env_mask", "baselines"}


def test_places_in_what_generation_returns(trained: GRPOTrainer):
    """We unpack by place: (prompt ids, completion ids, tool mask, completions, log-probs, extra fields, ...)."""
    prompts = [row["prompt"] for row in rows(trained)]
    prompt_ids, completion_ids, tool_mask, completions, _, extra_fields, *_ = trained._generate(prompts)
    assert prompt_ids == [trained.processing_class(prompt)["input_ids"] for prompt in prompts], INSTALLED
    assert completions == trained.processing_class.batch_decode(completion_ids, skip_special_tokens=True), INSTALLED
    assert tool_mask is None
    assert extra_fields == {}
    completion_ids, logprobs = trained._generate_single_turn(prompt_ids, None, {}, 2)
    assert [type(ids) for ids in completion_ids] == [list] * 4
    assert logprobs is None


def test_rewards_are_one_column_per_function(trained: GRPOTrainer):
    """(N, F) floats over all ranks, in the order of the reward functions."""
    rewards = trained._calculate_rewards(rows(trained), ["p"] * 4, ["", "a", "bb", "ccc"], [[1]] * 4)
    assert rewards.tolist() == [[0.0], [1.0], [2.0], [0.0]]
    assert trained.reward_func_names == ["reward"]


def test_stores_that_we_write_to_have_the_expected_kind(trained: GRPOTrainer):
    """Metrics by mode and name, lists of floats; a table of completions; pending logs that can be cleared."""
    trained._metrics["train"]["new"].append(1.0)
    assert trained._metrics["train"].pop("new") == [1.0]
    assert {"train", "eval"} <= trained._metrics.keys()
    trained._logs["advantages"].extend([1.0, 2.0])
    assert trained._logs["advantages"].pop() == 2.0
    for name in ("_pending_extra_logs", "_pending_metrics"):
        assert hasattr(getattr(trained, name), "clear"), f"{INSTALLED}: `{name}` cannot be cleared any more."
    assert isinstance(trained._step, int)
    assert isinstance(trained._buffered_inputs, list)
    assert trained._tokenizer.eos_token_id == tiny.EOS


def test_masks_for_entropy_and_staleness(trained: GRPOTrainer):
    """The quarter of the tokens with the highest entropy; rows with A < 0 whose policy moved away are dropped."""
    entropies, mask = torch.tensor([[1.0, 4.0, 3.0, 2.0]]), torch.ones(1, 4)
    assert trained.get_high_entropy_mask(entropies, mask, 0.75).tolist() == [[False, True, False, False]]
    logps = torch.tensor([[-3.0], [-3.0]])
    kept = trained.get_off_policy_mask(torch.tensor([[-1.0], [1.0]]), logps, torch.zeros(2, 1), torch.ones(2, 1), 0.5)
    assert kept.flatten().tolist() == [0.0, 1.0]


# The list is complete


def own_names() -> set[str]:
    """Names that our trainers define, in their bodies or by assignment to `self`."""
    names = {
        *vars(WholeCheckpoints),
        *vars(PublicUploads),
        *vars(PolicyTrainer),
        *vars(PPOTrainer),
        *PolicyTrainer.__annotations__,
        *PPOTrainer.__annotations__,
    }
    return {name for name in names | set(attributes(stored=True)) if not name.startswith("__")}


def attributes(stored: bool = False) -> Iterator[str]:
    """Attributes of a trainer in our sources: of `trainer`, and of `self` and `super()` in the trainers' classes.

    Args:
        stored: those assigned to `self` alone.
    """
    for path in TRAINER_SOURCES:
        tree = ast.parse(path.read_text())
        inside = {
            id(node)
            for definition in ast.walk(tree)
            if isinstance(definition, ast.ClassDef)
            and definition.name in ("PublicUploads", "PolicyTrainer", "PPOTrainer")
            for node in ast.walk(definition)
        }
        for node in ast.walk(tree):
            owner, name, is_stored = "", "", False
            if isinstance(node, ast.Attribute):
                owner, name, is_stored = ast.unparse(node.value), node.attr, isinstance(node.ctx, ast.Store)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
                owner, name = ast.unparse(node.args[0]), str(getattr(node.args[1], "value", ""))
            mine = id(node) in inside and owner in ("self", "super()")
            if (mine and is_stored) if stored else (mine or owner == "trainer"):
                yield name


def test_every_name_of_trl_in_our_trainers_is_listed():
    """Attributes that we neither define nor get from transformers' public API."""
    used = {name for name in attributes() if not name.startswith("__")}
    assert {"_metrics", "_generate", "score"} <= used  # the scan finds them
    missing = used - own_names() - PUBLIC_OF_TRANSFORMERS - LISTED
    assert not missing, f"_compat.py does not list {sorted(missing)}."


def test_every_name_that_we_override_is_listed(trained: GRPOTrainer):
    """Also guards against a private name of ours that TRL comes to use for something else."""
    overridden = {name for name in own_names() if hasattr(trained, name)} - {"_abc_impl"}
    assert {"_compute_loss", "scale_rewards"} <= overridden
    overridden -= PUBLIC_OF_TRANSFORMERS
    assert not overridden - LISTED, f"_compat.py does not list {sorted(overridden - LISTED)}, which TRL has too."


def test_nothing_is_listed_in_vain():
    used = {*attributes(), *vars(PolicyTrainer), *vars(PPOTrainer), *vars(WholeCheckpoints), *vars(PublicUploads)}
    assert not LISTED - used, f"_compat.py lists {sorted(LISTED - used)}, which no trainer uses."


# The version gate


def test_the_installed_version_is_in_the_range():
    _compat.check_trl_version()
    assert Version(version("trl")) in _compat.SpecifierSet(_compat.TRL_RANGE)


@pytest.mark.parametrize("other", ["1.15.0", "1.15.9", "1.17.0", "2.0", "0.24"])
def test_another_version_is_refused_with_range_and_command(monkeypatch: pytest.MonkeyPatch, other: str):
    monkeypatch.setattr(_compat, "version", lambda package: other)
    with pytest.raises(ImportError) as error:
        _compat.check_trl_version()
    message = str(error.value)
    assert _compat.TRL_RANGE in message
    assert f"found {other}" in message
    assert f"pip install 'trl{_compat.TRL_RANGE}'" in message


@pytest.mark.parametrize("other", ["1.16.0", "1.16.3", "1.16.1.dev0"])
def test_patch_releases_pass(monkeypatch: pytest.MonkeyPatch, other: str):
    monkeypatch.setattr(_compat, "version", lambda package: other)
    _compat.check_trl_version()
