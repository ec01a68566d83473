"""Models whose forward pass takes padded rows, computes their real tokens, and answers in the padded layout.

The pass is replaced inside the model, under every wrapper (adapter, DistributedDataParallel, DeepSpeed, FSDP), so that
whoever calls it profits and each call stays one pass of the model, whatever is in the rows.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from trl_algos._compat import FUSED_HEAD_PER_TOKEN
from trl_algos.trainers.packing.attention import use_segments
from trl_algos.trainers.packing.flat_row import FlatRow, flat_row
from trl_algos.trainers.packing.probe import failed_trial, hidden_states, inputs_of
from trl_algos.trainers.packing.rules import refusal
from trl_algos.trainers.packing.stand_in import failed_stand_in

Answer = Callable[["PackedModel", dict[str, Any], bool], tuple[Any, FlatRow] | None]
"""Packed model, keywords of a call, and whether the last token of each row is computed though nothing is asked of it
-> its output and the flat row, or None where the call needs padded rows."""

_LANGUAGE_MODEL_INPUTS = {
    "attention_mask",
    "fused_lm_head",
    "input_ids",
    "labels",
    "num_items_in_batch",
    "output_router_logits",
    "return_dict",
}
# TRL hands the whole batch to the classifier, `margin` included, which it has no use for.
_CLASSIFIER_INPUTS = {"attention_mask", "input_ids", "margin", "return_dict"}


def pack_language_model(model: Any, sharded: bool = False, share: bool = True) -> str | None:
    """Have calls of a causal language model with TRL's fused head (`fused_lm_head=True`) compute real tokens alone.

    The output is TRL's `FusedCausalLMOutput` in the padded layout, with gradient. Prompts, and whatever else rows of a
    call have in common at their beginning, are computed once. Any other call is what it was: generation, calls for
    logits, and those with inputs other than text. `labels` are a token's own id, or -100.

    Args:
        model: after TRL's `add_fused_lm_head`, with or without an adapter.
        sharded: whether its weights are elsewhere until training starts, so that a small copy of it is tried.
        share: whether what rows have in common is computed once.

    Returns:
        Why the model is left as it was, in words that go on from "because"; None where it is packed.
    """
    return _pack(model, _language_model_output, sharded, share)


def pack_classifier(model: Any, sharded: bool = False) -> str | None:
    """Have a sequence classifier compute real tokens alone; arguments and result as in `pack_language_model`.

    `logits` (B, labels) are those of the last token of each row that is not the padding token, as the class reads
    them. A call with labels, or without a mask, is what it was.
    """
    base = _without_adapter(model)
    if not isinstance(getattr(base, "score", None), nn.Module):
        return f"{type(base).__name__} has no head called `score`"
    return _pack(model, _classifier_output, sharded, share=True)


def pack_trunk(model: Any, sharded: bool = False, share: bool = True) -> str | None:
    """Let a model without head be given flat rows (see `packing_of`); its own forward pass stays as it is.

    Arguments and result as of `pack_language_model`.
    """
    return refusal(model) or _begun(Packing(_without_adapter(model), share), sharded)


def packing_of(trunk: Any) -> "Packing | None":
    """What makes the flat rows of a model without head, adapted or not; None where it runs on padded rows."""
    packing: Packing | None = vars(_without_adapter(trunk)).get(_PACKING)
    return packing


def pass_with_row(model: Any) -> Callable[..., tuple[Any, FlatRow | None]]:
    """The forward pass of a model without adapter wrapper, which also returns the flat row that it ran, or None.

    It takes one keyword more, `keeps_last`: whether the flat row holds the last token of each row.
    """
    packing, forward = packing_of(model.base_model), model.forward
    if isinstance(packing, PackedModel):
        return packing.forward
    return lambda *args, keeps_last=False, **kwargs: (forward(*args, **kwargs), None)


def _pack(model: Any, answer: Answer, sharded: bool, share: bool) -> str | None:
    return refusal(model) or _begun(PackedModel(_without_adapter(model), answer, share), sharded)


def _begun(packing: "Packing", sharded: bool) -> str | None:
    """Try a model, or a small copy of one whose weights are elsewhere; returns why it fails."""
    reason = packing.trial(sharded)
    if not reason:
        packing.begin()
    return reason


_PACKING = "_packing"  # attribute of a trunk


def _without_adapter(model: Any) -> Any:
    return model.get_base_model() if is_peft_model(model) else model


class Packing:
    """Makes the flat rows of a model, once that has shown that it may be given them.

    Args:
        model: without adapter wrapper.
        share: whether what rows have in common is computed once.
    """

    def __init__(self, model: Any, share: bool) -> None:
        self.model, self.share = model, share

    def trial(self, sharded: bool) -> str | None:
        """Give the model our attention and try it; on a failure it gets its own back, and the failure is returned."""
        if sharded:
            reason = failed_stand_in(self.model.base_model)
            if not reason:
                use_segments(self.model)
            return reason
        before = use_segments(self.model)
        reason = failed_trial(self.model.base_model)
        if reason:
            self.model.set_attn_implementation(before)
        return reason

    def begin(self) -> None:
        """Be what `packing_of` finds."""
        setattr(self.model.base_model, _PACKING, self)

    def row(self, inputs: Mapping[str, Any], drop_last: bool, share: bool = True) -> FlatRow | None:
        """The flat row of a call, or None where it needs padded rows."""
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if ids is None or mask is None or mask.dim() != 2:
            return None
        return flat_row(ids, mask, share and self.share and not _draws(self.model), drop_last)


class PackedModel(Packing):
    """A model whose forward pass takes the real tokens of its rows.

    Args:
        model: without adapter wrapper.
        answer: runs a call on real tokens.
        share: as of `Packing`.
    """

    def __init__(self, model: Any, answer: Answer, share: bool) -> None:
        super().__init__(model, share)
        self.answer = answer
        self.padded_forward: Callable[..., Any] = model.forward

    def begin(self) -> None:
        """Also put `forward` in the place of the model's, for the life of the model."""
        super().begin()

        # `generate` checks its keywords against the signature of the class.
        @functools.wraps(type(self.model).forward)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)[0]

        self.model.forward = types.MethodType(forward, self.model)

    def forward(self, *args: Any, keeps_last: bool = False, **kwargs: Any) -> tuple[Any, FlatRow | None]:
        """Output of a pass on real tokens and their flat row, or of the model's own pass and None."""
        answered = None
        if not args and kwargs.get("return_dict") is not False:
            given = {name: value for name, value in kwargs.items() if value is not None and value is not False}
            answered = self.answer(self, given, keeps_last)
        return (self.padded_forward(*args, **kwargs), None) if answered is None else answered


