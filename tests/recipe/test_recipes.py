"""What users copy: recipes that check, say what to watch by the names that are logged, and train as they stand.

To train them takes a model and data from afar, so they are shrunk: to the bundled model, with a chat template, and to
sums told the way of GSM8K. All share one `accelerate launch`, since a start costs as much as several runs.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from trl_algos.algorithms import ALGORITHMS, COMMON_DEFAULTS
from trl_algos.data.arithmetic_task import bundled_model_path
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS
from trl_algos.recipe.checks import recipe_problems
from trl_algos.recipe.reading import read_recipe
from trl_algos.recipe.summary import summary
from trl_algos.settings.kinds import all_keys, kind_of, row_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes"
FILES = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.rglob("*.yaml"))}
RLHF = {
    "rlhf_arithmetic/1_reward_model": "bradley_terry",
    "rlhf_arithmetic/2_ppo": "ppo",
    "rlhf_arithmetic/2_grpo": "grpo",
    "rlhf_arithmetic/dpo": "dpo",
}
"""The whole path from pairs to a policy, in the order of its stages."""
OTHERS = {"quickstart": "dapo", "ppo_arithmetic": "ppo", "reasoning_gym": "dr_grpo", **RLHF}
"""Recipes that are not named after their algorithm."""
ALGORITHM_OF = {**{key: key for key in all_keys()}, **OTHERS}
BUNDLED = ("quickstart", "ppo_arithmetic", *RLHF)
"""Recipes for the bundled model and task."""
FULL = [name for name in FILES if name not in BUNDLED]
"""Recipes for a GPU, whose header has all parts."""
PAIRS = [name for name in FULL if ALGORITHM_OF[name] in PREFERENCE_ALGORITHMS]
SAMPLING = [name for name in FULL if name not in PAIRS]

WATCHED = re.compile(r"^#   ([\w*]+(?:/[\w*]+)*)  +\S", re.MULTILINE)
TRIAL = re.compile(r"^#   trl-algos (train (?:.*\\\n)*.*)$", re.MULTILINE)


def header(name: str) -> str:
    """The comment that a recipe begins with."""
    return FILES[name].read_text().partition("\nalgorithm:")[0]


def watched(name: str) -> list[str]:
    """Metrics that a recipe says to watch: first words of the lines, and those in backticks beside them."""
    text = header(name).partition("# Watch:\n")[2].partition("\n#\n")[0]
    return [*WATCHED.findall(text), *re.findall(r"`([\w*]+/[\w*/]+)`", text)]


def settings(name: str) -> dict[str, Any]:
    return yaml.safe_load(FILES[name].read_text())


def trial_words(name: str) -> list[str]:
    """The words of the command for a CPU, as a shell would pass them on."""
    (command,) = TRIAL.findall(header(name))
    return shlex.split(command.replace("\\\n#", ""))


# What they say


def test_every_algorithm_has_a_recipe_of_its_name():
    assert ALGORITHM_OF.keys() == FILES.keys()
    assert {name: settings(name)["algorithm"] for name in FILES} == ALGORITHM_OF


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_wrong_with_a_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """But that the second stage of the path needs what the first one leaves."""
    monkeypatch.chdir(tmp_path)
    problems = recipe_problems(read_recipe(str(FILES[name])))
    wants = [key for key in ("reward_model_name_or_path", "critic_model_name_or_path") if key in settings(name)]
    missing = "there is no folder 'runs/rlhf_arithmetic/reward_model'."
    assert sorted(problem.partition(": `")[2] for problem in problems) == sorted(f"{k}`: {missing}" for k in wants)


@pytest.mark.parametrize("name", FULL)
def test_the_header_names_title_paper_and_command(name: str):
    row, text = row_of(ALGORITHM_OF[name]), header(name)
    assert row.paper in text.partition("#\n")[0]
    if name not in OTHERS:
        assert text.startswith(f"# {row.title} (")
    assert f"\n#   accelerate launch -m trl_algos train recipes/{name}.yaml\n" in text
    assert trial_words(name)[:2] == ["train", f"recipes/{name}.yaml"]


@pytest.mark.parametrize("name", PAIRS)
def test_the_header_says_how_many_pairs_a_step_takes(name: str):
    (pairs,) = re.findall(r"(\d+) pairs per optimizer step", summary(read_recipe(str(FILES[name])))[1])
    assert f"# {pairs} pairs per optimizer step." in header(name)


@pytest.mark.parametrize("name", SAMPLING)
def test_the_header_says_how_much_is_sampled(name: str):
    """In the words of `trl-algos check`, whose own numbers are tested by hand elsewhere."""
    checked = summary(read_recipe(str(FILES[name])))[1]
    rows, prompts, steps = re.findall(r"(\d+) (?:completions|prompts|optimizer step)", checked)
    text = header(name)
    said = f"{rows} prompts, one completion each" if rows == prompts else f"{rows} completions of {prompts} prompts"
    assert f"# {said}, sampled at a time; {steps} optimizer step{'s' if steps != '1' else ''} on them." in text


@pytest.mark.parametrize("name", FULL)
def test_no_key_repeats_what_the_algorithm_sets(name: str):
    key = ALGORITHM_OF[name]
    defaults = {**(COMMON_DEFAULTS if key in ALGORITHMS else {}), **row_of(key).defaults}
    given = read_recipe(str(FILES[name])).given  # typed: to plain YAML 3e-4 is text
    assert [key for key, value in given.items() if key in defaults and defaults[key] == value] == []


def test_every_recipe_watches_something_else():
    watched_by = [tuple(sorted(watched(name))) for name in FULL]
    assert min(map(len, watched_by)) >= 3
    assert len(set(watched_by)) == len(FULL)


@pytest.mark.parametrize("name", FULL)
def test_a_recipe_is_complete(name: str):
    """What a user would otherwise have to look up: where things go, how often, and what is measured."""
    needed = {"output_dir", "save_steps", "logging_steps", "max_steps", "learning_rate", "bf16"}
    needed |= {"per_device_train_batch_size", "gradient_accumulation_steps"}
    if name in SAMPLING:
        needed |= {"max_completion_length", "system_prompt", "held_out_prompts", "held_out_samples"}
    else:
        needed |= {"max_length", "held_out_pairs"}
    if name != "bradley_terry":  # whose folder is to be a whole model, for those that load it as a reward
        needed |= {"use_peft", "lora_r", "lora_alpha", "lora_target_modules"}
    assert needed - settings(name).keys() == set()
    assert settings(name)["output_dir"] == f"runs/{name}"


@pytest.mark.parametrize("name", SAMPLING)
def test_checkpoints_lie_between_generations(name: str):
    """There a resumed run goes on exactly as the other would have."""
    values = read_recipe(str(FILES[name])).values
    steps = (values["steps_per_generation"] or values["gradient_accumulation_steps"]) * values["num_iterations"]
    assert values["save_steps"] % (steps // values["gradient_accumulation_steps"]) == 0
    assert values["max_steps"] % values["save_steps"] == 0


def test_a_small_reward_for_the_format_stands_only_where_nothing_blows_it_up():
    """A group of wrong answers, divided by its std, would make it as large as a right one; pass@k takes it for one."""
    for name in SAMPLING:
        row = ALGORITHMS[ALGORITHM_OF[name]]
        if row.advantage.__name__ in ("group_normalized_advantages", "pass_at_k_advantages"):
            assert settings(name)["reward_funcs"] == ["numeric_match"], name


# What they do

TEMPLATE = (
    "{% if 'boxed' not in messages[0].content and '<think>' not in messages[0].content %}"
    "{{ raise_exception('the system prompt is missing') }}{% endif %}"
    "{{ bos_token }}{{ messages[1].content }}"
)
"""The user's sum alone, which the bundled model can continue; refuses a conversation without the system prompt."""

