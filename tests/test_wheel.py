"""The package as users install it: a wheel, used far from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel, built from a copy of the sources so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "trl_algos", source / "trl_algos", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def ours(installed: Path, folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_works_far_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = ours(installed, tmp_path, "-c", "import trl_algos; print(trl_algos.__file__)")
    assert where.startswith(str(installed))
    ours(installed, tmp_path, "-m", "trl_algos", "init", "dapo", "mine.yaml")
    assert "83,328 numbers" in ours(installed, tmp_path, "-m", "trl_algos", "check", "mine.yaml")
    words = ("train", "mine.yaml", "--max_steps", "1", "--held_out_prompts", "2", "--output_dir", "out")
    ours(installed, tmp_path, "-m", "trl_algos", *words)
    assert (tmp_path / "out" / "training_summary.json").is_file()


def test_the_wheel_holds_every_source_and_the_bundled_model(installed: Path) -> None:
    files = {path.relative_to(ROOT) for path in (ROOT / "trl_algos").rglob("*") if path.is_file()}
    files = {path for path in files if "__pycache__" not in path.parts}
    assert Path("trl_algos/bundled/arithmetic-lm/model.safetensors") in files
    assert files == {path.relative_to(installed) for path in (installed / "trl_algos").rglob("*") if path.is_file()}
