"""Making a trainer's critic from its settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.utils import disable_dropout_in_model

from trl_algos.errors import ConfigError, first_line
from trl_algos.models.critic_folder import about_critic, base_problems, is_critic_folder
from trl_algos.models.folder import ENCODER, classifier_problem, is_encoder
from trl_algos.models.reward_folder import FIGURES, figures_problem
from trl_algos.settings.critic import critic_has_lora
from trl_algos.trainers.critic.adapters import NAME, adapter_layers, base_model, lora_config
from trl_algos.trainers.critic.files import check_critic, restore_critic, vocabulary_digest
from trl_algos.trainers.critic.forms import AdapterCritic, Critic, SeparateCritic, SharedCritic
from trl_algos.trainers.critic.head import ValueHead
from trl_algos.trainers.critic.sharded import fit_to_backend, loading_like_policy, whole
from trl_algos.trainers.dropout import disable_functional_dropout
from trl_algos.trainers.packing.attention import implementation_before
from trl_algos.trainers.reward_models import known_figures

if TYPE_CHECKING:
    from trl_algos.trainers.ppo_trainer import PPOTrainer

KEY = "critic_model_name_or_path"


def make_critic(trainer: "PPOTrainer") -> Critic:
    """The critic that the settings of `trainer` ask for, put into the module tree of its policy.

    Raises:
        ConfigError: the critic cannot be had, or not with this policy.
    """
    args, policy = trainer.args, trainer.model
    base, device = base_model(policy), trainer.accelerator.device
    path = args.critic_model_name_or_path
    about = about_critic(path) if is_critic_folder(path) else None
    if about is not None:
        _check_base(about, path, base)
    # All processes have a random state of their own by now, and the critic must start alike on them.
    with torch.random.fork_rng():
        torch.manual_seed(args.seed)
        head = ValueHead(base.config.get_text_config().hidden_size).to(device)
        critic: Critic
        if trainer.critic_form == "shared":
            critic = SharedCritic(base, head, bool(args.critic_trunk_gradient))
        elif trainer.critic_form == "adapter":
            critic = AdapterCritic(policy, head, lora_config(policy))
        else:
            critic = _separate(trainer, base, device, about)
    if about is not None:
        folder, digest = Path(path), vocabulary_digest(trainer.processing_class)
        check_critic(critic, folder, KEY, digest)
        restore_critic(critic, folder, KEY)
    fit_to_backend(trainer, critic)
    return critic


def _check_base(about: dict[str, Any], path: str, base: Any) -> None:
    problems = [f"`{KEY}`: {problem}" for problem in base_problems(about, path, base.config._name_or_path)]
    if problems:
        raise ConfigError(problems)


def _separate(trainer: "PPOTrainer", base: Any, device: torch.device, about: dict[str, Any] | None) -> SeparateCritic:
    args, policy = trainer.args, trainer.model
    path, own = args.critic_model_name_or_path, args.critic_model_name_or_path
    if about is not None and about["lora"]:
        path = about["base_model"]
    path = path or base.config._name_or_path
    if not path:
        raise ConfigError([f"`{KEY}`: not set, and the policy was not loaded from anywhere."])
    if getattr(base, "quantization_method", None) is not None:
        raise ConfigError(["`critic`: 'separate' is not to be had with a quantised policy; take adapter or shared."])
    has_lora = critic_has_lora("separate", is_peft_model(policy), args.critic_use_peft)
    # Weights that train beside a frozen policy have the precision of LoRA's own, not that of what is frozen.
    dtype = torch.float32 if is_peft_model(policy) and not has_lora else base.dtype
    kwargs: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if path == base.config._name_or_path:
        kwargs["revision"] = (args.model_init_kwargs or {}).get("revision") or "main"
    with loading_like_policy(trainer):
        trunk, head = _loaded(path, base, dtype, kwargs, args.reward_normalization)
    _check_vocabulary(path, trunk, trainer.processing_class, kwargs)
    disable_dropout_in_model(trunk)
    disable_functional_dropout(trunk)
    if has_lora:
        from peft import get_peft_model

        config = lora_config(policy)
        config.task_type, config.base_model_name_or_path = None, path
        config.target_modules = _targets(base, same=not own or path == base.config._name_or_path)
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
        trunk = get_peft_model(trunk, config, adapter_name=NAME)
        # Reentrant checkpointing drops the gradient of a frozen model whose inputs need none.
        trunk.enable_input_require_grads()
    return SeparateCritic(base, trunk.to(device).train(), head.to(device))


def _loaded(
    path: str, base: Any, dtype: torch.dtype, kwargs: dict[str, Any], normalises: bool
) -> tuple[Any, ValueHead]:
    """Trunk and head; the head of a reward model goes on as the value head, normalised where its scores are.

    Raises:
        ConfigError: there is no such model, or it is no decoder.
    """
    try:
        config = AutoConfig.from_pretrained(path, **kwargs)
        if is_encoder(config.to_dict()):
            raise ConfigError([f"`{KEY}`: {path!r} is {ENCODER}"])
        problem = classifier_problem(config.to_dict() | {"num_labels": config.num_labels})
        if problem is not None:
            raise ConfigError([f"`{KEY}`: {path!r} is {problem}"])
        kwargs = kwargs | {
            "dtype": dtype,
            "attn_implementation": implementation_before(base.config._attn_implementation),
        }
        head = ValueHead(config.get_text_config().hidden_size)
        scores = any("ForSequenceClassification" in name for name in config.architectures or ())
        if not scores:
            return AutoModel.from_pretrained(path, **kwargs), head
        reward_model = AutoModelForSequenceClassification.from_pretrained(path, **kwargs)
    except ConfigError:
        raise
    # What transformers and safetensors raise for a file that is missing, cut short or of another kind.
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError([f"`{KEY}`: {path!r} cannot be loaded: {first_line(error)}"]) from error
    with torch.no_grad():
        head.weight.copy_(whole({"weight": reward_model.score.weight})["weight"])
        figures = known_figures(reward_model.config)
        if normalises and figures_problem(path, figures) is None:
            mean, std = (figures[name] for name in FIGURES)
            head.weight.div_(std)
            head.bias.sub_(mean / std)
    return reward_model.base_model, head


def _targets(base: Any, same: bool) -> set[str]:
    """The layers that are adapted in `base`, by their names in its trunk; the last parts alone for another model."""
    layers = set(adapter_layers(base))
    names = {name for name, module in base.named_modules() if module in layers}
    return {name.removeprefix(f"{base.base_model_prefix}.") if same else name.rpartition(".")[2] for name in names}


def _check_vocabulary(path: str, trunk: Any, tokenizer: Any, kwargs: dict[str, Any]) -> None:
    key = f"`{KEY}`: {path!r}"
    known, needed = trunk.get_input_embeddings().num_embeddings, len(tokenizer)
    if known < needed:
        raise ConfigError([f"{key} knows {known} tokens, but the policy's tokenizer has {needed}."])
    try:
        own = AutoTokenizer.from_pretrained(path, **kwargs)
    except (OSError, ValueError):  # a folder without one, such as a checkpoint of weights alone
        return
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError([f"{key} has another tokenizer than the policy: it would read other tokens."])
