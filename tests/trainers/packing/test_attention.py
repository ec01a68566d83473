"""Segment attention against softmax over an explicit mask."""

import math

import pytest
import torch
from torch import nn

from trl_algos.trainers.packing.attention import Segments, segment_attention

LAYOUT = ((3, (4, 2)), (0, (5,)), (2, ()))
# (sequence, position) of each token of the flat row: a prefix counts for all sequences that go on from it.
OWNERS = [{1, 2}] * 3 + [{1}] * 4 + [{2}] * 2 + [{3}] * 5 + [{4}] * 2
POSITIONS = [0, 1, 2, 3, 4, 5, 6, 3, 4, 0, 1, 2, 3, 4, 0, 1]
L = len(POSITIONS)


def oracle(q, k, v, scaling, window, softcap):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    for i in range(L):
        for j in range(L):
            distance = POSITIONS[i] - POSITIONS[j]
            seen = OWNERS[i] <= OWNERS[j] and distance >= 0 and (window is None or distance < window)
            if not seen:
                scores[..., i, j] = -math.inf
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 2, 4, 100])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_outputs_and_gradients(scaling, window, softcap):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, L, 8, dtype=torch.float64) for heads in (4, 2, 2))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    found, weights = segment_attention(
        nn.Module(), q, k, v, None, segments=Segments(LAYOUT), scaling=scaling, sliding_window=window, softcap=softcap
    )
    expected = oracle(q, k, v, scaling, window, softcap)
    assert weights is None
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    direction = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, tensors, direction), torch.autograd.grad(expected, tensors, direction), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"s_aux": torch.ones(4)}, "given s_aux"),
        ({"position_bias": torch.ones(1)}, "given position_bias"),
        ({"is_causal": False}, "not causal"),
        ({"segments": Segments(((0, (L + 1,)),))}, "other tokens"),
    ],
)
def test_what_would_be_left_out_is_refused(settings, message):
    q = torch.zeros(1, 4, L, 8)
    with pytest.raises(NotImplementedError, match=message):
        segment_attention(nn.Module(), q, q, q, None, **{"segments": Segments(LAYOUT), **settings})
    segment_attention(nn.Module(), q, q, q, None, segments=Segments(LAYOUT), s_aux=None, position_ids=torch.ones(1))
