"""`PolicyTrainer`: TRL's `GRPOTrainer` with the objective taken from a row of `ALGORITHMS`.

TRL generates, scores, shuffles, splits and steps. What happens here, in order:

1. `_open_window` prepares all micro-batches of an optimizer step, so that the loss divisor is known exactly;
2. `_generate_and_score_completions` turns what TRL sampled into a `Rollout` and the rollout into advantages;
3. `_compute_loss` turns a micro-batch into a loss: log-probs, ratio, surrogate, weights, KL, aggregation, metrics.

To change the advantage in a subclass, override `estimate_advantages`; to add an algorithm, register a row.
"""

import inspect
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from trl_algos._compat import LOGPS_PARAMETERS
from trl_algos.algorithms import ALGORITHMS, ROLLOUT_FIELDS, advantage_needs
from trl_algos.config import PolicyConfig
from trl_algos.core import (
    aggregate_loss,
    aggregation_count,
    masked_mean,
    masked_sum,
    policy_loss,
)
from trl_algos.trainers import kl_control
from trl_algos.trainers.adapters import check_adapter, give_reference_adapter
from trl_algos.trainers.best_metric import check_best_metric
from trl_algos.trainers.checkpointing import WholeCheckpoints
from trl_algos.trainers.collecting import collected
from trl_algos.trainers.dropout import disable_functional_dropout
from trl_algos.trainers.empty_completions import fill_empty, without_empty_completions
from trl_algos.trainers.engine_mismatch import behaviour_logps, correct_engine_mismatch
from trl_algos.trainers.entropy import entropy_bonus
from trl_algos.trainers.finite import check_grad_norm
from trl_algos.trainers.loss_weights import high_entropy_mask, loss_weights
from trl_algos.trainers.metrics import Skipped, StepMetrics
from trl_algos.trainers.packing.models import pack_language_model
from trl_algos.trainers.packing.start import start_packing
from trl_algos.trainers.processes import evaluating, forget_evaluation
from trl_algos.trainers.prompt_checks import check_prompts
from trl_algos.trainers.public_uploads import PublicUploads
from trl_algos.trainers.recording import record_rollout, record_step
from trl_algos.trainers.reference_kl import loss_kl, score_with_logits
from trl_algos.trainers.reward_checks import checked_reward
from trl_algos.trainers.reward_models import RewardScale, reward_scale, with_adapters_loaded
from trl_algos.trainers.rollout import (
    Rollout,
    Scores,
    at_width_of,
    checked_advantages,
    local_rows,
    loss_mask,
)
from trl_algos.trainers.sampling.accounts import Accounts
from trl_algos.trainers.sampling.collector import Collector, PromptsEnded
from trl_algos.trainers.sampling.ending import NothingLearned, end_run, learns_so_far, step_sampler
from trl_algos.trainers.sampling.groups import Generated, Group
from trl_algos.trainers.sampling.making import make_collector
from trl_algos.trainers.sampling.old_logps import put_old_logps
from trl_algos.trainers.sampling.plain import account
from trl_algos.trainers.sampling.replay import Interrupted, Replay, own_rows, replaying
from trl_algos.trainers.sampling.state import load_state, save_state
from trl_algos.trainers.window.arrangement import Passes
from trl_algos.trainers.window.first_pass import deferring_old_logps, keep_old_logps
from trl_algos.trainers.window.opening import open_window
from trl_algos.trainers.window.passes import backward, without_exchange
from trl_algos.trainers.window.rows import may_be_trimmed, whole_rows
from trl_algos.trainers.window.scoring import logps_in_parts


