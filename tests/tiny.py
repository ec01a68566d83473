"""Tiny models, tokenizers and rollouts built on the spot: tests need no network and no bundled weights."""

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS = 0, 1


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with 258 tokens: pad, eos and the 256 bytes."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=64
    )


def llama(seed: int = 0, scale: float = 4.0) -> LlamaForCausalLM:
    """Two-layer Llama; weights scaled up so that attention and probabilities are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return _scaled(LlamaForCausalLM(config), scale)


def gpt2(seed: int = 0, dropout: float = 0.1, scale: float = 4.0) -> GPT2LMHeadModel:
    """Two-layer GPT-2 with dropout everywhere."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=258,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=EOS,
    )
    return _scaled(GPT2LMHeadModel(config), scale)


def _scaled(model: Any, scale: float) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(scale)
    return model


def prompts(count: int = 8, **columns: list[Any]) -> Dataset:
    """`count` different prompts, with further columns."""
    return Dataset.from_dict({"prompt": [f"prompt {i}:" for i in range(count)], **columns})


def fixed_rollout(
    completions: dict[str, list[list[int]]], env_mask: bool = False
) -> Callable[[list[str], Any], dict[str, Any]]:
    """Rollout function that answers each prompt with its own fixed completions, in turn.

    Args:
        completions: prompt -> token ids of its completions; row j of the prompt's group gets number j.
        env_mask: also return a mask with a hole at the second token of completions longer than three.
    """

    def rollout(batch: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in batch]
        seen: dict[str, int] = {}
        ids = []
        for prompt in batch:
            choices = completions[prompt]
            ids.append(list(choices[seen.get(prompt, 0) % len(choices)]))
            seen[prompt] = seen.get(prompt, 0) + 1
        output = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}
        if env_mask:
            output["env_mask"] = [[0 if i == 1 and len(row) > 3 else 1 for i in range(len(row))] for row in ids]
        return output

    return rollout
