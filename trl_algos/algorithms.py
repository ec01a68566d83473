"""What each algorithm is: one frozen row of `ALGORITHMS` per key, and nothing about it anywhere else.

A row names its paper, points at the two core functions that make it up (advantage and surrogate), and holds the
paper's defaults. Choices, validation, the README table and the test parameters derive from the rows.

A parameter of an advantage function is one of three things: a field of the rollout (`ROLLOUT_FIELDS`), filled by the
trainer; a setting (`SETTING_OF_PARAMETER`), filled from the config; or it keeps its own default. The keyword
parameters of a surrogate are settings, under the config's own names. So a new function needs no glue.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl_algos.core import advantages as _advantages
from trl_algos.core import critic_advantages as _critic_advantages
from trl_algos.core import returns as _returns
from trl_algos.core import surrogates as _surrogates
from trl_algos.core._groups import GROUP_TOLERANCE
from trl_algos.core.aggregation import AGGREGATIONS
from trl_algos.core.kl import KL_ESTIMATORS
from trl_algos.core.ratios import RATIO_LEVELS

if TYPE_CHECKING:
    from torch import Tensor

ROLLOUT_FIELDS = (
    "rewards",
    "token_rewards",
    "scores",
    "scores_per_func",
    "scorable",
    "groups",
    "lengths",
    "length_penalty",
    "mask",
    "kl",
    "kl_coef",
    "baselines",
    "values",
    "bootstrap",
)
"""Parameter names of an advantage function that the trainer fills from the rollout."""

SETTING_OF_PARAMETER = {
    "eps": "advantage_eps",
    "normalize": "advantage_normalize",
    "k": "pass_k",
    "gamma": "gamma",
    "gae_lambda": "gae_lambda",
    "alpha": "length_adaptive_alpha",
}
"""Parameter name of an advantage function -> config field that fills it."""

RATIO_REFERENCES = ("policy", "engine")
KL_PLACEMENTS = ("none", "loss", "reward")

COMMON_DEFAULTS: Mapping[str, Any] = {
    "num_generations": 8,
    "num_iterations": 1,
    "beta": 0.0,
    "mask_truncated_completions": False,
    "disable_dropout": True,
    "use_bias_correction_kl": False,
    "vllm_importance_sampling_correction": True,
    "ratio_reference": "policy",
    "kl_controller": "fixed",
    "kl_target": 6.0,
    "kl_horizon": 10000.0,
    "overlong_buffer": 0.0,
    "overlong_penalty_factor": 1.0,
    "dynamic_sampling": False,
    "dynamic_sampling_tolerance": GROUP_TOLERANCE,
    "dynamic_sampling_max_rounds": 10,
    "dynamic_sampling_on_exhausted": "train",
    "dynamic_sampling_retry": 0,
}
"""What a row does not say. Rollout size and learning rate are budgets, not part of an algorithm: they stay TRL's."""

