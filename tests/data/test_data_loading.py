import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from trl_algos.data import arithmetic, reasoning_draw
from trl_algos.data.files import first_rows
from trl_algos.data.generated import generated
from trl_algos.data.loading import column_names, load_data, mixture_sizes
from trl_algos.data.spec import DataSpec, local_columns
from trl_algos.errors import ConfigError

GSM = [
    {"question": "What is 2 + 3?", "answer": "Add them.\n#### 5"},
    {"question": "What is 4 + 4?", "answer": "Twice 4.\n#### 8"},
    {"question": "Half of 6?", "answer": "Halve.\n#### 3"},
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(name: str, rows: list[Any]) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return name


def numbered(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(first, first + count)]


def loaded(needs_test: bool = False, **keys: Any) -> tuple[Any, Any]:
    return load_data(DataSpec(**keys), needs_test)


def refused(needs_test: bool = False, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(needs_test, **keys)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Files and folders


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_every_kind_of_file_gives_the_same_rows(kind: str) -> None:
    name, rows = f"a.{kind}", Dataset.from_list(GSM)
    if kind == "arrow":
        rows.save_to_disk("saved")
        shutil.copy("saved/data-00000-of-00001.arrow", name)
    elif kind == "json":
        Path(name).write_text(json.dumps(GSM, indent=1))
    else:
        getattr(rows, f"to_{'json' if kind == 'jsonl' else kind}")(name)
    train, test = loaded(dataset_name=name, column_mapping={"prompt": "question"})
    assert test is None
    assert train.column_names == ["prompt", "answer"]
    assert train.to_list() == [{"prompt": row["question"], "answer": row["answer"]} for row in GSM]


def test_gsm8k_as_it_is_on_the_hub() -> None:
    """A folder with the Hub's layout stands for it; the template keeps the answer for the reward."""
    for split, rows in (("train", GSM), ("test", GSM[:1])):
        Path("openai/gsm8k/main").mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows).to_parquet(f"openai/gsm8k/main/{split}-00000-of-00001.parquet")
    configs = "\n".join(
        ["---", "configs:", "- config_name: main", "  data_files:"]
        + [line for s in ("train", "test") for line in (f"  - split: {s}", f"    path: main/{s}-*")]
        + ["---", ""]
    )
    Path("openai/gsm8k/README.md").write_text(configs)
    keys = {"dataset_name": "openai/gsm8k", "dataset_config": "main"}
    train, test = loaded(True, **keys, prompt_template="{question}\nThink, then write #### and the number.")
    assert len(train) == 3
    assert train[1]["prompt"] == "What is 4 + 4?\nThink, then write #### and the number."
    assert train[1]["answer"] == "Twice 4.\n#### 8"
    assert [row["prompt"].splitlines()[0] for row in test] == ["What is 2 + 3?"]
    assert "has no column 'prompt', but question, answer" in refused(**keys)
    wrong = refused(dataset_name="openai/gsm8k", dataset_config="man", prompt_template="{question}")
    assert wrong.startswith(
        "`dataset_config`: 'openai/gsm8k' cannot be loaded: BuilderConfig 'man' not found. Available:"
    )
    assert refused(datasets=[{"path": "openai/gsm8k", "name": "man"}]).startswith("`datasets`: 'openai/gsm8k' cannot")
    assert refused(**keys, prompt_template="{question}", dataset_train_split="trian").startswith(
        "`dataset_train_split`: 'trian' of 'openai/gsm8k' cannot be loaded: Unknown split \"trian\"."
    )


def test_values_of_a_csv_stay_the_text_that_they_are() -> None:
    Path("a.csv").write_text('prompt,answer\n12,007\n"a, ""b""\nc",NA\nd,\n')
    train, _ = loaded(dataset_name="a.csv")
    assert train["prompt"][:] == ["12", 'a, "b"\nc', "d"]
    assert train["answer"][:] == ["007", "NA", ""]
    assert next(iter(loaded(dataset_name="a.csv", dataset_streaming=True)[0])) == {"prompt": "12", "answer": "007"}


def test_a_csv_as_pandas_writes_it() -> None:
    """Its index is a column without a name."""
    Dataset.from_list(numbered(3)).to_pandas().to_csv("a.csv")
    spec = DataSpec(dataset_name="a.csv")
    train, _ = load_data(spec, False)
    assert train.column_names == local_columns(spec) == ["Unnamed: 0", "prompt", "answer"]
    assert train.remove_columns("Unnamed: 0").to_list() == numbered(3)


def test_short_lines_of_a_csv_end_in_empty_values() -> None:
    Path("a.csv").write_text("prompt,answer\na\n\nb,2\n")
    rows = [{"prompt": "a", "answer": ""}, {"prompt": "b", "answer": "2"}]
    assert first_rows(Path("a.csv")).rows == [("line 2", rows[0]), ("line 4", rows[1])]
    assert loaded(dataset_name="a.csv")[0].to_list() == rows


def test_a_folder_without_a_test_split() -> None:
    jsonl("data/train.jsonl", numbered(3))
    message = refused(True, dataset_name="data")
    assert message.startswith("`dataset_test_split`: 'test' of 'data' cannot be loaded: Unknown split \"test\".")
    assert message.endswith("; `test_split_size` takes rows of the training split instead.")
    assert len(loaded(True, dataset_name="data", test_split_size=1)[1]) == 1


def test_a_changed_file_is_read_again_though_its_time_stays() -> None:
    jsonl("a.jsonl", numbered(2))
    times = os.stat("a.jsonl")
    assert loaded(dataset_name="a.jsonl")[0]["answer"][:] == ["1", "2"]
    jsonl("a.jsonl", numbered(2, first=2))
    os.utime("a.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert loaded(dataset_name="a.jsonl")[0]["answer"][:] == ["3", "4"]


def test_a_changed_folder_is_read_again() -> None:
    jsonl("data/train.jsonl", numbered(2))
    assert len(loaded(dataset_name="data")[0]) == 2
    jsonl("data/train.jsonl", numbered(3))
    assert len(loaded(dataset_name="data")[0]) == 3


def test_files_that_change_places_are_read_again() -> None:
    jsonl("data/train/a.jsonl", numbered(2))
    jsonl("data/test/b.jsonl", numbered(1))
    assert [len(part) for part in loaded(True, dataset_name="data")] == [2, 1]
    shutil.move("data/train/a.jsonl", "data/test/a.jsonl")
    shutil.move("data/test/b.jsonl", "data/train/b.jsonl")
    assert [len(part) for part in loaded(True, dataset_name="data")] == [1, 2]


def test_a_changed_template_makes_other_prompts() -> None:
    jsonl("a.jsonl", GSM)
    assert loaded(dataset_name="a.jsonl", prompt_template="A {question}")[0][0]["prompt"] == "A What is 2 + 3?"
    assert loaded(dataset_name="a.jsonl", prompt_template="B {question}")[0][0]["prompt"] == "B What is 2 + 3?"


def test_saved_folders_are_left_as_they_were() -> None:
    DatasetDict({"train": Dataset.from_list(numbered(4)), "val": Dataset.from_list(GSM)}).save_to_disk("saved")
    before = {path: path.read_bytes() for path in Path("saved").rglob("*") if path.is_file()}
    train, test = loaded(dataset_name="saved", test_split_size=1, prompt_template="{prompt}?", system_prompt="s")
    assert (len(train), len(test)) == (3, 1)
    assert loaded(dataset_name="saved", dataset_train_split="val", prompt_template="{answer}")[0].num_rows == 3
    assert {path: path.read_bytes() for path in Path("saved").rglob("*") if path.is_file()} == before


def test_another_file_is_the_test_split() -> None:
    train, test = loaded(
        True,
        dataset_name=jsonl("a.jsonl", GSM),
        dataset_test_name=jsonl("b.jsonl", GSM[2:]),
        prompt_template="{question}",
        system_prompt="s",
    )
    assert (len(train), len(test)) == (3, 1)
    assert test[0]["prompt"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "Half of 6?"}]


@pytest.mark.parametrize(("size", "count"), [(0.2, 2), (0.25, 3), (3, 3), (9.0, 9)])
def test_a_test_split_taken_out_of_the_rows(size: float, count: int) -> None:
    name = jsonl("a.jsonl", numbered(10))
    train, test = loaded(True, dataset_name=name, test_split_size=size)
    assert len(test) == count
    assert sorted([*train["prompt"], *test["prompt"]]) == sorted(row["prompt"] for row in numbered(10))
    again = loaded(True, dataset_name=name, test_split_size=size)
    assert again[0].to_list() == train.to_list()
    assert again[1].to_list() == test.to_list()


def test_a_test_split_that_leaves_nothing() -> None:
    name = jsonl("a.jsonl", numbered(10))
    assert refused(dataset_name=name, test_split_size=10) == (
        "`test_split_size`: 10 leaves no rows to train on; there are 10."
    )


# Prompts


def test_what_the_check_says_of_the_columns_comes_true() -> None:
    name = jsonl("a.jsonl", GSM)
    for keys in (
        {"prompt_template": "{question}"},
        {"column_mapping": {"prompt": "question", "solution": "answer"}},
        {"column_mapping": {"q": "question"}, "prompt_template": "{q}", "system_prompt": "s"},
    ):
        spec = DataSpec(dataset_name=name, **keys)
        assert {*load_data(spec, False)[0].column_names} == {*local_columns(spec)}


def test_prompts_become_messages() -> None:
    name = jsonl("a.jsonl", numbered(2))
    user = {"role": "user", "content": "1+1="}
    assert loaded(dataset_name=name)[0][1]["prompt"] == "1+1="
    assert loaded(dataset_name=name, conversational=True)[0][1]["prompt"] == [user]
    system = {"role": "system", "content": "s"}
    assert loaded(dataset_name=name, system_prompt="s")[0][1] == {"prompt": [system, user], "answer": "2"}
    name = jsonl("b.jsonl", [{"prompt": [user], "answer": "2"}])
    assert loaded(dataset_name=name, conversational=True)[0][0]["prompt"] == [user]
    assert loaded(dataset_name=name, system_prompt="s")[0][0]["prompt"] == [system, user]


def test_text_and_messages_in_one_file_become_messages() -> None:
    name = jsonl("a.jsonl", [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}])
    prompts = loaded(dataset_name=name, conversational=True)[0]["prompt"][:]
    assert prompts == [[{"role": "user", "content": text}] for text in "ab"]


