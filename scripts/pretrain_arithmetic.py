"""Pretrain the bundled arithmetic model: a character tokenizer and a tiny Llama, from nothing, on one CPU thread.

    python scripts/pretrain_arithmetic.py

The model sees only the training split of `trl_algos.data.arithmetic`, as an unreliable text: one answer digit in three
or so is replaced by a random one. What comes out mostly knows the sums and samples wrong digits all the same, as base
models do, and training stops before all of them are learnt: reinforcement learning has both to mend. Seeds, order and
thread count are fixed, so that a second run on the same machine writes the same weights bit by bit.
"""

import argparse
import os
import time
from pathlib import Path

# Before torch loads: the order of floating-point sums depends on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl_algos.data import arithmetic, bundled_model_path

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-="
LONGEST_ANSWER = 3
SAMPLES = 8

README = """# arithmetic-lm

A Llama with {parameters:,} parameters that continues addition prompts: `47+85=` with `132`. Operands are 0 to 99,
tokens are single characters, prompts are padded on the left.

It is a base model for trying out reinforcement learning on a CPU within minutes. Pretraining was supervised, on the
training split of `trl_algos.data.arithmetic` only: the operand pairs of the held-out split were never seen, in either
order. A share of {noise:g} of the answer digits was replaced by random ones, and training stopped early, so that the
model knows more than its samples show and still has something to learn.

| held-out prompts ({prompts:,}) | share right |
|---|---|
| greedy | {greedy:.3f} |
| sampled, temperature 1 | {sampled:.3f} |
| any of {samples} samples (pass@{samples}) | {any_right:.3f} |

Made by `python scripts/pretrain_arithmetic.py` with its default arguments. Licence: Apache-2.0.
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Character tokenizer that puts `<bos>` in front and pads on the left."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Llama with random weights, small enough for a training step to take a tenth of a second."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def training_tensors(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels (N, T) of the whole training split; only the answer and `<eos>` carry labels."""
    rows = arithmetic("train")
    prompts = tokenizer(list(rows["prompt"])).input_ids
    answers = tokenizer([f"{answer}<eos>" for answer in rows["answer"]], add_special_tokens=False).input_ids
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(prompts), width), tokenizer.pad_token_id)
    labels = torch.full((len(prompts), width), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        # Padding sits on the right here: causal attention never looks at it, so no mask is needed.
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def with_wrong_digits(
    ids: torch.Tensor, labels: torch.Tensor, digits: torch.Tensor, noise: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of `ids` and `labels` (B, T) with a share `noise` of the answer digits drawn anew from `digits` (10,)."""
    replaced = torch.isin(labels, digits) & (torch.rand(ids.shape, generator=generator) < noise)
    drawn = digits[torch.randint(len(digits), ids.shape, generator=generator)]
    return torch.where(replaced, drawn, ids), torch.where(replaced, drawn, labels)


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    ids: torch.Tensor,
    labels: torch.Tensor,
    args: argparse.Namespace,
) -> LlamaForCausalLM:
    """Train with AdamW, warm-up and linear decay to zero; epochs are fresh permutations, noise is fresh every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    generator = torch.Generator().manual_seed(args.seed)
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    order = torch.empty(0, dtype=torch.long)
    start = time.perf_counter()
    model.train()
    for step in range(args.steps):
        if len(order) < args.batch_size:
            order = torch.randperm(len(ids), generator=generator)
        batch, order = order[: args.batch_size], order[args.batch_size :]
        noisy_ids, noisy_labels = with_wrong_digits(ids[batch], labels[batch], digits, args.noise, generator)
        scale = min((step + 1) / args.warmup_steps, (args.steps - step) / (args.steps - args.warmup_steps))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * scale
        loss = model(input_ids=noisy_ids, labels=noisy_labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:5d}  loss {loss.item():.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return model.eval()


@torch.inference_mode()
def evaluate(folder: Path, seed: int) -> dict[str, float]:
    """Greedy accuracy, sampled accuracy and pass@8 on all held-out prompts, of the model as it was saved."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32").eval()
    rows = arithmetic("test")
    answers = list(rows["answer"])
    inputs = tokenizer(list(rows["prompt"]), padding=True, return_tensors="pt", return_token_type_ids=False)
    width = inputs.input_ids.shape[1]

    def right(samples: int, **settings: bool | float) -> torch.Tensor:
        output = model.generate(**inputs, max_new_tokens=LONGEST_ANSWER + 1, num_return_sequences=samples, **settings)
        texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        hits = [text == answers[row // samples] for row, text in enumerate(texts)]
        return torch.tensor(hits).view(len(answers), samples)

    sampled = right(SAMPLES, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    return {
        "prompts": len(answers),
        "greedy": right(1, do_sample=False).float().mean().item(),
        "sampled": sampled.float().mean().item(),
        "any_right": sampled.any(dim=1).float().mean().item(),
    }


def main() -> None:
    """Build, pretrain, save, load again and evaluate."""
    parser = argparse.ArgumentParser(description="Pretrain the bundled arithmetic model.")
    parser.add_argument("--output", type=Path, default=Path(bundled_model_path()))
    parser.add_argument("--steps", type=int, default=750)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--noise", type=float, default=0.3, help="share of answer digits drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = pretrain(build_model(tokenizer), tokenizer, *training_tensors(tokenizer), args)
    model.generation_config.do_sample = True
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)

    scores = evaluate(args.output, args.seed)
    readme = README.format(parameters=model.num_parameters(), noise=args.noise, samples=SAMPLES, **scores)
    (args.output / "README.md").write_text(readme, encoding="utf-8")
    print("held-out  " + "  ".join(f"{name} {value:.3f}" for name, value in scores.items() if name != "prompts"))


if __name__ == "__main__":
    main()