def _draws(model: nn.Module) -> bool:
    """Whether dropout is on: rows that share a prefix would share its draws, too."""
    if not model.training:
        return False
    rates = [
        module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        for module in model.modules()
    ]
    return any(rate > 0 for rate in rates if isinstance(rate, (int, float)))


def _language_model_output(
    packed: PackedModel, inputs: dict[str, Any], keeps_last: bool
) -> tuple[Any, FlatRow] | None:
    labels = inputs.get("labels")
    if "fused_lm_head" not in inputs or labels is None or inputs.keys() - _LANGUAGE_MODEL_INPUTS:
        return None
    # The load-balancing loss of a mixture of experts is a mean over all real tokens, each as often as it is there.
    balanced = inputs.get("output_router_logits") or getattr(packed.model.config, "output_router_logits", False)
    row = packed.row(inputs, drop_last=not (balanced or keeps_last), share=not balanced)
    if row is None:
        return None
    output = packed.padded_forward(
        **inputs_of(row, torch.ones_like(row.input_ids) if balanced else None),
        **{name: inputs[name] for name in ("num_items_in_batch", "output_router_logits") if name in inputs},
        shift_labels=row.labels(labels),
        fused_lm_head=True,
    )
    found = {name: getattr(output, name) for name in FUSED_HEAD_PER_TOKEN}
    padded = {name: row.padded(values, labels) for name, values in found.items() if values is not None}
    asked = labels[:, 1:] != -100
    loss = output.loss
    if not balanced:
        # Rows whose completions begin alike share these tokens, too, which count once in the loss of the flat row.
        total = padded["log_probs"].sum()
        loss = -total / inputs.get("num_items_in_batch", asked.sum().clamp(min=1).to(total.device))
    return dataclasses.replace(output, loss=loss, label_mask=asked, **padded), row


def _classifier_output(packed: PackedModel, inputs: dict[str, Any], _: bool) -> tuple[Any, FlatRow] | None:
    pad_token_id = packed.model.config.pad_token_id
    if inputs.keys() - _CLASSIFIER_INPUTS or pad_token_id is None:
        return None
    row = packed.row(inputs, drop_last=False)
    if row is None:
        return None
    ids = inputs["input_ids"]
    places = torch.arange(ids.shape[1], device=ids.device)
    read = ((ids != pad_token_id) * places).argmax(-1)
    found = row.places.gather(1, read[:, None])[:, 0]
    if bool((found < 0).any()):
        return None
    states = hidden_states(packed.model.base_model, row)
    return SequenceClassifierOutputWithPast(logits=packed.model.score(states[0, found.to(states.device)])), row