@pytest.mark.parametrize("bad", [None, "", "  "])
def test_all_rows_are_looked_at(bad: str | None) -> None:
    rows = numbered(2_500)
    rows[1_799]["prompt"] = rows[2_400]["prompt"] = bad
    word = "null" if bad is None else "empty"
    name = jsonl("a.jsonl", rows)
    assert refused(dataset_name=name) == (
        f"`dataset_name`: 'a.jsonl': row 1800: the prompt is {word}; 2 rows cannot be used."
    )


def test_all_rows_need_the_columns_of_the_template() -> None:
    rows = [*GSM * 50, {"question": None, "answer": "x"}]
    message = refused(dataset_name=jsonl("a.jsonl", rows), prompt_template="{answer} {question}")
    assert message == "`dataset_name`: 'a.jsonl': row 151: question is null."


# Streams


def test_streams_stay_streams() -> None:
    name = jsonl("a.jsonl", GSM)
    train, test = loaded(
        True,
        dataset_name=name,
        dataset_test_name=name,
        dataset_streaming=True,
        column_mapping={"prompt": "question"},
        system_prompt="s",
    )
    assert isinstance(train, IterableDataset)
    assert isinstance(test, IterableDataset)
    rows = list(train)
    assert [row["prompt"][1]["content"] for row in rows] == [row["question"] for row in GSM]
    assert {*rows[0]} == {"prompt", "answer"}


