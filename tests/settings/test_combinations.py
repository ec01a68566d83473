"""Every part of the objective with every other: it either trains or is refused by name."""

import itertools
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_algos import ConfigError, PolicyConfig, Rollout
from trl_algos.algorithms import ROLLOUT_FIELDS, advantage_estimators, surrogates
from trl_algos.core import AGGREGATIONS, RATIO_LEVELS, policy_loss

# What the parts need that GRPO, the row they are exchanged in, does not say by itself.
SETTINGS: dict[str, dict[str, Any]] = {"pass_at_k": {"pass_k": 2}}
ROWS, WIDTH = 8, 5


def config(folder: Path, **settings: Any) -> PolicyConfig:
    return PolicyConfig(output_dir=str(folder), use_cpu=True, bf16=False, num_generations=4, beta=0.0, **settings)


def rollout() -> Rollout:
    torch.manual_seed(0)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.long)
    mask[1, 3:] = mask[5, 1] = mask[6] = 0
    scores = torch.tensor([1.0, 0.0, torch.nan, 0.5, 1.0, 1.0, 0.0, 0.0])
    return Rollout(
        scores=scores,
        length_penalty=torch.zeros(ROWS),
        scores_per_func=scores[:, None],
        groups=torch.arange(ROWS) // 4,
        lengths=mask.sum(1),
        mask=mask,
        baselines=torch.full((ROWS,), 0.25),
        values=torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH),
    )


def refused(advantage: str, surrogate: str, level: str) -> bool:
    """The combinations without a meaning, in words: no ratio to take a level of; no row advantage for a row ratio."""
    per_token = advantage in (
        "discounted_returns",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gae",
        "length_adaptive_gae",
    )
    return (surrogate in ("reinforce", "gmpo") and level != "token") or (level == "sequence" and per_token)


@pytest.mark.parametrize("surrogate", surrogates())
@pytest.mark.parametrize("advantage", advantage_estimators())
def test_advantage_by_surrogate(advantage: str, surrogate: str, tmp_path: Path) -> None:
    sampled = rollout()
    old_logps = -torch.rand(ROWS, WIDTH) - 0.1
    for level, aggregation in itertools.product(RATIO_LEVELS, AGGREGATIONS):
        parts = {
            "advantage_estimator": advantage,
            "surrogate": surrogate,
            "ratio_level": level,
            "aggregation": aggregation,
        }
        if refused(advantage, surrogate, level):
            with pytest.raises(ConfigError, match="`ratio_level`"):
                config(tmp_path, **parts, **SETTINGS.get(advantage, {}))
            continue
        # Wide enough for the ratios below, whatever the level: a clipped term has no gradient to look at.
        bounds = {"epsilon": 0.5, "epsilon_high": 0.5} if surrogate in ("clip", "cispo", "gmpo", "dis") else {}
        args = config(tmp_path, **parts, **bounds, **SETTINGS.get(advantage, {}))
        function = args.advantage_function
        inputs = {name: getattr(sampled, name) for name in ROLLOUT_FIELDS if name in signature(function).parameters}
        advantages = torch.where(sampled.scorable, function(**inputs, **args.advantage_arguments).T, 0.0).T
        logps = (old_logps + 0.05 * torch.randn(ROWS, WIDTH)).requires_grad_()
        loss = policy_loss(
            logps,
            old_logps,
            advantages,
            sampled.mask,
            surrogate=args.surrogate_function,
            ratio_level=level,
            aggregation=aggregation,
            **args.surrogate_arguments,
        ).loss
        loss.backward()
        assert loss.isfinite(), parts
        assert logps.grad is not None
        assert logps.grad.isfinite().all(), parts
        assert logps.grad.any(), parts
        assert not logps.grad[sampled.mask == 0].any(), parts
        assert not logps.grad[2].any(), parts  # not scorable


def test_a_rollout_without_a_baseline_is_the_same_rollout() -> None:
    """`replace` keeps a rollout usable: it is what subclasses use to change a part of it."""
    changed = replace(rollout(), baselines=None)
    assert changed.baselines is None
    assert changed.rewards.nan_to_num(9.0).tolist() == rollout().scores.nan_to_num(9.0).tolist()
