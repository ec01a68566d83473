"""A new algorithm is one function and one row: validation, metrics and the loss follow from the row.

The advantage here is the rank of a completion in its group, from -1 (worst) to 1 (best), which no outlier can stretch.

Run: python examples/new_algorithm.py
"""

import torch
from torch import Tensor

from trl_algos import Algorithm, PolicyConfig, PolicyTrainer, register
from trl_algos.core.surrogates import clip
from trl_algos.data import arithmetic, bundled_model_path
from trl_algos.rewards import exact_match


def rank_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """(N,) share of the group that a row beats, less the share that beats it; rows of NaN reward beat nobody."""
    same_group = groups[:, None] == groups[None, :]
    wins = (same_group & (rewards[:, None] > rewards[None, :])).sum(1)
    losses = (same_group & (rewards[:, None] < rewards[None, :])).sum(1)
    return (wins - losses) / (same_group.sum(1) - 1).clamp(min=1).to(torch.float32)


register(
    Algorithm(
        key="rank_po",
        title="Rank policy optimisation",
        paper="an example",
        advantage=rank_advantages,
        surrogate=clip,
        aggregation="token_mean",
        defaults={"epsilon": 0.2, "epsilon_high": 0.28},
    )
)

trainer = PolicyTrainer(
    model=bundled_model_path(),
    reward_funcs=exact_match,
    args=PolicyConfig(
        output_dir="runs/rank_po",
        algorithm="rank_po",
        learning_rate=2e-4,
        max_steps=20,
        per_device_train_batch_size=128,
        max_completion_length=4,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    ),
    train_dataset=arithmetic("train"),
)
trainer.train()