def test_columns_of_data_that_may_not_know_them() -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield from numbered(2)

    stream = IterableDataset.from_generator(rows)
    assert column_names(Dataset.from_list(GSM)) == ["question", "answer"]
    assert column_names(stream) == ["prompt", "answer"]
    assert column_names(stream.filter(lambda row: False)) == []


def test_the_first_rows_of_a_stream_are_looked_at() -> None:
    jsonl("data/train.jsonl", [*numbered(3), {"prompt": "", "answer": "x"}])
    assert "row 4: the prompt is empty" in refused(dataset_name="data", dataset_streaming=True)


# Mixtures


@pytest.mark.parametrize(
    ("lengths", "fractions", "sizes"),
    [
        ([100, 100], [0.5, 0.5], [100, 100]),
        ([100, 30], [0.5, 0.5], [30, 30]),
        ([100, 30], [3, 1], [90, 30]),
        ([10, 100], [1, 4], [10, 40]),
        ([100, 5, 7], [1, 0, 1], [7, 0, 7]),
    ],
)
def test_sizes_follow_the_rule_of_trl(lengths: list[int], fractions: list[float], sizes: list[int]) -> None:
    assert mixture_sizes([range(length) for length in lengths], fractions) == sizes


def test_a_mixture_agrees_with_trl() -> None:
    from trl import DatasetMixtureConfig, get_dataset

    a, b = jsonl("a.jsonl", numbered(10)), jsonl("b.jsonl", numbered(7, first=50))
    trl_blocks = [{"path": "json", "data_files": name, "fraction": f} for name, f in ((a, 0.7), (b, 0.3))]
    expected = get_dataset(DatasetMixtureConfig(datasets=[dict(block) for block in trl_blocks]))["train"].to_list()
    assert loaded(datasets=trl_blocks)[0].to_list() == expected
    ours = [{"path": a, "fraction": 0.7}, {"path": b, "fraction": 0.3}]
    assert loaded(datasets=ours)[0].to_list() == expected


