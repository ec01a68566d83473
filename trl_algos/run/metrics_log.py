"""Every log entry of a run as one line of `metrics.jsonl`, which survives whatever ends the run."""

import numbers
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trl_algos.run.folder import METRICS_FILE, keep_previous, metrics_line, read_metrics, write_text

__all__ = ["MetricsLog", "read_metrics"]


class MetricsLog(TrainerCallback):
    """Writes `metrics.jsonl` into the output folder, on the first process.

    A line holds `step`, `epoch`, `time` (Unix seconds) and all numbers of a log entry. It is written whole and at
    once, so a killed run loses the line it was writing at most. A resumed run goes on in the same file: lines of steps
    after the checkpoint are cut, for these steps are taken again. A fresh run moves another run's file to `previous/`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the file end where training starts."""
        path = Path(args.output_dir) / METRICS_FILE
        if not state.is_world_process_zero or not path.is_file():
            return
        entries = read_metrics(path)
        kept = [entry for entry in entries if entry["step"] <= state.global_step]
        if state.global_step == 0 and len(kept) < len(entries):
            keep_previous(args.output_dir, [METRICS_FILE])
        else:
            # Rewritten even if nothing is cut: a torn last line would swallow the next one.
            write_text(path, "".join(map(metrics_line, kept)))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add a line."""
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"step": state.global_step, "epoch": state.epoch, "time": time.time()}
        # Opened anew for each line, the file is complete and closed whenever the run ends.
        with path.open("a", encoding="utf-8") as file:
            file.write(metrics_line(head | _numbers(logs or {}, without=head)))


def _numbers(logs: Mapping[str, Any], without: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of a log entry, and None where a metric has no value; texts and tables are left out."""
    found: dict[str, float | None] = {}
    for key, value in logs.items():
        if key in without:
            continue
        if value is None or isinstance(value, int):
            found[key] = value
        elif isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0:  # NumPy's numbers, and tensors
            found[key] = float(value)
    return found
