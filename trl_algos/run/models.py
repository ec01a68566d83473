"""Where the models that a recipe names are found."""

from pathlib import Path

from transformers import AutoConfig

from trl_algos.data.arithmetic_task import BUNDLED_MODELS
from trl_algos.errors import ConfigError, first_line
from trl_algos.recipe.arguments import Arguments


def trained_model(arguments: Arguments) -> str:
    """Folder or id of the model to train, with the recipe's loading options put where TRL looks for them.

    Raises:
        ConfigError: it has no config that transformers can read, here or on the Hub.
    """
    model, args = arguments.model, arguments.trainer
    kwargs = dict(args.model_init_kwargs or {})
    kwargs.setdefault("revision", model.model_revision)
    for key in ("attn_implementation", "dtype"):
        if getattr(model, key) is not None:
            kwargs.setdefault(key, getattr(model, key))
    args.model_init_kwargs = kwargs
    return found_model("model_name_or_path", model.model_name_or_path, kwargs["revision"], args.trust_remote_code)


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
