"""A reward model made of a language model: what its files tell of weights and memory is what is loaded."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from trl_algos.models.memory import estimate
from trl_algos.models.score_head import classifier_weights
from trl_algos.models.weight_files import weight_shapes


def tied_llama(folder: Path) -> str:
    config = tiny.llama().config
    config.tie_word_embeddings = True
    LlamaForCausalLM(LlamaConfig(**config.to_dict())).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=["untied", "tied", "gpt2", "classifier"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, model_folder: str) -> str:
    if request.param == "tied":
        return tied_llama(tmp_path)
    if request.param == "gpt2":
        tiny.gpt2().save_pretrained(tmp_path)
        return str(tmp_path)
    if request.param == "classifier":
        AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1).save_pretrained(tmp_path)
        return str(tmp_path)
    return model_folder


def loaded(folder: str) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)


def test_weights_are_those_of_the_loaded_model(folder: str) -> None:
    model = loaded(folder)
    own = {name.removeprefix("transformer."): tuple(weight.shape) for name, weight in model.named_parameters()}
    weights = classifier_weights(weight_shapes(folder))
    told = {name.removeprefix("transformer."): shape for name, (shape, _) in weights.items()}
    assert told == own


def test_memory_of_training_it_whole(folder: str) -> None:
    count = sum(parameter.numel() for parameter in loaded(folder).parameters())
    memory = estimate(folder, {"optim": "adamw_torch"}, kind="reward_model")
    assert (memory.trained, memory.parameters, memory.optimizer) == (count, 4 * count, 8 * count)
    assert memory.reference == 0


def test_memory_of_an_adapter_has_the_head_in_it(folder: str) -> None:
    model = get_peft_model(loaded(folder), LoraConfig(r=4, target_modules="all-linear", task_type=TaskType.SEQ_CLS))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    settings = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
    assert estimate(folder, settings, kind="reward_model").trained == trained
    assert estimate(folder, settings | {"lora_modules_to_save": ["score"]}, kind="reward_model").trained == trained


def test_the_reference_of_a_policy_on_pairs(model_folder: str) -> None:
    """A model of its own, unless an adapter can be switched off, or its log-probabilities are there already."""
    count = sum(parameter.numel() for parameter in tiny.llama().parameters())

    def reference(**settings: Any) -> int:
        return estimate(model_folder, {"beta": 0.1, **settings}, kind="preference").reference

    assert reference() == 4 * count
    assert reference(use_peft=True) == reference(precompute_ref_log_probs=True) == 0
    words = estimate(model_folder, {"beta": 0.1, "precompute_ref_log_probs": True}, kind="preference").words
    assert words["reference"] == "its log-probabilities, taken before training: nothing more"


def test_only_what_samples_has_a_kv_cache(model_folder: str) -> None:
    for kind in ("policy", "preference", "reward_model"):
        not_counted = estimate(model_folder, {}, kind=kind).not_counted
        assert ("the KV cache of generation" in not_counted) == (kind == "policy")
