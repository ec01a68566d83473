"""One progress bar with the figures that matter, in the place of a dictionary per log line."""

import sys
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

_SHOWN = {"reward": "reward", "kl": "kl", "entropy": "entropy", "completions/mean_length": "tokens"}


class ProgressBar(TrainerCallback):
    """Shows optimizer steps and the last logged reward, KL, entropy and length, on the first process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar."""
        if state.is_world_process_zero:
            # A log file gets a line now and then, a terminal a moving bar.
            self._shown: dict[str, str] = {}
            interval = 0.1 if sys.stderr.isatty() else 10.0
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", mininterval=interval)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if state.is_world_process_zero:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show the latest figures."""
        if state.is_world_process_zero and hasattr(self, "_bar"):
            # A step that only trains has no reward of its own: the last one stays.
            self._shown |= {
                name: f"{logs[key]:.3f}" for key, name in _SHOWN.items() if logs and logs.get(key) is not None
            }
            self._bar.set_postfix(self._shown, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if state.is_world_process_zero:
            self._bar.close()
