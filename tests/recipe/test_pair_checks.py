"""What `check` finds in recipes on preference pairs, and what it says of those without problems."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from preference_pairs import classifier
from transformers import LlamaForSequenceClassification

from trl_algos import PolicyConfig, PreferenceConfig
from trl_algos.errors import ConfigError
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS
from trl_algos.recipe import checks
from trl_algos.recipe.checks import checked_recipe, data_spec
from trl_algos.recipe.measured import needs_test_split
from trl_algos.recipe.reading import read_recipe
from trl_algos.recipe.summary import summary

SETTINGS: dict[str, Any] = {
    "algorithm": "dpo",
    "model_name_or_path": "arithmetic-lm",
    "dataset_name": "arithmetic_preferences",
    "use_cpu": True,
    "bf16": False,
    "held_out_pairs": 8,
}


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Problems of a good recipe with changes; None takes a key out."""
    monkeypatch.chdir(tmp_path)
    # What is installed here is another matter.
    monkeypatch.setattr(checks, "_PACKAGES", {"use_vllm": checks._PACKAGES["use_vllm"]})

    def found(**changes: Any) -> list[str]:
        settings = {key: value for key, value in {**SETTINGS, **changes}.items() if value is not None}
        Path("recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        try:
            checked_recipe("recipe.yaml", [])
        except ConfigError as error:
            return error.problems
        return []

    return found


@pytest.mark.parametrize("key", PREFERENCE_ALGORITHMS)
def test_a_good_recipe_has_no_problem(found: Callable[..., list[str]], key: str) -> None:
    """No rewards, no groups, no critic are asked for."""
    assert found(algorithm=key) == []


REWARD = {"algorithm": "bradley_terry"}
STREAM = {"dataset_name": "trl-lib/x", "dataset_streaming": True, "max_steps": 5}


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"model_name_or_path": None}, "model_name_or_path", "not set"),
        ({"model_name_or_path": "./nowhere"}, "model_name_or_path", "'./nowhere'"),
        ({"dataset_name": None}, "dataset_name", "not set"),
        ({"dataset_name": "nowhere.jsonl"}, "dataset_name", "there is no file or folder"),
        ({"dataset_name": "arithmetic"}, "dataset_name", "chosen"),
        ({"output_dir": " "}, "output_dir", "is empty"),
        ({"resume_from_checkpoint": "nowhere"}, "resume_from_checkpoint", "is not a folder"),
        ({"report_to": "trakio"}, "report_to", "trackio"),
        ({"deepspeed": "nowhere.json"}, "deepspeed", "cannot be read"),
        ({"load_in_4bit": True}, "load_in_4bit", "set `use_peft`"),
        ({**REWARD, "load_in_8bit": True}, "load_in_8bit", "set `use_peft`"),
        ({"use_peft": True, "lora_target_modules": ["q_porj"]}, "lora_target_modules", "Did you mean 'q_proj'?"),
        ({**REWARD, "use_peft": True, "lora_target_modules": ["lm_head"]}, "lora_target_modules", "is no module"),
        ({"use_peft": True, "lora_target_modules": ["lm_head"]}, "lora_target_modules", "would never be trained"),
        ({"use_peft": True, "lora_task_type": "SEQ_CLS"}, "lora_task_type", "it is CAUSAL_LM"),
        ({**REWARD, "use_peft": True, "lora_task_type": "CAUSAL_LM"}, "lora_task_type", "it is SEQ_CLS"),
        ({"use_peft": True, "sync_ref_model": True}, "sync_ref_model", "adapter off"),
        ({"system_prompt": "Add."}, "system_prompt", "chat template"),
        ({"held_out_pairs": 9, "dataset_parameters": {"test_size": 8}}, "held_out_pairs", "make 8 test pairs"),
        ({**STREAM, "max_steps": None}, "max_steps", "leaves the number of pairs open"),
        ({**STREAM, "precompute_ref_log_probs": True}, "precompute_ref_log_probs", "not read twice"),
        ({**REWARD, "chat_template_path": "x.jinja"}, "chat_template_path", "no file 'x.jinja'"),
    ],
)
def test_one_problem(found: Callable[..., list[str]], changes: dict[str, Any], key: str, says: str) -> None:
    (message,) = found(**changes)
    assert f"`{key}`" in message
    assert says in message
    if changes.get(key) is not None:
        assert message.startswith("recipe.yaml:")


