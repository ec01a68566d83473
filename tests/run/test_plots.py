import json
import math
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from trl_algos.errors import ConfigError
from trl_algos.run.folder import metrics_line, write_recipe
from trl_algos.run.plots import PAIR_PANELS, PANELS, compare_runs, mean_and_band, plot_run
from trl_algos.run.reliability import Reliability


def entries(keys: list[str], steps: int = 30) -> list[dict[str, float]]:
    return [{"step": step, **{key: 0.1 * step for key in keys}} for step in range(1, steps + 1)]


def size_of(path: Path) -> tuple[int, int]:
    """Width and height in pixels, from the header of a PNG."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


ALL_KEYS = [key for _, keys in PANELS for key in keys]


@pytest.mark.parametrize(
    ("log", "rows"),
    [
        (entries(ALL_KEYS), 3),
        (entries([key for key in ALL_KEYS if key not in ("kl", "sampling/reward")]), 2),
        (entries(["reward"]), 1),
        (entries(["reward"], steps=1), 1),
        ([], 1),
        ([{"step": 5, "train_runtime": 3.2}], 1),
        ([*entries(["reward"]), {"step": 30, "reward": None, "kl": None}, {"step": 30, "eval_reward": 1.0}], 1),
    ],
    ids=["all", "without two", "reward alone", "one step", "empty", "summary alone", "None and evaluation"],
)
def test_a_png_of_fitting_size(tmp_path: Path, log: list[dict[str, float]], rows: int):
    """Three columns of 4.2 inches and rows of 2.9, at 110 dots per inch."""
    path, open_before = tmp_path / "reward.png", plt.get_fignums()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_run(log, path, "dapo: a run")
    width, height = size_of(path)
    assert width == pytest.approx(3 * 4.2 * 110, abs=1)
    assert height == pytest.approx(rows * 2.9 * 110, abs=1)
    assert path.stat().st_size > 1000
    assert plt.get_fignums() == open_before


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kwargs: (figures.append(figure), save(figure, *args, **kwargs))
    )
    return figures


def panels(figure: Figure) -> dict[str, Axes]:
    return {axis.get_title(): axis for axis in figure.axes if axis.get_visible()}


def test_each_panel_shows_the_logged_values(tmp_path: Path, drawn: list[Figure]):
    """The drawn data are the log's steps and values; a missing metric has no panel, its neighbours keep theirs."""
    log = [{"step": 10, "reward": 0.25, "entropy": 2.0}, {"step": 20, "reward": 0.75, "entropy": 1.0}]
    plot_run([*log, {"step": 30, "reward": math.nan}], tmp_path / "reward.png", "title")
    shown = {name: axis.lines[0].get_xydata().tolist() for name, axis in panels(drawn[0]).items()}
    assert shown == {
        "reward": [[10, 0.25], [20, 0.75]],
        "entropy (nats per token)": [[10, 2.0], [20, 1.0]],
    }


def test_the_smoothed_curve_is_a_mean_over_a_twentieth(tmp_path: Path, drawn: list[Figure]):
    """Of 80 points, two on each side: 5 where there are, 3 at the ends."""
    plot_run([{"step": step, "reward": float(step**2)} for step in range(80)], tmp_path / "reward.png", "title")
    smooth = panels(drawn[0])["reward"].lines[1].get_ydata().tolist()
    assert smooth[0] == pytest.approx((0 + 1 + 4) / 3)
    assert smooth[10] == pytest.approx((64 + 81 + 100 + 121 + 144) / 5)
    assert smooth[79] == pytest.approx((77**2 + 78**2 + 79**2) / 3)


def test_the_backend_and_figures_of_a_notebook_are_left_alone(tmp_path: Path):
    import matplotlib

    before = matplotlib.get_backend()
    matplotlib.use("svg")
    plot_run(entries(["reward"]), tmp_path / "reward.png", "title")
    after = matplotlib.get_backend()
    matplotlib.use(before)
    assert after == "svg"


def test_other_pictures_differ(tmp_path: Path):
    """An empty figure is smaller than one with curves, so that the size check above means something."""
    plot_run([], tmp_path / "empty.png", "title")
    plot_run(entries(["reward", "kl", "entropy"]), tmp_path / "full.png", "title")
    assert (tmp_path / "full.png").stat().st_size > 2 * (tmp_path / "empty.png").stat().st_size


def make_run(folder: Path, log: list[dict[str, Any]], **settings: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(map(metrics_line, log)))
    if settings:
        write_recipe(folder, {"output_dir": str(folder), **settings})
    return str(folder)


