"""Packed language models and classifiers against the same ones on padded rows."""

import copy
import re
import types
from pathlib import Path
from unittest.mock import Mock

import families
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from token_counter import TokenCounter
from transformers import CLIPVisionConfig, DynamicCache, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from trl.trainer.utils import add_fused_lm_head

from trl_algos.trainers.packing import attention, models, probe
from trl_algos.trainers.packing.flat_row import flat_row
from trl_algos.trainers.packing.rules import refusal
from trl_algos.trainers.packing.stand_in import failed_stand_in

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def both(model):
    """The model on padded rows, and a packed copy."""
    padded, packed = model, copy.deepcopy(model)
    for each in (padded, packed):
        add_fused_lm_head(each, outputs=FIELDS)
    assert models.pack_language_model(packed) is None
    return padded, packed


def outputs(model, batch, **others):
    return model(**batch, use_cache=False, fused_lm_head=True, **others)


def differentiated(model, output):
    """Gradient of a sum in which every token has its own weight."""
    weights = torch.linspace(0.5, 2.0, output.log_probs.numel()).view_as(output.log_probs)
    model.zero_grad()
    (output.log_probs * weights + 0.3 * output.entropy * weights.flip(0)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(padded, packed, batch, rows=slice(None), rtol=1e-5, atol=2e-5):
    expected, found = outputs(padded, batch), outputs(packed, batch)
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name)[rows], getattr(expected, name)[rows], rtol=rtol, atol=atol)
    torch.testing.assert_close(found.loss, expected.loss, rtol=rtol, atol=atol)
    assert torch.equal(found.label_mask, expected.label_mask)
    of_padded, of_packed = differentiated(padded, expected), differentiated(packed, found)
    assert of_padded.keys() == of_packed.keys()
    size = max(g.abs().max() for g in of_padded.values())
    for name, gradient in of_padded.items():
        torch.testing.assert_close(of_packed[name], gradient, rtol=1e-4, atol=1e-6 * size.item(), msg=name)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_log_probs_entropies_and_gradients(family):
    padded, packed = both(families.language_model(family))
    counter = TokenCounter(packed)
    batch = families.batch()
    assert_same(padded, packed, batch)
    # One pass; less than what is real, since prefixes of 8, 10 and 23 tokens are computed once.
    assert (counter.passes, counter.tokens) == (1, families.without_last(batch["attention_mask"]) - 8 - 10 - 23 + 8)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_padding_on_the_left_changes_nothing(family):
    """Rows are what they are alone: GPT-2's own padded pass counts positions from the padding."""
    padded, packed = both(families.language_model(family))
    found, shifted = outputs(packed, families.batch()), outputs(packed, families.batch("left"))
    for length, one, other in zip(families.LENGTHS, found.log_probs, shifted.log_probs, strict=True):
        torch.testing.assert_close(one[: length - 1], other[len(other) - length + 1 :], rtol=0, atol=1e-5)
    if family != "gpt2":
        # The label of a first token would be predicted from padding.
        assert_same(padded, packed, families.batch("left"), rows=[0, 1, 2, 3, 4, 6])


def test_gpt2_in_double_precision():
    """Hidden states, since TRL's head and rotary models compute in float32 whatever they are given."""
    padded, packed = both(families.language_model("gpt2").double())
    batch = families.batch()
    mask = batch["attention_mask"]
    expected = padded.transformer(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    row = flat_row(batch["input_ids"], mask, share=True, drop_last=False)
    found = probe.hidden_states(packed.transformer, row)[0, row.places[mask.bool()]]
    torch.testing.assert_close(found, expected[mask.bool()], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_positions_matter(family, monkeypatch):
    """The comparison sees rows that do not begin at 0."""
    padded, packed = both(families.language_model(family))
    own = models.inputs_of

    def shifted(row, mask=None):
        given = own(row, mask)
        return given | {"position_ids": torch.arange(given["position_ids"].shape[1])[None] % 60}

    monkeypatch.setattr(models, "inputs_of", shifted)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(padded, packed, families.batch())


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "qwen2"])
def test_windows_matter(family):
    """Rows are longer than the window: without it they are others."""
    padded, packed = both(families.language_model(family))
    for module in packed.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = None
    packed.config.sliding_window = None
    with pytest.raises(AssertionError, match="not close"):
        assert_same(padded, packed, families.batch())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_gradient_checkpointing(family, reentrant, monkeypatch):
    padded, packed = both(families.language_model(family))
    for model in (padded, packed):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    calls = Mock(side_effect=attention.segment_attention)
    monkeypatch.setattr(attention, "segment_attention", calls)
    assert_same(padded, packed, families.batch())
    assert calls.call_count == 6  # in each of three layers, and again in the backward pass


