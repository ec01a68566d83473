"""Adapters to go on from."""

import os
from typing import Any

from trl_algos.errors import ConfigError


def refuse_adapter_path(model: Any) -> None:
    """Raise `ConfigError` where `model` is the folder of an adapter, which would be trained with its whole base."""
    if isinstance(model, (str, os.PathLike)) and os.path.isfile(os.path.join(model, "adapter_config.json")):
        raise ConfigError(
            [
                f"`model`: {os.fspath(model)!r} is an adapter. Load its base model, then pass "
                "`PeftModel.from_pretrained(base, folder, is_trainable=True)`."
            ]
        )
