"""`PreferenceTrainer`: its losses against the papers' formulas, what it drops, its reference, and runs that train."""

from pathlib import Path

import preference_pairs as pairs
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from trl import DPOConfig, DPOTrainer

from trl_algos import PreferenceConfig, PreferenceTrainer
from trl_algos.core import dpo_loss
from trl_algos.errors import ConfigError
from trl_algos.preference_algorithms import preference_keys

KEYS = preference_keys("policy")
FORMULA = {"dpo": "sigmoid", "ipo": "ipo", "cdpo": "sigmoid", "robust_dpo": "robust", "rpo": "sigmoid"}


def trainer_of(folder, model=None, ref_model=None, rows=None, peft_config=None, eval_rows=None, **settings):
    made = PreferenceTrainer(
        model or tiny.llama(0),
        ref_model or (None if peft_config or isinstance(model, (PeftModel, str)) else tiny.llama(1)),
        PreferenceConfig(**pairs.settings(folder, **settings)),
        train_dataset=pairs.dataset(rows),
        eval_dataset=None if eval_rows is None else pairs.dataset(eval_rows),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )
    made._set_signature_columns_if_needed()
    return made


def loss_of(trainer, places=None):
    trainer.model.train()
    return trainer.compute_loss(trainer.model, pairs.batch(trainer, places))


