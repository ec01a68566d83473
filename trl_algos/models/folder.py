"""What can be told of a model by its name and folder, without loading it: is it whole, which weights are in it."""

import difflib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError, nearest
from trl_algos.models.weight_files import Weights, weight_shapes

_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights that transformers loads too (without running what is pickled); what they hold is not looked at here."""

_TOKENIZER_FILES = (
    {"tokenizer.json"},
    {"vocab.json", "merges.txt"},
    {"tokenizer.model"},
    {"tekken.json"},
    {"spiece.model"},
    {"spm.model"},
    {"sentencepiece.model"},
    {"sentencepiece.bpe.model"},
    {"vocab.txt"},
)
"""Files that hold a vocabulary; those of one line belong together."""

_NO_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Tokenizers of bytes or characters, which need none."""

_HUB_ID = re.compile(r"(\b[\w\-.]+\b/)?\b[\w\-.]{1,96}\b")
_HUB_URL = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w\-.]+/[\w\-.]+)")


def model_problems(
    key: str, name: str, bundled: Collection[str], trust_remote_code: bool = False, quantized: bool = False
) -> list[str]:
    """What keeps a model from being loaded, as far as its name and folder tell.

    Whether a Hub id exists is not asked: that needs a network.

    Args:
        key: the setting that names the model, for the messages.
        name: a local folder, a Hub id, or the name of a bundled model.
        bundled: names of the models that ship with the package.
        trust_remote_code: code that lies in the model's folder may be run.
        quantized: the model is to be quantised while it is loaded (`load_in_4bit` or `load_in_8bit`).

    Returns:
        One message for each problem, which begins with the key.
    """
    if name and os.path.isdir(name):
        problems = list(_folder_problems(Path(name), trust_remote_code, quantized))
    elif name in bundled:
        problems = []
    elif os.path.isfile(name):
        parent = os.path.dirname(name) or "."
        problems = [f"{name!r} is a file; give the folder of config.json, weights and tokenizer: {parent!r}?"]
    else:
        problems = _name_problems(name, bundled)
    return [f"`{key}`: {problem}" for problem in problems]


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror}."]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{path} is not valid JSON: {error}."]) from error
    if not isinstance(value, dict):
        raise ConfigError([f"{path} must hold a JSON object, but holds a {type(value).__name__}."])
    return value


def _folder_problems(folder: Path, trust_remote_code: bool, quantized: bool) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield _no_model(folder)
        return
    yield from _config_problems(folder, trust_remote_code, quantized)
    yield from _weight_problems(folder)
    yield from tokenizer_problems(folder)


def _no_model(folder: Path) -> str:
    """Why a folder without config.json is no model: it may be an adapter, or hold models in folders of its own."""
    if (folder / "adapter_config.json").is_file():
        return _adapter(folder)
    inside = sorted(str(path.parent) for path in folder.glob("*/config.json"))
    hint = f" Did you mean {' or '.join(map(repr, inside[:5]))}?" if inside else ""
    return f"{str(folder)!r} has no config.json, so it is not the folder of a model.{hint}"


def _adapter(folder: Path) -> str:
    try:
        base = repr(read_json(folder / "adapter_config.json").get("base_model_name_or_path"))
    except ConfigError as error:
        return error.problems[0]
    return (
        f"{str(folder)!r} holds a PEFT adapter, not a model. Give its base model, {base}, or make one of the "
        "two by `trl-algos merge`."
    )


def _config_problems(folder: Path, trust_remote_code: bool, quantized: bool) -> Iterator[str]:
    path = folder / "config.json"
    try:
        config = read_json(path)
    except ConfigError as error:
        yield from error.problems
        return
    kind, own_code = config.get("model_type"), config.get("auto_map")
    known = str(kind) in _model_types() or not _model_types()
    if kind is None and not own_code:
        yield f"{path} has no `model_type`, such as llama, so nothing tells which class to load."
    elif own_code and not known and not trust_remote_code:
        yield f"{path} asks for code of its own (`auto_map`), which runs only with `trust_remote_code: true`."
    elif not known and not own_code:
        near = nearest(kind, _model_types())
        yield f"{path}: `model_type` {kind!r} is not one that the installed transformers knows.{near}"
    stored = config.get("quantization_config")
    method = stored.get("quant_method", "bitsandbytes") if isinstance(stored, dict) else "bitsandbytes"
    if quantized and method != "bitsandbytes":
        yield (
            f"{str(folder)!r} is stored quantised ({method}), which `load_in_4bit` and `load_in_8bit` cannot do "
            "again; leave them out."
        )


