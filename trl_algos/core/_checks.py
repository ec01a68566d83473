"""Argument checks shared by the core: every message names the argument, what was got and the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_algos.core._torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def check_rows(name: str, x: Tensor, rows: int | None = None) -> None:
    """Raise `ValueError` unless `x` is a 1-D tensor (of `rows` elements, where given)."""
    if x.dim() != 1 or (rows is not None and x.shape[0] != rows):
        expected = "(N,)" if rows is None else f"({rows},)"
        raise ValueError(f"`{name}` must have shape {expected}, one value per row, but has {tuple(x.shape)}.")


def check_matrix(name: str, x: Tensor) -> None:
    """Raise `ValueError` unless `x` is a (B, T) tensor."""
    if x.dim() != 2:
        raise ValueError(f"`{name}` must have shape (B, T), rows by tokens, but has {tuple(x.shape)}.")


def check_same_shape(**tensors: Tensor) -> None:
    """Raise `ValueError` unless all `tensors` have the shape of the first one."""
    (first, reference), *others = tensors.items()
    for name, x in others:
        if x.shape != reference.shape:
            raise ValueError(
                f"`{name}` must have the shape of `{first}`, {tuple(reference.shape)}, but has {tuple(x.shape)}."
            )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, but is {value!r}.")


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 where it is already: half precision is too coarse for sums and ratios."""
    return x if x.dtype == torch.float64 else x.float()
