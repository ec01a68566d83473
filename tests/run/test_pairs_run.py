"""The main job on preference pairs: what a run leaves, judged by hand, resumed, and on two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stub import HubStub
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl_algos import load_critic
from trl_algos.data import arithmetic_preferences, bundled_model_path
from trl_algos.errors import ConfigError
from trl_algos.recipe.reading import read_recipe
from trl_algos.run.folder import read_metrics
from trl_algos.run.training import train

ROOT = Path(__file__).parents[2]
PATH = ROOT / "recipes" / "rlhf_arithmetic"
PAIRS = 60


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "training_summary.json").read_text())


def pair_file(path: Path) -> Path:
    """100 pairs of sums, and two that teach nothing."""
    rows = [dict(row) for row in arithmetic_preferences("train", 100)]
    rows[3]["rejected"] = rows[3]["chosen"]
    rows[50]["chosen"] = rows[50]["rejected"]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def short_words(folder: Path, data: Path, **more: Any) -> list[str]:
    """Small batches of the pairs in a file, so that an epoch ends inside the run."""
    words = {
        "output_dir": folder,
        "dataset_name": data,
        "dataset_test_name": "arithmetic_preferences",
        "dataset_parameters": "null",
        "held_out_pairs": PAIRS,
        "per_device_train_batch_size": 16,
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 5,
        "logging_steps": 1,
    }
    return [f"--{key}={value}" for key, value in (words | more).items()]


UNJUDGED = {"held_out_pairs": 0, "dataset_test_name": "null"}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a reward model that has learnt for some steps."""
    folder = tmp_path_factory.mktemp("reward_model")
    words = [f"--output_dir={folder}", "--max_steps=40", "--warmup_steps=0", "--logging_steps=10"]
    words += ['--dataset_parameters={"size": 1500}', f"--held_out_pairs={PAIRS}"]
    train(read_recipe(str(PATH / "1_reward_model.yaml"), words))
    return folder


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of DPO, whose data lie beside it."""
    folder = tmp_path_factory.mktemp("dpo")
    train(read_recipe(str(PATH / "dpo.yaml"), short_words(folder / "run", pair_file(folder / "pairs.jsonl"))))
    return folder / "run"


# A reward model


def scores_of(folder: Path, side: str) -> Tensor:
    """(PAIRS,) scores of the saved model at the last token of each text, one text at a time."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    scores = []
    for row in arithmetic_preferences("test").select(range(PAIRS)):
        ids = tokenizer(row["prompt"] + row[side], add_special_tokens=False)["input_ids"]
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        scores.append(model.score(hidden)[0, -1, 0].detach())
    return torch.stack(scores)


def test_figures_of_a_reward_model(reward_model: Path) -> None:
    chosen, rejected = scores_of(reward_model, "chosen"), scores_of(reward_model, "rejected")
    told, both = summary(reward_model)["held_out"], torch.cat([chosen, rejected])
    sure = torch.sigmoid(chosen - rejected)
    assert told["pairs"] == PAIRS
    by_hand = {
        "loss": -sure.log().mean() + 0.01 * (chosen + rejected).square().mean(),
        "accuracy": (chosen > rejected).float().mean(),
        "brier": (1 - sure).square().mean(),
        "margin": (chosen - rejected).mean(),
        "reward_mean": both.mean(),
        "reward_std": both.std(),
    }
    for name, value in by_hand.items():
        assert told["after"][name] == pytest.approx(float(value), abs=1e-4), name
    assert told["after"]["accuracy"] > told["before"]["accuracy"]
    assert told["after"]["loss"] < told["before"]["loss"]
    curve = told["after"]["reliability"]
    assert sum(curve["pairs"]) == PAIRS
    right = sum(share * count for share, count in zip(curve["right"], curve["pairs"], strict=True)) / PAIRS
    assert right == pytest.approx(told["after"]["accuracy"])
    config = json.loads((reward_model / "config.json").read_text())
    assert (config["reward_mean"], config["reward_std"]) == (
        told["after"]["reward_mean"],
        told["after"]["reward_std"],
    )


