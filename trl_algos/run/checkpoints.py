"""Which checkpoint a run goes on from."""

from pathlib import Path

from trl_algos.errors import ConfigError

_STATE = "checkpoint-[0-9]*/trainer_state.json"


def checkpoint_to_resume(name: str | None, output_dir: str) -> str | None:
    """Folder to resume from.

    Args:
        name: a folder; "true" for the latest in the output folder; None or "false" for none.
        output_dir: the output folder.

    Raises:
        ConfigError: there is none.
    """
    if name in (None, "false"):
        return None
    if name == "true":
        return latest_checkpoint(output_dir)
    if not Path(str(name)).is_dir():
        raise ConfigError([f"`resume_from_checkpoint`: {name!r} is not a folder; give one, or true for the latest."])
    return name


def latest_checkpoint(output_dir: str) -> str:
    """The newest whole checkpoint: a killed process leaves one without the state, which is written last.

    Raises:
        ConfigError: there is none.
    """
    whole = {int(path.parent.name.rpartition("-")[2]): path.parent for path in Path(output_dir).glob(_STATE)}
    if not whole:
        raise ConfigError([f"`resume_from_checkpoint`: true, but there is no whole checkpoint in {output_dir}."])
    return str(whole[max(whole)])
