import os
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import DatasetMixtureConfig, ModelConfig

from trl_algos import ALGORITHMS, ConfigError, PolicyConfig
from trl_algos.recipe.arguments import CLASSES, Arguments, build, named
from trl_algos.recipe.coercion import coerce
from trl_algos.recipe.reading import read_recipe
from trl_algos.recipe.run_arguments import PolicyRunArguments

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
ON_CPU = ("--use_cpu", "--report_to=none", "--output_dir=unused")


@pytest.fixture
def read(tmp_path: Path) -> typing.Callable[..., Arguments]:
    def read(text: str, *overrides: str) -> Arguments:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return build(read_recipe(str(path), [*ON_CPU, *overrides]))

    return read


@pytest.fixture
def problems(read: typing.Callable[..., Arguments], tmp_path: Path) -> typing.Callable[..., list[str]]:
    """Problems of a recipe, with FILE in the place of the path."""

    def problems(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            read(text, *overrides)
        return [message.replace(str(tmp_path / "recipe.yaml"), "FILE") for message in error.value.problems]

    return problems


def setting(recipe: Arguments, name: str) -> Any:
    parts = (recipe.run, recipe.trainer, recipe.model, recipe.mixture)
    (value,) = [getattr(part, name) for part in parts if name in {f.name for f in fields(part)}]
    return value


# Values and types (public fault CFG-1)

LINES = [  # line, field, value; the type is compared as well, since 100 == 100.0 == True + 99
    ("learning_rate: 1e-6", "learning_rate", 1e-6),
    ("beta: 1e-3", "beta", 0.001),
    ("beta: 1E-3", "beta", 0.001),
    ("beta: +1.5e-3", "beta", 0.0015),
    ("beta: .5", "beta", 0.5),
    ("beta: 1.", "beta", 1.0),
    ("beta: 1", "beta", 1.0),
    ("beta: '1e-3'", "beta", 0.001),
    ("reward_weights: [1e-1, 1]", "reward_weights", [0.1, 1.0]),
    ("reward_weights: ['1e-1', '1']", "reward_weights", [0.1, 1.0]),
    ("reward_weights:\n- 1e-1\n- 2", "reward_weights", [0.1, 2.0]),
    ("reward_weights: 1e-1", "reward_weights", [0.1]),
    ("lr_scheduler_kwargs: {min_lr: 1e-7}", "lr_scheduler_kwargs", {"min_lr": 1e-7}),
    ("generation_kwargs:\n  min_p: 1e-2\n  num_beams: 2", "generation_kwargs", {"min_p": 0.01, "num_beams": 2}),
    ("model_init_kwargs: {rope: {theta: [1e-6, 1]}}", "model_init_kwargs", {"rope": {"theta": [1e-6, 1]}}),
    ("use_peft: true\nlora_dropout: 1e-2", "lora_dropout", 0.01),
    ("kl_controller: adaptive\nkl_horizon: 1e4", "kl_horizon", 10000.0),
    ("kl_controller: adaptive\nkl_target: 6e-1", "kl_target", 0.6),
    ("eval_strategy: no", "eval_strategy", "no"),
    ("eval_strategy: 'no'", "eval_strategy", "no"),
    ("eval_strategy: off", "eval_strategy", "no"),
    ("save_strategy: no", "save_strategy", "no"),
    ("eval_strategy: steps\neval_steps: 5", "eval_strategy", "steps"),
    ("mask_truncated_completions: 'false'", "mask_truncated_completions", False),
    ("mask_truncated_completions: 'False'", "mask_truncated_completions", False),
    ("mask_truncated_completions: false", "mask_truncated_completions", False),
    ("mask_truncated_completions: off", "mask_truncated_completions", False),
    ("mask_truncated_completions: 'true'", "mask_truncated_completions", True),
    ("mask_truncated_completions: yes", "mask_truncated_completions", True),
    ("max_steps: 1e2", "max_steps", 100),
    ("max_steps: 100.0", "max_steps", 100),
    ("max_steps: '100'", "max_steps", 100),
    ("num_generations: 8.0", "num_generations", 8),
    ("save_total_limit: 9007199254740993", "save_total_limit", 9007199254740993),  # 2^53 + 1, which no float holds
    ("epsilon_high:", "epsilon_high", None),
    ("epsilon_high: null", "epsilon_high", None),
    ("num_generations_eval: ~", "num_generations_eval", None),
    ("run_name: 1.10", "run_name", "1.10"),  # a text field keeps the text as it stands
    ("model_revision: 12e5", "model_revision", "12e5"),
    ("model_revision: 0123456", "model_revision", "0123456"),
    ("run_name: 2024-01-01", "run_name", "2024-01-01"),
    ("run_name: true", "run_name", "true"),  # not "yes", though `eval_strategy: no` must stay "no"
    ("run_name: '7'", "run_name", "7"),
    ("run_name: 7", "run_name", "7"),
    ("reward_funcs: exact_match", "reward_funcs", ["exact_match"]),
    ("reward_funcs: [a, b.py:c]", "reward_funcs", ["a", "b.py:c"]),
    ("# a comment\nbeta: 1e-3  # another", "beta", 0.001),
]


@pytest.mark.parametrize(("line", "name", "value"), LINES, ids=[line for line, *_ in LINES])
def test_one_line(read: typing.Callable[..., Arguments], line: str, name: str, value: Any):
    got = setting(read(line), name)
    assert got == value
    if not isinstance(value, str):  # TRL turns some texts into enum members, which are texts too
        assert type(got) is type(value)
    if isinstance(value, list):
        assert [type(item) for item in got] == [type(item) for item in value]


WRONG = [  # line, field, what is allowed
    ("learning_rate: fast", "learning_rate", "a number"),
    ("learning_rate: 1e-6x", "learning_rate", "a number"),
    ("learning_rate:", "learning_rate", "a number"),
    ("learning_rate: null", "learning_rate", "a number"),
    ("learning_rate: true", "learning_rate", "a number"),
    ("learning_rate: [1]", "learning_rate", "a number"),
    ("learning_rate: {a: 1}", "learning_rate", "a number"),
    ("num_generations: 2.5", "num_generations", "a whole number"),
    ("num_generations: true", "num_generations", "a whole number"),
    ("num_generations: .inf", "num_generations", "a whole number"),
    ("num_generations: .nan", "num_generations", "a whole number"),
    ("max_steps: many", "max_steps", "a whole number"),
    ("reward_weights: [1, heavy]", "reward_weights", "a number"),
    ("reward_weights: [1, [2]]", "reward_weights", "a number"),
    ("reward_weights: [1, null]", "reward_weights", "a number"),
    ("reward_funcs: [a, [b]]", "reward_funcs", "text"),
    ("reward_funcs: [a, 1, [b]]", "reward_funcs", "entry 3"),
    ("mask_truncated_completions: maybe", "mask_truncated_completions", "true or false"),
    ("mask_truncated_completions: 2", "mask_truncated_completions", "true or false"),
    ("use_peft:", "use_peft", "true or false"),
    ("algorithm: [dapo]", "algorithm", "text"),
    ("algorithm:", "algorithm", "text"),
    ("generation_kwargs: [1]", "generation_kwargs", ""),
]


@pytest.mark.parametrize(("line", "name", "allowed"), WRONG, ids=[line for line, *_ in WRONG])
def test_one_wrong_line(problems: typing.Callable[..., list[str]], line: str, name: str, allowed: str):
    (message,) = problems("# first line\n" + line)
    assert message.startswith(f"FILE:2: `{name}`: ")
    assert allowed in message


def test_what_a_message_says(problems: typing.Callable[..., list[str]]):
    """The file, the line, the key, what was got and what is allowed."""
    assert problems("\nlearning_rate: fast") == ["FILE:2: `learning_rate`: 'fast' is a str; it must be a number."]


@pytest.mark.parametrize("text", ["dtype: float17", "bnb_4bit_quant_type: fp5"])
def test_choices_of_a_field_hold(problems: typing.Callable[..., list[str]], text: str):
    """TRL's own parser checks them; later they would be an error from deep inside, or none at all."""
    name, _, value = text.partition(": ")
    messages = problems(text)
    assert any(f"`{name}`" in message and value in message for message in messages)


@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400])
def test_a_number_beyond_any_float_is_a_problem(problems: typing.Callable[..., list[str]], value: str):
    assert problems(f"learning_rate: {value}")[0].startswith("FILE:1: `learning_rate`")


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (int | str, "5", 5),
        (float | str, "fast", "fast"),
        (str | None, None, None),
        (dict | str | None, {"a": 1}, {"a": 1}),
        (dict | str | None, "path.json", "path.json"),
        (list[int] | None, [1.0, "2"], [1, 2]),
        (bool | None, "no", False),
        (typing.Literal["a", "b"], "b", "b"),
        (Any, [1], [1]),
    ],
)
def test_coerce(annotation: Any, value: Any, expected: Any):
    got = coerce(annotation, value)
    assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("annotation", "value"),
    [(int, 1.5), (int, "1.5"), (int, None), (float, False), (bool, 1), (bool, "2"), (typing.Literal["a"], "b")],
)
def test_coerce_refuses(annotation: Any, value: Any):
    with pytest.raises(ValueError, match="must be"):
        coerce(annotation, value)


