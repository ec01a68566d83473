"""What a step learns: from carried groups with the log-probs of the policy that sampled them, from too few groups with
the exact divisor, and never from a rejected one, which no forward pass sees.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig
from scripted import TEACHES, Script, completion, script_of, tag
from torch import Tensor
from transformers import LlamaModel

LORA = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
CARRYING = script_of("wwwttttttttttttt")
"""The first step finds prompts 3 to 7, and trains on four of them; the second one begins with prompt 7."""


def logps_of(model: Any, prompt: int, number: int, reward: float | None) -> Tensor:
    """Log-probs of a written completion, from a pass of its own without padding."""
    prompt_ids, ids = tiny.tokenizer()(f"prompt {prompt}:")["input_ids"], completion(prompt, number, reward)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def copied(run: Script) -> Any:
    model = tiny.llama()
    model.load_state_dict(run.trainer.model.state_dict())
    return model


def with_snapshots(run: Script) -> dict[int, Any]:
    """Step -> the model as it was when the step was prepared; filled by the run."""
    models: dict[int, Any] = {}
    original = run.trainer._open_window

    def spy(batches: Any) -> None:
        models[run.trainer.state.global_step] = copied(run)
        original(batches)

    run.trainer._open_window = spy
    return models


@pytest.mark.parametrize(("wrong", "carried"), [(3, [7]), (2, [6, 7])])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_carried_group_keeps_the_log_probs_of_the_policy_that_sampled_it(
    checkpointing: bool, wrong: int, carried: list[int], tmp_path: Path
) -> None:
    rewards = script_of("w" * wrong + "t" * (16 - wrong))
    run = Script(rewards, tmp_path, gradient_checkpointing=checkpointing, learning_rate=0.5)
    models = with_snapshots(run)
    run.train()
    first, second = run.batches
    assert "old_per_token_logps" not in first
    assert sorted({tag(ids) for ids in second["completion_ids"]})[: len(carried)] == carried
    numbers: dict[int, int] = {}
    for row in second["rollout_row"].argsort().tolist():
        prompt = tag(second["completion_ids"][row])
        number = numbers[prompt] = numbers.get(prompt, -1) + 1
        length = len(completion(prompt, number, TEACHES[number]))
        kept = second["old_per_token_logps"][row]
        if prompt in carried:
            expected = logps_of(models[0], prompt, number, TEACHES[number])
            torch.testing.assert_close(kept[:length], expected, rtol=0, atol=2e-5)
            assert (expected - logps_of(models[1], prompt, number, TEACHES[number])).abs().max() > 1e-2
            assert kept[length:].tolist() == [0.0] * (len(kept) - length)
        else:
            assert kept.isnan().all()


def clipped(ratio: Tensor, advantage: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def test_the_loss_of_a_step_with_a_carried_group(tmp_path: Path) -> None:
    """Token by token: DAPO's clipped objective with ratios to the first policy at prompt 7, and to none elsewhere."""
    run = Script(CARRYING, tmp_path, learning_rate=0.5)
    models = with_snapshots(run)
    run.train()
    advantage, terms = 0.5 / (math.sqrt(0.5) + 1e-4), []
    clipped_tokens = 0
    for prompt in (7, 8, 9, 10):
        for number, reward in enumerate(TEACHES):
            new = logps_of(models[1], prompt, number, reward)
            old = logps_of(models[0], prompt, number, reward) if prompt == 7 else new
            ratio, sign = (new - old).exp(), 1 if number == 0 else -1
            terms.append(clipped(ratio, sign * advantage))
            clipped_tokens += int((terms[-1] + sign * advantage * ratio).abs().gt(1e-6).sum())
    expected = torch.cat(terms)
    assert run.logged("policy_loss")[1] == pytest.approx(expected.mean().item(), abs=1e-5)
    assert abs(run.logged("policy_loss")[1] - run.logged("policy_loss")[0]) > 5e-4
    share = run.logged("clip_ratio/low_mean")[1] + run.logged("clip_ratio/high_mean")[1]
    assert share == pytest.approx(clipped_tokens / len(expected), abs=1e-6)
    assert clipped_tokens > 0


