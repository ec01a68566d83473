"""`BradleyTerryTrainer`: its loss, where the score is read, what it drops, the head under LoRA, held-out figures."""

from pathlib import Path

import preference_pairs as pairs
import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PolicyConfig, PolicyTrainer
from trl_algos.core import pair_calibration
from trl_algos.errors import ConfigError

CHAT = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


def trainer_of(folder, model=None, rows=None, eval_rows=None, tokenizer=None, peft_config=None, **settings):
    made = BradleyTerryTrainer(
        model or pairs.classifier(),
        BradleyTerryConfig(**pairs.settings(folder, **settings)),
        train_dataset=pairs.dataset(rows),
        eval_dataset=pairs.dataset(eval_rows) if isinstance(eval_rows, list) else eval_rows,
        processing_class=tokenizer or tiny.tokenizer(),
        peft_config=peft_config,
    )
    made._set_signature_columns_if_needed()
    return made


def loss_of(trainer, places=None):
    trainer.model.train()
    return trainer.compute_loss(trainer.model, pairs.batch(trainer, places))


def score(model, ids):
    """The score of one sequence alone: the head on the hidden state of its last token."""
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
    return model.score(hidden)[0, -1, 0]


def scores(model, rows):
    return [torch.stack([score(model, row[side]) for row in rows]) for side in ("chosen_ids", "rejected_ids")]


# The loss


def test_loss_and_gradient_are_those_of_the_formula(tmp_path):
    rows = [{**row, "margin": 0.3 * i, "preference": [1.0, 0.5, 0.8, 0.0][i]} for i, row in enumerate(pairs.ROWS)]
    trainer = trainer_of(tmp_path, rows=rows, label_smoothing=0.1, center_rewards_coefficient=0.05)
    loss = loss_of(trainer)
    loss.backward()
    found = pairs.gradients(trainer.model)
    model = pairs.classifier()
    chosen, rejected = scores(model, trainer.train_dataset)
    margin = torch.tensor([0.0, 0.3, 0.6, 0.9])
    share = 0.9 * torch.tensor([1.0, 0.5, 0.8, 0.0]) + 0.1 * torch.tensor([0.0, 0.5, 0.2, 1.0])
    right, wrong = (torch.nn.functional.softplus(x) for x in (rejected - chosen + margin, chosen - rejected + margin))
    expected = (share * right + (1 - share) * wrong).mean() + 0.05 * ((chosen + rejected) ** 2).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    for name, gradient in pairs.gradients(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("coefficient", [None, 0.01])
def test_parity_with_trl(coefficient, tmp_path):
    rows = [
        {"chosen_ids": [5, 6, 7, 8], "rejected_ids": [5, 6], "margin": 0.2},
        {"chosen_ids": [9], "rejected_ids": [10, 11, 12], "margin": 1.0},
    ]
    ours = trainer_of(tmp_path / "a", rows=rows, center_rewards_coefficient=coefficient)
    theirs = RewardTrainer(
        pairs.classifier(),
        RewardConfig(**pairs.settings(tmp_path / "b", center_rewards_coefficient=coefficient)),
        train_dataset=pairs.dataset(rows),
        processing_class=tiny.tokenizer(),
    )
    theirs._set_signature_columns_if_needed()
    torch.testing.assert_close(loss_of(ours), loss_of(theirs), rtol=0, atol=1e-6)


def test_composition_of_the_batch_changes_nothing(tmp_path):
    trainer = trainer_of(tmp_path)
    alone = torch.stack([loss_of(trainer, [place]) for place in range(len(pairs.ROWS))])
    torch.testing.assert_close(loss_of(trainer), alone.mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", [-1e5, 1e5])
def test_extreme_scores_are_finite(head, dtype, tmp_path):
    model = pairs.classifier()
    with torch.no_grad():
        model.score.weight.mul_(head)
    trainer = trainer_of(tmp_path, model.to(dtype), label_smoothing=0.1)
    loss = loss_of(trainer)
    loss.backward()
    assert abs(trainer._metrics["train"]["margin"][0]) > 1e4
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in pairs.gradients(trainer.model).values())


# Where the score is read


def pad_is_eos(padding_side="right", **others):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"unk_token": "!", **others})
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = padding_side
    tokenizer.chat_template = CHAT
    return tokenizer


