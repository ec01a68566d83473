"""The main job: from a recipe to a trained model, a summary and a plot in the run folder."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from httpx import HTTPError
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import get_peft_config, get_quantization_config

from trl_algos.algorithms import advantage_needs
from trl_algos.data.arithmetic_task import BUNDLED_MODELS
from trl_algos.data.loading import column_names, load_data
from trl_algos.errors import ConfigError
from trl_algos.models.critic_folder import is_critic_folder
from trl_algos.models.reward_folder import is_adapter_folder
from trl_algos.recipe import schema
from trl_algos.recipe.arguments import Arguments, build
from trl_algos.recipe.checks import data_spec, needs_test_split
from trl_algos.recipe.reading import Recipe
from trl_algos.rewards.spec import load_rewards
from trl_algos.run.checkpoints import checkpoint_to_resume
from trl_algos.run.folder import (
    PLOT_FILE,
    SUMMARY_FILE,
    keep_previous,
    strict_json,
    take_folder,
    versions,
    write_recipe,
    write_text,
)
from trl_algos.run.held_out import HeldOut, held_out_rewards
from trl_algos.run.metrics_log import MetricsLog
from trl_algos.run.plots import plot_run
from trl_algos.run.progress import ProgressBar
from trl_algos.run.sampling_table import sampling_table
from trl_algos.settings.critic import critic_stands_alone
from trl_algos.settings.public import public_settings
from trl_algos.settings.trainer_checks import launched_processes
from trl_algos.trainers import PolicyTrainer, PPOTrainer


def train(recipe: Recipe) -> PolicyTrainer:
    """Train as `recipe` says, and leave model, tokenizer, metrics, summary and plot in its `output_dir`.

    Raises:
        ConfigError: model, data or rewards are not to be had; nothing was written.
    """
    arguments = build(recipe)
    run, args = arguments.run, arguments.policy
    resume = checkpoint_to_resume(args.resume_from_checkpoint, args.output_dir, args.algorithm, args.max_steps)
    train_dataset, test_dataset = load_data(data_spec(recipe), needs_test_split(recipe.values))
    rewards = _rewards(arguments, column_names(train_dataset))
    held_out = _held_out_prompts(run.held_out_prompts, test_dataset)
    trainer = _trainer(arguments, rewards, train_dataset, test_dataset, resume)
    settings = _settings(recipe, arguments)
    lock = None
    if trainer.is_world_process_zero():
        lock = take_folder(args.output_dir)
        _open_folder(args.output_dir, settings, resumed=resume is not None)
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    progress = ProgressBar()
    trainer.add_callback(progress)
    trainer.add_callback(MetricsLog())
    before = held_out_rewards(trainer, held_out, run.held_out_samples) if held_out else None
    started = time.perf_counter()
    with progress:
        trainer.train(resume_from_checkpoint=resume)
    seconds = time.perf_counter() - started
    after = held_out_rewards(trainer, held_out, run.held_out_samples) if held_out else None
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        _report(trainer, arguments, settings, before, after, seconds)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=run.dataset_name)
    trainer.end()
    if lock is not None:
        lock.close()
    return trainer


def _rewards(arguments: Arguments, columns: list[str] | None) -> list[Any]:
    run, args = arguments.run, arguments.policy
    models = []
    if run.reward_model_name_or_path:
        name = run.reward_model_name_or_path
        if not is_adapter_folder(name):
            name = _found_model("reward_model_name_or_path", name, "main", args.trust_remote_code)
        models.append(name)
    return models + (load_rewards(run.reward_funcs, columns) if run.reward_funcs else [])


def _trainer(
    arguments: Arguments, rewards: list[Any], train_dataset: Any, test_dataset: Any, resume: str | None
) -> PolicyTrainer:
    model, args = _model_path(arguments), arguments.policy
    if args.critic_model_name_or_path and not is_critic_folder(args.critic_model_name_or_path):
        key, name = "critic_model_name_or_path", args.critic_model_name_or_path
        args.critic_model_name_or_path = _found_model(key, name, "main", args.trust_remote_code)
    trainer_class = PPOTrainer if "critic" in advantage_needs(args.advantage_function) else PolicyTrainer
    is_new = not Path(args.output_dir).exists()
    try:
        trainer = trainer_class(
            model=model,
            reward_funcs=rewards,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=test_dataset if args.eval_strategy != "no" else None,
            quantization_config=get_quantization_config(arguments.model),
            peft_config=get_peft_config(arguments.model),
        )
        trainer.check_start(resume)
    # What TRL, PEFT and transformers raise when they check settings.
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, HTTPError) as error:
        if is_new and args.should_save:
            _remove_if_empty(Path(args.output_dir))  # the trainer makes it before it looks at anything
        first_line = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ConfigError(error.problems if isinstance(error, ConfigError) else [first_line]) from error
    return trainer


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _model_path(arguments: Arguments) -> str:
    """Folder or id of the policy, with the recipe's loading options put where TRL looks for them."""
    model, args = arguments.model, arguments.policy
    kwargs = dict(args.model_init_kwargs or {})
    kwargs.setdefault("revision", model.model_revision)
    for key in ("attn_implementation", "dtype"):
        if getattr(model, key) is not None:
            kwargs.setdefault(key, getattr(model, key))
    args.model_init_kwargs = kwargs
    return _found_model("model_name_or_path", model.model_name_or_path, kwargs["revision"], args.trust_remote_code)


