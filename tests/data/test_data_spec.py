import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from trl_algos.data.files import first_rows
from trl_algos.data.prompts import PromptForm, made_prompt, template_fields
from trl_algos.data.sources import kind_of
from trl_algos.data.spec import DataSpec, data_problems, local_columns
from trl_algos.data.tasks import reasoning_tasks, task_parameters

GSM = [
    {"question": "What is 2 + 3?", "answer": "Add them.\n#### 5"},
    {"question": "What is 4 + 4?", "answer": "Twice 4.\n#### 8"},
]
PROMPTS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def jsonl(name: str, rows: list[Any]) -> str:
    Path(name).write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return name


def problems(needs_test: bool = False, **keys: Any) -> list[str]:
    return data_problems(DataSpec(**keys), needs_test)


def problem(needs_test: bool = False, **keys: Any) -> str:
    """The only problem."""
    found = problems(needs_test, **keys)
    assert len(found) == 1, found
    return found[0]


# Names


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("arithmetic", "task"),
        ("reasoning_gym/chain_sum", "task"),
        ("data.jsonl", "file"),
        ("dir/data.PARQUET", "file"),
        ("./data", "file"),
        ("/data/train", "file"),
        ("a/b/c", "file"),
        ("notes.txt", "file"),
        ("json", "builder"),
        ("gsm8k", "hub"),
        ("openai/gsm8k", "hub"),
        ("org/data-v1.5", "hub"),
    ],
)
def test_what_a_name_stands_for(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_name_too_long_for_a_path_is_no_folder() -> None:
    assert kind_of("1" * 400) == "hub"
    assert kind_of("1" * 400 + ".csv") == "file"


def test_folders_are_told_apart_by_what_is_in_them() -> None:
    Dataset.from_list(PROMPTS).save_to_disk("saved")
    DatasetDict({"train": Dataset.from_list(PROMPTS)}).save_to_disk("splits")
    Path("files").mkdir()
    jsonl("files/train.jsonl", PROMPTS)
    assert [kind_of(name) for name in ("saved", "splits", "files")] == ["saved", "saved", "folder"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "`dataset_name`: not set"),
        ({"dataset_name": "arithmetic", "datasets": [{"path": "x/y"}]}, "`dataset_name`: set besides `datasets`"),
        (
            {"dataset_name": "arithmetc"},
            "`dataset_name`: there is no data set 'arithmetc'. Did you mean 'arithmetic'?",
        ),
        ({"dataset_name": "chain_sum"}, "Did you mean 'reasoning_gym/chain_sum'?"),
        ({"dataset_name": "reasoning-gym/chain_sum"}, "Did you mean 'reasoning_gym/chain_sum'?"),
        ({"dataset_name": "reasoning_gym/chain_sun"}, "'chain_sun' is not one of the 105 tasks of reasoning_gym."),
        ({"dataset_name": "reasoning_gym/composite"}, "'composite' is not one of"),
        ({"dataset_name": "trian.jsonl"}, "there is no file or folder 'trian.jsonl'. Did you mean 'train.jsonl'?"),
        ({"dataset_name": "no/such/train.jsonl"}, "since there is no folder 'no/such'"),
        ({"dataset_name": "https://a.org/train.jsonl"}, "is an address"),
        ({"dataset_name": "notes.txt"}, "'notes.txt' ends in '.txt'; a data file ends in one of .json, .jsonl, .csv"),
        ({"dataset_name": "bare"}, "ends in 'nothing'"),
        ({"dataset_name": "empty"}, "the folder 'empty' is empty"),
    ],
)
def test_names_that_lead_nowhere(keys: dict[str, Any], message: str) -> None:
    jsonl("train.jsonl", PROMPTS)
    Path("notes.txt").write_text("x")
    Path("bare").write_text("x")
    Path("empty").mkdir()
    assert message in problem(**keys)