def conversation(row):
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {key: [{"role": roles[key], "content": text}] for key, text in row.items()}


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_score_is_that_of_the_last_token_even_where_padding_is_eos(side, tmp_path):
    """Alone, padded on either side, in its trainer and reloaded: the score after EOS, which padding would hide."""
    tokenizer = pad_is_eos(side)
    trainer = trainer_of(
        tmp_path, rows=[conversation(row) for row in pairs.ROWS], tokenizer=tokenizer, max_steps=1, learning_rate=1e-3
    )
    assert tokenizer.pad_token == "<eos>"  # the user's own is left alone
    rows = list(trainer.train_dataset)
    assert all(row["chosen_ids"][-1] == tiny.EOS for row in rows)
    trainer.train()
    trainer.save_model()
    model = trainer.model.eval()
    with torch.no_grad():
        expected = scores(model, rows)
        loss = loss_of(trainer)
        torch.testing.assert_close(
            loss, torch.nn.functional.softplus(expected[1] - expected[0]).mean(), rtol=1e-5, atol=1e-5
        )
        reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        saved = AutoTokenizer.from_pretrained(tmp_path)
        assert saved.pad_token_id == reloaded.config.pad_token_id != tiny.EOS
        for padding in ("left", "right"):
            batch = saved.pad(
                {"input_ids": [row["chosen_ids"] for row in rows]}, padding_side=padding, return_tensors="pt"
            )
            torch.testing.assert_close(reloaded(**batch).logits[:, 0], expected[0], rtol=1e-5, atol=1e-5)


def test_a_text_that_ends_with_the_only_padding_token_is_refused(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = CHAT
    with pytest.raises(ConfigError, match="ends with token 1, which is the padding token, too"):
        trainer_of(tmp_path, rows=[conversation(row) for row in pairs.ROWS], tokenizer=tokenizer)
    trainer_of(tmp_path, tokenizer=tokenizer)  # plain text is read without EOS


def test_a_batch_of_ones_own_is_read_at_the_last_attended_token_or_refused(tmp_path):
    """Padded on the left it has the same loss; padded with a token that the model does not know as padding, none."""
    trainer = trainer_of(tmp_path)
    right = pairs.batch(trainer)
    left = {}
    for key in ("input_ids", "attention_mask"):
        lengths = right["attention_mask"].sum(1).tolist()
        shift = right["input_ids"].shape[1]
        left[key] = torch.stack([row.roll(shift - length) for row, length in zip(right[key], lengths, strict=True)])
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, left)
    torch.testing.assert_close(loss, loss_of(trainer), rtol=1e-5, atol=1e-5)
    other = pairs.batch(trainer)
    other["input_ids"][other["attention_mask"] == 0] = tiny.EOS
    with pytest.raises(ConfigError, match=r"`data_collator`: .*`pad_token_id` \(0\)"):
        trainer.compute_loss(trainer.model, other)


def test_the_path_of_an_adapter_is_refused(tmp_path):
    get_peft_model(pairs.classifier(), lora(task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"is an adapter\. Load its base model"):
        trainer_of(tmp_path, str(tmp_path / "adapter"))
    model = PeftModel.from_pretrained(pairs.classifier(), tmp_path / "adapter", is_trainable=True)
    trainer_of(tmp_path, model).train()


def test_plain_text_is_read_without_special_tokens(tmp_path):
    rows = trainer_of(tmp_path).train_dataset
    ids = tiny.tokenizer()("abcdef", add_special_tokens=False)["input_ids"]
    assert rows[0]["chosen_ids"] == ids
    implicit = trainer_of(tmp_path, rows=[{"chosen": "abcdef", "rejected": "abgh"}]).train_dataset
    assert implicit[0]["chosen_ids"] == ids


# What is dropped, and what is refused


def test_pairs_that_teach_nothing_are_dropped_and_counted(tmp_path):
    rows = [
        {"prompt": "01234", "chosen": "56789", "rejected": "a"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "", "chosen": "", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    with pytest.warns(UserWarning, match=r"`train` data: 3 of 4 pairs dropped.*longer than `max_length` \(8\)"):
        trainer = trainer_of(tmp_path, rows=rows, max_length=8)
    assert len(trainer.train_dataset) == 1
    with pytest.warns(UserWarning, match="`eval` data: 2 of 3 pairs dropped"):
        trainer_of(tmp_path, rows=pairs.ROWS, eval_rows=rows[1:])
    with pytest.raises(ConfigError, match="Nothing is left"):
        trainer_of(tmp_path, rows=rows[1:2])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"preference": 1.2}, r"`preference` must be a number in \[0, 1\], but is 1.2"),
        ({"margin": None}, "`margin` must be a number, but is None"),
        ({"rejected": None}, "`rejected` is missing"),
    ],
)
def test_rows_that_are_no_pairs_are_refused(extra, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, rows=[{**pairs.ROWS[0], **extra}])


