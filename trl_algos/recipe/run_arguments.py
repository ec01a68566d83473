"""What a recipe says besides the settings of trainer and model: data, rewards, and what to measure and report."""

from dataclasses import dataclass, field
from typing import Any

from trl import ScriptArguments


@dataclass
class RunArguments(ScriptArguments):
    """TRL's `ScriptArguments` (which data set, which splits), and those below.

    Args:
        dataset_parameters: parameters of a data set that is generated, such as `size` and `seed`.
        dataset_test_name: another data set to take the test split from.
        column_mapping: new column name -> old one.
        prompt_template: text of the prompt, with `{column}` in it.
        system_prompt: message put in front of each prompt.
        conversational: whether a prompt of text becomes a message of the user.
        plot: write curves of the run into the output folder.
    """

    dataset_parameters: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Parameters of a generated data set: size, test_size, seed, and those of its task."},
    )
    dataset_test_name: str | None = field(
        default=None, metadata={"help": "Another data set, named as in dataset_name, that has the test split."}
    )
    column_mapping: dict[str, str] | None = field(
        default=None, metadata={"help": "Columns to rename: a block of `new: old`."}
    )
    prompt_template: str | None = field(
        default=None, metadata={"help": "Text of the prompt, with {column} where a column's value goes."}
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "System message put in front of each prompt; makes prompts conversational."}
    )
    conversational: bool | None = field(
        default=None,
        metadata={"help": "Whether a prompt of text becomes a message of the user. Default: with a system_prompt."},
    )
    plot: bool = field(default=True, metadata={"help": "Write curves of the run into the output folder, as an image."})


@dataclass
class PolicyRunArguments(RunArguments):
    """Those of algorithms that sample.

    Args:
        reward_funcs: reward functions by name or path, see `trl_algos.rewards.spec`.
        reward_model_name_or_path: a reward model, scored before the functions.
        held_out_prompts: prompts of the test split whose reward is measured before and after training; 0 for none.
        held_out_samples: sampled completions per held-out prompt.
    """

    reward_funcs: list[str | dict[str, Any]] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: a name, package.module.function or path/to/file.py:function; or a block of "
            "`name` and the function's own settings."
        },
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Reward model: a folder or a Hub id. It is scored before the functions."}
    )
    held_out_prompts: int = field(
        default=0, metadata={"help": "Prompts of the test split whose reward is measured before and after training."}
    )
    held_out_samples: int = field(default=1, metadata={"help": "Sampled completions per held-out prompt."})


@dataclass
class PairRunArguments(RunArguments):
    """Those of algorithms on preference pairs.

    Args:
        held_out_pairs: pairs of the test split that are judged before and after training; 0 for none.
    """

    held_out_pairs: int = field(
        default=0, metadata={"help": "Pairs of the test split that are judged before and after training."}
    )