def test_names_that_may_be_on_the_hub_are_left_alone() -> None:
    assert problems(dataset_name="openai/gsm8k", dataset_config="main", prompt_template="{question}") == []
    assert problems(dataset_name="gsm8k") == []
    assert problems(True, dataset_name="owner/arithmetic") == []


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_algos.data.tasks.find_spec", lambda name: None)
    message = problem(dataset_name="reasoning_gym/chain_sum")
    assert message == (
        "`dataset_name`: 'reasoning_gym/chain_sum' needs the package reasoning_gym: pip install \"trl-algos[tasks]\"."
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dataset_name", 3),
        ("datasets", "arithmetic"),
        ("dataset_streaming", "yes"),
        ("dataset_parameters", ["size"]),
        ("column_mapping", "prompt"),
        ("test_split_size", "0.1"),
        ("conversational", "no"),
    ],
)
def test_values_of_a_wrong_type(key: str, value: Any) -> None:
    assert problem(**{key: value}).startswith(f"`{key}`: {value!r} is a {type(value).__name__}; it must be ")


# Generated tasks


def test_fields_read_from_the_sources_are_those_of_reasoning_gym() -> None:
    import dataclasses

    from reasoning_gym.factory import DATASETS

    assert {*reasoning_tasks()} == {*DATASETS} - {"composite"}
    for task in reasoning_tasks():
        names = {field.name for field in dataclasses.fields(DATASETS[task][1])}
        assert {*task_parameters(f"reasoning_gym/{task}")} == names | {"test_size", "seed", "size"}, task


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("arithmetic", {"sise": 3}, "arithmetic has no parameter 'sise'; it has max_operand, seed, size, test_size."),
        ("arithmetic", {"size": "many"}, "size: 'many' is a str; it must be a whole number."),
        ("arithmetic", {"size": True}, "size: True is a bool; it must be a whole number."),
        ("arithmetic", {"size": None}, "size: None is a NoneType"),
        ("arithmetic", {"size": 0}, "size: 0 is out of range"),
        ("arithmetic", {"seed": -1}, "seed: -1 is out of range"),
        ("reasoning_gym/chain_sum", {"seed": 2**63}, f"seed: {2**63} is out of range"),
        ("reasoning_gym/chain_sum", {"size": 1_000_001}, "out of range; it must be between 1 and 1000000."),
        ("reasoning_gym/chain_sum", {"test_size": 1_000_001}, "out of range; it must be between 1 and 1000000."),
        ("arithmetic", {"max_operand": 0}, "max_operand: 0 is out of range; it must be between 1 and 999."),
        ("arithmetic", {"size": 8032}, "size: 8032 is too many; there are 8031 train prompts with operands up to 99."),
        ("arithmetic", {"test_size": 1970}, "test_size: 1970 is too many; there are 1969 test prompts"),
        ("reasoning_gym/chain_sum", {"max_term": 3}, "Did you mean 'max_terms'?"),
        ("reasoning_gym/chain_sum", {"max_terms": 3.5}, "max_terms: 3.5 is a float; it must be a whole number."),
        ("reasoning_gym/chain_sum", {"allow_negation": 1}, "allow_negation: 1 is a int; it must be true or false."),
        ("reasoning_gym/basic_arithmetic", {"operators": "+"}, "operators: '+' is a str; it must be a list."),
        (
            "reasoning_gym/basic_arithmetic",
            {"whitespace": "none"},
            "whitespace: 'none' is a str; it must be one of no_space, single, random.",
        ),
        ("reasoning_gym/figlet_font", {"static_word": 5}, "static_word: 5 is a int; it must be text."),
    ],
)
def test_parameters_that_a_task_does_not_take(name: str, parameters: dict[str, Any], message: str) -> None:
    found = problem(dataset_name=name, dataset_parameters=parameters)
    assert found.startswith("`dataset_parameters`: ")
    assert message in found


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("arithmetic", {"size": 8031, "test_size": 1969, "seed": 7}),
        ("arithmetic", {"max_operand": 999, "size": 100_000}),
        ("reasoning_gym/chain_sum", {"size": 10, "test_size": 5, "seed": 0, "max_terms": 3, "allow_negation": True}),
        ("reasoning_gym/chain_sum", {"size": 1_000_000, "test_size": 1_000_000, "seed": 2**63 - 1}),
        ("reasoning_gym/basic_arithmetic", {"operators": ["+"], "whitespace": "single"}),
        ("reasoning_gym/figlet_font", {"static_word": None}),
        ("reasoning_gym/simple_equations", {"operators_weights": [1, 0.5, 0.5]}),
    ],
)
def test_parameters_that_a_task_takes(name: str, parameters: dict[str, Any]) -> None:
    assert problems(True, dataset_name=name, dataset_parameters=parameters) == []


