"""Curves of a run as a PNG."""

from pathlib import Path
from typing import Any

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward",)),
    ("KL to the reference (nats)", ("kl",)),
    ("KL of the update (nats)", ("policy/approx_kl",)),
    ("entropy (nats per token)", ("entropy",)),
    ("completion length (tokens)", ("completions/mean_length",)),
    ("clip fraction", ("clip_ratio/region_mean",)),
)
"""Title of each panel and the logged metrics that it shows."""


def plot_run(log_history: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw what a run logged over its optimizer steps.

    Args:
        log_history: `trainer.state.log_history`.
        path: PNG file to write.
        title: heading of the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [(name, keys) for name, keys in PANELS if any(_points(log_history, key) for key in keys)]
    columns = 3
    rows = max(1, -(-len(panels) // columns))
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 2.9 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, keys) in zip(axes.flat, panels, strict=False):
        for key in keys:
            points = _points(log_history, key)
            steps, values = [step for step, _ in points], [value for _, value in points]
            axis.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=0.8, label="logged")
            axis.plot(steps, _smoothed(values), color="tab:blue", linewidth=1.6, label="smoothed")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.25)
        axis.set_xlabel("optimizer step", fontsize=9)
    if panels:
        axes[0, 0].legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _points(log_history: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(entry["step"], entry[key]) for entry in log_history if entry.get(key) is not None]


def _smoothed(values: list[float], share: float = 0.05) -> list[float]:
    """Mean over a window around each point, about `share` of all points wide and cut off at the ends."""
    reach = int(share * len(values) / 2)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
