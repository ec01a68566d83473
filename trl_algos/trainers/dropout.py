"""Dropout that TRL's `disable_dropout` does not reach."""

from torch import nn


def disable_functional_dropout(model: nn.Module) -> None:
    """Set dropout rates kept as plain numbers to 0: TRL's `disable_dropout` reaches `nn.Dropout` modules alone."""
    for module in model.modules():
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