# Keys


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("learnin_rate", "learning_rate"),
        ("learning-rate", "learning_rate"),
        ("num-generations", "num_generations"),
        ("Beta", "beta"),
        ("num_gen", None),  # an abbreviation, which argparse would take for the only key that begins so
        ("lora_alph", "lora_alpha"),
        ("reward_func", "reward_funcs"),
        ("zzz", None),
    ],
)
def test_unknown_keys(problems: typing.Callable[..., list[str]], key: str, near: str | None):
    for message in (*problems(f"algorithm: dapo\n{key}: 1"), *problems("algorithm: dapo", f"--{key}", "1")):
        assert f"`{key}`: there is no such setting." in message
        assert near is None or message.endswith(f"Did you mean `{near}`?")
    assert problems(f"algorithm: dapo\n{key}: 1")[0].startswith("FILE:2: ")


def test_duplicate_keys(problems: typing.Callable[..., list[str]]):
    (message,) = problems("beta: 0.1\nalgorithm: grpo\nbeta: 0.2")
    assert message.startswith("FILE:3: `beta`")
    assert "line 1" in message
    (message,) = problems("algorithm: grpo", "--beta=0.1", "--beta", "0.2")
    assert "`--beta`" in message
    assert "twice" in message


def test_fields_that_algorithm_replaces(problems: typing.Callable[..., list[str]]):
    (message,) = problems("loss_type: dapo")
    assert "`loss_type`" in message


