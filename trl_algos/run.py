"""The main job: from a recipe to a trained model, a summary and a plot in the run folder."""

import difflib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import get_dataset, get_peft_config, get_quantization_config

from trl_algos._version import __version__
from trl_algos.data import BUNDLED_MODELS, SOURCES, SPLITS
from trl_algos.errors import ConfigError, unknown_name
from trl_algos.held_out import HeldOut, held_out_rewards
from trl_algos.plots import plot_run
from trl_algos.progress import ProgressBar
from trl_algos.recipe import Recipe
from trl_algos.rewards import RewardFunction, find_reward
from trl_algos.trainers import PolicyTrainer

SUMMARY_FILE = "training_summary.json"
PLOT_FILE = "reward.png"

_CHECKPOINT_STATE = "checkpoint-[0-9]*/trainer_state.json"

_REWARD_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
"""What TRL passes to every reward function, besides the columns of the data set."""

_VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")


def train(recipe: Recipe) -> PolicyTrainer:
    """Train as `recipe` says, and leave model, tokenizer, summary and plot in its `output_dir`.

    Raises:
        ConfigError: model, data or rewards are not to be had.
    """
    run, args = recipe.run, recipe.policy
    resume = _checkpoint(args.resume_from_checkpoint, args.output_dir)
    rewards = _reward_functions(recipe)
    train_dataset, test_dataset = _datasets(recipe)
    _check_columns(rewards, train_dataset.column_names)
    trainer = _trainer(recipe, rewards, train_dataset, test_dataset)
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ProgressBar())
    held_out = _held_out_prompts(recipe, test_dataset)
    before = held_out_rewards(trainer, held_out, run.held_out_samples) if held_out else None
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume)
    seconds = time.perf_counter() - started
    after = held_out_rewards(trainer, held_out, run.held_out_samples) if held_out else None
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        _report(trainer, recipe, len(held_out or ()), before, after, seconds)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=run.dataset_name)
    trainer.end()
    return trainer


def _trainer(recipe: Recipe, rewards: list[Any], train_dataset: Any, test_dataset: Any) -> PolicyTrainer:
    model, args = _model_path(recipe), recipe.policy
    try:
        trainer = PolicyTrainer(
            model=model,
            reward_funcs=rewards,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=test_dataset if args.eval_strategy != "no" else None,
            quantization_config=get_quantization_config(recipe.model),
            peft_config=get_peft_config(recipe.model),
        )
        trainer.check_prompts()
    # What TRL, PEFT and transformers raise when they check settings.
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError([str(error)]) from error
    return trainer


def _model_path(recipe: Recipe) -> str:
    """Folder or id of the policy, with the recipe's loading options put where TRL looks for them."""
    name, args = recipe.model.model_name_or_path, recipe.policy
    if name is None:
        raise ConfigError(
            [f"`model_name_or_path`: not set; give a model id, a folder, or {', '.join(BUNDLED_MODELS)}."]
        )
    kwargs = dict(args.model_init_kwargs or {})
    kwargs.setdefault("revision", recipe.model.model_revision)
    for key in ("attn_implementation", "dtype"):
        if getattr(recipe.model, key) is not None:
            kwargs.setdefault(key, getattr(recipe.model, key))
    args.model_init_kwargs = kwargs
    return _found_model("model_name_or_path", name, kwargs["revision"], args.trust_remote_code)


def _checkpoint(name: str | None, output_dir: str) -> str | None:
    """Folder to resume from: the one named, the latest in the output folder for "true", or None."""
    if name in (None, "false"):
        return None
    if name == "true":
        return _latest_checkpoint(output_dir)
    if not os.path.isdir(str(name)):
        raise ConfigError([f"`resume_from_checkpoint`: {name!r} is not a folder; give one, or true for the latest."])
    return name


def _latest_checkpoint(output_dir: str) -> str:
    """The newest whole checkpoint: a killed process leaves one without the state, which is written last.

    Raises:
        ConfigError: there is none.
    """
    whole = {
        int(path.parent.name.rpartition("-")[2]): path.parent for path in Path(output_dir).glob(_CHECKPOINT_STATE)
    }
    if not whole:
        raise ConfigError([f"`resume_from_checkpoint`: true, but there is no whole checkpoint in {output_dir}."])
    return str(whole[max(whole)])


def _check_columns(rewards: list[Any], columns: list[str] | None) -> None:
    """Refuse a reward function that asks for a column which the data set has not.

    Raises:
        ConfigError: naming function, column and what there is.
    """
    given = {*_REWARD_ARGUMENTS, *(columns or ())}
    problems = []
    for function in filter(callable, rewards):
        for name, parameter in inspect.signature(function).parameters.items():
            required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            if columns is not None and required and name not in given:
                problems.append(
                    f"`reward_funcs`: {function.__name__} needs a column {name!r}, but the data set has "
                    f"{', '.join(columns)}."
                )
    if problems:
        raise ConfigError(problems)


def _found_model(key: str, name: str, revision: str, trust_remote_code: bool) -> str:
    """`name`, or the folder of the bundled model of that name.

    Raises:
        ConfigError: it has no config that transformers can read, here or on the Hub.
    """
    if name in BUNDLED_MODELS and not os.path.isdir(name):
        return BUNDLED_MODELS[name]()
    try:
        AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        near = difflib.get_close_matches(name, BUNDLED_MODELS, n=1)
        hint = f" Did you mean the bundled {near[0]!r}?" if near else ""
        reason = str(error).strip().splitlines()[0]
        raise ConfigError([f"`{key}`: {name!r} is not a model that can be loaded: {reason}{hint}"]) from error
    return name


