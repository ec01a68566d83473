"""Settings that were set and would do nothing, because the switch that they hang on was never turned on."""

from collections.abc import Iterator, Mapping
from typing import Any

_OFF = (None, False, 0, "no")

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "use_peft": (
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "lora_target_parameters",
        "lora_modules_to_save",
        "use_rslora",
        "use_dora",
    ),
    "load_in_4bit": ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
    "push_to_hub": (
        "hub_model_id",
        "hub_strategy",
        "hub_private_repo",
        "hub_always_push",
        "hub_revision",
    ),
    "eval_strategy": ("eval_steps",),
    "save_strategy": ("save_steps", "save_total_limit"),
}
"""Switch -> the settings that do nothing while it is off, in every recipe."""

_OF_POLICIES: Mapping[str, tuple[str, ...]] = {
    "use_vllm": (
        "vllm_mode",
        "vllm_model_impl",
        "vllm_enable_sleep_mode",
        "vllm_structured_outputs_regex",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_group_port",
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_tensor_parallel_size",
    ),
    "use_adaptive_entropy": ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    "sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
    "log_completions": ("num_completions_to_print", "log_unique_prompts", "log_multimodal"),
    "push_to_hub": ("push_critic",),
    "held_out_prompts": ("held_out_samples",),
    "eval_strategy": ("num_generations_eval",),
    "use_transformers_continuous_batching": ("transformers_continuous_batching_config",),
}
"""The same in recipes of algorithms that sample. (`settings/preference.py` has what hangs on others with pairs.)"""


def unused_problems(kind: str, given: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """A message for each setting whose switch is off because nobody set it.

    A switch that was turned off on purpose (`--use_peft false` over a recipe with LoRA) silences what hangs on it.

    Args:
        kind: the recipe's kind.
        given: key -> value, of the keys that somebody set.
        values: key -> value, of all keys.
    """
    own = _OF_POLICIES if kind == "policy" else {}
    for switch, dependent in (*SWITCHES.items(), *own.items()):
        if switch in given or values[switch] not in _OFF:
            continue
        for key in dependent:
            if given.get(key) is not None:
                yield f"`{key}`: {given[key]!r} is not used: `{switch}` is not set."
    if kind == "policy" and values["remove_unused_columns"]:
        yield "`remove_unused_columns`: true would take away the columns that reward functions read; leave it out."
