"""A Hub of each test's own on loopback, which the real client takes for the Hub."""

from collections.abc import Iterator

import huggingface_hub
import pytest
from huggingface_hub.utils import _http
from stub import TOKEN, HubStub, no_waiting


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    constants = huggingface_hub.constants
    with HubStub().running() as stub:
        # These are read from the environment when the client is imported.
        monkeypatch.setattr(constants, "ENDPOINT", stub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stub has the protocol before it, LFS
        monkeypatch.setattr(_http, "time", no_waiting())
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield stub
    huggingface_hub.utils.close_session()