def rewards(values: dict[int, float]) -> list[dict[str, float]]:
    return [{"step": step, "reward": value} for step, value in values.items()]


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_mean_and_band_between_different_steps():
    """Steps 2 to 6 are common. The first curve is y = x, the second 10 at 2 and 30 at 6, the third 0."""
    steps, mean, low, high = mean_and_band(
        [([1, 4, 6, 9], [1.0, 4.0, 6.0, 9.0]), ([2, 6], [10, 30]), ([0, 7], [0, 0])]
    )
    assert steps == [2, 4, 6]
    assert mean == pytest.approx([12 / 3, 24 / 3, 36 / 3])
    assert low == [0, 0, 0]
    assert high == [10, 20, 30]


def test_curves_without_common_steps_have_no_mean():
    assert mean_and_band([([1, 2], [0, 0]), ([3, 4], [0, 0])])[0] == []


def test_a_single_run_is_drawn_as_logged_and_smoothed(tmp_path: Path, drawn: list[Figure]):
    run = make_run(
        tmp_path / "one", [*rewards({1: 0.5, 2: 0.75}), {"step": 2, "reward": 1.0}, {"step": 2, "kl": None}]
    )
    assert compare_runs([run], str(tmp_path / "out.png")) == tmp_path / "out.png"
    (axis,) = panels(drawn[0]).values()
    assert [line.get_xydata().tolist() for line in axis.lines] == [[[1, 0.5], [2, 1.0]]] * 2
    assert labels(drawn[0]) == ["one"]


def test_seeds_are_one_group_with_mean_and_band(tmp_path: Path, drawn: list[Figure]):
    runs = [
        make_run(tmp_path / f"{beta}_{seed}", rewards({1: beta, 2: seed}), algorithm="grpo", beta=beta, seed=seed)
        for beta in (0.1, 0.0)
        for seed in (1, 2, 6)
    ]
    compare_runs(runs, str(tmp_path / "out.png"))
    axis = panels(drawn[0])["reward"]
    assert [line.get_xydata().tolist() for line in axis.lines] == [[[1, pytest.approx(0.1)], [2, 3]], [[1, 0], [2, 3]]]
    assert [to_hex(line.get_color()) for line in axis.lines] == ["#1f77b4", "#ff7f0e"]
    band = axis.collections[0].get_paths()[0].vertices
    assert {(x, y) for x, y in band.tolist() if x == 2} == {(2, 1), (2, 6)}
    assert labels(drawn[0]) == ["beta 0.1 (3 seeds: mean, min to max)", "beta 0 (3 seeds: mean, min to max)"]


def test_a_group_without_a_metric_is_missing_from_its_panel_alone(tmp_path: Path, drawn: list[Figure]):
    one = make_run(tmp_path / "one", [{"step": 1, "reward": 0.5, "kl": 0.1}])
    two = make_run(tmp_path / "two", [{"step": 1, "kl": 0.2}])
    three = make_run(tmp_path / "three", [{"step": 1, "loss": 0.2}])
    compare_runs([one, two, three], str(tmp_path / "out.png"))
    shown = {name: len(axis.lines) for name, axis in panels(drawn[0]).items()}
    assert shown == {"reward": 2, "KL to the reference (nats)": 4}
    assert labels(drawn[0]) == ["one", "two", "three: nothing logged"]
    assert [to_hex(line.get_color()) for line in drawn[0].legends[0].get_lines()] == ["#1f77b4", "#ff7f0e", "#2ca02c"]


def test_metrics_can_be_chosen_in_their_order(tmp_path: Path, drawn: list[Figure]):
    run = make_run(tmp_path / "one", [{"step": 1, "reward": 0.5, "loss": 0.1, "kl": 1.0}])
    compare_runs([run], str(tmp_path / "out.svg"), metrics=["loss", "kl", "loss"])
    shown = [axis.get_title() for axis in drawn[0].axes if axis.get_visible()]
    assert shown == ["loss", "KL to the reference (nats)"]
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_by_decides_what_makes_a_group(tmp_path: Path, drawn: list[Figure]):
    runs = [
        make_run(tmp_path / str(place), rewards({1: 1.0}), algorithm=name, learning_rate=rate)
        for place, (name, rate) in enumerate([("grpo", 1e-6), ("grpo", 1e-5), ("dapo", 1e-6)])
    ]
    compare_runs(runs, str(tmp_path / "out.png"), by=["algorithm"])
    assert labels(drawn[0]) == ["algorithm grpo (2 runs: mean, min to max)", "algorithm dapo"]


def test_a_name_is_found_that_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "one", rewards({1: 1.0}))
    assert [str(compare_runs([run])) for _ in range(3)] == ["comparison.png", "comparison-2.png", "comparison-3.png"]
    assert size_of(tmp_path / "comparison-3.png")[0] == pytest.approx(3 * 4.2 * 110, abs=1)
    assert compare_runs([run], "new/folder/a.pdf") == Path("new/folder/a.pdf")
    assert compare_runs([run], "comparison.png") == Path("comparison.png")


