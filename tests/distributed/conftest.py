"""One launch of a family of backends for all tests of the session, whichever of xdist's workers need it."""

import os
from collections.abc import Callable
from pathlib import Path

import preference_worker
import pytest
from common import Outcomes, launch, outcomes
from filelock import FileLock


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with models, the same one for all of xdist's workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributed"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            preference_worker.prepare(str(folder))
    return str(folder)


@pytest.fixture(scope="session")
def launched(shared_folder: str) -> Callable[[str], Outcomes]:
    """Family -> what its processes came to; launched by the first that asks, while others wait."""

    def get(family: str) -> Outcomes:
        if family == "deepspeed":
            pytest.importorskip("deepspeed", reason="needs the package deepspeed")
        done = Path(shared_folder, f"{family}.done")
        with FileLock(f"{shared_folder}/{family}.lock"):
            if not done.exists():
                done.write_text(launch(shared_folder, family))
        assert not done.read_text(), done.read_text()
        return outcomes(shared_folder, family)

    return get
