import io
import logging
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from trl_algos.run import progress
from trl_algos.run.progress import ProgressBar


class Stream(io.StringIO):
    """A stream that is a terminal, or is not."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Run:
    """Stands for a trainer: calls the callback as one would, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_steps: int, terminal: bool = False, **args: Any) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress, "perf_counter", lambda: self.now)
        monkeypatch.setenv("TERM", "xterm")
        self.stream = Stream(terminal)
        self.bar = ProgressBar(Console(file=self.stream, force_terminal=terminal, width=90))
        self.args = SimpleNamespace(**{"disable_tqdm": False, "log_completions": False, **args})
        self.state = SimpleNamespace(
            is_world_process_zero=True, global_step=0, max_steps=max_steps, num_input_tokens_seen=0
        )

    def begin(self) -> None:
        self.bar.on_train_begin(self.args, self.state, None)

    def step(self, seconds: float = 1.0, logs: dict[str, Any] | None = None) -> None:
        self.now += seconds
        self.state.global_step += 1
        self.bar.on_step_end(self.args, self.state, SimpleNamespace(should_log=logs is not None))
        if logs is not None:
            self.bar.on_log(self.args, self.state, None, logs=logs)

    def end(self) -> None:
        self.bar.on_train_end(self.args, self.state, None)

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


FIGURES = {
    "reward": 0.25,
    "kl": 0.0125,
    "entropy": 1.5,
    "clip_ratio/region_mean": 0.1,
    "completions/mean_length": 12.0,
    "num_tokens": 5000.0,
    "loss": 3.0,
}


def test_a_line_tells_step_times_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_steps=10)
    run.begin()
    run.step(seconds=4, logs=FIGURES)
    assert run.lines() == [
        "step 1/10  0:00:04, 0:00:36 left  "
        "reward 0.250  kl 0.013  entropy 1.500  clip 0.100  length 12.000  tokens/s 1,250"
    ]


def test_a_run_of_the_critic_alone_shows_how_much_it_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_steps=2)
    run.begin()
    run.step(logs={"value/loss": 0.2, "value/explained_variance": -0.0625})
    assert run.lines()[0].endswith("left  explained -0.062")


