"""`trl-algos merge`: a saved adapter and its base model become one model that plain transformers loads.

The adapter is added to the base model in that one's own precision, or in float32 where that is asked for. An adapter
that was trained on a base in four or eight bits is merged into the base as it was before it was quantised. What is
written gets its name only when it is whole.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from httpx import HTTPError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from trl.trainer.utils import create_model_from_path

from trl_algos.errors import ConfigError, first_line
from trl_algos.models.adapter_folder import Adapter, fit_problem, read_adapter
from trl_algos.models.critic_folder import FOLDER, HELD_BACK, is_critic_folder
from trl_algos.models.folder import tokenizer_problems
from trl_algos.models.reward_folder import reward_figures
from trl_algos.models.score_head import SCORE_HEADS
from trl_algos.models.weight_files import weight_shapes
from trl_algos.run.models import found_model
from trl_algos.trainers.adapters import classifier_base, with_adapter

_LOAD_ERRORS = (OSError, TypeError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, HTTPError)
"""What transformers and the Hub's client raise for a model that is missing, broken or of another kind."""


@dataclass(frozen=True)
class MergeArguments:
    """What `trl-algos merge` is told.

    Args:
        source: folder of a run, of one of its checkpoints, or of an adapter; or an adapter's Hub id.
        output: folder to write; must not be there, or be empty.
        dtype: of the weights that are written; None for the base model's own.
        base: folder or Hub id of the base model; None for the one that the adapter names.
        trust_remote_code: whether code that lies beside the base model may run.
    """

    source: str
    output: str
    dtype: str | None = None
    base: str | None = None
    trust_remote_code: bool = False


def merge(arguments: MergeArguments) -> list[str]:
    """Write the merged model, its tokenizer and generation config.

    Returns:
        What was done, in lines.

    Raises:
        ConfigError: something of it is missing, broken, or does not fit; nothing has been written.
    """
    output = Path(arguments.output)
    _check_output(output)
    adapter = _found_adapter(arguments.source)
    base, revision = _found_base(arguments, adapter)
    _check_fit(adapter, base)
    tokenizer = _tokenizer(adapter, base, revision, arguments.trust_remote_code)
    model = _merged(arguments, adapter, base, revision, tokenizer)
    _write(output, model, tokenizer)
    lines = [f"Wrote {output}: {type(model).__name__} in {str(model.dtype).removeprefix('torch.')}, from {base}."]
    critic = next(
        (adapter.folder / name for name in (FOLDER, HELD_BACK) if is_critic_folder(adapter.folder / name)), None
    )
    if critic is not None:
        lines.append(f"The critic in {critic} is no part of it; `trl_algos.load_critic` reads that one.")
    return lines


