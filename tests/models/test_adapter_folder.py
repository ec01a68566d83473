"""Whether an adapter fits a model, told by names and shapes alone."""

from pathlib import Path

import pytest

from trl_algos.models.adapter_folder import Adapter, fit_problem
from trl_algos.models.weight_files import Weights

BASE: Weights = {
    "model.embed_tokens.weight": ((50, 8), "F32"),
    "model.layers.0.self_attn.q_proj.weight": ((16, 8), "BF16"),
    "model.layers.1.self_attn.q_proj.weight": ((16, 8), "BF16"),
    "lm_head.weight": ((50, 8), "F32"),
}


def lora(module: str, into: int, out: int, rank: int = 2) -> Weights:
    name = f"base_model.model.{module}"
    return {f"{name}.lora_A.weight": ((rank, into), "F32"), f"{name}.lora_B.weight": ((out, rank), "F32")}


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (lora("model.layers.1.self_attn.q_proj", 8, 16), None),
        (lora("transformer.layers.1.self_attn.q_proj", 8, 16), None),  # a prefix of the loaded class
        (lora("layers.0.self_attn.q_proj", 16, 8), None),  # a Conv1D is stored the other way round
        (lora("model.layers.1.self_attn.q_proj", 9, 16), "q_proj has 16 x 8 there, and 9 is a side of it here"),
        (lora("model.layers.1.self_attn.q_proj", 8, 17), "q_proj has 16 x 8 there, and 17 is a side of it here"),
        (lora("model.layers.2.self_attn.q_proj", 8, 16), "model.layers.2.self_attn.q_proj, which is not there"),
        (lora("model.layers.0.mlp.experts", 8, 16), None),  # which may be made while the model is loaded
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": ((2, 51), "F32")},
            "embed_tokens has 50 x 8 there, and 51 is a side",
        ),
        ({"base_model.model.model.embed_tokens.lora_embedding_B": ((8, 2), "F32")}, None),
    ],
)
def test_shapes_and_names_tell_another_base(weights: Weights, told: str | None) -> None:
    problem = fit_problem(Adapter(Path("a"), {"base_model_name_or_path": "b"}, weights), BASE, "c")
    if told is None:
        assert problem is None
    else:
        assert str(problem).startswith("the adapter in 'a' is of another base model than 'c' (it names 'b'): ")
        assert told in str(problem)


def test_quantised_weights_tell_nothing() -> None:
    packed: Weights = {name: ((64, 1), "U8") for name in BASE}
    adapter = Adapter(Path("a"), {}, lora("model.layers.1.self_attn.q_proj", 8, 16))
    assert fit_problem(adapter, packed, "c") is None