def test_all_problems_come_together(problems: typing.Callable[..., list[str]]):
    """Key, type, setting and command line at once; the lines are those of the file."""
    found = problems("algorithm: grpo\nfoo: 1\nlearning_rate: fast\ndelta: 0.5", "--bar=2", "--gamma=7")
    for part in ("FILE:2: `foo`", "FILE:3: `learning_rate`", "FILE:4: `delta`: 0.5", "`bar`", "`gamma`: 7"):
        assert any(message.startswith(part) for message in found), part
    assert len(found) == 5


# Files


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"# only a comment\n", "empty"),
        (b"---\n", "`key: value` lines"),
        (b"- algorithm\n- dapo\n", "`key: value` lines"),
        (b"dapo\n", "`key: value` lines"),
        (b"{}\n", "`key: value` lines"),
        (b"algorithm: [dapo\n", "not valid YAML"),
        (b"algorithm: dapo\n\tbeta: 1\n", "not valid YAML"),
        (b"algorithm: a: b\n", "not valid YAML"),
        (b"algorithm: dapo\n---\nalgorithm: grpo\n", "not valid YAML"),
        (b"run_name: *nowhere\n", "not valid YAML"),
        (b"run_name: !python/object:os.system x\n", ""),
        (b"learning_rate: 2024-13-45\n", ""),
        (b"? [a, b]\n: 1\n", ""),
        (b"run_name: caf\xe9\n", ""),
    ],
)
def test_files_that_are_no_recipes(tmp_path: Path, content: bytes, says: str):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_recipe(str(path), ON_CPU)
    (message,) = error.value.problems
    assert message.startswith(str(path))
    assert says in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("where", ["missing.yaml", "."])
