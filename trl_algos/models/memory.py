"""The memory that training holds for weights, gradients and optimizer, from the headers of the model's files alone."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.models.critic_memory import critic_tensors
from trl_algos.models.folder import read_json
from trl_algos.models.lora_shapes import Shape, is_embedding, linear_modules, lora_problems, lora_shapes, saved_copies
from trl_algos.models.optimizer_states import Trained, knows, state_bytes
from trl_algos.models.score_head import classifier_weights, with_trained_score
from trl_algos.models.sharding import PARTS, Sharding, sharding_of
from trl_algos.models.weight_files import Weights, weight_shapes

_DEFAULT_OPTIMIZER = "adamw_torch_fused"

_KV_CACHE = "the KV cache of generation"

NEVER_COUNTED = (
    "activations, logits and the autocast copies of weights",
    _KV_CACHE,
    "the CUDA context and fragmentation",
    "communication buffers (DDP: the gradients once more; ZeRO-3 and FSDP: the layer at work)",
    "buffers of the model, such as rotary frequencies",
)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one process holds through an optimizer step, on its device unless `elsewhere` says otherwise.

    Args:
        parameters: the model's weights; frozen ones where an adapter is trained.
        adapter: LoRA's matrices and the copies that `lora_modules_to_save` trains.
        critic: its own weights, frozen ones included.
        gradients: of all that is trained, the critic included.
        optimizer: its states, and DeepSpeed's float32 copy of what is trained.
        reference: the second model that a KL term compares with.
        trained: how many numbers are trained, over all processes; not bytes.
        words: part -> how it was reckoned.
        elsewhere: part -> where it lies if not on the device: `on the CPU` or `on disk`.
        not_counted: what training needs besides.
    """

    parameters: int
    adapter: int
    critic: int
    gradients: int
    optimizer: int
    reference: int
    trained: int
    words: Mapping[str, str]
    elsewhere: Mapping[str, str]
    not_counted: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes of all parts on the device."""
        return sum(getattr(self, part) for part in PARTS if part not in self.elsewhere)

    def offloaded(self, place: str) -> int:
        """Bytes of all parts that lie at `place`."""
        return sum(getattr(self, part) for part, where in self.elsewhere.items() if where == place)


def estimate(
    folder: str | Path, settings: Mapping[str, Any], num_processes: int = 1, kind: str = "policy"
) -> MemoryEstimate:
    """What training a model takes, by a recipe's resolved settings.

    Only what the settings say is known. `recipe/launch_file.py` makes settings of what `accelerate launch` is told.

    Args:
        folder: the model's folder, with safetensors weights.
        settings: fields of `ModelConfig` and of the trainer's config; a missing one has TRL's default.
        num_processes: how many processes train.
        kind: what is trained: a `policy` that samples, a policy on pairs (`preference`), or a `reward_model`.

    Raises:
        ConfigError: the files cannot be read, their weights are stored quantised, or LoRA's modules are not there.
    """
    config, weights = read_json(Path(folder) / "config.json"), weight_shapes(folder)
    if config.get("quantization_config"):
        raise ConfigError([f"{str(folder)!r} is stored quantised; what it takes in memory cannot be told."])
    if config.get("tie_word_embeddings") and _has_embedding(weights):
        weights.pop("lm_head.weight", None)  # some files hold tied weights twice; the model does not
    if kind == "reward_model":
        weights = classifier_weights(weights)
        settings = with_trained_score(weights, settings) if settings.get("use_peft") else settings
    sharding = sharding_of(settings, num_processes)
    item = sharding.item or _loaded_item(settings, config, weights)
    uses_peft = bool(settings.get("use_peft"))
    trained = (
        _adapter(weights, config, settings, item, sharding) if uses_peft else _whole_model(weights, item, sharding)
    )
    critic = critic_tensors(weights, str(config.get("model_type")), settings, item, sharding)
    learners = trained + (critic.trained if critic else [])
    base = _base_bytes(weights, settings, item)
    has_reference = bool(settings.get("beta")) and not uses_peft and not settings.get("precompute_ref_log_probs")
    whole = {
        "parameters": base if uses_peft else _bytes(trained),
        "adapter": _bytes(trained) if uses_peft else 0,
        "critic": critic.frozen + _bytes(critic.trained) if critic else 0,
        "gradients": _bytes(learners),
        "optimizer": _optimizer_bytes(settings, learners, sharding),
        "reference": base if has_reference else 0,
    }
    shared = {part: math.ceil(whole[part] / sharding.shares.get(part, 1)) for part in PARTS}
    words = _words(weights, settings, item, trained, learners, whole) | {"critic": critic.words if critic else ""}
    shared_by = f"; shared by {num_processes} processes ({sharding.name})"
    return MemoryEstimate(
        **shared,
        trained=sum(tensor.numel for tensor in learners),
        words={
            part: text and text + shared_by * (part in sharding.shares) + _place(sharding.elsewhere.get(part))
            for part, text in words.items()
        },
        elsewhere=sharding.elsewhere,
        not_counted=(*_never_counted(kind), *_also_not_counted(settings, sharding, critic is not None)),
    )


def _place(where: str | None) -> str:
    return f"; {where}" if where else ""


def _never_counted(kind: str) -> tuple[str, ...]:
    return NEVER_COUNTED if kind == "policy" else tuple(part for part in NEVER_COUNTED if part != _KV_CACHE)


def describe(memory: MemoryEstimate) -> list[str]:
    """The estimate as lines to print: size and reckoning of each part, the total, and what is missing."""
    lines = [
        f"{part:<10}  {size(getattr(memory, part)):>10}  {memory.words[part]}" for part in PARTS if memory.words[part]
    ]
    lines.append(f"{'total':<10}  {size(memory.total):>10}  in each process")
    for place in sorted(set(memory.elsewhere.values())):
        lines.append(f"{'besides':<10}  {size(memory.offloaded(place)):>10}  of each process {place}")
    return [*lines, f"Not counted: {'; '.join(memory.not_counted)}."]


def size(count: int) -> str:
    """Bytes in the unit that suits them: `1.5 GiB`, `820.0 MiB`."""
    for unit, power in (("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if count >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count} B"


def _words(
    weights: Weights,
    settings: Mapping[str, Any],
    item: int,
    trained: list[Trained],
    learners: list[Trained],
    whole: Mapping[str, int],
) -> dict[str, str]:
    """How each part is reckoned; nothing for a part that training has not."""
    bits, beta, kept = _bits(settings), settings.get("beta"), settings.get("lora_modules_to_save")
    count, numel = sum(math.prod(shape) for shape, _ in weights.values()), sum(tensor.numel for tensor in trained)
    learned = sum(tensor.numel for tensor in learners)
    optim = _optimizer(settings)
    how_stored = f"linear layers in {bits} bits with their scales, the rest in {item} bytes each"
    words = {
        "parameters": f"{count:,} numbers, " + (how_stored if bits else _each(whole["parameters"], count)),
        "adapter": "",
        "gradients": f"{learned:,} trained numbers, {_each(whole['gradients'], learned)}",
        "optimizer": f"{optim}: {_each(whole['optimizer'], learned)}"
        + ("" if knows(optim) else " (a guess: its states are not known here)"),
        "reference": f"the model once more for beta = {beta}" if beta else "",
    }
    if settings.get("use_peft"):
        copies = f", and a copy of {', '.join(kept)}" if kept else ""
        words["adapter"] = f"{numel:,} numbers: r · (in + out) for each target{copies}"
        words["reference"] = "the model with its adapter off: nothing more" if beta else ""
    if beta and settings.get("precompute_ref_log_probs"):
        words["reference"] = "its log-probabilities, taken before training: nothing more"
    return words


def _each(total: int, count: int) -> str:
    return f"{total / max(count, 1):.3g} bytes each"


def _also_not_counted(settings: Mapping[str, Any], sharding: Sharding, counts_critic: bool) -> Iterator[str]:
    """What these settings need besides."""
    if settings.get("use_vllm") and settings.get("vllm_mode", "colocate") == "colocate":
        yield "vLLM in the same process (`vllm_gpu_memory_utilization`)"
    if settings.get("reward_model_name_or_path"):
        yield "the reward model"
    if settings.get("vf_coef") is not None and not counts_critic:
        yield "the critic, whose model does not lie here: its weights, gradients and optimizer"
    if settings.get("lora_target_parameters"):
        yield "LoRA on `lora_target_parameters`"
    if settings.get("use_dora"):
        yield "DoRA's magnitudes"
    if settings.get("cast_lm_head_to_fp32"):
        yield "the wider output layer of `cast_lm_head_to_fp32`"
    if sharding.elsewhere:
        yield "what comes back to the device while it is at work"


def _whole_model(weights: Weights, item: int, sharding: Sharding) -> list[Trained]:
    item = sharding.trained_item or item
    return [Trained(shape, item, _of_embedding(name)) for name, (shape, _) in weights.items()]


def _adapter(
    weights: Weights, config: Mapping[str, Any], settings: Mapping[str, Any], item: int, sharding: Sharding
) -> list[Trained]:
    """What LoRA trains: its own matrices and the copies of whole modules."""
    model_type = str(config.get("model_type"))
    problems = lora_problems(weights, model_type, settings)
    if problems:
        raise ConfigError(problems)
    # PEFT makes LoRA's matrices in float32. TRL casts all that is trained to bfloat16 on a quantised model, and keeps
    # the model's type under ZeRO-3; DeepSpeed's mixed precision casts everything.
    lora_item = item if sharding.item or sharding.zero_stage == 3 else 4
    copy_item = item
    if _bits(settings):
        lora_item = copy_item = 2
    lora_item, copy_item = sharding.trained_item or lora_item, sharding.trained_item or copy_item
    matrices = [Trained(shape, lora_item) for shape in lora_shapes(weights, model_type, settings)]
    copies = saved_copies(weights, settings).items()
    return matrices + [Trained(shape, copy_item, _of_embedding(name)) for name, shape in copies]


def _optimizer_bytes(settings: Mapping[str, Any], trained: list[Trained], sharding: Sharding) -> int:
    optim, arguments = _optimizer(settings), settings.get("optim_args")
    if sharding.zero_stage is None:
        return state_bytes(optim, arguments, trained)
    # DeepSpeed steps on one flat float32 copy; ZeRO-3 makes none where the weights are float32 already.
    numel = sum(tensor.numel for tensor in trained)
    needs_copy = sharding.zero_stage < 3 or any(tensor.item < 4 for tensor in trained)
    return state_bytes(optim, arguments, [Trained((numel,), 4)]) + 4 * numel * needs_copy


def _optimizer(settings: Mapping[str, Any]) -> str:
    """Name of the optimizer, which a built config has as a member of an enumeration."""
    optim = settings.get("optim") or _DEFAULT_OPTIMIZER
    return str(getattr(optim, "value", optim))


def _base_bytes(weights: Weights, settings: Mapping[str, Any], item: int) -> int:
    """The model's weights as they are loaded, linear layers quantised if the settings ask for it."""
    bits, nested = _bits(settings), bool(settings.get("use_bnb_nested_quant"))
    quantized = {f"{module}.weight" for module in linear_modules(weights)} if bits else set()
    return sum(
        _quantized_bytes(shape, bits, nested) if name in quantized else math.prod(shape) * item
        for name, (shape, _) in weights.items()
    )


