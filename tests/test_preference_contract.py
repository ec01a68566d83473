"""The private names of TRL that the trainers on preference pairs rely on, checked against the installed TRL."""

import ast
import dataclasses
import importlib
import inspect

import preference_pairs as pairs
import pytest
import tiny
import torch
from transformers import LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from trl_algos import BradleyTerryTrainer, PreferenceTrainer, _compat
from trl_algos.trainers import bradley_terry_trainer, preference_trainer
from trl_algos.trainers.checkpointing import WholeCheckpoints
from trl_algos.trainers.preference import held_out_pairs, reward_head
from trl_algos.trainers.preference import pairs as pairs_source
from trl_algos.trainers.preference.held_out_pairs import HeldOutFigures
from trl_algos.trainers.preference.resuming import ExactResume
from trl_algos.trainers.preference.steps import CheckedSteps
from trl_algos.trainers.public_uploads import PublicUploads

TRL = {"DPOTrainer": DPOTrainer, "RewardTrainer": RewardTrainer}
OURS = {"DPOTrainer": PreferenceTrainer, "RewardTrainer": BradleyTerryTrainer}
MODULES = (preference_trainer, bradley_terry_trainer, pairs_source, reward_head, held_out_pairs)
PUBLIC_OF_TRANSFORMERS = {
    *("accelerator", "args", "data_collator", "eval_dataset", "model", "processing_class", "train", "train_dataset"),
    *("is_deepspeed_enabled", "is_fsdp_enabled", "state", "callback_handler", "control", "hub_model_id"),
    "is_world_process_zero",
}
METHODS = [(trainer, name) for trainer, methods in _compat.PREFERENCE_TRAINER_METHODS.items() for name in methods]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """TRL's own trainers, by name."""
    folder = tmp_path_factory.mktemp("trl")
    common = {"train_dataset": pairs.dataset(), "processing_class": tiny.tokenizer()}
    config = tiny.llama().config
    config.num_labels = 1
    classifier = LlamaForSequenceClassification(config)
    return {
        "DPOTrainer": DPOTrainer(tiny.llama(0), tiny.llama(1), DPOConfig(**pairs.settings(folder)), **common),
        "RewardTrainer": RewardTrainer(classifier, RewardConfig(**pairs.settings(folder)), **common),
    }


@pytest.mark.parametrize(("trainer", "name"), METHODS)
def test_methods_have_the_listed_parameters(trainer, name):
    found = tuple(inspect.signature(getattr(TRL[trainer], name)).parameters)
    assert found == _compat.PREFERENCE_TRAINER_METHODS[trainer][name]


@pytest.mark.parametrize("trainer", TRL)
def test_attributes_exist(trainer, built):
    for name in _compat.PREFERENCE_TRAINER_ATTRIBUTES[trainer]:
        assert hasattr(built[trainer], name), name


def test_helpers_can_be_imported():
    taken = set()
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl."):
                taken |= {alias.name for alias in node.names}
                assert all(hasattr(importlib.import_module(node.module), alias.name) for alias in node.names)
    assert taken == set(_compat.PREFERENCE_UTILS)


@pytest.mark.parametrize("trainer", TRL)
def test_every_name_of_trl_is_listed(trainer, built):
    """Attributes of `self` and `super()` that are neither our own nor public in transformers."""
    ours = OURS[trainer]
    used, stored = set(), set()
    for part in (ours, HeldOutFigures, ExactResume, WholeCheckpoints, CheckedSteps, PublicUploads):
        stored |= set(vars(part)) | set(part.__annotations__)
        for node in ast.walk(ast.parse(inspect.getsource(part))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
                (stored if isinstance(node.ctx, ast.Store) else used).add(node.attr)
    listed = {*_compat.PREFERENCE_TRAINER_METHODS[trainer], *_compat.PREFERENCE_TRAINER_ATTRIBUTES[trainer]}
    of_trl = {name for name in used | stored if hasattr(built[trainer], name) and not name.startswith("__")}
    assert of_trl - PUBLIC_OF_TRANSFORMERS - {"_abc_impl"} == listed


def test_policy_and_reference_are_called_once_each_and_return_log_probs(built):
    """`PreferenceTrainer` takes log-probs from the calls that TRL's loss makes: the policy's, then the reference's."""
    trainer = built["DPOTrainer"]
    trainer._set_signature_columns_if_needed()
    calls = []
    for model in (trainer.model, trainer.ref_model):
        model.register_forward_hook(lambda module, _, output: calls.append((module, output.log_probs)))
    inputs = pairs.batch(trainer)
    trainer._compute_loss(trainer.model, inputs, False)
    assert [module for module, _ in calls] == [trainer.model, trainer.ref_model]
    rows, tokens = inputs["completion_mask"].shape
    for _, log_probs in calls:
        assert log_probs.shape == (rows, tokens - 1)
        assert not log_probs[inputs["completion_mask"][:, 1:] == 0].any()


def test_the_reward_model_returns_one_score_a_row_chosen_first(built):
    trainer = built["RewardTrainer"]
    trainer._set_signature_columns_if_needed()
    inputs = pairs.batch(trainer)
    with torch.no_grad():
        _, outputs = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    assert outputs.logits.shape == (2 * len(pairs.ROWS), 1)
    assert inputs["input_ids"][0, 0] == trainer.train_dataset[0]["chosen_ids"][0]


def test_the_fused_head_takes_and_gives_what_is_listed():
    """A field that is not listed would come back in the layout of the flat row."""
    fields = {field.name for field in dataclasses.fields(FusedCausalLMOutput)}
    assert fields == {*_compat.FUSED_HEAD_PER_TOKEN, *_compat.FUSED_HEAD_OTHERS}
    model = tiny.llama(0)
    add_fused_lm_head(model)
    keywords = {
        name
        for name, parameter in inspect.signature(model.forward.__func__, follow_wrapped=False).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert keywords == set(_compat.FUSED_HEAD_KEYWORDS)