def test_a_mixture_of_all_kinds() -> None:
    Dataset.from_list(numbered(2)).save_to_disk("saved")
    entries = [
        {"path": jsonl("a.jsonl", [{**row, "more": 1} for row in numbered(4)]), "split": "train[1:3]"},
        {"path": "saved"},
        {"path": "arithmetic", "split": "test"},
        {"path": "json", "data_files": jsonl("b.jsonl", numbered(1, first=70))},
    ]
    entries[0]["columns"] = ["prompt", "answer"]
    train, test = loaded(datasets=entries, test_split_size=2)
    prompts = [*train["prompt"], *test["prompt"]]
    expected = ["1+1=", "2+1=", "0+1=", "1+1=", *arithmetic("test")["prompt"], "70+1="]
    assert sorted(prompts) == sorted(expected)
    assert len(test) == 2


def test_a_share_of_nothing_leaves_its_entry_out() -> None:
    entries = [{"path": jsonl("a.jsonl", numbered(3)), "fraction": 1}, {"path": "arithmetic", "fraction": 0}]
    assert loaded(datasets=entries)[0].to_list() == numbered(3)


def test_streams_follow_each_other() -> None:
    entries = [{"path": jsonl("a.jsonl", numbered(2))}, {"path": jsonl("b.jsonl", numbered(1, first=9))}]
    train, _ = loaded(datasets=entries, streaming=True)
    assert isinstance(train, IterableDataset)
    assert [row["answer"] for row in train] == ["1", "2", "10"]


def test_entries_that_cannot_follow_each_other() -> None:
    jsonl("a/train.jsonl", numbered(2))
    jsonl("b/train.jsonl", [{"prompt": "x", "gold": "y"}])
    assert refused(datasets=[{"path": "a"}, {"path": "b"}]) == (
        "`datasets`: 'b' has the columns prompt, gold, but 'a' has prompt, answer; select equal ones by `columns`."
    )
    jsonl("b/train.jsonl", [{"prompt": "x", "answer": 3}])
    assert refused(datasets=[{"path": "a"}, {"path": "b"}]).startswith(
        "`datasets`: the entries cannot follow each other: "
    )
    assert "'golden'" in refused(datasets=[{"path": "a", "columns": ["prompt", "golden"]}])


