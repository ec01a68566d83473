import math

import pytest
import torch
from oracles_policy import policy_loss_oracle
from policy_cases import COMBINATIONS, SETTINGS, double, loss_and_gradient, random_batch

from trl_algos.core import (
    AGGREGATIONS,
    SURROGATES,
    SurrogateTerms,
    gae,
    kl_estimate,
    policy_loss,
    rollout_correction,
    token_rewards,
)
from trl_algos.core.surrogates import clip

NAN = float("nan")


@pytest.fixture
def batch():
    return random_batch()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("surrogate", "level"), COMBINATIONS)
def test_equals_the_loop(batch, surrogate, level, aggregation, weighted):
    logps, old, advantages, mask, weights = batch
    weights = weights if weighted else None
    settings = {"surrogate": surrogate, "ratio_level": level, "aggregation": aggregation, **SETTINGS[surrogate]}
    result = policy_loss(logps, old, advantages, mask, weights=weights, **settings)
    lists = [x.tolist() for x in (logps, old, advantages, mask)]
    expected = policy_loss_oracle(*lists, weights=weights.tolist() if weighted else None, **settings)
    torch.testing.assert_close(result.loss.item(), expected, rtol=1e-12, atol=1e-12)
    assert result.per_token.shape == mask.shape
    assert torch.equal(result.per_token[mask == 0], torch.zeros(16, dtype=torch.float64))
    if aggregation == "token_mean":
        torch.testing.assert_close(result.per_token.sum() / mask.sum(), result.loss, rtol=1e-12, atol=1e-12)


def golden_settings(entry):
    """Our arguments for one entry of the reference, which names its settings differently."""
    name, theirs = entry["name"], entry["settings"]
    band = {
        "epsilon": theirs.get("clip_ratio_low") or theirs["clip_ratio"],
        "epsilon_high": theirs.get("clip_ratio_high") or theirs["clip_ratio"],
    }
    aggregation = entry["aggregation"].replace("-", "_")
    ours = {"aggregation": aggregation, "normalizer": 6.0 if aggregation == "seq_mean_token_sum_norm" else None}
    if name == "sapo":
        temperatures = {"sapo_temperature_pos": theirs["tau_pos"], "sapo_temperature_neg": theirs["tau_neg"]}
        return {**ours, "surrogate": "sapo", **temperatures}
    if name == "gmpo":
        # A mean over rows, whatever aggregation it is asked for.
        return {"surrogate": "gmpo", "aggregation": "seq_mean_token_mean", **band}
    if name == "cispo":
        return {**ours, "surrogate": "cispo", **band}
    level = "sequence_token" if name.startswith("gspo") else "token"
    return {**ours, "ratio_level": level, "delta": theirs.get("clip_ratio_c"), **band}


def test_golden(golden):
    inputs = {name: double(golden["inputs"][name]) for name in ("logps", "old_logps", "rollout_weights")}
    mask = double(golden["inputs"]["mask"])
    assert len(golden["policy_losses"]) == 14
    for entry in golden["policy_losses"]:
        settings = golden_settings(entry)
        levels = ["sequence", "sequence_token"] if entry["name"] == "gspo" else [settings.get("ratio_level", "token")]
        for level in levels:
            result, gradient = loss_and_gradient(
                inputs["logps"],
                inputs["old_logps"],
                double(golden["inputs"][entry["advantages"]]),
                mask,
                weights=inputs["rollout_weights"] if entry["rollout_weights"] else None,
                **{**settings, "ratio_level": level},
            )
            tolerance = 1e-7 if settings["aggregation"] == "seq_mean_token_mean" else 1e-9
            assert abs(result.loss.item() - entry["loss"]) < tolerance
            torch.testing.assert_close(gradient, double(entry["grad_logps"]), rtol=0, atol=tolerance)
            clip_high, clip_low = (result.metrics[f"clip_ratio/{side}_mean"].item() for side in ("high", "low"))
            theirs = entry["metrics"]
            if entry["name"] == "gmpo":
                # They count A < 0 beyond either bound, we only beyond the one that acts.
                assert abs(clip_high - theirs["pg_clipfrac"]) < 1e-7
                assert clip_low < theirs["pg_clipfrac_lower"]
            elif level != "sequence":  # there we count rows
                assert abs(clip_high + clip_low - theirs["pg_clipfrac"]) < 1e-7
                assert abs(result.metrics["clip_ratio/dual_mean"].item() - theirs["pg_clipfrac_lower"]) < 1e-7


