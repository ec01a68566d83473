"""The objective in words: each line written by hand here, from the papers and the trainer's loss."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from trl_algos import ALGORITHMS, Algorithm, PolicyConfig
from trl_algos.algorithms import advantage_estimators, surrogates
from trl_algos.objective import objective_text, references, unused_text
from trl_algos.objective.docstrings import docstring_section
from trl_algos.objective.facts import CORRECTION_MODE
from trl_algos.trainers import engine_mismatch

SIZES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_completion_length": 256}


def resolved(algorithm: str, **changes: Any) -> dict[str, Any]:
    """Settings of a recipe as `PolicyConfig` completes them."""
    settings = {"output_dir": "x", "use_cpu": True, "bf16": False, **SIZES, **changes}
    return vars(PolicyConfig(algorithm=algorithm, **settings))


def by_part(lines: list[str]) -> dict[str, str]:
    parts = dict(line.split(": ", maxsplit=1) for line in lines)
    assert len(parts) == len(lines), "two lines about one part"
    return parts


def objective(algorithm: str, **changes: Any) -> dict[str, str]:
    return by_part(objective_text(resolved(algorithm, **changes)))


def unused(algorithm: str, **changes: Any) -> dict[str, str]:
    return by_part(unused_text(resolved(algorithm, **changes)))


def sources(algorithm: str, **changes: Any) -> dict[str, str]:
    return by_part(references(resolved(algorithm, **changes)))


# Parts that several algorithms share

FOUR_PROMPTS = (
    "4 prompts x 8 completions per process and optimizer step, temperature 1; each is trained on once, before the "
    "policy changes"
)
STANDARDISED = (
    "group_normalized: (R - mean_g) / (std_g + 0.0001), std with n - 1; g = the 8 completions of a prompt; one value "
    "for all tokens of a completion"
)
TOKEN_RATIO = "token: ln r = z_t, with z_t = ln(π_t / π_old,t) clamped to ±20; π_old: the policy that sampled"
OVER_STEP = "over all micro-batches and processes of the optimizer step; m = 1 at generated tokens"
TOKEN_MEAN = f"token_mean: agg(x) = Σ_i Σ_t m x / D, D = Σ_i Σ_t m, {OVER_STEP}"
MEAN_OF_MEANS = (
    "seq_mean_token_mean: agg(x) = Σ_i (Σ_t m x / Σ_t m) / D, D = the number of completions with a token, " + OVER_STEP
)
MEAN_OF_SUMS = f"seq_mean_token_sum: agg(x) = Σ_i Σ_t m x / D, D = the number of completions with a token, {OVER_STEP}"


def test_grpo_is_written_out_in_full():
    assert objective_text(resolved("grpo")) == [
        "objective: L = agg(l) + 0.04 agg(KL), minimised",
        f"sampling: {FOUR_PROMPTS}",
        "reward: score = sum of the reward functions; R = score",
        f"advantage: {STANDARDISED}",
        f"ratio: {TOKEN_RATIO}; r is 1 in value",
        "surrogate: clip: l = -o with o = min(r A, clip(r, 0.8, 1.2) A)",
        "KL: in the loss, k3: exp(-d) + d - 1, d clamped to ±20, with d = ln π - ln π_ref; coefficient 0.04",
        f"aggregation: {MEAN_OF_MEANS}",
        "gradient: through π in l, KL; constant: A, π_old, π_ref",
    ]


def test_dapo_is_written_out_in_full():
    assert objective_text(resolved("dapo", num_iterations=2, overlong_penalty_factor=0.5)) == [
        "objective: L = agg(l), minimised",
        "sampling: 4 prompts x 8 completions per process and generation, temperature 1; 2 optimizer steps on them, "
        "which train on each 2 times",
        "dynamic sampling: prompts are sampled until the batch is full of those with max - min of the score without "
        "penalty > 1e-06, in at most 10 rounds, after which those found are trained on; those left over wait for the "
        "next batch with the log-probs of the policy that sampled them",
        "reward: score = sum of the reward functions + penalty; penalty = 0 for n ≤ 256 - 51; (256 - 51 - n) / 51 · "
        "0.5 "
        "from there to n = 256; -0.5 beyond, n = length in tokens; R = score",
        f"advantage: {STANDARDISED}",
        f"ratio: {TOKEN_RATIO}",
        "surrogate: clip: l = -o with o = min(r A, clip(r, 0.8, 1.28) A)",
        f"aggregation: {TOKEN_MEAN}",
        "gradient: through π in l; constant: A, π_old",
    ]


def test_dynamic_sampling_in_words():
    settings = {
        "dynamic_sampling": True,
        "dynamic_sampling_metric": "exact_match",
        "dynamic_sampling_range": [0.1, 0.9],
        "dynamic_sampling_tolerance": 0.01,
        "dynamic_sampling_max_rounds": 1,
        "dynamic_sampling_on_exhausted": "raise",
        "dynamic_sampling_retry": 2,
    }
    assert objective("rloo", **settings)["dynamic sampling"] == (
        "prompts are sampled until the batch is full of those with max - min of the reward exact_match > 0.01 and 0.1 "
        "< its mean < 0.9, in at most 1 round, after which the run ends; those left over wait for the next batch with "
        "the log-probs of the policy that sampled them; a rejected prompt is tried again 2 times within its epoch"
    )
    assert "dynamic sampling" not in objective("rloo")
    assert unused("rloo")["dynamic sampling"].startswith("`dynamic_sampling` is false: prompts whose rewards are all")
    assert unused("reinforce")["dynamic sampling"] == "`num_generations` is 1: there is nothing to compare"
    assert "eq. 11" in sources("dapo")["dynamic sampling"]
    # A carried group's ratio leaves 1, so the clip range acts where generation is on-policy, too.
    aligned = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 1}
    assert "clip range" in unused("dapo", **aligned, dynamic_sampling=False)
    assert "clip range" not in unused("dapo", **aligned)


ROWS: dict[str, dict[str, str]] = {
    "dr_grpo": {
        "advantage": "group_centered: R - mean_g; g = the 8 completions of a prompt; one value for all tokens of a "
        "completion",
        "aggregation": "seq_mean_token_sum_norm: agg(x) = Σ_i Σ_t m x / D, D = the number of completions with a token "
        f"· 256, {OVER_STEP}",
    },
    "gspo": {
        "advantage": STANDARDISED,
        "ratio": "sequence: ln r = Σ_t m z_t / Σ_t m, one for the whole completion, with z_t = ln(π_t / π_old,t) "
        "clamped to ±20; π_old: the policy that sampled; r is 1 in value",
        "surrogate": "clip: l = -o with o = min(r A, clip(r, 0.9997, 1.0004) A)",
        "aggregation": MEAN_OF_MEANS,
    },
    "gspo_token": {
        "ratio": "sequence_token: ln r = sg(s) + z_t - sg(z_t), s = Σ_t m z_t / Σ_t m, sg = stop-gradient: the value "
        "of s, the gradient of z_t, with z_t = ln(π_t / π_old,t) clamped to ±20; π_old: the policy that sampled; r is "
        "1 in value",
    },
    "rloo": {
        "objective": "L = agg(l), minimised",
        "reward": "score = sum of the reward functions; R = score - 0.05 Σ_t m KL_t",
        "advantage": "leave_one_out: R_i - Σ_{j≠i} R_j / (n - 1) = n / (n - 1) · (R_i - mean_g), n rows in the group; "
        "g = the 8 completions of a prompt; one value for all tokens of a completion",
        "surrogate": "reinforce: l = -A ln π",
        "KL": "in the reward, k1: d, with d = ln π - ln π_ref, π as it sampled; coefficient 0.05",
        "aggregation": MEAN_OF_SUMS,
        "gradient": "through π in l; constant: A with the KL in it",
    },
    "remax": {
        "sampling": "32 prompts x 1 completion per process and optimizer step, temperature 1, and one greedy "
        "completion "
        "per prompt as its baseline; each is trained on once, before the policy changes",
        "reward": "score = sum of the reward functions; R = score - 0.05 Σ_t m KL_t",
        "advantage": "greedy_baseline: R - b, with b the reward of the greedy response; one value for all tokens of a "
        "completion",
        "surrogate": "reinforce: l = -A ln π",
    },
    "reinforce": {
        "reward": "score = sum of the reward functions; R_t = score at the last place where the mask is 1, else 0",
        "advantage": "discounted_returns: G_t = R_t + 1 · G_t', with t' the next place where the mask is 1 (G = 0 "
        "after "
        "the last one); one value per token",
        "surrogate": "reinforce: l = -A ln π",
        "aggregation": MEAN_OF_SUMS,
    },
    "reinforce_pp": {
        "reward": "score = sum of the reward functions; R_t = score at the last place where the mask is 1, else 0; "
        "less "
        "0.01 · KL_t at every t",
        "advantage": "reinforce_pp: (G - mean(G)) / sqrt(var(G) + 1e-8), statistics over the tokens of all rows, n "
        "- 1, "
        "with G_t = R_t + 1 · G_t' and t' the next generated token; one value per token",
        "ratio": TOKEN_RATIO,  # of a pass of its own: 1 up to rounding alone
        "surrogate": "clip: l = -o with o = min(r A, clip(r, 0.8, 1.2) A)",
        "KL": "in the reward, k1: d, with d = ln π - ln π_ref, π as it sampled; coefficient 0.01",
        "aggregation": TOKEN_MEAN,
        "gradient": "through π in l; constant: A with the KL in it, π_old",
    },
    "reinforce_pp_baseline": {
        "objective": "L = agg(l) + 0.01 agg(KL), minimised",
        "advantage": "reinforce_pp_baseline: a = R - mean_g on every token, then (a - mean(a)) / sqrt(var(a) + 1e-8), "
        "statistics over the tokens of all rows, n - 1; g = the 8 completions of a prompt; one value per token",
        "KL": "in the loss, k2: d² / 2, with d = ln π - ln π_ref; coefficient 0.01",
    },
    "opo": {
        "advantage": "length_weighted: R - Σ_g length · R / Σ_g length, length in generated tokens; g = the 8 "
        "completions of a prompt; one value for all tokens of a completion",
    },
    "gpg": {
        "advantage": "gpg: alpha · (R - mean_g), alpha = scorable rows / scorable rows in groups whose rewards "
        "differ; "
        "g = the 8 completions of a prompt; one value for all tokens of a completion",
    },
    "pass_at_k": {
        "advantage": "pass_at_k: a subset of 4 rows scores 1 if it holds a correct row (R > 0), and is standardised "
        "over all subsets. With n rows, f of them wrong, p = 1 - C(f, 4) / C(n, 4) and σ = sqrt(p (1 - p)): correct "
        "rows (1 - p) / σ, wrong rows (1 - p - C(f - 1, 4 - 1) / C(n - 1, 4 - 1)) / σ, and 0 for all where σ = 0; g = "
        "the 8 completions of a prompt; one value for all tokens of a completion",
    },
    "sapo": {
        "ratio": f"{TOKEN_RATIO}; r is 1 in value",
        "surrogate": "sapo: l = -g A with g = sigmoid(tau (r - 1)) · 4 / tau, whose slope at r = 1 is 1; tau = 1 "
        "where "
        "A > 0, else 1.05",
    },
    "cispo": {
        "surrogate": "cispo: l = -sg(clip(r, 0, 5)) A ln π, sg = stop-gradient",
        "aggregation": TOKEN_MEAN,
    },
    "gmpo": {
        "surrogate": "gmpo: l = -exp(Σ_t m c_t / Σ_t m) · Σ_t m A_t / Σ_t m, one for the whole completion, with c_t = "
        "min(ln r_t, 0.4) where A_t >= 0 and c_t = max(ln r_t, -0.4) where A_t < 0",
    },
    "dis": {
        "ratio": "token: ln r = z_t, with z_t = ln(π_t / π_old,t) clamped to ±20; π_old: the engine's own "
        "log-probs, or "
        "the policy that sampled where it reports none",
        "surrogate": "dis: l = -f(r) A with f(r) = r strictly inside (0.7, 6), else 0",
    },
}


@pytest.mark.parametrize("algorithm", ROWS)
def test_the_parts_of_a_row_are_written_out(algorithm: str):
    lines = objective(algorithm)
    for part, expected in ROWS[algorithm].items():
        assert lines[part] == expected


def test_every_row_is_written_out_somewhere_above():
    assert {*ROWS, "grpo", "dapo", "ppo", "dual_clip_ppo", "vapo"} == set(ALGORITHMS)


@pytest.mark.parametrize("algorithm", ["rloo", "remax", "reinforce", "opo", "gpg"])
def test_a_surrogate_without_a_ratio_has_no_line_about_it(algorithm: str):
    lines = objective(algorithm)
    assert "ratio" not in lines
    assert "π_old" not in lines["gradient"]
    assert unused(algorithm)["ratio"] == "surrogate reinforce has none"
    assert unused(algorithm)["clip range"] == "surrogate reinforce has none"
    assert not any("Schulman et al. 2017" in line for line in references(resolved(algorithm)))


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative():
    expected = "clip: l = -o with o = min(r A, clip(r, 0.8, 1.2) A); l = -max(o, 3 A) where A < 0"
    assert objective("grpo", delta=3.0)["surrogate"] == expected
    assert "dual clip" not in unused("grpo", delta=3.0)
    assert unused("grpo")["dual clip"] == "`delta` is not set"


def test_best_of_group_divides_only_if_it_normalises():
    plain = objective("grpo", advantage_estimator="best_of_group", advantage_normalize=False)["advantage"]
    scaled = objective("grpo", advantage_estimator="best_of_group", advantage_normalize=True)["advantage"]
    end = "; g = the 8 completions of a prompt; one value for all tokens of a completion"
    assert plain == "best_of_group: R_max - R_second for the best row, 0 for the others" + end
    assert scaled == (
        "best_of_group: R_max - R_second for the best row, 0 for the others; divided by (std_g + 1e-06), std with "
        "n - 1" + end
    )


# KL


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", "d, with d = ln π - ln π_ref"),
        ("abs", "|d|, with d = ln π - ln π_ref"),
        ("k2", "d² / 2, with d = ln π - ln π_ref"),
        ("k3", "exp(-d) + d - 1, d clamped to ±20, with d = ln π - ln π_ref"),
        ("k1+", "d with the gradient of k2, d ∇d, with d = ln π - ln π_ref"),
        ("k3+", "the value of k3, exp(-d) + d - 1, with the gradient of k2, d ∇d, with d = ln π - ln π_ref"),
        ("full", "Σ_v π(v) (ln π(v) - ln π_ref(v))"),
    ],
)
def test_each_kl_estimator_has_its_own_formula(estimator: str, expected: str):
    kl = objective("grpo", kl_estimator=estimator)["KL"]
    assert kl == f"in the loss, {estimator}: {expected}; coefficient 0.04"


def test_bias_correction_multiplies_the_kl_by_the_ratio():
    lines = objective("opo", kl_placement="loss", beta=0.1, use_bias_correction_kl=True)
    assert lines["KL"] == (
        "in the loss, k3: exp(-d) + d - 1, d clamped to ±20, with d = ln π - ln π_ref, all times r, whose gradient "
        "counts, too; coefficient 0.1"
    )
    assert "ratio" in lines  # the surrogate reinforce alone has none


def test_an_adaptive_coefficient_is_beta_with_its_rule():
    adaptive = {"kl_controller": "adaptive", "kl_target": 3.0, "kl_horizon": 5000.0}
    lines = objective("grpo", **adaptive)
    assert lines["objective"] == "L = agg(l) + beta agg(KL), minimised"
    assert lines["KL"].endswith(
        "beta starts at 0.04, then after each optimizer step beta ← beta · (1 + clip(kl / 3 - 1, ±0.2) · n / 5000), "
        "kl = "
        "mean over completions of Σ_t m KL_t, n = their number"
    )
    assert "Ziegler et al. 2019" in sources("grpo", **adaptive)["adaptive KL coefficient"]
    assert "adaptive KL coefficient" not in unused("grpo", **adaptive)
    assert unused("grpo")["adaptive KL coefficient"] == "`kl_controller` is fixed"


def test_an_adaptive_coefficient_of_the_reward_moves_with_the_generations():
    whole = objective("rloo", kl_controller="adaptive")
    assert whole["reward"].endswith("R = score - beta Σ_t m KL_t")
    assert "beta starts at 0.05, then after each generation beta ← " in whole["KL"]
    per_token = objective("reinforce_pp", kl_controller="adaptive")
    assert per_token["reward"].endswith("; less beta · KL_t at every t")


def test_without_beta_there_is_no_kl():
    lines = objective("grpo", beta=0.0)
    assert "KL" not in lines
    assert lines["objective"] == "L = agg(l), minimised"
    assert lines["gradient"] == "through π in l; constant: A, π_old"
    assert unused("grpo", beta=0.0)["reference model"] == "`beta` is 0"
    assert "adaptive KL coefficient" not in unused("grpo", beta=0.0)
    assert "reference model" not in unused("grpo")
    assert "KL" not in by_part(objective_text(resolved("grpo") | {"beta": 0.0}))  # as the trainer has it


# Weights and regularisers


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("token_truncate", {}, "min(q_t, 3)"),
        ("token_mask", {"min": 0.5}, "q_t if 0.5 <= q_t <= 3, else 0"),
        ("sequence_mask", {"max": 2.0}, "min(q_t, 2) if 0 <= g <= 2, else 0 for the whole completion"),
        (
            "sequence_mask",
            {"min": 0.5, "max": None},
            "min(q_t, inf) if 0.5 <= g <= inf, else 0 for the whole completion",
        ),
        ("sequence_truncate", {}, "min(g, 3) for all its tokens"),
    ],
)
def test_the_engine_correction_is_the_one_of_its_mode(mode: str, bounds: dict[str, float | None], expected: str):
    changes = {f"vllm_importance_sampling_clip_{name}": value for name, value in bounds.items()}
    # Not by PolicyConfig, which asks for vLLM to be installed.
    settings = resolved("dapo", vllm_importance_sampling_mode=mode, **changes) | {"use_vllm": True}
    lines = by_part(objective_text(settings))
    assert lines["w, engine"] == (
        f"{expected}, with q_t = π_train,t / π_engine,t and g = exp(mean over the completion of ln q_t)"
    )
    assert lines["objective"] == "L = agg(w l), minimised"
    assert lines["gradient"] == "through π in l; constant: A, π_old, w"
    assert lines["ratio"] == TOKEN_RATIO  # the old log-probs are of another pass
    assert "engine correction" in by_part(references(settings))


def test_the_engine_correction_says_why_it_is_off():
    assert unused("dapo")["engine correction"] == "`use_vllm` is false: the model itself samples"
    settings = resolved("dis") | {"use_vllm": True}
    why = by_part(unused_text(settings))["engine correction"]
    assert why == "`vllm_importance_sampling_correction` is false"
    assert "w, engine" not in by_part(objective_text(settings))


def test_the_engine_modes_are_the_trainers():
    assert CORRECTION_MODE == engine_mismatch.CORRECTION_MODE


def test_an_off_policy_mask_and_a_quantile_weight_the_policy_loss_alone():
    changes = {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.2}
    lines = objective("grpo", **changes)
    assert lines["objective"] == "L = agg(w l) + 0.04 agg(KL), minimised"
    assert lines["w, off-policy mask"] == (
        "1 where A >= 0 or mean_t(ln π_old - ln π) <= 0.05, else 0; π_old of the engine where it reports log-probs"
    )
    assert lines["w, entropy quantile"] == (
        "1 at the 20 % of tokens with the highest entropy in a micro-batch of all processes, else 0"
    )
    assert "2512.02556" in sources("grpo", **changes)["off-policy mask"]
    assert "2506.01939" in sources("grpo", **changes)["entropy quantile"]
    assert not {"off-policy mask", "entropy quantile"} & unused("grpo", **changes).keys()
    assert {"off-policy mask", "entropy quantile"} <= unused("grpo").keys()


def test_a_threshold_of_0_masks_too():
    assert "<= 0, else 0" in objective("grpo", off_policy_mask_threshold=0.0)["w, off-policy mask"]


def test_gmpo_weights_whole_completions():
    assert "geometric mean" in objective("gmpo", off_policy_mask_threshold=0.1)["w, of a completion"]
    assert "w, of a completion" not in objective("gmpo")
    assert "w, of a completion" not in objective("grpo", off_policy_mask_threshold=0.1)


def test_an_entropy_bonus_is_subtracted():
    lines = objective("grpo", entropy_coef=0.01)
    assert lines["objective"] == "L = agg(l) + 0.04 agg(KL) - 0.01 H, minimised"
    assert lines["entropy"] == "H = mean entropy of the tokens of the optimizer step, in nats"
    assert lines["gradient"] == "through π in l, KL, H; constant: A, π_old, π_ref"
    assert "entropy bonus" not in unused("grpo", entropy_coef=0.01)
    assert unused("grpo")["entropy bonus"] == "`entropy_coef` is 0"
    assert (
        "that the entropy quantile keeps" in objective("grpo", entropy_coef=0.01, top_entropy_quantile=0.5)["entropy"]
    )


def test_an_adaptive_entropy_coefficient_is_there_even_from_0():
    settings = resolved(
        "dapo",
        use_adaptive_entropy=True,
        entropy_coef_min=0.001,
        entropy_coef_max=0.5,
        entropy_coef_delta=0.002,
        entropy_target=0.3,
    )
    lines = by_part(objective_text(settings))
    assert lines["objective"] == "L = agg(l) - c H, minimised"
    assert lines["entropy"].endswith(
        "; c starts at 0, then each optimizer step moves it by 0.002 within [0.001, 0.5], up where H <= 0.3, else "
        "down; "
        "it counts as 0 while the last H is above that"
    )
    assert "2505.22312" in by_part(references(settings))["adaptive entropy"]


def test_truncated_completions_leave_mask_and_divisor():
    aggregation = objective("dapo", mask_truncated_completions=True)["aggregation"]
    assert aggregation == f"{TOKEN_MEAN}, but not of completions cut at the limit"
    assert "mask of truncated completions" not in unused("dapo", mask_truncated_completions=True)
    assert "mask of truncated completions" in unused("dapo")


# Sampling, and when the ratio is 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # 4 micro-batches of 8 rows a step: 32 rows, 4 prompts
        (
            {},
            "4 prompts x 8 completions per process and optimizer step|each is trained on once, before the policy "
            "changes",
        ),
        # generations of 16 rows, two of them per step
        (
            {"steps_per_generation": 2},
            "4 prompts x 8 completions per process and optimizer step|each is trained on once, before the policy "
            "changes",
        ),
        # 16 rows generated per step, both passes within it
        (
            {"steps_per_generation": 2, "num_iterations": 2},
            "2 prompts x 8 completions per process and optimizer step|each is trained on 2 times, before the policy "
            "changes",
        ),
        # 128 rows generated, four steps on 32 rows each
        (
            {"steps_per_generation": 16},
            "16 prompts x 8 completions per process and generation|4 optimizer steps on them, which train on each "
            "once",
        ),
        (
            {"num_iterations": 3},
            "4 prompts x 8 completions per process and generation|3 optimizer steps on them, which train on each 3 "
            "times",
        ),
        # three micro-batches generated, four trained on: a generation is spread over two steps
        (
            {"steps_per_generation": 3},
            "3 prompts x 8 completions per process and generation|0.75 optimizer steps on them, which train on each "
            "once",
        ),
        (
            {"num_generations": 16, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
            "1 prompt x 16 completions per process and optimizer step|each is trained on once, before the policy "
            "changes",
        ),
    ],
)
def test_sampling_counts_prompts_completions_and_passes(sizes: dict[str, int], expected: str):
    lines, what, then = objective("grpo", **sizes), *expected.split("|")
    assert lines["sampling"] == f"{what}, temperature 1; {then}"
    on_policy = "before the policy changes" in then
    assert lines["ratio"].endswith("r is 1 in value") is on_policy
    assert ("clip range" in unused("grpo", **sizes)) is on_policy


def test_bounds_that_are_never_reached_are_explained():
    why = (
        "since r is 1: `gradient_accumulation_steps` (4) is a multiple of `steps_per_generation` x `num_iterations` "
        "(2 x 1)"
    )
    assert unused("grpo", steps_per_generation=2)["clip range"] == f"no bound is reached, {why}"
    assert unused("sapo", steps_per_generation=2)["gate"] == f"its slope is 1, {why}"
    assert unused("sapo", steps_per_generation=2)["clip range"] == "surrogate sapo has none"
    assert "gate" not in unused("sapo", num_iterations=2)


def test_a_ratio_to_the_engine_or_to_log_probs_of_another_pass_is_not_called_1():
    for algorithm, changes in (
        ("dis", {}),
        ("reinforce_pp", {}),
        ("grpo", {"kl_placement": "reward", "kl_estimator": "k1"}),
    ):
        assert "is 1" not in objective(algorithm, **changes)["ratio"]
        assert "clip range" not in unused(algorithm, **changes)
    # the exact KL is of the logits and leaves no log-probs behind
    assert "is 1" in objective("grpo", kl_placement="reward", kl_estimator="full")["ratio"]


def test_a_group_baseline_is_missed_where_there_is_none():
    assert unused("reinforce_pp")["group baseline"] == "reinforce_pp does not compare the completions of a prompt"
    assert "group baseline" not in unused("grpo")
    assert unused("grpo")["critic"] == "the advantage is made from rewards alone"


def test_rewards_are_weighted_as_the_recipe_says():
    lines = objective("grpo", reward_weights=[1.0, 0.25])
    assert lines["reward"] == "score = sum of the reward functions, weighted 1, 0.25; R = score"


def test_normalised_scores_are_said_to_be():
    lines = objective("grpo", reward_normalization=True)
    assert lines["reward"] == (
        "score = sum of the reward functions; a reward model's is (s - reward_mean) / reward_std, by the held-out "
        "figures of its score s; R = score"
    )


# Each number of the settings is in the text

NUMBERS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    # algorithm, what makes the setting count, the setting and its value, the part, what it then says
    ("grpo", {}, {"epsilon": 0.1}, "surrogate", "clip(r, 0.9, 1.1)"),
    ("dapo", {}, {"epsilon": 0.3}, "surrogate", "clip(r, 0.7, 1.28)"),
    ("dapo", {}, {"epsilon_high": 0.35}, "surrogate", "clip(r, 0.8, 1.35)"),
    ("grpo", {}, {"delta": 4.5}, "surrogate", "max(o, 4.5 A)"),
    ("cispo", {}, {"epsilon": 0.5}, "surrogate", "clip(r, 0.5, 5)"),
    ("cispo", {}, {"epsilon_high": 2.0}, "surrogate", "clip(r, 0, 3)"),
    ("gmpo", {}, {"epsilon": 0.3}, "surrogate", "max(ln r_t, -0.3)"),
    ("gmpo", {}, {"epsilon_high": 0.5}, "surrogate", "min(ln r_t, 0.5)"),
    ("dis", {}, {"epsilon": 0.4}, "surrogate", "(0.6, 6)"),
    ("dis", {}, {"epsilon_high": 1.5}, "surrogate", "(0.7, 2.5)"),
    ("sapo", {}, {"sapo_temperature_pos": 1.5}, "surrogate", "tau = 1.5 where A > 0"),
    ("sapo", {}, {"sapo_temperature_neg": 2.5}, "surrogate", "else 2.5"),
    ("grpo", {}, {"advantage_eps": 0.001}, "advantage", "(std_g + 0.001)"),
    ("pass_at_k", {}, {"pass_k": 3}, "advantage", "C(f, 3)"),
    ("reinforce", {}, {"gamma": 0.99}, "advantage", "R_t + 0.99 · G_t'"),
    ("reinforce_pp", {}, {"gamma": 0.9}, "advantage", "R_t + 0.9 · G_t'"),
    ("grpo", {}, {"num_generations": 4}, "advantage", "g = the 4 completions"),
    ("grpo", {}, {"num_generations": 4}, "sampling", "8 prompts x 4 completions"),
    ("grpo", {}, {"temperature": 0.7}, "sampling", "temperature 0.7"),
    ("grpo", {}, {"per_device_train_batch_size": 16}, "sampling", "8 prompts"),
    ("grpo", {}, {"beta": 0.001}, "KL", "coefficient 0.001"),
    ("grpo", {}, {"beta": 0.001}, "objective", "+ 0.001 agg(KL)"),
    ("rloo", {}, {"beta": 0.2}, "reward", "score - 0.2 Σ_t m KL_t"),
    ("reinforce_pp", {}, {"beta": 0.2}, "reward", "less 0.2 · KL_t"),
    ("grpo", {"kl_controller": "adaptive"}, {"kl_target": 2.5}, "KL", "kl / 2.5 - 1"),
    ("grpo", {"kl_controller": "adaptive"}, {"kl_horizon": 800.0}, "KL", "n / 800)"),
    ("grpo", {"kl_controller": "adaptive"}, {"beta": 0.3}, "KL", "beta starts at 0.3"),
    ("dapo", {}, {"overlong_buffer": 64}, "reward", "0 for n ≤ 256 - 64"),
    ("dapo", {}, {"overlong_penalty_factor": 2.0}, "reward", "-2 beyond"),
    ("dapo", {}, {"max_completion_length": 100}, "reward", "(100 - 20 - n) / 20"),
    ("dr_grpo", {}, {"max_completion_length": 100}, "aggregation", "with a token · 100"),
    ("grpo", {}, {"off_policy_mask_threshold": 0.25}, "w, off-policy mask", "<= 0.25"),
    ("grpo", {}, {"top_entropy_quantile": 0.3}, "w, entropy quantile", "the 30 % of tokens"),
    ("grpo", {}, {"entropy_coef": 0.02}, "objective", "- 0.02 H"),
]


@pytest.mark.parametrize(("algorithm", "base", "change", "part", "expected"), NUMBERS)
def test_a_number_of_the_settings_is_in_the_text(
    algorithm: str, base: dict[str, Any], change: dict[str, Any], part: str, expected: str
):
    assert expected not in objective(algorithm, **base).get(part, "")
    assert expected in objective(algorithm, **base, **change)[part]


# References


def test_the_papers_of_an_algorithm_and_of_its_parts_are_named():
    lines = sources("gspo")
    assert lines["gspo"] == "GSPO: group sequence policy optimisation, arXiv 2507.18071"
    assert lines["ratio sequence"] == "Zheng et al. 2025, 2507.18071, eq. 7"
    assert lines["advantage group_normalized"].startswith("Shao et al. 2024, arXiv 2402.03300")
    assert lines["aggregation seq_mean_token_mean"] == "Shao et al. 2024, 2402.03300, eq. 3"
    assert "KL k3" not in lines
    assert "length penalty" not in lines
    assert "Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13" in sources("dapo")["length penalty"]
    assert sources("reinforce")["reinforce"] == "REINFORCE: reward to go, Williams 1992, doi:10.1007/BF00992696"
    assert "Ouyang et al. 2022" in sources("reinforce_pp")["KL in the reward"]


def test_parts_that_are_not_the_algorithms_own_are_named():
    changes = {"surrogate": "sapo", "aggregation": "seq_mean_token_mean"}
    assert sources("dapo", **changes)["not the algorithm's own"] == (
        "surrogate sapo for clip, aggregation seq_mean_token_mean for token_mean"
    )
    assert "not the algorithm's own" not in sources("dapo")


@pytest.mark.parametrize("function", [*advantage_estimators().values(), *surrogates().values()])
def test_every_function_that_can_be_chosen_has_a_formula_and_a_source(function: Callable[..., Any]):
    assert docstring_section(function, "Formula")
    assert docstring_section(function, "Source")


# Functions of others


def silent_advantages(rewards: Tensor, groups: Tensor, shift: float = 0.25) -> Tensor:
    """Advantages that say nothing about themselves."""
    raise NotImplementedError


def spoken_surrogate(
    logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float = 0.2, tilt: float = 0.5
) -> Any:
    """A surrogate of its own.

    Formula: l = -min(r, 1 + epsilon) A.
    Source: Nobody 2030, eq. 1.
    """
    raise NotImplementedError


def unbounded_surrogate(logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Any:
    """Formula: l = -r A."""
    raise NotImplementedError


def test_a_registered_function_explains_itself(monkeypatch: pytest.MonkeyPatch):
    row = Algorithm("own", "Own", "a note", silent_advantages, spoken_surrogate)
    monkeypatch.setitem(ALGORITHMS, "own", row)
    settings = resolved("own")
    lines = by_part(objective_text(settings))
    assert lines["advantage"].startswith("silent: no formula in its docstring [shift = 0.25]; g = the 8 completions")
    assert lines["surrogate"] == "spoken_surrogate: l = -min(r, 1.2) A [tilt = 0.5]"
    assert by_part(references(settings))["surrogate spoken_surrogate"] == "Nobody 2030, eq. 1"
    assert "advantage silent" not in by_part(references(settings))
    assert not {"clip range", "gate"} & by_part(unused_text(settings)).keys()  # nobody knows


def test_nothing_is_said_of_the_clip_range_of_a_registered_surrogate(monkeypatch: pytest.MonkeyPatch):
    row = Algorithm("own", "Own", "a note", silent_advantages, unbounded_surrogate)
    monkeypatch.setitem(ALGORITHMS, "own", row)
    assert objective("own")["surrogate"] == "unbounded_surrogate: l = -r A"
    assert "clip range" not in unused("own")


def test_nothing_heavy_is_loaded():
    code = (
        "import sys, trl_algos.objective\n"
        "heavy = {'torch', 'trl', 'transformers', 'datasets', 'peft', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