# What cannot be loaded


def test_what_is_not_on_the_hub() -> None:
    message = refused(dataset_name="no/such-data")
    assert message.startswith("`dataset_name`: 'no/such-data' cannot be loaded: ")
    assert message.endswith("There is no file or folder of that name here.")
    assert refused(datasets=[{"path": "no/such-data"}]).startswith("`datasets`: 'no/such-data' cannot be loaded: ")


def test_what_the_library_cannot_read() -> None:
    rows = [{"prompt": "x"}] * 200
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n[1, 2\n")
    assert refused(dataset_name="a.jsonl").startswith("`dataset_name`: 'a.jsonl' cannot be loaded: ")


def test_problems_of_the_check_come_first() -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(dataset_name="arithmetic", dataset_config="x", dataset_train_split="y")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "`dataset_config`",
        "`dataset_train_split`",
    ]


# Generated tasks


def test_arithmetic_with_parameters() -> None:
    parameters = {"size": 7, "test_size": 5, "max_operand": 9, "seed": 3}
    train, test = loaded(True, dataset_name="arithmetic", dataset_parameters=parameters)
    assert train.to_list() == arithmetic("train", size=7, max_operand=9, seed=3).to_list()
    assert test.to_list() == arithmetic("test", size=5, max_operand=9, seed=3).to_list()
    train, test = loaded(True, dataset_name="arithmetic")
    assert (len(train), len(test)) == (8031, 1969)
    train, test = loaded(
        True, dataset_name="arithmetic", dataset_parameters={"max_operand": 9}, dataset_test_name="arithmetic"
    )
    assert (len(train), len(test)) == (85, 1969)
    assert "between 1 and" in refused(
        dataset_name="arithmetic", dataset_parameters={"max_operand": 200, "size": 100_000}
    )


