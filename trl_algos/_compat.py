"""The TRL release this plugin is made for, and every private TRL name that it relies on.

`tests/test_trl_contract.py` checks the list against the installed TRL, signatures included, and says what broke.
"""

from importlib.metadata import version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

TRL_RANGE = ">=1.16,<1.17"

UPLOAD_METHODS: dict[str, tuple[str, ...]] = {
    "_finish_current_push": ("self",),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_save": ("self", "output_dir", "state_dict"),
    "create_model_card": ("self", "model_name", "dataset_name", "tags"),
    "init_hf_repo": ("self", "token", "private"),
    "push_to_hub": ("self", "commit_message", "blocking", "token", "revision", "private", "kwargs"),
    "save_model": ("self", "output_dir", "_internal_call"),
}
"""Of every trainer: what saves and uploads."""

GRPO_TRAINER_METHODS: dict[str, tuple[str, ...]] = {
    **UPLOAD_METHODS,
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_clip_grad_norm": ("self", "model"),
    "_compute_loss": ("self", "model", "inputs"),
    "_generate": ("self", "prompts"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_generate_single_turn": (
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ),
    "_get_learning_rate": ("self",),
    "_maybe_log_save_evaluate": (
        "self",
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
        "learning_rate",
    ),
    "_remove_unused_columns": ("self", "dataset", "description"),
    "_run_epoch": (
        "self",
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "trial",
        "ignore_keys_for_eval",
        "start_time",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ),
    "_determine_best_metric": ("self", "metrics", "trial"),
    "_get_grad_norm": ("self", "model", "grad_norm"),
    "_get_output_dir": ("self", "trial"),
    "_get_train_sampler": ("self", "dataset"),
    "_load_best_model": ("self",),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_save_checkpoint": ("self", "model", "trial"),
    "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    "create_optimizer": ("self", "model"),
    "evaluate": ("self", "eval_dataset", "ignore_keys", "metric_key_prefix"),
    "create_scheduler": ("self", "num_training_steps", "optimizer"),
    "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
    "get_high_entropy_mask": ("self", "entropies", "mask", "threshold"),
    "get_train_dataloader": ("self",),
    "save_model": ("self", "output_dir", "_internal_call"),
    "set_initial_training_values": ("self", "args", "dataloader"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "get_off_policy_mask": (
        "advantages",
        "per_token_logps",
        "sampling_per_token_logps",
        "mask",
        "off_policy_threshold",
    ),
}
"""Method of `GRPOTrainer` that we override or call -> its parameters."""

LOGPS_PARAMETERS = (
    "self",
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
)
"""The leading parameters of `_get_per_token_logps_and_entropies`; what follows are image and video inputs."""

GRPO_TRAINER_ATTRIBUTES = (
    "_buffered_inputs",
    "_created_lr_scheduler",
    "_entropy_bonus_enabled",
    "_entropy_window_stats",
    "_is_vlm",
    "_last_world_entropy",
    "_logs",
    "_metrics",
    "_name",
    "_paper",
    "_pending_extra_logs",
    "_pending_metrics",
    "_step",
    "_tag_names",
    "_tokenizer",
    "_tr_loss",
    "add_callback",
    "aux_loss_enabled",
    "callback_handler",
    "control",
    "current_gradient_accumulation_steps",
    "deepspeed",
    "entropy_coef",
    "environment_factories",
    "environments",
    "eos_token_ids",
    "generation_config",
    "generation_kwargs",
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "lr_scheduler",
    "max_completion_length",
    "model_wrapped",
    "multi_objective_aggregation",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "off_policy_mask_threshold",
    "optimizer",
    "processing_class",
    "ref_model",
    "reward_func_names",
    "reward_funcs",
    "reward_weights",
    "router_aux_loss_coef",
    "scale_rewards",
    "shuffle_dataset",
    "temperature",
    "top_entropy_quantile",
    "train_dataset",
    "use_adaptive_entropy",
    "use_vllm",
    "vllm_generation",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)
"""Attributes of a `GRPOTrainer` that we read or set; `vllm_generation` exists with `use_vllm` alone."""

GENERATED_KEYS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "advantages",
    "num_items_in_batch",
)
"""Keys that `_generate_and_score_completions` always returns."""