def test_files_that_cannot_be_read(tmp_path: Path, where: str):
    """The file is the only thing to complain about, not what its absence leads to (no `use_cpu` for example)."""
    with pytest.raises(ConfigError) as error:
        read_recipe(str(tmp_path / where))
    (message,) = error.value.problems
    assert message.startswith(f"{tmp_path / where}: cannot be read")


def test_overrides_alone():
    assert build(read_recipe(None, [*ON_CPU, "--algorithm", "gspo"])).trainer.epsilon == 3e-4


# Recipes that extend others


@pytest.fixture
def write(tmp_path: Path) -> typing.Callable[..., Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_a_recipe_that_extends_another(write: typing.Callable[..., Path]):
    """The nearer recipe wins, key by key and whole blocks; the place of the base is relative to the recipe."""
    write("root.yaml", "algorithm: dapo\nbeta: 0.3\nkl_placement: loss\nenv: {A: 1, B: 2}\nseed: 1\n")
    write("sub/base.yaml", "extends: ../root.yaml\nseed: 2\ngeneration_kwargs: {min_p: 0.1, num_beams: 1}\n")
    top = write("sub/top.yaml", "extends: base.yaml\nenv: {C: 3}\ngeneration_kwargs: {min_p: 0.2}\n")
    recipe = read_recipe(str(top), ["--beta", "0.4"])
    values = recipe.values
    assert (values["algorithm"], values["seed"], values["beta"], values["kl_placement"]) == ("dapo", 2, 0.4, "loss")
    assert values["generation_kwargs"] == {"min_p": 0.2}
    assert recipe.environment == {"C": "3"}
    assert recipe.sources["seed"].endswith("sub/base.yaml:2")
    assert recipe.sources["kl_placement"].endswith("root.yaml:3")
    assert recipe.sources["beta"] == "command line"
    assert "extends" not in recipe.written


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extends: missing.yaml", "there is no file 'missing.yaml'"),
        ("extends: [a, b]", "is not the name of a recipe"),
        ("extends:", "is not the name of a recipe"),
        ("extends: {a: b}", "is not the name of a recipe"),
        ("extends: recipe.yaml", "leads back"),
        ("extends: other.yaml", "leads back"),
    ],
)
def test_wrong_bases(write: typing.Callable[..., Path], text: str, says: str):
    write("other.yaml", "extends: recipe.yaml\nseed: 1\n")
    path = write("recipe.yaml", f"algorithm: dapo\n{text}\n")
    with pytest.raises(ConfigError) as error:
        read_recipe(str(path))
    (message,) = error.value.problems
    assert "`extends`" in message
    assert says in message


def test_a_problem_in_the_base_names_the_base(write: typing.Callable[..., Path]):
    base = write("base.yaml", "algorithm: dapo\nbta: 1\n")
    with pytest.raises(ConfigError) as error:
        read_recipe(str(write("recipe.yaml", "extends: base.yaml\nseed: 1\n")))
    assert error.value.problems[0].startswith(f"{base}:2: `bta`")


def test_keys_given_twice_in_a_block(problems: typing.Callable[..., list[str]]):
    (message,) = problems("algorithm: grpo\ngeneration_kwargs:\n  min_p: 0.1\n  min_p: 0.2")
    assert message.startswith("FILE:2: `generation_kwargs`")
    assert "'min_p' stands twice in it (line 4)" in message


# What was set for nothing