def test_passes_over_old_data_have_old_log_probs_of_either_kind(tmp_path: Path) -> None:
    """Two passes: TRL asks the policy for the log-probs of all rows, and those of the carried group are put over."""
    run = Script(CARRYING, tmp_path, num_iterations=2, max_steps=4, learning_rate=0.5, reuse_first_pass=False)
    models = with_snapshots(run)
    run.train()
    assert [batch["step"].item() for batch in run.batches] == [0, 1, 2, 3]
    for batch in run.batches[2:]:
        for row in range(8):
            prompt, ids = tag(batch["completion_ids"][row]), batch["completion_ids"][row].tolist()
            number = next(
                n for n in (0, 1) if ids[: len(completion(prompt, n, TEACHES[n]))] == completion(prompt, n, TEACHES[n])
            )
            expected = logps_of(models[0 if prompt == 7 else 2], prompt, number, TEACHES[number])
            kept = batch["old_per_token_logps"][row, : len(expected)]
            torch.testing.assert_close(kept, expected, rtol=0, atol=2e-5)


def test_kl_in_the_reward_of_a_carried_group_is_that_of_the_policy_that_sampled_it(
    tmp_path: Path, model_folder: str
) -> None:
    settings = {"kl_placement": "reward", "beta": 0.1, "learning_rate": 0.5}
    run = Script(CARRYING, tmp_path, trainer={"model": model_folder}, **settings)
    models = with_snapshots(run)
    run.train()
    reference, old = models[0], {7: models[0]}  # the policy starts as its reference
    terms = [
        logps_of(old.get(prompt, models[1]), prompt, number, reward) - logps_of(reference, prompt, number, reward)
        for prompt in (7, 8, 9, 10)
        for number, reward in enumerate(TEACHES)
    ]
    assert run.logged("kl")[0] == pytest.approx(0.0, abs=1e-5)
    assert run.logged("kl")[1] == pytest.approx(torch.cat(terms).mean().item(), abs=1e-5)
    assert abs(run.logged("kl")[1]) > 1e-3


def test_a_critic_in_an_adapter_stays_out_of_the_log_probs(tmp_path: Path, model_folder: str) -> None:
    settings = {
        "algorithm": "vapo",
        "critic": "adapter",
        "critic_warmup_steps": 0,
        "critic_learning_rate": 0.5,
        "learning_rate": 0.5,
    }
    run = Script(CARRYING, tmp_path, trainer={"model": model_folder, "peft_config": LORA}, **settings)
    expected: list[Tensor] = []
    original = run.trainer._open_window

    def spy(batches: Any) -> None:
        model = run.trainer.model
        if not expected:
            with torch.no_grad():
                expected.extend(logps_of(model, 7, number, reward) for number, reward in enumerate(TEACHES))
        original(batches)

    run.trainer._open_window = spy
    run.train()
    (second,) = run.batches[1:]
    rows = [row for row in second["rollout_row"].argsort().tolist() if tag(second["completion_ids"][row]) == 7]
    assert len(rows) == 2
    for row, logps in zip(rows, expected, strict=True):
        torch.testing.assert_close(second["old_per_token_logps"][row, : len(logps)], logps, rtol=0, atol=2e-5)


# Too few groups

