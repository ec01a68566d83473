"""`PPOTrainer`: `PolicyTrainer` with a critic, for the algorithms whose advantages come from values.

The critic is part of the policy's module tree (see `critic/forms.py`), so one forward, one backward and one optimizer
serve both. What is added, in order: values when a batch is sampled (`_collect`), the returns that they are taught
(`targets`), the value loss (`extra_losses`), a learning rate and clipping of its own, and its files.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from trl_algos.checkpoints.publishing import model_draft_of
from trl_algos.config import PolicyConfig
from trl_algos.core import gae, length_adaptive_lambda, masked_sum, value_loss
from trl_algos.errors import ConfigError
from trl_algos.models.critic_folder import FOLDER, HELD_BACK
from trl_algos.settings.critic import dropout_problems
from trl_algos.trainers.critic.files import check_critic, hold_back, restore_critic, save_critic, vocabulary_digest
from trl_algos.trainers.critic.forms import Critic, SeparateCritic
from trl_algos.trainers.critic.making import make_critic
from trl_algos.trainers.critic.metrics import clip_fraction, value_metrics
from trl_algos.trainers.critic.optimisation import (
    Learners,
    check_warmup,
    clip,
    critic_groups,
    has_own_schedule,
    learners,
    schedule_apart,
    schedule_problems,
    split_groups,
)
from trl_algos.trainers.critic.scoring import (
    ValueRecorder,
    cut_off,
    positive_mask,
    sampling_values,
    value_mask,
    values_alone,
)
from trl_algos.trainers.critic.sharded import backend_problems, forget_policy
from trl_algos.trainers.finite import check_grad_norm
from trl_algos.trainers.packing.models import pack_trunk
from trl_algos.trainers.packing.start import start_packing
from trl_algos.trainers.policy_trainer import PolicyTrainer
from trl_algos.trainers.processes import is_sharded
from trl_algos.trainers.recording import finish_step
from trl_algos.trainers.rollout import Rollout, Scores, gather_rows
from trl_algos.trainers.window.rows import may_be_trimmed

FORMER_ARGUMENTS = {
    "ref_model": "the reference is `model` as it starts, wherever `beta` is above 0: leave it out",
    "reward_model": "pass it in `reward_funcs`, which takes models and functions",
    "value_model": "set `critic_model_name_or_path` in `args` to its folder or id",
}
"""Argument of TRL's former `PPOTrainer` -> what to do instead."""


