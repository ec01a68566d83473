"""The maths and the table of algorithms are read without loading torch, and load it with the first number."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch as real_torch

from trl_algos.core._torch import torch

ROOT = Path(__file__).parents[2]

# The first group has mean 1/2, the second no spread, so alpha is 4 rows / 2 informative ones.
USE = """
rewards, groups = torch.tensor([1.0, 0.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1])
assert gpg_advantages(rewards, groups).tolist() == [1.0, -1.0, 0.0, 0.0]
"""


def run(code: str) -> None:
    """Run `code` in a fresh interpreter; a failed assertion is an error here."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_the_table_and_the_maths_are_imported_without_torch():
    run(
        "import sys, trl_algos.core, trl_algos.algorithms\n"
        "row = trl_algos.algorithms.ALGORITHMS['pass_at_k']\n"
        "assert row.needs == ('groups',)\n"
        "assert trl_algos.algorithms.advantage_settings(row.advantage) == {'k': 'pass_k'}\n"
        "assert 'torch' not in sys.modules\n"
    )


def test_the_first_use_loads_torch_and_gives_the_right_number():
    run(
        "import sys\n"
        "from trl_algos.core import gpg_advantages\n"
        "from trl_algos.core._torch import torch\n"
        "assert 'torch' not in sys.modules\n" + USE + "assert 'torch' in sys.modules\n"
    )


def test_torch_may_be_imported_before():
    run("import torch.nn.functional as F\nfrom trl_algos.core import gpg_advantages\nimport torch\n" + USE)


def test_the_stand_in_gives_what_torch_gives():
    assert torch.Tensor is real_torch.Tensor
    assert torch.nn.functional is real_torch.nn.functional
    assert torch.inf == float("inf")


def test_a_name_that_torch_does_not_have_is_an_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torch.no_such_name  # type: ignore[attr-defined]


def test_the_core_compiles_as_one_graph():
    """The stand-in is no obstacle to `torch.compile`."""
    from trl_algos.core import kl_estimate, masked_whiten

    def whitened_kl(logps: real_torch.Tensor) -> real_torch.Tensor:
        return masked_whiten(kl_estimate(logps, 0.5 * logps, "k3"), logps > 0)

    logps = real_torch.tensor([[0.5, -1.0, 2.0]])
    compiled = real_torch.compile(whitened_kl, backend="eager", fullgraph=True)
    real_torch.testing.assert_close(compiled(logps), whitened_kl(logps))
