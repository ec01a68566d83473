"""Which checkpoint a run goes on from: the one that is named, or the latest whole one."""

import logging
from pathlib import Path

from trl_algos.checkpoints.record import file_problems, read_record, step_of
from trl_algos.errors import ConfigError

LATEST = "latest"

_NONE = (None, False, "false")
_LATEST = (LATEST, True, "true")

logger = logging.getLogger(__name__)


def chosen_checkpoint(named: str | bool | None, output_dir: str | Path) -> str | None:
    """Folder of the checkpoint to go on from; None where a run starts anew.

    Args:
        named: `latest` (or true) for the latest whole one in the output folder; None or false for none; else a folder.
        output_dir: the output folder.

    Raises:
        ConfigError: there is none, or the one that is named is not whole.
    """
    if named in _NONE:
        return None
    if named in _LATEST:
        return str(latest_checkpoint(output_dir))
    if not Path(str(named)).is_dir():
        raise ConfigError(
            [f"`resume_from_checkpoint`: {str(named)!r} is not a folder; give one, or `{LATEST}` for the latest."]
        )
    problems = file_problems(str(named))
    if problems:
        raise ConfigError([f"`resume_from_checkpoint`: {p}; take an earlier checkpoint." for p in problems])
    return str(named)


def checkpoint_to_resume(named: str | bool | None, output_dir: str | Path, max_steps: int) -> str | None:
    """As `chosen_checkpoint`, which must have a step left to take: transformers would take one more in any case.

    Args:
        named: as there.
        output_dir: as there.
        max_steps: the last step; -1 where epochs are counted.

    Raises:
        ConfigError: also where it is at the last step.
    """
    folder = chosen_checkpoint(named, output_dir)
    step = None if folder is None else step_of(folder)
    if step is not None and 0 < max_steps <= step:
        raise ConfigError(
            [f"`max_steps`: {max_steps} leaves nothing to do: {folder} is at step {step}, and holds the model."]
        )
    return folder


def latest_checkpoint(output_dir: str | Path) -> Path:
    """The whole checkpoint that was saved last; what was saved later, and is not whole, is told and passed over.

    Saved last is not the highest step: a run that went on from an earlier checkpoint leaves those of the steps that
    it takes again.

    Raises:
        ConfigError: there is none.
    """
    passed_over: list[tuple[Path, str]] = []
    for folder in sorted(checkpoints_in(output_dir), key=_saved, reverse=True):
        problems = file_problems(folder)
        if not problems:
            for other, problem in passed_over:
                logger.warning("%s is passed over: %s.", other, problem)
            return folder
        passed_over.append((folder, problems[0]))
    why = f": {passed_over[0][1]}" if passed_over else ""
    raise ConfigError([f"`resume_from_checkpoint`: {LATEST}, but there is no whole checkpoint in {output_dir}{why}."])


def last_saved(output_dir: str | Path) -> Path | None:
    """As `latest_checkpoint`, or None."""
    try:
        return latest_checkpoint(output_dir)
    except ConfigError:
        return None


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """Folders that are called as transformers calls checkpoints."""
    return [path for path in Path(output_dir).glob("checkpoint-*") if _named_step(path) is not None and path.is_dir()]


def order_of(folder: Path) -> int:
    """When a checkpoint was saved, as its record counts; 0 where it has none."""
    try:
        record = read_record(folder)
    except ConfigError:
        return 0
    return 0 if record is None else record["order"]


def _saved(folder: Path) -> tuple[int, int]:
    return order_of(folder), _named_step(folder) or 0


def _named_step(folder: Path) -> int | None:
    step = folder.name.rpartition("-")[2]
    return int(step) if folder.name == f"checkpoint-{step}" and step.isdecimal() else None
