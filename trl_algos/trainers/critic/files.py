"""A critic in a folder: what `save_critic` writes, a running one takes back, and `load_critic` reads alone.

critic.json               form, whether with LoRA, dtype and base model
value_head.safetensors    weight and bias
adapter/                  PEFT's files: form adapter, or separate with LoRA
config.json, model*       transformers' files: form separate, trained whole
"""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from trl_algos.errors import ConfigError
from trl_algos.trainers.critic.adapters import NAME, base_model
from trl_algos.trainers.critic.forms import AdapterCritic, Critic, SeparateCritic
from trl_algos.trainers.critic.head import ValueHead
from trl_algos.trainers.critic.sharded import whole

ABOUT_FILE = "critic.json"
HEAD_FILE = "value_head.safetensors"
ADAPTER_FOLDER = "adapter"
# PEFT's names, which are public and fixed.
_ADAPTER_WEIGHTS, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_critic(critic: Critic, folder: Path, writes: bool) -> None:
    """Write `critic` into `folder`; to be called on all processes, which may hold shards of it.

    Args:
        critic: to be saved.
        folder: is made where it is not there.
        writes: whether this process writes.
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
    about = {
        "form": critic.form,
        "lora": adapted is not None,
        "dtype": str(critic.base.dtype).removeprefix("torch."),
        "base_model": _base_path(critic),
    }
    (folder / ABOUT_FILE).write_text(json.dumps(about, indent=2) + "\n")


def restore_critic(critic: Critic, folder: Path) -> None:
    """Give `critic` the weights in `folder`.

    Raises:
        ConfigError: there are none, or they are those of another critic.
    """
    check_saved(critic, folder)
    adapted = _adapted(critic)
    critic.head.load_state_dict(load_file(folder / HEAD_FILE))
    if adapted is not None:
        _load_adapter(adapted, folder / ADAPTER_FOLDER)
    elif isinstance(critic, SeparateCritic):
        saved = type(critic.trunk).from_pretrained(folder, dtype=critic.trunk.dtype)
        critic.trunk.load_state_dict(saved.state_dict())


def check_saved(critic: Critic, folder: Path) -> None:
    """Raise `ConfigError` unless `folder` holds a critic of the form of `critic`."""
    about, has_lora = _about(folder, "`resume_from_checkpoint`"), _adapted(critic) is not None
    if (about["form"], about["lora"]) != (critic.form, has_lora):
        lora = "with LoRA" if about["lora"] else "without LoRA"
        raise ConfigError([f"`critic`: {critic.form}, but {folder} holds one of the form {about['form']}, {lora}."])


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
        ConfigError: the folder holds no critic.
    """
    folder = Path(folder)
    about = _about(folder, "`folder`")
    dtype = getattr(torch, about["dtype"])
    if about["form"] == "shared":
        trunk = _policy_trunk(folder.parent, dtype)
    elif about["form"] == "adapter":
        trunk = _adapted_model(AutoModelForCausalLM, about["base_model"], folder, dtype).get_base_model().base_model
    elif about["lora"]:
        trunk = _adapted_model(AutoModel, about["base_model"], folder, dtype)
    else:
        trunk = AutoModel.from_pretrained(folder, dtype=dtype)
    weights = load_file(folder / HEAD_FILE)
    head = ValueHead(weights["weight"].shape[1])
    head.load_state_dict(weights)
    return LoadedCritic(trunk, head).eval()


def _about(folder: Path, key: str) -> dict[str, Any]:
    if not (folder / ABOUT_FILE).is_file() or not (folder / HEAD_FILE).is_file():
        raise ConfigError([f"{key}: {str(folder)!r} holds no critic: {ABOUT_FILE} and {HEAD_FILE} are needed."])
    about: dict[str, Any] = json.loads((folder / ABOUT_FILE).read_text())
    return about


def _adapted(critic: Critic) -> Any:
    """The model with PEFT's wrapper that holds the critic's adapter, or None where it has none."""
    if isinstance(critic, AdapterCritic):
        return critic.policy
    return critic.trunk if isinstance(critic, SeparateCritic) and is_peft_model(critic.trunk) else None


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
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / _ADAPTER_WEIGHTS, {"format": "pt"})
    config = model.peft_config[NAME]
    config.inference_mode = True  # in the file alone: whoever loads it does not train
    config.save_pretrained(folder)
    config.inference_mode = False


def _load_adapter(model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    path = folder / _ADAPTER_WEIGHTS
    if not path.is_file():
        raise ConfigError([f"`resume_from_checkpoint`: {str(path)!r} is missing; the critic of this run has one."])
    weights = load_file(path)
    different = weights.keys() ^ get_peft_model_state_dict(model, adapter_name=NAME).keys()
    if different:
        raise ConfigError([f"`resume_from_checkpoint`: {str(path)!r} is of another critic: {min(different)} differs."])
    set_peft_model_state_dict(model, weights, adapter_name=NAME)


def _adapted_model(auto_class: Any, base: str, folder: Path, dtype: torch.dtype) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(auto_class.from_pretrained(base, dtype=dtype), folder / ADAPTER_FOLDER)


def _policy_trunk(folder: Path, dtype: torch.dtype) -> Any:
    from peft import AutoPeftModelForCausalLM

    has_adapter = (folder / _ADAPTER_CONFIG).is_file()
    auto_class = AutoPeftModelForCausalLM if has_adapter else AutoModelForCausalLM
    return base_model(auto_class.from_pretrained(folder, dtype=dtype)).base_model