# Files


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "holds no rows"),
        ("a.json", "[]", "holds no rows"),
        ("a.csv", "prompt,answer\n", "holds no rows"),
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt": "y"\n', "line 3 is not one JSON object"),
        ("a.jsonl", '{"prompt": "x"}\n["y"]\n', "line 2 is not an object"),
        ("a.json", '[{"prompt": "x"}, 5]', "row 2 is not an object"),
        ("a.json", '[{"prompt": "x"},\n {"prompt": }]', "is not valid JSON: Expecting value: line 2"),
        ("a.json", '[{"prompt": "x"} {"prompt": "y"}]', "no comma after row 1"),
        ("a.json", '[{"prompt": "x"}', "no comma after row 1"),
        ("a.json", '[{"prompt": "x"},', "is not valid JSON"),
        ("a.csv", "prompt,answer\na,1\nb,2,3\n", "line 3 has more values than the 2 columns"),
        ("a.csv", "prompt,prompt\na,1\n", "names the column 'prompt' twice"),
        ("a.jsonl", b'{"prompt": "\xff"}', "is not UTF-8 text"),
        ("a.parquet", "prompt", "is not a Parquet file, or damaged"),
        ("a.arrow", "prompt", "is not an Arrow file, or damaged"),
    ],
)
def test_files_that_cannot_be_read(name: str, text: str | bytes, message: str) -> None:
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    found = problem(dataset_name=name)
    assert found.startswith(f"`dataset_name`: {name!r} ")
    assert message in found


def write_arrow_file(name: str, rows: list[dict[str, Any]], new: Callable[..., Any]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(name, "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "list.json", "a.csv", "a.parquet", "stream.arrow", "file.arrow"]
)
def test_first_rows_of_every_kind_of_file(name: str) -> None:
    writers: dict[str, Callable[[], Any]] = {
        "list.json": lambda: Path(name).write_text(json.dumps(GSM, indent=2)),
        "a.csv": lambda: Dataset.from_list(GSM).to_csv(name),
        "a.parquet": lambda: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GSM), name),
        "stream.arrow": lambda: write_arrow_file(name, GSM, pyarrow.ipc.new_stream),
        "file.arrow": lambda: write_arrow_file(name, GSM, pyarrow.ipc.new_file),
    }
    writers.get(name, lambda: jsonl(name, GSM))()
    found = first_rows(Path(name))
    assert found.columns == ["question", "answer"]
    assert [row for _, row in found.rows] == GSM
    assert len(first_rows(Path(name), limit=1).rows) == 1
    assert problems(dataset_name=name, prompt_template="{question}") == []


def test_long_files_are_read_at_the_beginning_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_algos.data.files._PREFIX", 100)
    Path("a.json").write_text(json.dumps(PROMPTS * 50))
    Path("b.jsonl").write_text('{"prompt": "x"}\n' * 50 + "no json\n")
    Path("c.jsonl").write_text(json.dumps({"prompt": "x" * 300}) + "\n")
    assert 1 <= len(first_rows(Path("a.json")).rows) <= 4
    assert len(first_rows(Path("b.jsonl")).rows) == 100 // 16
    assert len(first_rows(Path("c.jsonl")).rows) == 1


def test_rows_are_named_by_their_line() -> None:
    Path("a.jsonl").write_text('\n{"prompt": "x"}\n\n{"prompt": ""}\n')
    assert problem(dataset_name="a.jsonl") == "`dataset_name`: 'a.jsonl': line 4: the prompt is empty."
    Path("a.csv").write_text('prompt\n"x\ny"\n" "\n')
    assert problem(dataset_name="a.csv") == "`dataset_name`: 'a.csv': line 4: the prompt is empty."