def test_a_chat_template_of_its_own_writes_messages(found: Callable[..., list[str]]) -> None:
    Path("chat.jinja").write_text("{{ messages }}")
    assert found(**REWARD, system_prompt="Add.", chat_template_path="chat.jinja") == []


def test_the_score_can_be_named_among_what_is_saved(found: Callable[..., list[str]]) -> None:
    assert found(**REWARD, use_peft=True, lora_modules_to_save=["score"]) == []
    assert "`lora_modules_to_save`: 'score' is no module" in found(use_peft=True, lora_modules_to_save=["score"])[0]


@pytest.mark.parametrize(("labels", "count"), [(1, 0), (3, 1)])
def test_a_classifier_goes_on_as_a_reward_model_if_it_gives_one_score(
    labels: int, count: int, found: Callable[..., list[str]]
) -> None:
    config = tiny.llama().config
    config.num_labels = labels
    LlamaForSequenceClassification(config).save_pretrained("start")
    tiny.tokenizer().save_pretrained("start")
    messages = found(**REWARD, model_name_or_path="start")
    assert len(messages) == count
    assert all("a classifier (`num_labels`: 3), but a reward model has 1" in message for message in messages)


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_a_classifier_is_no_policy(algorithm: str, found: Callable[..., list[str]]) -> None:
    classifier().save_pretrained("reward")
    tiny.tokenizer().save_pretrained("reward")
    changes = {"dataset_name": "arithmetic", "reward_funcs": ["exact_answer"], "held_out_pairs": None}
    messages = found(**({} if algorithm == "dpo" else changes), algorithm=algorithm, model_name_or_path="reward")
    assert [message for message in messages if "model_name_or_path" in message] == [
        "recipe.yaml:2: `model_name_or_path`: 'reward' is a sequence classifier (LlamaForSequenceClassification), not "
        "a causal language model."
    ]


@pytest.mark.parametrize("algorithm", ["", ["dpo"], {"a": 1}, "xyzzyq"])
def test_of_an_unknown_algorithm_nothing_more_is_said(algorithm: object, found: Callable[..., list[str]]) -> None:
    (message,) = found(algorithm=algorithm)
    assert "`algorithm`" in message
    messages = found(algorithm=algorithm, model_name_or_path="./nowhere")
    assert [("`algorithm`" in m, "./nowhere" in m) for m in messages] == [(True, False), (False, True)]


@pytest.mark.parametrize("value", [0, 1])
def test_a_number_is_no_truth_value(value: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"`padding_free`: {value} must be true, false"):
        PreferenceConfig(output_dir=str(tmp_path), padding_free=value, use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match=f"`padding_free`: {value} must be true, false"):
        PolicyConfig(output_dir=str(tmp_path), padding_free=value, use_cpu=True, bf16=False)


MESSAGES = {"prompt": [{"role": "user", "content": "1+1="}]} | {
    side: [{"role": "assistant", "content": text}] for side, text in (("chosen", "2"), ("rejected", "3"))
}


@pytest.mark.parametrize("algorithm", ["dpo", "bradley_terry", "grpo"])
def test_messages_need_a_chat_template(algorithm: str, found: Callable[..., list[str]]) -> None:
    Path("chat.jsonl").write_text(json.dumps(MESSAGES) + "\n")
    tiny.llama().save_pretrained("model")
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained("model")
    own = {"reward_funcs": ["exact_answer"]} if algorithm == "grpo" else {}
    settings = {"algorithm": algorithm, "dataset_name": "chat.jsonl", "held_out_pairs": None, **own}

    def of_templates() -> list[str]:
        return [m for m in found(**settings, model_name_or_path="model") if "chat template" in m]

    (message,) = of_templates()
    assert message.startswith("recipe.yaml:3: `dataset_name`: 'chat.jsonl' holds messages, but the tokenizer of")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained("model")
    assert of_templates() == []