@pytest.fixture
def _drawn_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process, which has imported reasoning_gym once."""
    monkeypatch.setattr(
        "trl_algos.data.generated._drawn", lambda request: reasoning_draw.answer(json.loads(json.dumps(request)))
    )


def entries_of(questions: Iterator[str]) -> Iterator[dict[str, Any]]:
    return ({"question": question, "answer": question.upper()} for question in questions)


def test_splits_are_disjoint_and_do_not_depend_on_each_others_size() -> None:
    def draw(split: str, size: int) -> list[str]:
        questions = (f"q{i % 500}" for i in itertools.count())
        return [entry["question"] for entry in reasoning_draw.draw(entries_of(questions), split, size)]

    train, test = draw("train", 500), draw("test", 500)
    assert sorted(train + test) == sorted(f"q{i}" for i in range(500))
    assert 0.1 < len(test) / 500 < 0.3
    assert draw("train", 20) == train[:20] == [q for q in (f"q{i}" for i in range(500)) if q in train][:20]
    assert draw("test", 20) == test[:20]


def test_the_rule_of_the_splits_is_fixed() -> None:
    # A change would put prompts that somebody has trained on into the test split.
    assert [i for i in range(60) if reasoning_draw.is_held_out(f"q{i}")] == [28, 35, 44, 46, 54, 55, 56, 58]


def test_drawing_ends_where_nothing_new_comes() -> None:
    drawn = itertools.count()
    entries = ({"question": f"q{next(drawn) % 30}", "answer": ""} for _ in itertools.repeat(0))
    assert len(reasoning_draw.draw(entries, "train", 1000)) == 29
    assert next(drawn) < 2_100
    drawn = itertools.count()
    entries = ({"question": f"q{int(math.log2(1 + next(drawn)))}", "answer": ""} for _ in itertools.repeat(0))
    assert len(reasoning_draw.draw(entries, "train", 50)) < 15
    assert next(drawn) <= 20 * 50


def test_a_task_of_reasoning_gym() -> None:
    parameters = {"size": 30, "test_size": 8, "max_terms": 2, "max_digits": 1}
    train, test = loaded(True, dataset_name="reasoning_gym/chain_sum", dataset_parameters=parameters)
    assert (len(train), len(test)) == (30, 8)
    assert train.column_names == ["prompt", "answer", "entry", "task"]
    assert len({*train["prompt"], *test["prompt"]}) == 38
    for row in [*train, *test]:
        expression = row["prompt"].removeprefix("State the final answer to the following arithmetic problem: ")
        a, operator, b, _ = expression.split()
        assert row["answer"] == str(int(a) + int(b) if operator == "+" else int(a) - int(b))
        assert row["task"] == "chain_sum"
        assert json.loads(row["entry"])["question"] == row["prompt"]
        assert json.loads(row["entry"])["metadata"]["source_dataset"] == "chain_sum"


@pytest.mark.usefixtures("_drawn_here")
def test_parameters_change_what_they_say() -> None:
    def prompts(split: Any = "train", **parameters: Any) -> list[str]:
        return generated("reasoning_gym/spell_backward", {"size": 6, "test_size": 3} | parameters, split)["prompt"][:]

    everything = prompts()
    assert prompts(test_size=9) == everything
    assert prompts(size=4) == everything[:4]
    assert prompts(seed=0) == everything
    assert not {*prompts(seed=1)} & {*everything}
    assert prompts("test", size=99) == prompts("test")


@pytest.mark.usefixtures("_drawn_here")
def test_too_many_prompts_are_asked_for() -> None:
    parameters = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "size": 190}
    message = refused(dataset_name="reasoning_gym/chain_sum", dataset_parameters=parameters)
    # 10 digits, 2 operators, 10 digits: 200 questions, of which about one in five is held out.
    count = int(message.partition("no more than ")[2].split()[0])
    assert 140 <= count < 190
    assert message.startswith(
        f"`dataset_parameters`: size: reasoning_gym/chain_sum gave no more than {count} different "
    )


@pytest.mark.usefixtures("_drawn_here")
def test_what_a_task_refuses() -> None:
    parameters = {"min_terms": 5, "max_terms": 2}
    assert refused(dataset_name="reasoning_gym/chain_sum", dataset_parameters=parameters) == (
        "`dataset_parameters`: reasoning_gym/chain_sum cannot be generated: max_terms must be >= min_terms"
    )


def test_tasks_that_go_through_sets_give_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        entries.append(generated("reasoning_gym/isomorphic_strings", {"size": 4}, "train")["entry"][:])
    assert entries[0] == entries[1]


def test_values_take_the_types_of_the_config() -> None:
    import datetime
    import enum
    from typing import Optional

    class Colour(enum.StrEnum):
        RED = "red"

    assert reasoning_draw.converted(tuple[str, ...], ["a", "b"]) == ("a", "b")
    assert reasoning_draw.converted(tuple, ["a"]) == ("a",)
    assert reasoning_draw.converted(list[tuple[float, float]], [[0.0, 0.5]]) == [(0.0, 0.5)]
    assert reasoning_draw.converted(list[Colour], ["red"]) == [Colour.RED]
    assert reasoning_draw.converted(datetime.date, "2020-02-03") == datetime.date(2020, 2, 3)
    assert reasoning_draw.converted(datetime.time, "10:30") == datetime.time(10, 30)
    assert reasoning_draw.converted(Optional[int], None) is None  # noqa: UP045
    assert reasoning_draw.converted(int, 3) == 3
    with pytest.raises(ValueError, match="'blue' is not a valid"):
        reasoning_draw.converted(Colour, "blue")


def test_whatever_a_task_raises_is_one_line() -> None:
    def silent(*arguments: Any) -> Iterator[Any]:
        raise AssertionError
        yield

    def loud(*arguments: Any) -> Iterator[Any]:
        raise KeyError("two\nlines")
        yield

    request = {"task": "t", "parameters": {}, "seed": 0, "split": "train", "size": 1}
    assert reasoning_draw.answer(request, silent) == {"error": "AssertionError at `raise AssertionError`"}
    assert "\n" not in reasoning_draw.answer(request, loud)["error"]
