"""`padding_free` of the trainers on preference pairs: the same losses, gradients and weights on fewer tokens."""

import copy
import logging

import families
import preference_pairs as pairs
import pytest
import tiny
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from token_counter import TokenCounter
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer
from trl_algos.errors import ConfigError
from trl_algos.preference_algorithms import preference_keys

LONG = {"prompt": "a prompt that is as long as twenty", "chosen": "yes", "rejected": "no, not at all, not"}
ROWS = [*pairs.ROWS, LONG]


def policy(folder, padding_free, model=None, ref_model=None, peft_config=None, quantization_config=None, **settings):
    own = model is None
    trainer = PreferenceTrainer(
        tiny.llama(0) if own else model,
        tiny.llama(1) if own and not peft_config else ref_model,
        PreferenceConfig(**pairs.settings(folder, padding_free=padding_free, max_length=60, **settings)),
        train_dataset=pairs.dataset(ROWS),
        processing_class=tiny.tokenizer(),
        quantization_config=quantization_config,
        peft_config=peft_config,
    )
    trainer._set_signature_columns_if_needed()
    return trainer


def lora(**others):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **others)


def differentiated(trainer):
    """Loss, gradients and metrics of a batch of all pairs, and the tokens that went through the policy's layers."""
    trainer.model.train()
    counter = TokenCounter(trainer.model)
    loss = trainer.compute_loss(trainer.model, pairs.batch(trainer))
    loss.backward()
    return loss, pairs.gradients(trainer.model), dict(trainer._metrics["train"]), counter


