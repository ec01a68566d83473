"""A critic in a folder: what `save_critic` writes, a run takes back, and `load_critic` reads alone.

The files are listed in `trl_algos/models/critic_folder.py`.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from trl_algos.errors import ConfigError, first_line
from trl_algos.models.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trl_algos.models.critic_folder import (
    ABOUT_FILE,
    ADAPTER_FOLDER,
    FOLDER,
    HEAD_FILE,
    HELD_BACK,
    about_critic,
    adapter_config_problems,
    adapter_weights,
    config_differences,
    critic_folder_problems,
    written_about,
)
from trl_algos.models.folder import read_json
from trl_algos.trainers.critic.adapters import NAME, base_model
from trl_algos.trainers.critic.forms import AdapterCritic, Critic, SeparateCritic
from trl_algos.trainers.critic.head import ValueHead
from trl_algos.trainers.critic.sharded import whole, whole_shape

_SAME_TRUNK = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")


def vocabulary_digest(tokenizer: Any) -> str:
    """What tells one vocabulary from another: a digest of its tokens and their numbers."""
    text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save_critic(critic: Critic, folder: Path, writes: bool, vocabulary: str | None = None) -> None:
    """Write `critic` into `folder`; to be called on all processes, which may hold shards of it.

    Args:
        critic: to be saved.
        folder: is made where it is not there.
        writes: whether this process writes.
        vocabulary: `vocabulary_digest` of the tokenizer whose tokens the critic reads.
    """
    adapted, head = _adapted(critic), whole(dict(critic.head.named_parameters()))
    trunk = whole(_trunk_weights(critic, adapted))
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in head.items()}, folder / HEAD_FILE)
    if adapted is not None:
        _save_adapter(adapted, trunk, folder / ADAPTER_FOLDER)
    elif isinstance(critic, SeparateCritic):
        critic.trunk.save_pretrained(folder, state_dict=trunk)
    text = written_about(
        form=critic.form,
        lora=adapted is not None,
        dtype=str(_dtype(critic, adapted)).removeprefix("torch."),
        base_model=_base_path(critic),
        vocabulary=vocabulary,
    )
    (folder / ABOUT_FILE).write_text(text)


def hold_back(output: Path) -> None:
    """Rename a critic that lies in `output`, whole or not, so that no upload of the folder takes it along."""
    old, new = output / FOLDER, output / HELD_BACK
    if any((old / name).is_file() for name in (ABOUT_FILE, HEAD_FILE)):
        if new.is_dir():
            shutil.rmtree(new)
        old.rename(new)


def check_critic(critic: Critic, folder: Path, key: str, vocabulary: str | None = None) -> None:
    """See whether `critic` can take the weights in `folder`, and change nothing.

    Args:
        critic: of this run.
        folder: what `save_critic` wrote.
        key: the setting that named the folder, for the messages.
        vocabulary: `vocabulary_digest` of the tokenizer of this run.

    Raises:
        ConfigError: there are none, they are not whole, or they are those of another critic.
    """
    adapted = _adapted(critic)
    problems = critic_folder_problems(folder, critic.form, adapted is not None, critic.head.in_features)
    if not problems:
        known = about_critic(folder).get("vocabulary")
        if None not in (known, vocabulary) and known != vocabulary:
            problems = [f"{str(folder)!r} holds a critic that reads the tokens of another tokenizer."]
        elif adapted is not None:
            problems = _adapter_problems(adapted, folder)
        elif isinstance(critic, SeparateCritic):
            saved = read_json(folder / "config.json")
            problems = config_differences(
                saved, critic.trunk.config.to_dict(), _SAME_TRUNK, str(folder / "config.json")
            )
    if problems:
        raise ConfigError([f"`{key}`: {problem}" for problem in problems])


def restore_critic(critic: Critic, folder: Path, key: str = "resume_from_checkpoint") -> None:
    """Give `critic` the weights in `folder`; arguments and errors as of `check_critic`."""
    check_critic(critic, folder, key)
    critic.head.load_state_dict(load_file(folder / HEAD_FILE))
    adapted = _adapted(critic)
    if adapted is not None:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(adapted, load_file(folder / ADAPTER_FOLDER / ADAPTER_WEIGHTS), adapter_name=NAME)
    elif isinstance(critic, SeparateCritic):
        saved = type(critic.trunk).from_pretrained(folder, dtype=critic.trunk.dtype)
        critic.trunk.load_state_dict(saved.state_dict())


def _adapter_problems(model: Any, folder: Path) -> list[str]:
    """Where the saved adapter has another rank, scale or other layers than that of the run."""
    from peft import get_peft_model_state_dict

    problems = adapter_config_problems(folder, model.peft_config[NAME].to_dict())
    if problems:
        return problems
    weights = get_peft_model_state_dict(model, model.state_dict(keep_vars=True), adapter_name=NAME)
    own = {name: whole_shape(weight) for name, weight in weights.items()}
    saved = {name: shape for name, (shape, _) in adapter_weights(folder).items()}
    different = sorted(own.keys() ^ saved.keys())
    if different:
        whose = "this run" if different[0] in own else "the saved critic"
        return [f"{str(folder)!r} holds an adapter on other layers: {different[0]} is in {whose} alone."]
    wrong = [name for name in own if own[name] != saved[name]]
    return [f"{str(folder)!r}: {n} is of shape {saved[n]}, but in this run of {own[n]}." for n in wrong[:1]]


class LoadedCritic(nn.Module):
    """A critic read from its folder, for use without a trainer.

    Args:
        trunk: the model below the head.
        head: the value head.
    """

    def __init__(self, trunk: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, L) values, in reward units, of the states after each token."""
        return self.head(self.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)


