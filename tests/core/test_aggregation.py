import pytest
import torch

from trl_algos.core import AGGREGATIONS, aggregate_loss, aggregation_count

NAN = float("nan")


def oracle(loss, mask, mode, divisor=None):
    """Loops over rows and tokens, written from the definitions."""
    rows = []
    for loss_row, mask_row in zip(loss.tolist(), mask.tolist(), strict=True):
        kept = [x for x, m in zip(loss_row, mask_row, strict=True) if m]
        if kept:
            rows.append(kept)
    tokens = sum(len(row) for row in rows)
    if mode == "token_mean":
        total, count = sum(sum(row) for row in rows), tokens
    elif mode == "seq_mean_token_mean":
        total, count = sum(sum(row) / len(row) for row in rows), len(rows)
    elif mode == "seq_mean_token_sum":
        total, count = sum(sum(row) for row in rows), len(rows)
    else:
        total, count = sum(sum(row) for row in rows), len(rows) * mask.shape[1]
    return total / (count if divisor is None else divisor)


@pytest.fixture
def batch():
    """Four rows of which one is empty, gaps included."""
    generator = torch.Generator().manual_seed(0)
    loss = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    return loss, mask


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_equals_the_loop(batch, mode):
    loss, mask = batch
    torch.testing.assert_close(aggregate_loss(loss, mask, mode).item(), oracle(loss, mask, mode), rtol=1e-12, atol=0)
    given = aggregate_loss(loss, mask, mode, normalizer=0.7).item()
    torch.testing.assert_close(given, oracle(loss, mask, mode, 0.7), rtol=1e-12, atol=0)


def test_hand_computed():
    # Row sums 6 and 4 over 3 tokens and 1 token, width 3.
    loss, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    expected = {
        "token_mean": 10 / 4,
        "seq_mean_token_mean": (2 + 4) / 2,
        "seq_mean_token_sum": 10 / 2,
        "seq_mean_token_sum_norm": 10 / 6,
    }
    for mode, value in expected.items():
        torch.testing.assert_close(aggregate_loss(loss, mask, mode), torch.tensor(value))


def test_golden(golden):
    loss = torch.tensor(golden["inputs"]["loss_matrix"], dtype=torch.float64)
    mask = torch.tensor(golden["inputs"]["mask"])
    for entry in golden["aggregation"]:
        mode = entry["mode"].replace("-", "_")
        # The reference divides this mode by the width alone.
        normalizer = 6.0 if mode == "seq_mean_token_sum_norm" else None
        tolerance = 1e-7 if mode == "seq_mean_token_mean" else 1e-9
        assert abs(aggregate_loss(loss, mask, mode, normalizer).item() - entry["value"]) < tolerance


