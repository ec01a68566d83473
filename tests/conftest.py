import json
from pathlib import Path
from typing import Any

import pytest

GOLDEN_FILE = Path(__file__).parent / "golden" / "policy_reference.json"


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Inputs and results of a reference implementation, as nested lists of float64 numbers; do not change them."""
    return json.loads(GOLDEN_FILE.read_text())
