"""Which weights LoRA adds to a model and which it copies, told from the names and shapes of the stored weights."""

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_algos.errors import nearest
from trl_algos.models.weight_files import Weights

Shape = tuple[int, ...]

_FLOATS = ("F64", "F32", "F16", "BF16")

_HEADS = ("lm_head", "embed_out", "output_layer", "score", "classifier")
"""Output layers by name: neither PEFT's `all-linear` nor quantisation touches them."""

_EMBEDDING = re.compile(r"wte|wpe|.*embed.*")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ROUTER = "gate"

_PREFIXES = ("", "model.", "transformer.")
"""What the loaded model may put before a stored name; a regular expression has to match the whole."""


def linear_modules(weights: Weights) -> dict[str, Shape]:
    """Linear layers by name, without output layer, routers and single experts.

    They are what PEFT means by `all-linear`, and what is quantised.
    """
    return {
        module: shape
        for module, shape in _matrices(weights).items()
        if not is_embedding(module) and _last(module) not in (*_HEADS, _ROUTER)
    }


def is_embedding(module: str) -> bool:
    """Whether a module is an embedding, by its name."""
    return _last(module) not in _HEADS and bool(_EMBEDDING.fullmatch(_last(module)))


def is_head(module: str) -> bool:
    """Whether a module is an output layer, by its name."""
    return _last(module) in _HEADS


def lora_shapes(weights: Weights, model_type: str, settings: Mapping[str, Any]) -> list[Shape]:
    """Shapes of all matrices A (r, in) and B (out, r) that LoRA adds.

    Args:
        weights: as `weight_shapes` gives them.
        model_type: the model's `model_type`, to which PEFT's default targets belong.
        settings: `lora_r`, `lora_target_modules`, `lora_modules_to_save`, as a recipe has them.
    """
    rank = settings.get("lora_r", 16)
    layers = lora_layers(weights, model_type, settings).values()
    return [shape for rows, columns in layers for shape in ((rank, columns), (rows, rank))]


def lora_layers(weights: Weights, model_type: str, settings: Mapping[str, Any]) -> dict[str, Shape]:
    """Name and shape (out, in) of the layers that LoRA adapts; arguments as of `lora_shapes`."""
    targets = _targets(model_type, settings)
    kept = settings.get("lora_modules_to_save") or []
    return {
        module: shape
        for module, shape in _candidates(weights, targets).items()
        if _is_target(module, targets) and not _is_kept(module, kept)
    }


def saved_copies(weights: Weights, settings: Mapping[str, Any]) -> dict[str, Shape]:
    """Weights by name of which `lora_modules_to_save` trains a copy; the original stays."""
    names = tuple(settings.get("lora_modules_to_save") or ())
    shapes = {name: shape for name, (shape, _) in weights.items()}
    # A tied output layer is copied on its own although it is not stored.
    shapes |= {f"{module}.weight": shape for module, shape in _tied_head(weights).items()}
    # PEFT compares the end of a module's path, wherever the name in it begins: `norm` is every layer's norms as well.
    return {
        name: shape for name, shape in shapes.items() if names and any(path.endswith(names) for path in _paths(name))
    }


def lora_problems(weights: Weights, model_type: str, settings: Mapping[str, Any]) -> list[str]:
    """Names in `lora_target_modules` and `lora_modules_to_save` that mean nothing in this model."""
    targets = _targets(model_type, settings)
    last_names = sorted({_last(module) for module in _candidates(weights, targets)})
    problems = []
    if settings.get("lora_target_modules") is None:
        # PEFT's defaults may name modules of several versions of a model: one that is there will do.
        if not settings.get("lora_target_parameters") and not lora_shapes(weights, model_type, settings):
            problems.append(
                f"`lora_target_modules`: not set, and PEFT has no default that fits this {model_type!r} model; give "
                f"all-linear, or some of {', '.join(last_names)}."
            )
    elif isinstance(targets, str):
        problems += _pattern_problems(targets, weights, last_names)
    else:
        candidates = _candidates(weights, targets)
        missing = [name for name in targets or [] if not any(_is_target(module, [name]) for module in candidates)]
        problems += [_no_module("lora_target_modules", name, last_names) for name in missing]
    for name in settings.get("lora_modules_to_save") or []:
        if not saved_copies(weights, {"lora_modules_to_save": [name]}):
            problems.append(_no_module("lora_modules_to_save", name, last_names))
    return problems


