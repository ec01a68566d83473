"""The maths of LLM policy optimisation as pure functions: tensors in, tensors out, nothing but torch imported.

Dimensions: B rows (completions) of a micro-batch, T completion tokens, N rows gathered over all ranks, V vocabulary.
A `mask` (B, T) is 1 at tokens that the policy generated and that are trained on; it may have gaps, and what lies at
masked places, NaN included, reaches neither values nor gradients. Losses are minimised.
"""

from trl_algos.core.advantages import (
    best_of_group_advantages,
    gpg_advantages,
    greedy_baseline_advantages,
    group_centered_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    pass_at_k_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
)
from trl_algos.core.aggregation import AGGREGATIONS, aggregate_loss, aggregation_count
from trl_algos.core.critic_advantages import gae_advantages, length_adaptive_gae_advantages
from trl_algos.core.kl import KL_ESTIMATORS, AdaptiveKLController, FixedKLController, full_kl, kl_estimate
from trl_algos.core.masked import masked_fill_zero, masked_mean, masked_sum, masked_var, masked_whiten
from trl_algos.core.policy import METRIC_OVER_ROWS, PolicyLoss, policy_loss
from trl_algos.core.preference import (
    DPO_LOSS_TYPES,
    PairCalibration,
    bradley_terry_loss,
    dpo_loss,
    nll_per_token,
    pair_calibration,
    robust_smoothing_of_conservative,
)
from trl_algos.core.ratios import (
    CORRECTION_MODES,
    LOG_RATIO_LIMIT,
    RATIO_LEVELS,
    importance_log_ratio,
    log_ratio,
    rollout_correction,
)
from trl_algos.core.returns import (
    discounted_returns,
    gae,
    last_token_index,
    length_adaptive_lambda,
    packed_gae,
    token_rewards,
)
from trl_algos.core.sampling import informative_groups, overlong_penalty
from trl_algos.core.surrogates import SURROGATES, SurrogateTerms
from trl_algos.core.values import explained_variance, value_loss

__all__ = [
    "AGGREGATIONS",
    "CORRECTION_MODES",
    "DPO_LOSS_TYPES",
    "KL_ESTIMATORS",
    "LOG_RATIO_LIMIT",
    "METRIC_OVER_ROWS",
    "RATIO_LEVELS",
    "SURROGATES",
    "AdaptiveKLController",
    "FixedKLController",
    "PairCalibration",
    "PolicyLoss",
    "SurrogateTerms",
    "aggregate_loss",
    "aggregation_count",
    "best_of_group_advantages",
    "bradley_terry_loss",
    "discounted_returns",
    "dpo_loss",
    "explained_variance",
    "full_kl",
    "gae",
    "gae_advantages",
    "gpg_advantages",
    "greedy_baseline_advantages",
    "group_centered_advantages",
    "group_normalized_advantages",
    "importance_log_ratio",
    "informative_groups",
    "kl_estimate",
    "last_token_index",
    "leave_one_out_advantages",
    "length_adaptive_gae_advantages",
    "length_adaptive_lambda",
    "length_weighted_advantages",
    "log_ratio",
    "masked_fill_zero",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "nll_per_token",
    "overlong_penalty",
    "packed_gae",
    "pair_calibration",
    "pass_at_k_advantages",
    "policy_loss",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "robust_smoothing_of_conservative",
    "rollout_correction",
    "token_rewards",
    "value_loss",
]
