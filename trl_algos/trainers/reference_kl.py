"""KL to the reference, for the loss and for the reward; with `kl_estimator: full` exact over the vocabulary.

TRL's forward pass keeps one log-prob per token. The exact KL needs logits of the whole vocabulary, hence passes of its
own here. What is made of them is made a few tokens at a time, and again in the backward pass, so that beside the
logits themselves and their gradient no tensor of that size lives.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from trl_algos.core import full_kl, kl_estimate, masked_fill_zero
from trl_algos.core.ratios import importance_log_ratio
from trl_algos.trainers.critic.adapters import base_model
from trl_algos.trainers.rollout import Scores
from trl_algos.trainers.sampling.old_logps import known_old_logps, lacks_old_logps

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def loss_kl(
    trainer: "PolicyTrainer", inputs: dict[str, Any], scores: Scores, old_logps: Tensor, mask: Tensor
) -> Tensor:
    """(B, T) KL of the current policy to the reference in nats, with gradient."""
    args = trainer.args
    if scores.logits is not None:
        kl = _full_kl(trainer, scores.logits, reference_logits(trainer, inputs))
    else:
        # Filled before: an estimate of NaN has a NaN gradient even where it is dropped afterwards.
        logps, ref_logps = (masked_fill_zero(x, mask) for x in (scores.logps, inputs["ref_per_token_logps"]))
        kl = kl_estimate(logps, ref_logps, args.kl_estimator)
    if args.use_bias_correction_kl:
        kl = kl * importance_log_ratio(scores.logps, old_logps, mask, args.ratio_level).exp()
    return kl


def sampling_kl(trainer: "PolicyTrainer", output: dict[str, Any]) -> Tensor:
    """(B, T) KL of the sampling policy to the reference in nats, detached, of this rank's generated rows.

    The exact one (`kl_estimator: full`) is the current policy's, also where dynamic sampling let a row wait.
    Adds `old_per_token_logps` to `output` where TRL left it out because the first update is on-policy.
    """
    args, model = trainer.args, trainer.model
    rows = args.per_device_train_batch_size if model.training else args.per_device_eval_batch_size
    with torch.no_grad(), disable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs):
        if args.kl_estimator == "full":
            return torch.cat([_full_kl_of_rows(trainer, output, start, rows) for start in _starts(output, rows)])
        if lacks_old_logps(output):
            output["old_per_token_logps"] = known_old_logps(
                output, trainer.score(model, output, batch_size=rows).logps
            )
    return kl_estimate(output["old_per_token_logps"], output["ref_per_token_logps"], args.kl_estimator)


def _starts(output: dict[str, Any], rows: int) -> range:
    return range(0, len(output["completion_ids"]), rows)


def _full_kl_of_rows(trainer: "PolicyTrainer", output: dict[str, Any], start: int, rows: int) -> Tensor:
    """A few rows at a time: (rows, T, V) logits are large."""
    keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    part = {key: output[key][start : start + rows] for key in keys}
    logits, _ = vocabulary_logits(trainer, trainer.model, part)
    return _full_kl(trainer, logits, reference_logits(trainer, part))


def _full_kl(trainer: "PolicyTrainer", logits: Tensor, ref_logits: Tensor) -> Tensor:
    """(B, T) exact KL over temperature; (B, T, V) logits, those of the policy with gradient."""

    def of_tokens(own: Tensor, reference: Tensor) -> tuple[Tensor]:
        own, reference = (x[None].float() / trainer.temperature for x in (own, reference))
        return (full_kl(own, reference)[0],)

    return token_wise(of_tokens, logits, ref_logits)[0]


TOKENS_AT_A_TIME = 256


def token_wise(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """`function` of a few tokens at a time, whose intermediate results are not kept for the backward pass.

    Args:
        function: of tensors (tokens, ...), which gives tensors (tokens,).
        *tensors: (B, T, ...), with or without gradient.

    Returns:
        (B, T) each, with gradient where `function` has one.
    """
    shape = tensors[0].shape[:2]
    parts = zip(*(tensor.flatten(0, 1).split(TOKENS_AT_A_TIME) for tensor in tensors), strict=True)
    found = [checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return tuple(torch.cat(figures).view(shape) for figures in zip(*found, strict=True))


def vocabulary_logits(
    trainer: "PolicyTrainer", model: nn.Module, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """(B, T, V) logits that predict each completion token, before the temperature, and the MoE loss or None.

    Raises:
        ValueError: the batch holds images, which need TRL's own pass.
    """
    if "pixel_values" in inputs:
        raise ValueError("`kl_estimator`: full is not available for image inputs; use k3.")
    width = inputs["completion_ids"].shape[1]
    kwargs: dict[str, Any] = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    # What stands in for the policy, to record values, has a forward pass like it.
    asked = trainer.accelerator.unwrap_model(model if model is trainer.ref_model else trainer.model)
    if "logits_to_keep" in inspect.signature(base_model(asked).forward).parameters:
        kwargs["logits_to_keep"] = width + 1  # none of a prompt's
    with trainer.accelerator.autocast():
        outputs = model(
            input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            use_cache=False,
            **kwargs,
        )
    return outputs.logits[:, -width - 1 : -1], getattr(outputs, "aux_loss", None)


def score_with_logits(trainer: "PolicyTrainer", model: nn.Module, inputs: dict[str, Any]) -> Scores:
    """Log-probs, entropies, MoE loss and logits of the completion tokens, all from one forward pass."""
    logits, aux_loss = vocabulary_logits(trainer, model, inputs)

    def of_tokens(own: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        vocabulary_logps = (own.float() / trainer.temperature).log_softmax(-1)
        entropies = -(vocabulary_logps.exp() * vocabulary_logps).sum(-1)
        return vocabulary_logps.gather(-1, ids[:, None])[:, 0], entropies

    logps, entropies = token_wise(of_tokens, logits, inputs["completion_ids"])
    mask = inputs["completion_mask"]
    return Scores(masked_fill_zero(logps, mask), masked_fill_zero(entropies, mask), aux_loss, logits)


def reference_logits(trainer: "PolicyTrainer", inputs: dict[str, Any]) -> Tensor:
    """(B, T, V) logits of the reference, detached: the reference model, or the policy with its adapter off."""
    if trainer.ref_model is not None:
        model, context = trainer.ref_model, nullcontext()
    else:
        model = trainer.model
        unwrapped = trainer.accelerator.unwrap_model(model)
        context = use_adapter(unwrapped, adapter_name="ref" if "ref" in unwrapped.peft_config else None)
    with torch.no_grad(), context:
        return vocabulary_logits(trainer, model, inputs)[0]
