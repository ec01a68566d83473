"""The argument classes of TRL's scripts, built from a recipe."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate import ParallelismConfig
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available
from trl import DatasetMixtureConfig, ModelConfig

from trl_algos.config import PolicyConfig
from trl_algos.errors import ConfigError
from trl_algos.preference_config import BradleyTerryConfig, PreferenceConfig
from trl_algos.recipe import schema
from trl_algos.recipe.reading import Recipe, placed
from trl_algos.recipe.run_arguments import PairRunArguments, PolicyRunArguments

TrainerConfig = PolicyConfig | PreferenceConfig | BradleyTerryConfig
RunConfig = PolicyRunArguments | PairRunArguments

CLASSES: Mapping[str, tuple[type[RunConfig], type[TrainerConfig]]] = {
    "policy": (PolicyRunArguments, PolicyConfig),
    "preference": (PairRunArguments, PreferenceConfig),
    "reward_model": (PairRunArguments, BradleyTerryConfig),
}
"""Kind of a recipe -> the classes of its parts `run` and `trainer`."""


@dataclass
class Arguments:
    """What a recipe says, as the classes that TRL's functions take; `kind` is the recipe's."""

    kind: str
    run: Any
    trainer: Any
    model: ModelConfig
    mixture: DatasetMixtureConfig


def build(recipe: Recipe) -> Arguments:
    """The arguments of a recipe.

    Raises:
        ConfigError: TRL or transformers refuse a setting, or the hardware has not what a setting asks for.
    """
    problems = list(_hardware_problems(recipe))
    run_class, trainer_class = CLASSES[recipe.kind]
    built: dict[str, Any] = {}
    for part, cls in (("run", run_class), ("model", ModelConfig), ("mixture", DatasetMixtureConfig)):
        with _refusals(recipe.kind, problems):
            built[part] = cls(**recipe.part(part))
    if "model" in built:
        _correct(built["model"], recipe)
    with _refusals(recipe.kind, problems):
        trainer = recipe.part("trainer")
        for key in ("critic", "critic_use_peft"):  # which may follow from `use_peft`, a setting of the model's
            if recipe.values.get(key) is not None:
                trainer[key] = recipe.values[key]
        if trainer.get("parallelism_config") is not None:
            trainer["parallelism_config"] = ParallelismConfig(**trainer["parallelism_config"])
        if not problems:
            built["trainer"] = trainer_class(**trainer)
    if problems:
        raise ConfigError([placed(message, recipe.written) for message in problems])
    return Arguments(recipe.kind, **built)


def _correct(model: ModelConfig, recipe: Recipe) -> None:
    """Put right what TRL makes of a recipe's words, and what it cannot know."""
    if recipe.values["lora_target_modules"] not in (None, ["all-linear"]):
        # TRL makes text of a list of one name, and then no module fits.
        model.lora_target_modules = recipe.values["lora_target_modules"]
    model.lora_task_type = recipe.values["lora_task_type"]  # which follows from the algorithm


def named(message: str, kind: str) -> str:
    """A message of another library, with the setting that it speaks of in front, as ours have it.

    Args:
        message: what the library says.
        kind: of the recipe whose settings may be spoken of.
    """
    if message.startswith("`"):  # one of ours
        return message
    known = schema.settings(kind)
    for word in re.findall(r"[a-z0-9_]+", message):
        if word in known and ("_" in word or word in ("tf32", "fp16", "bf16", "deepspeed", "fsdp", "debug", "optim")):
            return f"`{word}`: {message}"
    return message


@contextmanager
def _refusals(kind: str, problems: list[str]) -> Iterator[None]:
    """Collects what is refused: TRL's and transformers' own checks raise whatever comes."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
    except Exception as error:
        problems.append(named(f"{type(error).__name__}: {error}", kind))


def _hardware_problems(recipe: Recipe) -> Iterator[str]:
    values = recipe.values
    wants_bf16 = values["bf16_full_eval"] or (not values["fp16"] if values["bf16"] is None else values["bf16"])
    if wants_bf16 and not values["use_cpu"] and not (is_torch_bf16_gpu_available() or is_torch_xla_available()):
        yield "`bf16`: needs a GPU with bfloat16, and there is none here; set `use_cpu: true`, or `bf16: false`."
