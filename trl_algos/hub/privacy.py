"""The one rule of what may leave this machine: all that is uploaded goes through it; what lies here stays as it is.

Settings that say where things go or who made them are left out. A path becomes its last part, wherever it stands.
Names of this user and this machine are blotted out, secrets are left out. A name of a model or of data is a Hub id
only where it cannot be a path.
"""

import contextlib
import getpass
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from trl_algos.models.folder import is_hub_id
from trl_algos.settings.public import public_settings

HELD_BACK = frozenset(
    {
        *("output_dir", "logging_dir", "run_name", "project", "env", "resume_from_checkpoint", "local_rank"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "log_completions_hub_repo"),
        *(
            "push_to_hub",
            "hub_token",
            "hub_model_id",
            "hub_strategy",
            "hub_always_push",
            "hub_private_repo",
            "hub_revision",
        ),
        *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "ddp_backend", "vllm_group_port"),
    }
)
"""Settings of the machine and of its user's accounts: they say nothing about the model."""

BLOTTED = "***"

# Logins that say nobody's name, and are words that settings use.
_ANYBODY = frozenset({"root", "user", "users", "test", "train", "ubuntu", "runner", "admin", "default", "localhost"})

# A path of two parts or more, or a part after `~`; not the end tag `</think>`, an address, or `and/or`.
_ABSOLUTE = re.compile(
    r"(?<![\w:/.<>~*)\]}])(?:~|file:/*|\.{1,2}(?=/))?(?:/[\w.@+=,-]+){2,}/?|(?<![\w:/.<~])~/[\w.@+/-]+"
)
_WINDOWS = re.compile(r"(?<!\w)(?:[A-Za-z]:|\\)\\(?:[^\\\s:*?\"<>|]+\\)*")
_FILE = re.compile(
    r"(?<![\w:/.@+=,-])[\w.@+=,/-]*/(?=[\w.@+=,-]+\.(?:py|jsonl?|csv|tsv|parquet|arrow|ya?ml|jinja2?|txt|bin|safetensors|gz)\b)"
)
_BEFORE_PATH = r"(?<![\w./-])"
_AFTER_PATH = r"(?![\w-])"


@dataclass(frozen=True)
class Privacy:
    """What is particular to this machine.

    Args:
        places: values of settings that were paths where the run was made, as written; some look like Hub ids.
        names: of users and machines.
    """

    places: tuple[str, ...] = ()
    names: tuple[str, ...] = field(default_factory=lambda: tuple(names_here()))

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that may leave, as plain values."""
        kept = {name: value for name, value in settings.items() if name not in HELD_BACK}
        return {name: self.value(value) for name, value in public_settings(kept).items()}

    def value(self, value: Any) -> Any:
        """A plain value, with every text in it as it may leave, and without secrets."""
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.value(item) for name, item in public_settings(value).items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """A text with the last part of each path in the place of the path, and no name of this machine or user."""
        text = str(next(iter(public_settings({"": text}).values())))
        for place in sorted(self.places, key=len, reverse=True):
            if place.strip("./~"):
                text = re.sub(_BEFORE_PATH + re.escape(place.rstrip("/")) + _AFTER_PATH, _last_part(place), text)
        text = _WINDOWS.sub("", text)
        text = _ABSOLUTE.sub(lambda found: _last_part(found[0]), text)
        text = _FILE.sub("", text)
        return text if is_hub_id(text) and "/" in text else self._without_names(text)

    def config(self, value: Any, key: str = "") -> Any:
        """What a config of a model or tokenizer says, but for paths: there a name such as `mask_token` is no secret.

        Where a model comes from is its Hub id or nothing; another path becomes its last part.
        """
        if isinstance(value, Mapping):
            return {name: self.config(item, str(name)) for name, item in value.items()}
        if isinstance(value, list):
            return [self.config(item) for item in value]
        if not isinstance(value, str):
            return value
        if key.endswith("name_or_path"):
            return self.hub_id(value)
        is_path = (
            f"{value}/".startswith(tuple(f"{place}/" for place in self.places))
            or _ABSOLUTE.fullmatch(value)
            or re.match(r"[A-Za-z]:\\|\\\\", value)
        )
        return self.text(value) if is_path else value

    def _without_names(self, text: str) -> str:
        for name in self.names:
            text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", BLOTTED, text)
        return text

    def hub_id(self, name: Any) -> str | None:
        """`name` where it is an id of the Hub, as far as this machine knows; None where it is, or was, a path."""
        if not isinstance(name, str) or not is_hub_id(name) or name in self.places or os.path.exists(name):
            return None
        return name if self.text(name) == name else None


def names_here() -> Iterator[str]:
    """Names of this user and of this machine, but for those that are everybody's."""
    found = {platform.node(), platform.node().partition(".")[0], os.path.basename(os.path.expanduser("~"))}
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        found.add(getpass.getuser())
    yield from sorted(
        (name for name in found if len(name) > 2 and name.lower() not in _ANYBODY), key=len, reverse=True
    )


def places_in(settings: Any) -> Iterator[str]:
    """Texts in settings that are paths on this machine, relative ones included: only here can one tell."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from places_in(value)
    elif isinstance(settings, str) and settings and "\n" not in settings:
        file = settings.partition(".py:")[0] + ".py" if ".py:" in settings else settings  # `file.py:function`
        try:
            if (("/" in file or os.sep in file) and os.path.exists(os.path.expanduser(file))) or os.path.isdir(file):
                yield file
        except (OSError, ValueError):  # no name that a file could have
            return


def _last_part(path: str) -> str:
    return PurePosixPath(path.rstrip("/")).name
