"""From the keys that were given to the values of all keys of a recipe, with where each one comes from."""

from collections.abc import Mapping
from typing import Any

from trl_algos.errors import ConfigError, unknown_name
from trl_algos.recipe import schema
from trl_algos.settings.backends import backend_problems
from trl_algos.settings.critic import (
    critic_form,
    dropout_problems,
    form_problems,
    has_critic,
    sharding_problems,
    whole_critic_problems,
)
from trl_algos.settings.kinds import all_keys
from trl_algos.settings.preference import resolve_preference
from trl_algos.settings.ranges import range_problems
from trl_algos.settings.resolution import resolve
from trl_algos.settings.resolved import Resolution
from trl_algos.settings.trainer_checks import steps_per_generation, trainer_problems

TASK_TYPE: Mapping[str, str] = {"policy": "CAUSAL_LM", "preference": "CAUSAL_LM", "reward_model": "SEQ_CLS"}
"""Kind -> what PEFT must be told that the model does: it trains and saves the score head of a classifier alone."""


def resolved(
    kind: str, given: Mapping[str, Any], num_processes: int, problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Every key's value and source; problems that come of values are added.

    Args:
        kind: the recipe's kind.
        given: key -> typed value, for the keys that were set.
        num_processes: processes to judge batch sizes for.
        problems: where messages go.

    Returns:
        Values of all keys, and the sources of all: `default` where nobody said anything.
    """
    defaults = {key: setting.default for key, setting in schema.settings(kind).items()}
    values = defaults | dict(given)
    sources = {key: "default" for key in values}
    own = schema.defaults(kind, "trainer")
    resolution = _resolution(kind, {key: values[key] for key in own}, own, problems)
    problems += resolution.problems
    rest = {key: value for key, value in values.items() if key not in own}
    if kind == "policy":
        problems += trainer_problems(resolution.values, num_processes)
    problems += range_problems(rest, defaults)
    values |= rest | resolution.values
    problems += backend_problems(values)
    if kind == "policy":
        problems += _critic_problems(values, resolution)
    return values, sources | resolution.sources | _work_out(kind, values, given, num_processes)


def _resolution(kind: str, trainer: dict[str, Any], defaults: dict[str, Any], problems: list[str]) -> Resolution:
    """The trainer's settings; without such an algorithm what does not hang on it is judged all the same."""
    try:
        return _resolve(kind, trainer, defaults)
    except ConfigError as error:
        _, *others = error.problems
        problems += [unknown_name("algorithm", trainer["algorithm"], all_keys()), *others]
    resolution = _resolve(kind, trainer | {"algorithm": _STANDS_IN[kind]}, defaults)
    resolution.problems.clear()
    return resolution


_STANDS_IN = {"policy": "grpo", "preference": "dpo", "reward_model": "bradley_terry"}
"""Kind -> the algorithm by which a recipe is judged whose own there is not."""


def _resolve(kind: str, trainer: dict[str, Any], defaults: dict[str, Any]) -> Resolution:
    return resolve(trainer, defaults) if kind == "policy" else resolve_preference(trainer, defaults, kind)


def _critic_problems(values: Mapping[str, Any], resolution: Resolution) -> list[str]:
    """What only all settings together tell of a critic: its form may follow from `use_peft`, one of the model's."""
    problems: list[str] = []
    own_lora = values["critic_use_peft"] if has_critic(resolution.values) else None  # else it has been refused
    told = values["critic"], values["use_peft"], values["critic_model_name_or_path"], own_lora
    problems += form_problems(*told)
    if has_critic(resolution.values):
        form = critic_form(values["critic"], values["use_peft"])
        problems += dropout_problems(form, resolution.values["disable_dropout"])
        if values["deepspeed"] or values["fsdp"]:
            problems += whole_critic_problems(own_lora, values["use_peft"])
        if values["critic"] is None:  # else it has been judged
            problems += sharding_problems(resolution.values, form)
    return problems


def _work_out(kind: str, values: dict[str, Any], given: Mapping[str, Any], num_processes: int) -> dict[str, str]:
    """Fill in what TRL works out from other settings, and say from which."""
    sources = {}
    if values["output_dir"] is None:
        sources["output_dir"], values["output_dir"] = "default", "trainer_output"
    if values["bf16"] is None:
        sources["bf16"], values["bf16"] = "fp16", not values["fp16"]
    if kind == "policy":
        sources |= _work_out_policy(values, num_processes)
    if kind == "reward_model" and given.get("lora_task_type") is None:
        sources["lora_task_type"] = "algorithm" if values["use_peft"] else "default"
        values["lora_task_type"] = TASK_TYPE[kind]
    return {key: "default" if source == "default" else f"follows from `{source}`" for key, source in sources.items()}


def _work_out_policy(values: dict[str, Any], num_processes: int) -> dict[str, str]:
    sources = {}
    if values["steps_per_generation"] is None:
        whole = values["generation_batch_size"] is not None
        sources["steps_per_generation"] = "generation_batch_size" if whole else "gradient_accumulation_steps"
        values["steps_per_generation"] = steps_per_generation(values, num_processes)
    if values["critic"] is None and has_critic(values):
        sources["critic"], values["critic"] = "use_peft", critic_form(None, values["use_peft"])
    if values["critic"] == "separate" and values["critic_use_peft"] is None and has_critic(values):
        sources["critic_use_peft"], values["critic_use_peft"] = "use_peft", bool(values["use_peft"])
    return sources
