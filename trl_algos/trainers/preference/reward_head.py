"""The score of a sequence classifier: read at the last attended token, from a head that is trained and saved."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from peft import TaskType
from transformers import AutoTokenizer

from trl_algos.core import last_token_index
from trl_algos.errors import ConfigError
from trl_algos.models.reward_folder import HEADS


def loaded_tokenizer(model: Any, args: Any) -> Any:
    """The tokenizer of a model's own folder, as TRL loads it."""
    revision = (args.model_init_kwargs or {}).get("revision") if isinstance(model, str) else None
    name = model if isinstance(model, str) else model.config._name_or_path
    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)


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
    heads = [parameter for name, parameter in model.named_parameters() if set(HEADS) & set(name.split("."))]
    if heads and not any(parameter.requires_grad for parameter in heads):
        raise ConfigError(
            [
                "`model`: its adapter does not train the score head, which would not be saved either. Build it with "
                "`task_type` SEQ_CLS (and load it with `is_trainable=True`), or pass the base model and a "
                "`peft_config`."
            ]
        )
