"""Cost of the maths: advantages and losses of core beside loops over groups or rows that do the same.

    python benchmarks/maths_cost.py        # about two minutes of one core

Writes benchmarks/results/maths_cost.md. Both sides run in one process and their results are compared. Memory is the
growth of the process that a call causes, measured in a process of its own (Linux). The last table is the share that
advantages and loss have of an optimizer step of a small model, for which all else is as cheap as it ever gets.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from same_rows import COMPLETION, PROMPT, SIDES, make_trainer, random_model
from torch import Tensor

from trl_algos import core
from trl_algos.trainers import policy_trainer

TABLE = Path(__file__).parent / "results" / "maths_cost.md"
ROWS = (1_000, 32_000, 1_000_000)
LOOPED = 32_000
"""Rows up to which the loops run, too."""
TOKENS, GROUP, TURNS = 16, 8, 5
HIDDEN, LAYERS, VOCABULARY, STEP_ROWS, STEPS = 256, 6, 64, 16, 6


class Batch(NamedTuple):
    """What the functions take: N rows in groups of `GROUP`, each of `TOKENS` tokens, some of them masked."""

    rewards: Tensor
    groups: Tensor
    lengths: Tensor
    mask: Tensor
    logps: Tensor
    old_logps: Tensor
    values: Tensor
    token_rewards: Tensor


def make_batch(rows: int) -> Batch:
    """A random batch, the same for the same number of rows."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(1, TOKENS + 1, (rows,), generator=generator)
    mask = torch.arange(TOKENS) < lengths[:, None]

    def noise() -> Tensor:
        return torch.randn(rows, TOKENS, generator=generator)

    old_logps = -noise().abs()
    rewards = torch.randint(0, 2, (rows,), generator=generator).float()
    return Batch(
        rewards=rewards,
        groups=torch.arange(rows) // GROUP,
        lengths=lengths,
        mask=mask,
        logps=old_logps + 0.2 * noise(),
        old_logps=old_logps,
        values=noise(),
        token_rewards=core.token_rewards(rewards, mask),
    )


# The loops: what one writes down first.


def group_normalized_loop(batch: Batch) -> Tensor:
    """One group after the other."""
    parts = []
    for start in range(0, len(batch.rewards), GROUP):
        group = batch.rewards[start : start + GROUP]
        spread = bool(group.max() > group.min())
        parts.append((group - group.mean()) / (group.std() + 1e-4) if spread else torch.zeros_like(group))
    return torch.cat(parts)


def leave_one_out_loop(batch: Batch) -> Tensor:
    """One row after the other."""
    out = torch.zeros_like(batch.rewards)
    for start in range(0, len(batch.rewards), GROUP):
        group = batch.rewards[start : start + GROUP].tolist()
        for place, reward in enumerate(group):
            out[start + place] = reward - (sum(group) - reward) / (len(group) - 1)
    return out


def gae_loop(batch: Batch) -> Tensor:
    """One row after the other, backwards."""
    out = torch.zeros_like(batch.values)
    for row, length in enumerate(batch.lengths.tolist()):
        advantage = next_value = 0.0
        rewards, values = batch.token_rewards[row].tolist(), batch.values[row].tolist()
        for place in reversed(range(length)):
            advantage = rewards[place] + next_value - values[place] + 0.95 * advantage
            out[row, place], next_value = advantage, values[place]
    return out


def clip_loop(batch: Batch) -> Tensor:
    """One row after the other; its mean over all tokens."""
    total = torch.zeros(())
    for row, length in enumerate(batch.lengths.tolist()):
        ratio = (batch.logps[row, :length] - batch.old_logps[row, :length]).exp()
        advantage = batch.rewards[row] - 0.5
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    return total / batch.lengths.sum()


CASES: dict[str, tuple[Callable[[Batch], Tensor], Callable[[Batch], Tensor] | None]] = {
    "GRPO advantages": (lambda b: core.group_normalized_advantages(b.rewards, b.groups), group_normalized_loop),
    "RLOO advantages": (lambda b: core.leave_one_out_advantages(b.rewards, b.groups), leave_one_out_loop),
    "REINFORCE++ advantages": (lambda b: core.reinforce_pp_advantages(b.token_rewards, b.mask), None),
    "GAE": (lambda b: core.gae(b.token_rewards, b.values, b.mask, 1.0, 0.95)[0], gae_loop),
    "clipped loss": (
        lambda b: core.policy_loss(b.logps, b.old_logps, b.rewards - 0.5, b.mask, epsilon=0.2).loss,
        clip_loop,
    ),
    "GSPO loss": (
        lambda b: (
            core.policy_loss(
                b.logps, b.old_logps, b.rewards - 0.5, b.mask, ratio_level="sequence", epsilon=3e-4, epsilon_high=4e-4
            ).loss
        ),
        None,
    ),
}
"""Name -> the function, and its loop."""


