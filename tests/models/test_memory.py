"""The estimate against tensors: what a real model, adapter and optimizer hold after one step, byte by byte."""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import tiny
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_algos.config import PolicyConfig
from trl_algos.data import bundled_model_path
from trl_algos.errors import ConfigError
from trl_algos.models.memory import NEVER_COUNTED, PARTS, MemoryEstimate, describe, estimate, size
from trl_algos.models.optimizer_states import Trained, knows, state_bytes
from trl_algos.trainers import PolicyTrainer, PPOTrainer

BUNDLED = bundled_model_path()
COUNT = 83_328
"""Parameters of the bundled model: see its README."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers; hidden 32, MLP 64, vocabulary 258; the output layer is a weight of its own."""
    folder = str(tmp_path_factory.mktemp("llama"))
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers with Conv1D; hidden 32, vocabulary 258; the output layer is the embedding."""
    folder = str(tmp_path_factory.mktemp("gpt2"))
    tiny.gpt2().save_pretrained(folder)
    return folder


def held(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held_states(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's states, without step counters and the tables that all 8-bit states share."""
    states = [(name, value) for state in optimizer.state.values() for name, value in state.items()]
    return held(v for name, v in states if torch.is_tensor(v) and name not in ("step", "RMS") and name[:4] != "qmap")


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def measured(model: torch.nn.Module) -> dict[str, int]:
    """Bytes after a step of AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    one_step(model, optimizer)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return {
        "parameters": held(frozen or trained),
        "adapter": held(trained) if frozen else 0,
        "critic": 0,
        "gradients": held(p.grad for p in trained),
        "optimizer": held_states(optimizer),
        "reference": 0,
    }


def parts(memory: MemoryEstimate) -> dict[str, int]:
    return {part: getattr(memory, part) for part in PARTS}


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_full_training_holds_what_is_estimated(llama: str, gpt2: str, dtype: str, item: int) -> None:
    for folder in (llama, gpt2, BUNDLED):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        memory = estimate(folder, {"dtype": dtype, "optim": "adamw_torch", "bf16": True})
        assert parts(memory) == measured(model)
        assert memory.trained == sum(p.numel() for p in model.parameters())
        assert memory.total == 4 * item * memory.trained


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"lora_r": 4, "lora_target_modules": ["q_proj", "down_proj"]},
        {"lora_r": 3, "lora_target_modules": ["all-linear"]},
        {"lora_target_modules": r".*layers\.1\..*\.(up|gate)_proj"},
        {"lora_target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        {"lora_modules_to_save": ["embed_tokens", "lm_head"]},
        {"lora_modules_to_save": ["norm"]},  # PEFT compares ends of names: every layer's norms, too
        {"lora_target_modules": ["q_proj", "up_proj"], "lora_modules_to_save": ["mlp"]},
    ],
)
def test_lora_holds_what_is_estimated(llama: str, lora: dict[str, Any], dtype: str) -> None:
    for folder in (llama, BUNDLED):
        settings = {"use_peft": True, "dtype": dtype, "beta": 0.1, **lora}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = get_peft_model(model, get_peft_config(ModelConfig(use_peft=True, **lora)))
        memory = estimate(folder, settings)
        assert parts(memory) == measured(model)
        assert memory.trained == model.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize(
    "lora", [{}, {"lora_target_modules": ["all-linear"]}, {"lora_target_modules": r"transformer\.h\.0\..*c_proj"}]
)
def test_lora_on_gpt2_holds_what_is_estimated(gpt2: str, tmp_path: Path, lora: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.float32)
    model = get_peft_model(model, get_peft_config(ModelConfig(use_peft=True, **lora)))
    expected = measured(model)
    assert parts(estimate(gpt2, {"use_peft": True, **lora})) == expected
    # GPT-2's weights on the Hub are those of the model without its head.
    shutil.copy(Path(gpt2) / "config.json", tmp_path)
    weights = load_file(Path(gpt2) / "model.safetensors")
    save_file({name.removeprefix("transformer."): w for name, w in weights.items()}, tmp_path / "model.safetensors")
    assert parts(estimate(tmp_path, {"use_peft": True, **lora})) == expected


def test_lora_by_hand(llama: str) -> None:
    # PEFT's default for Llama: q_proj and v_proj of two layers, all 32 x 32; r = 16 by TRL's default.
    memory = estimate(llama, {"use_peft": True})
    assert memory.trained == 4 * 16 * (32 + 32)
    assert memory.adapter == memory.gradients == 4 * memory.trained
    assert memory.optimizer == 8 * memory.trained
    assert memory.reference == 0


def test_experts_and_routers_are_no_linear_layers(tmp_path: Path) -> None:
    names = ["embed.weight", "l.experts.0.up.weight", "l.mlp.gate.weight", "l.q.weight", "lm_head.weight"]
    save_file({name: torch.zeros(2, 6) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    memory = estimate(tmp_path, {"use_peft": True, "lora_r": 1, "lora_target_modules": "all-linear"})
    assert memory.trained == 2 + 6


def quantized_bytes(model: torch.nn.Module) -> int:
    """Bytes of frozen weights, with the constants of quantised ones."""
    total = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        constants = [parameter, getattr(parameter, "SCB", None)]
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            constants += [state.absmax, state.code]
        if state is not None and state.nested:
            constants += [state.offset, state.state2.absmax, state.state2.code]
        total += held(tensor for tensor in constants if tensor is not None)
    return total


@pytest.mark.parametrize(
    "bits", [{"load_in_4bit": True}, {"load_in_4bit": True, "use_bnb_nested_quant": True}, {"load_in_8bit": True}]
)
def test_quantised_models_hold_what_is_estimated(llama: str, gpt2: str, bits: dict[str, bool]) -> None:
    # GPT-2's layers are stored the other way round, which shows in the scales of 8 bits: one for each row.
    for folder in (llama, BUNDLED) if "load_in_8bit" in bits else (llama, BUNDLED, gpt2):
        config = get_quantization_config(ModelConfig(**bits))
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
        model.requires_grad_(False)
        assert estimate(folder, {"use_peft": True, **bits}).parameters == quantized_bytes(model)


def test_four_bits_by_hand(llama: str) -> None:
    # A layer: 4 matrices of 32 x 32, 3 of 32 x 64. Half a byte each, a float32 for each 64, a table of 16 float32.
    layer = 4 * (512 + 16 * 4 + 64) + 3 * (1024 + 32 * 4 + 64)
    others = (258 * 32 + 258 * 32 + 5 * 32) * 2
    settings = {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16"}
    assert estimate(llama, settings).parameters == 2 * layer + others


def test_nested_scales_by_hand(tmp_path: Path) -> None:
    save_file({"q_proj.weight": torch.zeros(257, 64)}, tmp_path / "model.safetensors")  # 257 blocks of 64
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    settings = {"use_peft": True, "load_in_4bit": True}
    assert estimate(tmp_path, settings).parameters == 257 * 32 + 257 * 4 + 64
    # A byte for each scale, two float32 for 257 of them, tables of 256 and 16 float32, an offset.
    assert (
        estimate(tmp_path, settings | {"use_bnb_nested_quant": True}).parameters == 257 * 32 + 257 + 8 + 1024 + 4 + 64
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.04},
        {"beta": 0.04, "dtype": "bfloat16"},
        {"use_peft": True, "beta": 0.04},
        {"use_peft": True, "lora_modules_to_save": ["lm_head"], "load_in_4bit": True},
    ],
)
def test_the_trainer_holds_what_is_estimated(llama: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    model = ModelConfig(**{name: value for name, value in settings.items() if name != "beta"})
    args = PolicyConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        beta=settings.get("beta", 0.0),
        num_generations=2,
        per_device_train_batch_size=2,
        model_init_kwargs={"dtype": model.dtype},
        report_to="none",
    )
    trainer = PolicyTrainer(
        model=llama,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=tiny.prompts(),
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    optimizer = trainer.create_optimizer()
    one_step(trainer.model, optimizer)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    memory = estimate(llama, settings | {"optim": args.optim})
    assert memory.trained == sum(p.numel() for p in trained)
    assert memory.gradients == held(p.grad for p in trained)
    assert memory.optimizer == held_states(optimizer)
    assert memory.parameters == (quantized_bytes(trainer.model) if model.use_peft else held(trained))
    assert memory.adapter == (held(trained) if model.use_peft else 0)
    assert memory.reference == (held(trainer.ref_model.parameters()) if trainer.ref_model else 0)
    assert (memory.reference > 0) == (not model.use_peft)


SHAPES = [(64, 128), (64, 63), (5000,), (7,)]


@pytest.mark.parametrize(
    ("optim", "arguments", "make"),
    [
        ("adamw_torch", None, torch.optim.AdamW),
        ("adamw_torch_fused", None, torch.optim.AdamW),
        ("sgd", None, torch.optim.SGD),
        ("sgd", "momentum=0", torch.optim.SGD),
        ("sgd", "momentum=0.9, nesterov=true", lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True)),
        ("adagrad", None, torch.optim.Adagrad),
        ("rmsprop", "", torch.optim.RMSprop),
        ("rmsprop", "momentum=0.5,centered=yes", lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True)),
        ("adafactor", None, lambda p: Adafactor(p, lr=1e-3, scale_parameter=False, relative_step=False)),
        ("adamw_bnb_8bit", None, lambda p: bitsandbytes.optim.AdamW(p, optim_bits=8)),
        ("adamw_8bit", None, lambda p: bitsandbytes.optim.AdamW(p, optim_bits=8)),
        ("paged_adamw_32bit", None, lambda p: bitsandbytes.optim.AdamW(p, optim_bits=32)),
        ("lion_8bit", None, lambda p: bitsandbytes.optim.Lion(p, optim_bits=8)),
        ("lion_32bit", None, lambda p: bitsandbytes.optim.Lion(p, optim_bits=32)),
        ("ademamix", None, lambda p: bitsandbytes.optim.AdEMAMix(p, optim_bits=32)),
        ("ademamix_8bit", None, lambda p: bitsandbytes.optim.AdEMAMix(p, optim_bits=8)),
        ("rmsprop_bnb_8bit", None, lambda p: bitsandbytes.optim.RMSprop(p, optim_bits=8)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_hold_what_is_estimated(optim: str, arguments: str | None, make: Any, dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    model = torch.nn.ParameterList(parameters)
    optimizer = make(parameters)
    one_step(model, optimizer)
    trained = [Trained(shape, dtype.itemsize) for shape in SHAPES]
    assert state_bytes(optim, arguments, trained) == held_states(optimizer)
    assert knows(optim)


def test_the_optimizer_may_be_the_member_of_an_enumeration() -> None:
    from transformers.training_args import OptimizerNames

    for optim, states in ((OptimizerNames.LION, 1), (None, 2)):
        memory = estimate(BUNDLED, {"optim": optim})
        assert memory.optimizer == 4 * states * COUNT
    assert estimate(BUNDLED, {"optim": OptimizerNames.LION}).words["optimizer"] == "lion_32bit: 4 bytes each"


def test_embeddings_keep_32_bit_states(tmp_path: Path) -> None:
    # Two tensors of 8192: the embedding has 2 states of float32, the layer 2 of a byte with a scale for each 256.
    weights = {"embed_tokens.weight": torch.zeros(128, 64), "up_proj.weight": torch.zeros(128, 64)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert estimate(tmp_path, {"optim": "paged_adamw_8bit"}).optimizer == 8192 * 8 + 2 * (8192 + 32 * 4)


def test_torchao_states_by_hand() -> None:
    tensors = [Trained((64, 128), 2), Trained((10,), 2), Trained((5001,), 2)]  # one large, one small, one ragged
    full = 2 * 2 * (10 + 5001)
    assert state_bytes("adamw_torch_8bit", None, tensors) == 2 * (8192 + 32 * 4) + full
    assert state_bytes("adamw_torch_4bit", None, tensors) == 2 * (4096 + 64 * 4) + full


def test_every_optimizer_of_transformers_has_a_size() -> None:
    from transformers.training_args import OptimizerNames

    unknown = {name.value for name in OptimizerNames if not knows(name.value)}
    assert all(state_bytes(name, "x=1", [Trained((3,), 2)]) == 3 * 8 for name in unknown)
    families = ("galore", "apollo", "lomo", "adalomo", "grokadamw", "schedule_free", "stable_adamw")
    assert all(name.startswith(families) for name in unknown)
    assert "a guess" in estimate(BUNDLED, {"optim": "apollo_adamw"}).words["optimizer"]
    assert "a guess" not in estimate(BUNDLED, {}).words["optimizer"]
    assert state_bytes("sgd", "momentum=much", [Trained((3,), 2)]) == 0


def folder_with(tmp_path: Path, stored: torch.dtype, **config: Any) -> Path:
    save_file({"a.weight": torch.zeros(10, 10, dtype=stored)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return tmp_path


@pytest.mark.parametrize(
    ("stored", "config", "settings", "item"),
    [
        (torch.bfloat16, {}, {}, 4),
        (torch.bfloat16, {}, {"dtype": None}, 4),
        (torch.bfloat16, {}, {"dtype": "auto"}, 2),
        (torch.float32, {"dtype": "bfloat16"}, {"dtype": "auto"}, 2),
        (torch.bfloat16, {"torch_dtype": "float32"}, {"dtype": "auto"}, 4),
        (torch.float16, {"dtype": "odd"}, {"dtype": "auto"}, 2),
        (torch.float64, {}, {"dtype": "auto"}, 8),
        (torch.float32, {}, {"dtype": "float16"}, 2),
        (torch.float32, {}, {"dtype": "float32", "model_init_kwargs": {"dtype": "bfloat16"}}, 2),
        (torch.bfloat16, {}, {"dtype": "float32", "model_init_kwargs": {"revision": "main"}}, 4),
        (torch.float32, {}, {"dtype": "float32", "bf16": True}, 4),
    ],
)
def test_weights_are_loaded_as_asked(
    tmp_path: Path, stored: torch.dtype, config: dict[str, Any], settings: dict[str, Any], item: int
) -> None:
    memory = estimate(folder_with(tmp_path, stored, **config), settings)
    assert parts(memory) == {
        "parameters": 100 * item,
        "adapter": 0,
        "critic": 0,
        "gradients": 100 * item,
        "optimizer": 200 * item,
        "reference": 0,
    }


def test_tied_weights_that_are_stored_twice_count_once(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": torch.zeros(5, 2), "lm_head.weight": torch.zeros(5, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    for tied, count in ((True, 10), (False, 20)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": tied}))
        assert estimate(tmp_path, {}).trained == count


def test_a_reference_model_comes_with_beta() -> None:
    assert estimate(BUNDLED, {"beta": 0.0}).reference == estimate(BUNDLED, {"beta": None}).reference == 0
    assert estimate(BUNDLED, {"beta": 0.01, "dtype": "bfloat16"}).reference == 2 * COUNT


def zero(stage: Any, **block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **block}


# Full training in bfloat16: weights, gradients, then 12 bytes (float32 copy and two states), and the reference.
@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, (2, 2, 12, 2)),
        (1, (2, 2, 3, 2)),
        (2, (2, 0.5, 3, 2)),
        (3, (0.5, 0.5, 3, 0.5)),
    ],
)
def test_zero_stages_divide_one_part_after_the_other(stage: int, expected: tuple[float, ...]) -> None:
    memory = estimate(BUNDLED, {"deepspeed": zero(stage), "bf16": True, "beta": 0.1}, num_processes=4)
    found = (memory.parameters, memory.gradients, memory.optimizer, memory.reference)
    assert found == tuple(COUNT * item for item in expected)
    assert memory.trained == COUNT


@pytest.mark.parametrize(
    ("block", "settings", "item"),
    [
        ({}, {}, 4),
        ({}, {"bf16": True}, 2),
        ({}, {"fp16": True}, 2),
        ({"bf16": {"enabled": "auto"}}, {"bf16": True}, 2),
        ({"bf16": {"enabled": "auto"}}, {"bf16": False}, 4),
        ({"bf16": {"enabled": True}}, {}, 2),
        ({"bf16": {"enabled": False}, "fp16": {}}, {"bf16": True, "fp16": True}, 4),
    ],
)
def test_deepspeed_casts_the_whole_model(block: dict[str, Any], settings: dict[str, Any], item: int) -> None:
    memory = estimate(BUNDLED, {"deepspeed": zero(2, **block), **settings})
    assert memory.parameters == memory.gradients == item * COUNT
    assert memory.optimizer == 12 * COUNT


def test_zero_3_copies_only_what_is_not_float32() -> None:
    assert estimate(BUNDLED, {"deepspeed": zero(3)}).optimizer == 8 * COUNT
    assert estimate(BUNDLED, {"deepspeed": zero(3), "bf16": True}).optimizer == 12 * COUNT


def test_lora_under_deepspeed_has_the_type_of_the_model(llama: str) -> None:
    lora = {"use_peft": True, "dtype": "bfloat16"}
    count = 4 * 16 * 64
    assert estimate(llama, {**lora, "deepspeed": zero(2), "bf16": True}).adapter == 2 * count
    assert estimate(llama, {**lora, "deepspeed": zero(3)}).adapter == 2 * count
    assert estimate(llama, {**lora, "deepspeed": zero(2)}).adapter == 4 * count
    memory = estimate(llama, {**lora, "deepspeed": zero(3), "bf16": True}, num_processes=2)
    assert (memory.adapter, memory.gradients, memory.optimizer) == (count, count, 6 * count)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fsdp": True}, (1, 1, 2, 1)),
        ({"fsdp": "full_shard auto_wrap"}, (1, 1, 2, 1)),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, (4, 1, 2, 4)),
        ({"fsdp": "shard_grad_op"}, (4, 1, 2, 4)),
        ({"fsdp": "no_shard"}, (4, 4, 8, 4)),
        ({"fsdp": False, "fsdp_config": {"version": 2}}, (4, 4, 8, 4)),
        # What is trained is widened to float32; the reference stays.
        ({"fsdp": True, "bf16": True, "dtype": "bfloat16"}, (1, 1, 2, 0.5)),
        ({"fsdp": True, "bf16": False, "dtype": "bfloat16"}, (0.5, 0.5, 1, 0.5)),
    ],
)
def test_fsdp_divides_all_or_what_it_shards(settings: dict[str, Any], expected: tuple[float, ...]) -> None:
    memory = estimate(BUNDLED, {"beta": 0.1, **settings}, num_processes=4)
    found = (memory.parameters, memory.gradients, memory.optimizer, memory.reference)
    assert found == tuple(COUNT * item for item in expected)


WHOLE = ("parameters", "adapter", "critic", "reference")


def offload(part: str, device: str) -> dict[str, Any]:
    return {f"offload_{part}": {"device": device}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3} | offload("param", "none")}}, {}),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3} | offload("param", "cpu")}},
            dict.fromkeys(WHOLE, "on the CPU"),
        ),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2} | offload("param", "cpu")}},
            {},
        ),  # which stage 3 alone reads
        (
            {"deepspeed": {"zero_optimization": {"stage": 2} | offload("optimizer", "nvme")}},
            {"optimizer": "on disk", "gradients": "on disk"},
        ),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": "true"}}, dict.fromkeys(PARTS, "on the CPU")),
        ({"fsdp": "full_shard offload"}, dict.fromkeys(PARTS, "on the CPU")),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": False}}, {}),
    ],
)
def test_what_is_offloaded_is_not_on_the_device(settings: dict[str, Any], expected: dict[str, str]) -> None:
    memory = estimate(BUNDLED, {"beta": 0.1, **settings}, num_processes=2)
    assert memory.elsewhere == expected
    held_here = sum(size for part, size in parts(memory).items() if part not in expected)
    assert memory.total == held_here
    assert sum(memory.offloaded(place) for place in set(expected.values())) == sum(parts(memory).values()) - held_here
    assert ("of each process" in "".join(describe(memory))) == bool(expected)


def test_fsdp_leaves_quantised_bytes_whole(llama: str) -> None:
    settings = {"use_peft": True, "load_in_4bit": True, "fsdp": True, "bf16": True}
    alone, two = estimate(llama, settings), estimate(llama, settings, num_processes=2)
    assert (two.parameters, two.adapter) == (alone.parameters, alone.adapter / 2)
    stored = estimate(llama, settings | {"bnb_4bit_quant_storage": "bfloat16"}, num_processes=2)
    assert stored.parameters == alone.parameters / 2


def test_processes_alone_share_nothing() -> None:
    assert parts(estimate(BUNDLED, {}, num_processes=4)) == parts(estimate(BUNDLED, {}))


def test_shares_are_rounded_up(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, torch.float32)
    assert estimate(folder, {"fsdp": True}, num_processes=3).gradients == math.ceil(400 / 3)


def test_deepspeed_settings_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zero(3)))
    assert estimate(BUNDLED, {"deepspeed": str(path)}, num_processes=2).parameters == 2 * COUNT
    for key in ("deepspeed", "fsdp_config"):
        with pytest.raises(ConfigError) as caught:
            estimate(BUNDLED, {"fsdp": True, key: str(tmp_path / "none.json")})
        assert str(caught.value).startswith(f"`{key}`: ")


@pytest.mark.parametrize("block", [{"zero_optimization": 3}, zero("x"), zero([3]), zero(None), {"bf16": {}}])
def test_an_odd_stage_counts_as_none(block: dict[str, Any]) -> None:
    assert estimate(BUNDLED, {"deepspeed": block}, num_processes=2).optimizer == 12 * COUNT


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"lora_target_modules": ["q_porj", "v_proj"]}, "`lora_target_modules`: 'q_porj' is no module of this model"),
        ({"lora_target_modules": ["q_porj", "v_proj"]}, "Did you mean 'q_proj'?"),
        ({"lora_target_modules": "q_proj"}, "'q_proj' matches none; write a list, [q_proj]."),
        ({"lora_target_modules": "(q"}, "`lora_target_modules`: '(q' is not a regular expression: "),
        ({"lora_target_modules": ".*zzz"}, "`lora_target_modules`: '.*zzz' is no module"),
        ({"lora_modules_to_save": ["lm_haed"]}, "`lora_modules_to_save`: 'lm_haed' is no module"),
    ],
)
def test_lora_modules_that_are_not_there_are_named(llama: str, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        estimate(llama, {"use_peft": True, **lora})
    assert len(caught.value.problems) == 1
    assert message in str(caught.value)


def test_peft_refuses_what_the_estimate_refuses(llama: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    with pytest.raises(ValueError, match="not found"):
        get_peft_model(model, get_peft_config(ModelConfig(use_peft=True, lora_target_modules="q_proj")))


@pytest.mark.parametrize("model_type", ["nanochat", "llama"])
def test_models_without_a_fitting_default_need_targets(tmp_path: Path, model_type: str) -> None:
    folder = folder_with(tmp_path, torch.float32, model_type=model_type)
    message = f"`lora_target_modules`: not set, and PEFT has no default that fits this {model_type!r} model; .* of a."
    with pytest.raises(ConfigError, match=message):
        estimate(folder, {"use_peft": True})
    assert estimate(folder, {"use_peft": True, "lora_target_parameters": ["a"]}).trained == 0


def test_a_default_need_not_fit_as_a_whole(tmp_path: Path) -> None:
    save_file({"l.fc1.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "phi"}')  # PEFT's default: q_proj, v_proj, fc1, fc2
    assert estimate(tmp_path, {"use_peft": True, "lora_r": 1}).trained == 5


def test_defaults_are_those_of_peft() -> None:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    from trl_algos.models.lora_shapes import _default_targets

    assert _default_targets() == TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING


def test_weights_that_are_stored_quantised_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, torch.float32, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="is stored quantised"):
        estimate(folder, {})


def test_lines_add_up_and_say_how() -> None:
    lines = describe(estimate(BUNDLED, {"beta": 0.5, "deepspeed": zero(3), "dtype": "bfloat16"}, num_processes=2))
    assert lines[:5] == [
        "parameters    81.4 KiB  83,328 numbers, 2 bytes each; shared by 2 processes (ZeRO-3)",
        "gradients     81.4 KiB  83,328 trained numbers, 2 bytes each; shared by 2 processes (ZeRO-3)",
        "optimizer    488.2 KiB  adamw_torch_fused: 12 bytes each; shared by 2 processes (ZeRO-3)",
        "reference     81.4 KiB  the model once more for beta = 0.5; shared by 2 processes (ZeRO-3)",
        "total        732.4 KiB  in each process",
    ]
    assert lines[5].startswith("Not counted: activations, ")
    assert len(lines) == 6


def test_lines_of_an_adapter() -> None:
    settings = {"use_peft": True, "beta": 0.5, "load_in_4bit": True, "lora_modules_to_save": ["lm_head"]}
    lines = describe(estimate(BUNDLED, settings))
    assert lines[0].endswith("83,328 numbers, linear layers in 4 bits with their scales, the rest in 4 bytes each")
    assert lines[1].endswith("9,280 numbers: r · (in + out) for each target, and a copy of lm_head")
    assert lines[4].endswith("0 B  the model with its adapter off: nothing more")
    assert not any(line.startswith("reference") for line in describe(estimate(BUNDLED, settings | {"beta": 0.0})))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_vllm": True}, "vLLM in the same process"),
        ({"reward_model_name_or_path": "x"}, "the reward model"),
        ({"use_peft": True, "lora_target_parameters": ["x"]}, "LoRA on `lora_target_parameters`"),
        ({"use_peft": True, "use_dora": True}, "DoRA's magnitudes"),
        ({"cast_lm_head_to_fp32": True}, "`cast_lm_head_to_fp32`"),
        ({"fsdp": "full_shard offload"}, "what comes back to the device"),
        ({"critic": "separate", "vf_coef": 0.1, "critic_model_name_or_path": "some/model"}, "the critic, whose model"),
    ],
)
def test_what_else_a_run_needs_is_said(settings: dict[str, Any], words: str) -> None:
    assert words in describe(estimate(BUNDLED, settings))[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"use_vllm": True, "vllm_mode": "server"},
        {"deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "none"}}}},
        {"fsdp": True},
    ],
)
def test_what_a_run_does_not_need_is_not_said(settings: dict[str, Any]) -> None:
    assert estimate(BUNDLED, settings).not_counted == estimate(BUNDLED, {}).not_counted == NEVER_COUNTED


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**42, "4,096.0 GiB"),
    ],
)
def test_sizes_have_the_unit_that_suits_them(count: int, text: str) -> None:
    assert size(count) == text


# A critic


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        {"critic": "shared"},
        {"critic": "separate"},
        {"critic": "shared", "use_peft": True},
        {"critic": "adapter", "use_peft": True},
        {"critic": "separate", "use_peft": True},
        {"critic": "separate", "use_peft": True, "critic_use_peft": False},
    ],
)
def test_a_critic_holds_what_is_estimated(llama: str, tmp_path: Path, settings: dict[str, Any], dtype: str) -> None:
    lora = {"use_peft": bool(settings.get("use_peft")), "lora_r": 4, "lora_target_modules": ["q_proj", "up_proj"]}
    args = PolicyConfig(
        output_dir=str(tmp_path),
        algorithm="ppo",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        model_init_kwargs={"dtype": dtype},
        report_to="none",
        **{key: value for key, value in settings.items() if key != "use_peft"},
    )
    rewards = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    trainer = PPOTrainer(
        llama, rewards, args, train_dataset=tiny.prompts(), peft_config=get_peft_config(ModelConfig(**lora))
    )
    optimizer = trainer.create_optimizer()
    one_step(trainer.model, optimizer)
    told = settings | lora | {"optim": args.optim, "dtype": dtype, "vf_coef": 0.1, "beta": args.beta}
    memory = estimate(llama, told)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert memory.trained == sum(p.numel() for p in trained)
    assert memory.gradients == held(p.grad for p in trained)
    assert memory.optimizer == held_states(optimizer)
    assert memory.parameters + memory.adapter + memory.critic == held(trainer.model.parameters())
    with trainer.critic.hidden():
        assert memory.parameters + memory.adapter == held(trainer.model.parameters())
    assert not any("the critic" in part for part in memory.not_counted)


def test_a_critic_from_afar_is_not_counted_and_one_from_a_folder_is_its_own_size(llama: str) -> None:
    settings = {"critic": "separate", "vf_coef": 0.1, "critic_model_name_or_path": "some/model"}
    afar, here = estimate(llama, settings), estimate(llama, settings | {"critic_model_name_or_path": BUNDLED})
    assert (afar.critic, "the critic, whose model" in " ".join(afar.not_counted)) == (0, True)
    head = 4 * (64 + 1)
    assert here.critic == 4 * COUNT + head
    assert here.gradients == afar.gradients + here.critic
    assert any(line.startswith("critic  ") for line in describe(here))
