"""Going on from a checkpoint, for the trainers on preference pairs."""

from pathlib import Path

from trl_algos.trainers.checkpointing import WholeCheckpoints


class ExactResume(WholeCheckpoints):
    """Part of a trainer of TRL's: tokens are counted on.

    Weights, optimizer, order of the rows and random states are taken up exactly by transformers; the number of tokens
    TRL forgets.
    """

    _total_train_tokens: int

    def save_states(self, folder: Path) -> None:
        """The number of tokens, in the state that transformers saves."""
        if self._counts_for_us:
            self.state.num_input_tokens_seen = self._total_train_tokens

    def load_states(self, folder: Path) -> None:
        """The number of tokens."""
        if self._counts_for_us:
            self._total_train_tokens = self.state.num_input_tokens_seen

    @property
    def _counts_for_us(self) -> bool:
        """Whether transformers leaves its count alone, which is saved with the state."""
        return bool(self.args.include_num_input_tokens_seen == "no")
