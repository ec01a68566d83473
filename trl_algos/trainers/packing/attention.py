"""Attention within the segments of a flat row, registered with transformers.

A flat row holds several sequences one after another, and no token of one may see another one's. That could be said by
a mask of (L, L), but only the attention function has to know it: it gets `Segments` as a keyword that the model hands
down, and runs one causal attention per sequence. Cost and memory grow with the tokens, and nothing else of the model
is touched. Without the keyword the function is the one that the model had before.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward, use_gqa_in_sdpa
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

# transformers takes a name that contains its own `sdpa`, `flash` or `flex` for that implementation.
IMPLEMENTATIONS = {"sdpa": "trl_algos_segments", "eager": "trl_algos_segments_over_eager"}
"""Implementation that a model has -> the name of ours in its place."""

# Keywords that models hand down to every layer and that say nothing about which token sees which.
_HARMLESS = {
    "cu_seqlens",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


def implementation_before(name: str) -> str:
    """The implementation that `use_segments` replaced, or `name` where it is none of ours."""
    return {ours: theirs for theirs, ours in IMPLEMENTATIONS.items()}.get(name, name)


class Segments:
    """Where the sequences of a flat row begin and end.

    Args:
        layout: (tokens of a prefix, tokens of each sequence that goes on from it), one after another as in the row.
    """

    def __init__(self, layout: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        self.layout = layout
        self.windows: list[int | None] = []  # of each call, for `probe`
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    @property
    def sizes(self) -> list[int]:
        """Tokens of each part of the flat row."""
        return [size for prefix, own in self.layout for size in ((prefix, *own) if prefix else own)]

    def mask(self, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
        """(queries, keys) bool: the last `queries` of `keys` tokens, each seeing itself and those before it."""
        place = (queries, keys, window, device)
        if place not in self._masks:
            query = torch.arange(keys - queries, keys, device=device)[:, None]
            key = torch.arange(keys, device=device)[None]
            seen = key <= query
            self._masks[place] = seen if window is None else seen & (key > query - window)
        return self._masks[place]


def use_segments(model: Any) -> str:
    """Have a model's attention follow `segments` where it is given; returns the implementation that it had.

    For good: gradient checkpointing runs the attention again in the backward pass, when a change that was made around
    the forward pass would be over.
    """
    before: str = model.config._attn_implementation
    for implementation, mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
        AttentionInterface.register(IMPLEMENTATIONS[implementation], _FUNCTIONS[implementation])
        AttentionMaskInterface.register(IMPLEMENTATIONS[implementation], mask)
    model.set_attn_implementation(IMPLEMENTATIONS[before])
    return before


def _over_sdpa(module: nn.Module, *args: Any, segments: Segments | None = None, **kwargs: Any) -> Any:
    if segments is None:
        return sdpa_attention_forward(module, *args, **kwargs)
    return segment_attention(module, *args, segments=segments, **kwargs)


def _over_eager(module: nn.Module, *args: Any, segments: Segments | None = None, **kwargs: Any) -> Any:
    if segments is None:
        return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)
    return segment_attention(module, *args, segments=segments, **kwargs)


_FUNCTIONS = {"sdpa": _over_sdpa, "eager": _over_eager}


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment, which also sees the prefix that it goes on from.

    Args:
        module: the attention layer.
        query: (1, heads, L, head size).
        key: (1, key heads, L, head size).
        value: (1, key heads, L, value size).
        attention_mask: without effect: `segments` says all.
        segments: of the flat row.
        dropout: rate on the attention probabilities.
        scaling: of the scores; None for 1 / sqrt(head size).
        sliding_window: how many tokens a token sees, itself included; None for all.
        softcap: c of c * tanh(scores / c), or None.
        is_causal: False is refused, as is a layer whose attention goes both ways.
        **others: what the layer hands over besides; what might matter is refused.

    Returns:
        (1, L, heads, value size), and None in the place of attention weights.

    Raises:
        NotImplementedError: the layer asks for something that is not honoured here.
    """
    _check_request(module, key, segments, is_causal, others)
    segments.windows.append(sliding_window)
    sizes = segments.sizes
    parts = iter(zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True))
    outputs = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> None:
        window = sliding_window if sliding_window is not None and k.shape[2] > sliding_window else None
        whole = q.shape[2] == k.shape[2] and window is None
        if whole and softcap is None:
            outputs.append(_fused(q, k, v, None, dropout, scaling))
            return
        mask = segments.mask(q.shape[2], k.shape[2], window, q.device)
        if softcap is None:
            outputs.append(_fused(q, k, v, mask, dropout, scaling))
        else:
            outputs.append(_softcapped(q, k, v, mask, dropout, scaling, softcap))

    for prefix, own in segments.layout:
        before = next(parts) if prefix else None
        if before is not None:
            attend(*before)
        for _ in own:
            q, k, v = next(parts)
            if before is not None:
                k, v = torch.cat((before[1], k), 2), torch.cat((before[2], v), 2)
            attend(q, k, v)
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _check_request(
    module: nn.Module, key: Tensor, segments: Segments, is_causal: bool | None, others: dict[str, Any]
) -> None:
    """Refuse what would silently be left out."""
    strange = sorted(name for name, value in others.items() if name not in _HARMLESS and value is not None)
    if strange:
        raise NotImplementedError(f"its attention is given {', '.join(strange)}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise NotImplementedError("its attention is not causal")
    if key.shape[0] != 1 or key.shape[2] != sum(segments.sizes):
        raise NotImplementedError("its attention sees other tokens than those of the row")


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scaling: float | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    gqa = groups > 1 and use_gqa_in_sdpa(mask, k, v)
    if groups > 1 and not gqa:
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=gqa
    )


def _softcapped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float, scaling: float | None, softcap: float
) -> Tensor:
    """What no kernel of torch does; the softmax is in float32 or wider, as in the models' own functions."""
    groups = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return nn.functional.dropout(weights, dropout) @ v