def _check_output(output: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() or output.is_symlink():
        raise ConfigError(
            [f"merge: {str(output)!r} is there already, and nothing is overwritten; name another folder."]
        )
    parent = next(path for path in output.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError([f"merge: {str(output)!r} cannot be made: {str(parent)!r} cannot be written to."])


def _found_adapter(source: str) -> Adapter:
    folder = Path(source)
    critic = next((path for path in (folder, folder.parent) if is_critic_folder(path)), None)
    if critic is not None:
        raise ConfigError(
            [f"merge: {source!r} is a critic, which has no whole model; `load_critic` reads {str(critic)!r}."]
        )
    if not folder.exists() and source.count("/") <= 1 and not source.startswith((".", "~", "/")):
        folder = _fetched(source)
    try:
        adapter = read_adapter(folder)
    except ConfigError as error:
        raise ConfigError([f"merge: {problem}" for problem in error.problems]) from error
    return adapter


def _fetched(name: str) -> Path:
    """The adapter of a Hub id, tokenizer included, without checkpoints and pickles."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["adapter_*", "*.json", "*.jinja", "*.txt", "*.model"]))
    except (HTTPError, OSError, ValueError) as error:
        told = f"merge: {name!r} is no folder here, and no adapter on the Hub that can be had: {first_line(error)}"
        raise ConfigError([told]) from error


def _found_base(arguments: MergeArguments, adapter: Adapter) -> tuple[str, str]:
    """Folder or id of the base model, and its revision."""
    name = arguments.base or adapter.base
    key = "--base" if arguments.base else "base_model_name_or_path"
    if name is None:
        raise ConfigError([f"merge: {str(adapter.folder)!r} does not name its base model; give it by `--base`."])
    revision = "main" if arguments.base else adapter.revision
    try:
        base = found_model(key, name, revision, arguments.trust_remote_code)
    except ConfigError as error:
        hint = "" if arguments.base else " If it lies elsewhere now, give it by `--base`."
        raise ConfigError([f"merge: {problem}{hint}" for problem in error.problems]) from error
    config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=arguments.trust_remote_code)
    if getattr(config, "quantization_config", None):
        told = f"merge: `{key}`: {name!r} is stored quantised, into which nothing can be merged"
        raise ConfigError([f"{told}; give by `--base` the model that it was made of."])
    return base, revision


def _check_fit(adapter: Adapter, base: str) -> None:
    """Raise `ConfigError` where the base model lies here and is another one, before it is loaded."""
    if not os.path.isdir(base):
        return
    try:
        weights = weight_shapes(base)
    except ConfigError as error:
        raise ConfigError([f"merge: {problem}" for problem in error.problems]) from error
    problem = fit_problem(adapter, weights, base)
    if problem is not None:
        raise ConfigError([f"merge: {problem}"])


def _tokenizer(adapter: Adapter, base: str, revision: str, trust_remote_code: bool) -> Any:
    """That which was saved with the adapter, or else the base model's, of an image model with its processor."""
    own = not any(tokenizer_problems(adapter.folder))
    source, options = (str(adapter.folder), {}) if own else (base, {"revision": revision})
    auto_class: Any = AutoTokenizer
    if not own or any(
        (adapter.folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")
    ):
        auto_class = AutoProcessor
    try:
        return auto_class.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except _LOAD_ERRORS as error:
        raise ConfigError([f"merge: the tokenizer in {source!r} cannot be loaded: {first_line(error)}"]) from error


def _merged(arguments: MergeArguments, adapter: Adapter, base: str, revision: str, tokenizer: Any) -> Any:
    options = {
        "revision": revision,
        "trust_remote_code": arguments.trust_remote_code,
        "use_safetensors": True,
        "device_map": None,
        # Wider first, so that nothing is rounded before it has been added.
        "dtype": torch.float32 if arguments.dtype == "float32" else "auto",
    }
    scores = _score_count(adapter)
    try:
        if scores is None:
            model = create_model_from_path(base, **options)
        else:
            model = classifier_base(base, adapter, scores, **options)
    except _LOAD_ERRORS as error:
        raise ConfigError([f"merge: {base!r} cannot be loaded: {first_line(error)}"]) from error
    untied = _untied(model, adapter)
    try:
        wrapped = with_adapter(model, adapter, trainable=False)
    except ConfigError as error:
        raise ConfigError([f"merge: {problem}" for problem in error.problems]) from error
    if not hasattr(wrapped.base_model, "merge_and_unload"):
        kind = adapter.config.get("peft_type")
        raise ConfigError(
            [f"merge: {str(adapter.folder)!r} holds an adapter of {kind}, which is no change of weights."]
        )
    merged = wrapped.merge_and_unload()
    _tie_again(merged, untied)
    if arguments.dtype is not None:
        merged = merged.to(getattr(torch, arguments.dtype))
    _set_configs(merged, tokenizer, adapter)
    return merged


def _score_count(adapter: Adapter) -> int | None:
    """Labels of a sequence classifier; None for all other models."""
    if adapter.config.get("task_type") != "SEQ_CLS":
        return None
    heads = [shape for name, (shape, _) in adapter.weights.items() if {*name.split(".")} & {*SCORE_HEADS}]
    rows = {shape[0] for shape in heads if len(shape) == 2}
    return rows.pop() if len(rows) == 1 else 1


def _untied(model: Any, adapter: Adapter) -> dict[str, str]:
    """Give weights that are tied, one of which is adapted, a copy each; PEFT would add to both at once.

    Returns:
        Name of a weight that was tied -> name of the one that it was tied to.
    """
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    names = {part for name in (*tied, *tied.values()) for part in name.split(".")[-2:-1]}
    if not names & {part for weight in adapter.weights for part in weight.split(".")}:
        return {}
    for target, source in tied.items():
        module, _, name = target.rpartition(".")
        copy = nn.Parameter(model.get_parameter(source).detach().clone(), requires_grad=False)
        setattr(model.get_submodule(module), name, copy)
    return tied


def _tie_again(model: Any, untied: dict[str, str]) -> None:
    """Say in the config that the weights of `_untied` differ now, where they do: readers would tie them again."""
    apart = [
        target
        for target, source in untied.items()
        if not torch.allclose(model.get_parameter(target), model.get_parameter(source), rtol=1e-6, atol=0.0)
    ]
    if not apart:
        if untied:
            model.tie_weights()
        return
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    for target in apart:
        model.all_tied_weights_keys.pop(target, None)


def _set_configs(model: Any, tokenizer: Any, adapter: Adapter) -> None:
    """What a run puts into the configs of a model that it saves whole."""
    text = getattr(tokenizer, "tokenizer", tokenizer)
    if text.pad_token_id is not None:
        model.config.get_text_config().pad_token_id = text.pad_token_id
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.pad_token_id = text.pad_token_id
    for name, figure in reward_figures(adapter.folder).items():
        setattr(model.config, name, figure)


def _write(output: Path, model: Any, tokenizer: Any) -> None:
    """Into a folder beside `output`, which gets its name at the end."""
    with _new_folder(output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    made = [path for path in output.absolute().parents if not path.exists()]
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.absolute().parent))
    try:
        (temporary / "model").mkdir()  # with the rights of any new folder, which that of `mkdtemp` has not
        yield temporary / "model"
        (temporary / "model").rename(output.absolute())
    except BaseException:
        shutil.rmtree(temporary)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    shutil.rmtree(temporary)
