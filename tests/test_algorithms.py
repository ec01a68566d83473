"""What must hold for every row of the table, with the maths alone: no trainer, no model."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from trl_algos.algorithms import ALGORITHMS, ROLLOUT_FIELDS, Algorithm, is_token_level, surrogate_settings, table_cells
from trl_algos.core import aggregation_count, masked_sum, policy_loss, token_rewards
from trl_algos.core import surrogates as core_surrogates

ROOT = Path(__file__).parents[1]
WIDTH = 6
SETTING_OF = {"eps": "advantage_eps", "normalize": "advantage_normalize", "k": "pass_k", "gamma": "gamma"}
SETTING_OF |= {"gae_lambda": "gae_lambda", "alpha": "length_adaptive_alpha"}

every_row = pytest.mark.parametrize("row", ALGORITHMS.values(), ids=ALGORITHMS)


def rows_with(**fields: Any) -> pytest.MarkDecorator:
    """The rows whose fields have these values; an empty selection is an error of the test."""
    chosen = {key: row for key, row in ALGORITHMS.items() if all(getattr(row, n) == v for n, v in fields.items())}
    assert chosen
    return pytest.mark.parametrize("row", chosen.values(), ids=chosen)


# Six completions of two prompts: tool gaps in rows 1 and 4, one empty row.
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1],
        [1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 0],
    ]
)
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
REWARDS = torch.tensor([1.0, -0.25, -0.5, 0.0, -1.0, 2.0])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def row_settings(row: Algorithm) -> dict[str, Any]:
    """Settings of a row's surrogate, from its defaults."""
    return {name: row.defaults[name] for name in surrogate_settings(row.surrogate) if name in row.defaults}


def estimate(
    row: Algorithm,
    rewards: Tensor = REWARDS,
    mask: Tensor = MASK,
    groups: Tensor = GROUPS,
    values: float | Tensor = 0.25,
) -> Tensor:
    """A row's advantages of a rollout; the greedy completion of every prompt has reward 0.5, a critic says 0.25."""
    fields = {
        "rewards": rewards,
        "groups": groups,
        "lengths": mask.sum(1),
        "mask": mask,
        "token_rewards": token_rewards(rewards, mask),
        "baselines": torch.full_like(rewards, 0.5),
        "values": torch.as_tensor(values).expand(mask.shape),
        "bootstrap": None,
    }
    assert fields.keys() <= set(ROLLOUT_FIELDS)
    parameters = inspect.signature(row.advantage).parameters
    settings = {name: row.defaults[setting] for name, setting in SETTING_OF.items() if setting in row.defaults}
    settings |= {"k": 2} if "k" in parameters else {}
    return row.advantage(**{name: value for name, value in {**fields, **settings}.items() if name in parameters})


def some_advantages(row: Algorithm) -> Tensor:
    """(6,) of both signs; (6, T) where the row's estimator gives one per token."""
    return (
        random(6, WIDTH, seed=5) if is_token_level(row.advantage) else torch.tensor([1.0, -0.5, 2.0, 1.0, -1.5, 0.3])
    )


def loss_and_gradient(
    row: Algorithm, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor = MASK, **more: Any
) -> tuple[Tensor, Tensor]:
    logps = logps.detach().clone().requires_grad_()
    loss = policy_loss(
        logps,
        old_logps,
        advantages,
        mask,
        surrogate=row.surrogate,
        ratio_level=row.ratio_level,
        aggregation=row.aggregation,
        **row_settings(row),
        **more,
    ).loss
    loss.backward()
    return loss.detach(), logps.grad


def nearby(row: Algorithm) -> tuple[Tensor, Tensor]:
    """Log-probs of a policy that moved a little, some ratios inside and some outside the row's clip range."""
    old = -1 - random(6, WIDTH, seed=1).abs()
    return old + row.defaults.get("epsilon", 0.2) * random(6, WIDTH, seed=2), old


# The gradient


def token_weights(mode: str) -> Tensor:
    """(B, T) by hand: how much one token's loss counts. Five of the six rows and fifteen tokens are trained on."""
    kept, lengths = MASK.float(), MASK.sum(1, keepdim=True).clamp(min=1)
    weights = {
        "token_mean": kept / 15,
        "seq_mean_token_mean": kept / lengths / 5,
        "seq_mean_token_sum": kept / 5,
        "seq_mean_token_sum_norm": kept / 5 / WIDTH,
    }
    return weights[mode]


