"""The KL coefficient of a run: made from the config, and kept in its checkpoints where it moves."""

import json
from pathlib import Path

from accelerate.logging import get_logger

from trl_algos.config import PolicyConfig
from trl_algos.core import AdaptiveKLController, FixedKLController

STATE_FILE = "kl_controller.json"

logger = get_logger(__name__)


def kl_controller(args: PolicyConfig) -> FixedKLController:
    """Controller that `args` asks for, at `beta`."""
    if args.kl_controller == "adaptive":
        return AdaptiveKLController(args.beta, float(args.kl_target or 0), float(args.kl_horizon or 0))
    return FixedKLController(args.beta)


def save_state(controller: FixedKLController, checkpoint: Path) -> None:
    """Write an adaptive coefficient into the folder `checkpoint`; a fixed one is a setting and not state."""
    if isinstance(controller, AdaptiveKLController):
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / STATE_FILE).write_text(json.dumps(controller.state_dict()))


def load_state(controller: FixedKLController, checkpoint: Path) -> None:
    """Read an adaptive coefficient back from the folder `checkpoint`; warns where it holds none."""
    if not isinstance(controller, AdaptiveKLController):
        return
    path = checkpoint / STATE_FILE
    if path.exists():
        controller.load_state_dict(json.loads(path.read_text()))
    else:
        logger.warning(f"{checkpoint} has no {STATE_FILE}: the KL coefficient starts from `beta` again.")