CRITIC_DEFAULTS: Mapping[str, Any] = {
    "gamma": 1.0,
    "critic_gae_lambda": 1.0,
    "vf_coef": 0.1,
    "value_clip_range": 0.2,
    "bootstrap_truncated": False,
    "critic_warmup_steps": 0,
    "positive_nll_coef": 0.0,
    "push_critic": False,
}
"""The same of settings that only an objective with a critic has. What is left unset beyond them follows from others:
see `settings/critic.py`."""


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of policy optimisation.

    Args:
        key: lower_snake name, used everywhere.
        title: name in words.
        paper: arXiv id, or a citation where there is none.
        advantage: core function; its parameters say what it needs.
        surrogate: core function `(logps, log_ratio, advantages, mask, *, <settings>) -> SurrogateTerms`.
        ratio_level: token, sequence or sequence_token.
        aggregation: how token losses become one number.
        kl_placement: none, loss or reward.
        kl_estimator: estimator of KL(policy || reference); empty for the usual one of its placement.
        defaults: config field -> the paper's value.
        differs: deviations from the paper, or what it leaves open.
    """

    key: str
    title: str
    paper: str
    advantage: Callable[..., Tensor]
    surrogate: Callable[..., _surrogates.SurrogateTerms] = _surrogates.clip
    ratio_level: str = "token"
    aggregation: str = "token_mean"
    kl_placement: str = "none"
    kl_estimator: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    differs: str = ""

    def __post_init__(self) -> None:
        """Refuse a row that no trainer could run."""
        if not self.key.isidentifier() or self.key != self.key.lower() or keyword.iskeyword(self.key):
            raise ValueError(f"`key` must be a lower_snake name, but is {self.key!r}.")
        if not (isinstance(self.paper, str) and self.paper):
            raise ValueError(f"`paper` of {self.key!r} must say where it comes from, but is {self.paper!r}.")
        for name, choices in _ROW_CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"`{name}` of {self.key!r} must be one of {', '.join(choices)}, but is {getattr(self, name)!r}."
                )
        own = {*advantage_settings(self.advantage).values(), *surrogate_settings(self.surrogate), *COMMON_DEFAULTS}
        own |= CRITIC_DEFAULTS.keys() if "critic" in self.needs else set()
        strangers = sorted(set(self.defaults) - own)
        if strangers:
            raise ValueError(
                f"`defaults` of {self.key!r} sets {', '.join(strangers)}, which nothing in the row uses; it can set "
                f"{', '.join(sorted(own))}."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """What the trainer must provide beyond single samples: groups, greedy_baseline, critic."""
        return advantage_needs(self.advantage)

    @property
    def all_defaults(self) -> dict[str, Any]:
        """The row's own defaults, and the common ones where it is silent."""
        critic = dict(CRITIC_DEFAULTS) if "critic" in self.needs else {}
        if "gae_lambda" in self.defaults:
            critic["critic_gae_lambda"] = self.defaults["gae_lambda"]
        return {**COMMON_DEFAULTS, **critic, **self.defaults}


_ROW_CHOICES: Mapping[str, tuple[str, ...]] = {
    "ratio_level": RATIO_LEVELS,
    "aggregation": AGGREGATIONS,
    "kl_placement": KL_PLACEMENTS,
    "kl_estimator": ("", *KL_ESTIMATORS, "full"),
}

CORRECTION_MODE = {
    "token_truncate": "tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_mask",
}
"""TRL's `vllm_importance_sampling_mode` -> mode of `rollout_correction`."""

KL_ESTIMATOR_OF_PLACEMENT = {"loss": "k3", "reward": "k1"}
"""What a placement other than the row's own is charged with: k1's gradient in a loss is 0 on average."""


_NEED_OF_PARAMETER = {"groups": "groups", "baselines": "greedy_baseline", "values": "critic"}


def advantage_needs(advantage: Callable[..., Tensor]) -> tuple[str, ...]:
    """What an advantage function needs, read off its parameters: `groups`, `greedy_baseline` and `critic`."""
    parameters = _parameters(advantage)
    return tuple(need for name, need in _NEED_OF_PARAMETER.items() if name in parameters)


def is_token_level(advantage: Callable[..., Tensor]) -> bool:
    """Whether an advantage function returns (N, T), one value a token, rather than (N,)."""
    return "mask" in _parameters(advantage)


def advantage_settings(advantage: Callable[..., Tensor]) -> dict[str, str]:
    """Parameter -> config field, for the parameters of an advantage function that the config fills.

    Raises:
        ValueError: a parameter is neither a rollout field nor a setting and has no default.
    """
    settings = {}
    for name, parameter in _parameters(advantage).items():
        if name in SETTING_OF_PARAMETER:
            settings[name] = SETTING_OF_PARAMETER[name]
        elif name not in ROLLOUT_FIELDS and parameter.default is inspect.Parameter.empty:
            known = ", ".join((*ROLLOUT_FIELDS, *SETTING_OF_PARAMETER))
            raise ValueError(
                f"parameter `{name}` of the advantage function {advantage.__name__} is not known to the trainer, "
                f"which fills {known}. Rename it or give it a default."
            )
    return settings


def surrogate_settings(surrogate: Callable[..., Any]) -> tuple[str, ...]:
    """Config fields that a surrogate takes: its keyword-only parameters."""
    return tuple(
        name for name, parameter in _parameters(surrogate).items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    )


def component_name(function: Callable[..., Any]) -> str:
    """Name by which a config picks an advantage or surrogate function: the function's own, less `_advantages`.

    Raises:
        ValueError: it has no name, as a `functools.partial` has none.
    """
    if not hasattr(function, "__name__"):
        raise ValueError(f"{function!r} has no `__name__` to pick it by; define a function.")
    return str(function.__name__).removesuffix("_advantages")