ALGORITHMS = {
    "dapo": {},
    "grpo": {"beta": 0.0},
    "dr_grpo": {},
    "gspo": {},
    "rloo": {"beta": 0.0},
    "gpg": {},
    "opo": {},
    "reinforce_pp": {"beta": 0.0},
    "reinforce_pp_baseline": {"beta": 0.0},
    "remax": {"beta": 0.0},
    "ppo": {"beta": 0.0, "critic": "separate", "critic_learning_rate": 0.1},
    "vapo": {"critic": "separate", "critic_learning_rate": 0.1, "critic_warmup_steps": 0},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_too_few_groups_train_as_if_they_were_all(algorithm: str, tmp_path: Path, model_folder: str) -> None:
    """Prompts 1 and 4 in a batch of four groups, against the two of them in a batch of their own."""
    rewards = script_of("wtwwtwww")
    settings = {"algorithm": algorithm, "max_steps": 1, "num_generations": 2, **ALGORITHMS[algorithm]}
    model = {"model": model_folder}
    run = Script(rewards, tmp_path, dynamic_sampling_max_rounds=2, trainer=model, **settings).train()
    assert run.trained == [[1, 1, 4, 4]]
    two = {"trainer": model | {"train_dataset": tiny.prompts(8).select([1, 4])}, "per_device_train_batch_size": 4}
    plain = Script(rewards, tmp_path, dynamic_sampling=False, **settings, **two)
    start = plain.weights
    plain.train()
    assert plain.trained == [[1, 1, 4, 4]]
    assert max((value - start[name]).abs().max().item() for name, value in plain.weights.items()) > 1e-3
    for name, value in run.weights.items():
        torch.testing.assert_close(value, plain.weights[name], rtol=0, atol=2e-6, msg=lambda m, n=name: n + m)
    for name in ("policy_loss", "reward", "policy/learned_tokens", "policy/advantage_std", "entropy"):
        assert run.logged(name) == pytest.approx(plain.logged(name), abs=1e-5), name


def test_steps_without_anything_to_learn_move_nothing(tmp_path: Path) -> None:
    """One group for a batch that is split into four steps: those steps that have none of its rows leave Adam alone."""
    settings = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 1}
    adam = {"optim": "adamw_torch", "weight_decay": 0.1}
    run = Script(script_of("twww"), tmp_path, dynamic_sampling_max_rounds=1, max_steps=4, **settings, **adam)
    models = with_snapshots(run)
    run.train()
    models[4] = copied(run)
    empty = [not rows for rows in run.trained]
    assert sum(map(len, run.trained)) == 2
    for step, is_empty in enumerate(empty):
        before, after = models[step].state_dict(), models[step + 1].state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before) == is_empty
    assert any(empty)


# Rejected groups

PASSES = {
    "old and current": {"num_iterations": 2},
    "reference": {"algorithm": "grpo", "beta": 0.1, "trainer": {"model": "folder"}},
    "KL in the reward": {"kl_placement": "reward", "beta": 0.1, "trainer": {"model": "folder"}},
    "critic of its own": {"algorithm": "ppo", "beta": 0.0, "critic": "separate", "trainer": {"model": "folder"}},
    "shared critic": {"algorithm": "vapo", "critic": "shared", "critic_warmup_steps": 0},
    "critic in an adapter": {
        "algorithm": "vapo",
        "critic": "adapter",
        "critic_warmup_steps": 0,
        "trainer": {"peft_config": LORA},
    },
}


@pytest.mark.parametrize("case", PASSES)
def test_no_forward_pass_sees_a_rejected_completion(case: str, tmp_path: Path, model_folder: str) -> None:
    """Rows of every pass of every model, told by the tokens that name a prompt: kept ones, or blank."""
    settings = copy.deepcopy(PASSES[case])
    if settings.get("trainer"):
        settings["trainer"]["model"] = model_folder
    run = Script(script_of("wtwtttrtwttttttt"), tmp_path, **settings)
    seen: list[int] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        if isinstance(module, LlamaModel):
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            assert ids.dim() == 2
            for row in ids.tolist():
                seen.extend([token - 100 for token in row if 100 <= token < 116][:1] or [-1])

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in models_of(run)]
    run.train()
    for handle in handles:
        handle.remove()
    rejected = {place for place, letter in enumerate("wtwtttrtwttttttt") if letter != "t"}
    assert {place for asked in run.rounds for place in asked} & rejected
    assert seen
    assert not set(seen) & rejected
    assert -1 not in seen


def models_of(run: Script) -> list[Any]:
    """Every trunk that the trainer holds."""
    trainer = run.trainer
    holders = [trainer.model, trainer.ref_model, getattr(getattr(trainer, "critic", None), "module", None)]
    found = [m for holder in holders if holder is not None for m in holder.modules() if isinstance(m, LlamaModel)]
    return list({id(module): module for module in found}.values())
