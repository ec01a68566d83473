"""What an optimizer step costs with TRL's `GRPOTrainer` and with ours, on the same rollouts.

    python benchmarks/step_cost.py                  # several minutes of one core; Linux
    python benchmarks/step_cost.py --quick          # a trial: a small model and one generation, prints only
    python benchmarks/step_cost.py --only main      # measures these cases anew and keeps the others

Writes benchmarks/results/step_cost.json, .md and .png. All sides take turns in one process; a turn is one generation
batch and the optimizer steps made from it. Completions come from a rollout function, so nothing is generated but for
the last table. The first turn of a side is not timed: in it tokens, operations and memory are counted, and the weights
that it ends at are compared.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from same_rows import random_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trl_algos import PolicyConfig, PolicyTrainer, PPOTrainer

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout functions

RESULTS = Path(__file__).parent / "results"
DATA, TABLE, PLOT = (RESULTS / f"step_cost.{ending}" for ending in ("json", "md", "png"))
VOCABULARY, LONGEST, ROWS, ACCUMULATION, ITERATIONS = 50, 512, 4, 8, 2
LARGE, SMALL, TINY = (256, 6), (128, 4), (64, 2)
"""Hidden size and layers; the last is for a trial."""

Lengths = Callable[[torch.Generator, int], list[int]]
"""Draws tokens of so many completions."""


def log_normal(generator: torch.Generator, count: int) -> list[int]:
    sizes = torch.exp(4.394 + 0.8 * torch.randn(count, generator=generator))  # median 81
    drawn: list[int] = sizes.clamp(8, LONGEST).long().tolist()
    return drawn


def uniform(generator: torch.Generator, count: int) -> list[int]:
    drawn: list[int] = torch.randint(8, LONGEST + 1, (count,), generator=generator).tolist()
    return drawn


def bimodal(generator: torch.Generator, count: int) -> list[int]:
    """Three short answers to one that goes on to the limit."""
    short = torch.randint(20, 81, (count,), generator=generator)
    ends = torch.rand(count, generator=generator) < 0.75
    drawn: list[int] = torch.where(ends, short, LONGEST).tolist()
    return drawn


def equal(generator: torch.Generator, count: int) -> list[int]:
    return [150] * count


@dataclass(frozen=True)
class Case:
    """Rows, and what is trained on them.

    Args:
        title: in the table.
        lengths: of completions.
        prompts: fewest and most tokens of a prompt.
        group: completions of a prompt.
        algorithm: name of ours.
        size: hidden size and layers.
        turns: timed ones of each side.
        sides: names of ours that are measured.
    """

    title: str
    lengths: Lengths = log_normal
    prompts: tuple[int, int] = (20, 60)
    group: int = 8
    algorithm: str = "grpo"
    size: tuple[int, int] = SMALL
    turns: int = 2
    sides: tuple[str, ...] = ("ours",)


OURS: dict[str, dict[str, Any]] = {
    "packed": {"padding_free": True, "share_prompts": False, "reuse_first_pass": False},
    "shared prompts": {"padding_free": True, "reuse_first_pass": False},
    "ours": {"padding_free": None},
    "without first pass": {"reuse_first_pass": False},
    "padded": {"padding_free": False},
    "as TRL splits it": {"padding_free": False, "regroup_micro_batches": False, "skip_idle_rows": False},
}
"""Side -> its settings. "ours" is all of it; it and "padded" take old log-probs from the first pass."""

CASES = {
    "main": Case("GRPO", size=LARGE, turns=4, sides=("padded", "packed", "shared prompts", "ours")),
    "long_prompts": Case("GRPO, prompts and completions of 150", equal, (150, 150), size=LARGE),
    "equal": Case(
        "GRPO, prompts of 2, completions of 150",
        equal,
        (2, 2),
        size=LARGE,
        turns=6,
        sides=("ours", "without first pass"),
    ),
    "uniform": Case("GRPO, completions uniform 8-512", uniform),
    "bimodal": Case("GRPO, 3 of 4 completions 20-80, else 512", bimodal),
    "group_16": Case("GRPO, groups of 16", group=16),
    "dapo": Case("DAPO, no dynamic sampling", algorithm="dapo"),
    "gspo": Case("GSPO", algorithm="gspo"),
    "ppo": Case("PPO, critic of its own", algorithm="ppo"),
}
THEIRS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dapo": {"loss_type": "dapo", "beta": 0.0, "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0},
}
OWN: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.04},
    "dapo": {"dynamic_sampling": False, "overlong_buffer": 0, "epsilon": 0.2},
    "gspo": {"epsilon": 0.2, "epsilon_high": 0.2, "beta": 0.0},
    "ppo": {"critic": "separate", "beta": 0.04},
}
"""Settings of each algorithm on TRL's side and on ours, so that both take the same step."""


