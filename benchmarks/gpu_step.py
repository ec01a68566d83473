"""Memory and tokens per second of optimizer steps of a 0.5B model of random weights, on a CUDA device.

    python benchmarks/gpu_step.py          # a few minutes; says so and ends where there is no CUDA device

Writes benchmarks/results/gpu_step.md. Nothing is downloaded: the shapes are those of Qwen2.5-0.5B, the weights random,
the tokenizer one of bytes. The first step warms up; figures are of the others. The estimate is `trl-algos check`'s.
`--device cpu --layers 2 --completion_length 8` tries the script on a CPU, and writes nothing.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

TABLE = Path(__file__).parent / "results" / "gpu_step.md"
LORA = {"use_peft": True, "lora_r": 32, "lora_target_modules": "all-linear"}
SIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GRPO, LoRA": ({"algorithm": "grpo", "num_generations": 4}, LORA),
    "GRPO, whole": ({"algorithm": "grpo", "num_generations": 4}, {}),
    "PPO, LoRA, critic: adapter": ({"algorithm": "ppo", "critic": "adapter"}, LORA),
}
"""Row -> settings of the trainer, and of the model."""


def random_model(folder: Path, layers: int) -> str:
    """Folder with a model of Qwen2.5-0.5B's shapes, of which `layers` layers, and a tokenizer of bytes."""
    import tiny
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
        pad_token_id=tiny.PAD,
        eos_token_id=tiny.EOS,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def measure(
    side: str, model: str, device: str, completion_length: int, rows: int = 8, steps: int = 3
) -> dict[str, Any]:
    """Figures of a few optimizer steps.

    Args:
        side: one of `SIDES`.
        model: folder of the model.
        device: `cuda` or `cpu`.
        completion_length: tokens of every completion.
        rows: completions of a step.
        steps: optimizer steps; the first is not timed where there are others.

    Returns:
        `estimated`, `held` (weights, gradients and optimizer states after the last step), and with CUDA `peak`, bytes;
        `seconds` of a step; `tokens`, completion tokens a second; `loss`, of the last step.
    """
    import tiny
    import torch
    from trl import ModelConfig, get_peft_config

    from trl_algos import PolicyConfig, PolicyTrainer
    from trl_algos.models.memory import estimate
    from trl_algos.trainers import PPOTrainer

    settings, of_model = SIDES[side]
    cuda = device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        args = PolicyConfig(
            output_dir=folder,
            **settings,
            beta=0.0,
            bf16=True,
            use_cpu=not cuda,
            model_init_kwargs={"dtype": "bfloat16"},
            per_device_train_batch_size=rows,
            max_completion_length=completion_length,
            generation_kwargs={"min_new_tokens": completion_length},
            max_steps=steps,
            learning_rate=1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rewards = lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]  # noqa: E731
        peft = get_peft_config(ModelConfig(**of_model))
        data = tiny.prompts(rows * steps)
        trainer = (PPOTrainer if "critic" in settings else PolicyTrainer)(
            model, rewards, args, train_dataset=data, peft_config=peft
        )
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        ends: list[float] = []
        trainer.add_callback(_clock(ends, cuda))
        started = time.perf_counter()
        trainer.train()
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    states = [v for s in trainer.optimizer.state.values() for k, v in s.items() if torch.is_tensor(v) and k != "step"]
    told = settings | of_model | {"dtype": "bfloat16", "optim": args.optim, "beta": 0.0, "vf_coef": args.vf_coef}
    seconds = (ends[-1] - ends[0]) / (steps - 1) if steps > 1 else ends[-1] - started
    return {
        "estimated": estimate(model, told).total,
        "held": sum(x.numel() * x.element_size() for x in [*trainer.model.parameters(), *trained, *states]),
        "peak": torch.cuda.max_memory_allocated() if cuda else None,
        "seconds": seconds,
        "tokens": rows * completion_length / seconds,
        "loss": [log["loss"] for log in trainer.state.log_history if "loss" in log][-1],
    }


def _clock(ends: list[float], cuda: bool) -> Any:
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Notes when a step's work on the device is done."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    return Clock()


def main() -> None:
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--completion_length", type=int, default=256)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("Skipped: there is no CUDA device.")
        return
    lines = [
        "| | estimated GiB | held GiB | peak GiB | seconds a step | tokens a second |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), asked.layers)
        for side in SIDES:
            found = measure(side, model, asked.device, asked.completion_length)
            sizes = [f"{found[name] / 2**30:.2f}" if found[name] else "-" for name in ("estimated", "held", "peak")]
            lines.append(f"| {side} | {' | '.join(sizes)} | {found['seconds']:.2f} | {found['tokens']:.0f} |")
            print(lines[-1], flush=True)
    if asked.device == "cuda":
        what = f"8 completions of {asked.completion_length} tokens a step, bf16, {torch.cuda.get_device_name()}"
        TABLE.write_text(f"{what}; by `{Path(__file__).name}`.\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
