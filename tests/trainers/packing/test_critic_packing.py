"""`padding_free` of `PPOTrainer`: the same values, gradients and steps on fewer tokens, for each form of critic."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from families import language_model
from ppo_oracle import FORMS, ROWS, make_trainer
from test_ppo_loss import assert_steps_by_hand
from token_counter import TokenCounter
from torch import Tensor

from trl_algos import ConfigError
from trl_algos.trainers import PPOTrainer
from trl_algos.trainers.window.rows import Batch

LENGTHS = [(4, 5), (6, 9), (6, 1), (6, 9), (1, 3)]
"""Tokens of prompt and completion; the second row and the fourth are equal, and the third begins like them."""


def rows(count: int = len(LENGTHS)) -> Batch:
    """Prompts padded on the left and completions on the right, of `count` rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 250, (len(LENGTHS), 15), generator=generator)
    ids[2, :6], ids[3] = ids[1, :6], ids[1]
    batch: Batch = {}
    for name, width, sizes, left in (
        ("prompt", 6, [p for p, _ in LENGTHS], True),
        ("completion", 9, [c for _, c in LENGTHS], False),
    ):
        places = torch.arange(width).flip(0) if left else torch.arange(width)
        mask = (places[None] < torch.tensor(sizes)[:, None]).long()
        own = ids[:, :6] if left else ids[:, 6:]
        batch[f"{name}_ids"], batch[f"{name}_mask"] = (own * mask)[:count], mask[:count]
    return batch


def whole(batch: Batch) -> dict[str, Tensor]:
    return {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
    }


def pair(name: str, folder: str, **settings: Any) -> list[PPOTrainer]:
    """Equal trainers, one on real tokens and one on padded rows."""
    return [make_trainer(name, folder, padding_free=free, **settings) for free in (True, False)]


def first_layer(trainer: PPOTrainer) -> TokenCounter:
    """Counts what the critic computes, and with it the policy where they share a trunk."""
    return TokenCounter(trainer.critic.trunk if trainer.critic_form == "separate" else trainer.model)


@pytest.mark.parametrize("case", ["rows", "one row", "gap", "apart"])
@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_of_padded_rows(name: str, case: str, model_folder: str) -> None:
    """Those after the last token included; a gap in the mask counts positions, so there rows stay padded."""
    apart = {"share_prompts": False} if case == "apart" else {}
    packed = make_trainer(name, model_folder, padding_free=True, **apart)
    padded = make_trainer(name, model_folder, padding_free=False)
    counters = [first_layer(trainer) for trainer in (packed, padded)]
    inputs = whole(rows(1 if case == "one row" else len(LENGTHS)))
    if case == "gap":
        inputs["attention_mask"][1, 8] = 0
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        found, expected = (trainer.model(**inputs, with_values="values") for trainer in (packed, padded))
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-6, atol=1e-6)
    assert expected[kept].std() > 0.05
    if case != "gap":
        assert found[~kept].abs().max() == 0
    # Rows 1 and 3 share 14 tokens of 15 and row 2 five of them; a prefix costs two more.
    tokens = {"rows": kept.sum() - 14 - 5, "apart": kept.sum(), "gap": kept.numel(), "one row": 9}[case]
    assert counters[0].tokens == tokens or (case == "rows" and counters[0].tokens <= kept.sum() - 14)
    assert counters[1].tokens == kept.numel()


