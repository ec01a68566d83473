"""Tiny models of several families, whose attention matters, and batches of rows of unequal length."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

WINDOW = 5
"""Shorter than the rows."""

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": _MIXED, "query_pre_attn_scalar": 16},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "qwen3_moe": _EXPERTS,
}
"""`model_type` -> settings, of models that may be packed."""

_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
OTHERS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **_EXPERTS, **_LINEAR},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": _MIXED,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "bloom": {"n_head": 4, "n_layer": 3},
}
"""Those that may not."""


def language_model(family: str, **others: Any) -> Any:
    return _scaled(AutoModelForCausalLM, family, others)


def classifier(family: str, **others: Any) -> Any:
    return _scaled(AutoModelForSequenceClassification, family, {"num_labels": 1, **others})


def _scaled(kind: Any, family: str, others: dict[str, Any]) -> Any:
    """On new weights, scaled up so that attention is far from uniform; without dropout."""
    settings = {**_COMMON, **(FAMILIES | OTHERS)[family], **others}
    if family == "gpt2":
        settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        settings = {name: value for name, value in settings.items() if not name.startswith("num_") or "lab" in name}
    torch.manual_seed(0)
    model = kind.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "router" not in name and "gate.weight" not in name:
                parameter.mul_(5.0)
    return model


LENGTHS = (24, 17, 11, 12, 21, 1, 24)
PROMPT = 9


def batch(side: str = "right") -> dict[str, Tensor]:
    """Rows padded on one side, of which the first two and the next two begin alike, the first and last are equal."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (len(LENGTHS), max(LENGTHS)), generator=generator)
    ids[1, :PROMPT], ids[3, : PROMPT + 2], ids[6] = ids[0, :PROMPT], ids[2, : PROMPT + 2], ids[0]
    mask = (torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    ids = ids * mask
    if side == "left":
        turns = [max(LENGTHS) - length for length in LENGTHS]
        ids, mask, labels = (
            torch.stack([row.roll(turn) for row, turn in zip(x, turns, strict=True)]) for x in (ids, mask, labels)
        )
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def without_last(mask: Tensor) -> int:
    """Tokens that packed rows have, if nothing is shared."""
    return int((mask.sum(1) - 1).sum())