def test_more_groups_than_colours_of_the_cycle(tmp_path: Path, drawn: list[Figure]):
    runs = [make_run(tmp_path / str(place), rewards({1: 1.0})) for place in range(12)]
    compare_runs(runs, str(tmp_path / "out.png"))
    lines = panels(drawn[0])["reward"].lines
    assert len({to_hex(line.get_color()) for line in lines}) == 12


def problems(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compare_runs(*args, **kwargs)
    return caught.value.problems


def test_an_unknown_metric_and_a_wrong_output_are_told_together(tmp_path: Path):
    run = make_run(tmp_path / "one", [{"step": 1, "reward": 1.0, "text": "x", "time": 3.0}])
    assert problems([run], "a.jpeg", metrics=["rewrad", "zzz", "time"]) == [
        "`output`: 'a.jpeg' must end in one of .png, .pdf, .svg.",
        "`metrics`: 'rewrad' was not logged by these runs. Did you mean 'reward'?",
        "`metrics`: 'zzz' was not logged by these runs. They have reward.",
        "`metrics`: 'time' was not logged by these runs. They have reward.",
    ]
    assert problems([run], str(tmp_path)) == [f"`output`: {str(tmp_path)!r} is a folder; give the name of a file."]


def test_an_output_that_cannot_be_written_is_told(tmp_path: Path):
    run = make_run(tmp_path / "one", rewards({1: 1.0}))
    (tmp_path / "file").write_text("")
    (problem,) = problems([run], f"{tmp_path}/file/out.png")
    assert problem.startswith(f"`output`: '{tmp_path}/file/out.png' cannot be written: ")


def test_runs_that_logged_nothing_to_draw_are_told(tmp_path: Path):
    (problem,) = problems([make_run(tmp_path / "one", [{"step": 1, "loss": 1.0}])])
    assert problem.startswith("`metrics`: these runs logged none of reward, sampling/reward, kl, ")


def test_seeds_without_common_steps_are_told(tmp_path: Path):
    log = {1: [{"step": 1, "reward": 1.0}], 2: [{"step": 5, "reward": 1.0}]}
    runs = [make_run(tmp_path / str(seed), log[seed], algorithm="grpo", seed=seed) for seed in (1, 2)]
    (problem,) = problems(runs, str(tmp_path / "out.png"))
    assert problem.startswith(f"`runs`: {runs[0]}, {runs[1]} are one group, but have no steps of 'reward' in common")


def test_a_run_of_an_older_version_is_read_from_its_checkpoint(tmp_path: Path, drawn: list[Figure]):
    (tmp_path / "one/checkpoint-9").mkdir(parents=True)
    (tmp_path / "one/checkpoint-9/trainer_state.json").write_text(json.dumps({"log_history": rewards({9: 0.5})}))
    compare_runs([str(tmp_path / "one")], str(tmp_path / "out.png"))
    assert panels(drawn[0])["reward"].lines[0].get_xydata().tolist() == [[9, 0.5]]


def drawn_axes(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The panels of the figures that are saved from now on."""
    found: list[Axes] = []
    save = Figure.savefig

    def kept(figure: Figure, *args: Any, **kwargs: Any) -> None:
        found.extend(axis for axis in figure.axes if axis.get_visible())
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", kept)
    return found


def test_a_run_on_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both sides in one panel, and the reliability curve with the number of pairs at each point."""
    axes = drawn_axes(monkeypatch)
    log = entries(["loss", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected"])
    curve = Reliability([math.nan, 0.6, 0.9], [math.nan, 0.5, 1.0], [0, 30, 12])
    plot_run(log, tmp_path / "preference.png", "dpo: a run", PAIR_PANELS, {"after training": curve})
    titles = [axis.get_title() for axis in axes]
    assert titles == [
        *("loss", "accuracy on the batch's pairs", "margin of the implicit reward", "log-probabilities (nats)"),
        "right verdicts by confidence",
    ]
    assert [text.get_text() for text in axes[3].get_legend().get_texts()] == ["chosen", "rejected"]
    line = next(line for line in axes[4].lines if line.get_label() == "after training")
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(0.6, 0.5), (0.9, 1.0)]
    assert [text.get_text() for text in axes[4].texts] == ["30", "12"]
    assert curve.table() == {"confidence": [0.6, 0.9], "right": [0.5, 1.0], "pairs": [30, 12]}


def test_runs_on_pairs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    axes = drawn_axes(monkeypatch)
    for name, beta in (("one", 0.1), ("two", 0.5)):
        lines = entries(["loss", "rewards/accuracies", "logps/chosen", "logps/rejected"])
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(map(metrics_line, lines)))
        write_recipe(tmp_path / name, {"algorithm": "dpo", "beta": beta, "output_dir": name})
    compare_runs([str(tmp_path / "one"), str(tmp_path / "two")], str(tmp_path / "both.png"))
    assert [axis.get_title() for axis in axes] == [
        *("accuracy on the batch's pairs", "log-probabilities (nats): chosen", "log-probabilities (nats): rejected"),
    ]