def test_saved_folders_are_looked_into() -> None:
    DatasetDict({"train": Dataset.from_list(GSM), "val": Dataset.from_list(PROMPTS)}).save_to_disk("saved")
    assert "has no column 'prompt', but question, answer" in problem(dataset_name="saved")
    assert problems(dataset_name="saved", dataset_train_split="val") == []
    assert problems(True, dataset_name="saved", dataset_train_split="val", test_split_size=1) == []
    assert problem(dataset_name="saved", dataset_train_split="vall") == (
        "`dataset_train_split`: 'vall' is not a split of 'saved', which has train, val."
    )
    Path("saved/val/state.json").write_text("{}")
    assert problem(dataset_name="saved", dataset_train_split="val") == "`dataset_name`: 'saved' holds no rows."
    Path("saved/dataset_dict.json").write_text("[")
    assert problem(dataset_name="saved") == "`dataset_name`: 'saved' has a dataset_dict.json that cannot be read."


# Prompts


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"prompt": None}], "line 2: the prompt is null."),
        ([{"prompt": "a"}, {"answer": "b"}, {"prompt": ""}], "line 2: the prompt is null; 2 rows cannot be used."),
        ([{"prompt": " \n"}], "line 1: the prompt is empty."),
        ([{"prompt": 12}], "line 1: the prompt is a int, not text nor a list of messages."),
        ([{"prompt": []}], "line 1: the prompt is an empty list."),
        ([{"prompt": ["a"]}], "holds 'a', which is not a message"),
        ([{"prompt": [{"content": "a"}]}], "which is not a message"),
        ([{"prompt": [{"role": "user"}]}], "which is not a message"),
        ([{"prompt": [{"role": "user", "content": ""}]}], "messages are all empty"),
        (
            [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}],
            "line 2: the prompt is text in some rows and a list of messages in others.",
        ),
    ],
)
def test_prompts_that_trl_could_not_use(rows: list[Any], message: str) -> None:
    assert message in problem(dataset_name=jsonl("a.jsonl", rows))


def test_text_and_messages_can_be_mixed_where_all_become_messages() -> None:
    name = jsonl("a.jsonl", [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}])
    assert problems(dataset_name=name, conversational=True) == []
    assert "line 2: the prompt is a list of messages, but `conversational` is false" in problem(
        dataset_name=name, conversational=False
    )


def test_a_prompt_that_has_a_system_message_takes_no_other() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    name = jsonl("a.jsonl", [{"prompt": messages}])
    assert problems(dataset_name=name) == []
    assert "starts with a system message already" in problem(dataset_name=name, system_prompt="Be short.")


@pytest.mark.parametrize(
    ("row", "form", "prompt"),
    [
        ({"prompt": "a"}, PromptForm({}), "a"),
        ({"q": "a", "n": 2}, PromptForm({}, "{{{q}}} {n}!"), "{a} 2!"),
        ({"prompt": "a"}, PromptForm({}, "Q: {prompt}"), "Q: a"),
        ({"x": 0.5}, PromptForm({}, "{x:.2f}"), "0.50"),
        ({"prompt": "a"}, PromptForm({}, conversational=True), [{"role": "user", "content": "a"}]),
        (
            {"prompt": "a"},
            PromptForm({}, system="s"),
            [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            PromptForm({}, system="s"),
            [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
            ],
        ),
    ],
)
def test_prompts_made_of_rows(row: dict[str, Any], form: PromptForm, prompt: Any) -> None:
    assert made_prompt(row, form) == prompt


def test_values_that_a_template_cannot_lay_out() -> None:
    rows = [{"question": "a", "choices": ["b"]}, {"question": None, "choices": ["c"]}]
    name = jsonl("a.jsonl", rows)
    assert "line 2: question is null" in problem(dataset_name=name, prompt_template="{question}")
    assert "line 1: choices is a list" in problem(dataset_name=name, prompt_template="{choices}")
    assert "line 1: `prompt_template` does not fit: Unknown format code 'd'" in problem(
        dataset_name=jsonl("b.jsonl", GSM), prompt_template="{question:d}"
    )


def test_columns_of_a_template() -> None:
    assert template_fields("{a} {{b}} {c!r:>5}") == ["a", "c"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{question", "is not a template"),
        ("question}", "is not a template"),
        ("{}", "{} names no column"),
        ("{0}", "{0} names no column"),
        ("{question.__class__}", "{question.__class__} is not the plain name"),
        ("{question[0]}", "is not the plain name"),
        ("{question:{answer}}", "is not the plain name"),
        ("{question!x}", "is not the plain name"),
        ("Answer:", "names no column"),
        ("", "names no column"),
        ("{qestion}", "{qestion} is not a column of 'a.jsonl', which has question, answer. Did you mean 'question'?"),
        ("{prompt}", "{prompt} is not a column"),
    ],
)
def test_templates_that_do_not_fit(template: str, message: str) -> None:
    found = problem(dataset_name=jsonl("a.jsonl", GSM), prompt_template=template)
    assert found.startswith("`prompt_template`: ")
    assert message in found


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"prompt": "qestion"}, "'qestion' is not a column of 'a.jsonl', which has question, answer. Did you mean"),
        ({"answer": "question"}, "'a.jsonl' has a column 'answer' already"),
        ({"prompt": "question", "text": "question"}, "'question' gets two new names"),
        ({"prompt": 3}, "'prompt': 3 must be the new name and the old name"),
    ],
)
def test_mappings_that_do_not_fit(mapping: dict[str, Any], message: str) -> None:
    found = problem(dataset_name=jsonl("a.jsonl", GSM), column_mapping=mapping)
    assert found.startswith("`column_mapping`: ")
    assert message in found