def test_gmpo_weights_a_row_by_the_geometric_mean_of_its_weights():
    logps = double([[0.1, -0.2], [0.3, 0.0]])
    mask, weights = torch.tensor([[1, 1], [1, 0]]), double([[0.5, 2.0], [0.7, 9.0]])
    settings = {"surrogate": "gmpo", "aggregation": "seq_mean_token_mean"}
    plain = policy_loss(logps, 0 * logps, double([1.0, 1.0]), mask, **settings).per_token
    weighted = policy_loss(logps, 0 * logps, double([1.0, 1.0]), mask, weights=weights, **settings).per_token
    torch.testing.assert_close(weighted, plain * double([[1.0], [0.7]]), rtol=1e-12, atol=0)
    dropped = policy_loss(logps, 0 * logps, double([1.0, 1.0]), mask, weights=double([[0, 2.0], [1, 0]]), **settings)
    torch.testing.assert_close(dropped.per_token, plain * double([[0.0], [1.0]]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_gspo_sequence_ratio(aggregation):
    logps = double([[0.2, -0.1, 0.2, 9.0], [0.6, 0.6, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    settings = {"ratio_level": "sequence", "epsilon": 0.2, "epsilon_high": 0.28, "aggregation": aggregation}
    result, gradient = loss_and_gradient(logps, 0 * logps, double([1.0, -2.0]), mask, **settings)
    row_terms = [-1.105171, 3.644238]
    torch.testing.assert_close(
        result.per_token, double([[row_terms[0]] * 3 + [0], [row_terms[1]] * 2 + [0, 0]]), rtol=0, atol=1e-6
    )
    assert result.metrics["clip_ratio/high_mean"].item() == 0
    if aggregation == "token_mean":  # weighted by length: the loss this level should not be used with
        assert abs(result.loss.item() - (3 * row_terms[0] + 2 * row_terms[1]) / 5) < 1e-6
    else:
        assert abs(result.loss.item() - 1.269533) < 1e-6
        expected = double([[-0.184195] * 3 + [0], [0.911059] * 2 + [0, 0]])
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
        assert torch.equal(gradient[mask == 0], torch.zeros(3, dtype=torch.float64))


def test_dual_clip():
    ratios, advantages = double([[5, 2, 1, 5, 0.5, 0.5, 0.1]]), double([[-1, -1, 1, 1, -1, 1, 2]])
    result, gradient = loss_and_gradient(
        ratios.log(), 0 * ratios, advantages, torch.ones(1, 7), epsilon=0.2, delta=3.0
    )
    torch.testing.assert_close(result.per_token, double([[3.0, 2.0, -1.0, -1.2, 0.8, -0.5, -0.2]]))
    assert gradient[0, 0] == 0


def test_sapo():
    ratios, advantages = double([[1, 1.5, 0.5, 1.5]]), double([[2, 1, -1, -0.5]])
    result = policy_loss(ratios.log(), 0 * ratios, advantages, torch.ones(1, 4), surrogate="sapo")
    torch.testing.assert_close(result.loss.item(), -0.969277, rtol=0, atol=1e-6)


def test_kl_is_charged_once():
    """In the reward or in the loss: the same response, log-prob -1 twice, reference -1.5, score 1, beta 0.1."""
    logps, ref_logps = double([[-1.0, -1.0]]), double([[-1.5, -1.5]])
    mask, score = torch.ones(1, 2), double([1.0])
    in_reward = token_rewards(score, mask, kl_estimate(logps, ref_logps, "k1"), 0.1)
    advantages, _ = gae(in_reward, torch.zeros_like(logps), mask, 1.0, 1.0)
    torch.testing.assert_close(policy_loss(logps, logps, advantages, mask).loss.item(), -0.925)

    advantages, _ = gae(token_rewards(score, mask), torch.zeros_like(logps), mask, 1.0, 1.0)
    loss = policy_loss(logps, logps, advantages, mask).loss + 0.1 * kl_estimate(logps, ref_logps, "k3").mean()
    torch.testing.assert_close(loss.item(), -0.989347, rtol=0, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("mode", ["tis", "icepop", "sequence_mask"])
def test_rollout_correction_in_the_loss(mode, aggregation):
    """Dropped tokens stay in the divisor, and a log ratio of 100 changes nothing."""
    ln2 = math.log(2)
    log_engine = torch.tensor([[0, 0.1, -0.1], [2, 2, 2], [3 * ln2, -2 * ln2, -ln2]])
    logps, mask = torch.zeros(3, 3), torch.ones(3, 3)
    weights = rollout_correction(log_engine, mask, mode, 0.5, 2.0)
    settings = {"aggregation": aggregation}
    result, gradient = loss_and_gradient(logps, logps, torch.ones(3), mask, weights=weights, **settings)
    sums = {"tis": 3.010008 + 6 + 2.75, "icepop": 3.010008 + 0.5, "sequence_mask": 3.010008 + 2.75}
    # All rows have three tokens, so both aggregations divide the sum by nine.
    assert abs(result.loss.item() + sums[mode] / 9) < 1e-6
    torch.testing.assert_close(gradient, -weights / 9)

    log_engine[1, 1] = 100.0
    extreme = rollout_correction(log_engine, mask, mode, 0.5, 2.0)
    again, same_gradient = loss_and_gradient(logps, logps, torch.ones(3), mask, weights=extreme, **settings)
    assert torch.equal(again.loss, result.loss)
    assert torch.equal(same_gradient, gradient)


def test_a_function_serves_as_surrogate(batch):
    logps, old, advantages, mask, _ = batch

    def squared(logps, log_ratio, advantages, mask, *, scale):
        flags = torch.zeros_like(log_ratio, dtype=torch.bool)
        return SurrogateTerms(scale * log_ratio.square() * advantages, flags, flags, flags, ~flags)

    result = policy_loss(logps, old, advantages, mask, surrogate=squared, scale=3.0)
    expected = (3 * (logps - old).square() * advantages)[mask == 1].mean()
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="`scale`: missing for the surrogate squared, whose settings are: scale"):
        policy_loss(logps, old, advantages, mask, surrogate=squared)
    by_name = policy_loss(logps, old, advantages, mask, epsilon=0.1).loss
    assert torch.equal(policy_loss(logps, old, advantages, mask, surrogate=clip, epsilon=0.1).loss, by_name)

    def free(logps, log_ratio, advantages, mask, **settings):
        return squared(logps, log_ratio, advantages, mask, **settings)

    assert torch.equal(policy_loss(logps, old, advantages, mask, surrogate=free, scale=3.0).loss, result.loss)


def test_a_surrogate_sees_zeros_at_masked_places_and_detached_advantages():
    seen = {}

    def spy(logps, log_ratio, advantages, mask):
        seen.update(logps=logps, log_ratio=log_ratio, advantages=advantages)
        return SURROGATES["reinforce"](logps, log_ratio, advantages, mask)

    x = double([[1.0, NAN], [NAN, NAN]])
    mask = torch.tensor([[1, 0], [0, 0]])
    policy_loss(x, 0.5 * x, x.clone().requires_grad_(), mask, surrogate=spy)
    assert {name: value.tolist() for name, value in seen.items()} == {
        "logps": [[1, 0], [0, 0]],
        "log_ratio": [[0.5, 0], [0, 0]],
        "advantages": [[1, 0], [0, 0]],
    }
    assert not seen["advantages"].requires_grad


def test_errors_name_the_argument():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="`surrogate` must be one of clip, cispo, sapo, gmpo, dis, reinforce"):
        policy_loss(x, x, x, x, surrogate="ppo")
    with pytest.raises(ValueError, match=r"`tau`: unknown for the surrogate clip.*: epsilon, epsilon_high, delta"):
        policy_loss(x, x, x, x, tau=1.0)
    with pytest.raises(ValueError, match="`epsilon`: unknown for the surrogate reinforce, whose settings are: none"):
        policy_loss(x, x, x, x, surrogate="reinforce", epsilon=0.2)
    with pytest.raises(ValueError, match="`epsilon`, `epsilon_high`: missing for the surrogate cispo"):
        policy_loss(x, x, x, x, surrogate="cispo")
    for level in ("sequence", "sequence_token"):
        with pytest.raises(ValueError, match="`ratio_level` must be 'token' for the surrogate gmpo"):
            policy_loss(x, x, x, x, surrogate="gmpo", ratio_level=level)
    with pytest.raises(ValueError, match="`ratio_level` must be one of"):
        policy_loss(x, x, x, x, ratio_level="row")
    with pytest.raises(ValueError, match="`aggregation` must be one of"):
        policy_loss(x, x, x, x, aggregation="mean")
    for shape in ((3,), (3, 1), (2, 2), (2, 3, 1)):
        with pytest.raises(ValueError, match=r"`advantages` must have one value per row or per token"):
            policy_loss(x, x, torch.zeros(shape), x)
    for shape in ((2,), (3, 1), (2, 2)):
        with pytest.raises(ValueError, match=r"`weights` must have one value per row or per token"):
            policy_loss(x, x, x, x, weights=torch.zeros(shape))
    with pytest.raises(ValueError, match="`old_logps` must have the shape of `logps`"):
        policy_loss(x, x[:, :1], x, x)


@pytest.mark.parametrize("surrogate", ["clip", "reinforce", "gmpo"])
def test_a_batch_without_rows(surrogate: str) -> None:
    """Nothing to learn from is a loss of 0, and metrics of 0."""
    empty = torch.zeros(0, 3)
    result = policy_loss(empty.requires_grad_(), empty, torch.zeros(0), empty, surrogate=surrogate)
    assert result.loss == 0
    assert all(value == 0 for value in result.metrics.values())