def test_dr_grpo_divides_by_a_constant_length():
    # Lengths 2 and 4, A = +1 and -1 at ratio 1, so the loss is -A: (-2 + 4) / (2 * 8).
    loss = torch.tensor([[-1.0, -1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    wider = torch.nn.functional.pad(loss, (0, 3)), torch.nn.functional.pad(mask, (0, 3))
    for x, m in ((loss, mask), wider):
        torch.testing.assert_close(
            aggregate_loss(x, m, "seq_mean_token_sum_norm", normalizer=2 * 8), torch.tensor(0.125)
        )
        count = aggregation_count(m, "seq_mean_token_sum_norm", max_length=8)
        assert count.item() == 16


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_micro_batches_with_the_window_count_add_up_to_the_full_batch(batch, mode):
    loss, mask = batch
    loss.requires_grad_()
    full = aggregate_loss(loss, mask, mode)
    (expected,) = torch.autograd.grad(full, loss)
    count = sum(aggregation_count(mask[i : i + 1], mode) for i in range(4))
    parts = sum(aggregate_loss(loss[i : i + 1], mask[i : i + 1], mode, normalizer=count) for i in range(4))
    torch.testing.assert_close(parts, full, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(parts, loss)[0], expected, rtol=1e-12, atol=0)


def test_accumulated_token_mean():
    # 1, 2, 3, 4 tokens with per-token loss 1, 2, 3, 4: 30 / 10, not a mean of means.
    masks = [torch.arange(4).unsqueeze(0) < n for n in (1, 2, 3, 4)]
    count = sum(aggregation_count(mask, "token_mean") for mask in masks)
    losses = [
        aggregate_loss(torch.full((1, 4), float(n)), mask, "token_mean", count) for n, mask in enumerate(masks, 1)
    ]
    torch.testing.assert_close(sum(losses), torch.tensor(3.0))


def test_counts(batch):
    _, mask = batch
    expected = {
        "token_mean": 9,
        "seq_mean_token_mean": 3,
        "seq_mean_token_sum": 3,
        "seq_mean_token_sum_norm": 3 * 5,
    }
    for mode, value in expected.items():
        count = aggregation_count(mask, mode)
        assert count.shape == ()
        assert count.dtype == torch.float32
        assert count.item() == value


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_masked_places_reach_neither_value_nor_gradient(batch, mode, poison):
    loss, mask = batch
    expected = aggregate_loss(loss, mask, mode)
    poisoned = torch.where(mask.bool(), loss, poison).requires_grad_()
    value = aggregate_loss(poisoned, mask, mode)
    value.backward()
    assert torch.equal(value, expected)
    assert torch.equal(poisoned.grad[mask == 0], torch.zeros(11, dtype=torch.float64))
    assert (poisoned.grad[mask == 1] > 0).all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("normalizer", [None, 3.0, torch.tensor(0.0)])
def test_nothing_left_gives_zero_and_a_zero_gradient(mode, normalizer):
    loss = torch.full((2, 3), NAN, requires_grad=True)
    value = aggregate_loss(loss, torch.zeros(2, 3), mode, normalizer)
    value.backward()
    assert value.item() == 0
    assert torch.equal(loss.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_row_order_does_not_matter_and_padding_only_changes_the_width(batch, mode):
    loss, mask = batch
    expected = aggregate_loss(loss, mask, mode)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(aggregate_loss(loss[order], mask[order], mode), expected, rtol=1e-12, atol=0)
    wider = torch.nn.functional.pad(loss, (0, 5), value=NAN), torch.nn.functional.pad(mask, (0, 5))
    factor = 0.5 if mode == "seq_mean_token_sum_norm" else 1.0
    torch.testing.assert_close(aggregate_loss(*wider, mode), factor * expected, rtol=1e-12, atol=0)


def test_gradcheck(batch):
    loss, mask = batch
    loss.requires_grad_()
    for mode in AGGREGATIONS:
        assert torch.autograd.gradcheck(lambda x, mode=mode: aggregate_loss(x, mask, mode), loss)


def test_half_precision_is_summed_in_float32():
    # In bfloat16 a running sum of ones stops at 256.
    loss = torch.ones(1, 1000, dtype=torch.bfloat16)
    value = aggregate_loss(loss, torch.ones(1, 1000), "seq_mean_token_sum")
    assert value.dtype == torch.float32
    assert value.item() == 1000


def test_errors_name_the_argument():
    loss, mask = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="`mode` must be one of token_mean"):
        aggregate_loss(loss, mask, "mean")
    with pytest.raises(ValueError, match=r"`mask` must have the shape of `loss`, \(2, 3\), but has \(2, 4\)"):
        aggregate_loss(loss, torch.ones(2, 4), "token_mean")
    with pytest.raises(ValueError, match=r"`loss` must have shape \(B, T\)"):
        aggregate_loss(loss[0], mask[0], "token_mean")
    for bad in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="`normalizer` must be > 0"):
            aggregate_loss(loss, mask, "token_mean", bad)
    with pytest.raises(ValueError, match=r"`normalizer` must be a number or a 0-d tensor, but has shape \(1,\)"):
        aggregate_loss(loss, mask, "token_mean", torch.ones(1))
    with pytest.raises(ValueError, match="`max_length` must be > 0"):
        aggregation_count(mask, "seq_mean_token_sum_norm", 0)
