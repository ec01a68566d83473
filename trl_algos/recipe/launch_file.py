"""A config file of `accelerate launch`: how many processes it starts, and which settings of a recipe it stands for."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError, nearest, unknown_name
from trl_algos.models.folder import read_json
from trl_algos.recipe.file import Value, read_file
from trl_algos.recipe.schema import source_file

_SEVERAL = ("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_HPU")
_KINDS = ("NO", *_SEVERAL, "DEEPSPEED", "FSDP")
"""Values of `distributed_type` under which trainers run here."""


@dataclass(frozen=True)
class Launch:
    """What a launch adds to a recipe.

    Args:
        num_processes: processes that train together, over all machines.
        settings: `deepspeed`, or `fsdp` and `fsdp_config`, as a recipe would have them; where each stands.
        mixed_precision: what the recipe computes in where it sets neither `bf16` nor `fp16`; with where it stands.
    """

    num_processes: int
    settings: Mapping[str, Value]
    mixed_precision: Value | None = None

    def problems(self, values: Mapping[str, Any]) -> Iterator[str]:
        """A message where the launch would have a run compute otherwise than its recipe says.

        Args:
            values: the recipe's settings, resolved.
        """
        given = self.mixed_precision
        if given is not None and given.text in ("bf16", "fp16") and not (values["bf16"] or values["fp16"]):
            yield (
                f"{given.where}`mixed_precision`: {given.text} would hold although the recipe says `bf16: false`; "
                "write 'no' here, and the recipe decides."
            )


def read_launch(path: str, num_processes: int | None = None) -> Launch:
    """What a config file of `accelerate launch` asks for.

    Args:
        path: the YAML file.
        num_processes: the launcher's option of that name, which wins over the file; None where it is not given.

    Raises:
        ConfigError: with everything that keeps accelerate from starting processes by it, or makes it start fewer.
    """
    problems: list[str] = []
    written = read_file(path, problems)
    if not written:
        raise ConfigError(problems)
    problems += _key_problems(written)
    kind = written["distributed_type"].text if "distributed_type" in written else None
    problems += _kind_problems(path, kind, written)
    count, found = _processes(path, kind, written, num_processes)
    problems += found
    settings: dict[str, Value] = {}
    if not problems and kind == "DEEPSPEED":
        settings, problems = _deepspeed(written)
    if not problems and kind == "FSDP":
        settings = _fsdp(written)
    if problems:
        raise ConfigError(problems)
    return Launch(count, settings, written.get("mixed_precision"))


def launched_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """The backend that `accelerate launch` has told this process of, as settings of a recipe; nothing without one."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        own = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        zero = {"stage": int(stage) if stage.isdecimal() else 0}
        return {"deepspeed": {"zero_optimization": zero} if own == "none" else own}
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        prefix = "FSDP_"
        block = {key.removeprefix(prefix).lower(): v for key, v in environment.items() if key.startswith(prefix)}
        return {"fsdp": True, "fsdp_config": block}
    return {}


def _key_problems(written: Mapping[str, Value]) -> Iterator[str]:
    """Keys that accelerate refuses, and those inside its blocks, which it passes over without a word."""
    for key, value in written.items():
        if key not in _keys():
            yield f"{value.where}`{key}`: accelerate knows no such key.{nearest(key, _keys())}"
    for key, prefix in (("deepspeed_config", ""), ("fsdp_config", "fsdp_")):
        block = written[key].value if key in written else None
        for name in block if isinstance(block, Mapping) else ():
            flag = name if str(name).startswith(prefix) else f"{prefix}{name}"
            if flag not in _flags():
                yield f"{written[key].where}`{key}`: accelerate knows no {name!r} in it.{nearest(flag, _flags())}"


def _kind_problems(path: str, kind: str | None, written: Mapping[str, Value]) -> Iterator[str]:
    where = written["distributed_type"].where if "distributed_type" in written else f"{path}: "
    if kind is None:
        yield f"{where}`distributed_type`: not set; give one of {', '.join(_KINDS)}."
    elif kind == "MULTI_CPU":
        yield (
            f"{where}`distributed_type`: MULTI_CPU starts one process, whatever `num_processes` says; take MULTI_GPU "
            "with `use_cpu: true`, as launch/cpu_ddp.yaml has it."
        )
    elif kind not in _KINDS:
        yield f"{where}{unknown_name('distributed_type', kind, _KINDS)}"


