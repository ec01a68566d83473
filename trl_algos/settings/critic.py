"""Settings of the critic: which follow from others, which cannot run, and which no objective without a critic uses."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from trl_algos.algorithms import (
    ALGORITHMS,
    CRITIC_DEFAULTS,
    Algorithm,
    advantage_estimators,
    advantage_needs,
)
from trl_algos.errors import ConfigError, unknown_name
from trl_algos.models.critic_folder import CRITIC_FORMS, about_critic, critic_folder_problems, is_critic_folder
from trl_algos.settings.backends import block_of, recomputes
from trl_algos.settings.resolved import Resolution, of_row

CRITIC_SETTINGS = (
    "critic",
    "critic_model_name_or_path",
    "critic_use_peft",
    "critic_trunk_gradient",
    "critic_learning_rate",
    "critic_max_grad_norm",
    "critic_lr_scheduler_type",
    "critic_lr_scheduler_kwargs",
    "critic_lr_warmup_steps",
    "critic_num_iterations",
    *(name for name in CRITIC_DEFAULTS if name != "gamma"),
)
"""Settings that only an objective with a critic has; `gamma` others have, too."""

_FULL = "FULL_STATE_DICT"

_FOLLOWS = {
    "critic_learning_rate": "learning_rate",
    "critic_max_grad_norm": "max_grad_norm",
    "critic_lr_scheduler_type": "lr_scheduler_type",
    "critic_lr_warmup_steps": "warmup_steps",
    "critic_num_iterations": "num_iterations",
}
"""Setting -> the one whose value it takes where it is not set."""

REACTING_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules of transformers that wait for evaluations, and so have no course over the steps."""

_COSINE, _FLOOR = ("num_cycles",), ("min_lr", "min_lr_rate")

SCHEDULES = {
    "linear": (),
    "cosine": _COSINE,
    "cosine_with_restarts": _COSINE,
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": (*_COSINE, *_FLOOR),
    "cosine_warmup_with_min_lr": (*_COSINE, *_FLOOR, "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        *_COSINE,
    ),
}
"""The others of transformers, each of which can be the critic's own, and the parameters that each takes."""

