"""Preference pairs by name: what a recipe's data become, and what is found wrong with them before they load."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import Dataset, DatasetDict, IterableDataset
from preference_pairs import classifier, settings
from transformers import PreTrainedTokenizerFast

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer
from trl_algos.data import arithmetic_preferences
from trl_algos.data.loading import load_data
from trl_algos.data.spec import DataSpec, data_problems, local_columns
from trl_algos.errors import ConfigError
from trl_algos.preference_rows import row_problem

TEXT = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(8)]
USER = {"role": "user", "content": "1+1="}
RIGHT, WRONG = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
SYSTEM = {"role": "system", "content": "Add."}
EXPLICIT = {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}
IMPLICIT = {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
IDS = {"chosen_ids": [5, 6, 7], "rejected_ids": [5, 6, 8]}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(rows: list[Any], name: str = "a.jsonl") -> str:
    Path(name).write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return name


def loaded(needs_test: bool = False, **keys: Any) -> tuple[Any, Any]:
    return load_data(DataSpec(rows="pairs", **keys), needs_test)


def rows_of(rows: list[Any], **keys: Any) -> list[dict[str, Any]]:
    return loaded(dataset_name=jsonl(rows), **keys)[0].to_list()


def problem(data: list[Any] | str, **keys: Any) -> str:
    """The only problem, without anything loaded; loading says the same."""
    name = data if isinstance(data, str) else jsonl(data)
    spec = DataSpec(dataset_name=name, **({"rows": "pairs"} | keys))
    found = data_problems(spec, False)
    assert len(found) == 1, found
    with pytest.raises(ConfigError) as caught:
        load_data(spec, False)
    assert caught.value.problems == found
    return found[0]


# What is loaded


def test_the_bundled_pairs_by_name() -> None:
    parameters = {"size": 6, "test_size": 4, "repeats": 3, "seed": 5, "max_operand": 30}
    train, test = loaded(True, dataset_name="arithmetic_preferences", dataset_parameters=parameters)
    assert train.to_list() == arithmetic_preferences("train", 6, 3, 30, 5).to_list()
    assert test.to_list() == arithmetic_preferences("test", 4, 3, 30, 5).to_list()
    assert (len(train), len(test)) == (18, 12)
    for row in train:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(row["chosen"]) == int(a) + int(b) <= 60
        assert row["rejected"] != row["chosen"]
    assert local_columns(DataSpec(rows="pairs", dataset_name="arithmetic_preferences")) == [
        *("prompt", "chosen", "rejected")
    ]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved", "folder"])
def test_every_kind_of_source_gives_the_same_pairs(kind: str) -> None:
    data = Dataset.from_list([{"better": row["chosen"], **row} for row in TEXT]).remove_columns("chosen")
    name = f"a.{kind}"
    if kind == "saved":
        DatasetDict({"train": data}).save_to_disk(name)
    elif kind == "folder":
        Path(name).mkdir()
        data.to_json(f"{name}/train.jsonl")
    elif kind == "json":
        Path(name).write_text(json.dumps(data.to_list()))
    else:
        getattr(data, f"to_{'json' if kind == 'jsonl' else kind}")(name)
    train, _ = loaded(dataset_name=name, column_mapping={"chosen": "better"})
    assert [{key: row[key] for key in TEXT[0]} for row in train] == TEXT


def test_a_stream_a_mixture_and_a_split_of_pairs() -> None:
    name = jsonl(TEXT)
    stream, _ = loaded(dataset_name=name, dataset_streaming=True, conversational=True)
    assert isinstance(stream, IterableDataset)
    assert next(iter(stream)) == {
        "prompt": [{"role": "user", "content": "0+1="}],
        "chosen": [{"role": "assistant", "content": "1"}],
        "rejected": [{"role": "assistant", "content": "0"}],
    }
    mixed, _ = loaded(datasets=[{"path": name}, {"path": "arithmetic_preferences"}])
    assert mixed[0] == TEXT[0]
    assert len(mixed) == 8 + len(arithmetic_preferences("train"))
    train, test = loaded(True, dataset_name=name, test_split_size=2)
    assert sorted(row["prompt"] for part in (train, test) for row in part) == [row["prompt"] for row in TEXT]
    assert len(test) == 2


def test_a_template_makes_the_prompt_and_leaves_the_sides() -> None:
    rows = [{"question": "1+1", "chosen": "2", "rejected": "3", "source": "s"}]
    assert rows_of(rows, prompt_template="{question}=") == [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "question": "1+1", "source": "s"}
    ]


def test_numbers_of_a_csv_are_numbers() -> None:
    """Values of a CSV file stay text; a margin and a preference are read as what they say."""
    Path("a.csv").write_text("prompt,chosen,rejected,margin,preference,id\n1+1=,2,3,0.5,1,007\n")
    (row,) = loaded(dataset_name="a.csv")[0].to_list()
    assert row == {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5, "preference": 1.0, "id": "007"}
    Path("b.csv").write_text("chosen,rejected,margin\n2,3,much\n")
    assert "line 2: `margin` must be a number, but is 'much'" in problem("b.csv")


@pytest.mark.parametrize(
    ("row", "made"),
    [
        (
            {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
            {"prompt": [SYSTEM, USER], "chosen": [RIGHT], "rejected": [WRONG]},
        ),
        (EXPLICIT, {"prompt": [SYSTEM, USER], "chosen": [RIGHT], "rejected": [WRONG]}),
        (IMPLICIT, {"chosen": [SYSTEM, USER, RIGHT], "rejected": [SYSTEM, USER, WRONG]}),
    ],
)
def test_a_system_prompt_in_front(row: dict[str, Any], made: dict[str, Any]) -> None:
    assert rows_of([row], system_prompt="Add.") == [made]


# What is wrong


def test_columns_that_are_no_sides() -> None:
    named = [{"prompt": "a", "chosen": "b", "rejcted": "c"}]
    assert problem(named) == (
        "`dataset_name`: 'a.jsonl' has no column 'rejected', but prompt, chosen, rejcted; say which it is, such as "
        "`column_mapping: {rejected: rejcted}`."
    )
    assert "{chosen: better, rejected: worse}" in problem([{"better": "b", "worse": "c"}])
    assert problem([{"chosen": "b", "text": "c"}]).endswith(
        "a preference pair needs `chosen` and `rejected`; rename columns by `column_mapping`."
    )


def test_prompts_where_pairs_are_wanted_and_the_other_way_round() -> None:
    for name in ("arithmetic", jsonl([{"prompt": "1+1=", "answer": "2"}])):
        assert problem(name).endswith(
            "has no column 'chosen' and no 'rejected', but prompt, answer; prompts without pairs of answers are for "
            "algorithms that sample, such as grpo."
        )
    assert problem("arithmetic_preferences", rows="prompts") == (
        "`dataset_name`: 'arithmetic_preferences' makes preference pairs, which are for dpo, ipo, cdpo, robust_dpo, "
        "rpo, bradley_terry; an algorithm that samples takes 'arithmetic'."
    )
    assert problem([IMPLICIT], rows="prompts").endswith(
        "Its preference pairs are for dpo, ipo, cdpo, robust_dpo, rpo, bradley_terry."
    )
    # The prompts of pairs are prompts.
    assert data_problems(DataSpec(dataset_name=jsonl(TEXT)), False) == []


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 2: `rejected` is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "line 2: `rejected` is missing"),
        ({"prompt": "a", "chosen": 1, "rejected": "c"}, "line 2: `chosen` must be text or a list of messages"),
        ({"prompt": [USER], "chosen": "a", "rejected": "c"}, "`prompt` is messages; all must be of one kind"),
        (EXPLICIT, "line 2: the pair is of messages, but of text in other rows"),
    ],
)
def test_rows_that_are_no_pairs(row: dict[str, Any], what: str) -> None:
    found = data_problems(DataSpec(rows="pairs", dataset_name=jsonl([TEXT[0], row, TEXT[1]])), False)
    assert len(found) == 1
    assert what in found[0]


def test_token_ids_are_for_reward_models_alone() -> None:
    assert "token ids ('chosen_ids' and 'rejected_ids'), which are for bradley_terry alone" in problem([IDS])
    assert data_problems(DataSpec(rows="pairs", token_ids=True, dataset_name=jsonl([IDS])), False) == []
    assert rows_of([IDS | TEXT[0]]) == [IDS | TEXT[0]]  # of text, with columns that nobody reads
    for wrong in ("12", [1, -2], [True], [1.5]):
        row = {"chosen_ids": wrong, "rejected_ids": [1]}
        assert "`chosen_ids` must be a list of token ids" in problem([row], token_ids=True)
    for key in ("prompt", "chosen", "rejected"):
        for ids in ([5, 6], []):
            assert f"`{key}` must be text or a list of messages" in problem([TEXT[0] | {key: ids}])


@pytest.mark.parametrize("margin", ["1" * 401, "1" * 5000, "1e39", "-1e39"])
def test_a_margin_that_float32_does_not_hold(margin: str) -> None:
    Path("a.jsonl").write_text(f'{{"chosen": "b", "rejected": "c", "margin": {margin}}}\n')
    (message,) = data_problems(DataSpec(rows="pairs", dataset_name="a.jsonl"), False)
    assert message.startswith("`dataset_name`: 'a.jsonl'")
    assert "line 1" in message
    assert row_problem({"chosen": "b", "rejected": "c", "margin": 3e38}) is None


def test_equal_sides_are_refused_where_all_are_equal() -> None:
    equal = {"prompt": "a", "chosen": "b", "rejected": "b"}
    assert problem([equal, equal]) == (
        "`dataset_name`: 'a.jsonl': chosen and rejected are equal in all 2 rows looked at, which teach nothing."
    )
    assert len(rows_of([equal, TEXT[0]])) == 2  # the trainer drops and counts it


def test_what_cannot_become_messages() -> None:
    assert "there is no `prompt`, without which text cannot become messages" in problem(
        [{"chosen": "a", "rejected": "b"}], system_prompt="Add."
    )
    assert "`prompt` begins with a system message, so `system_prompt` cannot" in problem(
        [EXPLICIT | {"prompt": [SYSTEM, USER]}], system_prompt="Add."
    )
    assert "`chosen` begins with an answer, before which there is no prompt" in problem(
        [{"chosen": [RIGHT], "rejected": [WRONG]}], system_prompt="Add."
    )
    assert "the pair is of messages, but `conversational` is false" in problem([EXPLICIT], conversational=False)
    assert "`system_prompt`: 'Add.' is not used: 'a.jsonl' holds token ids" in problem(
        [IDS], system_prompt="Add.", token_ids=True
    )


def test_a_prompt_that_stands_in_the_sides_too() -> None:
    """As in data whose sides are whole conversations: trained on like this, each prompt would be there twice."""
    assert "`chosen` begins with the prompt, which stands in `prompt`, too" in problem([IMPLICIT | {"prompt": [USER]}])
    train = rows_of([IMPLICIT | {"prompt": [USER]}], column_mapping={"aside": "prompt"})
    assert train == [IMPLICIT | {"aside": [USER]}]


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({"repeats": 0}, "repeats: 0 is out of range; it must be between 1 and 1000"),
        ({"repeat": 2}, "has no parameter 'repeat'; it has max_operand, repeats, seed, size, test_size."),
        ({"size": 9000}, "size: 9000 is too many; there are 8031 train prompts"),
    ],
)
def test_parameters_of_the_bundled_pairs(parameters: dict[str, Any], what: str) -> None:
    found = data_problems(
        DataSpec(rows="pairs", dataset_name="arithmetic_preferences", dataset_parameters=parameters), False
    )
    assert len(found) == 1
    assert what in found[0]


# The five shapes of TRL's preference data


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    return tokenizer


SHAPES = {
    "text": TEXT,
    "text without prompt": [{"chosen": f"{i}+1=2", "rejected": f"{i}+1=3"} for i in range(4)],
    "messages": [EXPLICIT] * 4,
    "messages without prompt": [IMPLICIT] * 4,
    "token ids": [IDS] * 4,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("trains", ["policy", "reward_model"])
def test_every_shape_trains_a_step(shape: str, trains: str, tmp_path: Path) -> None:
    train, _ = loaded(dataset_name=jsonl(SHAPES[shape]), token_ids=True)
    of_policy = trains == "policy"
    config, trainer_class = (
        (PreferenceConfig, PreferenceTrainer) if of_policy else (BradleyTerryConfig, BradleyTerryTrainer)
    )

    tiny.llama().save_pretrained(tmp_path / "policy")  # a path, from which TRL loads the reference, too

    def made() -> Any:
        return trainer_class(
            model=str(tmp_path / "policy") if of_policy else classifier(),
            args=config(**settings(tmp_path / "run", max_steps=1)),
            train_dataset=train,
            processing_class=chat_tokenizer(),
        )

    if of_policy and shape == "token ids":
        with pytest.raises(ConfigError, match="no column `chosen`, `rejected`"):
            made()
        return
    trainer = made()
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert any(not value.equal(before[name]) for name, value in trainer.model.named_parameters())