def assert_same(padded, packed, share=0.6):
    expected, found = differentiated(padded), differentiated(packed)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    size = max(g.abs().max().item() for g in expected[1].values())
    assert size > 1e-3
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=2e-6 * size, msg=name)
    assert found[2].keys() == expected[2].keys()
    for name, values in expected[2].items():
        assert found[2][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    assert found[3].passes == expected[3].passes
    assert found[3].tokens < share * expected[3].tokens


SETTINGS = {
    **{key: {"algorithm": key} for key in preference_keys("policy")},
    "ld_alpha": {"ld_alpha": 0.4},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "weighting": {"use_weighting": True},
    "keep_end": {"max_length": 12, "truncation_mode": "keep_end"},
    "keep_start": {"max_length": 12},
    "precomputed": {"precompute_ref_log_probs": True},
    "multiple": {"pad_to_multiple_of": 16},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "not reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_gradients_and_metrics(name, tmp_path, caplog):
    settings = {"max_length": 60, **SETTINGS[name]}
    trainers = []
    for padding_free in (False, None):
        config = pairs.settings(tmp_path, padding_free=padding_free, **settings)
        trainer = PreferenceTrainer(
            tiny.llama(0),
            tiny.llama(1),
            PreferenceConfig(**config),
            train_dataset=pairs.dataset(ROWS),
            processing_class=tiny.tokenizer(),
        )
        trainer._set_signature_columns_if_needed()
        trainers.append(trainer)
    assert_same(*trainers, share=0.9 if name == "keep_end" else 0.6)
    assert "padded rows" not in caplog.text
    assert trainers[1].args.padding_free is None


@pytest.mark.parametrize("where", ["disabled", "copied"])
def test_the_reference_of_an_adapter(where, tmp_path):
    """The bare base, or a copy of the adapter that the run goes on from."""

    def trainer(padding_free):
        if where == "disabled":
            return policy(tmp_path, padding_free, peft_config=lora(task_type="CAUSAL_LM"))
        torch.manual_seed(3)
        return policy(tmp_path, padding_free, get_peft_model(tiny.llama(0), lora(task_type="CAUSAL_LM")))

    padded, packed = trainer(False), trainer(True)
    for each in (padded, packed):
        with torch.no_grad():  # away from the reference
            for name, parameter in each.model.named_parameters():
                if "lora_B.default" in name:
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    padded_count = TokenCounter(padded.model)
    assert_same(padded, packed)
    assert padded_count.passes == 2  # policy and reference


@pytest.mark.parametrize(
    "settings", [{}, {"algorithm": "rpo", "gradient_accumulation_steps": 2}, {"sync_ref_model": True}], ids=str
)
def test_runs_end_at_the_same_weights(settings, tmp_path):
    if "sync_ref_model" in settings:
        settings = {**settings, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    runs = []
    for padding_free in (False, True):
        trainer = policy(tmp_path, padding_free, max_steps=3, optim="sgd", learning_rate=0.05, **settings)
        trainer.train()
        runs.append(trainer)
    start = dict(tiny.llama(0).named_parameters())
    for (name, p), q in zip(runs[0].model.named_parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=2e-5, msg=name)
    assert max((p - start[name]).abs().max() for name, p in runs[0].model.named_parameters()) > 1e-2


def test_a_mixture_of_experts_keeps_its_balance(tmp_path):
    model = families.language_model("qwen3_moe", vocab_size=258)
    padded, packed = (
        policy(tmp_path, value, copy.deepcopy(model), copy.deepcopy(model), router_aux_loss_coef=0.3)
        for value in (False, True)
    )
    expected, found = differentiated(padded), differentiated(packed)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[2]["aux_loss"] == pytest.approx(expected[2]["aux_loss"], rel=1e-5)
    assert found[3].tokens == pairs.batch(packed)["attention_mask"].sum()


@pytest.mark.parametrize("kind", ["policy", "reward model"])
def test_a_base_model_in_four_bits(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    made = tiny.llama(0) if kind == "policy" else pairs.classifier()
    made.save_pretrained(tmp_path / "model")
    trainers = []
    for padding_free in (False, True):
        shared = {"quantization_config": BitsAndBytesConfig(**bits), "peft_config": lora(task_type="CAUSAL_LM")}
        make = policy if kind == "policy" else scorer
        shared["model_init_kwargs"] = {"dtype": "bfloat16"}
        trainers.append(make(tmp_path, padding_free, str(tmp_path / "model"), **shared))
        trainers[-1]._set_signature_columns_if_needed()
    expected, found = (differentiated(trainer) for trainer in trainers)
    torch.testing.assert_close(found[0], expected[0], rtol=3e-2, atol=0)  # in bfloat16
    assert found[3].tokens < 0.6 * expected[3].tokens


# What is said


def leaking(folder):
    model = tiny.llama(0)
    model.model.layers[0].register_forward_hook(lambda module, args, out: out + 0.01 * out.roll(1, dims=1))
    return model


def test_a_model_that_needs_padded_rows(tmp_path, caplog):
    """One line that says why; or an error; and the same loss."""
    caplog.set_level(logging.INFO)
    packed = policy(tmp_path, None, leaking(tmp_path), leaking(tmp_path))
    told = [record.message for record in caplog.records if "padded rows" in record.message]
    assert len(told) == 1
    assert "`model` and `ref_model` run on padded rows, because one row reaches another" in told[0]
    padded = policy(tmp_path, False, leaking(tmp_path), leaking(tmp_path))
    assert torch.equal(differentiated(packed)[0], differentiated(padded)[0])
    with pytest.raises(ConfigError, match="`padding_free`: True, but `model` and `ref_model` run on padded rows, bec"):
        policy(tmp_path, True, leaking(tmp_path), leaking(tmp_path))


def test_virtual_tokens_need_padded_rows(tmp_path, caplog):
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    trainer = policy(tmp_path, None, peft_config=config)
    assert "`model` runs on padded rows, because adapter 'default' (PROMPT_TUNING) may add tokens" in caplog.text
    assert differentiated(trainer)[0].isfinite()


@pytest.mark.parametrize(("padding_free", "packs"), [(None, True), (True, True), (False, False)])
def test_trl_is_not_asked_for_it(padding_free, packs, tmp_path, caplog):
    trainer = policy(tmp_path, padding_free)
    assert "temporarily unavailable" not in caplog.text
    assert (trainer.model.config._attn_implementation != "sdpa") == packs
    assert trainer.args.padding_free is padding_free


@pytest.mark.parametrize("config", [PreferenceConfig, BradleyTerryConfig])
def test_other_values_are_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="`padding_free`: 'auto' must be true, false, or left unset"):
        config(**pairs.settings(tmp_path, padding_free="auto"))


def test_compiled_models_are_left_alone(tmp_path, caplog):
    policy(tmp_path, None, torch_compile=True)
    assert "run on padded rows, because `torch_compile`" in caplog.text


def test_a_saved_model_knows_nothing_of_it(tmp_path):
    trainer = policy(tmp_path, True)
    trainer.save_model(str(tmp_path / "saved"))
    assert not any("segments" in path.read_text() for path in (tmp_path / "saved").glob("*.json"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config._attn_implementation == "sdpa"


# Reward models


def scorer(folder, padding_free, model=None, **others):
    rows = [{**row, "margin": 0.1 * place} for place, row in enumerate(ROWS)]
    given = {name: others.pop(name) for name in ("peft_config", "quantization_config") if name in others}
    return BradleyTerryTrainer(
        model or pairs.classifier(),
        BradleyTerryConfig(**pairs.settings(folder, padding_free=padding_free, max_length=60, **others)),
        train_dataset=pairs.dataset(rows),
        eval_dataset=pairs.dataset(rows),
        processing_class=tiny.tokenizer(),
        **given,
    )


@pytest.mark.parametrize("kind", ["full", "lora", "reentrant", "not reentrant", "centred"])
def test_losses_gradients_and_metrics_of_a_reward_model(kind, tmp_path):
    others = {"center_rewards_coefficient": 0.1} if kind == "centred" else SETTINGS.get(kind, {})
    trainers = []
    for padding_free in (False, None):
        torch.manual_seed(3)
        config = {"peft_config": lora(), **others} if kind == "lora" else others
        trainers.append(scorer(tmp_path, padding_free, **config))
        trainers[-1]._set_signature_columns_if_needed()
    assert_same(*trainers)


def test_a_reward_model_trains_and_evaluates_the_same(tmp_path):
    runs = []
    for padding_free in (False, True):
        trainer = scorer(tmp_path, padding_free, max_steps=3, optim="sgd", learning_rate=0.05)
        trainer.train()
        metrics = trainer.evaluate()
        names = ("eval_loss", "eval_brier", "eval_reward_mean", "eval_reward_std")
        runs.append((trainer.model, {name: metrics[name] for name in names}))
    for (name, p), q in zip(runs[0][0].named_parameters(), runs[1][0].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=2e-5, msg=name)
    assert runs[1][1] == pytest.approx(runs[0][1], rel=1e-4, abs=1e-5)


def test_a_reward_model_that_needs_padded_rows(tmp_path, caplog):
    def model():
        made = pairs.classifier()
        made.model.layers[0].register_forward_hook(lambda module, args, out: out + 0.01 * out.roll(1, dims=1))
        return made

    packed = scorer(tmp_path, None, model())
    assert "`model` runs on padded rows, because one row reaches another" in caplog.text
    batch = pairs.batch(packed)
    padded = scorer(tmp_path, False, model())
    assert torch.equal(*(t.compute_loss(t.model, dict(batch)) for t in (packed, padded)))
    with pytest.raises(ConfigError, match="`padding_free`: True, but `model` runs on padded rows"):
        scorer(tmp_path, True, model())
