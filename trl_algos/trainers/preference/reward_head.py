"""The score of a sequence classifier: read at the last attended token, from a head that is trained and saved."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from peft import TaskType
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from trl_algos.core import last_token_index
from trl_algos.errors import ConfigError
from trl_algos.models.reward_folder import HEADS


def loaded_tokenizer(model: Any, args: Any) -> Any:
    """The tokenizer of a model's own folder, as TRL loads it."""
    revision = (args.model_init_kwargs or {}).get("revision") if isinstance(model, str) else None
    name = model if isinstance(model, str) else model.config._name_or_path
    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)


def vocabulary_size(model: Any, args: Any) -> int:
    """How many tokens a model has an embedding for; of a path what its config says."""
    if not isinstance(model, str):
        return int(model.get_input_embeddings().weight.shape[0])
    revision = (args.model_init_kwargs or {}).get("revision")
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=args.trust_remote_code)
    return int(config.get_text_config().vocab_size)


def with_own_padding(tokenizer: Any) -> Any:
    """The tokenizer, with a padding token that is not its end-of-sequence token, where it has another one to offer.

    A sequence classifier reads the score at the rightmost token that is not the padding token, so a text that ends
    with a token of both meanings would be read before its end. The padding token is saved with the model, and every
    reader takes it from there, a policy trainer included. The user's tokenizer, which may be the policy's, too, is
    left alone.

    Args:
        tokenizer: the user's.
    """
    wanted = tokenizer.pad_token or tokenizer.eos_token
    if wanted == tokenizer.eos_token:
        others = (tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens)
        wanted = next((token for token in others if token not in (None, tokenizer.eos_token)), wanted)
    if wanted == tokenizer.pad_token:
        return tokenizer
    own = copy.deepcopy(tokenizer)
    own.pad_token = wanted
    return own


def check_place(inputs: Mapping[str, Any], pad_token_id: int) -> None:
    """Raise `ConfigError` where the model would read a score elsewhere than at the last attended token of a row.

    Args:
        inputs: `input_ids` and `attention_mask`, (B, T), padded on either side.
        pad_token_id: of the model's config.
    """
    attended = last_token_index(inputs["attention_mask"])
    read = last_token_index(inputs["input_ids"] != pad_token_id)
    if not torch.equal(attended, read):
        raise ConfigError(
            [
                f"`data_collator`: the batch is padded with another token than the model's `pad_token_id` "
                f"({pad_token_id}), or a text ends with that one: its score would be read at the wrong token."
            ]
        )


def with_trained_head(peft_config: Any) -> Any:
    """The adapter's config as that of a sequence classifier, whose head PEFT trains and saves in full."""
    if peft_config is None or getattr(peft_config, "task_type", None) == TaskType.SEQ_CLS:
        return peft_config
    own = copy.deepcopy(peft_config)
    own.task_type = TaskType.SEQ_CLS
    return own


def check_head(model: Any) -> None:
    """Raise `ConfigError` where a model with an adapter keeps its score head as it was drawn."""
    if not getattr(model, "peft_config", None):
        return
    heads = [parameter for name, parameter in model.named_parameters() if _in_head(name)]
    if heads and not any(parameter.requires_grad for parameter in heads):
        raise ConfigError(
            [
                "`model`: its adapter does not train the score head, which would not be saved either. Build it with "
                "`task_type` SEQ_CLS (and load it with `is_trainable=True`), or pass the base model and a "
                "`peft_config`."
            ]
        )


def trained_heads(model: Any) -> dict[str, Tensor]:
    """Copies of the weights of the heads that an adapter of `model` trains; none of a path."""
    if not getattr(model, "peft_config", None):
        return {}
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad and _in_head(name)}


def keep_heads_precise(model: Any, start: Mapping[str, Tensor], sharded: bool) -> None:
    """Train the head beside an adapter on a quantised base in float32.

    TRL rounds all that is trained there to bfloat16, in which small steps of the one matrix that is no sum with a
    frozen one are lost, and which a base that computes in float32 cannot be read by.

    Args:
        model: with its adapter.
        start: weights of heads before TRL rounded them, from `trained_heads`.
        sharded: whether a backend shards what is trained, which must then be of one dtype: the head stays rounded.
    """
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own or not _in_head(name):
            continue
        for key, parameter in own.items() if not sharded else ():
            original = f"{name.partition('.modules_to_save.')[0]}.original_module.{key}"
            known = start[f"{name}.{key}"] if start else model.get_parameter(original)
            parameter.data = known.detach().to(parameter.device, torch.float32, copy=True)
        module.register_forward_pre_hook(_in_own_dtype)


def _in_own_dtype(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].to(module.weight.dtype), *args[1:])


def _in_head(name: str) -> bool:
    return bool(set(HEADS) & set(name.split(".")))
