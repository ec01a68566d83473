import struct
import warnings
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from trl_algos.plots import PANELS, plot_run


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
        (entries(ALL_KEYS), 2),
        (entries([key for key in ALL_KEYS if key != "kl"]), 2),
        (entries(["reward"]), 1),
        (entries(["reward"], steps=1), 1),
        ([], 1),
        ([{"step": 5, "train_runtime": 3.2}], 1),
        ([*entries(["reward"]), {"step": 30, "reward": None, "kl": None}, {"step": 30, "eval_reward": 1.0}], 1),
    ],
    ids=["all", "without KL", "reward alone", "one step", "empty", "summary alone", "None and evaluation"],
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


def test_each_panel_shows_the_logged_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The drawn data are the log's steps and values; a missing metric has no panel, its neighbours keep theirs."""
    monkeypatch.setattr(plt, "close", lambda figure: drawn.append(figure))
    drawn = []
    log = [{"step": 10, "reward": 0.25, "entropy": 2.0}, {"step": 20, "reward": 0.75, "entropy": 1.0}]
    plot_run(log, tmp_path / "reward.png", "title")
    monkeypatch.undo()
    shown = {axis.get_title(): axis.lines[0].get_xydata().tolist() for axis in drawn[0].axes if axis.get_visible()}
    plt.close(drawn[0])
    assert shown == {
        "reward": [[10, 0.25], [20, 0.75]],
        "entropy (nats per token)": [[10, 2.0], [20, 1.0]],
    }


def test_other_pictures_differ(tmp_path: Path):
    """An empty figure is smaller than one with curves, so that the size check above means something."""
    plot_run([], tmp_path / "empty.png", "title")
    plot_run(entries(["reward", "kl", "entropy"]), tmp_path / "full.png", "title")
    assert (tmp_path / "full.png").stat().st_size > 2 * (tmp_path / "empty.png").stat().st_size