PAIR_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)
"""The sum and, after it, its answer."""

WORKER = """
import json, sys, traceback
sys.path.insert(0, sys.argv[3])
import quick
from trl_algos.cli import main

quick.remember_packages()
codes = {}
for name, words in json.load(open(sys.argv[1])).items():
    try:
        codes[name] = main(words)
    except BaseException:
        codes[name] = traceback.format_exc()
    quick.leave_out_of_collection()
json.dump(codes, open(sys.argv[2], "w"))
"""

SMALL = ["--use_cpu", "--bf16=false", "--max_steps=2", "--logging_steps=1"]
SAMPLED = ["--held_out_prompts=4", "--held_out_samples=1", "--max_completion_length=8"]


def chat_model(folder: Path, template: str) -> Path:
    """The bundled model, with a chat template."""
    shutil.copytree(bundled_model_path(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


def conversations(path: Path, first: int) -> Path:
    """Pairs in the form of UltraFeedback: the prompt is the common part of two conversations."""
    rows = []
    for number in range(first, first + 40):
        user = {"role": "user", "content": f"{number}+7="}
        answers = {"chosen": number + 7, "rejected": number + 17}
        rows.append({side: [user, {"role": "assistant", "content": str(sum_)}] for side, sum_ in answers.items()})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def sums_like_gsm8k(path: Path, first: int) -> Path:
    rows = [(first + i, 7 * i % 50) for i in range(70)]
    text = [{"question": f"{a}+{b}=", "answer": f"{a} and {b} are {a + b}.\n#### {a + b}"} for a, b in rows]
    path.write_text("\n".join(map(json.dumps, text)))
    return path


def small_words(name: str, folder: Path) -> list[str]:
    """A recipe on the small model: its own data set where that is made here, else sums in the form it asks for."""
    words = ["train", str(FILES[name]), *SMALL, "--save_steps=2", f"--output_dir={folder}/{name}"]
    words += ["--per_device_train_batch_size=4"]
    if name in PAIRS:
        words += [f"--model_name_or_path={folder}/pair_model", "--held_out_pairs=8"]
        words += ["--learning_rate=1e-3", "--warmup_steps=0"]  # so that two steps show
        words += [f"--dataset_name={folder}/pairs.jsonl", f"--dataset_test_name={folder}/test_pairs.jsonl"]
        return [*words, *(["--eval_steps=1"] if "eval_steps" in settings(name) else [])]
    words += [*SAMPLED, f"--model_name_or_path={folder}/model"]
    if "critic_warmup_steps" in settings(name):  # one of the two steps; the other is the policy's, at its full rate
        words += ["--critic_warmup_steps=1", "--warmup_steps=0"]
    if name == "reasoning_gym":
        words += ['--dataset_parameters={"size": 70, "test_size": 4, "max_terms": 2}']
    else:
        words += [f"--dataset_name={folder}/train.jsonl", f"--dataset_test_name={folder}/test.jsonl"]
        words += ["--dataset_config=null"]
    return words


def short_stage(name: str, folder: Path) -> list[str]:
    """A stage of the path on the bundled model, for two steps: it goes on from what the one before has left."""
    words = ["train", str(FILES[name]), *SMALL, f"--output_dir={folder}/{name}"]
    for key in ("reward_model_name_or_path", "critic_model_name_or_path"):
        words += [f"--{key}={folder}/rlhf_arithmetic/1_reward_model"] if key in settings(name) else []
    if "held_out_pairs" in settings(name):
        return [*words, "--held_out_pairs=50", '--dataset_parameters={"size": 200}']
    return [*words, "--held_out_prompts=50"]


def short_trial(name: str, folder: Path) -> list[str]:
    """The literal command for a CPU, for one step and few held-out rows."""
    words = trial_words(name)
    for option, value in (("--max_steps", "1"), ("--output_dir", f"{folder}/try_{name}")):
        words[words.index(option) + 1] = value
    if "--critic_warmup_steps" in words:  # the one step would be one of the critic alone
        words[words.index("--critic_warmup_steps") + 1] = "0"
    if name in PAIRS:  # fewer of them to tokenise
        return [*words, "--held_out_pairs=4", "--plot=false", '--dataset_parameters={"size": 200, "test_size": 20}']
    return [*words, "--held_out_prompts=4", "--plot=false"]


def launch(*command: str) -> str:
    """Run `accelerate launch` with this tree's package in front; returns what it printed."""
    options = ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("accelerate")), "launch", *options, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the model and the data that the small runs use."""
    folder = tmp_path_factory.mktemp("recipes")
    chat_model(folder / "model", TEMPLATE)
    chat_model(folder / "pair_model", PAIR_TEMPLATE)
    conversations(folder / "pairs.jsonl", 10)
    conversations(folder / "test_pairs.jsonl", 50)
    sums_like_gsm8k(folder / "train.jsonl", 10)
    sums_like_gsm8k(folder / "test.jsonl", 20)
    return folder


@pytest.fixture(scope="module")
def codes(material: Path) -> dict[str, Any]:
    """Run -> exit code or traceback: each recipe made small, and each command for a CPU, in one process."""
    runs = {name: small_words(name, material) for name in FULL}
    runs |= {f"try_{name}": short_trial(name, material) for name in FULL}
    runs |= {name: short_stage(name, material) for name in RLHF}
    (material / "runs.json").write_text(json.dumps(runs))
    (material / "worker.py").write_text(WORKER)
    printed = launch(f"{material}/worker.py", f"{material}/runs.json", f"{material}/codes.json", str(ROOT / "tests"))
    return {**json.loads((material / "codes.json").read_text()), "printed": printed}


def logged(folder: Path) -> dict[str, Any]:
    """Metric -> its last value in a run's log."""
    merged: dict[str, Any] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        merged |= json.loads(line)
    return merged


def assert_trained(folder: Path, steps: int, plot: bool = True) -> dict[str, Any]:
    """The run folder holds what it should, and something was learnt; returns what was logged."""
    held = {path.name for path in folder.iterdir()}
    told = json.loads((folder / "training_summary.json").read_text())
    weights = "adapter_model.safetensors" if told["settings"]["use_peft"] else "model.safetensors"
    on_pairs = kind_of(told["algorithm"]) != "policy"
    records = {"recipe.yaml", "metrics.jsonl", "training_summary.json", weights}
    assert held >= records | ({"preference.png" if on_pairs else "reward.png"} if plot else set())
    assert told["steps"] == steps
    for when in ("before", "after"):
        figures = told["held_out"][when]
        if not on_pairs:
            assert all(0 <= value <= 1 for name, value in figures["sampled"].items() if "match" in name)
        else:
            assert 0 <= figures["rewards/accuracies" if "rewards/accuracies" in figures else "accuracy"] <= 1
    return logged(folder)


def assert_adapter_moved(folder: Path) -> None:
    moved = load_file(folder / "adapter_model.safetensors")
    assert max(float(weight.abs().max()) for key, weight in moved.items() if "lora_B" in key) > 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SAMPLING)