@pytest.mark.parametrize(
    "text",
    [
        "lora_r: 8",
        "vllm_mode: server",
        "bnb_4bit_quant_type: fp4",
        "entropy_target: 0.3",
        "ref_model_sync_steps: 5",
        "log_unique_prompts: true",
        "hub_model_id: me/model",
        "held_out_samples: 2",
        "eval_steps: 5",
    ],
)
def test_settings_whose_switch_is_off(problems: typing.Callable[..., list[str]], text: str):
    (message,) = problems(text)
    assert message.startswith(f"FILE:1: `{text.partition(':')[0]}`")
    assert message.endswith("is not set.")


def test_a_switch_turned_off_on_purpose_silences_what_hangs_on_it(read: typing.Callable[..., Arguments]):
    text = "use_peft: true\nlora_r: 8\nsave_steps: 50\nuse_vllm: true\nvllm_mode: server\n"
    arguments = read(text, "--use_peft=false", "--save_strategy=no", "--use_vllm=false")
    assert (arguments.model.use_peft, arguments.model.lora_r) == (False, 8)


def test_columns_that_rewards_read_stay(problems: typing.Callable[..., list[str]]):
    (message,) = problems("remove_unused_columns: true")
    assert message.startswith("FILE:1: `remove_unused_columns`")


# The command line


def test_command_line_over_file_over_row_over_trl(read: typing.Callable[..., Arguments]):
    assert read("max_steps: 3").trainer.temperature == 1.0  # TRL's default
    assert read("algorithm: gspo").trainer.epsilon == 3e-4  # the row
    assert read("algorithm: gspo\nepsilon: 0.2").trainer.epsilon == 0.2  # the file
    assert read("algorithm: gspo\nepsilon: 0.2", "--epsilon=0.1").trainer.epsilon == 0.1
    assert read("algorithm: gspo", "--algorithm=dapo").trainer.epsilon_high == 0.28
    assert read("algorithm: gspo\nepsilon: 0.2", "--epsilon=null").trainer.epsilon == 3e-4  # back to the row
    assert read("use_peft: true", "--use_peft=false").model.use_peft is False


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--beta", "1e-3"], "beta", 0.001),
        (["--beta=1e-3"], "beta", 0.001),
        (["--use_peft"], "use_peft", True),
        (["--use_peft", "false"], "use_peft", False),
        (["--use_peft=False"], "use_peft", False),
        (["--reward_funcs", "a", "b"], "reward_funcs", ["a", "b"]),
        (["--reward_funcs", "a"], "reward_funcs", ["a"]),
        (["--reward_funcs=[a, b]"], "reward_funcs", ["a", "b"]),
        (["--reward_weights", "1e-1", "2"], "reward_weights", [0.1, 2.0]),
        (["--eval_strategy", "no"], "eval_strategy", "no"),
        (["--max_steps", "1e2"], "max_steps", 100),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--generation_kwargs", "{min_p: 1e-2}"], "generation_kwargs", {"min_p": 0.01}),
        (["--generation_kwargs", '{"min_p": 1e-2}'], "generation_kwargs", {"min_p": 0.01}),
        (["--reward_funcs", "folder/my.py:score"], "reward_funcs", ["folder/my.py:score"]),
        (["--run_name", "a=b"], "run_name", "a=b"),
        (["--run_name=a=b"], "run_name", "a=b"),
        (["--run_name", "1.10"], "run_name", "1.10"),
        (["--run_name", "run #2"], "run_name", "run #2"),
        (["--run_name", "step: one"], "run_name", "step: one"),
        (["--run_name", "a: b: c"], "run_name", "a: b: c"),
        (["--run_name", "@home"], "run_name", "@home"),
        (["--run_name", "*best*"], "run_name", "*best*"),
        (["--run_name", "[draft"], "run_name", "[draft"),
    ],
)
def test_options(read: typing.Callable[..., Arguments], words: list[str], name: str, value: Any):
    """Text for a text field is taken as typed: it is a value of the command line, not a YAML document."""
    assert setting(read("algorithm: grpo", *words), name) == value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--learning_rate"], "`learning_rate`"),
        (["--learning_rate="], "`learning_rate`"),
        (["--learning_rate", "1", "2"], "`learning_rate`"),
        (["--max_steps=2.5"], "`max_steps`: 2.5"),
        (["--generation_kwargs", "{min_p"], "`generation_kwargs`"),
        (["--lr", "1e-6"], "`lr`"),
        (["--"], "no such setting"),
    ],
)
def test_wrong_options(problems: typing.Callable[..., list[str]], words: list[str], says: str):
    assert any(says in message for message in problems("algorithm: grpo", *words))


