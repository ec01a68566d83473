"""An objective with a critic in words: each line written by hand here."""

from typing import Any

import pytest
from test_objective import OVER_STEP, SIZES, TOKEN_MEAN, TOKEN_RATIO, by_part

from trl_algos import PolicyConfig
from trl_algos.objective import objective_text, references, unused_text


def resolved(algorithm: str, **changes: Any) -> dict[str, Any]:
    settings = {"output_dir": "x", "use_cpu": True, "bf16": False, "learning_rate": 1e-5, **SIZES, **changes}
    return vars(PolicyConfig(algorithm=algorithm, **settings))


def objective(algorithm: str, **changes: Any) -> dict[str, str]:
    return by_part(objective_text(resolved(algorithm, **changes)))


def unused(algorithm: str, **changes: Any) -> dict[str, str]:
    return by_part(unused_text(resolved(algorithm, **changes)))


WHITENED = "(A - mean(A)) / sqrt(var(A) + 1e-8), statistics over the tokens of all rows, n - 1, with "
AFTER_THE_END = "t' the next generated token; V and A are 0 after the last one, where the episode is over"
CUT_OFF = "; after the last token of a truncated row V is the critic's value there"
LEARNS = "learning rate 1e-05, gradient norm at most 1, apart from the policy's"
OVER_TOKENS = "mean over the tokens of the optimizer step, over all micro-batches and processes, of"


def test_ppo_is_written_out_in_full():
    assert objective_text(resolved("ppo", critic="adapter", gae_lambda=0.9, gamma=0.99, vf_coef=0.5)) == [
        "objective: L = agg(l) + 0.5 L_V, minimised",
        "sampling: 32 prompts x 1 completion per process and generation, temperature 1; 4 optimizer steps on them, "
        "which train on each 4 times",
        "reward: score = sum of the reward functions; R_t = score at the last place where the mask is 1, else 0; less "
        "0.05 · KL_t at every t",
        f"advantage: gae: {WHITENED}A_t = δ_t + 0.99 · 0.9 · A_t', δ_t = R_t + 0.99 · V_t' - V_t, {AFTER_THE_END}; "
        "one value per token",
        f"ratio: {TOKEN_RATIO}",
        "surrogate: clip: l = -o with o = min(r A, clip(r, 0.8, 1.2) A)",
        "KL: in the reward, k1: d, with d = ln π - ln π_ref, π as it sampled; coefficient 0.05",
        "critic: adapter: a second LoRA adapter with a value head on the policy's own frozen model; " + LEARNS,
        f"returns: G_t = A_t + V_t, A_t = δ_t + 0.99 · 0.9 · A_t', δ_t = R_t + 0.99 · V_t' - V_t, {AFTER_THE_END}; V "
        "as it was when sampled",
        f"value loss: L_V = {OVER_TOKENS} 0.5 · e, e = (V - G)²; e is (V_clip - G)² where that is larger, V_clip = "
        "V_old + clamp(V - V_old, -0.2, 0.2)",
        f"aggregation: {TOKEN_MEAN}",
        "gradient: through π in l and through V in L_V; constant: A with the KL in it, π_old, V_old, G",
    ]


def test_dual_clip_ppo_is_ppo_with_a_second_bound():
    expected = objective("ppo") | {
        "surrogate": "clip: l = -o with o = min(r A, clip(r, 0.8, 1.2) A); l = -max(o, 3 A) where A < 0"
    }
    assert objective("dual_clip_ppo") == expected