def test_columns_that_dpo_does_not_read_are_doubted(found: Callable[..., list[str]]) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1.0, "preference": 1.0}
    Path("pairs.jsonl").write_text(json.dumps(row) + "\n")
    settings = {"dataset_name": "pairs.jsonl", "held_out_pairs": None}
    doubt = "Not used by dpo: the data's `margin` and `preference`, which bradley_terry alone reads."
    assert doubt in said_of(found, **settings)
    assert "Not used" not in said_of(found, **settings, **REWARD)
    assert "Not used" not in said_of(found)


def test_data_are_pairs() -> None:
    assert data_spec(read_recipe(None, ["--algorithm=dpo"])).rows == "pairs"
    assert data_spec(read_recipe(None, ["--algorithm=bradley_terry"])).rows == "pairs"
    assert data_spec(read_recipe(None, ["--algorithm=dapo"])).rows == "prompts"
    assert [data_spec(read_recipe(None, [f"--algorithm={key}"])).token_ids for key in ("dpo", "bradley_terry")] == [
        *(False, True)
    ]


@pytest.mark.parametrize(
    ("words", "needed"), [([], False), (["--held_out_pairs=3"], True), (["--eval_strategy=epoch"], True)]
)
def test_when_a_test_split_is_needed(words: list[str], needed: bool) -> None:
    assert needs_test_split(read_recipe(None, ["--algorithm=bradley_terry", *words]).values) is needed


def said_of(found: Callable[..., list[str]], processes: int = 1, **changes: Any) -> str:
    assert found(**changes) == []
    return "\n".join(summary(read_recipe("recipe.yaml", [], processes)))


def test_a_summary_counts_pairs(found: Callable[..., list[str]]) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_length": 16, "output_dir": "out"}
    said = said_of(found, 2, **sizes)
    assert said.startswith("recipe.yaml: no problem found. DPO: direct preference optimisation.\n")
    assert "\n  2 processes, 24 pairs per optimizer step, cut to 16 tokens; output in out.\n" in said
    said = said_of(found, **REWARD, **sizes)
    assert "1 process, 12 pairs per optimizer step, left out where a side is longer than 16 tokens" in said
    unlimited = read_recipe("recipe.yaml", ["--max_length=null"])
    assert "12 pairs per optimizer step, of any length; output in out." in "\n".join(summary(unlimited))


def test_memory_has_a_reference_where_one_is_loaded(found: Callable[..., list[str]]) -> None:
    whole = said_of(found)
    assert "reference    325.5 KiB  the model once more for beta = 0.1" in whole
    assert "KV cache" not in whole
    assert "reference      0 B" not in whole
    assert "the model with its adapter off: nothing more" in said_of(found, use_peft=True)
    assert "taken before training: nothing more" in said_of(found, precompute_ref_log_probs=True)
    reward = said_of(found, **REWARD)
    assert "reference" not in reward
    assert "83,392 numbers" in reward  # the language model's 83,328, its output layer being the embedding, and 64


def test_what_is_doubted_is_said(found: Callable[..., list[str]]) -> None:
    assert "Doubt: Nothing is held out" in said_of(found, **REWARD, held_out_pairs=0)
    assert "Doubt" not in said_of(found, **REWARD)


def test_a_file_of_prompts_is_no_data_for_it(found: Callable[..., list[str]]) -> None:
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (message,) = found(dataset_name="prompts.jsonl", held_out_pairs=None)
    assert "`dataset_name`" in message
    assert "chosen" in message
