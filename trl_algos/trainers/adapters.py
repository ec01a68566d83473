"""Reading a saved adapter onto its base model, all of it or nothing."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from trl_algos.errors import ConfigError, first_line
from trl_algos.models.adapter_folder import ADAPTER_WEIGHTS, Adapter, fit_problem, is_adapter_folder
from trl_algos.models.lora_shapes import is_embedding, is_head
from trl_algos.models.score_head import SCORE_HEADS

NAME = "default"
"""What PEFT, TRL and transformers call the adapter that is trained."""


def with_adapter(model: Any, adapter: Adapter, trainable: bool) -> Any:
    """`model` as a `PeftModel` that has the saved adapter, called `NAME`.

    PEFT itself goes on where the adapter leaves layers of the model out, or has others.

    Args:
        model: its base, in any precision, quantised or not; its layers are wrapped in place.
        adapter: from `read_adapter`.
        trainable: whether its weights get gradients.

    Raises:
        ConfigError: it is of another base model, is broken, or holds what is not finite; in a message without a key.
    """
    from peft import PeftModel, get_peft_model_state_dict

    name = getattr(model.config, "_name_or_path", None) or "the model"
    problem = fit_problem(adapter, _weights(model), name)
    if problem is not None:
        raise ConfigError([problem])
    try:
        saved = load_file(adapter.folder / ADAPTER_WEIGHTS)
        with warnings.catch_warnings():
            for message in _SAID_BELOW:
                warnings.filterwarnings("ignore", message=message)
            found = PeftModel.from_pretrained(model, str(adapter.folder), NAME, is_trainable=trainable)
    # What PEFT, torch and safetensors raise for a file that is broken, or of another model.
    except (OSError, TypeError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        told = f"the adapter in {str(adapter.folder)!r} cannot be loaded on {name!r}: {_reason(error)}"
        raise ConfigError([told]) from error
    broken = [key for key, weight in saved.items() if not bool(torch.isfinite(weight).all())]
    if broken:
        raise ConfigError([f"{adapter.folder / ADAPTER_WEIGHTS} is broken: {broken[0]} is not finite."])
    own = get_peft_model_state_dict(found, adapter_name=NAME, save_embedding_layers=False)
    different = sorted((own.keys() - saved.keys()) | {key for key in saved.keys() - own.keys() if not _is_copy(key)})
    if different:
        where = "is a layer of the model alone" if different[0] in own else "is in the adapter alone"
        told = (
            f"the adapter in {str(adapter.folder)!r} is of another base model than {name!r}: {different[0]} {where}."
        )
        raise ConfigError([told])
    return found


_SAID_BELOW = (
    ".*missing adapter keys",
    "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter",
)
"""Warnings of PEFT's that are errors here, or no doubt about an adapter that has been trained and saved so."""


def _weights(model: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and types of the model's weights, in the words of safetensors."""
    types = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}
    return {name: (tuple(p.shape), types.get(p.dtype, "U8")) for name, p in model.named_parameters()}


def _is_copy(key: str) -> bool:
    """Whether it is an embedding or output layer of the base model, which PEFT may save beside an adapter."""
    module = key.removesuffix(".weight").removesuffix(".base_layer")
    return is_embedding(module) or is_head(module)


def _reason(error: BaseException) -> str:
    """What torch says second, after saying that there is something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1] if len(lines) > 1 and lines[0].endswith(":") else first_line(error)


def classifier_base(name: str, adapter: Adapter, num_labels: int = 1, **kwargs: Any) -> Any:
    """The sequence classifier below a saved adapter, whose head may be new where the adapter has one of its own.

    Transformers would report that head as missing.

    Args:
        name: folder or Hub id of the base model.
        adapter: what is to be put on it.
        num_labels: labels of the classifier.
        **kwargs: as `AutoModelForSequenceClassification.from_pretrained` takes them.

    Raises:
        ConfigError: it lacks weights that the adapter does not bring; in a message without a key.
    """
    reports = logging.getLogger("transformers.modeling_utils")
    reports.addFilter(_is_no_report)
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=num_labels, output_loading_info=True, **kwargs
        )
    finally:
        reports.removeFilter(_is_no_report)
    brought = any({*key.split(".")} & {*SCORE_HEADS} for key in adapter.weights)
    missing = sorted(key for key in info["missing_keys"] if not (brought and {*key.split(".")} & {*SCORE_HEADS}))
    if missing:
        raise ConfigError(
            [f"{name!r} lacks the weight {missing[0]}, and so does the adapter in {str(adapter.folder)!r}."]
        )
    return model


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


@contextmanager
def same_dtypes(model: nn.Module) -> Iterator[None]:
    """Within, adapters may be read from a checkpoint; afterwards all parameters are of the dtype that they were of.

    PEFT reads an adapter into float32, but TRL trains one on a quantised base in bfloat16, and so it was saved.
    """
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtypes.get(name, parameter.dtype):
            parameter.data = parameter.data.to(dtypes[name])


def check_adapter(model: Any, copied: bool) -> None:
    """Raise `ConfigError` where `model` is an adapter that could not be trained, or not be copied as the reference.

    Args:
        model: what a script passes: a path, a model, or a `PeftModel`.
        copied: whether TRL makes a reference of its adapter.
    """
    if is_adapter_folder(model):
        load = "`PeftModel.from_pretrained(base, folder, is_trainable=True)`"
        told = f"`model`: {os.fspath(model)!r} is an adapter. Load its base model, then pass {load}."
        raise ConfigError([told])
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return
    if copied and NAME not in adapters:
        raise ConfigError([f"`model`: its adapter must be called {NAME} to be copied, but is {', '.join(adapters)}."])
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(["`model`: its adapter is frozen; load it with `is_trainable=True`."])


def give_reference_adapter(model: Any) -> None:
    """Make the reference the very start of an adapter that is trained on, precision included.

    TRL copies the adapter before it rounds what is trained on a quantised base to bfloat16.

    Args:
        model: with the adapters `NAME` and, where there is a reference, `ref`.
    """
    if "ref" not in (getattr(model, "peft_config", None) or {}):
        return
    weights = dict(model.named_parameters())
    for key, weight in weights.items():
        if ".ref." in key:
            start: Tensor = weights[key.replace(".ref.", f".{NAME}.")]
            weight.data = start.detach().clone()