@every_row
def test_on_policy_gradient_is_the_policy_gradient(row: Algorithm):
    """At ratio 1 every surrogate has the gradient of -A · logp, averaged as the row says: (6+3+2+3+1) = 15 tokens."""
    assert int(MASK.sum()) == 15
    logps, advantages = -random(6, WIDTH, seed=3).abs(), some_advantages(row)
    _, gradient = loss_and_gradient(row, logps, logps, advantages)
    per_token = advantages if advantages.dim() == 2 else advantages[:, None]
    torch.testing.assert_close(gradient, -per_token * token_weights(row.aggregation), rtol=1e-5, atol=1e-7)


@every_row
def test_what_is_masked_reaches_neither_loss_nor_gradient(row: Algorithm):
    (logps, old), advantages = nearby(row), some_advantages(row)
    expected, expected_gradient = loss_and_gradient(row, logps, old, advantages)
    assert expected_gradient[MASK == 1].abs().sum() > 0
    for poison in (torch.nan, torch.inf, -torch.inf, 1e30):
        poisoned = [torch.where(MASK.bool(), x, poison) for x in (logps, old)]
        loss, gradient = loss_and_gradient(row, *poisoned, advantages)
        assert torch.equal(loss, expected)
        assert torch.equal(gradient, expected_gradient)
        assert gradient[MASK == 0].count_nonzero() == 0


@every_row
@pytest.mark.parametrize("sizes", [[1] * 6, [2, 2, 2], [3, 3], [1, 5], [4, 2]], ids=str)
def test_micro_batches_add_up(row: Algorithm, sizes: list[int]):
    """Loss and gradient with the divisor of the whole batch, in whatever shares: accumulation steps or ranks."""
    (logps, old), advantages = nearby(row), some_advantages(row)
    divisor = aggregation_count(MASK, row.aggregation, max_length=8)
    expected, expected_gradient = loss_and_gradient(row, logps, old, advantages, normalizer=divisor)
    parts = zip(*(x.split(sizes) for x in (logps, old, advantages, MASK)), strict=True)
    losses, gradients = zip(*(loss_and_gradient(row, *part, normalizer=divisor) for part in parts), strict=True)
    torch.testing.assert_close(sum(losses), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(gradients), expected_gradient, rtol=1e-5, atol=1e-7)
    counts = [aggregation_count(part, row.aggregation, max_length=8) for part in MASK.split(sizes)]
    assert sum(counts) == divisor


@every_row
def test_padding_columns_change_nothing(row: Algorithm):
    """Nor do they where the divisor of Dr. GRPO is the fixed length 8 rather than the width."""
    (logps, old), advantages = nearby(row), some_advantages(row)

    def result(padding: int) -> tuple[Tensor, Tensor]:
        def wide(x: Tensor, value: float) -> Tensor:
            return torch.nn.functional.pad(x, (0, padding), value=value)

        mask = wide(MASK, 0)
        divisor = aggregation_count(mask, row.aggregation, max_length=8)
        rows = wide(advantages, 7.0) if advantages.dim() == 2 else advantages
        loss, gradient = loss_and_gradient(row, wide(logps, 99.0), wide(old, -99.0), rows, mask, normalizer=divisor)
        return loss, gradient[:, :WIDTH]

    torch.testing.assert_close(result(5), result(0), rtol=1e-6, atol=1e-8)
    wider = estimate(row, mask=torch.nn.functional.pad(MASK, (0, 5)))
    torch.testing.assert_close(wider[:, :WIDTH] if wider.dim() == 2 else wider, estimate(row), rtol=1e-6, atol=1e-7)


@every_row
def test_the_order_of_rows_does_not_matter(row: Algorithm):
    (logps, old), advantages = nearby(row), some_advantages(row)
    order = torch.tensor([4, 0, 3, 5, 1, 2])  # also mixes the groups
    loss, gradient = loss_and_gradient(row, logps, old, advantages)
    moved, moved_gradient = loss_and_gradient(row, logps[order], old[order], advantages[order], MASK[order])
    torch.testing.assert_close(moved, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moved_gradient, gradient[order], rtol=1e-6, atol=1e-8)
    moved_advantages = estimate(row, REWARDS[order], MASK[order], GROUPS[order])
    torch.testing.assert_close(moved_advantages, estimate(row)[order], rtol=1e-5, atol=1e-6)


