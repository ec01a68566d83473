"""How much a model computes."""

from typing import Any

import torch


class TokenCounter:
    """Counts the tokens that go through a model's first layer, and the passes."""

    def __init__(self, model: Any) -> None:
        self.tokens = self.passes = 0
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        layers[0].register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.passes += 1
        self.tokens += hidden.shape[0] * hidden.shape[1]