def _pattern_problems(pattern: str, weights: Weights, last_names: list[str]) -> list[str]:
    try:
        if any(_is_target(module, pattern) for module in _candidates(weights, pattern)):
            return []
    except re.error as error:
        return [f"`lora_target_modules`: {pattern!r} is not a regular expression: {error}."]
    if pattern in last_names:
        return [
            f"`lora_target_modules`: PEFT reads text as a regular expression for whole paths, and {pattern!r} matches "
            f"none; write a list, [{pattern}]."
        ]
    return [_no_module("lora_target_modules", pattern, last_names)]


def _no_module(key: str, name: str, last_names: list[str]) -> str:
    near = nearest(name, last_names)
    return f"`{key}`: {name!r} is no module of this model, which has {', '.join(last_names)}.{near}"


def _targets(model_type: str, settings: Mapping[str, Any]) -> str | list[str] | None:
    """Names, a regular expression, or `all-linear`; PEFT's own where nothing is set."""
    targets = settings.get("lora_target_modules")
    if isinstance(targets, str | None):
        return targets or _default_targets().get(model_type)
    return "all-linear" if list(targets) == ["all-linear"] else list(targets)


@cache
def _default_targets() -> dict[str, str | list[str]]:
    """PEFT's targets by model type, read from its source: importing it takes seconds."""
    spec = find_spec("peft")
    path = Path(spec.origin or "").parent / "utils" / "constants.py" if spec else Path()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLE:
            return ast.literal_eval(node.value)
    return {}


_TABLE = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"


def _candidates(weights: Weights, targets: str | list[str] | None) -> dict[str, Shape]:
    if _is_all_linear(targets):
        return linear_modules(weights)
    return _matrices(weights) | _tied_head(weights)


def _is_all_linear(targets: str | list[str] | None) -> bool:
    return isinstance(targets, str) and targets.lower() == "all-linear"


def _is_target(module: str, targets: str | list[str] | None) -> bool:
    if _is_all_linear(targets):
        return True
    if isinstance(targets, str):
        return any(re.fullmatch(targets, prefix + module) for prefix in _PREFIXES)
    return any(module == name or module.endswith(f".{name}") for name in targets or ())


def _is_kept(module: str, kept: Iterable[str]) -> bool:
    """Whether a module is trained whole, as PEFT decides it for the targets of LoRA."""
    return any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in kept)


def _matrices(weights: Weights) -> dict[str, Shape]:
    """Modules with a matrix; transformers fuses single experts into tensors of three dimensions."""
    return {
        name.removesuffix(".weight"): shape
        for name, (shape, dtype) in weights.items()
        if name.endswith(".weight") and len(shape) == 2 and dtype in _FLOATS and not _EXPERT.search(name)
    }


def _tied_head(weights: Weights) -> dict[str, Shape]:
    """The output layer that shares the embedding's weights, and so is not stored."""
    matrices = _matrices(weights)
    embeddings = [shape for module, shape in matrices.items() if is_embedding(module)]
    has_head = any(_last(module) in _HEADS for module in matrices)
    return {"lm_head": max(embeddings)} if embeddings and not has_head else {}


def _paths(weight: str) -> list[str]:
    """The modules that a weight lies in: `a.b.weight` -> `a`, `a.b`."""
    parts = weight.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _last(module: str) -> str:
    return module.rpartition(".")[2]