@pytest.mark.parametrize(
    ("asked", "checkpointing"), [("both", None), ("both", True), ("both", False), ("values", True)]
)
@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_padded_rows(
    name: str, asked: str, checkpointing: bool | None, model_folder: str
) -> None:
    """Of log-probs and values, and of values alone; recomputed with `use_reentrant` true and false."""
    batch, gradients = rows(), []
    inputs, width = whole(batch), batch["completion_ids"].shape[1]
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :-width] = -100
    asks = {"labels": labels, "use_cache": False, "fused_lm_head": True} if asked == "both" else {}
    weights = torch.randn(batch["completion_ids"].shape, generator=torch.Generator().manual_seed(1))
    weights = weights * batch["completion_mask"]
    recomputing = {} if checkpointing is None else {"gradient_checkpointing": True}
    if checkpointing is not None:
        recomputing["gradient_checkpointing_kwargs"] = {"use_reentrant": checkpointing}
    for trainer in pair(name, model_folder, **recomputing):
        trainer.model.train()
        out = trainer.model(**inputs, **asks, with_values=asked)
        values = out[1] if asked == "both" else out
        loss = (values[:, -width - 1 : -1] * weights).sum()
        if asked == "both":
            loss = loss + (out[0].log_probs[:, -width:] * weights.flip(0)).sum()
        loss.backward()
        gradients.append({n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None})
    found, expected = gradients
    assert found.keys() == expected.keys()
    for weight, gradient in expected.items():
        torch.testing.assert_close(found[weight], gradient, rtol=1e-5, atol=1e-5, msg=weight)
    assert max(float(g.abs().max()) for g in expected.values()) > 0.1


