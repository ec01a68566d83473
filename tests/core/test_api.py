import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trl_algos.core as core

CORE_FILES = sorted(Path(core.__file__).parent.glob("*.py"))

PUBLIC_FUNCTIONS = [
    "masked_sum",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "token_rewards",
    "discounted_returns",
    "gae",
    "packed_gae",
    "gae_advantages",
    "length_adaptive_gae_advantages",
    "length_adaptive_lambda",
    "last_token_index",
    "group_normalized_advantages",
    "group_centered_advantages",
    "leave_one_out_advantages",
    "length_weighted_advantages",
    "best_of_group_advantages",
    "pass_at_k_advantages",
    "gpg_advantages",
    "greedy_baseline_advantages",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "informative_groups",
    "overlong_penalty",
    "policy_loss",
    "kl_estimate",
    "full_kl",
    "AdaptiveKLController",
    "FixedKLController",
    "aggregate_loss",
    "value_loss",
    "explained_variance",
    "rollout_correction",
    "dpo_loss",
    "bradley_terry_loss",
    "nll_per_token",
    "pair_calibration",
    "robust_smoothing_of_conservative",
]


@pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
def test_public_name_is_exported(name):
    assert name in core.__all__
    assert callable(getattr(core, name))


def test_all_lists_every_exported_name_once():
    assert len(core.__all__) == len(set(core.__all__))
    assert all(hasattr(core, name) for name in core.__all__)


def test_importing_the_core_loads_neither_trl_nor_transformers():
    code = """
import sys, trl_algos.core
heavy = {name.partition(".")[0] for name in sys.modules} & {"trl", "transformers", "peft", "accelerate", "datasets"}
sys.exit(", ".join(sorted(heavy)) or 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda path: path.name)
def test_core_file_imports_only_torch_the_standard_library_and_the_core(path):
    def allowed(module: str) -> bool:
        top = module.partition(".")[0]
        return top == "torch" or top in sys.stdlib_module_names or module.startswith("trl_algos.core")

    assert {module for module in imported_modules(path) if not allowed(module)} == set()
