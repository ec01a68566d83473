"""CPU time of a PPO step with each form of critic as a multiple of GRPO's on the same rows, beside what it may cost.

    python benchmarks/ppo_cost.py          # about three minutes of one core

Writes benchmarks/results/ppo_cost.md. All sides take turns in one process; completions are fixed, so no time goes into
generation. What a step may cost is GRPO's step, plus one pass of the critic to score the rows, plus one forward and
backward pass of it and its part of the optimizer step, which are measured on their own. Passes are counted by hooks.
"""

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from same_rows import COMPLETION, PROMPT, SIDES, make_trainer, random_model
from transformers import TrainerCallback

TABLE = Path(__file__).parent / "results" / "ppo_cost.md"
HIDDEN, LAYERS, VOCABULARY, ROWS = 128, 4, 1024, 8
PAIRS, STEPS = 5, 4
"""Turns of each side, and steps in each, of which the first is not counted."""


class Clock(TrainerCallback):
    """CPU seconds of each optimizer step, generation batch and optimizer included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self._start)


def pass_counter(trainer: Any) -> Counter[str]:
    """Counts rows that go through the first layer of each trunk, by what they go through it for."""
    counts: Counter[str] = Counter()
    critic = getattr(trainer, "critic", None)
    own_trunk = critic is not None and critic.form == "separate"

    def first_layer(trunk: Any) -> Any:
        return next(module for name, module in trunk.named_modules() if name.endswith("layers.0"))

    def count(who: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            name, projection = who, module.self_attn.q_proj
            if who == "policy" and hasattr(projection, "_disable_adapters"):
                if projection._disable_adapters:
                    name = "reference"
                elif projection._active_adapter == ["critic"]:
                    name = "critic"
            counts[f"{name}, {'gradient' if torch.is_grad_enabled() else 'scoring'}"] += len(hidden)

        return hook

    base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    first_layer(base.model).register_forward_pre_hook(count("policy"), with_kwargs=True)
    if own_trunk:
        first_layer(critic.trunk).register_forward_pre_hook(count("critic"), with_kwargs=True)
    if trainer.ref_model is not None:
        first_layer(trainer.ref_model).register_forward_pre_hook(count("reference"), with_kwargs=True)
    return counts


def turn(side: dict[str, Any], model: str, folder: Path) -> tuple[float, dict[str, float]]:
    """One turn: CPU seconds of a step, and passes of its rows through each model."""
    trainer = make_trainer(side, model, folder, ROWS, STEPS, gradient_checkpointing=False)
    clock, counts = Clock(), pass_counter(trainer)
    trainer.add_callback(clock)
    trainer.train()
    return statistics.median(clock.seconds[1:]), {name: rows / ROWS / STEPS for name, rows in counts.items()}


def critic_alone(side: dict[str, Any], model: str, folder: Path) -> float:
    """CPU seconds of what a critic has to do in a step: score, learn, and be stepped."""
    trainer = make_trainer(side, model, folder, ROWS, STEPS, gradient_checkpointing=False)
    critic, parameters = trainer.critic, trainer.critic.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)  # Trainer's choice
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + COMPLETION), generator=torch.Generator().manual_seed(1))
    mask, seconds = torch.ones_like(ids), []
    with torch.no_grad():
        policy_states = critic._hidden(ids, mask)
    for _ in range(STEPS):
        start = time.process_time()
        with torch.no_grad():
            critic.values(ids, mask)
        # A shared critic learns from the states that the policy's own pass leaves.
        values = critic.head(policy_states) if critic.form == "shared" else critic.values(ids, mask)
        values.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def table(model: str, folder: Path, kl: dict[str, Any], heading: str) -> list[str]:
    """A table of all sides, which take turns; ratios are medians over the turns."""
    sides = {name: side | kl for name, side in SIDES.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    alone: dict[str, list[float]] = {name: [] for name in sides if "PPO" in name}
    passes: dict[str, dict[str, float]] = {}
    for _ in range(PAIRS):
        for name, side in sides.items():
            seconds, passes[name] = turn(side, model, folder)
            times[name].append(seconds)
            if name in alone:
                alone[name].append(critic_alone(side, model, folder))
    lines = [
        f"## {heading}",
        "",
        "| run | CPU s a step | to GRPO | may be | passes a step |",
        "|---|---:|---:|---:|---|",
    ]
    for name in sides:
        base = times[f"{name.partition(',')[0]}, GRPO"]
        ratio = statistics.median(own / grpo for own, grpo in zip(times[name], base, strict=True))
        bound = 1.0
        if name in alone:
            bound = statistics.median((grpo + own) / grpo for own, grpo in zip(alone[name], base, strict=True))
        counted = "; ".join(f"{who} {number:g}" for who, number in sorted(passes[name].items()))
        lines.append(f"| {name} | {statistics.median(times[name]):.3f} | {ratio:.2f} | {bound:.2f} | {counted} |")
    return [*lines, ""]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = random_model(folder / "model", HIDDEN, LAYERS, VOCABULARY)
        turn(SIDES["LoRA, PPO, critic separate"], model, folder / "run")  # so that everything is loaded
        lines = [
            "# Cost of a PPO step beside GRPO's",
            "",
            f"A Llama of {HIDDEN} x {LAYERS}, vocabulary {VOCABULARY}, float32, one thread; {ROWS} fixed rows of "
            f"{PROMPT} + {COMPLETION} tokens a step, one",
            "generation batch to one optimizer step, no gradient checkpointing. Medians over "
            f"{PAIRS} turns of {STEPS - 1} steps, all sides in turn.",
            "*may be*: (GRPO's step + one scoring pass of the critic + one forward and backward pass of it and its",
            "optimizer step) / GRPO's step. *passes*: how often the rows of a step go through a trunk.",
            "",
            *table(model, folder / "run", {}, "With a reference, KL in the reward"),
            *table(
                model, folder / "run", {"beta": 0.0, "kl_placement": None, "kl_estimator": None}, "Without a reference"
            ),
        ]
    TABLE.write_text("\n".join(lines))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