def test_nothing_of_the_held_out_pairs_is_logged(reward_model: Path) -> None:
    entries = read_metrics(reward_model / "metrics.jsonl")
    assert [entry["step"] for entry in entries if "loss" in entry] == [10, 20, 30, 40]
    assert entries[0]["step"] == 10
    assert not [key for entry in entries for key in entry if key.startswith("eval_")]
    assert (reward_model / "preference.png").stat().st_size > 20_000


def test_ppo_against_the_reward_model(reward_model: Path, tmp_path: Path) -> None:
    """What the recipe of the second stage says, with the first stage's folder as reward and as the critic's start."""
    words = [f"--output_dir={tmp_path}", "--max_steps=2", "--held_out_prompts=20", "--warmup_steps=0"]
    words += [f"--{key}_model_name_or_path={reward_model}" for key in ("reward", "critic")]
    trainer = train(read_recipe(str(PATH / "2_ppo.yaml"), words))
    assert trainer.args.reward_weights == [1.0, 0.0]
    tokenizer, scorer = trainer.reward_processing_classes[0], trainer.reward_funcs[0]
    texts = [row["prompt"] + row["chosen"] for row in arithmetic_preferences("test").select(range(PAIRS))]
    read = tokenizer(texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
    assert torch.allclose(scorer(**read).logits[:, 0], scores_of(reward_model, "chosen"), atol=1e-5)
    saved = load_critic(tmp_path / "critic")  # two small steps away from the reward model
    assert torch.allclose(saved.head.weight, scorer.score.weight, atol=0.01)
    assert float(scorer.score.weight.abs().max()) > 0.03
    told = summary(tmp_path)["held_out"]["after"]["sampled"]
    assert 0 < told["exact_match"] < 1


# A policy


def log_probs(model: Any, side: str) -> Tensor:
    """(PAIRS,) log-probability of each completion with its end, given its prompt, in nats."""
    tokenizer, found = AutoTokenizer.from_pretrained(bundled_model_path()), []
    for row in arithmetic_preferences("test").select(range(PAIRS)):
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = tokenizer(row["prompt"] + row[side] + tokenizer.eos_token)["input_ids"]
        logps = model(torch.tensor([ids])).logits.log_softmax(-1)[0]
        found.append(sum(logps[place - 1, ids[place]] for place in range(len(prompt), len(ids))).detach())
    return torch.stack(found)


def test_figures_of_a_policy(dpo: Path) -> None:
    told = summary(dpo)["held_out"]
    before, after = (AutoModelForCausalLM.from_pretrained(name) for name in (bundled_model_path(), dpo))
    chosen, rejected = log_probs(after, "chosen"), log_probs(after, "rejected")
    of_chosen = 0.5 * (chosen - log_probs(before, "chosen"))
    of_rejected = 0.5 * (rejected - log_probs(before, "rejected"))
    by_hand = {
        "loss": -torch.nn.functional.logsigmoid(of_chosen - of_rejected).mean(),
        "rewards/accuracies": (of_chosen > of_rejected).float().mean(),
        "rewards/margins": (of_chosen - of_rejected).mean(),
        "rewards/chosen": of_chosen.mean(),
        "rewards/rejected": of_rejected.mean(),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
    }
    assert told["after"].keys() == by_hand.keys()
    for name, value in by_hand.items():
        assert told["after"][name] == pytest.approx(float(value), abs=1e-4), name
    assert told["before"]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert told["before"]["rewards/margins"] == 0
    assert told["after"]["rewards/margins"] > 0.01
    assert told["before"]["logps/chosen"] == pytest.approx(float(log_probs(before, "chosen").mean()), abs=1e-4)


def test_pairs_that_teach_nothing_are_counted(dpo: Path) -> None:
    assert summary(dpo)["pairs"] == {
        "train": {"used": 98, "dropped": 2},
        "held_out": {"used": PAIRS, "dropped": 0},
    }


@pytest.mark.parametrize("kind", ["dpo", "1_reward_model"])
def test_a_resumed_run_ends_as_if_it_had_not_stopped(kind: str, dpo: Path, tmp_path: Path) -> None:
    """Bit for bit, from a checkpoint within an epoch, and with or without pairs that are judged before."""
    data = dpo.parent / "pairs.jsonl"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recipe = str(PATH / f"{kind}.yaml")
    if kind == "dpo":
        whole = dpo
    else:
        train(read_recipe(recipe, short_words(whole, data)))
    train(read_recipe(recipe, short_words(parts, data, **UNJUDGED)))
    assert_equal_weights(whole, parts)
    for path in (parts / "model.safetensors", *parts.glob("checkpoint-8/*")):
        path.unlink()
    train(read_recipe(recipe, short_words(parts, data, resume_from_checkpoint="true")))
    assert_equal_weights(whole, parts)
    first, second = (read_metrics(folder / "metrics.jsonl") for folder in (whole, parts))
    assert [(entry["step"], entry.get("loss")) for entry in first] == [
        (entry["step"], entry.get("loss")) for entry in second
    ]


def assert_equal_weights(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    assert [name for name, weight in first.items() if not weight.equal(second[name])] == []


def test_a_finished_run_is_kept_when_another_one_starts_in_its_folder(dpo: Path, tmp_path: Path) -> None:
    data = dpo.parent / "pairs.jsonl"
    words = short_words(tmp_path / "run", data, max_steps=1, save_strategy="no", **UNJUDGED)
    for _ in range(2):
        train(read_recipe(str(PATH / "dpo.yaml"), words))
    previous = {path.name for path in (tmp_path / "run" / "previous" / "1").iterdir()}
    assert previous == {"recipe.yaml", "metrics.jsonl", "training_summary.json", "preference.png"}


def test_token_ids_are_for_reward_models(tmp_path: Path) -> None:
    rows = [{"chosen_ids": [5, 6, 7], "rejected_ids": [5, 6, 8]}] * 16
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = short_words(tmp_path / "run", tmp_path / "ids.jsonl", **UNJUDGED)
    with pytest.raises(ConfigError, match=r"holds pairs of token ids .* for bradley_terry alone"):
        train(read_recipe(str(PATH / "dpo.yaml"), words))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_train_as_one_and_neither_hangs_on_a_hub_that_fails(
    dpo: Path, tmp_path: Path, hub: HubStub
) -> None:
    """Half the batch on each: the same steps, held-out figures and records as one process has."""
    data = dpo.parent / "pairs.jsonl"
    words = short_words(tmp_path / "run", data, per_device_train_batch_size=8, push_to_hub=True)
    hub.failing = {"/commit/": 500}
    for_client = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    launch = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, "-m", "trl_algos", "train", str(PATH / "dpo.yaml"), *words],
        env=os.environ | for_client | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1, done.stderr[-4000:]
    assert done.stderr.count("the run is trained and saved, but not pushed: ") == 1, done.stderr[-4000:]
    assert "The push of step 5 did not work, and training goes on: " in done.stderr
    posted = [request for request in hub.requests if request.startswith("POST /api/repos/create")]
    assert len(posted) == 2  # by one process, at the start and the end
    one, two = summary(dpo), summary(tmp_path / "run")
    assert one["pairs"] == two["pairs"]
    # The first of the eight steps in which a batch is not full is filled up on several processes, as accelerate does.
    for when, tolerance in (("before", 1e-5), ("after", 0.05)):
        assert one["held_out"][when].keys() == two["held_out"][when].keys()
        for name, value in one["held_out"][when].items():
            assert two["held_out"][when][name] == pytest.approx(value, abs=tolerance), name
    assert [e["step"] for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in e] == [*range(1, 9)]