def test_a_stream_is_checked_and_sifted_as_it_is_read(tmp_path):
    good, equal = pairs.ROWS[0], {"prompt": "a", "chosen": "b", "rejected": "b"}

    def stream(rows):
        return BradleyTerryTrainer(
            pairs.classifier(),
            BradleyTerryConfig(**pairs.settings(tmp_path)),
            train_dataset=Dataset.from_list(rows).to_iterable_dataset(),
            processing_class=tiny.tokenizer(),
        )

    assert len(list(stream([good, equal, good]).train_dataset)) == 2
    with pytest.raises(ConfigError, match="row 1: `chosen` is missing"):
        list(stream([good, {**equal, "chosen": None}]).train_dataset)


# LoRA


def lora(**others):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **others)


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM", "SEQ_CLS"])
def test_the_head_is_trained_and_saved_without_being_named(task_type, tmp_path):
    config = lora(task_type=task_type)
    trainer = trainer_of(tmp_path / "run", peft_config=config, learning_rate=1e-1)
    assert config.task_type == task_type
    before = pairs.classifier().score.weight.detach()
    trainer.train()
    trainer.save_model()
    rows = list(trainer.train_dataset)
    inputs = tiny.tokenizer().pad({"input_ids": [row["chosen_ids"] for row in rows]}, return_tensors="pt")
    with torch.no_grad():
        old = trainer.model.eval()(**inputs).logits
        base = pairs.classifier()
        with torch.random.fork_rng():
            base.score.reset_parameters()  # another head than the one it was trained from
        assert not torch.equal(base.score.weight, before)
        reloaded = PeftModel.from_pretrained(base, tmp_path / "run").eval()
        head = next(p for name, p in reloaded.named_parameters() if "score.modules_to_save" in name)
        assert not torch.allclose(head, before)
        torch.testing.assert_close(reloaded(**inputs).logits, old, rtol=1e-5, atol=1e-5)


def test_an_adapter_whose_head_stays_as_it_was_drawn_is_refused(tmp_path):
    model = get_peft_model(pairs.classifier(), lora())
    with pytest.raises(ConfigError, match="does not train the score head"):
        trainer_of(tmp_path, model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_lora_and_gradient_checkpointing_train_every_layer(reentrant, tmp_path):
    kwargs = {"use_reentrant": reentrant}
    trainer = trainer_of(
        tmp_path, peft_config=lora(), gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs
    )
    trainer.train()
    moved = {name: p.abs().sum().item() for name, p in trainer.model.named_parameters() if "lora_B" in name}
    assert len(moved) == 4
    assert all(moved.values()), moved


# Held-out pairs


def test_held_out_figures_are_over_all_pairs(tmp_path):
    """Three batches of two, two and one pairs; the last of them is a tie, which accuracy leaves out."""
    rows = [*pairs.ROWS, {"prompt": "t", "chosen": "ie", "rejected": "ei"}]
    rows = [{**row, "preference": preference} for row, preference in zip(rows, [1, 0.9, 0.2, 1, 0.5], strict=True)]
    trainer = trainer_of(tmp_path, eval_rows=rows)
    metrics = trainer.evaluate()
    with torch.no_grad():
        chosen, rejected = scores(pairs.classifier(), trainer.eval_dataset)
    better = torch.stack([chosen[0], chosen[1], rejected[2], chosen[3]])
    worse = torch.stack([rejected[0], rejected[1], chosen[2], rejected[3]])
    expected = pair_calibration(better, worse)
    assert metrics["eval_accuracy"] == (better > worse).float().mean().item()
    assert metrics["eval_margin"] == pytest.approx((better - worse).mean().item(), abs=1e-5)
    assert metrics["eval_brier"] == pytest.approx(expected.brier, abs=1e-6)
    assert metrics["eval_calibration_error"] == pytest.approx(expected.ece, abs=1e-6)
    assert trainer.calibration.pairs.tolist() == expected.pairs.tolist()
    both = torch.cat([chosen, rejected])
    trainer.save_model()
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path).config
    assert config.reward_mean == pytest.approx(both.mean().item(), abs=1e-5)
    assert config.reward_std == pytest.approx(both.std().item(), abs=1e-5)