class PolicyTrainer(WholeCheckpoints, PublicUploads, GRPOTrainer):
    """Trains a causal language model with any row of `trl_algos.ALGORITHMS`.

    Used like TRL's `GRPOTrainer`, whose arguments it takes, with a `PolicyConfig` for `args`.

    Args:
        model: model id, folder, model or `PeftModel`.
        reward_funcs: reward function(s) or model(s), as TRL takes them.
        args: a `PolicyConfig`; its `algorithm` decides the objective.
        **kwargs: further arguments of `GRPOTrainer` (`train_dataset`, `peft_config`, `tools`, `rollout_func`, ...).

    Raises:
        TypeError: `args` is not a `PolicyConfig`.
    """

    provides: ClassVar[tuple[str, ...]] = ()
    """What an algorithm may need that a class must be made for: a critic."""
    _tag_names: ClassVar[list[str]] = ["trl", "trl-algos"]
    _name = "PolicyTrainer"
    _paper: ClassVar[dict[str, str]] = {}  # not TRL's paper: each algorithm has its own
    _step: int  # TRL's count of micro-batches

    def __init__(self, model: Any, reward_funcs: Any = None, args: PolicyConfig | None = None, **kwargs: Any) -> None:
        if args is None:
            args = PolicyConfig()
        if not isinstance(args, PolicyConfig):
            raise TypeError(f"`args` must be a trl_algos.PolicyConfig, but is a {type(args).__name__}.")
        self.algorithm = ALGORITHMS[args.algorithm]
        self.needs = advantage_needs(args.advantage_function)
        self._check_class(str(args.advantage_estimator))
        if "greedy_baseline" in self.needs and kwargs.get("environment_factory") is not None:
            raise ValueError(
                f"`environment_factory` cannot be combined with the advantage estimator {args.advantage_estimator!r}: "
                "its greedy completion would need an environment of its own."
            )
        if kwargs.get("rollout_func") is not None:
            kwargs["rollout_func"] = without_empty_completions(kwargs["rollout_func"])
        check_adapter(model, copied=bool(args.beta))
        reward_funcs = with_adapters_loaded(reward_funcs, args.model_init_kwargs, args.trust_remote_code)
        super().__init__(model, reward_funcs, args, **kwargs)
        give_reference_adapter(self.model)
        self.reward_scale = self._reward_scale() if args.reward_normalization else None
        # In place, so that TRL's names and weights stay with them; models are no functions of ours to check.
        self.reward_funcs[:] = [
            function
            if isinstance(function, nn.Module)
            else checked_reward(function, self._standing, args.reward_on_error, args.reward_timeout)
            for function in self.reward_funcs
        ]
        self._name = self.algorithm.title
        # TRL's own advantages are replaced; "none" is the cheapest way through its code.
        self.scale_rewards = "none"
        self.multi_objective_aggregation = "sum_then_normalize"
        self.greedy = False  # True while one greedy completion per prompt is asked for, for rollout functions to read
        if args.disable_dropout:
            disable_functional_dropout(self.model)
        self._pack_models()
        self.kl_controller = kl_control.kl_controller(args)
        self.charges_kl_to = args.kl_placement if args.beta else "none"
        self._image_inputs = [
            name
            for name in inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
            if name not in LOGPS_PARAMETERS
        ]
        self._step_metrics = {"train": StepMetrics(), "eval": StepMetrics()}
        self._window_batches: list[Any] = []
        self._window: list[dict[str, Any]] = []  # micro-batches of an optimizer step, as TRL splits them
        self._passes: Passes = []  # what is left to compute of it
        self.skipped: Skipped | None = None  # until it is recorded
        self._rollouts: list[Rollout] = []
        self.accounts = Accounts()
        self.collector: Collector | None = make_collector(self) if args.dynamic_sampling else None
        self.generation_seconds = 0.0  # of the last generation
        self.teaches = True  # whether the current optimizer step has a token to learn from
        self.add_callback(NothingLearned(self))
        self.train_sampler: Any = None  # None for a stream
        self._replay: Replay | None = None
        self._interrupting = False
        self._defers_old_logps = False  # True until TRL has asked for those of a batch just generated

    def _pack_models(self) -> None:
        """Have the models compute real tokens alone where they may, and note what that means for padding."""
        shares, models = self.args.share_prompts is not False, {"model": self.model}
        if self.ref_model is not None:
            models["ref_model"] = self.accelerator.unwrap_model(self.ref_model)
        pack = partial(pack_language_model, share=shares)
        packed = start_packing(self, self.args.padding_free, pack, models)
        self.packs, self.packs_reference = "model" in packed, "ref_model" in packed
        self.packs_training = self.packs  # all that a pass in training runs
        self.shares_prompts = self.packs and shares
        self.trims_prompts = self.packs or may_be_trimmed(self.model)

    @property
    def scores_with_values(self) -> bool:
        """Whether a pass for values, right after sampling, also gives the log-probs at sampling."""
        return False

    def _check_class(self, estimator: str) -> None:
        """Refuse an algorithm that is another class's."""
        if ("critic" in self.needs) != ("critic" in self.provides):
            verb, other = ("needs", "PPOTrainer") if "critic" in self.needs else ("has no use for", "PolicyTrainer")
            raise TypeError(
                f"`advantage_estimator`: {estimator!r} {verb} a critic, so take trl_algos.{other} rather "
                f"than {type(self).__name__}."
            )

    def _reward_scale(self) -> RewardScale:
        functions = [
            self.accelerator.unwrap_model(function) if isinstance(function, nn.Module) else function
            for function in self.reward_funcs
        ]
        return reward_scale(functions, self.reward_func_names)

    def _standing(self) -> str:
        """Where the run stands, for the message of an error that ends it."""
        checkpoint = self._last_checkpoint()
        kept = f"the last checkpoint is {checkpoint}" if checkpoint else "no checkpoint was saved"
        return f"It was step {self.state.global_step + 1}; {kept}."

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's training; what would keep it from starting, or from doing anything, is refused before it does.

        Args:
            resume_from_checkpoint: folder of a checkpoint; `latest` or true for the latest whole one in the output
                folder.
            *args: as in TRL.
            **kwargs: as in TRL.
        """
        forget_evaluation(self)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, before training, too, whatever the backend."""
        with evaluating(self):
            return super().evaluate(*args, **kwargs)

    def check_start(self, checkpoint: str | None = None) -> None:
        """Also where prompts are too few or lack a chat template."""
        needed = self.args.generation_batch_size // self.num_generations
        check_prompts(self.train_dataset, needed, self.processing_class)
        super().check_start(checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's sampler; with dynamic sampling its rows are not read, and steps go on until the prompts end."""
        sampler = super()._get_train_sampler(dataset) if self.collector is None else step_sampler(self)
        self.train_sampler = sampler  # for `load_state`, since it begins with its first order in a resumed run, too
        return sampler

    def _run_epoch(self, **loop: Any) -> None:
        """An epoch of TRL's data loader; prompts that dynamic sampling draws may end before it does."""
        try:
            super()._run_epoch(**loop)
        except PromptsEnded:
            end_run(self, **loop)

    # 1. The optimizer window

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The raw batches of one optimizer step, remembered so that the step can be prepared as a whole."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        # Not prepared here: a resumed run restores its random state only after this call.
        self._window_batches, self._passes = list(batches), []
        return batches, num_items

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """In training the batches of a micro-batch that go through the model one after another; else TRL's."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        if not self._passes:
            self._open_window(self._window_batches or [generation_batch])
        return self._passes.pop(0)

    def _open_window(self, batches: list[Any]) -> None:
        """All that an optimizer step needs before its first pass; see `open_window`."""
        open_window(self, batches, super()._prepare_inputs)

    def _logged_targets(self, rollout: Rollout) -> dict[str, Tensor]:
        targets = self.targets(rollout)
        record_rollout(self, rollout, targets["advantages"])
        return targets

    def targets(self, rollout: Rollout) -> dict[str, Tensor]:
        """What a loss compares a micro-batch with, by name: (N,) or (N, T), which end up in the micro-batches."""
        return {
            "advantages": checked_advantages(
                self.estimate_advantages(rollout), rollout, per_token=self.args.ratio_level != "sequence"
            )
        }

    def loss_counts(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """What the losses of a micro-batch are divided by, 0-d each; summed over the window under these names."""
        mask = loss_mask(batch)
        return {"loss_divisor": self._loss_count(mask), "window_tokens": mask.sum().float()}

    def _loss_count(self, mask: Tensor) -> Tensor:
        return aggregation_count(mask, self.args.aggregation, max_length=self.max_completion_length)

    # 2. Rollout and advantages

    def estimate_advantages(self, rollout: Rollout) -> Tensor:
        """Advantages of a rollout: the hook to override.

        Args:
            rollout: everything sampled for this update, over all ranks.

        Returns:
            (N,) one per completion, or (N, T) one per token; values of rows that are not scorable are ignored.
        """
        function = self.args.advantage_function
        parameters = inspect.signature(function).parameters
        inputs = {name: getattr(rollout, name) for name in ROLLOUT_FIELDS if name in parameters}
        if "baselines" in inputs and inputs["baselines"] is None:  # evaluation makes no greedy pass
            inputs["baselines"] = torch.zeros_like(rollout.scores)
        return function(**inputs, **self.args.advantage_arguments)

    def weighted_scores(self, scores_per_func: Tensor) -> Tensor:
        """(N,) weighted sum of (N, F) rewards over the functions that scored the row; NaN where none did."""
        weights = self.reward_weights.to(scores_per_func.device)
        scores = (scores_per_func * weights).nansum(dim=1)
        return torch.where(scores_per_func.isnan().all(dim=1), torch.nan, scores)

    def judged_rewards(self, scores_per_func: Tensor) -> Tensor:
        """(N,) rewards that dynamic sampling judges groups by: without length shaping, NaN where not scorable."""
        if self.args.dynamic_sampling_metric is None:
            return self.weighted_scores(scores_per_func)
        return scores_per_func[:, self.reward_func_names.index(self.args.dynamic_sampling_metric)]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """TRL's (N, F) rewards over all ranks, those of models normalised where that is asked for.

        They are kept for the rollout together with the completions' lengths.
        """
        if self._replay is None:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            if self.reward_scale is not None:
                rewards = self.reward_scale.normalised(rewards)
        else:
            rewards = self._replay.rewards
            self._pending_extra_logs.update(self._replay.columns)
        self._scored = rewards, [len(ids) for ids in completion_ids_list]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch, without its advantages: in training `_open_window` adds them, for all batches of the step."""
        if self.collector is not None and self.model.training:
            inputs, output = self._from_groups(self.collector.collect(alone=not learns_so_far(self)))
        else:
            with deferring_old_logps(self):
                output = super()._generate_and_score_completions(inputs)
        correct_engine_mismatch(self, output)
        rollout = self._collect(inputs, output)
        if self.collector is None or not self.model.training:
            account(self, rollout)
        del output["advantages"]
        if self.model.training:
            self._rollouts.append(rollout)
            output["rollout_row"] = torch.arange(len(inputs), device=rollout.scores.device)
        else:
            for name, target in self._logged_targets(rollout).items():
                output[name] = at_width_of(output, local_rows(self.accelerator, target))
            if rollout.kl is not None:
                self.append_metrics({"kl": masked_mean(rollout.kl, rollout.mask).item()})
        return output

    def _from_groups(self, groups: list[Group]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """This rank's rows of `groups`, and TRL's batch of them."""
        own = own_rows(self.accelerator, groups)
        with replaying(self, Replay(groups, own, self.accelerator.device)) as replay, deferring_old_logps(self):
            output = super()._generate_and_score_completions(replay.inputs)
        put_old_logps(output, replay.old_logps)
        return replay.inputs, output

    def generate_only(self, inputs: list[dict[str, Any]]) -> tuple[list[Any], Generated]:
        """Prompts of `inputs` as TRL prepares them, and what it generates; its method is left before it scores."""
        self._interrupting = True
        try:
            super()._generate_and_score_completions(inputs)
        except Interrupted as interrupted:
            return interrupted.prompts, interrupted.generated
        finally:
            self._interrupting = False
        raise RuntimeError("`_generate` was not reached.")

    def _collect(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Rollout:
        """The rollout of all ranks, from this rank's batch and what was kept while TRL made it."""
        return collected(self, inputs, output)

    def _update_reward_kl(self, rollout: Rollout) -> None:
        """Log the KL charged to the reward and let the controller see it, once per update."""
        if rollout.kl is None:
            return
        self._metrics["train"]["kl"].append(masked_mean(rollout.kl, rollout.mask).item())
        rows = int(rollout.mask.any(dim=1).sum())  # a completion left out has no KL to speak of
        self._update_kl_controller(masked_sum(rollout.kl, rollout.mask).item() / max(rows, 1), rows)

    def _update_kl_controller(self, kl_per_sequence: float, sequences: int) -> None:
        self._metrics["train"]["policy/kl_coef"].append(self.kl_controller.coef)
        self.kl_controller.update(kl_per_sequence, sequences)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """What was collected, where a batch is made of it; else TRL's generation."""
        generated = self._newly_generated(prompts) if self._replay is None else self._replay.generated
        if self._interrupting:
            raise Interrupted(prompts, generated)
        _, completion_ids, tool_mask, *_ = generated
        self._generated_lengths = [sum(row) for row in tool_mask] if tool_mask else list(map(len, completion_ids))
        return generated

    def _newly_generated(self, prompts: list[Any]) -> Generated:
        """TRL's generation; a completion that came back empty is one masked EOS (see `empty_completions`)."""
        self._empty_rows: list[int] | None = None
        started = perf_counter()
        prompt_ids, completion_ids, tool_mask, *rest = super()._generate(prompts)
        self.generation_seconds = perf_counter() - started
        if self._empty_rows:
            tool_mask = tool_mask or [[1] * len(ids) for ids in completion_ids]
            for row in self._empty_rows:
                tool_mask[row] = [0] * len(completion_ids[row])
        return prompt_ids, completion_ids, tool_mask, *rest

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        empty = fill_empty(completion_ids, logprobs, self._tokenizer.eos_token_id)
        if self._empty_rows is None:  # later turns, after a tool answered, hold other rows
            self._empty_rows = empty
        return completion_ids, logprobs

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self._defers_old_logps:  # the first pass of TRL's method for a batch just generated
            self._defers_old_logps = False
            return torch.full((len(input_ids), logits_to_keep), torch.nan, device=input_ids.device), None, None
        tokens, score = (input_ids, attention_mask), super()._get_per_token_logps_and_entropies
        asks_more = any(value is not None and value is not False for value in others.values())  # images, balance
        if batch_size is None or asks_more or torch.is_grad_enabled() or not self.args.regroup_micro_batches:
            return score(model, *tokens, logits_to_keep, batch_size, compute_entropy, **others)
        packs = self.packs_reference if model is self.ref_model else self.packs
        return logps_in_parts(self, partial(score, model), tokens, logits_to_keep, batch_size, packs, compute_entropy)

    # 3. Loss

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """TRL's, of the batches of a micro-batch in turn; the gradient of all but the last is there on return."""
        if isinstance(inputs, dict):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not inputs:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        *earlier, last = inputs
        total = torch.zeros((), device=self.accelerator.device)
        with without_exchange(self.accelerator, model) if earlier else nullcontext():
            for batch in earlier:
                loss = super().compute_loss(model, batch)
                backward(self.accelerator, loss)
                total += loss.detach()
        return total + super().compute_loss(model, last)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        mask = loss_mask(inputs)
        scores = self.score(model, inputs)
        keep_old_logps(self, inputs, scores.logps)
        old_logps = behaviour_logps(self, inputs, scores.logps)
        entropy_mask = high_entropy_mask(self, scores.entropies, mask)
        divisor = self.divisor(inputs, "loss_divisor")
        policy = policy_loss(
            scores.logps,
            old_logps,
            inputs["advantages"],
            mask,
            surrogate=self.args.surrogate_function,
            ratio_level=self.args.ratio_level,
            aggregation=self.args.aggregation,
            weights=loss_weights(self, inputs, scores.logps, old_logps, mask, entropy_mask),
            normalizer=divisor,
            **self.args.surrogate_arguments,
        )
        loss = policy.loss
        kl = loss_kl(self, inputs, scores, old_logps, mask) if self.charges_kl_to == "loss" else None
        if kl is not None:
            loss = loss + self.kl_controller.coef * aggregate_loss(kl, mask, self.args.aggregation, divisor)
        if self._entropy_bonus_enabled:
            loss = loss - entropy_bonus(self, inputs, scores.entropies, mask, entropy_mask)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * scores.aux_loss / self.accumulation_steps
        for part in self.extra_losses(scores, inputs, mask):
            loss = loss + part
        self.step_metrics.loss("total_loss", loss)
        record_step(self, policy, scores, old_logps, kl, mask, inputs)
        return loss

    def extra_losses(self, scores: Scores, inputs: dict[str, Any], mask: Tensor) -> list[Tensor]:
        """Losses of a micro-batch beside the policy's, 0-d each: the hook for what a subclass trains too."""
        return []

    def score(self, model: Any, inputs: dict[str, Any], batch_size: int | None = None) -> Scores:
        """Log-probs and entropies of the completion tokens, with the MoE loss or the logits where they are needed."""
        # What is scored in parts, before the loss, is asked for its log-probs alone.
        if self.charges_kl_to == "loss" and self.args.kl_estimator == "full" and batch_size is None:
            return score_with_logits(self, model, inputs)
        input_ids, attention_mask = whole_rows(inputs)
        logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            inputs["completion_ids"].shape[1],
            batch_size=batch_size,
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs.get(name) for name in self._image_inputs},
        )
        return Scores(logps, cast(Tensor, entropies), aux_loss)

    @property
    def mode(self) -> str:
        """Train or eval, as TRL keeps metrics apart; evaluation may come in the middle of an optimizer step."""
        return "train" if self.model.training else "eval"

    @property
    def step_metrics(self) -> StepMetrics:
        """What is collected for the current optimizer step, or evaluation."""
        return self._step_metrics[self.mode]

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of the current optimizer step; 1 in evaluation."""
        if not self.model.training:
            return 1
        # Trainer sets the attribute with the first step; a loss may be asked for before.
        return getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)

    def divisor(self, inputs: dict[str, Any], name: str) -> Tensor:
        """The optimizer window's divisor; outside a window this micro-batch's, as if all were like it."""
        if self.model.training and name in inputs:
            return inputs[name]
        return self.loss_counts(inputs)[name].clamp(min=1.0) * self.accumulation_steps

    # Metrics and state

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        check_grad_norm(self, norm, "policy")
        return norm

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        check_best_metric(self.args, metrics)
        return super()._determine_best_metric(metrics, trial)

    def append_metrics(self, values: dict[str, float]) -> None:
        """Keep metrics until TRL logs their mean."""
        for name, value in values.items():
            self._metrics[self.mode][name].append(value)

    def save_states(self, folder: Path) -> None:
        """The KL coefficient where it moves, what was sampled, and the batch that is being trained on."""
        if self.args.should_save:
            kl_control.save_state(self.kl_controller, folder)
        if not self.args.save_only_model:
            save_state(self, folder)

    def load_states(self, folder: Path) -> None:
        """What `save_states` wrote."""
        kl_control.load_state(self.kl_controller, folder)
        load_state(self, folder)
