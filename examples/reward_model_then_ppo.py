"""Learn a reward model from pairs of answers, then train the policy by PPO against it.

The pairs are of right and wrong sums. `BradleyTerryTrainer` makes the reward model, which does two things then: it
scores completions, and it is what the critic of PPO starts from. Which sums are right is measured, but not rewarded.

Run: python examples/reward_model_then_ppo.py    # about a minute of one CPU core

On prompts that nothing here has seen the reward model puts 0.979 of the pairs the right way round, and the share of
sampled sums that are right goes from 0.326 to 0.612.
"""

import argparse

import torch

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PolicyConfig, PPOTrainer
from trl_algos.data import arithmetic, arithmetic_preferences, bundled_model_path
from trl_algos.rewards import exact_match
from trl_algos.run.held_out import held_out_rewards

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--output_dir", default="runs/reward_model_then_ppo")
parser.add_argument("--reward_steps", type=int, default=600)
parser.add_argument("--ppo_steps", type=int, default=300)
parser.add_argument("--held_out_prompts", type=int, default=1969, help="all there are: 1969")
options = parser.parse_args()

CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
COMMON = {"report_to": "none", "save_strategy": "no", "logging_steps": 50, **CPU}
reward_model_folder = f"{options.output_dir}/reward_model"

# 1. The reward model: the policy's layers, with a head for one score in the place of the LM head. A pair is a sum with
# its answer, and with one that has another digit, one digit more or one less.

reward_trainer = BradleyTerryTrainer(
    model=bundled_model_path(),
    args=BradleyTerryConfig(
        output_dir=reward_model_folder,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        max_steps=options.reward_steps,
        per_device_train_batch_size=128,
        per_device_eval_batch_size=2000,
        center_rewards_coefficient=0.01,  # right and wrong on either side of 0
        **COMMON,
    ),
    train_dataset=arithmetic_preferences("train", repeats=4),
    eval_dataset=arithmetic_preferences("test"),
)
reward_trainer.train()
held_out_pairs = reward_trainer.evaluate()
with torch.no_grad():  # 1 between right and wrong, however sure of itself the model is: PPO's settings suit that
    reward_trainer.model.score.weight /= held_out_pairs["eval_margin"]
reward_trainer.evaluate()  # mean and spread of the rewards, as they are now, go into the model's config
reward_trainer.save_model()

# 2. PPO against the reward model, from which the critic starts, too. `exact_match` has no weight: it is logged alone.

trainer = PPOTrainer(
    model=bundled_model_path(),
    reward_funcs=[reward_model_folder, exact_match],
    args=PolicyConfig(
        output_dir=options.output_dir,
        algorithm="ppo",
        reward_weights=[1.0, 0.0],
        critic="separate",
        critic_model_name_or_path=reward_model_folder,
        num_iterations=2,
        learning_rate=3e-4,
        critic_learning_rate=1e-3,
        vf_coef=0.5,
        max_steps=options.ppo_steps,
        per_device_train_batch_size=128,
        steps_per_generation=2,
        per_device_eval_batch_size=2000,
        max_completion_length=4,
        **COMMON,
    ),
    train_dataset=arithmetic("train"),
)
test_prompts = arithmetic("test", options.held_out_prompts)
before = held_out_rewards(trainer, test_prompts).sampled
trainer.train()
after = held_out_rewards(trainer, test_prompts).sampled
trainer.save_model()

print(f"Reward model: {held_out_pairs['eval_accuracy']:.3f} of the held-out pairs the right way round.")
for name in before:
    print(f"Policy, {name}: {before[name]:.3f} before, {after[name]:.3f} after, sampled on held-out prompts.")