def _found_model(key: str, name: str, revision: str, trust_remote_code: bool) -> str:
    """`name`, or the folder of the bundled model of that name.

    Raises:
        ConfigError: it has no config that transformers can read, here or on the Hub.
    """
    if name in BUNDLED_MODELS and not Path(name).is_dir():
        return BUNDLED_MODELS[name]()
    try:
        AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError([f"`{key}`: {name!r} is not a model that can be loaded: {reason}"]) from error
    return name


def _held_out_prompts(count: int, test_dataset: Any) -> Dataset | None:
    rows = list(itertools.islice(test_dataset, count)) if count else []
    if len(rows) < min(count, launched_processes()):
        raise ConfigError(
            [f"`held_out_prompts`: {count}, but the test split has {len(rows)} prompts; each process needs one."]
        )
    return Dataset.from_list(rows) if rows else None


def _settings(recipe: Recipe, arguments: Arguments) -> dict[str, Any]:
    """Every setting as resolved; what the library works out is asked of the library."""
    values = {
        key: getattr(arguments.policy, key) if value == schema.COMPUTED else value
        for key, value in recipe.values.items()
    }
    return values | ({"env": dict(recipe.environment)} if recipe.environment else {})


def _open_folder(folder: str, settings: dict[str, Any], resumed: bool) -> None:
    """Put what an earlier run left aside, and write down what this one does; a resumed run goes on with both."""
    if resumed:
        return
    keep_previous(folder)
    defaults = {key: setting.default for key, setting in schema.settings().items()}
    write_recipe(folder, settings, defaults)


def _report(
    trainer: PolicyTrainer,
    arguments: Arguments,
    settings: dict[str, Any],
    before: HeldOut | None,
    after: HeldOut | None,
    seconds: float,
) -> None:
    folder, steps = Path(arguments.policy.output_dir), trainer.state.global_step
    sampling = trainer.accounts.table(0 if trainer.collector is None else len(trainer.collector.waiting))
    summary = {
        "algorithm": arguments.policy.algorithm,
        "steps": steps,
        "training_seconds": round(seconds, 1),
        "held_out": {
            "prompts": before.prompts if before else 0,
            "samples_per_prompt": arguments.run.held_out_samples,
            "before": before and _means(before),
            "after": after and _means(after),
        },
        "sampling": sampling,
        "last_log": _last_log(trainer),
        "settings": public_settings(settings),
        "versions": versions(),
    }
    write_text(folder / SUMMARY_FILE, json.dumps(strict_json(summary), indent=2, default=str) + "\n")
    if arguments.run.plot:
        plot_run(trainer.state.log_history, folder / PLOT_FILE, f"{arguments.policy.algorithm}: {folder.name}")
    console = Console()
    if before and after:
        console.print(_held_out_table(before, after))
    console.print(sampling_table(sampling))
    console.print(
        f"Trained {steps} steps in {seconds:.0f} s. Model, {SUMMARY_FILE} and plots: {folder}", soft_wrap=True
    )
    if isinstance(trainer, PPOTrainer) and critic_stands_alone(settings):
        console.print(_CRITIC_ALONE.format(trainer.critic_folder(folder)), soft_wrap=True)  # paths stay whole


_CRITIC_ALONE = (
    "The policy is unchanged, since `critic_warmup_steps` is all of `max_steps`. To train both from here, set "
    "`critic_model_name_or_path` to {}, fewer `critic_warmup_steps` and another `output_dir`."
)


def _means(held_out: HeldOut) -> dict[str, dict[str, float]]:
    return {"greedy": held_out.greedy, "sampled": held_out.sampled}


def _held_out_table(before: HeldOut, after: HeldOut) -> Table:
    table = Table(title=f"Mean reward on {before.prompts} held-out prompts")
    for heading in ("completion", "reward function", "before", "after", "change"):
        table.add_column(heading, justify="left" if heading in ("completion", "reward function") else "right")
    for kind, rewards in _means(before).items():
        for name, value in rewards.items():
            later = _means(after)[kind][name]
            table.add_row(kind, name, f"{value:.3f}", f"{later:.3f}", f"{later - value:+.3f}")
    return table


def _last_log(trainer: PolicyTrainer) -> dict[str, Any]:
    """The last value of every metric: not each step generates, and so logs a reward."""
    merged: dict[str, Any] = {}
    for entry in trainer.state.log_history:
        if "loss" in entry:
            merged |= entry
    return merged