def load_critic(folder: str | Path) -> LoadedCritic:
    """The critic that a run left in `folder`.

    Args:
        folder: `critic` in the run's output folder or in a checkpoint. The form `shared` needs the policy that was
            saved beside it, the form `adapter` the base model that the run started from.

    Returns:
        A module in evaluation mode, on the CPU, in the precision of the run; a base model that the run had quantised
        is read whole, which moves the values a little.

    Raises:
        ConfigError: the folder holds no critic, or the model that it reads is gone or broken.
    """
    folder = Path(folder)
    try:
        about = about_critic(folder)
        problems = critic_folder_problems(folder, about["form"], about["lora"])
    except ConfigError as error:
        problems = error.problems
    if problems:
        raise ConfigError([f"`folder`: {problem}" for problem in problems])
    try:
        trunk = _saved_trunk(folder, about)
    # What transformers, PEFT and safetensors raise for a file that is missing, cut short or of another kind.
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        model = folder.parent if about["form"] == "shared" else about["base_model"] if about["lora"] else folder
        moved = f"; `base_model` in {folder / ABOUT_FILE} says where it lies" if about["lora"] else ""
        reads = f"`folder`: the critic reads the model {str(model)!r}, which cannot be loaded{moved}"
        raise ConfigError([f"{reads}: {first_line(error)}"]) from error
    weights = load_file(folder / HEAD_FILE)
    head = ValueHead(weights["weight"].shape[1])
    head.load_state_dict(weights)
    return LoadedCritic(trunk, head).eval()


def _saved_trunk(folder: Path, about: dict[str, Any]) -> Any:
    """The model below the head of the critic in `folder`, of which `about_critic` says what it is."""
    dtype = getattr(torch, about["dtype"])
    if about["form"] == "shared":
        return _policy_trunk(folder.parent, dtype)
    if about["form"] == "adapter":
        return _adapted_model(AutoModelForCausalLM, about["base_model"], folder, dtype).get_base_model().base_model
    if about["lora"]:
        return _adapted_model(AutoModel, about["base_model"], folder, dtype)
    return AutoModel.from_pretrained(folder, dtype=dtype)


def _adapted(critic: Critic) -> Any:
    """The model with PEFT's wrapper that holds the critic's adapter, or None where it has none."""
    if isinstance(critic, AdapterCritic):
        return critic.policy
    return critic.trunk if isinstance(critic, SeparateCritic) and is_peft_model(critic.trunk) else None


def _dtype(critic: Critic, adapted: Any) -> torch.dtype:
    """Precision of the model below the head: the frozen policy's, unless the critic trains a model whole."""
    model = critic.trunk if isinstance(critic, SeparateCritic) and adapted is None else critic.base
    return model.dtype


def _base_path(critic: Critic) -> str:
    """Where the model below the critic came from."""
    model = critic.trunk if isinstance(critic, SeparateCritic) else critic.base
    return str(base_model(model).config._name_or_path)


def _trunk_weights(critic: Critic, adapted: Any) -> dict[str, Tensor]:
    """What the critic's folder holds beside the head; the parameters themselves, which know of their shards."""
    if adapted is not None:
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(adapted, adapted.state_dict(keep_vars=True), adapter_name=NAME)
    return critic.trunk.state_dict(keep_vars=True) if isinstance(critic, SeparateCritic) else {}


def _save_adapter(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    config = model.peft_config[NAME]
    config.inference_mode = True  # in the file alone: whoever loads it does not train
    config.save_pretrained(folder)
    config.inference_mode = False


def _adapted_model(auto_class: Any, base: str, folder: Path, dtype: torch.dtype) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(auto_class.from_pretrained(base, dtype=dtype), folder / ADAPTER_FOLDER)


def _policy_trunk(folder: Path, dtype: torch.dtype) -> Any:
    from peft import AutoPeftModelForCausalLM

    has_adapter = (folder / ADAPTER_CONFIG).is_file()
    auto_class = AutoPeftModelForCausalLM if has_adapter else AutoModelForCausalLM
    return base_model(auto_class.from_pretrained(folder, dtype=dtype)).base_model
