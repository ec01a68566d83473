"""Going on from a checkpoint, for the trainers on preference pairs."""

from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from trl_algos.trainers.adapters import same_dtypes
from trl_algos.trainers.checkpoint_states import check_states, warn_of_lost_states


class ExactResume:
    """Part of a trainer of TRL's: a checkpoint that was cut short is refused, and tokens are counted on.

    Weights, optimizer, order of the rows and random states are taken up exactly by transformers; the number of tokens
    TRL forgets.
    """

    args: Any
    model: Any
    state: Any
    _total_train_tokens: int

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's.

        Raises:
            ConfigError: the checkpoint is not whole.
        """
        trainer: Any = self
        last = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        if last:
            check_states(last, bool(trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled))
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._counts_for_us:
            self.state.num_input_tokens_seen = self._total_train_tokens
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with same_dtypes(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with same_dtypes(self.model):
            super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            warn_of_lost_states(Path(checkpoint), self.args.world_size)
            if self._counts_for_us:
                self._total_train_tokens = self.state.num_input_tokens_seen

    @property
    def _counts_for_us(self) -> bool:
        """Whether transformers leaves its count alone, which is saved with the state."""
        return bool(self.args.include_num_input_tokens_seen == "no")
