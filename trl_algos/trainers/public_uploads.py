"""What a trainer uploads: files on a list, with a card of ours, and nothing that tells of this machine or its user."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from trl_algos.checkpoints.publishing import model_draft_of
from trl_algos.errors import HubError
from trl_algos.hub.card import CARD_FILE, CardFacts, model_card
from trl_algos.hub.files import Files, model_files, whole_folder
from trl_algos.hub.privacy import Privacy, places_in
from trl_algos.hub.upload import commit, opened_repo, say, told
from trl_algos.objective import objective_text, references, unused_text
from trl_algos.settings.public import public_settings

_WHOLE_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


class PublicUploads:
    """The uploads of `Trainer`, as a mixin in front of one of TRL's trainers.

    A push takes model, tokenizer and card out of the folder, and no file that is not on the list of `hub/files.py`.
    Pushes of checkpoints happen beside the training, which goes on whatever becomes of them.
    """

    run_facts: CardFacts | None = None
    """What a recipe's run knows beyond the trainer's arguments; None in a script."""

    args: Any
    model: Any
    state: Any
    hub_model_id: str | None
    push_in_progress: Any
    _uploads: ThreadPoolExecutor | None = None

    # The card

    def card_facts(self) -> CardFacts:
        """What the card of the model as it is now has to tell."""
        is_adapter = is_peft_model(self.model)
        facts = self.run_facts or _facts_of_script(self, is_adapter)
        return replace(facts, is_adapter=is_adapter, summary={**facts.summary, "steps": self.state.global_step})

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the card into the output folder, in the place of TRL's and PEFT's, which tell of local paths.

        Args:
            model_name: as in TRL; the repository's where there is none.
            dataset_name: id on the Hub of the training data, where it has one.
            tags: not used; the card has those of the algorithm.
        """
        if self.is_world_process_zero():
            self._write_card(Path(self.args.output_dir), model_name, dataset_name)

    def _write_card(self, folder: Path, model_name: str | None = None, dataset_name: str | None = None) -> None:
        name = self.hub_model_id or self.args.hub_model_id or model_name or Path(self.args.output_dir).absolute().name
        (folder / CARD_FILE).write_text(model_card(self._facts(dataset_name), name), encoding="utf-8")

    def _facts(self, dataset_name: str | None = None) -> CardFacts:
        facts = self.card_facts()
        dataset = facts.privacy.hub_id(dataset_name)
        return replace(facts, datasets=[dataset]) if dataset and not facts.datasets else facts

    # Uploads

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As in `Trainer`, with one message where the repository cannot be had.

        Raises:
            HubError: so it is.
        """
        if not self.is_world_process_zero():
            return
        args = self.args
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        private = args.hub_private_repo if private is None else private
        self.hub_model_id = opened_repo(name, token or args.hub_token, private)
        self.push_in_progress = None

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload model, tokenizer and card, as in `Trainer`; on all processes, of which the first one uploads.

        Args:
            commit_message: of the commit.
            blocking: whether to wait; if not, a `Future` is returned.
            token: in the place of `hub_token`.
            revision: branch.
            private: whether to make a new repository private.
            **kwargs: `dataset_name`; others are those of TRL's card and not used.

        Raises:
            HubError: it did not work; the message says why, and what is here is as it was.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(dataset_name=kwargs.get("dataset_name"))
        self._finish_current_push()
        facts = self._facts(kwargs.get("dataset_name"))
        files = self._model_files(Path(self.args.output_dir), facts)
        upload = partial(
            commit,
            files,
            str(self.hub_model_id),
            commit_message or "End of training",
            token or self.args.hub_token,
            revision or self.args.hub_revision,
        )
        return told(files, str(self.hub_model_id), upload) if blocking else self._later(upload)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push what a checkpoint holds, beside the training."""
        args, strategy = self.args, self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        if not args.hub_always_push and self.push_in_progress is not None and not self.push_in_progress.is_done():
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        folder, facts = Path(checkpoint_folder), self._facts()
        files = self._model_files(folder, facts)
        if strategy in _WHOLE_CHECKPOINTS:
            where = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else folder.name
            files |= {f"{where}/{name}": file for name, file in whole_folder(folder, facts.privacy).items()}
        # The checkpoint may be gone, to make room for others, before its push has come to an end.
        kept = Path(tempfile.mkdtemp(prefix="_push-", dir=args.output_dir))
        upload = partial(
            commit,
            _linked(files, kept),
            str(self.hub_model_id),
            f"Training in progress, step {self.state.global_step}",
            args.hub_token,
            args.hub_revision,
        )
        job = self._later(partial(_beside_training, upload, self.state.global_step, kept))
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress = PushInProgress([job])
        else:
            self.push_in_progress.jobs.append(job)

    def _finish_current_push(self) -> None:
        if getattr(self, "push_in_progress", None) is not None and not self.push_in_progress.is_done():
            say(f"Waiting until the last checkpoint is pushed to {self.hub_model_id} ...")
        super()._finish_current_push()  # type: ignore[misc]

    def _model_files(self, folder: Path, facts: CardFacts) -> dict[str, Path | bytes]:
        critic = bool(getattr(self.args, "push_critic", False))
        card = model_card(facts, str(self.hub_model_id)).encode()
        return {**model_files(folder, facts.privacy, critic), CARD_FILE: card}

    def _later(self, upload: Callable[[], Any]) -> "Future[Any]":
        """One upload after the other, so that the repository ends with the last one."""
        if self._uploads is None:
            self._uploads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        return self._uploads.submit(upload)

    # Files

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # The arguments are pickled beside the weights, and PEFT writes a card of its own.
        names = [name for name in ("hub_token", "push_to_hub_token", "model_init_kwargs") if hasattr(self.args, name)]
        kept = {name: getattr(self.args, name) for name in names}
        for name, value in kept.items():
            setattr(self.args, name, public_settings(value) if isinstance(value, Mapping) else None)
        try:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
        finally:
            for name, value in kept.items():
                setattr(self.args, name, value)
        output = Path(self.args.output_dir)
        folder = Path(output_dir or output)
        if self.args.should_save and folder in (output, model_draft_of(output)):
            self._write_card(folder)

    # `Trainer`'s, which stand behind this class

    callback_handler: Any
    control: Any
    save_model: Any
    is_world_process_zero: Any