def cpu_seconds(function: Callable[[Batch], Tensor], batch: Batch) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    function(batch)
    return time.process_time() - start


def bytes_needed(name: str, rows: int) -> int:
    """What a call adds to the memory of a process that holds its arguments, and gives freed tensors back at once."""
    command = [sys.executable, __file__, "--memory", name, str(rows)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def print_bytes_needed(name: str, rows: str) -> None:
    """The other side of `bytes_needed`: print the growth of this process."""
    CASES[name][0](make_batch(8))
    batch = make_batch(int(rows))
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    CASES[name][0](batch)
    print(status_bytes("VmHWM") - before)


def status_bytes(field: str) -> int:
    """A figure that Linux keeps about this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def scaling() -> list[str]:
    """The table of times and memory."""
    heads = [f"{rows:,} rows" for rows in ROWS]
    lines = [
        f"| function | {' | '.join(f'{head}, ms' for head in heads)} | µs a row, {heads[1]} | {heads[2]} "
        f"| B a row, {heads[1]} | {heads[2]} | loop, {LOOPED:,} rows, ms | loop / ours |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (function, loop) in CASES.items():
        times = []
        for rows in ROWS:
            batch = make_batch(rows)
            function(batch)
            times.append(statistics.median(cpu_seconds(function, batch) for _ in range(TURNS)))
        beside, factor = "", ""
        if loop is not None:
            batch = make_batch(LOOPED)
            torch.testing.assert_close(function(batch), loop(batch), rtol=1e-4, atol=1e-5)
            own = cpu_seconds(loop, batch)
            beside, factor = f"{own * 1e3:,.0f}", f"{own / times[ROWS.index(LOOPED)]:,.0f}"
        cells = [f"{seconds * 1e3:,.2f}" for seconds in times]
        each = [f"{seconds / rows * 1e6:.2f}" for seconds, rows in zip(times[1:], ROWS[1:], strict=True)]
        memory = [f"{bytes_needed(name, rows) / rows:,.0f}" for rows in ROWS[1:]]
        lines.append(f"| {name} | {' | '.join([*cells, *each, *memory])} | {beside} | {factor} |")
    return lines


def share_of_a_step(folder: Path) -> list[str]:
    """The table of shares: CPU seconds inside `estimate_advantages` and `policy_loss`, of those of whole steps."""
    model = random_model(folder / "model", HIDDEN, LAYERS, VOCABULARY)
    lines = ["| run | CPU s a step | advantages | loss |", "|---|---:|---:|---:|"]
    for name in ("full, GRPO", "full, PPO, critic separate"):
        trainer = make_trainer(SIDES[name], model, folder / "run", STEP_ROWS, STEPS)
        spent = {"advantages": 0.0, "loss": 0.0}
        trainer.estimate_advantages = timed(trainer.estimate_advantages, spent, "advantages")
        whole = policy_trainer.policy_loss
        policy_trainer.policy_loss = timed(whole, spent, "loss")
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        policy_trainer.policy_loss = whole
        shares = [f"{100 * part / seconds:.2f}%" for part in spent.values()]
        lines.append(f"| {name} | {seconds / STEPS:.3f} | {' | '.join(shares)} |")
    return lines


def timed(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    """`function`, which adds its CPU seconds to `spent[name]`."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = function(*args, **kwargs)
        spent[name] += time.process_time() - start
        return result

    return measured


def keep_memory() -> None:
    """Start again with an allocator that keeps what is freed: else each large tensor is paid for in page faults."""
    wanted = {"MALLOC_MMAP_THRESHOLD_": str(2**34), "MALLOC_TRIM_THRESHOLD_": str(2**36)}
    if wanted.keys() - os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        return print_bytes_needed(*sys.argv[2:])
    keep_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        lines = [
            "# Cost of the maths",
            "",
            f"Rows of up to {TOKENS} tokens in groups of {GROUP}, float32, one thread; medians of {TURNS} calls, CPU "
            "time. *B*: bytes that a call",
            "adds to the memory of its process; a tensor of one float32 for each token has 64 a row.",
            "",
            *scaling(),
            "",
            "## Share of an optimizer step",
            "",
            f"A Llama of {HIDDEN} x {LAYERS}, vocabulary {VOCABULARY}; {STEP_ROWS} fixed rows of {PROMPT} + "
            f"{COMPLETION} tokens a step, {STEPS} steps. Nothing is generated.",
            "",
            *share_of_a_step(Path(scratch)),
            "",
        ]
    TABLE.write_text("\n".join(lines))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