# Advantages

# Not those whose mean is weighted by length, or of subsets, or taken out of whitened tokens.
CENTRED = {
    key: row
    for key, row in ALGORITHMS.items()
    if "groups" in row.needs and key not in ("opo", "pass_at_k", "reinforce_pp_baseline")
}
WITH_BASELINE = {key: row for key, row in ALGORITHMS.items() if row.needs or key == "reinforce_pp"}


@pytest.mark.parametrize("row", WITH_BASELINE.values(), ids=WITH_BASELINE)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.7, -1e4 / 3])
def test_equal_rewards_give_exactly_zero(row: Algorithm, value: float):
    """In each group its own reward for estimators with groups; a critic who knows it; else the same everywhere."""
    if row.needs == ("greedy_baseline",):
        value = 0.5  # the reward of the greedy completions
    rewards = torch.full((6,), value)
    if "groups" in row.needs and row.key != "reinforce_pp_baseline":
        rewards[3:] += 1.0
    assert estimate(row, rewards, values=value).count_nonzero() == 0


@pytest.mark.parametrize("row", CENTRED.values(), ids=CENTRED)
def test_advantages_of_a_group_sum_to_zero(row: Algorithm):
    """For a baseline that is the group's mean, whatever the size of the group."""
    groups = torch.tensor([0, 1, 1, 0, 1, 1])
    sums = torch.zeros(2).index_add(0, groups, estimate(row, groups=groups))
    torch.testing.assert_close(sums, torch.zeros(2), rtol=0, atol=1e-6)


@every_row
def test_unequal_rewards_give_a_signal(row: Algorithm):
    """The check above is not met by an estimator that always says 0; the better completion is never the worse one."""
    advantages = estimate(row)
    sums = advantages if advantages.dim() == 1 else masked_sum(advantages, MASK, dim=1) / MASK.sum(1).clamp(min=1)
    assert sums.abs().max() > 0.1
    assert sums[0] > sums[1] >= sums[2]
    assert sums[5] > sums[4]


@every_row
def test_advantages_are_detached_and_of_the_right_shape(row: Algorithm):
    rewards = REWARDS.clone().requires_grad_()
    advantages = estimate(row, rewards)
    assert not advantages.requires_grad
    assert advantages.shape == ((6, WIDTH) if is_token_level(row.advantage) else (6,))
    if advantages.dim() == 2:
        assert advantages[MASK == 0].count_nonzero() == 0


@every_row
def test_an_unscored_completion_biases_nobody(row: Algorithm):
    """A reward of NaN: this row gets 0, the others what they would get without it."""
    rewards = REWARDS.clone()
    rewards[1] = torch.nan
    others = [0, 2, 3, 4, 5]
    advantages = estimate(row, rewards)
    expected = estimate(row, REWARDS[others], MASK[others], GROUPS[others])
    torch.testing.assert_close(advantages[others], expected, rtol=1e-5, atol=1e-6)
    if row.key != "reinforce":  # discounted returns have no notion of a score; the trainer leaves the row out
        assert advantages[1].count_nonzero() == 0


# Clipping

# Two rows of two tokens, A = 1 and A = -1; the first token moved up, the second down, both by more than any bound.
FAR = torch.tensor([[2.0, -2.0], [2.0, -2.0]])
SIGNS = torch.tensor([1.0, -1.0])
WHOLE = torch.ones(2, 2, dtype=torch.int64)


def moved_gradient(row: Algorithm, log_ratio: Tensor) -> Tensor:
    old = torch.full_like(log_ratio, -3.0)
    return loss_and_gradient(row, old + log_ratio, old, SIGNS, WHOLE)[1]


@rows_with(surrogate=core_surrogates.clip, ratio_level="token")
def test_clipped_tokens_of_ppo_have_no_gradient(row: Algorithm):
    """A > 0 is clipped above, A < 0 below; the other two keep a gradient: pulling back is always allowed.

    But for dual clip, which lets a ratio beyond 3 be where A < 0: e is below, e² above.
    """
    for size in (1.0, 2.0):
        gradient = moved_gradient(row, FAR * size / 2)
        assert gradient[0, 0] == 0
        assert gradient[1, 1] == 0
        assert gradient[0, 1] < 0
        assert (gradient[1, 0] > 0) == (size == 1.0 or row.key != "dual_clip_ppo")


