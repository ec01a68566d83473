"""Which checkpoint a run goes on from."""

import json
from pathlib import Path

import yaml

from trl_algos.errors import ConfigError
from trl_algos.run.folder import RECIPE_FILE


def checkpoint_to_resume(name: str | None, output_dir: str, algorithm: str, max_steps: int) -> str | None:
    """Folder to resume from.

    Args:
        name: a folder; "true" for the latest in the output folder; None or "false" for none.
        output_dir: the output folder.
        algorithm: the algorithm to go on with.
        max_steps: the last step; -1 where epochs are counted.

    Raises:
        ConfigError: there is none, it is another algorithm's, or it has no step left to take.
    """
    if name in (None, "false"):
        return None
    folder = latest_checkpoint(output_dir) if name == "true" else str(name)
    step = _step_of(Path(folder))
    if step is None:
        raise ConfigError(
            [f"`resume_from_checkpoint`: {name!r} is not a whole checkpoint; give its folder, or true for the latest."]
        )
    if 0 < max_steps <= step:
        raise ConfigError([f"`max_steps`: {max_steps} leaves nothing to do: {folder} is at step {step}."])
    trained = _algorithm_of(Path(output_dir))
    if trained not in (None, algorithm):
        raise ConfigError(
            [
                f"`algorithm`: {algorithm!r} cannot go on in {output_dir}, whose run is one of {trained!r}; name "
                "another `output_dir`, and start from the model there."
            ]
        )
    return folder


def _algorithm_of(output_dir: Path) -> str | None:
    """The algorithm of the run that an output folder holds, where its record is whole."""
    try:
        return yaml.safe_load((output_dir / RECIPE_FILE).read_text(encoding="utf-8"))["algorithm"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None


def latest_checkpoint(output_dir: str) -> str:
    """The newest whole checkpoint: a killed process leaves one without the state, which is written last.

    Raises:
        ConfigError: there is none.
    """
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    whole = {step: folder for folder in folders if (step := _step_of(folder)) is not None}
    if not whole:
        raise ConfigError([f"`resume_from_checkpoint`: true, but there is no whole checkpoint in {output_dir}."])
    return str(whole[max(whole)])


def _step_of(checkpoint: Path) -> int | None:
    """The optimizer step of a checkpoint; None where it is not whole."""
    try:
        return int(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
