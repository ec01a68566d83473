"""Pairs from several sources: figures of each; pairs that a stream drops; pairs with images."""

import warnings

import preference_pairs as pairs
import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer
from trl_algos.errors import ConfigError
from trl_algos.trainers.preference.held_out_pairs import Scores
from trl_algos.trainers.preference.sources import source_codes, source_names

SOURCES = ["chat", "code", "chat", None, "chat", "tied"]
ROWS = [
    *pairs.ROWS,
    {"prompt": "t", "chosen": "ie", "rejected": "ei"},
    {"prompt": "u", "chosen": "v", "rejected": "w"},
]
ROWS = [{**row, "source": source} for row, source in zip(ROWS, SOURCES, strict=True)]


def reward_trainer(folder, train=None, **kwargs):
    settings = kwargs.pop("settings", {})
    return BradleyTerryTrainer(
        pairs.classifier(),
        BradleyTerryConfig(**pairs.settings(folder, **settings)),
        train_dataset=train or pairs.dataset(),
        processing_class=tiny.tokenizer(),
        **kwargs,
    )


def preference_trainer(folder, train=None, model=None, ref_model=None, **kwargs):
    settings = kwargs.pop("settings", {})
    return PreferenceTrainer(
        model or tiny.llama(0),
        None if "peft_config" in kwargs else ref_model or tiny.llama(1),
        PreferenceConfig(**pairs.settings(folder, **settings)),
        train_dataset=train or pairs.dataset(),
        processing_class=tiny.tokenizer(),
        **kwargs,
    )


# Names


def test_names_come_back_from_their_bytes():
    names = ["chat", None, "Übersetzung/日本", "x" * 64]
    codes = source_codes(names)
    assert codes.shape == (4, 64)
    assert codes.dtype == torch.uint8
    assert source_names(codes) == names


@pytest.mark.parametrize("source", [3, "", "x" * 65, "ü" * 33, "a\0b"])
def test_what_is_no_name_is_refused(source, tmp_path):
    with pytest.raises(ConfigError, match=r"row 0: `source` must be text of 1 to 64 bytes, or missing, but is"):
        reward_trainer(tmp_path, pairs.dataset([{**pairs.ROWS[0], "source": source}]))


# Figures


def test_figures_of_sources_by_hand():
    """Leads of the better side: a: 1, -3, tie left out; b: equal scores; c: ties alone; one pair of no source."""
    scores = Scores(
        chosen=torch.tensor([2.0, 0.0, 9.0, 4.0, 1.0, 7.0]),
        rejected=torch.tensor([1.0, -3.0, 0.0, 4.0, 0.0, 0.0]),
        preference=torch.tensor([1.0, 0.2, 0.5, 0.9, 0.5, 1.0]),
        source=["a", "a", "a", "b", "c", None],
    )
    assert scores.by_source() == {"a": (0.5, -1.0), "b": (0.5, 0.0)}
    assert scores.by_source(equal=0.0)["b"] == (0.0, 0.0)