def test_columns_can_change_places() -> None:
    name = jsonl("a.jsonl", GSM)
    assert problems(dataset_name=name, column_mapping={"prompt": "question", "question": "answer"}) == []
    assert problems(dataset_name=name, column_mapping={"answer": "question", "prompt": "answer"}) == []


def test_a_missing_prompt_says_how_to_make_one() -> None:
    assert problem(dataset_name=jsonl("a.jsonl", GSM)) == (
        "`dataset_name`: 'a.jsonl' has no column 'prompt', but question, answer; say what the prompt is, such as "
        '`prompt_template: "{question}"` or `column_mapping: {prompt: question}`.'
    )


def test_columns_that_trl_passes_to_rewards_itself() -> None:
    name = jsonl("a.jsonl", [{"prompt": "a", "completions": "b"}])
    assert "has a column 'completions'" in problem(dataset_name=name)
    assert problems(dataset_name=name, column_mapping={"old_completions": "completions"}) == []


def test_system_prompts() -> None:
    assert problem(dataset_name="arithmetic", system_prompt=" ") == "`system_prompt`: is empty; leave it out for none."
    assert problem(dataset_name="arithmetic", system_prompt="x", conversational=False).startswith(
        "`conversational`: false"
    )
    assert problems(dataset_name="arithmetic", system_prompt="x", conversational=True) == []


def test_columns_that_can_be_told_without_loading() -> None:
    name = jsonl("a.jsonl", GSM)
    mapping = {"prompt": "question"}
    assert local_columns(DataSpec(dataset_name=name, column_mapping=mapping)) == ["prompt", "answer"]
    assert local_columns(DataSpec(dataset_name=name, prompt_template="{question}")) == ["question", "answer", "prompt"]
    assert local_columns(DataSpec(dataset_name="arithmetic")) == ["prompt", "answer"]
    assert local_columns(DataSpec(dataset_name="reasoning_gym/gcd")) == ["prompt", "answer", "entry", "task"]
    assert local_columns(DataSpec(dataset_name="openai/gsm8k")) is None
    entries = [{"path": "a/b"}, {"path": name, "columns": ["question"]}]
    assert local_columns(DataSpec(datasets=entries, column_mapping=mapping)) == ["prompt"]


# Splits


def test_a_test_split_that_is_not_there() -> None:
    name = jsonl("a.jsonl", PROMPTS)
    assert problem(True, dataset_name=name).startswith(
        "`test_split_size`: not set, but the test split is measured and 'a.jsonl' has none"
    )
    assert problem(True, datasets=[{"path": name}]).startswith(
        "`test_split_size`: not set, but the test split is measured and `datasets` has none"
    )
    assert problems(True, dataset_name=name, test_split_size=0.5) == []
    assert problems(True, dataset_name=name, dataset_test_name=jsonl("b.jsonl", PROMPTS)) == []
    assert problems(True, dataset_name=name, dataset_test_name="arithmetic") == []
    assert problems(False, dataset_name=name) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset_train_split": "trian"}, "`dataset_train_split`: 'trian' is not a split of 'arithmetic', which has"),
        (
            {"dataset_test_split": "val"},
            "`dataset_test_split`: 'val' is not a split of 'arithmetic', which has train, test",
        ),
    ],
)
def test_unknown_splits_of_a_task(keys: dict[str, Any], message: str) -> None:
    assert message in problem(True, dataset_name="arithmetic", **keys)


