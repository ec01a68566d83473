"""Saving and taking up checkpoints, in all trainers: whole or not at all, and only where a run can go on from them."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_algos.checkpoints.changes import refused_changes, told_changes
from trl_algos.checkpoints.latest import checkpoint_to_resume, last_saved
from trl_algos.checkpoints.publishing import (
    SAVING,
    discard_draft,
    discard_drafts,
    draft_of,
    keep_newest,
    model_draft_of,
    publish_checkpoint,
    publish_files,
)
from trl_algos.checkpoints.record import read_record
from trl_algos.errors import ConfigError
from trl_algos.trainers.adapters import same_dtypes
from trl_algos.trainers.checkpoint_states import check_states, check_weights, warn_of_lost_states
from trl_algos.trainers.processes import is_sharded
from trl_algos.trainers.run_facts import run_facts

logger = logging.getLogger(__name__)


class WholeCheckpoints:
    """Part of a trainer of TRL's, in front of it: what it saves is written elsewhere and renamed once it is whole.

    A process that is killed at any moment leaves every checkpoint, and every file in the output folder, either as it
    was before or as it shall be. A subclass saves and loads what it has besides in `save_states` and `load_states`.
    """

    accelerator: Any
    args: Any
    model: Any
    state: Any
    train_dataset: Any
    _drafting = False  # a checkpoint: transformers is told another folder
    _push_waits = False  # until the checkpoint has its name
    _remembered: dict[str, Any] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's, from the folder of a checkpoint, or from the latest whole one where this is `latest` or true.

        Raises:
            ConfigError: it is not whole, or is not one that this run can go on from; nothing was written.
        """
        folder = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir, self.args.max_steps)
        self.check_start(folder)
        run = self._run()
        if folder is not None and self.accelerator.is_main_process:
            _tell_changes(folder, run)
        if self.args.should_save:
            for name in discard_drafts(self.args.output_dir):
                logger.warning("%s was not saved to its end and is gone.", Path(self.args.output_dir, name))
        return super().train(folder, *args, **kwargs)  # type: ignore[misc]

    def check_start(self, checkpoint: str | None = None) -> None:
        """See whether training can start from `checkpoint`, or anew where it is None, and change nothing.

        Raises:
            ConfigError: the checkpoint is not whole, or of a run that this one differs from in what it depends on.
        """
        if checkpoint is None:
            return
        sharded = is_sharded(self)
        check_states(checkpoint, sharded)
        record = read_record(checkpoint)
        if record is not None:
            problems = refused_changes(record["run"], self._run(), checkpoint)
            problems += self._process_problems(record["run"].get("processes"), checkpoint)
            if problems:
                raise ConfigError(problems)
        if not sharded:
            check_weights(checkpoint, self)

    def save_states(self, folder: Path) -> None:
        """Write what transformers knows nothing of into the checkpoint `folder`; on all processes."""

    def load_states(self, folder: Path) -> None:
        """Read back what `save_states` wrote."""

    def _process_problems(self, before: int | None, checkpoint: str) -> list[str]:
        """DeepSpeed's states are one file for each process, which no other number can read."""
        now, trainer = self.accelerator.num_processes, self
        if before in (None, now) or not getattr(trainer, "is_deepspeed_enabled", False):
            return []
        return [
            f"`deepspeed`: {checkpoint} was saved by {before} processes, each of which has files of its own, and now "
            f"there are {now}; take as many, or start from the model there."
        ]

    def _run(self) -> dict[str, Any]:
        """What checkpoints remember of this run; reckoned once, before anything is trained or wrapped."""
        if self._remembered is None:
            self._remembered = run_facts(self)
        return self._remembered

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)  # type: ignore[misc]
        return str(Path(folder, SAVING)) if self._drafting else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        draft = draft_of(folder)
        self._on_each_disk(partial(discard_draft, draft))
        self._drafting = True
        try:
            self.save_states(draft)
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._drafting = False
        if self.state.best_model_checkpoint == str(draft):
            self.state.best_model_checkpoint = str(folder)
            if self.args.should_save:
                self.state.save_to_json(str(draft / TRAINER_STATE_NAME))
        self._on_each_disk(partial(publish_checkpoint, folder, self._run()))
        if self._push_waits:
            self._push_waits = False
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            keep_newest(folder.parent, self.args.save_total_limit, [self.state.best_model_checkpoint])

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._drafting:
            self._push_waits = True
        else:
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """transformers', with each file in its place at once: a killed process leaves none half written."""
        if self._drafting:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = Path(output_dir or self.args.output_dir)
        draft = model_draft_of(folder)
        self._on_each_disk(partial(discard_draft, draft))
        super().save_model(str(draft), _internal_call=True)  # type: ignore[misc]
        self._on_each_disk(partial(publish_files, folder))
        if self.args.push_to_hub and not _internal_call:
            trainer: Any = self
            trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _on_each_disk(self, action: Callable[[], None]) -> None:
        """Do something to files when all processes have come here: once on each disk, before any goes on.

        The first process does it, then the first one of each other machine, whose disk may be another.
        """
        first, first_here = self.accelerator.is_main_process, self.accelerator.is_local_main_process
        self.accelerator.wait_for_everyone()
        for mine in (first, first_here and not first):
            if mine:
                action()
            self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with same_dtypes(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with same_dtypes(self.model):
            super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            warn_of_lost_states(Path(checkpoint), self.args.world_size)
            self._warn_of_stream(checkpoint)
            self.load_states(Path(checkpoint))

    def _warn_of_stream(self, checkpoint: str) -> None:
        """Transformers finds its place in the first pass over a stream, whose length it cannot know."""
        own_place = getattr(self, "collector", None) is not None
        is_stream = not hasattr(self.train_dataset, "__len__")
        if is_stream and not own_place and (self.state.epoch or 0) > 1 and self.accelerator.is_main_process:
            logger.warning(
                "%s is of a later pass over the data: the stream starts from its beginning, and the run is not the "
                "one that was left.",
                checkpoint,
            )

    def _last_checkpoint(self) -> str | None:
        """Folder of the checkpoint that a run would go on from now."""
        found = last_saved(self.args.output_dir)
        return None if found is None else str(found)


def _tell_changes(checkpoint: str, run: dict[str, Any]) -> None:
    """Say with what a run goes on otherwise than it was left."""
    record = read_record(checkpoint)
    if record is None:
        logger.warning("%s has no record of its run: nobody knows whether its settings were those of now.", checkpoint)
        return
    changes = told_changes(record["run"], run)
    if changes:
        logger.warning(
            "The run goes on from %s, but not as the one that was left: %s.", checkpoint, "; ".join(changes)
        )