ENCODER = (
    "an encoder, whose states have seen the tokens to come; a critic must be a decoder, such as a causal language "
    "model or a reward model made of one."
)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a model's states have seen later tokens, as far as its config.json tells."""
    reads_both_ways = str(config.get("model_type")) in _masked_types() and not config.get("is_decoder")
    return bool(config.get("is_encoder_decoder")) or reads_both_ways


def classifier_problem(config: Mapping[str, Any]) -> str | None:
    """What keeps a model's head from giving values, as far as its config.json tells; None for a reward model of one.

    A model without a head for sequences is none of these: its states are read by a new one.
    """
    scores = any("ForSequenceClassification" in name for name in architectures(config))
    labels = config.get("id2label") or config.get("num_labels") or 2  # transformers' default, which it does not write
    count = len(labels) if isinstance(labels, dict | list) else labels
    if not scores or count == 1:
        return None
    return f"a classifier (`num_labels`: {count}), but a reward model has 1."


def not_causal_problem(config: Mapping[str, Any]) -> str | None:
    """What a model is, in words, whose class by its config.json gives no next token; None for all others."""
    first = next(iter(architectures(config)), "")
    if config.get("auto_map"):  # its own code says what it is
        return None
    kind = next((words for suffix, words in _NOT_CAUSAL.items() if first.endswith(suffix)), None)
    if kind is None and first.endswith("Model") and "Head" not in first:
        kind = "a model without an output layer"
    return None if kind is None else f"{kind} ({first}), not a causal language model."


_NOT_CAUSAL: Mapping[str, str] = {
    "ForSequenceClassification": "a sequence classifier",
    "ForTokenClassification": "a token classifier",
    "ForQuestionAnswering": "a model that marks answers",
    "ForMultipleChoice": "a model that chooses among answers",
    "ForMaskedLM": "a model that fills in masked tokens",
}
"""How the names of transformers' classes end, and what these are."""


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Names of the classes that a model's config.json gives."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "emb_dim")
"""Names under which a model's config has the width of hidden states or of the embedding."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model's config that is about text."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def widths(config: Mapping[str, Any]) -> set[int]:
    """Widths of hidden states and embeddings that a model's config.json gives."""
    inner = text_config(config)
    return {inner[name] for name in _WIDTHS if type(inner.get(name)) is int}


def size_problems(config: Mapping[str, Any], weights: Weights, where: str) -> Iterator[str]:
    """A message where the embedding has another size than config.json says, so that the weights could not be loaded.

    Args:
        config: a model's.
        weights: of it, as `weight_shapes` gives them.
        where: the folder, for the message.
    """
    if config.get("quantization_config") or config.get("auto_map"):
        return
    allowed, tokens = widths(config), text_config(config).get("vocab_size")
    for name, (shape, _) in weights.items():
        if len(shape) != 2 or not re.search(r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings)\.weight$", name):
            continue
        if allowed and shape[1] not in allowed:
            said = " or ".join(map(str, sorted(allowed)))
            yield f"{where!r}: its weight {name} has width {shape[1]}, but its config.json says {said}."
        elif type(tokens) is int and shape[0] != tokens:
            yield f"{where!r}: its weight {name} has {shape[0]} tokens, but its config.json says {tokens}."


@cache
def _masked_types() -> frozenset[str]:
    """Model types that the installed transformers trains to fill in masked tokens, read from its source."""
    spec = find_spec("transformers")
    path = Path(spec.origin or "").parent / "models" / "auto" / "modeling_auto.py" if spec else Path()
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    table = text.partition("MODEL_FOR_MASKED_LM_MAPPING_NAMES")[2].partition("\n)")[0]
    return frozenset(re.findall(r'\("([\w\-.]+)", "\w+"\)', table))


