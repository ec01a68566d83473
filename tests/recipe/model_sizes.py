"""Models of real sizes as files without weights: the headers of safetensors files, from which memory is estimated."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Size(NamedTuple):
    """The shapes of a dense model of the Qwen2.5 family; 70B are those of Llama 3."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    groups: int
    vocabulary: int
    tied: bool = False


SIZES = {
    "0.5B": Size(896, 4864, 24, 14, 2, 151_936, tied=True),
    "1.5B": Size(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "3B": Size(2048, 11_008, 36, 16, 2, 151_936, tied=True),
    "7B": Size(3584, 18_944, 28, 28, 4, 152_064),
    "14B": Size(5120, 13_824, 48, 40, 8, 152_064),
    "32B": Size(5120, 27_648, 64, 40, 8, 152_064),
    "70B": Size(8192, 28_672, 80, 64, 8, 128_256),
}


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight; biases of attention, a few thousandths of a percent, are left out."""
    keys = size.hidden // size.heads * size.groups
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size.vocabulary, size.hidden)}
    for layer in range(size.layers):
        of = f"model.layers.{layer}."
        found |= {f"{of}self_attn.{name}_proj.weight": (size.hidden, size.hidden) for name in "qo"}
        found |= {f"{of}self_attn.{name}_proj.weight": (keys, size.hidden) for name in "kv"}
        found |= {f"{of}mlp.{name}_proj.weight": (size.mlp, size.hidden) for name in ("gate", "up")}
        found[f"{of}mlp.down_proj.weight"] = (size.hidden, size.mlp)
        found |= {f"{of}{name}_layernorm.weight": (size.hidden,) for name in ("input", "post_attention")}
    found["model.norm.weight"] = (size.hidden,)
    return found if size.tied else found | {"lm_head.weight": (size.vocabulary, size.hidden)}


def write_headers(folder: Path, size: Size) -> str:
    """A folder with config.json and a sparse file of bfloat16 weights, of which no byte is written."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes(size).items():
        count = 1
        for length in shape:
            count *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * count]}
        end += 2 * count
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "tie_word_embeddings": size.tied}))
    return str(folder)
