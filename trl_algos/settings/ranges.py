"""Which numbers a setting may hold, whatever the algorithm."""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from numbers import Real
from typing import Any

_Rule = tuple[Callable[[Any], bool], str]

_AT_LEAST_ZERO: _Rule = (lambda x: x >= 0, "at least 0")
_ABOVE_ZERO: _Rule = (lambda x: x > 0, "above 0")
_SHARE: _Rule = (lambda x: 0 <= x <= 1, "between 0 and 1")
_BELOW_ONE: _Rule = (lambda x: 0 <= x < 1, "at least 0 and below 1")
_SHARE_ABOVE_ZERO: _Rule = (lambda x: 0 < x <= 1, "above 0 and at most 1")
_WHOLE: _Rule = (lambda x: x >= 0 and x == int(x), "a whole number of at least 0")
_COUNT: _Rule = (lambda x: x >= 1 and x == int(x), "a whole number of at least 1")
_SEED: _Rule = (lambda x: 0 <= x < 2**32 and x == int(x), "a whole number from 0 to 4294967295")
_STEPS: _Rule = (lambda x: 0 < x < 1 or (x >= 1 and x == int(x)), "a whole number of steps, or a share below 1")

_TOKENS = "a whole number of tokens, 2 or more"

RANGES: Mapping[str, _Rule] = {
    # Objective
    "epsilon": _ABOVE_ZERO,
    "epsilon_high": _ABOVE_ZERO,
    "delta": (lambda x: x > 1, "above 1: dual clip bounds the ratio from above"),
    "sapo_temperature_pos": _ABOVE_ZERO,
    "sapo_temperature_neg": _ABOVE_ZERO,
    "advantage_eps": _AT_LEAST_ZERO,
    "pass_k": _COUNT,
    "gamma": _SHARE,
    "gae_lambda": _SHARE,
    "length_adaptive_alpha": _ABOVE_ZERO,
    "critic_gae_lambda": _SHARE,
    "vf_coef": _ABOVE_ZERO,
    "value_clip_range": _AT_LEAST_ZERO,
    "positive_nll_coef": _AT_LEAST_ZERO,
    "beta": _AT_LEAST_ZERO,
    "kl_target": _ABOVE_ZERO,
    "kl_horizon": _ABOVE_ZERO,
    "overlong_buffer": _AT_LEAST_ZERO,
    "overlong_penalty_factor": _AT_LEAST_ZERO,
    "dynamic_sampling_tolerance": (lambda x: x >= 1e-6, "at least 1e-6: rewards that are closer have no advantage"),
    "dynamic_sampling_max_rounds": _COUNT,
    "dynamic_sampling_retry": _WHOLE,
    "off_policy_mask_threshold": _AT_LEAST_ZERO,
    "top_entropy_quantile": _SHARE_ABOVE_ZERO,
    "router_aux_loss_coef": _AT_LEAST_ZERO,
    "ref_model_mixup_alpha": _SHARE,
    "ref_model_sync_steps": _COUNT,
    "vllm_importance_sampling_clip_max": _ABOVE_ZERO,
    "vllm_importance_sampling_clip_min": _AT_LEAST_ZERO,
    # Sampling
    "num_generations": _COUNT,
    "num_generations_eval": _COUNT,
    "num_iterations": _COUNT,
    "max_completion_length": _COUNT,
    "temperature": _ABOVE_ZERO,
    "top_p": _SHARE_ABOVE_ZERO,
    "top_k": _WHOLE,
    "min_p": _SHARE,
    "repetition_penalty": _ABOVE_ZERO,
    "vllm_gpu_memory_utilization": _SHARE_ABOVE_ZERO,
    "vllm_tensor_parallel_size": _COUNT,
    "vllm_server_timeout": _ABOVE_ZERO,
    "vllm_max_model_length": _COUNT,
    "max_tool_calling_iterations": _COUNT,
    "reward_timeout": _ABOVE_ZERO,
    # Batches and optimizer
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "steps_per_generation": _COUNT,
    "max_tokens_per_micro_batch": _COUNT,
    "generation_batch_size": _COUNT,
    "learning_rate": _AT_LEAST_ZERO,
    "weight_decay": _AT_LEAST_ZERO,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "adam_epsilon": _AT_LEAST_ZERO,
    "max_grad_norm": _AT_LEAST_ZERO,
    "critic_learning_rate": _AT_LEAST_ZERO,
    "critic_max_grad_norm": _AT_LEAST_ZERO,
    "critic_warmup_steps": _WHOLE,
    "critic_lr_warmup_steps": _AT_LEAST_ZERO,
    "critic_num_iterations": _COUNT,
    "num_train_epochs": _ABOVE_ZERO,
    "warmup_steps": _AT_LEAST_ZERO,
    "neftune_noise_alpha": _AT_LEAST_ZERO,
    "label_smoothing_factor": _SHARE,
    # Running
    "logging_steps": _STEPS,
    "eval_steps": _STEPS,
    "save_steps": _STEPS,
    "eval_delay": _AT_LEAST_ZERO,
    "eval_accumulation_steps": _COUNT,
    "save_total_limit": _COUNT,
    "torch_empty_cache_steps": _COUNT,
    "dataloader_num_workers": _WHOLE,
    "dataloader_prefetch_factor": _COUNT,
    "ddp_timeout": _COUNT,
    "ddp_bucket_cap_mb": _COUNT,
    "seed": _SEED,
    "data_seed": _SEED,
    "num_completions_to_print": _COUNT,
    # Adapter, and what is measured
    "lora_r": _COUNT,
    "lora_alpha": _ABOVE_ZERO,
    "lora_dropout": _BELOW_ONE,
    "held_out_prompts": _WHOLE,
    "held_out_samples": _COUNT,
    "held_out_pairs": _WHOLE,
}
"""Setting -> what must hold, and the same in words. None is always allowed: it means that the setting is not set."""

PAIR_RANGES: Mapping[str, _Rule] = {
    **RANGES,
    "beta": _ABOVE_ZERO,
    "label_smoothing": (lambda x: 0 <= x < 0.5, "at least 0 and below 0.5: the probability that a label is flipped"),
    "nll_coef": _AT_LEAST_ZERO,
    "center_rewards_coefficient": _AT_LEAST_ZERO,
    "ld_alpha": _SHARE,
    "f_alpha_divergence_coef": (lambda _: True, "a finite number"),
    "max_length": (lambda x: x >= 2 and x == int(x), _TOKENS),
    "precompute_ref_batch_size": _COUNT,
    "dataset_num_proc": _COUNT,
}
"""The same for training on preference pairs."""


def range_problems(
    values: MutableMapping[str, Any], defaults: Mapping[str, Any], ranges: Mapping[str, _Rule] = RANGES
) -> Iterator[str]:
    """A message for each number out of its range.

    Args:
        values: settings. A number out of range is replaced by its default, so that it is complained of once; a count
            such as 8.0 becomes a whole number.
        defaults: setting -> what it is when not set.
        ranges: setting -> its rule.
    """
    for name, (holds, rule) in ranges.items():
        value = values.get(name)
        if value is None:
            continue
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not _is_finite(value) or not holds(value):
            state = "out of range" if number else "not a number"
            yield f"`{name}`: {value!r} is {state}; it must be {rule}."
            values[name] = defaults.get(name)
        elif rule in (_COUNT[1], _WHOLE[1], _SEED[1], _TOKENS):
            values[name] = math.floor(value)


def _is_finite(number: Any) -> bool:
    """Whether a number is one that torch could hold: whole numbers have 64 bits there."""
    return abs(number) < 2**63 if isinstance(number, int) else math.isfinite(number)