@cache
def _model_types() -> frozenset[str]:
    """Model types of the installed transformers, read from its source: importing it takes seconds."""
    spec = find_spec("transformers")
    folder = Path(spec.origin or "").parent / "models" / "auto" if spec else Path()
    names = (folder / "auto_mappings.py", folder / "configuration_auto.py")  # the table has moved between versions
    text = "".join(path.read_text(encoding="utf-8") for path in names if path.is_file())
    return frozenset(re.findall(r'"([\w\-.]+)"[,:] "\w+"', text))


def _weight_problems(folder: Path) -> list[str]:
    try:
        weights = weight_shapes(folder)
    except ConfigError as error:
        pickled = not any(folder.glob("*.safetensors*")) and any((folder / name).is_file() for name in _PICKLES)
        return [] if pickled else error.problems
    try:
        return list(size_problems(read_json(folder / "config.json"), weights, str(folder)))
    except ConfigError:  # complained of already
        return []


def tokenizer_problems(folder: Path) -> Iterator[str]:
    """A message where a folder holds no whole tokenizer: transformers would make an empty one and say nothing."""
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        try:
            settings = read_json(folder / "tokenizer_config.json")
        except ConfigError as error:
            yield from error.problems
    has_vocabulary = any(all((folder / name).is_file() for name in names) for names in _TOKENIZER_FILES)
    needs_none = "auto_map" in settings or settings.get("tokenizer_class") in _NO_VOCABULARY
    if not has_vocabulary and not needs_none:
        allowed = ", ".join(" with ".join(sorted(names, reverse=True)) for names in _TOKENIZER_FILES)
        yield f"{str(folder)!r} has no tokenizer: none of {allowed}."
    elif (folder / "tokenizer.json").is_file() and not _looks_whole(folder / "tokenizer.json"):
        yield f"{folder / 'tokenizer.json'} is not a whole JSON object."


def _looks_whole(path: Path) -> bool:
    """Both braces are there; to parse all of it would take longer than everything else."""
    text = path.read_bytes().strip()
    return text.startswith(b"{") and text.endswith(b"}")


def _name_problems(name: str, bundled: Collection[str]) -> list[str]:
    """What is wrong with the name of something that is not here."""
    url = _HUB_URL.match(name)
    if url:
        return [f"{name!r} is an address; give the id alone, {url[1]!r}."]
    if name.startswith("~"):
        return [f"{name!r}: there is no such folder; `~` is not replaced, so write {os.path.expanduser(name)!r}."]
    in_folder = "/" in name and os.path.isdir(os.path.dirname(name)) and not _in_hub_cache(name)
    if name.startswith(("/", ".")) or name.count("/") > 1 or in_folder:
        fetch = f" (A Hub model of that name: run `hf download {name}` first.)" if is_hub_id(name) else ""
        return [f"there is no folder {name!r}.{_nearest_folder(name)}{fetch}"]
    if not is_hub_id(name):
        return [
            f"{name!r} is neither a folder nor a Hub id, which is `name` or `owner/name` of letters, digits, and "
            "`-`, `_`, `.` between them."
        ]
    near = "" if "/" in name else nearest(name, bundled, cutoff=0.8)
    return [f"{name!r} is neither a folder nor a bundled model.{near}"] if near else []


def is_hub_id(name: str) -> bool:
    """Whether a name could be an id of the Hub, `name` or `owner/name`; whether it is one takes a network."""
    forbidden = "--" in name or ".." in name or name.endswith(".git")
    return bool(_HUB_ID.fullmatch(name)) and not forbidden


def _in_hub_cache(name: str) -> bool:
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache_folder = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return os.path.isdir(os.path.join(cache_folder, "models--" + name.replace("/", "--")))


def _nearest_folder(name: str) -> str:
    """A hint at the folder whose name comes nearest to the first part of the path that does not exist."""
    path = Path(name)
    parent = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(parent).parts[0]
    folders = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    near = difflib.get_close_matches(missing, folders, n=1)
    return f" Did you mean {str(parent / near[0])!r}?" if near else ""
