"""Which files of a folder leave, and in what form: those on a list, with paths and names taken out of their texts."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_algos.hub.privacy import Privacy

Files = Mapping[str, Path | bytes]
"""Path in the repository -> the file here, or what it holds there."""

_WEIGHTS = re.compile(
    r"(?:model|pytorch_model|adapter_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)(?:\.index\.json)?|"
    r"(?:model|adapter_model)\.safetensors\.index\.json|pytorch_model\.bin\.index\.json"
)

_CONFIGS = (
    *("config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json", "reward_model.json"),
    *("special_tokens_map.json", "added_tokens.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "image_processor_config.json"),
)
_VOCABULARIES = re.compile(
    r"tokenizer\.json|vocab\.(?:json|txt)|merges\.txt|[\w.-]*\.(?:model|tiktoken)|chat_template\.(?:jinja|json)"
)
_TEMPLATES = "additional_chat_templates"

# In a checkpoint: what was pickled with every path and token in it, and what speaks of the checkpoint's own folder.
_NEVER = ("training_args.bin", "README.md")


def model_files(folder: str | Path, privacy: Privacy, critic: bool = False) -> dict[str, Path | bytes]:
    """Model or adapter and tokenizer, as `from_pretrained` reads them.

    Args:
        folder: what `save_model` left.
        privacy: what must not leave.
        critic: whether the saved critic goes, too.
    """
    folder = Path(folder)
    files: dict[str, Path | bytes] = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        if path.name in _CONFIGS:
            files[path.name] = _json_bytes(path, privacy.config)
        elif _WEIGHTS.fullmatch(path.name) or _VOCABULARIES.fullmatch(path.name) or path.name in _code(folder):
            files[path.name] = path
    for path in sorted((folder / _TEMPLATES).glob("*.jinja")):
        files[f"{_TEMPLATES}/{path.name}"] = path
    if critic and (folder / "critic").is_dir():
        files |= {f"critic/{name}": file for name, file in whole_folder(folder / "critic", privacy).items()}
    return files


def whole_folder(folder: str | Path, privacy: Privacy) -> dict[str, Path | bytes]:
    """Everything that training goes on from: a checkpoint or a critic, but for the pickled arguments."""
    folder = Path(folder)
    files: dict[str, Path | bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.name in _NEVER or name.startswith(("_", ".")):
            continue
        is_config = path.suffix == ".json" and not _VOCABULARIES.fullmatch(path.name)
        files[name] = _json_bytes(path, privacy.config) if is_config else path
    return files


def has_weights(folder: str | Path) -> bool:
    """Whether there is a model or an adapter in a folder."""
    return any(_WEIGHTS.fullmatch(path.name) for path in Path(folder).iterdir() if path.is_file())


def is_adapter(folder: str | Path) -> bool:
    """Whether the weights in a folder are an adapter's."""
    return (Path(folder) / "adapter_config.json").is_file()


def size(files: Files) -> int:
    """Bytes of all files together."""
    return sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())


def _json_bytes(path: Path, change: Callable[[Any], Any]) -> bytes:
    """A JSON file with its values changed; as it is where there is nothing to change, byte for byte."""
    raw = path.read_bytes()
    value = json.loads(raw)
    changed = change(value)
    return raw if changed == value else (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()


def _code(folder: Path) -> set[str]:
    """Files of code that the model's config names, for models that bring their own."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    return {f"{name.split('--')[-1].partition('.')[0]}.py" for name in _names(config.get("auto_map") or {})}


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _names(item)