def _quantized_bytes(shape: Shape, bits: int, nested: bool) -> int:
    """One matrix as bitsandbytes keeps it, with its constants.

    8 bits: a byte for each number, a float32 scale for each row. 4 bits: half a byte for each number, a scale for each
    block of 64, and a table of 16 float32. A scale is a float32; nested, it is a byte, with a float32 for each 256 of
    them, a table of 256 float32 and an offset.
    """
    if bits == 8:
        return math.prod(shape) + 4 * shape[0]
    blocks = math.ceil(math.prod(shape) / 64)
    scales = blocks + 4 * math.ceil(blocks / 256) + 4 * 256 + 4 if nested else 4 * blocks
    return math.ceil(math.prod(shape) / 2) + scales + 4 * 16


_ITEMS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a number, by torch's names of the types and those of safetensors."""


def _loaded_item(settings: Mapping[str, Any], config: Mapping[str, Any], weights: Weights) -> int:
    """Bytes of a number of the model once it is loaded."""
    asked = (settings.get("model_init_kwargs") or {}).get("dtype") or settings.get("dtype") or "float32"
    stored = config.get("dtype") or config.get("torch_dtype")
    name = str(stored if asked == "auto" else asked).removeprefix("torch.")
    first_float = next((dtype for _, dtype in weights.values() if dtype in _ITEMS), "F32")
    return _ITEMS.get(name, _ITEMS[first_float])


def _bits(settings: Mapping[str, Any]) -> int:
    return 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else 0


def _bytes(tensors: Iterable[Trained]) -> int:
    return sum(tensor.numel * tensor.item for tensor in tensors)


def _of_embedding(weight: str) -> bool:
    return is_embedding(weight.removesuffix(".weight"))


def _has_embedding(weights: Weights) -> bool:
    return any(_of_embedding(name) for name in weights)
