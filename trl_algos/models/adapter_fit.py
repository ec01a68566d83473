"""Whether a saved LoRA adapter was trained on a model of these shapes, from the headers of both alone."""

from trl_algos.models.weight_files import Weights

_A, _B = ".lora_A.weight", ".lora_B.weight"
_PREFIXES = ("base_model.model.", "model.", "transformer.")
"""What wrappers put before a layer's name, and one class before that of another."""


def other_base(adapter: Weights, base: Weights) -> str | None:
    """Where an adapter has a layer that the model has not, or of another shape; None where it fits.

    Args:
        adapter: shapes of its weights, as PEFT saves them.
        base: shapes of the model's weights.
    """
    layers = {_plain(name.removesuffix(".weight")): shape for name, (shape, _) in base.items() if len(shape) == 2}
    for name, (shape, _) in adapter.items():
        if not name.endswith(_A) or f"{name.removesuffix(_A)}{_B}" not in adapter:
            continue
        layer, (other, _) = _plain(name.removesuffix(_A)), adapter[f"{name.removesuffix(_A)}{_B}"]
        if layer not in layers:
            return f"its layer {layer} is not in it"
        width, height = shape[-1], other[0]
        if sorted(layers[layer]) != sorted((height, width)):  # some models store matrices the other way round
            found = " x ".join(map(str, layers[layer]))
            return f"it is for a {layer} of {height} x {width}, and here that is {found}"
    return None


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
