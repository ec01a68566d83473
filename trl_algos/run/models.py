"""The model that a recipe trains: a name, or an adapter on its base to go on from; and where models are found."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, AutoTokenizer, set_seed
from trl import get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from trl_algos.data.arithmetic_task import BUNDLED_MODELS
from trl_algos.errors import ConfigError, first_line
from trl_algos.models.adapter_folder import ADAPTER_CONFIG, Adapter, is_adapter_folder, read_adapter
from trl_algos.models.folder import tokenizer_problems
from trl_algos.recipe.arguments import Arguments
from trl_algos.trainers.adapters import classifier_base, with_adapter


def model_arguments(arguments: Arguments) -> dict[str, Any]:
    """What a trainer is told of the model to train; the recipe's loading options are put where TRL looks for them.

    Returns:
        `model`, the name of one with `quantization_config` and `peft_config`, or an adapter on its base, with
        `processing_class` where a tokenizer lies beside it.

    Raises:
        ConfigError: the model, or the adapter or its base, cannot be loaded.
    """
    told, args = arguments.model, arguments.trainer
    quantization = get_quantization_config(told)
    args.model_init_kwargs = _loading_options(arguments)
    if is_adapter_folder(told.model_name_or_path):
        return _continued(arguments, quantization)
    revision = args.model_init_kwargs["revision"]
    name = found_model("model_name_or_path", told.model_name_or_path, revision, args.trust_remote_code)
    return {"model": name, "quantization_config": quantization, "peft_config": get_peft_config(told)}


def _loading_options(arguments: Arguments) -> dict[str, Any]:
    model = arguments.model
    kwargs = dict(arguments.trainer.model_init_kwargs or {})
    kwargs.setdefault("revision", model.model_revision)
    for key in ("attn_implementation", "dtype"):
        if getattr(model, key) is not None:
            kwargs.setdefault(key, getattr(model, key))
    return kwargs


def _continued(arguments: Arguments, quantization: Any) -> dict[str, Any]:
    """The adapter to go on from, on its base; quantised where the recipe says so."""
    try:
        adapter = read_adapter(arguments.model.model_name_or_path)
        model = with_adapter(_base(arguments, adapter, quantization), adapter, trainable=True)
    except ConfigError as error:
        problems = [p if p.startswith("`") else f"`model_name_or_path`: {p}" for p in error.problems]
        raise ConfigError(problems) from error
    if arguments.kind != "policy":  # whose trainers load reward models by it
        arguments.trainer.model_init_kwargs = None  # or TRL says that it is not used
    if any(tokenizer_problems(adapter.folder)):
        return {"model": model}
    sides = (
        {"truncation_side": "left", "padding_side": "left"} if arguments.kind == "policy" else {}
    )  # as TRL has them
    return {"model": model, "processing_class": AutoTokenizer.from_pretrained(str(adapter.folder), **sides)}


def _base(arguments: Arguments, adapter: Adapter, quantization: Any) -> Any:
    """The base model, loaded as TRL loads a model that it is given the name of."""
    args = arguments.trainer
    kwargs = {"trust_remote_code": args.trust_remote_code, **args.model_init_kwargs}
    if kwargs["revision"] == "main":
        kwargs["revision"] = adapter.revision
    if adapter.base is None:
        raise ConfigError([f"{str(adapter.folder / ADAPTER_CONFIG)!r} does not name its base model."])
    name = found_model("model_name_or_path", adapter.base, kwargs["revision"], args.trust_remote_code)
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs["device_map"] = None
    set_seed(args.seed)  # as TRL does: the head that an adapter's own takes the place of is drawn
    classifier = SimpleNamespace(from_pretrained=partial(classifier_base, adapter=adapter))
    return create_model_from_path(name, classifier if arguments.kind == "reward_model" else None, **kwargs)


def found_model(key: str, name: str, revision: str, trust_remote_code: bool) -> str:
    """`name`, or the folder of the bundled model of that name.

    Args:
        key: the recipe's key, for the message.
        name: a folder, a bundled model, or an id of the Hub.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether code that lies beside the model may run.

    Raises:
        ConfigError: it has no config that transformers can read, here or on the Hub.
    """
    if name in BUNDLED_MODELS and not Path(name).is_dir():
        return BUNDLED_MODELS[name]()
    try:
        AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError([f"`{key}`: {name!r} is not a model that can be loaded: {first_line(error)}"]) from error
    return name