def logps(model, row):
    """(log-probs of the tokens) of each completion, one sequence at a time, from the plain logits."""
    found = []
    for side in ("chosen", "rejected"):
        ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
        log_probs = model(input_ids=ids).logits.float().log_softmax(-1)
        of_tokens = log_probs[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        found.append(of_tokens[max(0, len(row["prompt_ids"]) - 1) :])
    return found


def expected_loss(rows, policy, reference, key, beta=0.1, smoothing=0.0, nll_coef=0.0):
    """Mean over rows of the paper's loss, from one forward pass per sequence."""
    total = 0.0
    for row in rows:
        chosen, rejected = logps(policy, row)
        with torch.no_grad():
            ref_chosen, ref_rejected = logps(reference, row)
        reduce = [x.sum() for x in (chosen, rejected, ref_chosen, ref_rejected)]
        if key == "ipo":
            lengths = [len(row["chosen_ids"]), len(row["rejected_ids"])] * 2
            reduce = [x / n for x, n in zip(reduce, lengths, strict=True)]
        loss = dpo_loss(*(x[None] for x in reduce), beta, smoothing, FORMULA[key])
        total = total + loss - nll_coef * chosen.mean()
    return total / len(rows)


@pytest.mark.parametrize("key", KEYS)
def test_loss_and_gradient_are_those_of_the_formula(key, tmp_path):
    extra = {"cdpo": {"label_smoothing": 0.2}, "robust_dpo": {"label_smoothing": 0.2}, "rpo": {"nll_coef": 0.7}}
    trainer = trainer_of(tmp_path, algorithm=key, beta=0.3, **extra.get(key, {}))
    loss = loss_of(trainer)
    loss.backward()
    found = pairs.gradients(trainer.model)
    policy = tiny.llama(0)
    settings = {"smoothing": 0.2} if "label_smoothing" in extra.get(key, {}) else extra.get(key, {})
    expected = expected_loss(list(trainer.train_dataset), policy, tiny.llama(1), key, 0.3, **settings)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    for name, gradient in pairs.gradients(policy).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    if key == "rpo":
        assert trainer._metrics["train"]["nll/chosen"][0] > 0


@pytest.mark.parametrize(
    ("key", "loss_type", "smoothing"), [("dpo", "sigmoid", 0.0), ("ipo", "ipo", 0.0), ("robust_dpo", "robust", 0.1)]
)
def test_parity_with_trl(key, loss_type, smoothing, tmp_path):
    ours = trainer_of(tmp_path / "a", algorithm=key, padding_free=False)
    theirs = DPOTrainer(
        tiny.llama(0),
        tiny.llama(1),
        DPOConfig(**pairs.settings(tmp_path / "b", loss_type=[loss_type], label_smoothing=smoothing)),
        train_dataset=pairs.dataset(),
        processing_class=tiny.tokenizer(),
    )
    theirs._set_signature_columns_if_needed()
    torch.testing.assert_close(loss_of(ours), loss_of(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("key", KEYS)
def test_composition_of_the_batch_changes_nothing(key, tmp_path):
    trainer = trainer_of(tmp_path, algorithm=key)
    alone = torch.stack([loss_of(trainer, [place]) for place in range(len(pairs.ROWS))])
    torch.testing.assert_close(loss_of(trainer), alone.mean(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("key", "smoothing"), [("dpo", 0.0), ("cdpo", 0.2), ("robust_dpo", 0.2)])
def test_swapping_the_sides_mirrors_the_loss(key, smoothing, tmp_path):
    """L(h) - L(-h) is -beta h for the plain loss, (1 - 2e) times that for cDPO, 1 / (1 - 2e) times it for rDPO."""
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs.ROWS]
    extra = {"label_smoothing": smoothing} if smoothing else {}
    one = trainer_of(tmp_path, algorithm=key, **extra)
    other = trainer_of(tmp_path, rows=swapped, algorithm=key, **extra)
    gap = loss_of(one) - loss_of(other)
    margin = one._metrics["train"]["rewards/margins"][0]
    assert margin == pytest.approx(-other._metrics["train"]["rewards/margins"][0], abs=1e-4)
    factor = {"dpo": 1.0, "cdpo": 1 - 2 * smoothing, "robust_dpo": 1 / (1 - 2 * smoothing)}[key]
    assert gap.item() == pytest.approx(-margin * factor, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", KEYS)
def test_extreme_margins_are_finite(key, dtype, tmp_path):
    """One pair of each sign, each more than 1e4 from 0."""
    model, ref_model = (tiny.llama(seed, scale=40.0).to(dtype) for seed in (0, 1))
    trainer = trainer_of(tmp_path, model, ref_model, algorithm=key, beta=1e5)
    margins = []
    for place in range(len(pairs.ROWS)):
        loss = loss_of(trainer, [place])
        loss.backward()
        assert loss.isfinite()
        margins += trainer._metrics["train"]["rewards/margins"]
        trainer._metrics["train"].clear()
    assert min(margins) < -1e4
    assert max(margins) > 1e4
    assert all(gradient.isfinite().all() for gradient in pairs.gradients(trainer.model).values())


def test_nothing_left_after_truncation(tmp_path):
    """One byte is one token, and EOS one more: prompt 10, chosen 3, rejected 2; prompt 3, chosen 9, rejected 2."""
    rows = [
        {"prompt": "0123456789", "chosen": "ab", "rejected": "c"},
        {"prompt": "012", "chosen": "abcdefgh", "rejected": "i"},
        {"prompt": "012", "chosen": "same start 1", "rejected": "same start 2"},
        {"prompt": "012", "chosen": "equal", "rejected": "equal"},
    ]
    with pytest.warns(
        UserWarning, match=r"`train` data: 3 of 4 pairs dropped \(1: the prompt fills `max_length` \(8\)"
    ):
        trainer = trainer_of(tmp_path, rows=rows, max_length=8)
    assert len(trainer.train_dataset) == 1
    mask = pairs.batch(trainer)["completion_mask"]
    assert mask.sum(1).tolist() == [5, 2]
    for key in KEYS:
        with pytest.warns(UserWarning, match="2: chosen and rejected are equal"):
            assert loss_of(trainer_of(tmp_path, rows=rows, max_length=8, algorithm=key)).isfinite()
    with pytest.raises(ConfigError, match=r"2 of 2 pairs dropped.* Nothing is left"):
        trainer_of(tmp_path, rows=[rows[0], rows[3]], max_length=8)


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "chosen": "b"}], "`train` data has no column `rejected`"),
        ([{"chosen": "b", "rejected": "c"}, {"chosen": "b", "rejected": None}], "row 1: `rejected` is missing"),
        ([{"prompt": "a", "chosen": 3, "rejected": 4}], "row 0: `chosen` must be text or a list of messages"),
        ([{"prompt": "a", "chosen": MESSAGES, "rejected": MESSAGES}], "`chosen` is messages.*one kind"),
        ([{"prompt": "a", "chosen": [], "rejected": []}] * 5, "2 more rows"),
    ],
)
def test_rows_that_are_no_pairs_are_refused(rows, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, rows=rows)