BOOTSTRAPPED = {"bootstrap_truncated": True, "mask_truncated_completions": False}
RUNS: dict[str, dict[str, Any]] = {
    "two passes in parts": {"steps": 2, "split": (2, 4, 4)},
    "bootstrapped": BOOTSTRAPPED,
    "rows apart": {"share_prompts": False, "split": (4, 2, 2)},
    "recomputed": {"gradient_checkpointing": True, "steps": 2},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", FORMS)
def test_steps_are_those_by_hand(name: str, run: str, model_folder: str) -> None:
    """Tool tokens, an empty completion, one without a score and truncated ones among them."""
    trainer = assert_steps_by_hand(name, model_folder, padding_free=True, **RUNS[run])
    assert trainer.packs
    assert trainer.critic.packs


@pytest.mark.parametrize("name", ["adapter", "separate", "shared_trunk"])
def test_a_step_of_the_critic_alone(name: str, model_folder: str) -> None:
    """Warm-up, then a step of both and one of the critic alone."""
    settings = {"critic_warmup_steps": 1, "max_steps": 4, "num_iterations": 1, "critic_num_iterations": 2}
    packed, padded = pair(name, model_folder, **settings)
    for trainer in (packed, padded):
        trainer.train()
    expected = dict(padded.model.named_parameters())
    for weight, found in packed.model.named_parameters():
        torch.testing.assert_close(found, expected[weight], rtol=0, atol=1e-6, msg=weight)
    told, other = ([log["value/loss"] for log in t.state.log_history if "value/loss" in log] for t in (packed, padded))
    assert len(told) == 4
    assert told == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_fewer_tokens_in_as_many_passes(name: str, model_folder: str) -> None:
    counted = []
    for trainer in pair(name, model_folder, split=(4, 2, 2)):
        counted.append(first_layer(trainer))
        trainer.train()
    packed, padded = counted
    assert packed.passes == padded.passes
    assert packed.tokens < 0.6 * padded.tokens


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("iterations", [1, 2])
def test_a_shared_critic_values_in_the_pass_for_log_probs(free: bool, iterations: int, model_folder: str) -> None:
    """One pass of the policy at sampling where the KL in the reward needs log-probs, with and without bootstrap."""
    for extra in ({}, BOOTSTRAPPED):
        steps = {"num_iterations": iterations, "max_steps": iterations}
        trainer = make_trainer("shared", model_folder, padding_free=free, **steps, **extra)
        counter = first_layer(trainer)
        trainer.train()
        assert counter.passes == 1 + iterations


@pytest.mark.parametrize("free", [True, False])
def test_what_is_scored_at_sampling_is_what_two_passes_give(
    free: bool, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old log-probs, values and the bootstrap, in several parts."""
    kept: list[dict[str, Any]] = []
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(PPOTrainer, "scores_with_values", False)
        settings = {"num_iterations": 2, "split": (2, 4, 4), **BOOTSTRAPPED}
        trainer = make_trainer("shared", model_folder, padding_free=free, **settings)
        collect = trainer._collect

        def keep(inputs: Any, output: Any, collect: Any = collect) -> Any:
            rollout = collect(inputs, output)
            kept.append({name: output[name].clone() for name in ("old_values", "old_per_token_logps")})
            kept[-1] |= {"mask": output["completion_mask"].bool(), "bootstrap": rollout.bootstrap}
            return rollout

        trainer._collect = keep
        trainer.train()
    one, two = kept
    for name in ("old_values", "old_per_token_logps"):
        torch.testing.assert_close(one[name][one["mask"]], two[name][one["mask"]], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one["bootstrap"], two["bootstrap"], rtol=1e-6, atol=1e-6)
    assert one["bootstrap"].abs().max() > 1e-3
    assert int(one["mask"].sum()) == sum(max(len(ids), 1) for ids in ROWS)


def another_critic(folder: Path, family: str) -> dict[str, Any]:
    language_model(family, vocab_size=258).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return {"critic_model_name_or_path": str(folder)}


def test_a_critic_that_needs_padded_rows(model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unset, the policy alone computes real tokens, which the log says; true, it is refused."""
    critic = another_critic(tmp_path, "lfm2")
    trainer = make_trainer("separate", model_folder, padding_free=None, **critic)
    assert trainer.packs
    assert not trainer.critic.packs
    assert not trainer.packs_training
    assert "`critic` runs on padded rows, because it has layers of type conv" in caplog.text
    trainer.train()
    padded = make_trainer("separate", model_folder, padding_free=False, **critic)
    padded.train()
    expected = dict(padded.model.named_parameters())
    for weight, found in trainer.model.named_parameters():
        torch.testing.assert_close(found, expected[weight], rtol=0, atol=1e-5, msg=weight)
    with pytest.raises(ConfigError, match="`padding_free`: True, but `critic` runs on padded rows, because it has"):
        make_trainer("separate", model_folder, padding_free=True, **critic)


@pytest.mark.parametrize("name", FORMS)
def test_real_tokens_alone_are_computed_unless_told(name: str, model_folder: str) -> None:
    trainer = make_trainer(name, model_folder)
    assert trainer.args.padding_free is None
    assert trainer.packs
    assert trainer.critic.packs


def test_a_critic_of_another_family(model_folder: str, tmp_path: Path) -> None:
    critic = another_critic(tmp_path, "qwen3")
    values, kept = [], whole(rows())["attention_mask"].bool()
    for trainer in pair("separate", model_folder, **critic):
        with torch.no_grad():
            values.append(trainer.model(**whole(rows()), with_values="values")[kept])
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["adapter", "separate", "shared"])
def test_beside_a_pass_for_logits_which_is_padded(name: str, model_folder: str) -> None:
    values, kept = [], whole(rows())["attention_mask"].bool()
    for trainer in pair(name, model_folder):
        with torch.no_grad():
            outputs, found = trainer.model(**whole(rows()), use_cache=False, with_values="both")
        assert outputs.logits.shape == (*found.shape, 258)
        values.append(found[kept])
    torch.testing.assert_close(*values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", ["adapter", "shared_lora"])
def test_on_a_quantised_base(name: str, checkpointing: bool, model_folder: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from test_ppo_quantised import quantised

    values, inputs = [], whole(rows())
    for free in (True, False):
        trainer = quantised(name, model_folder, tmp_path, padding_free=free, gradient_checkpointing=checkpointing)
        assert trainer.critic.packs == free
        trainer.model.train()
        with torch.no_grad():
            values.append(trainer.model(**inputs, with_values="values")[inputs["attention_mask"].bool()])
        if free:
            trainer.train()
            assert all(log["value/grad_norm"] > 0 for log in trainer.state.log_history if "loss" in log)
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)


def test_the_critic_in_files_says_nothing_of_it(model_folder: str, tmp_path: Path) -> None:
    trainer = make_trainer("separate", model_folder, padding_free=True)
    assert trainer.critic.trunk.config._attn_implementation == "trl_algos_segments"
    trainer.save_model(str(tmp_path))
    assert not [file for file in tmp_path.rglob("*.json") if "trl_algos_segments" in file.read_text()]
