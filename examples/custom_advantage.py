"""Change the advantage alone, in a subclass of three lines.

Run: python examples/custom_advantage.py
"""

from torch import Tensor

from trl_algos import PolicyConfig, PolicyTrainer, Rollout
from trl_algos.data import arithmetic, bundled_model_path
from trl_algos.rewards import exact_match


class BatchBaselineTrainer(PolicyTrainer):
    def estimate_advantages(self, rollout: Rollout) -> Tensor:
        return rollout.rewards - rollout.rewards.nanmean()


trainer = BatchBaselineTrainer(
    model=bundled_model_path(),
    reward_funcs=exact_match,
    args=PolicyConfig(
        output_dir="runs/batch_baseline",
        algorithm="dapo",
        overlong_buffer=0,
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
