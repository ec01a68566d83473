"""Curves of one run, or of several that are compared, as a picture."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_algos.errors import ConfigError, nearest
from trl_algos.run.comparison import Group, Run, grouped, read_runs
from trl_algos.run.reliability import Reliability, draw_reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward",)),
    ("reward of all that was sampled", ("sampling/reward",)),
    ("KL to the reference (nats)", ("kl",)),
    ("KL of the update (nats)", ("policy/approx_kl",)),
    ("entropy (nats per token)", ("entropy",)),
    ("completion length (tokens)", ("completions/mean_length",)),
    ("clip fraction", ("clip_ratio/region_mean",)),
    ("explained variance of the returns", ("value/explained_variance",)),
)
"""Title of each panel and the logged metrics that it shows."""

PAIR_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("loss",)),
    ("accuracy on the batch's pairs", ("rewards/accuracies",)),
    ("accuracy on the batch's pairs", ("accuracy",)),
    ("margin of the implicit reward", ("rewards/margins",)),
    ("margin of the scores", ("margin",)),
    ("implicit rewards", ("rewards/chosen", "rewards/rejected")),
    ("log-probabilities (nats)", ("logps/chosen", "logps/rejected")),
    ("scores", ("max_reward", "mean_reward", "min_reward")),
)
"""The same of runs on preference pairs."""

COMPARISON_FILE = "comparison.png"

_FORMATS = (".png", ".pdf", ".svg")
_COLUMNS = 3
_SMOOTHED_SHARE = 0.05


def plot_run(
    log_history: list[dict[str, Any]],
    path: Path,
    title: str,
    panels: Sequence[tuple[str, tuple[str, ...]]] = PANELS,
    reliability: Mapping[str, Reliability] | None = None,
) -> None:
    """Draw what a run logged over its optimizer steps.

    Args:
        log_history: `trainer.state.log_history`.
        path: PNG file to write.
        title: heading of the figure.
        panels: title and metrics of each panel; one without a value is left out.
        reliability: name -> reliability curve, for a last panel where there are some.
    """
    drawn = [(name, keys) for name, keys in panels if any(_points(log_history, key) for key in keys)]
    figure, axes = _figure([name for name, _ in drawn] + (["right verdicts by confidence"] if reliability else []))
    for axis, (_, keys) in zip(axes, drawn, strict=False):
        _draw_logged(axis, log_history, keys, named=len(keys) > 1 or axis is axes[0])
    if reliability:
        draw_reliability(axes[-1], reliability)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_logged(axis: "Axes", log_history: list[dict[str, Any]], keys: Sequence[str], named: bool) -> None:
    """Each metric as logged and smoothed, with a legend where asked for."""
    for key, color in zip(keys, ("tab:blue", "tab:orange", "tab:green"), strict=False):
        points = _points(log_history, key)
        steps, values = [step for step, _ in points], [value for _, value in points]
        labels = ("logged", "smoothed") if len(keys) == 1 else (None, key.rpartition("/")[2])
        axis.plot(steps, values, color=color, alpha=0.3, linewidth=0.8, label=labels[0])
        axis.plot(steps, _smoothed(values), **_line(steps), color=color, label=labels[1])
    if named:
        axis.legend(fontsize=8)


def compare_runs(
    runs: Sequence[str],
    output: str | None = None,
    metrics: Sequence[str] | None = None,
    by: Sequence[str] | None = None,
) -> Path:
    """Draw several runs into one picture, with a colour for each group of runs that differ in their seeds alone.

    A group of several runs is drawn as the mean of their curves, with a band from the lowest to the highest, over the
    steps that all of them have; between logged steps a curve is a straight line. Curves are smoothed first.

    Args:
        runs: Run folders.
        output: File to write, overwritten if it exists; by its name a PNG, PDF or SVG. By default `comparison.png`
            in the current folder, or `comparison-2.png` and so on where there is one already.
        metrics: Logged metrics to draw; by default those of `PANELS` that were logged.
        by: Settings that make a group; by default all except seeds, run name and output folder.

    Returns:
        The file written.

    Raises:
        ConfigError: A folder, metric, setting or output cannot be used.
    """
    problems = _output_problems(output)
    read = read_runs(runs)
    panels = _panels(read, metrics, problems)
    if problems:
        raise ConfigError(problems)
    groups = grouped(read, by)
    colors = _colors(len(groups))
    figure, axes = _figure([title for title, _ in panels])
    for axis, (_, key) in zip(axes, panels, strict=True):
        for color, group in zip(colors, groups, strict=True):
            _draw_group(axis, group, key, color)
    _add_legend(figure, colors, [_legend_label(group, [key for _, key in panels]) for group in groups])
    path = Path(output) if output else _free_path(Path(COMPARISON_FILE))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError([f"`output`: {str(path)!r} cannot be written: {error.strerror}."]) from error
    return path


def _figure(titles: Sequence[str]) -> tuple["Figure", list["Axes"]]:
    """A figure with a titled panel for each of `titles`."""
    # Without pyplot, whose backend and figures are those of the notebook that may be running.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(1, -(-len(titles) // _COLUMNS))
    figure = Figure(figsize=(4.2 * _COLUMNS, 2.9 * rows))
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.set_xlabel("optimizer step", fontsize=9)
    for axis in axes[len(titles) :]:
        axis.set_visible(False)
    return figure, axes[: len(titles)]


def _draw_group(axis: "Axes", group: Group, key: str, color: Any) -> None:
    """One run as its logged and its smoothed curve, several as mean and band; nothing where none logged `key`."""
    curves = [(list(points), list(points.values())) for run in group.runs if (points := dict(_points(run.log, key)))]
    if len(curves) == 1:
        steps, values = curves[0]
        axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axis.plot(steps, _smoothed(values), **_line(steps), color=color)
    elif curves:
        grid, mean, low, high = mean_and_band([(steps, _smoothed(values)) for steps, values in curves])
        if not grid:
            names = ", ".join(run.name for run in group.runs)
            raise ConfigError([f"`runs`: {names} are one group, but have no steps of {key!r} in common to average."])
        axis.plot(grid, mean, **_line(grid), color=color)
        axis.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)


def _legend_label(group: Group, keys: Sequence[str]) -> str:
    logged = any(_points(run.log, key) for run in group.runs for key in keys)
    return group.label if logged else f"{group.label}: nothing logged"


def _add_legend(figure: "Figure", colors: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend of all groups below the panels, on room of its own."""
    from matplotlib.lines import Line2D

    below = 0.4 + 0.22 * len(labels)  # inches
    figure.set_figheight(figure.get_figheight() + below)
    figure.tight_layout(rect=(0, below / figure.get_figheight(), 1, 1))
    figure.legend(
        [Line2D([], [], color=color) for color in colors],
        labels,
        loc="lower center",
        fontsize=9,
        title=f"smoothed over {_SMOOTHED_SHARE:.0%} of the points",
        title_fontsize=8,
    )