def test_tokens_per_second_is_the_difference_between_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log without a rollout has no count: 3,000 tokens in the 2 + 4 seconds since the last one."""
    run = Run(monkeypatch, max_steps=4)
    run.state.num_input_tokens_seen = 1000  # of the checkpoint
    run.begin()
    run.step(2, logs={"num_tokens": 2000})
    run.step(2, logs={"entropy": 1.0, "reward": None})
    run.step(4, logs={"num_tokens": 5000})
    assert [line.partition("left  ")[2] for line in run.lines()] == [
        "tokens/s 500",
        "tokens/s 500  entropy 1.000",
        "tokens/s 500  entropy 1.000",
    ]
    run.step(1, logs={"num_tokens": 7000})
    assert run.lines()[-1].endswith("tokens/s 2,000  entropy 1.000")


def test_a_line_for_each_twentieth_of_the_steps_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_steps=200)
    run.begin()
    for _ in range(47):
        run.step(0.1)
    run.end()
    assert [line.split()[1] for line in run.lines()] == ["1/200", "11/200", "21/200", "31/200", "41/200", "47/200"]


def test_a_line_for_each_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_steps=1000)
    run.begin()
    for _ in range(8):
        run.step(10)
    assert [line.split()[1] for line in run.lines()] == ["1/1000", "4/1000", "7/1000"]


def test_the_last_step_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_steps=2)
    run.begin()
    run.step(3, logs={"reward": 0.5})
    run.step(3, logs={"reward": 0.75})
    run.bar.on_log(run.args, run.state, None, logs={"train_runtime": 6.0})
    run.end()
    assert run.lines() == [
        "step 1/2  0:00:03, 0:00:03 left  reward 0.500",
        "step 2/2  0:00:06, 0:00:00 left  reward 0.750",
    ]


def test_time_left_counts_from_where_the_run_was_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_steps=1000)
    run.state.global_step = 900
    run.begin()
    run.bar.on_log(run.args, run.state, None, logs={"eval_reward": 1.0})
    run.step(50)
    assert run.lines() == ["step 901/1000  0:00:50, 1:22:30 left"]


def test_plain_lines_hold_no_control_characters_even_where_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    run = Run(monkeypatch, max_steps=2)
    run.bar = ProgressBar(Console(file=run.stream))
    run.begin()
    run.step(logs=FIGURES)
    run.step(logs=FIGURES)
    run.end()
    assert len(run.lines()) == 2
    assert all(character.isprintable() for line in run.lines() for character in line)


@pytest.mark.parametrize("terminal", [False, True])
def test_it_is_silent_when_told_so_and_on_other_processes(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    for silent in ({"disable_tqdm": True}, {"zero": False}):
        run = Run(monkeypatch, max_steps=1, terminal=terminal, **silent)
        run.state.is_world_process_zero = silent.get("zero", True)
        run.begin()
        run.step(logs=FIGURES)
        run.end()
        assert run.stream.getvalue() == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_steps=4, terminal=True)
    with run.bar:
        run.begin()
        # The cursor is back at once, so that a killed process leaves one.
        begun = run.stream.getvalue()
        assert begun.rindex("\x1b[?25h") > begun.rindex("\x1b[?25l")
        run.step(5, logs=FIGURES)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", run.stream.getvalue().split("\r")[-1])
    assert re.search(r"^1/4 ━+.* 0:00:15 left\s*\nreward 0\.250  kl 0\.013 .*tokens/s 1,000", last)


@pytest.mark.parametrize("why", ["tables", "dumb"])
def test_a_terminal_gets_lines_where_a_bar_would_be_torn(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    run = Run(monkeypatch, max_steps=4, terminal=True, log_completions=why == "tables")
    monkeypatch.setenv("TERM", "dumb" if why == "dumb" else "xterm")
    run.begin()
    run.step(5)
    run.end()
    assert run.stream.getvalue() == "step 1/4  0:00:05, 0:00:15 left\n"


def test_the_streams_and_log_handlers_are_given_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Stream(terminal=True))
    monkeypatch.setattr(sys, "stderr", Stream(terminal=True))
    stdout, stderr = sys.stdout, sys.stderr
    handler = logging.StreamHandler(stderr)
    logger = logging.getLogger("test_progress")
    logger.addHandler(handler)
    run = Run(monkeypatch, max_steps=4, terminal=True)

    def interrupted() -> None:
        with run.bar:
            run.begin()
            assert sys.stdout is not stdout
            assert handler.stream is sys.stderr is not stderr
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    logger.removeHandler(handler)
    assert sys.stdout is stdout
    assert sys.stderr is handler.stream is stderr
    run.step()  # no bar any more, and no error either
    assert run.stream.getvalue().count("\x1b[?25h") >= run.stream.getvalue().count("\x1b[?25l")


def test_a_stream_that_leads_to_a_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Stream(terminal=False))
    stdout = sys.stdout
    run = Run(monkeypatch, max_steps=4, terminal=True)
    with run.bar:
        run.begin()
        assert sys.stdout is stdout


def test_a_second_training_replaces_the_bar_of_one_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_steps=4, terminal=True)
    run.begin()
    first = run.bar._bar
    run.begin()
    assert not first.live.is_started
    assert run.bar._bar is not first
    run.end()
    assert run.bar._bar is None


SCRIPT = """
import logging, sys
from types import SimpleNamespace as Space
from trl_algos.run.progress import ProgressBar
logging.basicConfig()
bar, args = ProgressBar(), Space(disable_tqdm=False)
state = Space(is_world_process_zero=True, global_step=0, max_steps=3, num_input_tokens_seen=0)
bar.on_train_begin(args, state, None)
state.global_step = 1
bar.on_step_end(args, state, Space(should_log=False))
print("a printed line")
logging.warning("a logged line")
raise RuntimeError("a training that fails")
"""


def test_on_a_real_terminal_other_output_stays_whole_and_the_cursor_visible() -> None:
    """Without the context, too: what is printed goes above the bar, and the interpreter's exit closes it."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        output += part
    os.close(ours)
    assert process.wait(timeout=60) == 1
    text = output.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    for line in ("a printed line", "WARNING:root:a logged line", "RuntimeError: a training that fails"):
        assert re.search(rf"[\r\n]{re.escape(line)} *\r?\n", plain), plain
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "1/3" in plain[plain.rindex("a training that fails") :]