def rows_of(case: Case, turn: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of prompts, equal within a group, and of completions."""
    generator = torch.Generator().manual_seed(turn)

    def ids(size: int) -> list[int]:
        drawn: list[int] = torch.randint(3, VOCABULARY, (size,), generator=generator).tolist()
        return drawn

    low, high = case.prompts
    sizes = torch.randint(low, high + 1, (count // case.group,), generator=generator).tolist()
    prompts = [prompt for size in sizes for prompt in [ids(size)] * case.group]
    return prompts, [ids(size) for size in case.lengths(generator, count)]


def spread(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that tells all rows of a group apart, so that none is idle."""
    return [sum((place % 7 + 1) * token for place, token in enumerate(ids)) % 97 / 97 for ids in completion_ids]


class Clock(TrainerCallback):
    """CPU seconds of each optimizer step, with the generation batch where one is due, and memory at its peak."""

    def __init__(self, memory: bool) -> None:
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self._memory = memory

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._memory:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
            self._base = resident("VmRSS")
        self._start = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self._start)
        if self._memory:
            self.peaks.append(resident("VmHWM") - self._base)


def resident(name: str) -> int:
    """Bytes of this process that are in memory: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def give_back_freed(at_once: bool) -> None:
    """Whether freed tensors go back to the system at once, as counting memory needs and timing does not."""
    libc, mmap_threshold = ctypes.CDLL("libc.so.6"), -3
    libc.mallopt(mmap_threshold, 2**16 if at_once else 2**25)
    libc.malloc_trim(0)


def attention_operations(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    operations: int = sdpa_flop_count(query, key, value)
    return operations


def attention_backward_operations(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    operations: int = sdpa_backward_flop_count(gradient, query, key, value)
    return operations


# Torch's counter does not know the attention of its CPU.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_operations,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_operations,
}


class Tokens:
    """Counts rows and tokens that go through the first layer of each trunk of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self.rows = self.tokens = 0
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
                if name.endswith("layers.0"):
                    module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.rows += hidden.shape[0]
        self.tokens += hidden.shape[0] * hidden.shape[1]


def make_trainer(case: Case, side: str, turn: int, model: str, folder: Path, **others: Any) -> Any:
    """A trainer of one side for one turn."""
    settings = {
        "output_dir": str(folder),
        "num_generations": case.group,
        "num_iterations": ITERATIONS,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_completion_length": LONGEST,
        "max_steps": ITERATIONS,
        "learning_rate": 1e-5,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
    }
    args: Any
    if side == "TRL":
        trainer_class, args = GRPOTrainer, GRPOConfig(**settings | THEIRS[case.algorithm] | others)
    else:
        trainer_class = PPOTrainer if case.algorithm == "ppo" else PolicyTrainer
        args = PolicyConfig(**settings | {"algorithm": case.algorithm} | OWN[case.algorithm] | OURS[side] | others)
    count = ROWS * ACCUMULATION

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids, completion_ids = rows_of(case, turn, len(prompts))
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    torch.manual_seed(0)
    trainer = trainer_class(
        model=model,
        reward_funcs=spread,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(2 * count)]}),
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


@dataclass
class Side:
    """What one side took: CPU seconds of a step in each turn, and the counts of its first turn."""

    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0
    operations: int = 0
    peak: int = 0
    weights: list[Tensor] = field(default_factory=list)

    def count(self, case: Case, name: str, model: str, folder: Path) -> None:
        """The first turn, which is not timed."""
        trainer, clock = make_trainer(case, name, 0, model, folder), Clock(memory=True)
        trainer.add_callback(clock)
        start = [p.detach().clone() for p in trainer.model.parameters()]
        tokens = Tokens(trainer)
        give_back_freed(at_once=True)
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            trainer.train()
        give_back_freed(at_once=False)
        self.rows, self.tokens, self.peak = tokens.rows, tokens.tokens, max(clock.peaks)
        self.operations = counter.get_total_flops()
        self.weights = [p.detach() - q for p, q in zip(trainer.model.parameters(), start, strict=True)]

    def time(self, case: Case, name: str, turn: int, model: str, folder: Path) -> None:
        """CPU seconds of a step, over the steps of a turn."""
        trainer, clock = make_trainer(case, name, turn, model, folder), Clock(memory=False)
        trainer.add_callback(clock)
        gc.collect()
        trainer.train()
        self.seconds.append(sum(clock.seconds) / len(clock.seconds))


