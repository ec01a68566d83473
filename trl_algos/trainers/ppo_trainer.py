"""`PPOTrainer`: `PolicyTrainer` with a critic, for the algorithms whose advantages come from values.

The critic is part of the policy's module tree (see `critic/forms.py`), so one forward, one backward and one optimizer
serve both. What is added, in order: values when a batch is sampled (`_collect`), the returns that they are taught
(`targets`), the value loss (`extra_losses`), a learning rate and clipping of its own, and its files.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from trl_algos.config import PolicyConfig
from trl_algos.core import gae, length_adaptive_lambda, masked_sum, value_loss
from trl_algos.errors import ConfigError
from trl_algos.settings.critic import dropout_problems
from trl_algos.trainers.critic.files import restore_critic, save_critic
from trl_algos.trainers.critic.forms import Critic
from trl_algos.trainers.critic.making import make_critic
from trl_algos.trainers.critic.metrics import clip_fraction, value_metrics
from trl_algos.trainers.critic.optimisation import clip, critic_groups, schedule_after_warmup, split_groups
from trl_algos.trainers.critic.scoring import ValueRecorder, cut_off, positive_mask, sampling_values, value_mask
from trl_algos.trainers.policy_trainer import PolicyTrainer
from trl_algos.trainers.rollout import Rollout, Scores, gather_rows


class PPOTrainer(PolicyTrainer):
    """Trains a causal language model and its critic with a row of `trl_algos.ALGORITHMS` that needs one.

    Args:
        model: model id, folder, model or `PeftModel`.
        reward_funcs: reward function(s) or model(s), as TRL takes them.
        args: a `PolicyConfig`; `critic` says what the critic is made of.
        **kwargs: further arguments of `GRPOTrainer`.

    Raises:
        ConfigError: the critic cannot be had, or not with this policy.
    """

    provides: ClassVar[tuple[str, ...]] = ("critic",)
    lr_scheduler: Any

    def __init__(self, model: Any, reward_funcs: Any = None, args: PolicyConfig | None = None, **kwargs: Any) -> None:
        args = PolicyConfig(algorithm="ppo") if args is None else args
        super().__init__(model, reward_funcs, args, **kwargs)
        self.critic_form = args.critic_form(is_peft_model(self.model))
        problems = list(_unsupported(self, kwargs))
        if problems:
            raise ConfigError(problems)
        self.critic: Critic = make_critic(self)

    # Values, and what they are taught

    def _collect(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Rollout:
        rollout = super()._collect(inputs, output)
        self.critic.restore()
        output["old_values"], last = sampling_values(self, output)
        bootstrap = None
        if self.args.bootstrap_truncated:
            bootstrap = gather_rows(self.accelerator, torch.where(cut_off(self, output), last, 0.0))
        return replace(rollout, values=gather_rows(self.accelerator, output["old_values"]), bootstrap=bootstrap)

    def targets(self, rollout: Rollout) -> dict[str, Tensor]:
        """Also the returns, NaN in a row without a score, and which rows have a reward above 0."""
        targets = super().targets(rollout) | {"returns": self._returns(rollout)}
        if self.args.positive_nll_coef:
            targets["positive"] = (rollout.scores - rollout.length_penalty > 0).float()
        return targets

    def _returns(self, rollout: Rollout) -> Tensor:
        values, mask = _present(rollout.values), rollout.mask * rollout.scorable[:, None]
        told = rollout.token_rewards, values, mask, self.args.gamma
        _, returns = gae(*told, self.args.critic_gae_lambda, rollout.bootstrap)
        advantages, _ = gae(*told, self._policy_lambda(rollout), rollout.bootstrap)
        self.append_metrics(value_metrics(values, returns, advantages, mask))
        return torch.where(rollout.scorable[:, None], returns, torch.nan)

    def _policy_lambda(self, rollout: Rollout) -> float | Tensor:
        """The lambda of the advantages, of which an estimator of a user's own may have none."""
        if self.args.length_adaptive_alpha is not None:
            return length_adaptive_lambda(rollout.lengths, self.args.length_adaptive_alpha)
        return self.args.critic_gae_lambda if self.args.gae_lambda is None else self.args.gae_lambda

    # Loss

    def score(self, model: Any, inputs: dict[str, Any], batch_size: int | None = None) -> Scores:
        """Also the values, of a batch that has been valued before; one just sampled is valued in `_collect`."""
        if "old_values" not in inputs:
            return super().score(model, inputs, batch_size)
        recorder = ValueRecorder(model)
        scores = super().score(recorder, inputs, batch_size)
        return scores._replace(values=recorder.before_tokens(inputs["completion_ids"].shape[1]))

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        self.critic.restore()  # before the backward pass: the reference may have been asked
        return loss

    def loss_counts(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Also the tokens that the critic learns from, and those of rows with a reward above 0."""
        counts = super().loss_counts(batch) | {"value_tokens": value_mask(batch).sum().float()}
        if "positive" in batch:
            counts["positive_tokens"] = positive_mask(batch).sum().float()
        return counts

    def extra_losses(self, scores: Scores, inputs: dict[str, Any], mask: Tensor) -> list[Tensor]:
        """The value loss, and the likelihood of rows with a reward above 0 where it is asked for."""
        metrics, kept = self.step_metrics, value_mask(inputs)
        clip_range = self.args.value_clip_range or None
        told = _present(scores.values), inputs["old_values"], inputs["returns"], kept, clip_range
        loss = value_loss(*told, normalizer=self.divisor(inputs, "value_tokens"))
        metrics.loss("value/loss", loss)
        metrics.mean("value/clip_fraction", clip_fraction(*told), kept.sum())
        losses = [self.args.vf_coef * loss]
        if "positive" in inputs:
            nll = -masked_sum(scores.logps, positive_mask(inputs)) / self.divisor(inputs, "positive_tokens")
            metrics.loss("policy/positive_nll", nll)
            losses.append(self.args.positive_nll_coef * nll)
        return losses

    # Optimisation

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """One optimizer, with groups of the critic that have its learning rate."""
        if self.optimizer is None:
            optimizer = super().create_optimizer(model)
            split_groups(optimizer, self.critic.parameters(), self.args.critic_learning_rate)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The schedule, which starts for the policy after the critic's warm-up."""
        if self.lr_scheduler is None and self.args.critic_warmup_steps:
            self.lr_scheduler = schedule_after_warmup(optimizer or self.optimizer, self.args, num_training_steps)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the gradients of policy and critic apart; the policy's norm. During the warm-up the policy has none."""
        critic = self.critic.parameters()
        own = {id(p) for p in critic}
        policy = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
        self.accelerator.unscale_gradients()
        norm = clip(policy, self.args.max_grad_norm)
        if self.state.global_step < self.args.critic_warmup_steps:
            for parameter in policy:
                parameter.grad = None  # not 0: that would let weight decay and momentum go on
        values = {"value/grad_norm": clip(critic, self.args.critic_max_grad_norm).item()}
        values["value/learning_rate"] = critic_groups(self.optimizer)[0]["lr"]
        self.append_metrics(values)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Any:
        # Trainer leaves out the clipping, but not this, where `max_grad_norm` is 0.
        return super()._get_grad_norm(model, self._clip_grad_norm(model) if grad_norm is None else grad_norm)

    # Files

    def critic_folder(self, folder: str | Path) -> Path:
        """Where `folder` holds the critic; what is in the output folder is pushed, unless its name starts with `_`."""
        kept_back = self.args.push_to_hub and not self.args.push_critic
        return Path(folder) / ("_critic" if kept_back and Path(folder) == Path(self.args.output_dir) else "critic")

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        with self.critic.hidden():  # an engine is sent all tensors of the tree
            return super()._generate(prompts)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        output_dir = output_dir or self.args.output_dir
        with self.critic.hidden():
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            save_critic(self.critic, self.critic_folder(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self.critic.hidden():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        restore_critic(self.critic, self.critic_folder(resume_from_checkpoint))
        self.critic.restore()

    def _load_best_model(self) -> None:
        with self.critic.hidden():
            super()._load_best_model()
        restore_critic(self.critic, self.critic_folder(str(self.state.best_model_checkpoint)))
        self.critic.restore()


def _present(values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("`values`: None in a batch that this trainer has made; did `score` or `_collect` drop them?")
    return values


def _unsupported(trainer: PPOTrainer, kwargs: dict[str, Any]) -> Iterator[str]:
    """A message for each thing that a trainer takes, but not one with a critic."""
    args = trainer.args
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        yield "`critic`: not supported with DeepSpeed or FSDP yet; train on one GPU, or on several with DDP."
    if trainer._is_vlm:
        yield "`critic`: not supported with models that read images."
    if kwargs.get("optimizers", (None, None)) != (None, None):
        yield "`optimizers`: cannot be given, since the critic's parameters belong into it; set `optim` instead."
    yield from dropout_problems(trainer.critic_form, args.disable_dropout)
