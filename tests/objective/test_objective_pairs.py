"""The objective of recipes on preference pairs in words: every line with the recipe's numbers."""

import math
from typing import Any

import pytest
import torch

from trl_algos.core import dpo_loss
from trl_algos.objective import objective_text, references, unused_text
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS, preference_keys
from trl_algos.recipe.reading import read_recipe

H = "with h = (ln π_w - ln π_l) - (ln π_ref,w - ln π_ref,l), w chosen, l rejected, L(x) = -ln sigmoid({} x)"


def resolved(algorithm: str, **changes: Any) -> dict[str, Any]:
    recipe = read_recipe(None, [f"--{key}={value}" for key, value in {"algorithm": algorithm, **changes}.items()])
    return dict(recipe.values)


def by_part(lines: list[str]) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines)


def objective(algorithm: str, **changes: Any) -> dict[str, str]:
    return by_part(objective_text(resolved(algorithm, **changes)))


def unused(algorithm: str, **changes: Any) -> dict[str, str]:
    return by_part(unused_text(resolved(algorithm, **changes)))


def test_all_of_dpo() -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_length": 512}
    assert objective_text(resolved("dpo", beta=0.2, **sizes)) == [
        "objective: L = mean(l), minimised",
        "pairs: 4 x 8 micro-batches per process and optimizer step, L the mean of theirs; of prompt and completion "
        "together the beginning is kept, up to 512 tokens",
        f"loss: sigmoid: l = L(h), {H.format(0.2)}",
        "ln π: sum over the completion's tokens, the end-of-sequence token that plain text gets included",
        "reference: the model that the run starts from",
        "gradient: through π in l; constant: π_ref",
    ]


def test_all_of_a_reward_model() -> None:
    formula = (
        "mean(-q ln sigmoid(c - r - margin) - (1 - q) ln sigmoid(r - c - margin)), with q = (1 - e) p + e (1 - p)"
    )
    assert objective_text(resolved("bradley_terry", center_rewards_coefficient=0.01, label_smoothing=0.1)) == [
        f"objective: L = {formula}, e = 0.1, p = preference; p = 1 and e = 0 leave the first term; plus "
        "0.01 · mean((c + r)²); minimised",
        "pairs: 8 per process and optimizer step; pairs with a text of more than 1024 tokens are left out",
        "score: c and r: one number of a linear head at the last token of the text, padding left aside",
        "data: margin and preference are columns of the data: 0 and 1 where there are none",
        "gradient: through c and r; constant: margin, preference",
    ]
    assert "mean((c + r)²)" not in objective("bradley_terry")["objective"]


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        ("ipo", f"ipo: l = (h - 1 / (2 · 0.1))², {H.format(0.1)}"),
        ("cdpo", f"sigmoid: l = L(h), {H.format(0.1)}; (1 - e) L(h) + e L(-h) in its place, e = 0.1"),
        ("robust_dpo", f"robust: l = ((1 - e) L(h) - e L(-h)) / (1 - 2 e), e = 0.1, {H.format(0.1)}"),
        ("rpo", f"sigmoid: l = L(h), {H.format(0.1)}"),
    ],
)
def test_the_loss_of_the_others(algorithm: str, loss: str) -> None:
    assert objective(algorithm)["loss"] == loss
    over = "mean" if algorithm == "ipo" else "sum"
    assert objective(algorithm)["ln π"].startswith(f"{over} over the completion's tokens")


def minus_log_sigmoid(x: float) -> float:
    return math.log1p(math.exp(-x))


@pytest.mark.parametrize("key", preference_keys("policy"))
def test_the_formula_named_is_the_loss_that_trl_computes(key: str) -> None:
    """TRL's losses at one margin, written down from its source; `core.dpo_loss` has the formula that is shown."""
    row, h, beta = PREFERENCE_ALGORITHMS[key], 0.7, 0.1
    smoothing = row.defaults.get("label_smoothing", 0.0)
    s = row.smoothing_for_trl(smoothing)
    for_trl, against = minus_log_sigmoid(beta * h), minus_log_sigmoid(-beta * h)
    losses = {
        "sigmoid": for_trl,
        "ipo": (h - 1 / (2 * beta)) ** 2,
        "robust": ((1 - s) * for_trl - s * against) / (1 - 2 * s),
    }
    zero, margin = torch.zeros(1, dtype=torch.float64), torch.tensor([h], dtype=torch.float64)
    ours = dpo_loss(margin, zero, zero, zero, beta, smoothing, row.formula_name)
    assert ours.item() == pytest.approx(losses[row.loss_name], rel=1e-9)


