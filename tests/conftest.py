import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports a Hugging Face library: tests never look for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parent / "trainers"),
    str(Path(__file__).parent / "hub"),
]

import quick  # noqa: E402  found by the path above

quick.remember_packages()

GOLDEN_FILE = Path(__file__).parent / "golden" / "policy_reference.json"


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Inputs and results of a reference implementation, as nested lists of float64 numbers; do not change them."""
    return json.loads(GOLDEN_FILE.read_text())


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    quick.leave_out_of_collection()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with the tiny Llama and its tokenizer: a reference model can only be loaded from disk."""
    import tiny

    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Hub of the test's own on loopback, which the real client takes for the Hub; a `HubStub`."""
    import huggingface_hub
    from huggingface_hub.utils import _http
    from stub import TOKEN, HubStub, no_waiting

    constants = huggingface_hub.constants
    with HubStub().running() as stub:
        # These are read from the environment when the client is imported.
        monkeypatch.setattr(constants, "ENDPOINT", stub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stub has the protocol before it, LFS
        monkeypatch.setattr(_http, "time", no_waiting())
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        huggingface_hub.utils.close_session()
        yield stub
    huggingface_hub.utils.close_session()