def _processes(
    path: str, kind: str | None, written: Mapping[str, Value], asked: int | None
) -> tuple[int, Iterator[str]]:
    """Number of processes that start, and a message for each thing wrong with it."""
    value, machines = written.get("num_processes"), written.get("num_machines")
    if kind == "NO":
        many = (
            f"`--num_processes`: {asked}, but {path} starts one process (`distributed_type: 'NO'`); take another file."
        )
        return 1, iter([many] if asked is not None and asked > 1 else [])
    count = asked if asked is not None else value.value if value is not None else None
    where = value.where if value is not None and asked is None else f"{path}: "
    if type(count) is not int or count < 1:
        return 1, iter(
            [f"{where}`num_processes`: {count!r} must be a whole number of at least 1, here or on the command line."]
        )
    hosts = machines.value if machines is not None else 1
    if type(hosts) is not int or hosts < 1 or count % hosts:
        message = (
            f"`num_processes`: {count} is no multiple of `num_machines`, which is {hosts!r}; it counts all machines."
        )
        return count, iter([f"{where}{message}"])
    if kind == "MULTI_GPU" and count < 2:
        return count, iter([f"{where}`num_processes`: 1 is refused with MULTI_GPU; take launch/single_gpu.yaml."])
    return count, iter(())


def _deepspeed(written: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """DeepSpeed's config, as accelerate makes it."""
    given = written.get("deepspeed_config", Value({}, None, ""))
    block = given.value if isinstance(given.value, Mapping) else {}
    own = block.get("deepspeed_config_file")
    if own is not None:
        try:
            return {"deepspeed": Value(read_json(own), None, given.where)}, []
        except ConfigError as error:
            return {}, [f"{given.where}`deepspeed_config`: {problem}" for problem in error.problems]
    stage = block.get("zero_stage", 2)
    if stage not in (0, 1, 2, 3):
        return {}, [f"{given.where}`deepspeed_config`: zero_stage {stage!r} is not one of 0, 1, 2, 3."]
    zero: dict[str, Any] = {"stage": stage}
    for part, least in (("optimizer", 1), ("param", 3)):
        device = str(block.get(f"offload_{part}_device") or "none")
        if device not in ("none", "cpu", "nvme"):
            return {}, [
                f"{given.where}`deepspeed_config`: offload_{part}_device {device!r} is not one of none, cpu, nvme."
            ]
        if device != "none" and stage < least:
            return {}, [
                f"{given.where}`deepspeed_config`: offload_{part}_device {device} is not used below zero_stage "
                f"{least}."
            ]
        zero[f"offload_{part}"] = {"device": device}
    return {"deepspeed": Value({"zero_optimization": zero}, None, given.where)}, []


_FSDP_NAMES = {"offload_params": "cpu_offload"}
"""Name in accelerate's block -> that in `fsdp_config` of a recipe."""


def _fsdp(written: Mapping[str, Value]) -> dict[str, Value]:
    given = written.get("fsdp_config", Value({}, None, ""))
    names = {str(name).removeprefix("fsdp_"): value for name, value in (given.value or {}).items()}
    block = {_FSDP_NAMES.get(name, name): value for name, value in names.items()}
    block.setdefault("version", 1)  # accelerate's default; that of a recipe is 2
    return {"fsdp": Value(True, "true", given.where), "fsdp_config": Value(block, None, given.where)}


@cache
def _keys() -> frozenset[str]:
    """Keys of a config file for machines of one's own, read off accelerate's source."""
    tree = ast.parse(source_file("accelerate.commands.config.config_args").read_text(encoding="utf-8"))
    fields = {
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("BaseConfig", "ClusterConfig")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return frozenset(fields | {"fp16", "dynamo_backend"})  # of older files, which accelerate converts


@cache
def _flags() -> frozenset[str]:
    """Options of `accelerate launch`, which the entries of its blocks set, read off its source."""
    text = Path(source_file("accelerate.commands.launch")).read_text(encoding="utf-8")
    return frozenset(re.findall(r'"--([a-z0-9_]+)"', text))