def test_the_log_of_training_counts_the_better_side(tmp_path):
    """Two pairs whose rejected side is the better one, a tie, and an ordinary pair: one step of all four."""
    rows = [{**row, "preference": preference} for row, preference in zip(pairs.ROWS, [0, 0.1, 0.5, 1], strict=True)]
    trainer = trainer_of(tmp_path, rows=rows, max_steps=1, per_device_train_batch_size=4)
    with torch.no_grad():
        chosen, rejected = scores(pairs.classifier(), trainer.train_dataset)
    lead = torch.stack([rejected[0] - chosen[0], rejected[1] - chosen[1], chosen[3] - rejected[3]])
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["margin"] == pytest.approx(lead.mean().item(), abs=1e-5)
    assert log["accuracy"] == pytest.approx((lead > 0).float().mean().item(), abs=1e-6)


def test_nothing_but_ties_logs_no_accuracy_of_a_batch(tmp_path):
    rows = [{**row, "preference": 0.5} for row in pairs.ROWS]
    trainer = trainer_of(tmp_path, rows=rows, max_steps=1)
    trainer.train()
    assert {"accuracy", "margin"}.isdisjoint(trainer.state.log_history[0])


def test_several_held_out_sets_are_told_apart_and_count_together(tmp_path):
    sets = {"one": pairs.dataset(pairs.ROWS[:3]), "two": pairs.dataset(pairs.ROWS[3:])}
    trainer = trainer_of(tmp_path, eval_rows=sets)
    metrics = trainer.evaluate()
    with torch.no_grad():
        chosen, rejected = scores(pairs.classifier(), trainer.eval_dataset["one"])
        chosen_two, rejected_two = scores(pairs.classifier(), trainer.eval_dataset["two"])
    assert metrics["eval_one_accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert metrics["eval_two_accuracy"] == pytest.approx((chosen_two > rejected_two).float().mean().item())
    everything = torch.cat([chosen, rejected, chosen_two, rejected_two])
    assert trainer.model.config.reward_mean == pytest.approx(everything.mean().item(), abs=1e-5)
    assert metrics["eval_one_reward_mean"] == pytest.approx(torch.cat([chosen, rejected]).mean().item(), abs=1e-5)
    again = trainer.evaluate(sets["two"])
    assert again["eval_accuracy"] == metrics["eval_two_accuracy"]


# Runs


def test_it_trains_and_evaluates_on_the_way(tmp_path):
    trainer = trainer_of(
        tmp_path, rows=pairs.ROWS[:2], eval_rows=pairs.ROWS[:2], max_steps=20, eval_strategy="steps", eval_steps=10
    )
    before = loss_of(trainer).item()
    trainer.train()
    assert loss_of(trainer).item() < before
    assert trainer.state.log_history[-2]["eval_accuracy"] == 1.0
    assert trainer.model.config.reward_std > 0


def test_resuming_gives_the_uninterrupted_run(tmp_path):
    def run(folder, resume=None, **settings):
        trainer = trainer_of(folder, max_steps=4, label_smoothing=0.1, **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    straight = run(tmp_path / "a", save_strategy="steps", save_steps=2)
    resumed = run(tmp_path / "b", str(Path(tmp_path / "a" / "checkpoint-2")))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert not torch.equal(straight["score.weight"], pairs.classifier().score.weight)


def test_the_tokenizer_and_the_head_come_from_a_folder(model_folder, tmp_path):
    """A causal model's folder alone, as in TRL: the tokenizer is its own, the head new."""
    trainer = BradleyTerryTrainer(
        model_folder, BradleyTerryConfig(**pairs.settings(tmp_path)), train_dataset=pairs.dataset()
    )
    trainer.train()
    assert trainer.processing_class.pad_token == "<pad>"
    assert trainer.model.config.num_labels == 1


def test_the_score_is_the_same_in_its_trainer_alone_and_inside_rl(tmp_path):
    """Against the score of each text by itself."""
    trainer = trainer_of(tmp_path / "rm", max_steps=1, learning_rate=1e-3)
    trainer.train()
    trainer.save_model()
    rows = list(trainer.train_dataset)
    with torch.no_grad():
        expected, _ = scores(trainer.model.eval(), rows)
    policy = PolicyTrainer(
        tiny.llama(),
        str(tmp_path / "rm"),
        args=PolicyConfig(str(tmp_path), algorithm="reinforce", max_completion_length=8, max_steps=1, **pairs.CPU),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
    )
    prompts, completions = ([row[key] for row in pairs.ROWS] for key in ("prompt", "chosen"))
    found = policy._calculate_rewards(
        [{"prompt": prompt} for prompt in prompts], prompts, completions, [[2]] * len(prompts)
    )
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-5, atol=1e-5)