@pytest.mark.parametrize("count", [1, 2])
def test_few_rows_and_equal_ones(count):
    padded, packed = both(families.language_model("llama"))
    one = {name: tensor[:1].repeat(count, 1) for name, tensor in families.batch().items()}
    assert_same(padded, packed, one)


def test_experts_are_balanced_over_all_real_tokens():
    padded, packed = both(families.language_model("qwen3_moe", router_aux_loss_coef=0.5))
    counter = TokenCounter(packed)
    batch = families.batch()
    expected, found = (
        outputs(padded, batch, output_router_logits=True),
        outputs(packed, batch, output_router_logits=True),
    )
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert counter.tokens == batch["attention_mask"].sum()  # nothing left out, nothing shared
    for model, output in ((padded, expected), (packed, found)):
        model.zero_grad()
        output.loss.backward()
    for (name, p), q in zip(padded.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_other_call_is_what_it_was(family, tmp_path):
    """Logits, generation and a gap in a mask, to the last bit; and nothing of it is saved."""
    padded, packed = both(families.language_model(family).eval())
    batch = families.batch("left")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(packed(**inputs).logits, padded(**inputs).logits)
    one, other = (m.generate(**inputs, max_new_tokens=4, do_sample=False) for m in (packed, padded))
    assert torch.equal(one, other)
    cache = DynamicCache(config=packed.config)
    assert torch.equal(packed(**inputs, cache=cache).logits, padded(**inputs).logits)
    gap = families.batch()
    gap["attention_mask"][:, 3] = 0
    assert torch.equal(outputs(packed, gap).log_probs, outputs(padded, gap).log_probs)
    packed.save_pretrained(tmp_path)
    assert not any("segments" in path.read_text() for path in Path(tmp_path).glob("*.json"))
    assert type(packed).from_pretrained(tmp_path).config._attn_implementation == padded.config._attn_implementation


def test_dropout_shares_nothing():
    """Rows with one prefix would have one draw."""
    _, packed = both(families.language_model("llama", attention_dropout=0.1).train())
    counter = TokenCounter(packed)
    batch = families.batch()
    outputs(packed, batch)
    assert counter.tokens == families.without_last(batch["attention_mask"])
    counter.tokens = 0
    outputs(packed.eval(), batch)
    assert counter.tokens < families.without_last(batch["attention_mask"])


# Adapters


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_lora(reentrant):
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    padded, packed = (get_peft_model(copy.deepcopy(families.language_model("qwen3")), config) for _ in range(2))
    packed.load_state_dict(padded.state_dict())
    for model in (padded, packed):
        add_fused_lm_head(model.get_base_model(), outputs=FIELDS)
        if reentrant is not None:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
    assert models.pack_language_model(packed) is None
    counter = TokenCounter(packed)
    batch = families.batch()
    assert_same(padded, packed, batch)
    assert counter.tokens < batch["attention_mask"].sum() * counter.passes
    with padded.disable_adapter(), packed.disable_adapter(), torch.no_grad():
        bare, other = outputs(padded, batch).log_probs, outputs(packed, batch).log_probs
    torch.testing.assert_close(other, bare, rtol=0, atol=1e-5)
    assert (bare - outputs(padded, batch).log_probs).abs().max() > 0.01


# Models that need padded rows


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lfm2", "layers of type conv"),
        ("qwen3_next", "layers of type linear_attention"),
        ("gpt_oss", "its attention is given s_aux"),
        ("bloom", "cannot be replaced"),
    ],
)
def test_families_that_are_refused(family, reason):
    model = families.language_model(family)
    add_fused_lm_head(model)
    before, forward = model.config._attn_implementation, model.forward
    assert reason in models.pack_language_model(model)
    assert model.config._attn_implementation == before
    assert model.forward == forward


