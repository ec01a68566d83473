"""The main job: from a recipe to a trained model, a summary and a plot in the run folder."""

import json
import time
from pathlib import Path
from typing import Any

from httpx import HTTPError
from rich.console import Console
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from trl_algos.checkpoints.latest import checkpoint_to_resume
from trl_algos.data.loading import load_data
from trl_algos.errors import ConfigError, first_line
from trl_algos.recipe import schema
from trl_algos.recipe.arguments import Arguments, build
from trl_algos.recipe.checks import data_spec
from trl_algos.recipe.measured import needs_test_split
from trl_algos.recipe.reading import Recipe
from trl_algos.run.folder import (
    SUMMARY_FILE,
    keep_previous,
    strict_json,
    take_folder,
    versions,
    write_recipe,
    write_text,
)
from trl_algos.run.metrics_log import MetricsLog
from trl_algos.run.pairs_job import PairsJob
from trl_algos.run.policy_job import PolicyJob
from trl_algos.run.progress import ProgressBar
from trl_algos.run.pushing import card_block, facts_of, push_finished, write_card
from trl_algos.settings.public import public_settings
from trl_algos.trainers.public_uploads import reward_names


def train(recipe: Recipe) -> Any:
    """Train as `recipe` says, and leave model, tokenizer, metrics, summary and plot in its `output_dir`.

    Returns:
        The trainer: a `PolicyTrainer`, `PreferenceTrainer` or `BradleyTerryTrainer`, as the algorithm asks for.

    Raises:
        ConfigError: model, data or rewards are not to be had; nothing was written.
        HubError: the run is in its folder, but could not be pushed.
    """
    arguments = build(recipe)
    args = arguments.trainer
    resume = checkpoint_to_resume(args.resume_from_checkpoint, args.output_dir, args.max_steps)
    train_dataset, test_dataset = load_data(data_spec(recipe), needs_test_split(recipe.values))
    job: Any = (PolicyJob if arguments.kind == "policy" else PairsJob)(arguments, train_dataset, test_dataset)
    trainer = _made_trainer(job, args, resume)
    settings = _settings(recipe, arguments)
    lock = None
    if trainer.is_world_process_zero():
        lock = take_folder(args.output_dir)
        _open_folder(args.output_dir, recipe.kind, settings, resumed=resume is not None)
    card = card_block(settings, reward_names(trainer))
    trainer.run_facts = facts_of({"settings": settings, "card": card}, Path(args.output_dir))
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    progress = ProgressBar()
    trainer.add_callback(progress)
    trainer.add_callback(MetricsLog())
    before = job.measured(trainer)
    started = time.perf_counter()
    with progress:
        trainer.train(resume_from_checkpoint=resume)
    seconds = time.perf_counter() - started
    after = job.measured(trainer)
    trainer.save_model(args.output_dir, _internal_call=True)  # else it would push what has no summary yet
    is_first = trainer.is_world_process_zero()
    if is_first:
        _report(job, trainer, arguments, settings, (before, after), seconds, card)
    trainer.end()  # before the push: no other process waits for it
    if lock is not None:
        lock.close()
    if is_first and args.push_to_hub:
        Console().print(f"Pushed: {push_finished(args.output_dir, args.hub_token)}", soft_wrap=True)
    return trainer


def _made_trainer(job: Any, args: Any, resume: str | None) -> Any:
    is_new = not Path(args.output_dir).exists()
    try:
        return job.trainer(resume)
    # What TRL, PEFT and transformers raise when they check settings.
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, HTTPError) as error:
        if is_new and args.should_save:
            _remove_if_empty(Path(args.output_dir))  # the trainer makes it before it looks at anything
        raise ConfigError(error.problems if isinstance(error, ConfigError) else [first_line(error)]) from error


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _settings(recipe: Recipe, arguments: Arguments) -> dict[str, Any]:
    """Every setting as resolved; what the library works out is asked of the library."""
    values = {
        key: getattr(arguments.trainer, key) if value == schema.COMPUTED else value
        for key, value in recipe.values.items()
    }
    return values | ({"env": dict(recipe.environment)} if recipe.environment else {})


def _open_folder(folder: str, kind: str, settings: dict[str, Any], resumed: bool) -> None:
    """Put what an earlier run left aside, and write down what this one does; a resumed run goes on with both."""
    if resumed:
        return
    keep_previous(folder)
    defaults = {key: setting.default for key, setting in schema.settings(kind).items()}
    write_recipe(folder, settings, defaults)


def _report(
    job: Any,
    trainer: Any,
    arguments: Arguments,
    settings: dict[str, Any],
    held_out: tuple[Any, Any],
    seconds: float,
    card: dict[str, Any],
) -> None:
    folder, steps = Path(arguments.trainer.output_dir), trainer.state.global_step
    summary = {
        "algorithm": arguments.trainer.algorithm,
        "steps": steps,
        "training_seconds": round(seconds, 1),
        **job.summary(trainer, *held_out),
        "last_log": _last_log(trainer),
        "settings": public_settings(settings),
        "versions": versions(),
        "card": card,
    }
    write_text(folder / SUMMARY_FILE, json.dumps(strict_json(summary), indent=2, default=str) + "\n")
    if arguments.run.plot:
        job.plot(trainer, *held_out)
    write_card(summary, folder, trainer.hub_model_id or folder.absolute().name)
    console = Console()
    for table in job.tables(trainer, *held_out):
        console.print(table)
    console.print(
        f"Trained {steps} steps in {seconds:.0f} s. Model, {SUMMARY_FILE} and plots: {folder}", soft_wrap=True
    )
    for remark in job.remarks(trainer, settings):
        console.print(remark, soft_wrap=True)  # paths stay whole


def _last_log(trainer: Any) -> dict[str, Any]:
    """The last value of every metric: not each step generates, and so logs a reward."""
    merged: dict[str, Any] = {}
    for entry in trainer.state.log_history:
        if "loss" in entry:
            merged |= entry
    return merged