def test_the_likelihood_term() -> None:
    lines = objective("rpo", nll_coef=0.5)
    assert lines["objective"] == "L = mean(l) + 0.5 NLL, minimised"
    assert lines["NLL"].startswith("-1/B sum_i (1 / T_i) sum_t mask_it logps_it, with T_i = sum_t mask_it")
    assert lines["gradient"] == "through π in l and NLL; constant: π_ref"
    assert "NLL" not in objective("dpo")
    assert unused("rpo", nll_coef=0.0)["likelihood of the chosen completion"] == "`nll_coef` is 0"
    assert unused("dpo")["likelihood of the chosen completion"] == "dpo has none; those with `nll_coef`: rpo"


@pytest.mark.parametrize(
    ("changes", "part", "says"),
    [
        ({"use_peft": True}, "reference", "the model with its adapter off"),
        ({"precompute_ref_log_probs": True}, "reference", "taken once, before training"),
        (
            {"sync_ref_model": True, "ref_model_mixup_alpha": 0.75, "ref_model_sync_steps": 64},
            "reference",
            "each 64 optimizer steps it becomes 0.75 π + 0.25 π_ref",
        ),
        ({"f_divergence_type": "forward_kl"}, "divergence", "h = s_w - s_l with s = 1 - π_ref / π in the place of"),
        (
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.25},
            "divergence",
            "a = 0.25 in the place of",
        ),
        ({"ld_alpha": 0.5}, "ln π", "beyond the length of the pair's shorter completion count 0.5 times"),
        ({"use_weighting": True}, "objective", "L = mean(weight l), minimised"),
        ({"use_weighting": True}, "weight", "product over both sides"),
        ({"use_weighting": True}, "gradient", "constant: π_ref, weight"),
        ({"max_length": "null"}, "pairs", "prompt and completion as long as they are"),
        ({"truncation_mode": "keep_end"}, "pairs", "the end is kept"),
    ],
)
def test_settings_of_trl_that_change_it(changes: dict[str, Any], part: str, says: str) -> None:
    assert says in objective("dpo", **changes)[part]


def test_what_is_not_used() -> None:
    assert unused("bradley_terry") == {
        "sampling": "pairs are as the data have them",
        "reference model": "scores are compared with each other alone",
        "label noise": "`label_smoothing` is 0: labels count as right",
        "centring": "`center_rewards_coefficient` is 0: a number added to all scores changes nothing",
    }
    assert "label noise" not in unused("bradley_terry", label_smoothing=0.1)
    assert "centring" not in unused("bradley_terry", center_rewards_coefficient=0.1)
    assert unused("dpo")["label noise"] == "dpo has none; those with `label_smoothing`: cdpo, robust_dpo"
    assert unused("cdpo", label_smoothing=0.0)["label noise"] == "`label_smoothing` is 0"
    gone = {
        "f_divergence_type=js_divergence": "other divergences",
        "ld_alpha=0.5": "length desensitisation",
        "use_weighting=true": "weights by the policy's own probability",
        "sync_ref_model=true": "moving reference",
        "router_aux_loss_coef=0.1": "router loss",
    }
    for setting, part in gone.items():
        assert part in unused("dpo")
        assert part not in unused("dpo", **dict([setting.split("=")]))


@pytest.mark.parametrize("key", PREFERENCE_ALGORITHMS)
def test_papers(key: str) -> None:
    row, lines = PREFERENCE_ALGORITHMS[key], references(resolved(key))
    assert row.title in lines[0]
    assert row.paper in lines[0]
    assert ("differs from the paper" in by_part(lines)) == (row.differs != "none")
    assert any(line.startswith("loss ") for line in lines)


def test_papers_of_settings() -> None:
    changes = {"ld_alpha": 0.5, "use_weighting": True, "f_divergence_type": "forward_kl", "sync_ref_model": True}
    text = "\n".join(references(resolved("dpo", **changes)))
    for paper in ("2305.18290", "2409.06411", "2406.11827", "2309.16240", "2404.09656"):
        assert paper in text
