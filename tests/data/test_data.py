import json
import struct
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trl_algos.data.arithmetic_task import (
    SOURCES,
    arithmetic,
    arithmetic_preferences,
    bundled_model_path,
    is_held_out,
    operand_pairs,
)


def operands(prompt: str) -> tuple[int, int]:
    a, b = prompt.removesuffix("=").split("+")
    return int(a), int(b)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(bundled_model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(bundled_model_path(), local_files_only=True, dtype="float32").eval()


def test_splits_share_no_pair_in_either_order() -> None:
    train = {tuple(sorted(operands(prompt))) for prompt in arithmetic("train")["prompt"]}
    held_out = {tuple(sorted(operands(prompt))) for prompt in arithmetic("test")["prompt"]}
    assert not train & held_out
    assert len(train) + len(held_out) == 100 * 101 // 2


def test_splits_cover_every_ordered_pair_once() -> None:
    prompts = [*arithmetic("train")["prompt"], *arithmetic("test")["prompt"]]
    assert sorted(map(operands, prompts)) == [(a, b) for a in range(100) for b in range(100)]


def test_held_out_rule_is_frozen_and_knows_no_order() -> None:
    # A change of the rule would put prompts that the bundled model was trained on into the held-out split.
    assert (len(arithmetic("train")), len(arithmetic("test"))) == (8_031, 1_969)
    assert [b for b in range(30) if is_held_out(47, b)] == [6, 7, 22]
    assert all(is_held_out(a, b) == is_held_out(b, a) for a in range(40) for b in range(a))


def test_operand_pairs_are_those_of_the_prompts() -> None:
    assert operand_pairs("test", 30) == [(a, b) for a in range(31) for b in range(31) if is_held_out(a, b)]
    assert sorted(map(operands, arithmetic("train", max_operand=9)["prompt"])) == operand_pairs("train", 9)


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_the_sums(split: str) -> None:
    rows = arithmetic(split)
    assert rows.column_names == ["prompt", "answer"]
    assert [sum(operands(prompt)) for prompt in rows["prompt"]] == [int(answer) for answer in rows["answer"]]
    assert all(answer == str(int(answer)) for answer in rows["answer"])


def test_pairs_are_right_and_wrong_sums_of_disjoint_splits() -> None:
    train, held_out = arithmetic_preferences("train", repeats=2), arithmetic_preferences("test")
    assert train.column_names == ["prompt", "chosen", "rejected"]
    assert (len(train), len(held_out)) == (2 * 8_031, 1_969)
    sides = [{tuple(sorted(operands(prompt))) for prompt in rows["prompt"]} for rows in (train, held_out)]
    assert not sides[0] & sides[1]
    for rows in (train, held_out):
        assert all(sum(operands(row["prompt"])) == int(row["chosen"]) for row in rows)
        assert all(row["rejected"] not in ("", row["chosen"]) for row in rows)
        assert all(abs(len(row["rejected"]) - len(row["chosen"])) <= 1 for row in rows)
    first, second = list(train["rejected"])[:8_031], list(train["rejected"])[8_031:]
    assert first != second
    assert list(train["prompt"])[:8_031] == list(arithmetic("train")["prompt"])


def test_pairs_are_drawn_by_the_seed() -> None:
    assert arithmetic_preferences("test", 20).to_list() == arithmetic_preferences("test", 20).to_list()
    assert arithmetic_preferences("test", 20, seed=1).to_list() != arithmetic_preferences("test", 20).to_list()
    with pytest.raises(ValueError, match="`repeats` must be 1 or more"):
        arithmetic_preferences("test", repeats=0)


def test_size_and_seed_choose_within_the_split() -> None:
    everything = list(arithmetic("test")["prompt"])
    assert list(arithmetic("test", size=50)["prompt"]) == everything[:50]
    other = list(arithmetic("test", seed=1)["prompt"])
    assert other != everything
    assert sorted(other) == sorted(everything)
    assert max(max(operands(prompt)) for prompt in arithmetic("train", max_operand=9)["prompt"]) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "held-out"}, "`split` must be one of train, test, but is 'held-out'"),
        ({"split": "train", "size": 0}, "`size` must be between 1 and"),
        ({"split": "test", "size": 10_000}, "the prompts in 'test', but is 10000"),
    ],
)
def test_wrong_arguments_name_themselves(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arithmetic(**arguments)


def test_sources_know_arithmetic() -> None:
    assert SOURCES["arithmetic"] is arithmetic


def test_bundled_folder_is_small_and_names_no_machine_path() -> None:
    files = [path for path in Path(bundled_model_path()).rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in files) < 2 * 1024**2
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", content[:8])
            content = json.dumps(json.loads(content[8 : 8 + length]).get("__metadata__", {})).encode()
        assert not any(root in content for root in (b"/home/", b"/tmp/", b"/root/")), path.name


@pytest.mark.parametrize("split", ["train", "test"])
def test_tokenizer_knows_every_character(tokenizer: PreTrainedTokenizerBase, split: str) -> None:
    rows = arithmetic(split)
    texts = [prompt + answer for prompt, answer in zip(rows["prompt"], rows["answer"], strict=True)]
    for text, ids in zip(texts, tokenizer(texts).input_ids, strict=True):
        assert ids[0] == tokenizer.bos_token_id
        assert len(ids) == 1 + len(text)
        assert tokenizer.unk_token_id not in ids
    assert tokenizer.batch_decode(tokenizer(texts[:20]).input_ids, skip_special_tokens=True) == texts[:20]


def test_special_tokens_differ_and_padding_is_on_the_left(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert len(set(special)) == 4
    assert [model.generation_config.pad_token_id, model.generation_config.eos_token_id] == [special[0], special[2]]
    assert tokenizer(["1+2=", "11+22="], padding=True).input_ids[0][:2] == [special[0]] * 2
    assert len(tokenizer) == model.config.vocab_size


def test_bundled_model_answers_held_out_prompts(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    rows = arithmetic("test", size=200)
    inputs = tokenizer(list(rows["prompt"]), padding=True, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    right = sum(text == answer for text, answer in zip(texts, rows["answer"], strict=True))
    assert right > 0.8 * len(rows)