def leaking(model):
    """The model, whose first layer hands each token a little of the one before it, as a convolution does."""
    model.base_model.layers[0].register_forward_hook(lambda module, args, out: out + 0.01 * out.roll(1, dims=1))
    return model


def test_the_trial_finds_a_leak_by_itself():
    model = families.language_model("llama")
    attention.use_segments(model)
    assert probe.failed_trial(model.base_model) is None
    assert "one row reaches another" in probe.failed_trial(leaking(model).base_model)


@pytest.mark.parametrize("family", families.OTHERS)
def test_the_trial_alone_refuses_the_others(family):
    model = families.language_model(family)
    if model._can_set_attn_implementation():
        attention.use_segments(model)
    assert probe.failed_trial(model.base_model)


def test_the_trial_finds_a_window_that_is_kept_from_it():
    model = families.language_model("mistral")
    attention.use_segments(model)
    layers, model.config.sliding_window = model.base_model.layers, 3
    assert probe.failed_trial(model.base_model) is None
    layers[0].self_attn.config = copy.copy(model.config)
    layers[0].self_attn.config.sliding_window = None
    assert "its layers attend within 3 tokens (2 layers), all tokens (1 layers)" in probe.failed_trial(
        model.base_model
    )


def test_the_trial_leaves_the_model_and_the_generators_alone():
    model = families.language_model("llama", attention_dropout=0.1).train()
    model.lm_head.eval()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    attention.use_segments(model)
    state = torch.get_rng_state()
    assert probe.failed_trial(model.base_model) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, module in model.named_modules() if not module.training] == ["lm_head"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, r"embedding \(dynamic\)"),
        ({"attn_implementation": "flex_attention"}, "implementation is flex_attention"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_settings_that_are_refused(settings, reason):
    model = families.language_model("llama", **settings)
    assert re.search(reason, refusal(model))


def test_models_that_read_images_are_left_alone():
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = text | {"image_size": 28, "patch_size": 14, "projection_dim": 32}
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=97, **text), vision_config=CLIPVisionConfig(**vision), image_token_index=96
    )
    model = LlavaForConditionalGeneration(config)
    add_fused_lm_head(model)
    before, forward = model.config._attn_implementation, model.forward
    for sharded in (False, True):
        assert models.pack_language_model(model, sharded) == "the model reads more than text"
    assert (model.config._attn_implementation, model.forward) == (before, forward)


def test_adapters_that_are_refused():
    model = get_peft_model(
        families.language_model("llama"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    assert "adapter 'default' (PROMPT_TUNING) may add tokens" in refusal(model)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    assert "aLoRA" in refusal(get_peft_model(families.language_model("llama"), config))
    assert refusal(torch.nn.Linear(1, 1)) == "Linear is not a model of transformers"


# Models whose weights are elsewhere: a small copy is tried


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_small_copy_shows_that_rows_stay_apart(family):
    """Of a model that could not be run: it has no weights, and would be far too large."""
    with torch.device("meta"):
        model = families.language_model(family, **LARGE.get(family, {"hidden_size": 4096, "num_attention_heads": 32}))
    add_fused_lm_head(model)
    state = torch.get_rng_state()
    assert models.pack_language_model(model, sharded=True) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation in attention.IMPLEMENTATIONS.values()
    assert models.packing_of(model.base_model).share


LARGE = {"gpt2": {"n_embd": 4096}}


@pytest.mark.parametrize("family", families.OTHERS)
def test_a_small_copy_refuses_the_others(family):
    assert failed_stand_in(families.language_model(family).base_model)


def patched(model):
    layer = model.base_model.layers[0]
    layer.forward = types.MethodType(
        lambda module, *args, **kwargs: type(module).forward(module, *args, **kwargs), layer
    )
    return model


def convolved(model):
    model.base_model.layers[0].mlp = torch.nn.Conv1d(32, 32, 3)
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (leaking, "its LlamaDecoderLayer was given another forward pass or a hook, by test_packed_models"),
        (patched, "its LlamaDecoderLayer was given another forward pass or a hook, by test_packed_models"),
        (convolved, "it has a Conv1d, which a small copy of it has not"),
    ],
)
def test_what_a_small_copy_does_not_show_is_refused(change, reason):
    model = change(families.language_model("llama"))
    add_fused_lm_head(model)
    before, forward = model.config._attn_implementation, model.forward
    assert models.pack_language_model(model, sharded=True) == reason
    assert model.config._attn_implementation == before
    assert model.forward == forward