def _datasets(recipe: Recipe) -> tuple[Any, Any]:
    """Training and test split; the latter None where nothing needs it."""
    run = recipe.run
    needed = {"dataset_train_split": run.dataset_train_split}
    if recipe.policy.eval_strategy != "no" or run.held_out_prompts:
        needed["dataset_test_split"] = run.dataset_test_split
    splits = _splits(recipe)
    missing = [
        f"`{key}`: {name!r} is not a split of the data set, which has {', '.join(splits)}."
        for key, name in needed.items()
        if name not in splits
    ]
    if missing:
        raise ConfigError(missing)
    return splits[run.dataset_train_split], splits.get(run.dataset_test_split)


def _splits(recipe: Recipe) -> Mapping[str, Any]:
    run = recipe.run
    if recipe.mixture.datasets:
        try:
            return get_dataset(recipe.mixture)
        except (OSError, ValueError) as error:
            raise ConfigError([f"`datasets`: cannot be loaded: {error}"]) from error
    if run.dataset_name in SOURCES:
        return {name: SOURCES[run.dataset_name](name) for name in SPLITS}
    if run.dataset_name:
        try:
            return load_dataset(run.dataset_name, name=run.dataset_config, streaming=run.dataset_streaming)
        except (OSError, ValueError) as error:  # not found, no network, no such configuration
            hint = unknown_name("dataset_name", run.dataset_name, SOURCES)
            raise ConfigError([f"{hint} Nor is it a data set that can be loaded: {error}"]) from error
    raise ConfigError([f"`dataset_name`: not set; give a data set, `datasets`, or {', '.join(SOURCES)}."])


def _held_out_prompts(recipe: Recipe, test_dataset: Any) -> Any:
    count = recipe.run.held_out_prompts
    return Dataset.from_list(list(itertools.islice(test_dataset, count))) if count else None


def _reward_functions(recipe: Recipe) -> list[Any]:
    run, args = recipe.run, recipe.policy
    rewards: list[Any] = []
    problems: list[str] = []
    if run.reward_model_name_or_path:
        path = _found_model("reward_model_name_or_path", run.reward_model_name_or_path, "main", args.trust_remote_code)
        rewards.append(path)
    for name in run.reward_funcs or []:
        try:
            rewards.append(load_reward(name))
        except Exception as error:  # the user's code may raise anything while it is imported
            problems.append(f"`reward_funcs`: {name!r} cannot be loaded: {type(error).__name__}: {error}")
    if not rewards and not problems:
        problems.append("`reward_funcs`: not set; give the name or path of at least one reward function.")
    if problems:
        raise ConfigError(problems)
    return rewards


def load_reward(name: str) -> RewardFunction:
    """A reward function, by its name in `trl_algos.rewards` or its path: `package.module.name` or `dir/file.py:name`.

    Only an explicit path runs code that is not ours or TRL's.

    Raises:
        ValueError: there is no such name.
        TypeError: what the path leads to is no function.
        Exception: whatever importing the module raised.
    """
    path, separator, function = name.rpartition(":")
    if separator and path.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        if spec is None or spec.loader is None or not os.path.isfile(path):
            raise FileNotFoundError(f"there is no file {path}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif "." in name:
        module_name, _, function = name.rpartition(".")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        module = importlib.import_module(module_name)
    else:
        return find_reward(name)
    found = getattr(module, function)
    if not callable(found):
        raise TypeError(f"{function} is a {type(found).__name__}, not a function")
    return found


def _report(
    trainer: PolicyTrainer,
    recipe: Recipe,
    prompts: int,
    before: HeldOut | None,
    after: HeldOut | None,
    seconds: float,
) -> None:
    folder = Path(recipe.policy.output_dir)
    summary = {
        "algorithm": recipe.policy.algorithm,
        "steps": trainer.state.global_step,
        "training_seconds": round(seconds, 1),
        "held_out": {
            "prompts": prompts,
            "samples_per_prompt": recipe.run.held_out_samples,
            "before": before,
            "after": after,
        },
        "last_log": _last_log(trainer),
        "settings": _settings(recipe),
        "versions": _versions(),
    }
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2, default=str) + "\n")
    if recipe.run.plot:
        plot_run(trainer.state.log_history, folder / PLOT_FILE, f"{recipe.policy.algorithm}: {folder.name}")
    console = Console()
    if before and after:
        console.print(_held_out_table(before, after, prompts))
    console.print(
        f"Trained {trainer.state.global_step} steps in {seconds:.0f} s. Model, {SUMMARY_FILE} and plots: {folder}"
    )


def _held_out_table(before: HeldOut, after: HeldOut, prompts: int) -> Table:
    table = Table(title=f"Mean reward on {prompts} held-out prompts")
    for heading in ("completion", "reward function", "before", "after", "change"):
        table.add_column(heading, justify="left" if heading in ("completion", "reward function") else "right")
    for kind, rewards in before.items():
        for name, value in rewards.items():
            later = after[kind][name]
            table.add_row(kind, name, f"{value:.3f}", f"{later:.3f}", f"{later - value:+.3f}")
    return table


def _last_log(trainer: PolicyTrainer) -> dict[str, Any]:
    """The last value of every metric: not each step generates, and so logs a reward."""
    merged: dict[str, Any] = {}
    for entry in trainer.state.log_history:
        if "loss" in entry:
            merged |= entry
    return merged


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting as resolved, without secrets."""
    settings = {**vars(recipe.run), **vars(recipe.model), **recipe.policy.to_dict()}
    return {name: value for name, value in sorted(settings.items()) if "token" not in name or name.endswith("_tokens")}


def _versions() -> dict[str, str]:
    found = {"trl_algos": __version__, "python": platform.python_version()}
    for package in _VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
