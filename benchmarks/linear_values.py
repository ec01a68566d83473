"""The most that `critic: shared` can explain: a ridge regression of the returns on the policy's last hidden states.

    python benchmarks/linear_values.py           # of the bundled model
    python benchmarks/linear_values.py FOLDER    # of a model that was trained, such as runs/ppo_arithmetic

Prints the explained variance of returns that the regression has not seen; gamma and lambda are 1, without KL, so the
return of every token is the reward of its completion.
"""

import sys

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_algos.core.values import explained_variance
from trl_algos.data import arithmetic, bundled_model_path
from trl_algos.rewards import exact_match

LENGTH = 4
PENALTIES = (1.0, 10.0, 100.0, 1000.0)


@torch.no_grad()
def states_and_returns(model: torch.nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """(M, width) states before each of M sampled tokens, and (M,) rewards of their completions."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    rows = arithmetic("train", seed=seed)
    prompts = tokenizer(list(rows["prompt"]), padding=True, padding_side="left", return_tensors="pt")
    ids = model.generate(
        **prompts, max_new_tokens=LENGTH, do_sample=True, top_k=0, eos_token_id=tokenizer.eos_token_id
    )
    completions = ids[:, prompts["input_ids"].shape[1] :]
    ends = (completions == tokenizer.eos_token_id).long()
    mask = ends.cumsum(1) - ends == 0
    texts = tokenizer.batch_decode(completions.masked_fill(~mask, tokenizer.pad_token_id), skip_special_tokens=True)
    rewards = torch.tensor(exact_match(completions=texts, answer=list(rows["answer"])))
    seen = torch.cat([prompts["attention_mask"], mask.long()], dim=1)
    states = model.base_model(input_ids=ids, attention_mask=seen).last_hidden_state[:, -completions.shape[1] - 1 : -1]
    return states[mask].double(), rewards[:, None].expand_as(mask)[mask].double()


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else bundled_model_path()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    states, returns = states_and_returns(model, seed=1)
    new_states, new_returns = states_and_returns(model, seed=2)
    centred, target = states - states.mean(0), returns - returns.mean()
    for penalty in PENALTIES:
        gram = centred.T @ centred + penalty * torch.eye(states.shape[1], dtype=states.dtype)
        values = new_states @ torch.linalg.solve(gram, centred.T @ target)
        share = explained_variance(values[None], new_returns[None], torch.ones_like(values)[None])
        print(f"ridge {penalty:g}: explains {share:.3f} of the variance of {len(values)} returns")


if __name__ == "__main__":
    main()
