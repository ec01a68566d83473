"""Keys that a user of TRL may look for and that no setting here has: what became of them."""

from collections.abc import Mapping

OF_PPO: Mapping[str, str] = {
    "kl_coef": "is called `beta`",
    "cliprange": "is called `epsilon`",
    "cliprange_value": "is called `value_clip_range`",
    "num_ppo_epochs": "is called `num_iterations`",
    "lam": "is called `gae_lambda`",
    "whiten_rewards": "is not here: advantages are whitened, rewards are not",
    "num_mini_batches": "follows from batch sizes: `gradient_accumulation_steps` micro-batches are an optimizer step, "
    "`steps_per_generation` of them a generation batch",
    "total_episodes": "is counted in optimizer steps, `max_steps`, or in `num_train_epochs`",
    "local_rollout_forward_batch_size": "is `per_device_train_batch_size`",
    "response_length": "is called `max_completion_length`",
    "missing_eos_penalty": "is not here: `overlong_buffer` takes reward off long completions, and "
    "`mask_truncated_completions` leaves out those that are cut off",
    "sft_model_path": "is called `model_name_or_path`",
    "reward_model_path": "is called `reward_model_name_or_path`",
    "value_model": "is called `critic_model_name_or_path`",
}
"""Settings of TRL's former `PPOConfig`, and of its script for PPO."""

_OF_ALL: Mapping[str, str] = {
    "num_processes": "belongs to the launcher: `accelerate launch --num_processes N -m trl_algos train RECIPE`",
    "config_file": "belongs to the launcher, or to `trl-algos check`: `accelerate launch --config_file FILE -m "
    "trl_algos train RECIPE`",
    "accelerate_config": "belongs to the launcher: `accelerate launch --config_file FILE -m trl_algos train RECIPE`",
    "config": "is an option of the command line, which names the recipe",
    "torch_dtype": "is called `dtype`",
    "warmup_ratio": "is not part of transformers 5: `warmup_steps` below 1 is a share",
}

_OF_POLICIES: Mapping[str, str] = {
    "max_prompt_length": "is not part of TRL 1.16: prompts are never cut",
    "environment_factory": "is an argument of `PolicyTrainer`, for scripts",
    "rollout_func": "is an argument of `PolicyTrainer`, for scripts",
    "tools": "is an argument of `PolicyTrainer`, for scripts",
    **OF_PPO,
}

_OF_PAIRS: Mapping[str, str] = {
    "max_prompt_length": "is not part of TRL 1.16: `max_length` holds for prompt and completion together",
    "rpo_alpha": "is `nll_coef` of `algorithm: rpo`",
    "ref_model": "is an argument of `PreferenceTrainer`, for scripts; a recipe starts from its reference",
    "reference_free": "is not part of TRL 1.16: every loss here is against a reference",
    "model_adapter_name": "is not part of TRL 1.16: the adapter is called default",
    "ref_adapter_name": "is not part of TRL 1.16: the reference is the model that the run starts from",
    "generate_during_eval": "is not part of TRL 1.16: evaluation judges pairs",
    "label_pad_token_id": "is not part of TRL 1.16",
    "padding_value": "is not part of TRL 1.16: the tokenizer says what pads",
    "use_logits_to_keep": "is not part of TRL 1.16: logits are worked out in chunks",
}


def elsewhere(kind: str) -> Mapping[str, str]:
    """Key -> what became of it, as the rest of a sentence, for recipes of a kind."""
    return {**_OF_ALL, **(_OF_POLICIES if kind == "policy" else _OF_PAIRS)}
