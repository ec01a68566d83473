"""Tests that need a CUDA device; `TRL_ALGOS_TEST_DEVICE=cpu` runs those that can do without, to see that they work."""

import os

import pytest
import torch

DEVICE = os.environ.get("TRL_ALGOS_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> str:
    """`cuda`, or `cpu` on trial."""
    return DEVICE
