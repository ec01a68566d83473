"""The exact KL, made a few tokens at a time: value and gradient by formula, in double precision."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_algos.core import full_kl
from trl_algos.trainers import reference_kl


@pytest.mark.parametrize("tokens", [1, 3, 4, 10, 11, 100])
def test_a_few_tokens_at_a_time(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL = Σ_v p (ln p - ln q), whose gradient in the logits z is p (ln p - ln q - KL)."""
    monkeypatch.setattr(reference_kl, "TOKENS_AT_A_TIME", tokens)
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 5, 7, dtype=torch.float64)).requires_grad_()
    reference, weights = 3 * torch.randn(2, 5, 7, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    (kl,) = reference_kl.token_wise(lambda own, other: (full_kl(own[None], other[None])[0],), logits, reference)
    (kl * weights).sum().backward()
    p, difference = logits.detach().softmax(-1), logits.detach().log_softmax(-1) - reference.log_softmax(-1)
    expected = (p * difference).sum(-1)
    torch.testing.assert_close(kl.detach(), expected, rtol=1e-12, atol=1e-12)
    gradient = weights[..., None] * p * (difference - expected[..., None])
    torch.testing.assert_close(logits.grad, gradient, rtol=1e-12, atol=1e-12)


def test_the_temperature_divides_both() -> None:
    trainer: Any = SimpleNamespace(temperature=0.5)
    logits, reference = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.5, 0.0]]])
    found = reference_kl._full_kl(trainer, logits, reference)
    p, q = torch.tensor([0.0, 2.0]).softmax(0), torch.tensor([1.0, 0.0]).softmax(0)
    torch.testing.assert_close(found, (p * (p / q).log()).sum().view(1, 1), rtol=1e-6, atol=1e-6)
