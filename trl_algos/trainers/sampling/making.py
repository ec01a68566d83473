"""The collector that the settings of a trainer ask for, or what is wrong with them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trl_algos.errors import ConfigError, unknown_name
from trl_algos.trainers.sampling.collector import Collector
from trl_algos.trainers.sampling.prompts import Prompts, is_stream

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def make_collector(trainer: "PolicyTrainer") -> Collector:
    """The collector that the settings of `trainer` ask for.

    Raises:
        ConfigError: the data or the reward functions do not go with the settings.
    """
    args, dataset = trainer.args, trainer.train_dataset
    problems = list(_problems(trainer))
    if problems:
        raise ConfigError(problems)
    if args.remove_unused_columns and getattr(dataset, "column_names", None):
        dataset = trainer._remove_unused_columns(dataset, "training")
    return Collector(
        trainer,
        Prompts(
            dataset,
            trainer.accelerator,
            shuffle=trainer.shuffle_dataset,
            seed=args.seed,
            epochs=None if args.max_steps > 0 else args.num_train_epochs,
            retries=args.dynamic_sampling_retry,
        ),
    )


def _problems(trainer: "PolicyTrainer") -> Iterator[str]:
    args, dataset, names = trainer.args, trainer.train_dataset, trainer.reward_func_names
    if dataset is None:
        yield "`train_dataset`: none is given, and `dynamic_sampling` draws from it; set `dynamic_sampling` to false."
    if args.dynamic_sampling_metric not in (None, *names):
        yield unknown_name("dynamic_sampling_metric", args.dynamic_sampling_metric, names)
    if args.dynamic_sampling_retry and is_stream(dataset):
        yield (
            f"`dynamic_sampling_retry`: {args.dynamic_sampling_retry!r} is not possible with a streamed data set, "
            "which has no rows to go back to."
        )
    images = {"image", "images"} & set(getattr(dataset, "column_names", None) or ())
    if images:
        yield (
            f"`dynamic_sampling`: true is not supported with prompts that hold images (column {min(images)!r}); set "
            "it to false."
        )