_ONE_OF = {
    "cosine_with_min_lr": _FLOOR,
    "cosine_warmup_with_min_lr": _FLOOR,
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Schedule -> parameters of which it needs exactly one."""


def has_critic(values: Mapping[str, Any]) -> bool:
    """Whether the advantage estimator in use needs a critic."""
    return "critic" in advantage_needs(advantage_estimators()[values["advantage_estimator"]])


def resolve_critic(resolution: Resolution, row: Algorithm) -> Iterator[str]:
    """Fill the critic's settings, or name those that were set where there is no critic.

    The form stays unset where it depends on whether LoRA is trained: see `critic_form`.

    Args:
        resolution: settings; the advantage estimator is known and valid.
        row: the algorithm.
    """
    values = resolution.values
    if not has_critic(values):
        yield from _unused_problems(values)
        return
    if values["critic"] not in (*CRITIC_FORMS, None):
        yield unknown_name("critic", values["critic"], CRITIC_FORMS)
        values["critic"] = None
    elif values["critic_model_name_or_path"] is not None:
        form = _form_of(values["critic_model_name_or_path"])
        resolution.fill("critic", form, "follows from `critic_model_name_or_path`")
    if "critic_gae_lambda" in row.defaults:
        resolution.fill("critic_gae_lambda", row.defaults["critic_gae_lambda"], of_row(row))
    resolution.fill("critic_gae_lambda", values["gae_lambda"], "follows from `gae_lambda`")
    for name in CRITIC_DEFAULTS:
        resolution.fill_default(row, name, CRITIC_DEFAULTS)
    for name, source in _FOLLOWS.items():
        resolution.fill(name, plain(values[source]), f"follows from `{source}`")
    if values["critic_lr_scheduler_type"] == plain(values["lr_scheduler_type"]):
        resolution.fill(
            "critic_lr_scheduler_kwargs", values["lr_scheduler_kwargs"], "follows from `lr_scheduler_kwargs`"
        )
    if values["critic"] == "shared":
        resolution.fill("critic_trunk_gradient", False, "common default")
    yield from _problems(values, asked_to_warm_up="critic_warmup_steps" not in resolution.sources)


def plain(value: Any) -> Any:
    """The value of a setting that transformers makes an enum of."""
    return getattr(value, "value", value)


def _form_of(path: str) -> str:
    """The form of a critic that starts from `path`: that of the saved one there, else a model of its own."""
    try:
        return str(about_critic(path)["form"]) if is_critic_folder(path) else "separate"
    except ConfigError:  # complained of in `_problems`
        return "separate"


def critic_form(critic: str | None, uses_lora: bool) -> str:
    """The critic's form: as set, or `adapter` where LoRA is trained, which then costs next to nothing.

    Args:
        critic: the setting; None where it was not set.
        uses_lora: whether the policy trains a LoRA adapter.
    """
    return critic or ("adapter" if uses_lora else "separate")


def form_problems(
    critic: str | None, uses_lora: bool, path: str | None = None, own_lora: bool | None = None
) -> Iterator[str]:
    """A message where the form does not fit how the policy is trained, or the saved critic that it starts from.

    Args:
        critic: the setting; None where it was not set.
        uses_lora: whether the policy trains a LoRA adapter.
        path: the setting `critic_model_name_or_path`.
        own_lora: the setting `critic_use_peft`.
    """
    form = critic_form(critic, uses_lora)
    if own_lora is not None and form != "separate":
        yield f"`critic_use_peft`: {own_lora!r} is used by `critic: separate` alone, but the critic here is {form}."
    elif own_lora and not uses_lora:
        yield (
            "`critic_use_peft`: true has no LoRA to be like: the policy is trained whole; set `use_peft` (in a script "
            "`peft_config`), or leave it out."
        )
    elif is_critic_folder(path) and (critic != "adapter" or uses_lora):
        for problem in critic_folder_problems(str(path), form, critic_has_lora(form, uses_lora, own_lora)):
            yield f"`critic_model_name_or_path`: {problem}"
    if critic == "adapter" and not uses_lora:
        yield (
            "`critic`: adapter is a second LoRA adapter on the frozen model, but no LoRA is trained here; set "
            "`use_peft` (in a script `peft_config`), or `critic` to separate or shared."
        )


def critic_has_lora(form: str, uses_lora: bool, own_lora: bool | None = None) -> bool:
    """Whether a critic of this form has an adapter of its own; arguments as of `form_problems`."""
    return form == "adapter" or (form == "separate" and (uses_lora if own_lora is None else own_lora))


def critic_stands_alone(values: Mapping[str, Any]) -> bool:
    """Whether a run trains the critic and leaves the policy as it is: `critic_warmup_steps` is all of `max_steps`."""
    return has_critic(values) and 0 < values["max_steps"] == values["critic_warmup_steps"]


def dropout_problems(form: str, disable_dropout: bool) -> Iterator[str]:
    """A message where dropout would come between the values at sampling and those in training.

    Args:
        form: one of `CRITIC_FORMS`, worked out.
        disable_dropout: the setting of that name.
    """
    if not disable_dropout and form != "separate":
        yield (
            f"`disable_dropout`: false is not possible with `critic: {form}`, which reads the policy's layers: values "
            "at sampling and in training would differ by it."
        )


def joint_clipping_problems(max_grad_norm: float, critic_max_grad_norm: float) -> Iterator[str]:
    """A message where policy and critic are to be clipped apart; arguments are the settings of these names."""
    if critic_max_grad_norm != max_grad_norm:
        yield (
            f"`critic_max_grad_norm`: {critic_max_grad_norm!r} differs from `max_grad_norm`, which is "
            f"{max_grad_norm!r}, but DeepSpeed clips policy and critic together; leave it out."
        )


def shared_passes_problems(policy: int, critic: int | None) -> Iterator[str]:
    """A message where policy and critic take different numbers of passes over a generation batch."""
    if critic not in (None, policy):
        yield (
            f"`critic_num_iterations`: {critic!r} differs from `num_iterations` ({policy}), which is not possible "
            "where DeepSpeed or FSDP shards what is trained; leave it out."
        )


def fsdp_problems(version: int, recomputing: bool, saves_shards: bool, form: str) -> Iterator[str]:
    """A message for each thing that FSDP cannot do with a critic.

    Args:
        version: 1 or 2.
        recomputing: whether FSDP itself is to checkpoint activations.
        saves_shards: whether checkpoints are to hold what lies on each process.
        form: one of `CRITIC_FORMS`, worked out.
    """
    if version != 2:
        yield f"`fsdp_config`: version {version} is not supported with a critic; take version 2."
    if saves_shards:
        yield f"`fsdp_config`: state_dict_type must be {_FULL}; others leave the critic out of checkpoints with LoRA."
    if recomputing and form == "adapter":
        yield (
            "`fsdp_config`: activation_checkpointing would recompute the critic's layers with the policy's adapter; "
            "set `gradient_checkpointing` instead."
        )


def _unused_problems(values: Mapping[str, Any]) -> Iterator[str]:
    estimators = [name for name, function in advantage_estimators().items() if "critic" in advantage_needs(function)]
    algorithms = [row.key for row in ALGORITHMS.values() if "critic" in row.needs]
    for name in CRITIC_SETTINGS:
        if values[name] is not None:
            yield (
                f"`{name}`: {values[name]!r} is not used: the advantage estimator {values['advantage_estimator']!r} "
                f"has no critic. Those with one are {', '.join(estimators)}, as in {', '.join(algorithms)}."
            )


def _problems(values: Mapping[str, Any], asked_to_warm_up: bool) -> Iterator[str]:
    form, path = values["critic"], values["critic_model_name_or_path"]
    if path is not None and _is_no_name(path):
        yield f"`critic_model_name_or_path`: {path!r} names no model; give a folder or a model id, or leave it out."
    elif path is not None and form != "separate" and not is_critic_folder(path):
        yield (
            f"`critic_model_name_or_path`: {path!r} is not used by `critic: {form}`, unless it is a folder that a "
            "critic of that form was saved in; set `critic` to separate."
        )
    if values["critic_trunk_gradient"] is not None and form != "shared":
        yield (
            f"`critic_trunk_gradient`: {values['critic_trunk_gradient']!r} is used by `critic: shared` alone, which "
            "has no weights of its own but the value head."
        )
    if values["bootstrap_truncated"] and values["mask_truncated_completions"]:
        yield (
            "`bootstrap_truncated`: true has nothing to go on from: `mask_truncated_completions` leaves truncated "
            "completions out."
        )
    yield from _warmup_problems(values, asked_to_warm_up)
    if form is not None:
        yield from sharding_problems(values, form)
    yield from _library_problems(values)


def _is_no_name(path: Any) -> bool:
    """Whether somebody meant to switch something on or off, rather than to name a model."""
    text = str(path).strip().lower()
    return not text or (text in ("true", "false") and not os.path.isdir(str(path)))


def own_schedule_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """A message for each part of DeepSpeed's config that would step policy and critic alike."""
    for key in ("optimizer", "scheduler"):
        if key in config:
            yield (
                f"`deepspeed`: its config sets {key!r}, which would leave the critic without a learning rate and a "
                "warm-up of its own; leave it out and set `optim` and `lr_scheduler_type`."
            )


def whole_critic_problems(own_lora: bool | None, uses_lora: bool) -> Iterator[str]:
    """A message where a whole critic would train beside an adapter under a backend that shards.

    Args:
        own_lora: the setting `critic_use_peft`.
        uses_lora: whether the policy trains a LoRA adapter.
    """
    if own_lora is False and uses_lora:
        yield (
            "`critic_use_peft`: false beside a policy with LoRA is not supported where DeepSpeed or FSDP shards what "
            "is trained; leave it out."
        )


def sharding_problems(values: Mapping[str, Any], form: str) -> Iterator[str]:
    """A message for each thing that the backend of the settings cannot do with a critic of that form.

    What accelerate's own config asks for is for the trainer to judge, or for `check` with that file.
    """
    if values["deepspeed"]:
        yield from own_schedule_problems(block_of(values, "deepspeed"))
        yield from joint_clipping_problems(values["max_grad_norm"], values["critic_max_grad_norm"])
    if values["deepspeed"] or values["fsdp"]:
        yield from shared_passes_problems(values["num_iterations"], values["critic_num_iterations"])
    block = block_of(values, "fsdp_config") if values["fsdp"] else {}
    version, saves_shards = int(block.get("version", 2)), block.get("state_dict_type", _FULL) != _FULL
    yield from fsdp_problems(version, recomputes(block), saves_shards, form)


def _warmup_problems(values: Mapping[str, Any], asked: bool) -> Iterator[str]:
    """Where the policy would not be trained at all; `asked`: somebody set the warm-up, rather than the algorithm."""
    steps, last = values["critic_warmup_steps"], values["max_steps"]
    if 0 < last < steps or (0 < last == steps and not asked):
        yield (
            f"`critic_warmup_steps`: {steps!r} leaves the policy untrained: `max_steps` is {last!r}, and until the "
            f"warm-up is over the critic alone learns. Set fewer, or exactly {last} to train the critic alone."
        )


def _schedule_problems(values: Mapping[str, Any], policy: str, own: str) -> Iterator[str]:
    """Where parameters do not belong to the critic's schedule, by the names of this and of the policy's schedule."""
    given = values["critic_lr_scheduler_kwargs"]
    follows = own == policy and given == values["lr_scheduler_kwargs"]
    key = "lr_scheduler_kwargs" if follows else "critic_lr_scheduler_kwargs"
    given = {} if given is None else given
    if own not in SCHEDULES or not isinstance(given, Mapping):
        return
    if follows and own.startswith("constant"):  # transformers passes over them
        return
    known, one_of = SCHEDULES[own], _ONE_OF.get(own, ())
    for name in given:
        if name not in known:
            yield f"`{key}`: {name!r} is no parameter of {own}, which takes {', '.join(known) or 'none'}."
    if one_of and sum(given.get(name) is not None for name in one_of) != 1:
        yield f"`{key}`: {dict(given)!r}, but {own} needs {' or '.join(one_of)}."


def _library_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Where a setting of transformers goes against one of the critic's."""
    schedule, own, hub = (
        plain(values[name]) for name in ("lr_scheduler_type", "critic_lr_scheduler_type", "hub_strategy")
    )
    yield from _schedule_problems(values, str(schedule), str(own))
    if own not in (*SCHEDULES, schedule):
        yield unknown_name("critic_lr_scheduler_type", own, SCHEDULES)
    elif schedule in REACTING_SCHEDULES and own != schedule:
        yield (
            f"`critic_lr_scheduler_type`: {own} cannot go beside `lr_scheduler_type: {schedule}`, which has no course "
            "over the steps; take another one for the policy."
        )
    elif schedule in REACTING_SCHEDULES and values["critic_lr_warmup_steps"] != values["warmup_steps"]:
        yield f"`critic_lr_warmup_steps`: is not used by `lr_scheduler_type: {schedule}`."
    if values["critic_warmup_steps"] and schedule in REACTING_SCHEDULES:
        yield (
            f"`lr_scheduler_type`: {schedule} has no course over the steps that could start after "
            "`critic_warmup_steps`; take another one, or 0 steps."
        )
    if values["push_to_hub"] and not values["push_critic"] and hub in ("checkpoint", "all_checkpoints"):
        yield (
            f"`hub_strategy`: {hub} pushes whole checkpoints, the critic included; take every_save or end, or set "
            "`push_critic`."
        )