def test_a_word_without_an_option():
    with pytest.raises(ConfigError) as error:
        read_recipe(None, ["stray", *ON_CPU])
    assert error.value.problems == ["'stray' is not an option; write `--key value`."]


@pytest.mark.parametrize("text", ["output_dir: {a: b}", "output_dir: [a]"])
def test_an_override_hides_the_value_of_the_file_but_nothing_else(tmp_path: Path, text: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_recipe(str(path), ["--use_cpu"])
    (message,) = error.value.problems
    assert message.startswith(f"{path}:1: `output_dir`")
    assert build(read_recipe(str(path), ["--use_cpu", "--output_dir=x"])).trainer.output_dir == "x"


# The environment


def test_env_block(tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text("env:\n  TRL_ALGOS_TEXT: some text\n  TRL_ALGOS_NUMBER: 7\nalgorithm: grpo")
    before = dict(os.environ)
    assert read_recipe(str(path)).environment == {"TRL_ALGOS_TEXT": "some text", "TRL_ALGOS_NUMBER": "7"}
    assert os.environ == before  # reading changes nothing
    path.write_text("env:\nalgorithm: grpo")  # an empty block
    assert read_recipe(str(path)).environment == {}


@pytest.mark.parametrize("block", ["5", "[A]", "A=b"])
def test_wrong_env_block(problems: typing.Callable[..., list[str]], block: str):
    (message,) = problems(f"env: {block}")
    assert "`env`" in message


# Recipes of other people, and ours


def test_a_plain_trl_recipe(read: typing.Callable[..., Arguments]):
    """As it stands in TRL's documentation of GRPO with LoRA."""
    recipe = read(
        """
        model_name_or_path: Qwen/Qwen2-0.5B-Instruct
        model_revision: main
        dtype: bfloat16
        attn_implementation: sdpa
        dataset_name: trl-lib/DeepMath-103K
        dataset_config: default
        reward_funcs:
          - accuracy_reward
          - think_format_reward
        reward_weights: [1.0, 0.1]
        learning_rate: 1.0e-5
        lr_scheduler_type: cosine
        lr_scheduler_kwargs: {num_cycles: 0.5}
        warmup_steps: 0.1
        num_train_epochs: 1
        max_completion_length: 1024
        num_generations: 16
        per_device_train_batch_size: 8
        gradient_accumulation_steps: 2
        beta: 0.0
        temperature: 0.9
        top_p: 0.95
        use_vllm: false
        vllm_mode: colocate
        bf16: true
        gradient_checkpointing: true
        gradient_checkpointing_kwargs:
          use_reentrant: false
        use_peft: true
        lora_r: 32
        lora_alpha: 64
        lora_dropout: 0.05
        lora_target_modules: [q_proj, v_proj]
        lora_modules_to_save: lm_head
        load_in_4bit: true
        logging_steps: 10
        log_completions: true
        save_strategy: steps
        save_steps: 0.2
        push_to_hub: false
        hub_model_id: me/my-model
        seed: 42
        """
    )
    assert recipe.model.lora_target_modules == ["q_proj", "v_proj"]
    assert recipe.model.lora_modules_to_save == ["lm_head"]
    assert (recipe.model.use_peft, recipe.model.lora_r, recipe.model.load_in_4bit) == (True, 32, True)
    assert recipe.trainer.learning_rate == 1e-5
    assert recipe.trainer.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert recipe.run.reward_funcs == ["accuracy_reward", "think_format_reward"]
    assert recipe.run.dataset_name == "trl-lib/DeepMath-103K"


@pytest.mark.parametrize(("line", "expected"), [("all-linear", "all-linear"), ("[all-linear]", "all-linear")])
def test_all_linear(read: typing.Callable[..., Arguments], line: str, expected: str):
    assert read(f"use_peft: true\nlora_target_modules: {line}").model.lora_target_modules == expected


def test_a_mixture_of_data_sets(read: typing.Callable[..., Arguments]):
    recipe = read("datasets:\n- path: a/b\n  split: train\n- path: c/d\ndataset_streaming: true\nstreaming: yes")
    assert [(d.path, d.split) for d in recipe.mixture.datasets] == [("a/b", "train"), ("c/d", "train")]
    assert recipe.mixture.streaming is True


@pytest.mark.parametrize("kind", CLASSES)
def test_one_home_per_key(kind: str):
    """A key must not be a field of two dataclasses: only one of them would get it."""
    seen: set[str] = set()
    for annotation in (*CLASSES[kind], ModelConfig, DatasetMixtureConfig):
        own = {f.name for f in fields(annotation) if f.init}
        assert not own & seen
        seen |= own
    assert "env" not in seen
    assert "config" not in seen


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(RECIPES[0].parent)))
def test_our_recipes_parse(path: Path):
    """Every key of the file is known, every value of its type, and every field of the result too."""
    recipe = build(read_recipe(str(path), ["--use_cpu"]))
    for key, value in yaml.safe_load(path.read_text()).items():
        if isinstance(value, bool | int) and key != "env":
            assert setting(recipe, key) == value or 0 < value < 1
    for part in (recipe.run, recipe.trainer, recipe.model, recipe.mixture):
        hints = typing.get_type_hints(type(part))
        for f in fields(part):
            value = getattr(part, f.name)
            assert has_type(hints[f.name], value) or f.name in CONVERTED, (f.name, value, hints[f.name])