def measured(case: Case, folder: Path, turns: int) -> dict[str, dict[str, float]]:
    """Figures of each side of a case; of shares the side that comes first is the base.

    Raises:
        RuntimeError: a side ends at other weights than the first.
    """
    model = random_model(folder / "model", *case.size, VOCABULARY, positions=2 * LONGEST)
    base = "as TRL splits it" if case.algorithm == "ppo" else "TRL"
    sides = {name: Side() for name in (base, *case.sides)}
    for name, side in sides.items():
        side.count(case, name, model, folder)
    for turn in range(1, turns + 1):
        for name in sides if turn % 2 else reversed(sides):
            sides[name].time(case, name, turn, model, folder)
    count, first = ROWS * ACCUMULATION, sides[base]
    prompts, completions = rows_of(case, 0, count)
    # Each row as often as the base has it computed.
    real = sum(map(len, prompts + completions)) * first.rows / count
    figures = {}
    for name, side in sides.items():
        apart = distance(side.weights, first.weights)
        if apart > 0.05:
            raise RuntimeError(f"{case.title}: {name} moves the weights otherwise than {base}, by {apart:.0%}.")
        shares = [own / other for own, other in zip(side.seconds, first.seconds, strict=True)]
        figures[name] = {
            "real_tokens": real / ITERATIONS,
            "computed_tokens": side.tokens / ITERATIONS,
            "computed_per_real": side.tokens / real,
            "computed_share": side.tokens / first.tokens,
            "operations": side.operations / ITERATIONS,
            "operations_share": side.operations / first.operations,
            "cpu_seconds": statistics.mean(side.seconds),
            "cpu_share": statistics.median(shares),
            "cpu_share_of_all": sum(side.seconds) / sum(first.seconds),
            "cpu_share_least": min(shares),
            "cpu_share_most": max(shares),
            "peak_bytes": side.peak,
            "peak_share": side.peak / first.peak,
            "weights_apart": apart,
        }
    return figures


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Norm of the difference of two moves of the weights, relative to the second."""
    pairs = zip(one, other, strict=False)  # a critic comes last, and on one side alone
    apart, size = torch.tensor([[(a - b).square().sum(), b.square().sum()] for a, b in pairs]).sum(0).sqrt().tolist()
    return float(apart / size)


GENERATION = {
    "TRL, GRPO": ("TRL", "grpo", {}),
    "GRPO": ("ours", "grpo", {}),
    "DAPO, dynamic sampling": ("ours", "dapo", {"dynamic_sampling": True}),
}


def right_first_token(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """1 for about one completion in eight, so that whole groups fail."""
    return [float(ids[0] < 9) for ids in completion_ids]


def generation(folder: Path) -> dict[str, dict[str, float]]:
    """Sampling by a small model: tokens per CPU second, calls that a batch takes, and their share of a step's time."""
    model, steps = random_model(folder / "model", *SMALL, VOCABULARY, positions=2 * LONGEST), 3
    figures = {}
    for name, (side, algorithm, settings) in GENERATION.items():
        case = Case(name, algorithm=algorithm)
        trainer = make_trainer(
            case, side, 0, model, folder, max_completion_length=64, num_iterations=1, max_steps=steps, **settings
        )
        trainer.rollout_func, trainer.reward_funcs[:] = None, [right_first_token]
        calls: list[tuple[float, int]] = []
        inner = trainer._generate_single_turn

        def timed(*args: Any, inner: Any = inner, calls: Any = calls) -> Any:
            start = time.process_time()
            found = inner(*args)
            calls.append((time.process_time() - start, sum(map(len, found[0]))))
            return found

        trainer._generate_single_turn = timed
        clock = Clock(memory=False)
        trainer.add_callback(clock)
        trainer.train()
        seconds = sum(s for s, _ in calls)
        figures[name] = {
            "share_of_step": seconds / sum(clock.seconds),
            "tokens_per_second": sum(t for _, t in calls) / seconds,
            "rounds_per_step": len(calls) / steps,
            "tokens_per_step": sum(t for _, t in calls) / steps,
        }
    return figures


