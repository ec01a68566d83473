"""What is particular to a run that samples: rewards, prompts that are scored before and after, what was sampled."""

import itertools
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import RenderableType
from rich.table import Table

from trl_algos.algorithms import advantage_needs
from trl_algos.data.loading import column_names
from trl_algos.errors import ConfigError
from trl_algos.models.adapter_folder import is_adapter_folder
from trl_algos.models.critic_folder import is_critic_folder
from trl_algos.recipe.arguments import Arguments
from trl_algos.rewards.spec import load_rewards
from trl_algos.run.folder import PLOT_FILE
from trl_algos.run.held_out import HeldOut, held_out_rewards
from trl_algos.run.models import found_model, model_arguments
from trl_algos.run.plots import plot_run
from trl_algos.run.sampling_table import sampling_table
from trl_algos.settings.critic import critic_stands_alone
from trl_algos.settings.trainer_checks import launched_processes
from trl_algos.trainers import PolicyTrainer, PPOTrainer


class PolicyJob:
    """Rewards and held-out prompts of a run, found before its model is loaded.

    Args:
        arguments: the recipe's.
        train_dataset: prompts.
        test_dataset: prompts to measure; None where nothing does.

    Raises:
        ConfigError: a reward is not to be had, or there are too few prompts to measure.
    """

    def __init__(self, arguments: Arguments, train_dataset: Any, test_dataset: Any) -> None:
        self._arguments = arguments
        self._train_dataset, self._test_dataset = train_dataset, test_dataset
        self._rewards = _rewards(arguments, column_names(train_dataset))
        self._prompts = _held_out_prompts(arguments.run.held_out_prompts, test_dataset)

    def trainer(self, resume: str | None) -> PolicyTrainer:
        """The trainer, which has looked at the checkpoint that it goes on from."""
        args, model = self._arguments.trainer, model_arguments(self._arguments)
        if args.critic_model_name_or_path and not is_critic_folder(args.critic_model_name_or_path):
            key, name = "critic_model_name_or_path", args.critic_model_name_or_path
            args.critic_model_name_or_path = found_model(key, name, "main", args.trust_remote_code)
        trainer_class = PPOTrainer if "critic" in advantage_needs(args.advantage_function) else PolicyTrainer
        trainer = trainer_class(
            reward_funcs=self._rewards,
            args=args,
            train_dataset=self._train_dataset,
            eval_dataset=self._test_dataset if args.eval_strategy != "no" else None,
            **model,
        )
        trainer.check_start(resume)
        return trainer

    def measured(self, trainer: PolicyTrainer) -> HeldOut | None:
        """Rewards on the held-out prompts now; on all processes."""
        return (
            held_out_rewards(trainer, self._prompts, self._arguments.run.held_out_samples) if self._prompts else None
        )

    def summary(self, trainer: PolicyTrainer, before: HeldOut | None, after: HeldOut | None) -> dict[str, Any]:
        """What the run's summary says of it."""
        return {
            "held_out": {
                "prompts": before.prompts if before else 0,
                "samples_per_prompt": self._arguments.run.held_out_samples,
                "before": before and _means(before),
                "after": after and _means(after),
            },
            "sampling": _sampled(trainer),
        }

    def plot(self, trainer: PolicyTrainer, before: HeldOut | None, after: HeldOut | None) -> None:
        """Draw the run into its folder."""
        folder = Path(self._arguments.trainer.output_dir)
        title = f"{self._arguments.trainer.algorithm}: {folder.name}"
        plot_run(trainer.state.log_history, folder / PLOT_FILE, title)

    def tables(self, trainer: PolicyTrainer, before: HeldOut | None, after: HeldOut | None) -> list[RenderableType]:
        """What is printed at the end."""
        return [*([_held_out_table(before, after)] if before and after else []), sampling_table(_sampled(trainer))]

    def remarks(self, trainer: PolicyTrainer, settings: dict[str, Any]) -> list[str]:
        """What to know before going on from here."""
        if isinstance(trainer, PPOTrainer) and critic_stands_alone(settings):
            return [_CRITIC_ALONE.format(trainer.critic_folder(Path(self._arguments.trainer.output_dir)))]
        return []


_CRITIC_ALONE = (
    "The policy is unchanged, since `critic_warmup_steps` is all of `max_steps`. To train both from here, set "
    "`critic_model_name_or_path` to {}, fewer `critic_warmup_steps` and another `output_dir`."
)


def _rewards(arguments: Arguments, columns: list[str] | None) -> list[Any]:
    run, args = arguments.run, arguments.trainer
    models = []
    if run.reward_model_name_or_path:
        name = run.reward_model_name_or_path
        if not is_adapter_folder(name):
            name = found_model("reward_model_name_or_path", name, "main", args.trust_remote_code)
        models.append(name)
    return models + (load_rewards(run.reward_funcs, columns) if run.reward_funcs else [])


def _held_out_prompts(count: int, test_dataset: Any) -> Dataset | None:
    rows = list(itertools.islice(test_dataset, count)) if count else []
    if len(rows) < min(count, launched_processes()):
        raise ConfigError(
            [f"`held_out_prompts`: {count}, but the test split has {len(rows)} prompts; each process needs one."]
        )
    return Dataset.from_list(rows) if rows else None


def _sampled(trainer: PolicyTrainer) -> dict[str, Any]:
    return trainer.accounts.table(0 if trainer.collector is None else len(trainer.collector.waiting))


def _means(held_out: HeldOut) -> dict[str, dict[str, float]]:
    return {"greedy": held_out.greedy, "sampled": held_out.sampled}


def _held_out_table(before: HeldOut, after: HeldOut) -> Table:
    table = Table(title=f"Mean reward on {before.prompts} held-out prompts")
    for heading in ("completion", "reward function", "before", "after", "change"):
        table.add_column(heading, justify="left" if heading in ("completion", "reward function") else "right")
    for kind, rewards in _means(before).items():
        for name, value in rewards.items():
            later = _means(after)[kind][name]
            table.add_row(kind, name, f"{value:.3f}", f"{later:.3f}", f"{later - value:+.3f}")
    return table