def _facts_of_script(trainer: Any, is_adapter: bool) -> CardFacts:
    """What the arguments and the model of a trainer tell."""
    args = trainer.args
    settings = {field.name: getattr(args, field.name) for field in fields(args)}
    defaults = {field.name: field.default for field in fields(args) if field.default is not MISSING}
    start = _start_of(trainer.model, is_adapter)
    places = [*places_in(settings), str(args.output_dir), *([start] if start and os.path.exists(start) else [])]
    told_of = {**settings, "use_peft": is_adapter}
    return CardFacts(
        settings=settings,
        defaults=defaults,
        objective=objective_text(told_of),
        not_used=unused_text(told_of),
        references=references(told_of),
        base_model=Privacy(tuple(places)).hub_id(start),
        rewards=reward_names(trainer),
        places=places,
    )


def reward_names(trainer: Any) -> list[tuple[str, float]]:
    """Name and weight of each reward of a trainer; none of one on pairs."""
    weights = getattr(trainer, "reward_weights", None)
    return [] if weights is None else list(zip(trainer.reward_func_names, weights.tolist(), strict=False))


def _start_of(model: Any, is_adapter: bool) -> str | None:
    if is_adapter:
        return next((config.base_model_name_or_path for config in model.peft_config.values()), None)
    return getattr(model.config, "_name_or_path", None) or None


def _linked(files: Files, folder: Path) -> dict[str, Path | bytes]:
    """The same files by links of their own, which outlive those that were linked; copies where there are no links."""
    linked: dict[str, Path | bytes] = {}
    for number, (name, file) in enumerate(files.items()):
        if isinstance(file, bytes):
            linked[name] = file
            continue
        linked[name] = target = folder / str(number)
        try:
            os.link(file, target)
        except OSError:
            shutil.copyfile(file, target)
    return linked


def _beside_training(upload: Callable[[], Any], step: int, folder: Path) -> None:
    """Upload what lies in a folder of its own, and remove that; a failure is told, and nothing stops for it."""
    try:
        upload()
    except HubError as error:
        warnings.warn(f"The push of step {step} did not work, and training goes on: {error}", stacklevel=2)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
