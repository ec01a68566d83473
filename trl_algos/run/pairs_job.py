"""What is particular to a run on preference pairs: its trainers, and pairs that are judged before and after."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from rich.console import RenderableType
from rich.table import Table

from trl_algos.errors import ConfigError, counted
from trl_algos.recipe.arguments import Arguments
from trl_algos.run.folder import PAIR_PLOT_FILE
from trl_algos.run.held_out_pairs import HELD_OUT, HeldOutPairs, PairTrainer, judged_pairs
from trl_algos.run.models import model_arguments
from trl_algos.run.plots import PAIR_PANELS, plot_run
from trl_algos.trainers import BradleyTerryTrainer, PreferenceTrainer

# The set that the trainer evaluates while it trains, among those that it prepares.
_TEST = "test"


class PairsJob:
    """Training pairs and held-out pairs of a run.

    Args:
        arguments: the recipe's.
        train_dataset: pairs.
        test_dataset: pairs to measure; None where nothing does.

    Raises:
        ConfigError: there are no pairs to measure.
    """

    def __init__(self, arguments: Arguments, train_dataset: Any, test_dataset: Any) -> None:
        self._arguments = arguments
        self._train_dataset, self._test_dataset = train_dataset, test_dataset
        self._pairs = _held_out_pairs(arguments.run.held_out_pairs, test_dataset)
        self._prepared: Any = None

    def trainer(self, resume: str | None) -> PairTrainer:
        """The trainer, which has prepared the held-out pairs, too."""
        args = self._arguments.trainer
        sets = {HELD_OUT: self._pairs, _TEST: self._test_dataset if args.eval_strategy != "no" else None}
        trainer_class = BradleyTerryTrainer if self._arguments.kind == "reward_model" else PreferenceTrainer
        trainer: PairTrainer = trainer_class(
            args=args,
            train_dataset=self._train_dataset,
            eval_dataset={name: pairs for name, pairs in sets.items() if pairs is not None} or None,
            **model_arguments(self._arguments),
        )
        prepared = trainer.eval_dataset or {}
        self._prepared, trainer.eval_dataset = prepared.get(HELD_OUT), prepared.get(_TEST)
        trainer.check_start(resume)
        return trainer

    def measured(self, trainer: PairTrainer) -> HeldOutPairs | None:
        """Figures of the held-out pairs now; on all processes."""
        return None if self._prepared is None else judged_pairs(trainer, self._prepared, self._arguments.kind)

    def summary(self, trainer: PairTrainer, before: HeldOutPairs | None, after: HeldOutPairs | None) -> dict[str, Any]:
        """What the run's summary says of it."""
        return {
            "held_out": {
                "pairs": before.pairs if before else 0,
                "before": before and _told(before),
                "after": after and _told(after),
            },
            "pairs": {
                "train": _counts(trainer.train_dataset, trainer.dropped_pairs.get("train", {})),
                "held_out": _counts(self._prepared, trainer.dropped_pairs.get(HELD_OUT, {})),
            },
        }

    def plot(self, trainer: PairTrainer, before: HeldOutPairs | None, after: HeldOutPairs | None) -> None:
        """Draw the run into its folder."""
        folder = Path(self._arguments.trainer.output_dir)
        found = {"before training": before and before.reliability, "after training": after and after.reliability}
        curves = {name: curve for name, curve in found.items() if curve}
        title = f"{self._arguments.trainer.algorithm}: {folder.name}"
        plot_run(trainer.state.log_history, folder / PAIR_PLOT_FILE, title, PAIR_PANELS, curves)

    def tables(
        self, trainer: PairTrainer, before: HeldOutPairs | None, after: HeldOutPairs | None
    ) -> list[RenderableType]:
        """What is printed at the end."""
        return [_held_out_table(before, after)] if before and after else []

    def remarks(self, trainer: PairTrainer, settings: dict[str, Any]) -> list[str]:
        """What to know before going on from here."""
        dropped = sum(trainer.dropped_pairs.get("train", {}).values())
        return [f"Dropped, since they teach nothing: {counted(dropped, 'training pair')}."] if dropped else []


def _held_out_pairs(count: int, test_dataset: Any) -> Dataset | None:
    """The first `count` pairs of the test split, or all of a smaller one."""
    if not count:
        return None
    if isinstance(test_dataset, IterableDataset):
        pairs = Dataset.from_list(list(itertools.islice(test_dataset, count)))
    else:
        pairs = test_dataset.select(range(min(count, len(test_dataset))))
    if not len(pairs):
        raise ConfigError([f"`held_out_pairs`: {count}, but the test split has no pairs."])
    return pairs


def _counts(prepared: Any, dropped: Mapping[str, int]) -> dict[str, int | None]:
    """Pairs that are used, None where nobody has counted them all, and those dropped, as far as they were read."""
    used = len(prepared) if isinstance(prepared, Dataset) else None
    return {"used": used, "dropped": sum(dropped.values())}


def _told(held_out: HeldOutPairs) -> dict[str, Any]:
    return held_out.figures | ({"reliability": held_out.reliability.table()} if held_out.reliability else {})


def _held_out_table(before: HeldOutPairs, after: HeldOutPairs) -> Table:
    table = Table(title=f"{before.pairs} held-out pairs")
    for heading in ("figure", "before", "after", "change"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, value in before.figures.items():
        if name in after.figures:
            later = after.figures[name]
            table.add_row(name, f"{value:.3f}", f"{later:.3f}", f"{later - value:+.3f}")
    return table