HEADING = f"""# Cost of an optimizer step: TRL's `GRPOTrainer` and ours

Llamas with random weights, vocabulary {VOCABULARY}, float32, one thread; {ROWS} rows x {ACCUMULATION} accumulation,
one generation batch to {ITERATIONS} optimizer steps (`num_iterations`), completions from a rollout function. Unless
the title says otherwise prompts are 20-60 tokens, completions log-normal (median 81, sigma 0.8, 8-{LONGEST}), groups
of 8, and the reference is a model of its own (`beta` 0.04; DAPO and GSPO have none). All sides take turns in one
process on the same rows, and end at the same weights.

*computed*: tokens that go through a trunk, for each real one that the first side's passes hold. Below 1: the last
token of a row is never needed, a prompt is computed once for its completions, and the first training pass gives the
old log-probs. *operations*: floating point, of matrix products and attention. *CPU*: processor time of a step
to the first side's, all timed turns together, then the median and range of the pairs. *peak*: memory beyond what is
held when the step begins, in MiB and to the first side's. Tokens, operations and peak are of one generation, CPU of
the others.
"""
COLUMNS = "| side | real | computed | operations | CPU s | CPU | of a pair | peak | to the first |"


def tables(cases: dict[str, Any], generated: dict[str, Any], size: tuple[int, int] | None = None) -> str:
    """All results as Markdown; `size` where it is not that of the cases."""
    lines = [HEADING]
    for name, figures in cases.items():
        hidden, layers = size or CASES[name].size
        lines += [f"## {CASES[name].title} ({hidden} x {layers})", "", COLUMNS, "|---|" + "---:|" * 8]
        for side, f in figures.items():
            cells = [
                side,
                f"{f['real_tokens']:.0f}",
                f"{f['computed_per_real']:.2f}",
                f"{f['operations_share']:.2f}",
                f"{f['cpu_seconds']:.2f}",
                f"{f['cpu_share_of_all']:.2f}",
                f"{f['cpu_share']:.2f} ({f['cpu_share_least']:.2f}-{f['cpu_share_most']:.2f})",
                f"{f['peak_bytes'] / 2**20:.0f}",
                f"{f['peak_share']:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    if generated:
        lines += [
            f"## Sampling ({SMALL[0]} x {SMALL[1]}, {ROWS * ACCUMULATION} rows, at most 64 tokens)",
            "",
            "By transformers' `generate`; one completion in eight is right, and with dynamic sampling groups that are",
            "all right or all wrong are sampled anew.",
            "",
            "| run | tokens per CPU s | rounds a step | tokens a step | share of a step |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, f in generated.items():
            lines.append(
                f"| {name} | {f['tokens_per_second']:.0f} | {f['rounds_per_step']:.1f} | {f['tokens_per_step']:.0f} "
                f"| {f['share_of_step']:.0%} |"
            )
        lines.append("")
    return "\n".join(lines)


def draw(cases: dict[str, Any]) -> None:
    """Tokens, operations and CPU time of a step to those of the first side, for the side that has all of it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    height = 0.26
    bars = {"tokens computed": "computed_share", "operations": "operations_share", "CPU time": "cpu_share_of_all"}
    for place, (label, key) in enumerate(bars.items()):
        values = [figures["ours"][key] for figures in cases.values()]
        axes.barh([i + (place - 1) * height for i in range(len(values))], values, height, label=label)
    axes.set_yticks(range(len(cases)), [CASES[name].title for name in cases])
    axes.invert_yaxis()
    axes.axvline(1, color="0.5", linewidth=1)
    axes.set_xlabel("an optimizer step to TRL's (PPO: to padded rows as TRL splits them)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOT, dpi=75)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="small models and one timed turn; writes nothing")
    parser.add_argument("--only", nargs="+", choices=[*CASES, "generation"], default=[*CASES, "generation"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = json.loads(DATA.read_text()) if DATA.is_file() and not options.quick else {"cases": {}, "generation": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name in CASES:
            if name not in options.only:
                continue
            case = replace(CASES[name], size=TINY) if options.quick else CASES[name]
            kept["cases"][name] = measured(case, Path(scratch), 1 if options.quick else case.turns)
            if not options.quick:
                write(kept)
        if "generation" in options.only:
            kept["generation"] = generation(Path(scratch))
            if not options.quick:
                write(kept)
    found = {name: kept["cases"][name] for name in CASES if name in kept["cases"]}
    print(tables(found, kept["generation"], TINY if options.quick else None))


def write(results: dict[str, Any]) -> None:
    """Store what has been measured so far."""
    cases = {name: results["cases"][name] for name in CASES if name in results["cases"]}
    DATA.write_text(json.dumps(results, indent=1) + "\n")
    TABLE.write_text(tables(cases, results["generation"]))
    if cases:
        draw(cases)


if __name__ == "__main__":
    main()