def test_a_recipe_made_small_trains_two_steps(name: str, codes: dict[str, Any], material: Path):
    assert codes[name] == 0, codes["printed"][-4000:]
    log = assert_trained(material / name, steps=2)
    for reward in settings(name)["reward_funcs"]:
        assert log[f"rewards/{reward if isinstance(reward, str) else reward['name']}/mean"] is not None
    assert log["reward/unscorable"] == 0
    if "numeric_match" in settings(name)["reward_funcs"]:  # the bundled model is right a third of the time
        assert 0 < log["rewards/numeric_match/mean"] < 1
        assert_adapter_moved(material / name)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", PAIRS)
def test_a_recipe_on_pairs_made_small_trains_two_steps(name: str, codes: dict[str, Any], material: Path):
    assert codes[name] == 0, codes["printed"][-4000:]
    assert_trained(material / name, steps=2)
    told = json.loads((material / name / "training_summary.json").read_text())
    assert told["held_out"]["pairs"] == 8
    assert told["held_out"]["after"]["loss"] != told["held_out"]["before"]["loss"]
    assert told["pairs"] == {"train": {"used": 40, "dropped": 0}, "held_out": {"used": 8, "dropped": 0}}
    if settings(name).get("use_peft"):
        assert_adapter_moved(material / name)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_path_from_pairs_to_policies(codes: dict[str, Any], material: Path):
    """Each stage takes up what the one before has left; what the answers are worth is measured by `exact_match`."""
    for name in RLHF:
        assert codes[name] == 0, codes["printed"][-4000:]
    for name in ("rlhf_arithmetic/2_ppo", "rlhf_arithmetic/2_grpo"):
        log = assert_trained(material / name, steps=2)
        assert log["reward"] == pytest.approx(log["rewards/1_reward_model/mean"])
        assert 0 < log["rewards/exact_match/mean"] < 1
    config = json.loads((material / "rlhf_arithmetic" / "1_reward_model" / "config.json").read_text())
    told = json.loads((material / "rlhf_arithmetic" / "1_reward_model" / "training_summary.json").read_text())
    assert config["reward_mean"] == told["held_out"]["after"]["reward_mean"]
    assert config["reward_std"] == told["held_out"]["after"]["reward_std"] > 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", FULL)
def test_the_metrics_to_watch_are_logged(name: str, codes: dict[str, Any], material: Path):
    """By the run of this very recipe: not every algorithm has a KL, or groups."""
    assert codes[name] == 0
    names = logged(material / name)
    assert [metric for metric in watched(name) if not fnmatch.filter(names, metric)] == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", FULL)
def test_the_command_for_a_cpu_works(name: str, codes: dict[str, Any], material: Path):
    assert codes[f"try_{name}"] == 0, codes["printed"][-4000:]
    assert_trained(material / f"try_{name}", steps=1, plot=False)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["gspo"])
def test_the_command_of_the_header_trains(name: str, material: Path):
    """`accelerate launch -m trl_algos train recipes/NAME.yaml`, with what makes it small behind it."""
    command = next(line for line in header(name).splitlines() if "accelerate launch" in line)
    words = shlex.split(command.lstrip("# "))[2:]
    small = [w for w in small_words(name, material)[2:] if "--output_dir" not in w]
    assert "Trained 2 steps" in launch(*words, *small, f"--output_dir={material}/launched_{name}")
    assert_trained(material / f"launched_{name}", steps=2)