def test_adapters_quantised_layers_and_checkpointing_are_like_the_small_copy():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = families.language_model("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    mlp = model.base_model.layers[1].mlp
    mlp.up_proj = bitsandbytes.nn.Linear4bit(32, 48, bias=False)
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    add_fused_lm_head(adapted.get_base_model())
    assert models.pack_language_model(adapted, sharded=True) is None


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_windows_matter_to_the_small_copy(family, monkeypatch):
    model = families.language_model(family, sliding_window=1000)
    own = attention.segment_attention

    def without_window(*args, sliding_window=None, **kwargs):
        kwargs["segments"].windows.append(sliding_window)
        answer = own(*args, sliding_window=None, **kwargs)
        kwargs["segments"].windows.pop()
        return answer

    monkeypatch.setattr(attention, "segment_attention", without_window)
    assert "its states differ from those of padded rows" in failed_stand_in(model.base_model)


# Classifiers


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2"])
def test_scores_and_gradients(family, side):
    padded = families.classifier(family)
    packed = copy.deepcopy(padded)
    assert models.pack_classifier(packed) is None
    counter = TokenCounter(packed)
    batch = families.batch(side if family != "gpt2" else "right")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected, found = padded(**inputs).logits, packed(**inputs, use_cache=False, margin=torch.ones(3)).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1
    assert counter.tokens < batch["attention_mask"].sum()
    for scores in (expected, found):
        (scores * torch.arange(1.0, len(scores) + 1)[:, None]).sum().backward()
    size = max(p.grad.abs().max().item() for p in padded.parameters())
    for (name, p), q in zip(padded.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6 * size, msg=name)


def test_a_classifier_with_a_trained_head():
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    padded, packed = (get_peft_model(families.classifier("llama"), config) for _ in range(2))
    packed.load_state_dict(padded.state_dict())
    assert models.pack_classifier(packed) is None
    batch = families.batch()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    counter = TokenCounter(packed)
    expected, found = padded(**inputs).logits, packed(**inputs).logits
    assert counter.tokens < batch["attention_mask"].sum()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for scores in (expected, found):
        (scores * torch.arange(1.0, len(scores) + 1)[:, None]).sum().backward()
    trained = {name: p for name, p in padded.named_parameters() if p.requires_grad}
    assert any("score" in name for name in trained)
    others = dict(packed.named_parameters())
    for name, p in trained.items():
        torch.testing.assert_close(others[name].grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_classifier_calls_that_need_padded_rows():
    padded = families.classifier("llama")
    packed = copy.deepcopy(padded)
    assert models.pack_classifier(packed) is None
    ids = families.batch()["input_ids"]
    assert torch.equal(packed(ids).logits, padded(ids).logits)
    labels = {"input_ids": ids, "attention_mask": ids != 0, "labels": torch.ones(len(ids), 1)}
    assert torch.equal(packed(**labels).loss, padded(**labels).loss)
    assert models.pack_classifier(families.language_model("llama")) == "LlamaForCausalLM has no head called `score`"
