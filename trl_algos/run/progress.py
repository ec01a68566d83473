"""Progress of a run with the figures that matter: a live bar on a terminal, now and then a plain line elsewhere."""

import atexit
import logging
import sys
from time import perf_counter
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from transformers import TrainerCallback

SHOWN = {
    "reward": "reward",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip",
    "completions/mean_length": "length",
    "value/explained_variance": "explained",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "accuracy": "accuracy",
    "margin": "margin",
}
"""Logged metric -> what it is called here."""

TOKENS = "num_tokens"
"""TRL's count of all tokens so far, prompts and completions of all processes; only rollouts log it."""

LINE_SHARE = 0.05
"""A plain line at least each time that this share of the steps is done."""


class ProgressBar(TrainerCallback):
    """Shows steps, time left, tokens per second, and the last value of each metric in `SHOWN` that is logged.

    On the first process, on the standard error stream; `disable_tqdm: true` silences it. Where completions are
    printed too (`log_completions`), lines take the place of the bar, which the tables would tear.

    Training that raises has no hook, so use it as a context around `train()`: the bar is closed then, whatever
    happens. Without, it is closed when the interpreter exits.

    Args:
        console: Where to write; by default the standard error stream.
        seconds: A plain line at least this often, as long as steps end.
    """

    def __init__(self, console: Console | None = None, seconds: float = 30.0) -> None:
        self._console = console or Console(stderr=True)
        self._seconds = seconds
        self._bar: _Bar | None = None
        self._active = False

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar."""
        self.close()  # that of a training that raised
        self._active = state.is_world_process_zero and not args.disable_tqdm
        if not self._active:
            return
        self._figures: dict[str, str] = {}
        self._start = (perf_counter(), state.global_step)
        self._tokens = (perf_counter(), state.num_input_tokens_seen)
        self._line: tuple[float, int] | None = None
        tables = getattr(args, "log_completions", False)
        if self._console.file.isatty() and not self._console.is_dumb_terminal and not tables:
            self._bar = _Bar(self._console, state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        # Where a log follows at once, its figures belong to this step.
        if self._active and not control.should_log:
            self._show(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show the latest figures."""
        if not self._active:
            return
        logs = logs or {}
        # A step that only trains has no reward of its own: the last one stays.
        self._figures |= {name: f"{logs[key]:.3f}" for key, name in SHOWN.items() if logs.get(key) is not None}
        if logs.get(TOKENS) is not None:
            now, (then, before) = perf_counter(), self._tokens
            self._figures["tokens/s"] = f"{(logs[TOKENS] - before) / max(now - then, 1e-9):,.0f}"
            self._tokens = (now, logs[TOKENS])
        self._show(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the end and close the bar."""
        if self._active:
            self._show(state, last=True)
        self.close()

    def close(self) -> None:
        """Give the terminal back; more than once does no harm."""
        self._active = False
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, state: Any, last: bool = False) -> None:
        step, seconds = state.global_step, perf_counter() - self._start[0]
        figures = "  ".join(f"{name} {value}" for name, value in self._figures.items())
        if self._bar is not None:
            self._bar.show(step, self._time_left(state, seconds), figures)
        elif self._is_due(state, last):
            self._line = (perf_counter(), step)
            line = f"step {step}/{state.max_steps}  {_clock(seconds)}, {self._time_left(state, seconds)}  {figures}"
            self._console.file.write(line.rstrip() + "\n")
            self._console.file.flush()

    def _is_due(self, state: Any, last: bool) -> bool:
        """Whether it is time for a line: the first and the last step, and enough steps or seconds after a line."""
        if self._line is None:
            return state.global_step > self._start[1] or last
        seconds, steps = perf_counter() - self._line[0], state.global_step - self._line[1]
        return steps > 0 and (last or seconds >= self._seconds or steps >= LINE_SHARE * state.max_steps)

    def _time_left(self, state: Any, seconds: float) -> str:
        """How long the other steps take at the mean speed since the start, which is `seconds` ago."""
        steps = state.global_step - self._start[1]
        return f"{_clock(seconds / steps * (state.max_steps - state.global_step))} left" if steps else "? left"


class _Bar(Progress):
    """A bar with a line of figures under it; what else is printed meanwhile goes above."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._figures = ""
        super().__init__(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
            # A stream that leads elsewhere, say to a file, keeps what is written to it.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self.add_task("", total=total, completed=done, left="")
        stderr = sys.stderr
        self.start()
        # Not hidden, the cursor need not be brought back when the process is killed.
        console.show_cursor(True)
        _lead_handlers(stderr, sys.stderr)
        atexit.register(self.close)

    def get_renderables(self) -> Any:
        """The bar, and the figures once there are some."""
        renderables: list[RenderableType] = [self.make_tasks_table(self.tasks)]
        if self._figures:
            renderables.append(Text(self._figures, no_wrap=True, overflow="ellipsis"))
        return renderables

    def show(self, step: int, time_left: str, figures: str) -> None:
        """Move to `step`."""
        self._figures = figures
        self.update(self._task, completed=step, left=time_left)

    def close(self) -> None:
        """Leave the last state on the screen and let go of the streams."""
        atexit.unregister(self.close)
        stderr = sys.stderr
        self.stop()
        _lead_handlers(stderr, sys.stderr)


def _lead_handlers(old: Any, new: Any) -> None:
    """Make log handlers that write to the stream `old` write to `new`: they hold the stream that was there first."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
