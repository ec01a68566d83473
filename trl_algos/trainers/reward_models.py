"""Reward models in front of a policy trainer: adapters loaded on their base, scores normalised by what is known."""

import inspect
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl_algos.errors import ConfigError, first_line
from trl_algos.models.adapter_folder import ADAPTER_CONFIG, Adapter, is_adapter_folder, read_adapter
from trl_algos.models.folder import read_json
from trl_algos.models.reward_folder import (
    FIGURES,
    figures_problem,
    reward_figures,
)
from trl_algos.trainers.adapters import classifier_base, with_adapter


def load_reward_model(folder: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The reward model that `BradleyTerryTrainer` left in `folder`, whole or as an adapter with its head.

    The score of a text is `model(**inputs).logits[:, 0]`, float, in reward units, with gradient; `inputs` come from
    the folder's tokenizer with `add_special_tokens=False`, padded on either side.

    Args:
        folder: a model's, or an adapter's, whose base model is loaded, too.
        **kwargs: as `AutoModelForSequenceClassification.from_pretrained` takes them.

    Returns:
        A sequence classifier with one label, in evaluation mode. Its config has the padding token of the folder's
        tokenizer, the folder as its name, and `reward_mean` and `reward_std` where they are known.

    Raises:
        ConfigError: the folder or the adapter's base model cannot be loaded.
    """
    name = os.fspath(folder).rstrip("/") or "/"
    try:
        if is_adapter_folder(name):
            model = _adapted_model(read_adapter(name), kwargs)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(name, **{"num_labels": 1, **kwargs})
    except ConfigError as error:
        raise ConfigError([f"`reward_funcs`: {problem}" for problem in error.problems]) from error
    # What transformers, PEFT and safetensors raise for a file that is missing, cut short or of another kind.
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError([f"`reward_funcs`: {_described(name)} cannot be loaded: {first_line(error)}"]) from error
    model.eval()
    if "position_ids" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_count_positions, with_kwargs=True)
    return model


def _adapted_model(adapter: Adapter, kwargs: dict[str, Any]) -> Any:
    """The classifier with the adapter in its layers; transformers loads both without DoRA's lengths."""
    if adapter.base is None:
        raise ConfigError([f"{str(adapter.folder / ADAPTER_CONFIG)!r} does not name its base model."])
    base = classifier_base(adapter.base, adapter, **{"num_labels": 1, "revision": adapter.revision, **kwargs})
    model = with_adapter(base, adapter, trainable=False).get_base_model()
    name = str(adapter.folder)
    # What transformers has put there is the base model's.
    model.config.get_text_config().pad_token_id = AutoTokenizer.from_pretrained(name).pad_token_id
    model.config._name_or_path = name
    _set_figures(model.config, reward_figures(name))
    return model


def _count_positions(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Positions from the first token of each row: models with learned ones count padding in front of it, too."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.dim() != 2 or bool(mask[:, 0].all()) or kwargs.get("position_ids") is not None:
        return args, kwargs
    return args, {**kwargs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def _described(name: str) -> str:
    if not is_adapter_folder(name):
        return repr(name)
    return f"{name!r}, an adapter on {read_json(os.path.join(name, ADAPTER_CONFIG)).get('base_model_name_or_path')!r},"


def _set_figures(config: Any, figures: dict[str, Any]) -> None:
    forget_figures(config)  # the base model may be a reward model, too
    for name, value in figures.items():
        setattr(config, name, value)


def known_figures(config: Any) -> dict[str, Any]:
    """`FIGURES` in a model's config, unchecked."""
    return {name: getattr(config, name) for name in FIGURES if getattr(config, name, None) is not None}


def forget_figures(config: Any) -> None:
    """Take `FIGURES` out of a model's config: the scores that they are of will be others."""
    for name in FIGURES:
        if hasattr(config, name):
            delattr(config, name)


def with_adapters_loaded(reward_funcs: Any, init_kwargs: dict[str, Any] | None, trust_remote_code: bool) -> Any:
    """`reward_funcs` as TRL takes them, with a loaded model in the place of each folder of an adapter.

    TRL would load them, too, but with the name, tokenizer and padding token of the base model.

    Args:
        reward_funcs: of the user; the list itself is left as it is.
        init_kwargs: what TRL loads reward models with: `model_init_kwargs`.
        trust_remote_code: code that lies in a model's folder may be run.
    """
    if not isinstance(reward_funcs, list):
        reward_funcs = [] if reward_funcs is None else [reward_funcs]
    # A revision is the policy's, and a folder has none.
    kwargs = {name: value for name, value in (init_kwargs or {}).items() if name != "revision"}
    kwargs.setdefault("trust_remote_code", trust_remote_code)
    return [load_reward_model(entry, **kwargs) if is_adapter_folder(entry) else entry for entry in reward_funcs]


class RewardScale(NamedTuple):
    """Mean and spread of each reward's scores: those of reward models as they were held out, 0 and 1 of functions.

    Args:
        names: F names, as TRL logs them.
        models: indices of the reward models among them.
        mean: (F,) float32, reward units.
        std: (F,) float32, reward units, > 0.
    """

    names: tuple[str, ...]
    models: tuple[int, ...]
    mean: Tensor
    std: Tensor

    def normalised(self, scores: Tensor) -> Tensor:
        """(N, F) scores -> (score - mean) / std; NaN stays NaN."""
        return (scores - self.mean.to(scores)) / self.std.to(scores)

    def raw_metrics(self, normalised: Tensor) -> dict[str, float]:
        """Means of reward models' scores as they were before: (N, F) normalised ones -> name of a metric -> mean."""
        raw = normalised * self.std.to(normalised) + self.mean.to(normalised)
        return {f"rewards/{self.names[i]}/raw_mean": raw[:, i].nanmean().item() for i in self.models}


def reward_scale(functions: Sequence[Any], names: Sequence[str]) -> RewardScale:
    """The scale of a trainer's rewards.

    Args:
        functions: functions, and models out of whatever wraps them for several processes.
        names: of all of them, as TRL logs them.

    Raises:
        ConfigError: none is a model, or one lacks a figure, or has one that cannot be divided by.
    """
    models = tuple(i for i, function in enumerate(functions) if isinstance(function, nn.Module))
    if not models:
        raise ConfigError(
            ["`reward_normalization`: true, but no reward in `reward_funcs` is a model, whose scores it is for."]
        )
    figures = {i: known_figures(functions[i].config) for i in models}
    problems = [problem for i in models if (problem := figures_problem(names[i], figures[i]))]
    if problems:
        raise ConfigError(problems)
    mean, std = (
        torch.tensor([float(figures[i][name]) if i in models else neutral for i in range(len(functions))])
        for name, neutral in zip(FIGURES, (0.0, 1.0), strict=True)
    )
    return RewardScale(tuple(names), models, mean, std)