# Turned into something else by transformers, TRL or PEFT, or left None where "not set" is a value.
CONVERTED = {
    "accelerator_config",
    "fsdp",
    "fsdp_config",
    "lora_target_modules",
    "loss_type",
    "importance_sampling_level",
    "scale_rewards",
    "multi_objective_aggregation",
}


def has_type(annotation: Any, value: Any) -> bool:
    """Whether a value is of an annotated type, item by item; an int counts as a float, a bool as a bool alone."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(has_type(member, value) for member in arguments)
    if annotation is type(None):
        return value is None
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(has_type(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if annotation in (int, float):
        return isinstance(value, (int, annotation)) and not isinstance(value, bool)
    return isinstance(value, annotation)


def test_the_type_check_sees_text_in_numbers():
    assert not has_type(float, "1e-6")
    assert not has_type(list[float] | None, ["1e-1", 1])
    assert not has_type(int, 8.0)
    assert not has_type(int, True)
    assert not has_type(bool, "false")
    assert has_type(list[float] | None, [0.1, 1])


@pytest.mark.parametrize("key", ALGORITHMS)
def test_the_algorithm_of_a_recipe_alone(read: typing.Callable[..., Arguments], key: str):
    recipe = read(f"algorithm: {key}")
    assert isinstance(recipe.trainer, PolicyConfig)
    assert isinstance(recipe.run, PolicyRunArguments)
    assert recipe.trainer.algorithm == key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("datasets: abc", "block"),
        ("datasets: [1]", "block"),
        ("datasets:\n- pth: x", "there is no 'pth' in it"),
        ("datasets:\n- split: train", "path"),
        ("parallelism_config: abc", "block"),
        ("optim: sdg", "sgd"),
        ("save_strategy: stps", "steps"),
        ("lr_scheduler_type: linaer", "linear"),
    ],
)
def test_blocks_and_names_are_checked_by_field(problems: typing.Callable[..., list[str]], text: str, says: str):
    (message,) = problems(f"algorithm: grpo\n{text}")
    assert f"`{text.partition(':')[0]}`" in message
    assert says in message


# Words and environment as they were meant


@pytest.mark.parametrize("text", ["# Rules", "#1", "# a: b"])
def test_text_that_yaml_takes_for_a_comment(read: typing.Callable[..., Arguments], text: str):
    assert read("algorithm: dapo", "--system_prompt", text).run.system_prompt == text


def test_options_without_a_value(problems: typing.Callable[..., list[str]], read: typing.Callable[..., Arguments]):
    (message,) = problems("algorithm: dapo", "--run_name")
    assert message == "`run_name`: is an option that needs a value."
    assert read("algorithm: dapo", "--resume_from_checkpoint").trainer.resume_from_checkpoint == "true"
    assert read("algorithm: dapo\nresume_from_checkpoint: yes").trainer.resume_from_checkpoint == "true"


def test_variables_are_texts_as_they_stand(tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: dapo\nenv: {A: off, B: 010, C: 1.10, D: 1e3, E: '', F: yes}\n")
    assert read_recipe(str(path)).environment == {"A": "off", "B": "010", "C": "1.10", "D": "1e3", "E": "", "F": "yes"}


@pytest.mark.parametrize("block", ["{A: }", "{A: [1]}", "{A: {b: c}}", "{'': x}", "{'A=B': x}"])
def test_variables_that_cannot_be(problems: typing.Callable[..., list[str]], block: str):
    (message,) = problems(f"env: {block}")
    assert message.startswith("FILE:1: `env`: ")


@pytest.mark.parametrize(
    ("text", "value"), [("010", 10), ("0x10", 16), ("0o10", 8), ("1:30", None), ("-5", None), ("+7", 7)]
)
def test_numbers_are_those_of_yaml_1_2(
    read: typing.Callable[..., Arguments], problems: typing.Callable[..., list[str]], text: str, value: int | None
):
    """YAML 1.1 reads 010 as 8 and 1:30 as 90."""
    if value is None:
        assert problems(f"max_steps: {text}")
    else:
        assert read(f"max_steps: {text}").trainer.max_steps == value


@pytest.mark.parametrize(
    "text", ["model_init_kwargs: &a {x: *a}", "model_init_kwargs: " + "[" * 100 + "]" * 100, "[" * 3000]
)
def test_values_without_end(problems: typing.Callable[..., list[str]], text: str):
    (message,) = problems(text)
    assert "nested too deeply" in message


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("num_processes", "accelerate launch"),
        ("torch_dtype", "is called `dtype`"),
        ("kl_coef", "is called `beta`."),
        ("num-ppo-epochs", "is called `num_iterations`."),
        ("whiten_rewards", "advantages are whitened, rewards are not"),
        ("warmup_ratio", "`warmup_steps`"),
        ("max_prompt_length", "not part of TRL 1.16"),
    ],
)
def test_keys_that_users_of_trl_look_for(problems: typing.Callable[..., list[str]], key: str, says: str):
    (message,) = problems(f"{key}: 1")
    assert message.startswith(f"FILE:1: `{key}`: ")
    assert says in message


def test_secrets_are_not_echoed(problems: typing.Callable[..., list[str]]):
    for text in ("hub_token: [hf_abc]", "env: hf_abc"):
        assert "hf_abc" not in " ".join(problems(text))


def test_a_misspelt_file_has_a_near_one(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError, match=r"Did you mean .*recipe\.yaml"):
        read_recipe(f"{tmp_path}/recpe.yaml")


def test_yaml_that_is_none_names_its_line(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text("a: 1\nb: [1\nc: 2\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml:3: is not valid YAML: "):
        read_recipe(f"{tmp_path}/recipe.yaml")


def test_a_message_gets_the_key_that_it_speaks_of_in_front_once() -> None:
    assert named("bad max_grad_norm", "policy") == "`max_grad_norm`: bad max_grad_norm"
    assert named("`critic_max_grad_norm`: differs", "policy") == "`critic_max_grad_norm`: differs"