def test_vapo_is_written_out():
    lines = objective("vapo", critic_warmup_steps=50)
    assert lines["objective"] == "L = agg(l) + 0.1 L_V + 0.1 L_NLL, minimised"
    assert lines["advantage"] == (
        f"length_adaptive_gae: {WHITENED}A_t = δ_t + 1 · λ · A_t', δ_t = R_t + 1 · V_t' - V_t, {AFTER_THE_END}; λ = "
        "max(0, 1 - 1 / (0.05 · n)), n = generated tokens of the row; one value per token"
    )
    assert lines["surrogate"] == "clip: l = -o with o = min(r A, clip(r, 0.8, 1.28) A)"
    assert lines["critic"].endswith(f"{LEARNS}; alone for the first 50 optimizer steps")
    assert "A_t = δ_t + 1 · 1 · A_t'" in lines["returns"]
    assert lines["positive NLL"] == (
        "L_NLL = mean of -ln π over the tokens of the optimizer step, over all micro-batches and processes, that are "
        "of completions whose score without length penalty is above 0"
    )
    assert lines["gradient"] == "through π in l, L_NLL and through V in L_V; constant: A, π_old, V_old, G"
    assert OVER_STEP in lines["aggregation"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "adapter where LoRA is trained, else separate; "),
        ({"critic": "separate"}, "separate: a model of its own with a value head, from that of the policy; "),
        ({"critic_model_name_or_path": "a/b"}, "separate: a model of its own with a value head, from a/b; "),
        ({"critic": "shared"}, "shared: a value head on the policy's model, whose weights its loss does not train; "),
        (
            {"critic": "shared", "critic_trunk_gradient": True},
            "shared: a value head on the policy's model, whose weights its loss trains, too; ",
        ),
    ],
)
def test_forms_of_the_critic(settings: dict[str, Any], words: str):
    assert objective("ppo", **settings)["critic"] == words + LEARNS


@pytest.mark.parametrize("algorithm", ["ppo", "vapo"])
def test_a_truncated_completion_goes_on_from_its_value(algorithm: str):
    lines = objective(algorithm, bootstrap_truncated=True)
    assert lines["advantage"].endswith(CUT_OFF + "; one value per token")
    assert lines["returns"].endswith(CUT_OFF + "; V as it was when sampled")
    assert not any(CUT_OFF in line for line in objective(algorithm).values())
    assert "bootstrap" not in unused(algorithm, bootstrap_truncated=True)
    assert unused(algorithm)["bootstrap"].startswith("`bootstrap_truncated` is false")
    assert "bootstrap" not in unused(algorithm, mask_truncated_completions=True)


def test_value_loss_without_a_clip_range():
    assert objective("ppo", value_clip_range=0)["value loss"] == f"L_V = {OVER_TOKENS} 0.5 · e, e = (V - G)²"
    assert unused("ppo", value_clip_range=0)["value clipping"] == "`value_clip_range` is 0"
    assert "value clipping" not in unused("ppo")


def test_parts_that_a_critic_makes_optional():
    assert unused("ppo")["positive NLL"] == "`positive_nll_coef` is 0"
    assert unused("ppo")["critic warm-up"] == "`critic_warmup_steps` is 0"
    assert "positive NLL" not in objective("ppo")
    assert "positive NLL" not in unused("vapo")
    assert "critic warm-up" not in unused("vapo", critic_warmup_steps=1)
    assert not {"critic", "critic warm-up"} & unused("vapo", critic_warmup_steps=1).keys()


def test_without_a_critic_nothing_is_said_of_its_parts():
    lines = unused("grpo")
    assert lines["critic"] == "the advantage is made from rewards alone"
    assert not {"bootstrap", "value clipping", "critic warm-up", "positive NLL"} & lines.keys()
    assert not {"critic", "returns", "value loss", "positive NLL"} & objective("grpo").keys()


def test_papers_of_a_critic():
    lines = by_part(references(resolved("vapo")))
    assert "1707.06347" in lines["value loss"]
    assert "2504.05118" in lines["positive NLL"]
    assert "2504.05118" in lines["advantage length_adaptive_gae"]
    assert "1506.02438" in by_part(references(resolved("ppo")))["advantage gae"]
    assert not {"value loss", "positive NLL"} & by_part(references(resolved("grpo"))).keys()
