"""`PolicyConfig`: TRL's `GRPOConfig` plus one key, `algorithm`, which decides everything left unset."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor
from trl import GRPOConfig

from trl_algos import _compat  # noqa: F401 - refuses another TRL
from trl_algos.algorithms import advantage_estimators, advantage_settings, surrogate_settings, surrogates
from trl_algos.errors import ConfigError
from trl_algos.settings.combinations import doubts
from trl_algos.settings.critic import critic_form, form_problems
from trl_algos.settings.resolution import resolve
from trl_algos.settings.trainer_checks import launched_processes, trainer_problems


class _One(int):
    """The number 1 that passes TRL's `num_generations < 2` check: not every baseline is a group's."""

    def __new__(cls) -> "_One":
        return super().__new__(cls, 1)

    def __lt__(self, other: int) -> bool:
        return False


def _unset(help_text: str) -> Any:
    """A field whose None means "not set"; those typed without None always have a value once resolved."""
    return field(default=None, metadata={"help": help_text})


@dataclass
class PolicyConfig(GRPOConfig):
    """Settings of `PolicyTrainer`: every field of TRL's `GRPOConfig`, and those below.

    Args:
        algorithm: key of a row of `trl_algos.ALGORITHMS`. The other fields left None follow from it.
        advantage_estimator, surrogate, ratio_level, ratio_reference, aggregation, kl_placement, kl_estimator: parts of
            the objective, each of which can be exchanged on its own.

    Raises:
        ConfigError: with every problem found, when the config is built.
    """

    algorithm: str = field(
        default="grpo", metadata={"help": "Algorithm to train with: a key of trl_algos.ALGORITHMS, e.g. dapo."}
    )

    # Parts of the objective
    advantage_estimator: str | None = _unset("Advantage estimator, e.g. group_normalized. Default: the algorithm's.")
    surrogate: str | None = _unset("Policy loss per token: clip, cispo, sapo, gmpo, dis or reinforce.")
    ratio_level: str | None = _unset("Importance ratio per token, sequence or sequence_token (GSPO-token).")
    ratio_reference: str | None = _unset(
        "What the ratio is taken to: policy, as it was before the update, or engine, the log-probs that the rollout "
        "engine reports (the policy's where it reports none)."
    )
    aggregation: str | None = _unset(
        "How token losses are averaged: token_mean, seq_mean_token_mean, seq_mean_token_sum or "
        "seq_mean_token_sum_norm. The divisor spans the optimizer step over all ranks."
    )
    kl_placement: str | None = _unset("Where KL(policy || reference) is charged: none, loss or reward.")
    kl_estimator: str | None = _unset(
        "k1, abs, k2, k3, k1+, k3+ ('+': gradient of k2) or full (whole vocabulary). In the loss k1 pulls nowhere on "
        "average."
    )

    # Settings of the parts
    advantage_eps: float | None = _unset("Added to the group's std when rewards are normalised.")
    advantage_normalize: bool | None = _unset("Whether best_of_group divides by the group's std.")
    pass_k: int | None = _unset("k of Pass@k training; at most num_generations.")
    gamma: float | None = _unset("Discount per generated token of the return.")
    gae_lambda: float | None = _unset(
        "Lambda of generalised advantage estimates: 1 trusts rewards alone, 0 the critic one token ahead."
    )
    length_adaptive_alpha: float | None = _unset("VAPO: lambda is 1 - 1 / (this · generated tokens), at least 0.")
    epsilon: float | None = _unset("Lower clip range: ratios below 1 - epsilon (GMPO: log ratios below -epsilon).")
    epsilon_high: float | None = _unset(
        "Upper clip range: ratios above 1 + epsilon_high. Default: the algorithm's, or epsilon."
    )
    delta: float | None = _unset("Dual clip: bound on the ratio where the advantage is negative (its paper's c).")
    sapo_temperature_pos: float | None = _unset("SAPO gate temperature for positive advantages.")
    sapo_temperature_neg: float | None = _unset("SAPO gate temperature for other advantages.")

    # Critic; none of them is used by an advantage estimator without one
    critic: str | None = _unset(
        "adapter: a second LoRA adapter with a value head on the policy's own frozen model; separate: a model of its "
        "own; shared: a value head on the policy itself. Default: that of a saved critic to start from, separate with "
        "another critic_model_name_or_path, and without one adapter where LoRA is trained, else separate."
    )
    critic_model_name_or_path: str | None = _unset(
        "What the critic starts from: a model for a separate one, such as a reward model, or a folder that a run has "
        "saved its critic in, for one of the same form. Default: the policy's model, with a new value head."
    )
    critic_use_peft: bool | None = _unset(
        "Separate critic: whether it trains LoRA like the policy's; false trains it whole. Default: as the policy."
    )
    critic_trunk_gradient: bool | None = _unset(
        "Shared critic: whether its loss also trains the policy's weights, not the value head alone."
    )
    critic_gae_lambda: float | None = _unset(
        "Lambda of the returns that the critic learns; 1 are the rewards to come. Default: gae_lambda."
    )
    vf_coef: float | None = _unset("Weight of the value loss beside the policy's.")
    value_clip_range: float | None = _unset(
        "How far a value may move from the one at sampling before its loss stops pulling; 0 for no limit."
    )
    bootstrap_truncated: bool | None = _unset(
        "Whether a truncated completion goes on from the critic's value at its end, rather than ending with 0."
    )
    critic_learning_rate: float | None = _unset("Learning rate of the critic. Default: learning_rate.")
    critic_max_grad_norm: float | None = _unset(
        "Norm that the critic's gradient is clipped to, apart from the policy's. Default: max_grad_norm."
    )
    critic_warmup_steps: int | None = _unset(
        "Optimizer steps at the start that train the critic alone. As many as max_steps: the policy is not trained."
    )
    critic_lr_scheduler_type: str | None = _unset(
        "Schedule of the critic's learning rate, over all optimizer steps. Default: lr_scheduler_type."
    )
    critic_lr_scheduler_kwargs: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "Parameters of the critic's schedule. Default: lr_scheduler_kwargs, where the schedules are equal."
        },
    )
    critic_lr_warmup_steps: float | None = _unset(
        "Optimizer steps over which the critic's learning rate rises; below 1 a share of all. Default: warmup_steps."
    )
    critic_num_iterations: int | None = _unset(
        "Passes over each generation batch that train the critic. Where they are more than num_iterations, the last "
        "ones train it alone; where fewer, the policy alone. Default: num_iterations."
    )
    positive_nll_coef: float | None = _unset(
        "VAPO: weight of the negative log-likelihood of completions with a reward above 0."
    )
    push_critic: bool | None = _unset("Push the critic to the Hub, too, beside the policy.")

    # KL
    beta: float = _unset("KL coefficient. With 0 no reference model is loaded.")
    kl_controller: str | None = _unset("fixed, or adaptive: beta moves towards kl_target (1909.08593, section 2.2).")
    kl_target: float | None = _unset("Adaptive controller: KL per sequence in nats to hold.")
    kl_horizon: float | None = _unset("Adaptive controller: sequences over which beta adapts.")
    use_bias_correction_kl: bool | None = _unset("Multiply the KL term in the loss by the ratio, as TRL does.")

    # Sampling and length
    num_generations: int = _unset("Completions per prompt.")
    num_iterations: int = _unset("Optimizer passes over each generation batch.")
    mask_truncated_completions: bool | None = _unset("Leave truncated completions out of loss and divisor.")
    overlong_buffer: float = _unset(
        "Soft overlong punishment: tokens before max_completion_length over which the penalty grows; a value below 1 "
        "is a share of max_completion_length; 0 turns it off."
    )
    overlong_penalty_factor: float | None = _unset("Penalty at max_completion_length, in reward units.")
    dynamic_sampling: bool | None = _unset(
        "Sample prompts until the batch is full of groups whose rewards differ, the only ones that teach. Default: "
        "the algorithm's, true for dapo."
    )
    dynamic_sampling_metric: str | None = _unset(
        "Name of the reward function that groups are judged by. Default: the weighted sum of all, without length "
        "shaping."
    )
    dynamic_sampling_range: list[float] | None = _unset(  # noqa: RUF009 - it makes a field
        "Two numbers: keep only groups whose mean reward lies between them, both excluded. Default: no bounds."
    )
    dynamic_sampling_tolerance: float | None = _unset(
        "Rewards of a group that differ by no more than this teach nothing."
    )
    dynamic_sampling_max_rounds: int | None = _unset("Calls of the generation for one batch, at most.")
    dynamic_sampling_on_exhausted: str | None = _unset(
        "When the rounds are over and groups are missing: train on those found, or raise. Without any group the run "
        "always ends."
    )
    dynamic_sampling_retry: int | None = _unset(
        "How often a rejected prompt is tried again within an epoch, at its end."
    )
    reward_normalization: bool = field(
        default=False,
        metadata={
            "help": "Whether the scores of reward models become (score - reward_mean) / reward_std, by the held-out "
            "figures that BradleyTerryTrainer wrote for each model. Rewards of functions stay as they are."
        },
    )
    reward_on_error: str = field(
        default="raise",
        metadata={
            "help": "What happens when a reward function raises, or takes longer than reward_timeout: raise stops the "
            "run, none leaves the completions unscored by it.",
            "choices": ["raise", "none"],
        },
    )
    reward_timeout: float | None = field(
        default=None, metadata={"help": "Seconds that one call of a reward function may take. Default: no limit."}
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "Tokens that a pass of the policy computes at most, in place of per_device_train_batch_size rows; "
            "a longer row has a pass of its own. An optimizer step makes as many passes as its tokens need. Default: "
            "no limit."
        },
    )
    regroup_micro_batches: bool = field(
        default=True,
        metadata={
            "help": "Whether the rows of an optimizer step are put together by length and prompt, so that its passes "
            "compute few tokens. The step is the same."
        },
    )
    skip_idle_rows: bool = field(
        default=True,
        metadata={
            "help": "Whether rows without a gradient are left out of the passes that train: those without a token to "
            "learn from and, where no other term of the loss pulls at them, those whose advantage is 0. The step is "
            "the same; entropy and clip shares are of the other rows."
        },
    )
    reuse_first_pass: bool = field(
        default=True,
        metadata={
            "help": "Whether the first of several passes over a generation batch gives the old log-probs, in place of "
            "a pass of its own, where a batch is one optimizer step."
        },
    )
    padding_free: bool | None = _unset(
        "Whether log-probs and values are computed on real tokens alone: unset wherever that is exact, true to refuse "
        "a model where it is not, false for padded rows."
    )
    share_prompts: bool | None = _unset(
        "Without padding: whether what rows of a micro-batch have in common at their beginning is computed once. "
        "Default: true."
    )
    disable_dropout: bool | None = _unset("Turn dropout off, so that old, current and reference log-probs agree.")
    vllm_importance_sampling_correction: bool | None = _unset("Weight tokens by policy over engine probability.")

    # TRL fields that `algorithm` replaces; setting one raises
    loss_type: str | None = _unset("Replaced by `algorithm`, `surrogate` and `aggregation`.")
    importance_sampling_level: str | None = _unset("Replaced by `ratio_level`.")
    scale_rewards: str | None = _unset("Replaced by `advantage_estimator`.")
    multi_objective_aggregation: str | None = _unset("Rewards are summed before the advantage.")
    vespo_k_pos: float | None = _unset("Not used.")
    vespo_lambda_pos: float | None = _unset("Not used.")
    vespo_k_neg: float | None = _unset("Not used.")
    vespo_lambda_neg: float | None = _unset("Not used.")

    def __post_init__(self) -> None:
        """Resolve what was left unset, refuse what cannot run, then let TRL do its own checks."""
        resolution = resolve({f.name: getattr(self, f.name) for f in fields(self)}, _FIELD_DEFAULTS)
        # Before TRL works out sizes and devices: its own messages come one at a time and may name no key.
        problems = [*resolution.problems, *trainer_problems(resolution.values, launched_processes())]
        if problems:
            raise ConfigError(problems)
        for name, value in resolution.values.items():
            setattr(self, name, value)
        if self.steps_per_generation is not None:
            self.generation_batch_size = None  # said twice and equal, as in a copy of a config
        generations = self.num_generations
        self.num_generations = _One() if generations == 1 else generations
        super().__post_init__()
        self.num_generations = generations
        for message in doubts(vars(self)):
            warnings.warn(message, UserWarning, stacklevel=3)

    @property
    def advantage_function(self) -> Callable[..., Tensor]:
        """The core function behind `advantage_estimator`."""
        return advantage_estimators()[str(self.advantage_estimator)]

    @property
    def advantage_arguments(self) -> dict[str, Any]:
        """Settings of the advantage function: its parameter -> value."""
        return {
            parameter: getattr(self, setting)
            for parameter, setting in advantage_settings(self.advantage_function).items()
        }

    @property
    def surrogate_function(self) -> Callable[..., Any]:
        """The core function behind `surrogate`."""
        return surrogates()[str(self.surrogate)]

    @property
    def surrogate_arguments(self) -> dict[str, Any]:
        """Settings of the surrogate: its keyword parameter -> value."""
        own = {f.name for f in fields(self)}
        return {name: getattr(self, name) for name in surrogate_settings(self.surrogate_function) if name in own}

    def critic_form(self, uses_lora: bool) -> str:
        """The critic's form, which may hang on how the policy is trained.

        Args:
            uses_lora: whether the policy trains a LoRA adapter.

        Returns:
            adapter, separate or shared.

        Raises:
            ConfigError: `critic` or `critic_use_peft` needs LoRA and none is trained, or the saved critic to start
                from is another one.
        """
        told = self.critic, uses_lora, self.critic_model_name_or_path, self.critic_use_peft
        problems = list(form_problems(*told))
        if problems:
            raise ConfigError(problems)
        return critic_form(self.critic, uses_lora)


_FIELD_DEFAULTS = {f.name: f.default for f in fields(PolicyConfig)}