TRAINER_UTILS = (
    "create_model_from_path",
    "use_adapter",
    "disable_dropout_in_model",
    "disable_gradient_checkpointing",
    "get_callable_name",
    "is_async_callable",
    "pad",
)
"""Helpers imported from `trl.trainer.utils` and `trl.models.utils`."""

PREFERENCE_TRAINER_METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "DPOTrainer": {
        **UPLOAD_METHODS,
        "_determine_best_metric": ("self", "metrics", "trial"),
        "_get_grad_norm": ("self", "model", "grad_norm"),
        "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
        "_load_best_model": ("self",),
        "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
        "_load_optimizer_and_scheduler": ("self", "checkpoint"),
        "_get_output_dir": ("self", "trial"),
        "_push_from_checkpoint": ("self", "checkpoint_folder"),
        "_precompute_ref_logps": ("self", "dataset", "name", "batch_size"),
        "_save_checkpoint": ("self", "model", "trial"),
        "save_model": ("self", "output_dir", "_internal_call"),
        "compute_ref_log_probs": ("self", "model", "inputs"),
        "_compute_loss": ("self", "model", "inputs", "return_outputs"),
        "_prepare_dataset": ("self", "dataset", "processing_class", "args", "dataset_name"),
        "_set_signature_columns_if_needed": ("self",),
        "evaluate": ("self", "eval_dataset", "ignore_keys", "metric_key_prefix"),
        "log": ("self", "logs", "start_time"),
    },
    "RewardTrainer": {
        **UPLOAD_METHODS,
        "_determine_best_metric": ("self", "metrics", "trial"),
        "_get_grad_norm": ("self", "model", "grad_norm"),
        "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
        "_load_best_model": ("self",),
        "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
        "_load_optimizer_and_scheduler": ("self", "checkpoint"),
        "_save_checkpoint": ("self", "model", "trial"),
        "_get_output_dir": ("self", "trial"),
        "_push_from_checkpoint": ("self", "checkpoint_folder"),
        "save_model": ("self", "output_dir", "_internal_call"),
        "_prepare_dataset": ("self", "dataset", "processing_class", "args", "dataset_name"),
        "_set_signature_columns_if_needed": ("self",),
        "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
        "evaluate": ("self", "eval_dataset", "ignore_keys", "metric_key_prefix"),
        "log": ("self", "logs", "start_time"),
    },
}
"""Trainer -> its method that we override -> its parameters."""

PREFERENCE_TRAINER_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "DPOTrainer": (
        "_metrics",
        "_precompute_model_hash",
        "_total_train_tokens",
        "_signature_columns",
        "beta",
        "label_smoothing",
        "ref_model",
    ),
    "RewardTrainer": ("_metrics", "_signature_columns", "_total_train_tokens"),
}
"""Trainer -> its attributes that we read or set."""

FUSED_HEAD_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Fields of `FusedCausalLMOutput`, of a model called with `fused_lm_head=True`, with one value per next token."""

FUSED_HEAD_OTHERS = ("loss", "label_mask", "aux_loss")
"""Its other fields."""

FUSED_HEAD_KEYWORDS = ("fused_lm_head", "labels", "shift_labels", "num_items_in_batch")
"""What such a model takes besides its own keywords."""

PREFERENCE_UTILS = ("DataCollatorForPreference",)
"""Helpers imported from `trl.trainer.reward_trainer`."""


def check_trl_version() -> None:
    """Raise `ImportError` naming the range and the command, unless the installed TRL is in `TRL_RANGE`."""
    installed = version("trl")
    if not SpecifierSet(TRL_RANGE).contains(Version(installed), prereleases=True):
        raise ImportError(f"trl_algos needs trl{TRL_RANGE}, found {installed}. Run: pip install 'trl{TRL_RANGE}'")


check_trl_version()