@rows_with(surrogate=core_surrogates.clip, ratio_level="sequence")
def test_clipped_sequences_have_no_gradient(row: Algorithm):
    """Both tokens of a row share one ratio: 1.05 and 1 / 1.05, far outside GSPO's range of a few ten-thousandths."""
    up = torch.full((2, 2), 0.05)
    assert moved_gradient(row, up)[0].count_nonzero() == 0
    assert (moved_gradient(row, up)[1] > 0).all()
    assert moved_gradient(row, -up)[1].count_nonzero() == 0
    assert (moved_gradient(row, -up)[0] < 0).all()


@rows_with(surrogate=core_surrogates.clip, ratio_level="sequence_token")
def test_clipped_sequences_have_no_gradient_in_the_token_form(row: Algorithm):
    up = torch.tensor([[0.2, -0.1], [0.2, -0.1]])  # means 0.05
    assert moved_gradient(row, up)[0].count_nonzero() == 0
    assert (moved_gradient(row, up)[1] > 0).all()


@rows_with(surrogate=core_surrogates.cispo)
def test_clipped_tokens_of_cispo_keep_their_gradient(row: Algorithm):
    """It is -A times the bounded ratio over 4 tokens: e² = 7.39 is capped at 5, e⁻² has no lower bound."""
    bounded = torch.tensor([[5.0, FAR[0, 1].exp()]]).expand(2, 2)
    torch.testing.assert_close(moved_gradient(row, FAR), -SIGNS[:, None] * bounded / 4)


@rows_with(surrogate=core_surrogates.dis)
def test_dis_drops_both_sides(row: Algorithm):
    """Outside the band nothing is left, whatever the sign: e² = 7.39 > 6 and e⁻² = 0.14 < 0.7."""
    assert moved_gradient(row, FAR).count_nonzero() == 0
    inside = torch.full((2, 2), 0.5)
    torch.testing.assert_close(moved_gradient(row, inside), -SIGNS[:, None] * inside.exp() / 4)


@rows_with(surrogate=core_surrogates.gmpo)
def test_clipped_tokens_of_gmpo_have_no_gradient(row: Algorithm):
    """In log space at 0.4: row 1 keeps its second token with the row's ratio exp((0.4 - 2) / 2), row 2 its first."""
    ratio = torch.tensor([-0.8, 0.8]).exp()
    expected = torch.tensor([[0.0, -ratio[0]], [ratio[1], 0.0]]) / 4
    torch.testing.assert_close(moved_gradient(row, FAR), expected)


@rows_with(surrogate=core_surrogates.sapo)
def test_sapo_fades_instead_of_clipping(row: Algorithm):
    """d gate / d r = 4 s (1 - s) with s = sigmoid(tau (r - 1)); tau 1 where A > 0, 1.05 elsewhere."""
    ratio = FAR.exp()
    gate = torch.sigmoid(torch.tensor([[1.0], [1.05]]) * (ratio - 1))
    torch.testing.assert_close(moved_gradient(row, FAR), -SIGNS[:, None] * 4 * gate * (1 - gate) * ratio / 4)


@rows_with(surrogate=core_surrogates.reinforce)
def test_reinforce_has_no_ratio(row: Algorithm):
    assert torch.equal(moved_gradient(row, FAR), moved_gradient(row, torch.zeros(2, 2)))


# What derives from the table


@every_row
def test_every_row_has_a_recipe(row: Algorithm):
    recipe = yaml.safe_load((ROOT / "recipes" / f"{row.key}.yaml").read_text())
    assert recipe["algorithm"] == row.key


@every_row
def test_every_row_is_in_the_readme(row: Algorithm):
    assert " | ".join(table_cells(row).values()) in (ROOT / "README.md").read_text()


def test_the_readme_lists_no_other_row():
    lines = (ROOT / "README.md").read_text().splitlines()
    start = lines.index(f"| {' | '.join(table_cells(ALGORITHMS['grpo']))} |")
    table = lines[start + 2 : start + 2 + len(ALGORITHMS) + 1]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[:-1]] == list(ALGORITHMS)
    assert not table[-1].startswith("|")


@every_row
def test_a_row_says_what_it_is(row: Algorithm):
    assert ALGORITHMS[row.key] is row
    assert row.title
    assert row.differs
    number = row.paper.replace(".", "", 1)
    assert (number.isdigit() and len(number) == 9) or "Williams 1992" in row.paper