def mean_and_band(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Mean, lowest and highest value of several curves at each step within their common range.

    Args:
        curves: Steps, ascending, and values of each curve; between its steps a curve is a straight line.

    Returns:
        The steps that any curve has within the range that all have, and there the mean, lowest and highest value.
    """
    import numpy as np

    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    grid = sorted({step for steps, _ in curves for step in steps if first <= step <= last})
    values = np.array([np.interp(grid, steps, values) for steps, values in curves])
    return grid, values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()


def _panels(runs: Sequence[Run], metrics: Sequence[str] | None, problems: list[str]) -> list[tuple[str, str]]:
    """Title and metric of each panel; what was asked for but never logged is added to `problems`."""
    logged = sorted({key for run in runs for entry in run.log for key in entry if _points([entry], key)})
    logged = [key for key in logged if key not in ("step", "epoch", "time")]
    titles = {
        key: title if len(keys) == 1 else f"{title}: {key.rpartition('/')[2]}"
        for title, keys in (*PANELS, *PAIR_PANELS)
        for key in keys
    }
    if metrics is None:
        # Losses of different algorithms are no measure of one another.
        panels = [(title, key) for key, title in titles.items() if key in logged and key != "loss"]
        if not panels:
            problems.append(f"`metrics`: these runs logged none of {', '.join(titles)}; name some of theirs.")
        return panels
    known = ", ".join(logged)
    problems += [
        f"`metrics`: {key!r} was not logged by these runs.{nearest(key, logged) or f' They have {known}.'}"
        for key in metrics
        if key not in logged
    ]
    return [(titles.get(key, key), key) for key in dict.fromkeys(metrics)]


def _points(log: Iterable[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Step and value where `key` was logged as a finite number."""
    return [
        (entry["step"], entry[key])
        for entry in log
        if isinstance(entry.get(key), int | float) and math.isfinite(entry[key])
    ]


def _line(points: Sequence[float]) -> dict[str, Any]:
    """The style of a curve; a single point has no line, so it gets a mark."""
    return {"linewidth": 1.6, "marker": "o" if len(points) == 1 else None}


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean over a window around each point, about a twentieth of all points wide and cut off at the ends."""
    reach = int(_SMOOTHED_SHARE * len(values) / 2)
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _colors(count: int) -> list[Any]:
    """As many colours as there are groups, as different as can be."""
    import matplotlib

    if count <= 10:
        return [f"C{place}" for place in range(count)]
    return [matplotlib.colormaps["turbo"](place / (count - 1)) for place in range(count)]


def _output_problems(output: str | None) -> list[str]:
    if output is None:
        return []
    if Path(output).is_dir():
        return [f"`output`: {output!r} is a folder; give the name of a file."]
    if Path(output).suffix.lower() not in _FORMATS:
        return [f"`output`: {output!r} must end in one of {', '.join(_FORMATS)}."]
    return []


def _free_path(path: Path) -> Path:
    """`path`, or where that exists the first of `name-2`, `name-3`, ... that does not."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free