class PPOTrainer(PolicyTrainer):
    """Trains a causal language model and its critic with a row of `trl_algos.ALGORITHMS` that needs one.

    Args:
        model: model id, folder, model or `PeftModel`.
        reward_funcs: reward function(s) or model(s), as TRL takes them.
        args: a `PolicyConfig`; `critic` says what the critic is made of.
        **kwargs: further arguments of `GRPOTrainer`.

    Raises:
        ConfigError: the critic cannot be had, or not with this policy.
        TypeError: an argument is one of TRL's former `PPOTrainer`.
    """

    provides: ClassVar[tuple[str, ...]] = ("critic",)
    lr_scheduler: Any

    def __init__(self, model: Any, reward_funcs: Any = None, args: PolicyConfig | None = None, **kwargs: Any) -> None:
        for name in FORMER_ARGUMENTS.keys() & kwargs.keys():
            raise TypeError(f"`{name}` is an argument of TRL's former PPOTrainer; here {FORMER_ARGUMENTS[name]}.")
        args = PolicyConfig(algorithm="ppo") if args is None else args
        super().__init__(model, reward_funcs, args, **kwargs)
        self.critic_form = args.critic_form(is_peft_model(self.model))
        problems = list(_unsupported(self, kwargs))
        if problems:
            raise ConfigError(problems)
        self.critic: Critic = make_critic(self)
        self._pack_critic()
        # TRL draws and samples by this attribute; who sits out which passes is in `learners`.
        self.num_iterations = max(args.num_iterations, int(args.critic_num_iterations or 0))
        self.learners = Learners()
        self.was_pushed = False  # True once somebody has called `push_to_hub`, which needs no setting

    def _pack_critic(self) -> None:
        """Have a critic with a model of its own compute real tokens alone, as the policy does; others go with it."""
        if not isinstance(self.critic, SeparateCritic):
            return
        pack = partial(pack_trunk, share=self.args.share_prompts is not False)
        packed = start_packing(self, self.args.padding_free, pack, {"critic": self.critic.trunk})
        if not packed:  # a pass of both is as wide as its longest row
            self.packs_training = False
            self.trims_prompts = self.trims_prompts and may_be_trimmed(self.critic.trunk)

    def _open_window(self, batches: list[Any]) -> None:
        passed = self._step // int(self.args.steps_per_generation or 1) % self.num_iterations
        self.learners = learners(self.args, self.state.global_step, passed)
        self.critic.alone = not self.learners.policy
        super()._open_window(batches)
        if is_sharded(self) and 0 < self.state.global_step == self.args.critic_warmup_steps:
            forget_policy(self.optimizer)  # which saw gradients of 0: elsewhere there are none

    def _update_kl_controller(self, kl_per_sequence: float, sequences: int) -> None:
        """Log the coefficient, and move it by the KL of those steps alone that move the policy."""
        super()._update_kl_controller(kl_per_sequence, sequences if self.learners.policy else 0)

    # Values, and what they are taught

    @property
    def scores_with_values(self) -> bool:
        """For a critic on the policy's own states, where the KL in the reward asks for log-probs at once."""
        return self.critic_form == "shared" and self.charges_kl_to == "reward" and self.args.kl_estimator != "full"

    def _collect(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Rollout:
        self.critic.restore()  # the reference has been asked
        values, last = sampling_values(self, output)
        rollout = super()._collect(inputs, output)
        self.critic.restore()  # and may have been again
        output["old_values"], bootstrap = values, None
        if self.args.bootstrap_truncated:
            bootstrap = gather_rows(self.accelerator, torch.where(cut_off(self, output), last, 0.0))
        return replace(rollout, values=gather_rows(self.accelerator, values), bootstrap=bootstrap)

    def targets(self, rollout: Rollout) -> dict[str, Tensor]:
        """Also the returns, NaN in a row without a score, and which rows have a reward above 0."""
        targets = super().targets(rollout) | {"returns": self._returns(rollout)}
        if self.args.positive_nll_coef:
            targets["positive"] = (rollout.scores - rollout.length_penalty > 0).float()
        return targets

    def _returns(self, rollout: Rollout) -> Tensor:
        values, mask = _present(rollout.values), rollout.mask * rollout.scorable[:, None]
        told = rollout.token_rewards, values, mask, self.args.gamma
        own, policys = self.args.critic_gae_lambda, self._policy_lambda(rollout)
        advantages, returns = gae(*told, own, rollout.bootstrap)
        if isinstance(policys, Tensor) or policys != own:
            advantages, _ = gae(*told, policys, rollout.bootstrap)
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
        if not self._learning.critic:
            recorder = ValueRecorder(model, "policy")
            return super().score(recorder, inputs, batch_size)._replace(values=recorder.zero())
        recorder = ValueRecorder(model)
        scores = super().score(recorder, inputs, batch_size)
        return scores._replace(values=recorder.before_tokens(inputs["completion_ids"].shape[1]))

    @property
    def _learning(self) -> Learners:
        return self.learners if self.model.training else Learners()

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs) if self._learning.policy else self._critic_loss(model, inputs)
        self.critic.restore()  # before the backward pass: the reference may have been asked
        return loss

    def loss_counts(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Also the tokens that the critic learns from, and those of rows with a reward above 0."""
        counts = super().loss_counts(batch) | {"value_tokens": value_mask(batch).sum().float()}
        if "positive" in batch:
            counts["positive_tokens"] = positive_mask(batch).sum().float()
        return counts

    def _critic_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch that trains the critic alone."""
        loss = self.args.vf_coef * self._value_loss(values_alone(self, model, inputs), inputs)
        self.step_metrics.loss("total_loss", loss)
        if self.accelerator.sync_gradients:
            finish_step(self, self.step_metrics.flush(self.accelerator))
        return loss

    def _value_loss(self, values: Tensor, inputs: dict[str, Any]) -> Tensor:
        metrics, kept = self.step_metrics, value_mask(inputs)
        told = values, inputs["old_values"], inputs["returns"], kept, self.args.value_clip_range or None
        loss = value_loss(*told, normalizer=self.divisor(inputs, "value_tokens"))
        metrics.loss("value/loss", loss)
        metrics.mean("value/clip_fraction", clip_fraction(*told), kept.sum())
        return loss

    def extra_losses(self, scores: Scores, inputs: dict[str, Any], mask: Tensor) -> list[Tensor]:
        """The value loss, and the likelihood of rows with a reward above 0 where it is asked for.

        A subclass adds to what `super()` returns: without the value loss the critic is left untrained.
        """
        values, metrics = _present(scores.values), self.step_metrics
        losses = [self.args.vf_coef * self._value_loss(values, inputs) if self._learning.critic else values]
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
        """The schedules, which for the policy starts after the critic's warm-up."""
        if self.lr_scheduler is None and has_own_schedule(self.args):
            self.lr_scheduler = schedule_apart(optimizer or self.optimizer, self.args, num_training_steps)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the gradients of policy and critic apart; the policy's norm. Who sits a step out has no gradient."""
        values = {"value/learning_rate": critic_groups(self.optimizer)[0]["lr"]}
        if self.is_deepspeed_enabled:  # which has clipped by now, both together, and has stepped
            norm = super()._clip_grad_norm(model)
        else:
            critic = self.critic.parameters()
            own = {id(p) for p in critic}
            policy = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
            self.accelerator.unscale_gradients()
            for learns, parameters in zip(self.learners, (policy, critic), strict=True):
                for parameter in () if learns or is_sharded(self) else parameters:
                    parameter.grad = None  # not 0: that would let weight decay and momentum go on
            norm = clip(policy, self.args.max_grad_norm)
            values["value/grad_norm"] = clip(critic, self.args.critic_max_grad_norm).item()
            check_grad_norm(self, values["value/grad_norm"], "critic")
        if self.learners.critic:
            self.append_metrics(values)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Any:
        # Trainer leaves out the clipping, but not this, where `max_grad_norm` is 0.
        norm = super()._get_grad_norm(model, self._clip_grad_norm(model) if grad_norm is None else grad_norm)
        return norm if self.learners.policy else None  # which is not logged

    # Files

    def check_start(self, checkpoint: str | None = None) -> None:
        """Also where the policy would not be trained, or the run cannot go on with the critic in the checkpoint."""
        super().check_start(checkpoint)
        check_warmup(self)
        if checkpoint is not None:
            digest = vocabulary_digest(self.processing_class)
            check_critic(self.critic, self.critic_folder(checkpoint), "resume_from_checkpoint", digest)

    def critic_folder(self, folder: str | Path) -> Path:
        """Where `folder` holds the critic; what is in the output folder is pushed, unless its name starts with `_`."""
        pushes = self.args.push_to_hub or self.was_pushed
        output = Path(self.args.output_dir).resolve()
        is_pushed = pushes and Path(folder).resolve() in (output, model_draft_of(output))
        return Path(folder) / (HELD_BACK if is_pushed and not self.args.push_critic else FOLDER)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's upload of the output folder, into which `push_critic` alone lets the critic."""
        self.was_pushed = True
        return super().push_to_hub(*args, **kwargs)  # which saves first

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.args.push_critic:  # and an earlier run left one: this one has saved none there yet
            hold_back(Path(self.args.output_dir))
        super()._push_from_checkpoint(checkpoint_folder)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        # An engine is sent all tensors of the tree; without one a backend that shards looks for its modules there.
        hides = self.use_vllm or not is_sharded(self)
        with self.critic.hidden() if hides else nullcontext():
            return super()._generate(prompts)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        output_dir = output_dir or self.args.output_dir
        with self.critic.hidden():
            if state_dict:  # a backend gathered it from the whole tree
                names = self.model.state_dict().keys()
                state_dict = {name: tensor for name, tensor in state_dict.items() if name in names}
            super()._save(output_dir, state_dict)
        digest, folder = vocabulary_digest(self.processing_class), self.critic_folder(output_dir)
        if folder.name == HELD_BACK and self.args.should_save:
            hold_back(Path(self.args.output_dir))
        save_critic(self.critic, folder, self.args.should_save, digest)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_with_critic(resume_from_checkpoint, super()._load_from_checkpoint, resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._load_with_critic(self.state.best_model_checkpoint, super()._load_best_model)

    def _load_with_critic(self, checkpoint: Any, load: Callable[..., None], *args: Any) -> None:
        """`load` the policy, and the critic from its folder, unless a backend has both in its own files."""
        if is_sharded(self):
            load(*args)
        else:
            with self.critic.hidden():
                load(*args)
            restore_critic(self.critic, self.critic_folder(checkpoint))
        self.critic.restore()


def _present(values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("`values`: None in a batch that this trainer has made; did `score` or `_collect` drop them?")
    return values


def _unsupported(trainer: PPOTrainer, kwargs: dict[str, Any]) -> Iterator[str]:
    """A message for each thing that a trainer takes, but not one with a critic."""
    args = trainer.args
    yield from backend_problems(trainer)
    if trainer._is_vlm:
        yield "`critic`: not supported with models that read images."
    if kwargs.get("optimizers", (None, None)) != (None, None):
        yield "`optimizers`: cannot be given, since the critic's parameters belong into it; set `optim` instead."
    yield from schedule_problems(args)
    yield from dropout_problems(trainer.critic_form, args.disable_dropout)