_GROUP = _advantages.group_normalized_advantages
_PPO = {
    "epsilon": 0.2,
    "gae_lambda": 0.95,
    "beta": 0.05,
    "num_generations": 1,
    "num_iterations": 4,
}

ALGORITHMS: dict[str, Algorithm] = {}
"""Key -> row. Read it freely; add to it with `register`."""


def advantage_estimators() -> dict[str, Callable[..., Tensor]]:
    """Name -> advantage function: those of all rows, and best_of_group (2503.19595), which has no row of its own."""
    functions = [row.advantage for row in ALGORITHMS.values()] + [_advantages.best_of_group_advantages]
    return {component_name(function): function for function in functions}


def surrogates() -> dict[str, Callable[..., Any]]:
    """Name -> surrogate function, over all rows."""
    return {component_name(row.surrogate): row.surrogate for row in ALGORITHMS.values()}


def register(algorithm: Algorithm) -> Algorithm:
    """Add a row to `ALGORITHMS` and return it.

    Raises:
        ValueError: the key is taken, or a function has the name of another one.
    """
    if algorithm.key in ALGORITHMS:
        raise ValueError(f"`key` {algorithm.key!r} is taken by {ALGORITHMS[algorithm.key].title!r}; choose another.")
    for kind, function, known in (
        ("advantage", algorithm.advantage, advantage_estimators()),
        ("surrogate", algorithm.surrogate, surrogates()),
    ):
        name = component_name(function)
        if known.get(name, function) is not function:
            raise ValueError(f"`{kind}`: there is another function called {function.__name__!r}; rename yours.")
    ALGORITHMS[algorithm.key] = algorithm
    return algorithm


