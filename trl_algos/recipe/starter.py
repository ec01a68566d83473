"""`trl-algos init`: a recipe to start from, with comments, written from the algorithm's row."""

import json
import textwrap
from pathlib import Path

from trl_algos.algorithms import ALGORITHMS, COMMON_DEFAULTS, advantage_settings, component_name, surrogate_settings
from trl_algos.errors import ConfigError
from trl_algos.recipe import schema

_WIDTH = 100

_HEAD = """\
# {title} ({paper}).
#
#   trl-algos check {file}
#   trl-algos explain {file}
#   accelerate launch -m trl_algos train {file}
#
# As it stands it trains a bundled model on a CPU in a minute. For a model of your own change what is marked <-.

algorithm: {key}

# Model: a folder or a Hub id, and LoRA
model_name_or_path: arithmetic-lm  # <- e.g. Qwen/Qwen2.5-0.5B-Instruct
use_cpu: true                      # <- take out on a GPU, with the next line
bf16: false
# use_peft: true
# lora_r: 32
# lora_alpha: 64
# lora_target_modules: all-linear

# Data: a Hub id, a .jsonl .csv .parquet file, or reasoning_gym/<task>
dataset_name: arithmetic           # <- e.g. openai/gsm8k, with dataset_config: main
# prompt_template: "{{question}}"    # text of the prompt; columns in braces
# system_prompt: Put the answer last.

# Rewards: names, package.module.function, path/to/file.py:function, or blocks of `name` and settings
reward_funcs: [exact_match]        # <- e.g. numeric_match, which reads GSM8K's answers

# Lengths and batches: per_device_train_batch_size times gradient_accumulation_steps (times processes) is a multiple
# of num_generations
num_generations: {generations}
max_completion_length: 4           # <- e.g. 512
per_device_train_batch_size: 64
gradient_accumulation_steps: 1

learning_rate: 3e-4                # <- 1e-5 for LoRA, 1e-6 for all weights
max_steps: 100
output_dir: runs/{key}
logging_steps: 5
save_strategy: "no"                # <- steps, with save_steps
held_out_prompts: 200              # prompts of the test split, scored before and after
report_to: none                    # trackio, wandb, tensorboard

"""


def write_starter(key: str, path: str) -> str:
    """Write the starter recipe of an algorithm, and return where.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(starter_text(key, path))
    except FileExistsError:
        raise ConfigError([f"init: {path} exists; name another file."]) from None
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
    generations = row.defaults.get("num_generations", COMMON_DEFAULTS["num_generations"])
    head = _HEAD.format(title=row.title, paper=row.paper, key=key, file=file, generations=generations)
    parts = {
        "advantage_estimator": component_name(row.advantage),
        "surrogate": component_name(row.surrogate),
        "ratio_level": row.ratio_level,
        "aggregation": row.aggregation,
        "kl_placement": row.kl_placement,
    }
    used = {*advantage_settings(row.advantage).values(), *surrogate_settings(row.surrogate), *row.defaults}
    settings = {name: row.defaults[name] for name in sorted(used & set(row.defaults)) if name != "num_generations"}
    lines = ["# What the algorithm sets by itself; take out the # to change it."]
    for name, value in (parts | settings).items():
        lines += _commented(name, value)
    return head + "\n".join(lines) + "\n"


def _commented(name: str, value: object) -> list[str]:
    text = value if isinstance(value, str) else json.dumps(value)
    about = textwrap.wrap(schema.settings()[name].help, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    return ["#", *about, f"# {name}: {text}"]
