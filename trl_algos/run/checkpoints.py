"""Which checkpoint a run goes on from, and whether it has a step left to take."""

from trl_algos.checkpoints.latest import chosen_checkpoint
from trl_algos.checkpoints.record import step_of
from trl_algos.errors import ConfigError


def checkpoint_to_resume(name: str | None, output_dir: str, max_steps: int) -> str | None:
    """Folder to resume from.

    Args:
        name: as of `chosen_checkpoint`.
        output_dir: the output folder.
        max_steps: the last step; -1 where epochs are counted.

    Raises:
        ConfigError: there is none, it is not whole, or it has no step left to take.
    """
    folder = chosen_checkpoint(name, output_dir)
    if folder is None:
        return None
    step = step_of(folder) or 0
    if 0 < max_steps <= step:
        raise ConfigError([f"`max_steps`: {max_steps} leaves nothing to do: {folder} is at step {step}."])
    return folder