def test_a_file_is_one_split() -> None:
    name = jsonl("a.jsonl", PROMPTS)
    assert problem(dataset_name=name, dataset_train_split="test") == (
        "`dataset_train_split`: 'test' is not a split of 'a.jsonl', which has only train."
    )
    assert problems(dataset_name=name, dataset_train_split="train[:50%]") == []


def test_the_test_data_are_checked_as_well() -> None:
    train, test = jsonl("a.jsonl", PROMPTS), jsonl("b.jsonl", [{"prompt": None}])
    assert problem(True, dataset_name=train, dataset_test_name=test) == (
        "`dataset_test_name`: 'b.jsonl': line 1: the prompt is null."
    )
    assert "there is no file or folder 'c.jsonl'" in problem(True, dataset_name=train, dataset_test_name="c.jsonl")


@pytest.mark.parametrize("size", [0, -0.1, 1.5, float("nan"), float("inf")])
def test_sizes_of_a_test_split(size: float) -> None:
    found = problem(dataset_name=jsonl("a.jsonl", PROMPTS), test_split_size=size)
    assert found.startswith(f"`test_split_size`: {size!r} is out of range")


@pytest.mark.parametrize("size", [0.01, 0.99, 1, 5.0])
def test_sizes_that_a_test_split_can_have(size: float) -> None:
    assert problems(dataset_name=jsonl("a.jsonl", PROMPTS), test_split_size=size) == []


# Settings without effect


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"dataset_name": "a.jsonl", "dataset_config": "main"}, "dataset_config"),
        ({"dataset_name": "arithmetic", "dataset_config": "main"}, "dataset_config"),
        ({"dataset_name": "openai/gsm8k", "dataset_parameters": {"size": 3}}, "dataset_parameters"),
        ({"dataset_name": "a.jsonl", "dataset_parameters": {"size": 3}}, "dataset_parameters"),
        ({"dataset_name": "arithmetic", "dataset_streaming": True}, "dataset_streaming"),
        ({"dataset_name": "a.jsonl", "streaming": True}, "streaming"),
        ({"dataset_name": "arithmetic", "test_split_size": 0.1}, "test_split_size"),
        ({"dataset_name": "a.jsonl", "dataset_test_name": "a.jsonl"}, "dataset_test_name"),
        ({"dataset_name": "a.jsonl", "dataset_test_split": "val"}, "dataset_test_split"),
        ({"datasets": [{"path": "a.jsonl"}], "dataset_train_split": "val"}, "dataset_train_split"),
        ({"datasets": [{"path": "a.jsonl"}], "dataset_streaming": True}, "dataset_streaming"),
        ({"datasets": [{"path": "a.jsonl"}], "dataset_config": "main"}, "dataset_config"),
        ({"datasets": [{"path": "arithmetic"}], "dataset_parameters": {"size": 3}}, "dataset_parameters"),
    ],
)
def test_settings_that_would_not_be_used(keys: dict[str, Any], named: str) -> None:
    jsonl("a.jsonl", PROMPTS)
    found = problem(**keys)
    assert found.startswith(f"`{named}`: ")
    assert "is not used: " in found


def test_settings_that_exclude_each_other() -> None:
    name = jsonl("a.jsonl", PROMPTS)
    assert problem(
        True, dataset_name="arithmetic", dataset_parameters={"test_size": 3, "size": 3}, dataset_test_name=name
    ) == ("`dataset_parameters`: test_size is not used: the test split is `dataset_test_name`.")
    assert "besides `dataset_test_name`" in problem(
        True, dataset_name=name, dataset_test_name=name, test_split_size=0.5
    )
    assert "cannot be used with a stream" in problem(dataset_name=name, test_split_size=0.5, dataset_streaming=True)
    assert "`dataset_test_split`: 'val' is not used" in problem(
        True, dataset_name="x/y", test_split_size=0.5, dataset_test_split="val"
    )