def score(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


def test_a_reward_model_is_judged_by_source(tmp_path):
    """Known in the evaluation alone; a tie is left out; batches of two mix the sources."""
    rows = [{**row, "preference": p} for row, p in zip(ROWS, [1, 1, 0.1, 1, 0.9, 0.5], strict=True)]
    trainer = reward_trainer(tmp_path, eval_dataset=pairs.dataset(rows))
    metrics = trainer.evaluate()
    model = pairs.classifier().eval()
    with torch.no_grad():
        leads = [score(model, row["chosen_ids"]) - score(model, row["rejected_ids"]) for row in trainer.eval_dataset]
    chat = [leads[0], -leads[2], leads[4]]
    assert len({lead > 0 for lead in chat}) == 2  # both verdicts occur
    assert metrics["eval_accuracy/chat"] == pytest.approx(sum(lead > 0 for lead in chat) / 3)
    assert metrics["eval_margin/chat"] == pytest.approx(sum(chat) / 3, abs=1e-4)
    assert metrics["eval_accuracy/code"] == float(leads[1] > 0)
    assert metrics["eval_margin/code"] == pytest.approx(leads[1], abs=1e-4)
    assert not any(name.endswith(("/tied", "/None", "/")) for name in metrics)
    sets = {"one": trainer.eval_dataset.select([0, 1]), "two": trainer.eval_dataset.select([2])}
    metrics = trainer.evaluate(sets)
    assert metrics["eval_one_accuracy/chat"] == float(leads[0] > 0)
    assert metrics["eval_two_accuracy/chat"] == float(leads[2] < 0)
    assert "eval_two_accuracy/code" not in metrics


def test_sources_of_training_pairs_change_nothing(tmp_path):
    def weights(rows):
        trainer = reward_trainer(tmp_path, pairs.dataset(rows))
        trainer.train()
        return trainer.model.state_dict()

    plain = [{key: value for key, value in row.items() if key != "source"} for row in ROWS]
    one, other = weights(ROWS), weights(plain)
    assert all(torch.equal(one[name], other[name]) for name in one)


def implicit_reward(policy, reference, row, side, beta):
    """By hand: beta times the summed log-ratio of the completion, one sequence at a time."""
    ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
    ratio = 0.0
    for model, sign in ((policy, 1), (reference, -1)):
        log_probs = model(input_ids=ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        ratio += sign * log_probs[max(0, len(row["prompt_ids"]) - 1) :].sum().item()
    return beta * ratio


@pytest.mark.parametrize("case", ["reference", "precomputed", "ipo", "rpo"])
def test_a_policy_is_judged_by_source(case, tmp_path):
    settings = {"beta": 0.3, "precompute_ref_log_probs": case == "precomputed"}
    settings |= {"algorithm": case} if case in ("ipo", "rpo") else {}
    trainer = preference_trainer(tmp_path, eval_dataset=pairs.dataset(ROWS), settings=settings)
    metrics = trainer.evaluate()
    policy, reference = tiny.llama(0).eval(), tiny.llama(1).eval()
    with torch.no_grad():
        leads = [
            implicit_reward(policy, reference, row, "chosen", 0.3)
            - implicit_reward(policy, reference, row, "rejected", 0.3)
            for row in trainer.eval_dataset
        ]
    chat = [leads[0], leads[2], leads[4]]
    assert metrics["eval_rewards/accuracies/chat"] == pytest.approx(sum(lead > 0 for lead in chat) / 3)
    assert metrics["eval_rewards/margins/chat"] == pytest.approx(sum(chat) / 3, rel=1e-3)
    assert metrics["eval_rewards/margins/code"] == pytest.approx(leads[1], rel=1e-3)
    assert metrics["eval_rewards/margins"] == pytest.approx(sum(leads) / 6, rel=1e-3)  # TRL's own, of all


def test_an_adapter_is_judged_against_its_start(tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    rows = [{**row, "source": "all"} for row in ROWS[:4]]
    trainer = preference_trainer(tmp_path, eval_dataset=pairs.dataset(rows), peft_config=lora)
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/margins/all"] == 0.0  # nothing has moved yet
    assert metrics["eval_rewards/accuracies/all"] == metrics["eval_rewards/accuracies"] == 0.0
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/margins/all"] != 0.0
    assert metrics["eval_rewards/margins/all"] == pytest.approx(metrics["eval_rewards/margins"], rel=1e-4)
    assert metrics["eval_rewards/accuracies/all"] == pytest.approx(metrics["eval_rewards/accuracies"])


def test_several_sets_of_a_policy_are_told_apart(tmp_path):
    sets = {"one": pairs.dataset(ROWS[:2]), "two": pairs.dataset(ROWS[2:4])}
    metrics = preference_trainer(tmp_path, eval_dataset=sets).evaluate()
    assert metrics["eval_one_rewards/margins"] != metrics["eval_two_rewards/margins"]
    assert metrics["eval_one_rewards/margins/code"] != 0
    assert "eval_two_rewards/margins/code" not in metrics


# Dropped pairs

GOOD, EQUAL, EMPTY = pairs.ROWS[0], {"prompt": "a", "chosen": "b", "rejected": "b"}, pairs.ROWS[1]
LONG = {"prompt": "a" * 50, "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("make", "long"),
    [(reward_trainer, "longer than `max_length` (40)"), (preference_trainer, "the prompt fills `max_length` (40)")],
)
def test_a_stream_counts_what_it_drops_as_it_is_read(make, long, tmp_path):
    rows = [GOOD, EQUAL, GOOD, LONG, EQUAL, GOOD, GOOD]
    trainer = make(tmp_path, Dataset.from_list(rows).to_iterable_dataset())
    assert trainer.dropped_pairs == {"train": {}}
    with pytest.warns(
        UserWarning, match=r"`train` data: 3 pairs dropped as the stream was read \(2: chosen and rejec"
    ):
        trainer.train()  # two steps of two pairs: all rows are read once
    assert trainer.dropped_pairs == {"train": {"chosen and rejected are equal": 2, long: 1}}


@pytest.mark.parametrize("make", [reward_trainer, preference_trainer])
def test_what_was_dropped_is_told_by_set_and_reason(make, tmp_path):
    with pytest.warns(UserWarning, match="dropped"):
        trainer = make(tmp_path, pairs.dataset([GOOD, EQUAL]), eval_dataset=pairs.dataset([GOOD, LONG, EQUAL, EQUAL]))
    dropped = trainer.dropped_pairs
    assert dropped["train"] == {"chosen and rejected are equal": 1}
    assert sorted(dropped["eval"].values()) == [1, 2]
    assert dropped["eval"]["chosen and rejected are equal"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.evaluate()  # nothing is dropped, or told, twice
    assert trainer.dropped_pairs["eval"] == dropped["eval"]


# Images


def with_image(rows):
    return pairs.dataset([{**row, "image": "picture.png"} for row in rows])


def test_a_reward_model_of_pairs_with_images_is_refused(tmp_path):
    for kwargs in ({"train": with_image(pairs.ROWS)}, {"eval_dataset": {"one": with_image(pairs.ROWS)}}):
        with pytest.raises(ConfigError, match=r"`train_dataset`: has images \(column `image`\)"):
            reward_trainer(tmp_path, **kwargs)


def test_pairs_with_images_are_said_to_be_unchecked(tmp_path):
    with (
        pytest.warns(UserWarning, match=r"The data has images \(column image\).*none is checked or dropped before"),
        pytest.raises(ValueError, match="vision"),  # TRL's own message about the model
    ):
        preference_trainer(tmp_path, with_image(pairs.ROWS))
