"""Optimizer steps on preference pairs: what stops a run before its weights move, or before it has done nothing."""

from typing import Any

import torch
from torch import Tensor

from trl_algos.errors import ConfigError
from trl_algos.trainers.best_metric import check_best_metric
from trl_algos.trainers.finite import check_grad_norm, check_loss
from trl_algos.trainers.preference.pairs import nothing_left


class CheckedSteps:
    """Part of a trainer of TRL's: losses and gradients that are not finite, and data without a pair, end a run.

    transformers logs a loss that is NaN as the mean of those before, and goes on.
    """

    accelerator: Any
    args: Any
    dropped_pairs: dict[str, dict[str, int]]
    state: Any
    _step_loss: Tensor | None = None

    _look_at = "A log-prob of a pair is NaN or infinite: lower `learning_rate`, or look at the model's dtype."
    """What the message of a loss that is not finite says besides."""

    def _check_loss(self, loss: Tensor) -> None:
        """Collect the loss of a micro-batch, 0-d; with the last of an optimizer step all ranks look at their sum."""
        known = torch.zeros_like(loss) if self._step_loss is None else self._step_loss
        self._step_loss = known + loss.detach()
        if self.accelerator.sync_gradients:
            total, self._step_loss = self._step_loss, None
            check_loss(self, self.accelerator.reduce(total.float(), reduction="sum").item(), self._look_at)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        check_grad_norm(self, norm, "model")
        return norm

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """transformers', which are some.

        Raises:
            ConfigError: the first step has none, after which transformers would save what was not trained.
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if not batches and self.state.global_step == 0:
            raise ConfigError([nothing_left("train", self.dropped_pairs.get("train", {}))])
        return batches, items

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        check_best_metric(self.args, metrics)
        return super()._determine_best_metric(metrics, trial)  # type: ignore[misc]
