"""The texts of the starter recipes: what must be chosen, by kind of recipe, with what to write instead beside it.

A setting that is commented out has no space behind its #: without the # it stands where YAML wants it.
"""

from collections.abc import Mapping

_TOP = """\
# {title} ({paper}).
#
# As it stands it {does}, on a CPU, in about a minute:
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

"""

_END = """\
logging_steps: 5
save_strategy: "no"                # <- take out to save a checkpoint every save_steps
#save_steps: 100
#report_to: trackio                # or wandb, tensorboard; the log is in metrics.jsonl anyway

"""

_SAMPLED = """\
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
"""

_PAIRS = """\
# The data: an id of the Hub, a .jsonl, .csv or .parquet file, or a folder. Columns chosen and rejected, with or
# without prompt, of text or messages{columns}.
dataset_name: arithmetic_preferences  # <- such as trl-lib/ultrafeedback_binarized
#column_mapping: {{chosen: better, rejected: worse}}  # new name: old one, where the columns have other names
#system_prompt: Answer in one sentence.  # put in front of each prompt, which becomes a message
#test_split_size: 200              # rows held out, where the data have no test split

# Sizes. A step takes the product of the two batch sizes and the number of processes, in pairs.
max_length: 32                     # <- tokens of prompt and completion, such as 1024; {long}
per_device_train_batch_size: 64    # <- as many as fit into memory, such as 4
gradient_accumulation_steps: 1     # <- such as 16

learning_rate: {rate}                # <- about {lora_rate} with LoRA, {whole_rate} without
max_steps: 100                     # <- or num_train_epochs: 1
held_out_pairs: 200                # of the test split, judged before and after
"""

_HEADS: Mapping[str, str] = {
    kind: _TOP + middle + _END
    for kind, middle in (
        ("policy", _SAMPLED),
        ("preference", _PAIRS),
        ("reward_model", _PAIRS),
    )
}

_WORDS: Mapping[str, Mapping[str, str]] = {
    "policy": {"does": "teaches sums to the bundled model"},
    "preference": {
        "does": "teaches the bundled model to prefer right sums",
        "columns": "",
        "long": "what is longer is cut",
        "rate": "3e-4",
        "lora_rate": "5e-6",
        "whole_rate": "5e-7",
    },
    "reward_model": {
        "does": "makes a reward model of right and wrong sums",
        "columns": ";\n# margin and preference where the data have them",
        "long": "longer pairs are left out",
        "rate": "1e-3",
        "lora_rate": "1e-4",
        "whole_rate": "1e-5",
    },
}


def starter_head(kind: str, **fields: object) -> str:
    """The text above an algorithm's own settings.

    Args:
        kind: the recipe's kind.
        **fields: `key`, `title`, `paper` and `file`, and of a policy `generations`.
    """
    return _HEADS[kind].format(**_WORDS[kind], **fields)