def test_messages_and_implicit_prompts_are_taken_as_text_is(tmp_path):
    """A template that writes contents and EOS: the same tokens as plain text gets, but for the prompt's own EOS."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    rows = [{key: [{"role": roles[key], "content": row[key]}] for key in row} for row in pairs.ROWS[:2]]
    plain = [{**row, "prompt": f"{row['prompt']}<eos>"} for row in pairs.ROWS[:2]]
    implicit = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows]
    losses = []
    for each in (rows, plain, implicit):
        trainer = PreferenceTrainer(
            tiny.llama(0),
            tiny.llama(1),
            PreferenceConfig(**pairs.settings(tmp_path, algorithm="rpo")),
            train_dataset=pairs.dataset(each),
            processing_class=tokenizer,
        )
        trainer._set_signature_columns_if_needed()
        losses.append(loss_of(trainer).item())
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_precomputed_reference_gives_the_same_loss(tmp_path):
    plain = trainer_of(tmp_path, algorithm="rpo")
    before = trainer_of(tmp_path, algorithm="rpo", precompute_ref_log_probs=True)
    assert {"ref_chosen_logps", "ref_rejected_logps"} <= set(before.train_dataset.column_names)
    torch.testing.assert_close(loss_of(before), loss_of(plain), rtol=0, atol=1e-6)


def test_evaluation_has_the_same_loss(tmp_path):
    trainer = trainer_of(tmp_path, eval_rows=pairs.ROWS, algorithm="rpo", per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(loss_of(trainer).item(), rel=1e-5)
    assert metrics["eval_nll/chosen"] > 0


# LoRA


def lora(**others):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **others)


def started_adapter():
    torch.manual_seed(3)
    model = get_peft_model(tiny.llama(0), lora(init_lora_weights=False))
    return model


def test_the_reference_of_an_adapter_is_its_start(tmp_path):
    """Not the bare base: the first loss is ln 2, and the reference stays while the adapter moves."""
    trainer = trainer_of(tmp_path, started_adapter())
    assert loss_of(trainer).item() == pytest.approx(0.693147, abs=1e-6)
    assert not any(p.requires_grad for name, p in trainer.model.named_parameters() if ".ref." in name)
    base = tiny.llama(0)
    rows = list(trainer.train_dataset)
    bare = expected_loss(rows, started_adapter(), base, "dpo")
    assert abs(bare.item() - 0.693147) > 1e-3  # the base would have been another reference
    trainer.train()
    moved = trainer.model
    moved.set_adapter("default")
    moved.eval()
    expected = expected_loss(rows, moved, started_adapter().eval(), "dpo")
    assert abs(expected.item() - 0.693147) > 1e-4
    torch.testing.assert_close(loss_of(trainer), expected, rtol=1e-5, atol=1e-5)


def test_adapters_that_cannot_be_gone_on_from_are_refused(tmp_path):
    started_adapter().save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"is an adapter\. Load its base model"):
        trainer_of(tmp_path, str(tmp_path / "adapter"))
    frozen = PeftModel.from_pretrained(tiny.llama(0), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="frozen; load it with `is_trainable=True`"):
        trainer_of(tmp_path, frozen)
    named = get_peft_model(tiny.llama(0), lora(), adapter_name="mine")
    with pytest.raises(ConfigError, match=r"must be called default.*mine"):
        trainer_of(tmp_path, named)


@pytest.mark.parametrize("reentrant", [True, False])
def test_lora_and_gradient_checkpointing_train_every_layer(reentrant, tmp_path):
    trainer = trainer_of(
        tmp_path,
        peft_config=lora(),
        algorithm="rpo",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    trainer.train()
    moved = {name: p.abs().sum().item() for name, p in trainer.model.named_parameters() if "lora_B" in name}
    assert len(moved) == 4
    assert all(moved.values()), moved


# Runs


@pytest.mark.parametrize("key", KEYS)
def test_it_trains(key, tmp_path):
    trainer = trainer_of(tmp_path, rows=pairs.ROWS[:2], algorithm=key, max_steps=8)
    before = loss_of(trainer).item()
    margin = trainer._metrics["train"]["rewards/margins"][0]
    trainer._metrics["train"].clear()
    trainer.train()
    trainer._metrics["train"].clear()
    assert loss_of(trainer).item() < before
    assert trainer._metrics["train"]["rewards/margins"][0] > margin


def test_resuming_gives_the_uninterrupted_run(model_folder, tmp_path):
    def run(folder, resume=None, **settings):
        trainer = trainer_of(folder, model_folder, algorithm="rpo", max_steps=4, **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    straight = run(tmp_path / "a", save_strategy="steps", save_steps=2)
    checkpoint = Path(tmp_path / "a" / "checkpoint-2")
    resumed = run(tmp_path / "b", str(checkpoint))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    first = tiny.llama().state_dict()
    assert not torch.equal(straight["lm_head.weight"], first["lm_head.weight"])
