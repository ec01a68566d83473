"""Imports only point downwards, and what needs no TRL loads without it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trl_algos

PACKAGE = Path(trl_algos.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Lowest first: part of the package -> other parts it may import, and other packages besides the standard library.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "_version": (set(), set()),
    "errors": (set(), set()),
    "finite": (set(), set()),
    "preference_rows": ({"finite"}, set()),
    "models": ({"errors", "finite"}, set()),
    "core": (set(), {"torch"}),
    "algorithms": ({"core"}, {"torch"}),
    "preference_algorithms": ({"core"}, {"torch"}),
    "objective": ({"algorithms", "core", "preference_algorithms"}, set()),
    "settings": ({"algorithms", "core", "errors", "models", "preference_algorithms"}, set()),
    "checkpoints": ({"_version", "errors"}, set()),
    "hub": ({"_version", "errors", "models", "settings"}, {"huggingface_hub"}),
    "_compat": (set(), {"trl", "packaging"}),
    "config": ({"_compat", "algorithms", "errors", "settings"}, {"trl", "torch"}),
    "preference_config": ({"_compat", "errors", "preference_algorithms", "settings"}, {"trl"}),
    "rewards": ({"errors", "finite"}, {"trl", "math_verify", "reasoning_gym"}),
    "trainers": (
        {
            *("checkpoints", "core", "algorithms", "config", "_compat", "errors", "hub", "models", "objective"),
            *("preference_config", "preference_rows", "rewards", "settings"),
        },
        {"trl", "transformers", "accelerate", "torch", "peft", "safetensors", "deepspeed", "numpy", "datasets"},
    ),
    "data": ({"errors", "preference_algorithms", "preference_rows"}, {"datasets", "pyarrow", "reasoning_gym"}),
    "recipe": (
        {
            *("algorithms", "checkpoints", "config", "data", "errors", "models", "objective"),
            "preference_algorithms",
            *("preference_config", "preference_rows", "rewards", "settings"),
        },
        {"yaml", "trl", "transformers", "accelerate"},
    ),
    "run": (
        {
            *("_version", "algorithms", "checkpoints", "data", "errors", "hub", "models", "objective", "recipe"),
            *("rewards", "settings", "trainers"),
        },
        {
            *("trl", "transformers", "datasets", "httpx", "rich", "matplotlib", "numpy", "yaml", "torch"),
            *("safetensors", "huggingface_hub"),
        },
    ),
    # These two load what they need on use.
    "__init__": (
        {"_version", "algorithms", "config", "errors", "preference_algorithms", "preference_config", "trainers"},
        set(),
    ),
    "cli": (
        {"_version", "algorithms", "errors", "preference_algorithms", "recipe", "rewards", "run", "settings"},
        set(),
    ),
    "__main__": ({"cli"}, set()),
}


def part(path: Path) -> str:
    """Folder or file of the package that a source belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[str]:
    """Every module that a source imports, wherever in it; `from a import b` counts as `a.b`."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return modules


def source_id(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_part_of_the_package_has_a_layer():
    assert {part(path) for path in SOURCES} == LAYERS.keys()


def test_layers_point_downwards():
    names = list(LAYERS)
    for place, (name, (below, _)) in enumerate(LAYERS.items()):
        assert below <= set(names[:place]), name


@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_imports_stay_below(path: Path):
    own = part(path)
    below, packages = LAYERS[own]
    for module in imported_modules(path):
        top, *rest = module.split(".")
        assert top, f"{source_id(path)} imports {module} relatively"
        if top == "trl_algos":
            assert rest[0] in below | {own}, f"{source_id(path)} imports {module}"
        else:
            assert top in packages or top in sys.stdlib_module_names, f"{source_id(path)} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_no_print_and_no_assert(path: Path):
    """Output goes through metrics, warnings and the command line; checks must survive `python -O`."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert), f"{source_id(path)}:{node.lineno}"
        if isinstance(node, ast.Name):
            assert node.id != "print", f"{source_id(path)}:{node.lineno}"


def loaded_after(statements: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `statements`."""
    code = f"{statements}\nimport sys\nsys.stderr.write('LOADED ' + ' '.join(m for m in sys.modules if '.' not in m))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.split("LOADED ")[-1].split())


HEAVY = {"trl", "transformers", "accelerate", "datasets", "peft", "matplotlib"}


def test_the_maths_loads_without_trl():
    use = "import trl_algos.core\ntrl_algos.core.FixedKLController(0.1)\ntrl_algos.core.gae.__doc__"
    loaded = loaded_after(f"import trl_algos, trl_algos.algorithms\ntrl_algos.ALGORITHMS['grpo']\n{use}")
    assert not loaded & (HEAVY | {"torch"})
    loaded = loaded_after("from trl_algos.core import *; import torch\nlast_token_index(torch.ones(2, 2))")
    assert not loaded & HEAVY
    assert "torch" in loaded  # the check sees what is loaded


def test_the_package_alone_loads_nothing():
    assert not loaded_after("import trl_algos, trl_algos.cli") & (HEAVY | {"torch"})


@pytest.mark.parametrize(("words", "unwanted"), [(["--help"], {"torch", "yaml"}), (["list"], {"torch"})])
def test_help_and_list_answer_without_trl(words: list[str], unwanted: set[str]):
    loaded = loaded_after(f"from trl_algos.cli import main\nimport sys\ncode = main({words})\nassert code == 0")
    assert not loaded & (HEAVY | unwanted)
