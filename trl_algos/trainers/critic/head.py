"""The value head: one number per hidden state."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ValueHead(nn.Linear):
    """Linear map from a hidden state to its value, in float32 whatever the model's precision.

    The weights start at N(0, 1 / (width + 1)²) and the bias at 0: a final norm leaves hidden states of length
    about √width, so first values lie near 0, about 1 / √width from it, and differ between states from the start.

    Args:
        width: of a hidden state.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.normal_(self.weight, std=1 / (width + 1))
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., width) hidden states to (...) values."""
        with torch.autocast(hidden.device.type, enabled=False):
            weight = self.weight.to(
                torch.promote_types(self.weight.dtype, torch.float32)
            )  # sharded, it may be narrower
            return F.linear(hidden.to(weight), weight, self.bias.to(weight)).squeeze(-1)