# Mixtures


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["a.jsonl"], "entry 1: is 'a.jsonl'; it must be a block with a `path`."),
        ([{}], "entry 1: `path` is missing."),
        ([{"path": "a.jsonl"}, {"path": "a.jsonl", "colums": []}], "entry 2: there is no `colums` in it"),
        (
            [{"path": "a.jsonl", "columns": "prompt"}],
            "entry 1: `columns`: 'prompt' is a str; it must be a list of names.",
        ),
        ([{"path": "a.jsonl", "fraction": True}], "`fraction`: True is a bool"),
        ([{"path": "a.jsonl", "fraction": -0.5}], "`fraction`: -0.5 is out of range"),
        ([{"path": "a.jsonl", "fraction": 0}], "every `fraction` is 0"),
        ([{"path": "a.jsonl", "fraction": 1}, {"path": "x/y"}], "`fraction` is set for some entries only"),
        ([{"path": "a.jsnl"}, {"path": "b.jsonl"}], "entry 2: `path`: there is no file or folder 'b.jsonl'."),
        ([{"path": "a.jsonl", "data_dir": "x"}], "entry 1: `data_dir`: 'x' is not used"),
        ([{"path": "arithmetic", "name": "x"}], "entry 1: `name`: 'x' is not used"),
        ([{"path": "json"}], "entry 1: `data_files`: not set, but 'json' is a kind of file"),
        (
            [{"path": "a.jsonl", "split": "val"}],
            "`datasets`: 'val' is not a split of 'a.jsonl', which has only train.",
        ),
        ([{"path": "arithmetic", "split": "val"}], "'val' is not a split of 'arithmetic', which has train, test."),
        ([{"path": "a.jsonl", "columns": ["prompt", "anser"]}], "`columns`: 'anser' is not a column of 'a.jsonl'"),
        ([{"path": "a.jsonl", "columns": ["answer"]}], "'a.jsonl' has no column 'prompt', but answer"),
        (
            [{"path": "a.jsonl"}, {"path": "a.jsonl", "columns": ["prompt"]}],
            "has the columns prompt, but 'a.jsonl' has",
        ),
    ],
)
def test_entries_that_make_no_mixture(entries: list[Any], message: str) -> None:
    jsonl("a.jsonl", PROMPTS)
    found = problem(datasets=entries)
    assert found.startswith("`datasets`: ")
    assert message in found


def test_entries_that_make_a_mixture() -> None:
    name = jsonl("a.jsonl", PROMPTS)
    entries = [
        {"path": "arithmetic", "split": "test", "fraction": 0.0},
        {"path": name, "split": "train[:1]", "fraction": 3},
        {"path": "json", "data_files": name, "fraction": 1},
        {"path": "trl-lib/DeepMath-103K", "name": "default", "fraction": 1, "columns": ["prompt", "answer"]},
    ]
    assert problems(datasets=entries, test_split_size=0.1) == []
    test_name = jsonl("b.jsonl", [{**PROMPTS[0], "more": 1}])
    assert problems(True, datasets=entries, dataset_test_name=test_name) == []
    assert "`streaming`: true, but `fraction`" in problem(datasets=entries, streaming=True)


def test_many_problems_come_together() -> None:
    name = jsonl("a.jsonl", PROMPTS)
    found = problems(
        True, dataset_name=name, dataset_config="x", dataset_parameters={"size": 1}, prompt_template="{q}"
    )
    assert len(found) == 4
    assert len({message.split(":")[0] for message in found}) == 4


def test_checking_imports_nothing_heavy() -> None:
    jsonl("a.jsonl", PROMPTS)
    code = (
        "import sys; from trl_algos.data.spec import *\n"
        "for name in ('a.jsonl', 'arithmetic', 'reasoning_gym/chain_sum'):\n"
        "    spec = DataSpec(dataset_name=name, dataset_parameters=None if name == 'a.jsonl' else {'size': 3})\n"
        "    assert data_problems(spec, False) == [] and local_columns(spec)\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "torch",
        "transformers",
        "trl",
        "datasets",
        "peft",
        "accelerate",
        "reasoning_gym",
        "math_verify",
        "pandas",
    }
    assert "trl_algos" in loaded
    assert not heavy & {*loaded}
