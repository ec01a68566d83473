"""Settings that may be shown and written down: plain values, without secrets."""

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any

# `num_tokens`, `tokenizer` and the like are no secrets, and neither are the names of special tokens.
_SECRET_NAME = re.compile(
    r"token(?!s|iz)|secret|passw|passphrase|pass$|pwd$|credential|authorization|auth$|bearer|cookie|jwt|dsn$"
    r"|(api|access|private|openai|wandb)[-_]?key|(?-i:_KEYS?$|_TOKENS$)",
    re.IGNORECASE,
)
_SPECIAL_TOKEN = re.compile(r"(bos|eos|pad|unk|image)_token")
_URL_LOGIN = re.compile(r"(\w://)[^/\s?#]*@")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_URL_PARAMETER = re.compile(
    r"([?&][^=&\s]*(?:token|secret|password|api_?key|key|auth|signature|sig)=)[^&\s#]+", re.IGNORECASE
)


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without secrets, as plain values that YAML and JSON can write.

    A setting whose name looks like that of a secret (`hub_token`, `API_KEY`, ...) is left out, wherever it stands:
    also in blocks such as `env`. Login and token are taken out of URLs. True, false and None are no secrets and stay.

    Args:
        settings: Name -> value; blocks, lists, enums and dataclasses are taken apart.

    Returns:
        The settings in the order given; enums are their values, other objects their text.
    """
    return {
        name: _plain(value)
        for name, value in settings.items()
        if value is None or isinstance(value, bool) or not is_secret(str(name))
    }


def is_secret(name: str) -> bool:
    """Whether a setting or variable of this name is one to keep to oneself."""
    return bool(_SECRET_NAME.search(name)) and not _SPECIAL_TOKEN.fullmatch(name)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return public_settings(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    text = _URL_PARAMETER.sub(r"\1***", _URL_LOGIN.sub(r"\1", str(value)))
    return _HUB_TOKEN.sub("***", text)
