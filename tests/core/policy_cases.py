"""Inputs that the tests of the policy loss have in common."""

import itertools

import torch

from trl_algos.core import RATIO_LEVELS, SURROGATES, policy_loss

SETTINGS = {
    "clip": {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 2.0},
    "cispo": {"epsilon": 0.2, "epsilon_high": 0.28},
    "sapo": {},
    "gmpo": {"epsilon": 0.3, "epsilon_high": 0.4},
    "dis": {"epsilon": 0.3, "epsilon_high": 0.6},
    "reinforce": {},
}
COMBINATIONS = [
    (surrogate, level)
    for surrogate, level in itertools.product(SURROGATES, RATIO_LEVELS)
    if surrogate != "gmpo" or level == "token"
]


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def random_batch():
    """Five rows, gaps and one empty row: logps, old_logps, token advantages, mask, weights."""
    generator = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(5, 6, generator=generator, dtype=torch.float64)
    logps = old + 0.5 * torch.randn(5, 6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    weights = 0.5 + torch.rand(5, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor(
        [[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 1]]
    )
    return logps, old, advantages, mask, weights


def loss_and_gradient(logps, *arguments, **settings):
    logps = logps.detach().clone().requires_grad_()
    result = policy_loss(logps, *arguments, **settings)
    result.loss.backward()
    return result, logps.grad
