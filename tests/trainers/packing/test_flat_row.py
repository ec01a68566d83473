"""Padded rows as one flat row, by hand."""

import pytest
import torch

from trl_algos.trainers.packing.flat_row import flat_row

# Two rows that share 11 12 13 14 (5 would be the last common token), and one on its own.
LEFT = torch.tensor([[0, 0, 11, 12, 13, 14, 15, 5, 6], [0, 11, 12, 13, 14, 15, 7, 8, 9], [0, 0, 0, 0, 0, 0, 0, 3, 4]])


def rolled(ids):
    return torch.stack([row.roll(-int((row == 0).sum())) for row in ids])


@pytest.mark.parametrize("ids", [LEFT, rolled(LEFT)], ids=["left", "right"])
def test_rows_without_sharing(ids):
    row = flat_row(ids, ids != 0, share=False, drop_last=True)
    assert row.input_ids.tolist() == [[11, 12, 13, 14, 15, 5, 11, 12, 13, 14, 15, 7, 8, 3]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 0]]
    assert row.segments.layout == ((0, (6,)), (0, (7,)), (0, (1,)))


@pytest.mark.parametrize("ids", [LEFT, rolled(LEFT)], ids=["left", "right"])
def test_rows_with_a_shared_prefix(ids):
    row = flat_row(ids, ids != 0, share=True, drop_last=True)
    assert row.input_ids.tolist() == [[3, 11, 12, 13, 14, 15, 5, 15, 7, 8]]
    assert row.position_ids.tolist() == [[0, 0, 1, 2, 3, 4, 5, 4, 5, 6]]
    assert row.segments.layout == ((0, (1,)), (4, (2, 3)))
    assert row.segments.sizes == [1, 4, 2, 3]


def test_the_last_token_stays_where_it_is_read():
    row = flat_row(LEFT, LEFT != 0, share=True, drop_last=False)
    assert row.input_ids.tolist() == [[3, 4, 11, 12, 13, 14, 15, 5, 6, 15, 7, 8, 9]]
    assert row.places[:, -1].tolist() == [8, 12, 1]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("ids", [LEFT, rolled(LEFT)], ids=["left", "right"])
def test_labels_go_out_and_values_come_back(ids, share):
    """A value that is twice the label comes back as twice the next token, and its gradient counts both rows."""
    labels = ids.masked_fill((ids == 0) | (ids == 11), -100)
    row = flat_row(ids, ids != 0, share, drop_last=True)
    flat = row.labels(labels)
    asked = flat != -100
    values = (2.0 * flat).where(asked, torch.nan).requires_grad_()
    padded = row.padded(values, labels)
    torch.testing.assert_close(padded, (2.0 * labels[:, 1:]).where(padded != 0, 0.0))
    assert (padded != 0).sum(1).tolist() == [6, 7, 1]
    padded.sum().backward()
    assert values.grad[0].tolist() == ([1, 2, 2, 2, 2, 1, 1, 1, 1, 1] if share else [1] * 14)


def test_what_needs_padded_rows():
    """A gap in a mask, and no token at all."""
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    assert flat_row(torch.ones(2, 3, dtype=torch.long), mask, share=True, drop_last=True) is None
    assert flat_row(torch.ones(2, 3, dtype=torch.long), mask * 0, share=True, drop_last=True) is None
    single = flat_row(torch.ones(2, 3, dtype=torch.long), torch.tensor([[0, 1, 0], [0, 0, 0]]), True, drop_last=False)
    assert single.places.tolist() == [[-1, 0, -1], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("lengths", "side", "flat"),
    [((100, 100), "right", False), ((100, 97), "right", False), ((100, 90), "right", True), ((100, 97), "left", True)],
)
def test_padded_rows_that_are_hardly_more(lengths, side, flat):
    """3 of 200 places are padding, or 10; on the left they would count as positions."""
    mask = (torch.arange(100)[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.stack([torch.arange(100), torch.arange(100, 200)])
    if side == "left":
        mask = mask.flip(1)
    assert (flat_row(ids, mask, share=True, drop_last=True) is not None) == flat


def test_nothing_asked_for_still_has_a_gradient():
    labels = torch.full_like(LEFT, -100)
    row = flat_row(LEFT, LEFT != 0, share=True, drop_last=True)
    values = torch.ones(1, row.input_ids.shape[1], requires_grad=True)
    row.padded(values, labels).sum().backward()
    assert values.grad.abs().sum() == 0