for _row in (
    Algorithm(
        key="grpo",
        title="GRPO: group relative policy optimisation",
        paper="2402.03300",
        advantage=_GROUP,
        aggregation="seq_mean_token_mean",
        kl_placement="loss",
        kl_estimator="k3",
        defaults={"epsilon": 0.2, "beta": 0.04, "advantage_eps": 1e-4},
        differs="the paper samples 64 completions per prompt; its std has no stated epsilon",
    ),
    Algorithm(
        key="dr_grpo",
        title="Dr. GRPO: GRPO without length and difficulty bias",
        paper="2503.20783",
        advantage=_advantages.group_centered_advantages,
        aggregation="seq_mean_token_sum_norm",
        defaults={"epsilon": 0.2},
        differs="divides by rows · max_completion_length, a constant that only scales the learning rate",
    ),
    Algorithm(
        key="dapo",
        title="DAPO: decoupled clip, token-level loss, soft overlong punishment",
        paper="2503.14476",
        advantage=_GROUP,
        aggregation="token_mean",
        defaults={"epsilon": 0.2, "epsilon_high": 0.28, "advantage_eps": 1e-4, "overlong_buffer": 0.2}
        | {"dynamic_sampling": True},
        differs="overlong_buffer 0.2 is the paper's 4096 of 20480 tokens; overlong filtering is the setting "
        "mask_truncated_completions, off as in its main run",
    ),
    Algorithm(
        key="gspo",
        title="GSPO: group sequence policy optimisation",
        paper="2507.18071",
        advantage=_GROUP,
        ratio_level="sequence",
        aggregation="seq_mean_token_mean",
        defaults={"epsilon": 3e-4, "epsilon_high": 4e-4, "advantage_eps": 1e-4},
        differs="the paper takes 4 optimizer steps per generation batch: set steps_per_generation to that",
    ),
    Algorithm(
        key="gspo_token",
        title="GSPO-token: sequence ratio with token-level gradient",
        paper="2507.18071",
        advantage=_GROUP,
        ratio_level="sequence_token",
        aggregation="seq_mean_token_mean",
        defaults={"epsilon": 3e-4, "epsilon_high": 4e-4, "advantage_eps": 1e-4},
        differs="none",
    ),
    Algorithm(
        key="rloo",
        title="RLOO: REINFORCE leave-one-out",
        paper="2402.14740",
        advantage=_advantages.leave_one_out_advantages,
        surrogate=_surrogates.reinforce,
        aggregation="seq_mean_token_sum",
        kl_placement="reward",
        kl_estimator="k1",
        defaults={"beta": 0.05},
        differs="the paper tunes beta per task; 0.05 is TRL's",
    ),
    Algorithm(
        key="remax",
        title="ReMax: REINFORCE with the greedy completion's reward as baseline",
        paper="2310.10505",
        advantage=_advantages.greedy_baseline_advantages,
        surrogate=_surrogates.reinforce,
        aggregation="seq_mean_token_sum",
        kl_placement="reward",
        kl_estimator="k1",
        defaults={"beta": 0.05, "num_generations": 1},
        differs="the KL penalty is charged to the whole completion, not to what follows each token",
    ),
    Algorithm(
        key="reinforce",
        title="REINFORCE: reward to go",
        paper="Williams 1992, doi:10.1007/BF00992696",
        advantage=_returns.discounted_returns,
        surrogate=_surrogates.reinforce,
        aggregation="seq_mean_token_sum",
        defaults={"gamma": 1.0, "num_generations": 1},
        differs="no baseline and no KL; kl_placement: reward with a beta adds the penalty usual in RLHF",
    ),
    Algorithm(
        key="reinforce_pp",
        title="REINFORCE++: returns whitened over the global batch",
        paper="2501.03262",
        advantage=_advantages.reinforce_pp_advantages,
        aggregation="token_mean",
        kl_placement="reward",
        kl_estimator="k1",
        defaults={"epsilon": 0.2, "gamma": 1.0, "beta": 0.01, "num_generations": 1},
        differs="beta is the default of the authors' code",
    ),
    Algorithm(
        key="reinforce_pp_baseline",
        title="REINFORCE++-baseline: group-centred, whitened over the global batch",
        paper="2501.03262",
        advantage=_advantages.reinforce_pp_baseline_advantages,
        aggregation="token_mean",
        kl_placement="loss",
        kl_estimator="k2",
        defaults={"epsilon": 0.2, "beta": 0.01},
        differs="beta is the default of the authors' code",
    ),
    Algorithm(
        key="opo",
        title="OPO: on-policy RL with the optimal reward baseline",
        paper="2505.23585",
        advantage=_advantages.length_weighted_advantages,
        surrogate=_surrogates.reinforce,
        aggregation="token_mean",
        differs="the paper's length-weighted approximation of the optimal baseline; aggregation is not stated",
    ),
    Algorithm(
        key="gpg",
        title="GPG: group policy gradient",
        paper="2504.02546",
        advantage=_advantages.gpg_advantages,
        surrogate=_surrogates.reinforce,
        aggregation="token_mean",
        differs="alpha counts samples of informative groups; no reward normalisation (F_norm = 1)",
    ),
    Algorithm(
        key="pass_at_k",
        title="Pass@k training: analytical advantage of the best of k",
        paper="2508.10751",
        advantage=_advantages.pass_at_k_advantages,
        aggregation="seq_mean_token_mean",
        defaults={"epsilon": 0.2, "pass_k": 4},
        differs="a completion counts as correct when its reward is above 0; the paper samples 32 per prompt",
    ),
    Algorithm(
        key="sapo",
        title="SAPO: soft adaptive policy optimisation",
        paper="2511.20347",
        advantage=_GROUP,
        surrogate=_surrogates.sapo,
        aggregation="seq_mean_token_mean",
        defaults={"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "advantage_eps": 1e-4},
        differs="none",
    ),
    Algorithm(
        key="cispo",
        title="CISPO: clipped importance-sampling weights",
        paper="2506.13585",
        advantage=_GROUP,
        surrogate=_surrogates.cispo,
        aggregation="token_mean",
        defaults={"epsilon": 1.0, "epsilon_high": 4.0, "advantage_eps": 1e-4},
        differs="epsilon 1.0: no lower bound, as in the paper, which leaves the upper one open; 1 + 4.0 is the cap of "
        "2510.13786",
    ),
    Algorithm(
        key="gmpo",
        title="GMPO: geometric-mean policy optimisation",
        paper="2507.20673",
        advantage=_GROUP,
        surrogate=_surrogates.gmpo,
        aggregation="seq_mean_token_mean",
        defaults={"epsilon": 0.4, "epsilon_high": 0.4, "advantage_eps": 1e-4},
        differs="none; the bounds are in log space",
    ),
    Algorithm(
        key="dis",
        title="DIS: direct double-sided importance sampling",
        paper="2602.15763",
        advantage=_GROUP,
        surrogate=_surrogates.dis,
        aggregation="token_mean",
        defaults={
            "epsilon": 0.3,
            "epsilon_high": 5.0,
            "advantage_eps": 1e-4,
            "ratio_reference": "engine",
            "vllm_importance_sampling_correction": False,
        },
        differs="the ratio is taken to the engine's own log-probs where it returns them; the bounds 0.3 and 5.0 are "
        "those of its single-rollout successor",
    ),
    Algorithm(
        key="ppo",
        title="PPO: proximal policy optimisation with a critic",
        paper="1707.06347",
        advantage=_critic_advantages.gae_advantages,
        aggregation="token_mean",
        kl_placement="reward",
        kl_estimator="k1",
        defaults=_PPO,
        differs="the form usual in RLHF, with the numbers of TRL's former PPO: KL in the reward, whitened advantages, "
        "clipped values; the paper's entropy bonus is entropy_coef, off",
    ),
    Algorithm(
        key="dual_clip_ppo",
        title="Dual-clip PPO: a bound on the ratio for negative advantages, too",
        paper="1912.09729",
        advantage=_critic_advantages.gae_advantages,
        aggregation="token_mean",
        kl_placement="reward",
        kl_estimator="k1",
        defaults={**_PPO, "delta": 3.0},
        differs="all but delta as in ppo",
    ),
    Algorithm(
        key="vapo",
        title="VAPO: value-based augmented PPO, length-adaptive and decoupled GAE",
        paper="2504.05118",
        advantage=_critic_advantages.length_adaptive_gae_advantages,
        aggregation="token_mean",
        defaults={
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "length_adaptive_alpha": 0.05,
            "critic_gae_lambda": 1.0,  # with any estimator: else it would follow from `gae_lambda`
            "positive_nll_coef": 0.1,
            "critic_warmup_steps": 50,
        },
        differs="the paper samples 16 completions per prompt and starts the critic from a reward model "
        "(critic_model_name_or_path); its 50 steps of value pretraining count optimizer steps here",
    ),
):
    register(_row)


def component_default(
    row: Algorithm, kind: str, component: Callable[..., Any], parameter: str, setting: str, ratio_level: str
) -> tuple[Any, str]:
    """Default of one setting of an advantage or surrogate function used by `row`, and where it comes from in words.

    The row's own value counts only while the row's own component is in use: GSPO's epsilon means nothing to another
    surrogate, nor to ratios of single tokens. Otherwise the first row built on the component says it. Last comes the
    function's own signature.

    Args:
        row: the algorithm chosen.
        kind: "advantage" or "surrogate".
        component: the function in use.
        parameter: its parameter.
        setting: the config field that fills it.
        ratio_level: the ratio level in use.

    Returns:
        The default, or `inspect.Parameter.empty` where nobody states one; and whose it is.
    """
    owners = [r for r in (row, *ALGORITHMS.values()) if getattr(r, kind) is component]
    if kind == "surrogate":  # those whose ratios have the same scale come first
        owners.sort(key=lambda r: (r.ratio_level == "token") != (ratio_level == "token"))
    owner = next(iter(owners), None)
    if owner is not None and setting in owner.defaults:
        who = f"algorithm {owner.key}" if owner is row else f"{kind} {component_name(component)}, as in {owner.key}"
        return owner.defaults[setting], who
    return _parameters(component)[parameter].default, f"{kind} {component_name(component)}"


def table_cells(row: Algorithm) -> dict[str, str]:
    """Heading -> cell of the row in `trl-algos list` and in the README."""
    return {
        "key": row.key,
        "title": row.title,
        "paper": row.paper,
        "advantage": component_name(row.advantage),
        "surrogate": component_name(row.surrogate),
        "ratio": row.ratio_level,
        "aggregation": row.aggregation,
        "KL": row.kl_placement if row.kl_placement == "none" else f"{row.kl_placement}, {row.kl_estimator}",
        "needs": ", ".join(row.needs) or "-",
    }
