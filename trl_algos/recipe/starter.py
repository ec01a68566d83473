"""`trl-algos init`: a recipe to start from, which trains as it stands and marks what to change."""

import json
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from trl_algos.algorithms import ALGORITHMS, CRITIC_DEFAULTS, Algorithm, component_name
from trl_algos.errors import ConfigError
from trl_algos.recipe import schema

_WIDTH = 119

# A setting that is commented out has no space behind its #: without the # it stands where YAML wants it.
_HEAD = """\
# {title} ({paper}).
#
# As it stands it teaches sums to the bundled model, on a CPU, in about a minute:
#
#   trl-algos check {file}
#   accelerate launch -m trl_algos train {file}
#
# To make it yours, go through the lines marked <- from top to bottom, and check again. A # without a space behind it
# hides a setting: take it away to use the setting. All that holds then:
#
#   trl-algos explain {file}

algorithm: {key}
output_dir: runs/{key}

# The model: a folder or an id of the Hub.
model_name_or_path: arithmetic-lm  # <- such as Qwen/Qwen2.5-0.5B-Instruct
use_cpu: true                      # <- take out on a GPU
bf16: false                        # <- take out on a GPU
#use_peft: true                    # <- LoRA, for most models on one GPU
#lora_r: 32
#lora_alpha: 64
#lora_target_modules: all-linear

# The data: an id of the Hub, a .jsonl, .csv or .parquet file, a folder, or reasoning_gym/<task>.
dataset_name: arithmetic           # <- such as openai/gsm8k
#dataset_config: main              # which part, for data of the Hub; GSM8K needs it
#prompt_template: "{{question}}"     # the prompt, with columns in braces, where no column is called prompt
#system_prompt: Reason step by step and put the final number in \\boxed{{}}.
#test_split_size: 200              # rows held out, where the data have no test split

# The rewards: names, path/to/file.py:function or package.module.function; or blocks of a name and its settings.
reward_funcs: [exact_match]        # <- such as numeric_match, which reads GSM8K's answers
#reward_weights: [1.0]             # one for each

# Sizes. The product of the two batch sizes, the number of processes and, where it is set, steps_per_generation in
# place of gradient_accumulation_steps must be a multiple of num_generations.
num_generations: {generations}
max_completion_length: 8           # <- tokens, such as 512
per_device_train_batch_size: 64    # <- as many as fit into memory, such as 8
gradient_accumulation_steps: 1     # <- such as 16

learning_rate: 3e-4                # <- about 1e-5 with LoRA, 1e-6 without
max_steps: 100                     # <- hundreds
held_out_prompts: 200              # of the test split, scored before and after
logging_steps: 5
save_strategy: "no"                # <- take out to save a checkpoint every save_steps
#save_steps: 100
#report_to: trackio                # or wandb, tensorboard; the log is in metrics.jsonl anyway

"""


def write_starter(key: str, path: str) -> str:
    """Write the starter recipe of an algorithm, and return where.

    Args:
        key: key of the row.
        path: file to write; it must not be there yet.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    text = starter_text(key, path)
    if Path(path).exists():
        raise ConfigError([f"init: {path} exists and is left as it is; name another file."])
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError([f"init: {path} cannot be written: {error.strerror}."]) from None
    return path


def starter_text(key: str, file: str) -> str:
    """The starter recipe of an algorithm: what must be chosen, then all that the algorithm sets, commented out.

    Args:
        key: key of the row.
        file: name that the recipe will have.
    """
    row = ALGORITHMS[key]
    generations = row.all_defaults["num_generations"]
    head = _HEAD.format(title=row.title, paper=row.paper, key=key, file=shlex.quote(file), generations=generations)
    lines = ["# What the algorithm sets by itself."]
    for name, value in _row_settings(row):
        lines += _commented(name, value)
    return head + "\n".join(lines) + "\n"


def _row_settings(row: Algorithm) -> Iterator[tuple[str, object]]:
    """Settings and values that the row stands for, its parts first."""
    yield "advantage_estimator", component_name(row.advantage)
    yield "surrogate", component_name(row.surrogate)
    yield "ratio_level", row.ratio_level
    yield "aggregation", row.aggregation
    yield "kl_placement", row.kl_placement
    if row.kl_placement != "none":
        yield "kl_estimator", row.kl_estimator
    own = {name: value for name, value in row.defaults.items() if name != "num_generations"}
    if "critic" in row.needs:
        yield "critic", "separate"  # as long as no LoRA is trained
        own |= {name: row.all_defaults[name] for name in CRITIC_DEFAULTS if name != "push_critic"}
    yield from sorted(own.items())


def _commented(name: str, value: object) -> list[str]:
    text = value if isinstance(value, str) else json.dumps(value)
    about = textwrap.wrap(schema.settings("policy")[name].help, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    return ["", *about, f"#{name}: {text}"]
