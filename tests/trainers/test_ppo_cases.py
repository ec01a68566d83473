"""Faults that users of such trainers met in public, where they touch a critic; and VAPO's numbers by hand."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig
from ppo_oracle import FORMS, ROWS, Oracle, critic_state, make_trainer
from test_ppo_state import sampling_trainer, states

from trl_algos import load_critic
from trl_algos.config import PolicyConfig
from trl_algos.core import length_adaptive_lambda
from trl_algos.trainers import PPOTrainer
from trl_algos.trainers.critic.scoring import sampling_values
from trl_algos.trainers.rollout import Rollout


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("form", ["adapter", "separate", "shared"])
def test_lgp_2_dropout_does_not_touch_the_first_values(form: str, lora: bool, tmp_path: Path) -> None:
    """GPT-2 with all dropouts 0.1 and LoRA dropout 0.5, learning rate 0: the values of sampling, twice."""
    if form == "adapter" and not lora:
        pytest.skip("an adapter needs LoRA")
    tiny.gpt2(dropout=0.1).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    peft_config = LoraConfig(r=4, lora_dropout=0.5, target_modules=["c_attn"], init_lora_weights=False)
    trainer = PPOTrainer(
        str(tmp_path),
        lambda completions, completion_ids, **_: [sum(ids) % 5 / 4 for ids in completion_ids],
        PolicyConfig(
            output_dir=str(tmp_path / "run"),
            algorithm="ppo",
            critic=form,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=4,
            max_completion_length=6,
            num_iterations=2,
            max_steps=2,
            learning_rate=0.0,
            value_clip_range=1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=tiny.prompts(8),
        peft_config=peft_config if lora else None,
    )
    differences = []
    value_loss = trainer._value_loss

    def watched(values: torch.Tensor, inputs: dict[str, Any]) -> Any:
        mask = inputs["completion_mask"].bool()
        differences.append((values - inputs["old_values"])[mask].abs().max().item())
        return value_loss(values, inputs)

    trainer._value_loss = watched
    trainer.train()
    assert len(differences) == 2
    assert max(differences) < 1e-5
    assert trainer.model.training
    for log in trainer.state.log_history[:2]:
        assert log["value/clip_fraction"] == 0.0
        assert log["policy/ratio/max"] == pytest.approx(1.0, abs=1e-5)
    ids = torch.tensor([[5, 6, 7]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "with_values": "values"}
    assert trainer.model(**inputs).equal(trainer.model(**inputs))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["adapter", "separate_lora", "shared_lora"])
def test_lor_4_gradient_checkpointing_trains_every_adapter_of_policy_and_critic(
    name: str, use_reentrant: bool, model_folder: str, tmp_path: Path
) -> None:
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    trainer = sampling_trainer(name, model_folder, tmp_path, max_steps=2, **settings)
    adapters = {n: p for n, p in trainer.model.named_parameters() if "lora_B" in n}
    assert len(adapters) == (4 if name == "shared_lora" else 8)  # two layers with two each
    assert all(p.count_nonzero() == 0 for p in adapters.values())
    trainer.train()
    assert all(p.abs().max() > 0 for p in adapters.values())


@pytest.mark.parametrize("name", FORMS)
def test_lor_1_the_value_head_is_trained_saved_and_loaded_though_nobody_names_it(
    name: str, model_folder: str, tmp_path: Path
) -> None:
    trainer = sampling_trainer(name, model_folder, tmp_path, max_steps=2)
    start = critic_state(trainer)
    trainer.train()
    trainer.save_model(str(tmp_path))
    torch.manual_seed(99)
    loaded = load_critic(tmp_path / "critic")
    assert not loaded.head.weight.equal(start["head.weight"])
    assert not loaded.head.bias.equal(start["head.bias"])
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "with_values": "values"}
        torch.testing.assert_close(loaded(ids), trainer.model(**inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["adapter", "separate", "shared"])
def test_rmp_2_values_lie_at_the_same_tokens_whatever_the_padding(name: str, model_folder: str) -> None:
    """Prompts are padded on the left, completions on the right: alone, and in batches, a row has the same values."""
    trainer = make_trainer(name, model_folder)
    prompts = [[5, 6, 7, 8, 9], [70], [20, 21, 22]]
    completions = [[30, 31], [40, 41, 42, 43, tiny.EOS], [50]]

    def batch(rows: list[int], prompt_width: int, width: int) -> dict[str, Any]:
        pads = [prompt_width - len(prompts[i]) for i in rows], [width - len(completions[i]) for i in rows]
        return {
            "prompt_ids": torch.tensor([[tiny.PAD] * p + prompts[i] for i, p in zip(rows, pads[0], strict=True)]),
            "prompt_mask": torch.tensor([[0] * p + [1] * len(prompts[i]) for i, p in zip(rows, pads[0], strict=True)]),
            "completion_ids": torch.tensor(
                [completions[i] + [tiny.PAD] * p for i, p in zip(rows, pads[1], strict=True)]
            ),
            "completion_mask": torch.tensor(
                [[1] * len(completions[i]) + [0] * p for i, p in zip(rows, pads[1], strict=True)]
            ),
        }

    values, last = sampling_values(trainer, batch([0, 1, 2], 7, 8))
    for i, completion in enumerate(completions):
        alone, last_alone = sampling_values(trainer, batch([i], len(prompts[i]), len(completion)))
        right, right_last = sampling_values(trainer, batch([i], len(prompts[i]), 9))
        ids = torch.tensor([prompts[i] + completion])
        with torch.no_grad():
            every = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), with_values="values")[0]
        expected, n = every[len(prompts[i]) - 1 :], len(completion)
        for found, found_last in ((values[i], last[i]), (alone[0], last_alone[0]), (right[0], right_last[0])):
            torch.testing.assert_close(found[:n], expected[:-1], rtol=0, atol=1e-5)
            torch.testing.assert_close(found_last, expected[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["adapter", "separate", "shared_trunk"])
def test_evl_1_evaluation_between_steps_trains_no_critic(name: str, model_folder: str) -> None:
    """With a group size of its own, between the passes over one generation batch, momentum and decay on."""
    ends, logs = [], []
    adam = {"optim": "adamw_torch", "weight_decay": 0.5, "learning_rate": 0.01, "critic_learning_rate": 0.02}
    for evaluates in (False, True):
        every = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2} if evaluates else {}
        passes = {"num_iterations": 2, "critic_num_iterations": 3, "max_steps": 4, "kl_controller": "adaptive"}
        batch = {"per_device_eval_batch_size": 4, "eval_dataset": tiny.prompts(2)}
        trainer = make_trainer(name, model_folder, **passes, **adam, **every, **batch)
        trainer.train()
        ends.append((states(trainer), trainer.optimizer.state_dict()["state"]))
        evaluations = [log["eval_value/loss"] for log in trainer.state.log_history if "eval_value/loss" in log]
        assert len(evaluations) == (4 if evaluates else 0)
        logs.append([log["value/loss"] for log in trainer.state.log_history if "value/loss" in log])
    assert logs[0] == pytest.approx(logs[1], rel=1e-6)
    assert len(logs[0]) == 4
    # Evaluation draws random numbers, with which rows are shuffled: sums differ in last bits, blown up by Adam.
    for key, value in ends[0][0].items():
        torch.testing.assert_close(value, ends[1][0][key], rtol=0, atol=1e-6)
    for slot, state in ends[0][1].items():
        for key, value in state.items():
            torch.testing.assert_close(value, ends[1][1][slot][key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("split", [(8, 1, 1), (2, 4, 4), (1, 8, 8), (2, 4, 2)])
def test_agg_3_the_losses_of_the_critic_are_divided_by_the_tokens_of_the_step_once(
    split: tuple[int, int, int], model_folder: str
) -> None:
    """Means over the tokens of the whole step, however it is accumulated: value loss, and likelihood of right rows."""
    trainer = make_trainer("separate", model_folder, split, positive_nll_coef=0.3, max_steps=1)
    parts: list[tuple[float, int, float, int]] = []
    extra_losses = trainer.extra_losses

    def watched(scores: Any, inputs: dict[str, Any], mask: torch.Tensor) -> Any:
        learned = mask.bool() & ~inputs["returns"].isnan()
        positive = learned & inputs["positive"].bool()[:, None]
        error = 0.5 * (scores.values.detach() - inputs["returns"])[learned] ** 2
        nll = -scores.logps.detach()[positive]
        parts.append((error.sum().item(), int(learned.sum()), nll.sum().item(), int(positive.sum())))
        return extra_losses(scores, inputs, mask)

    trainer.extra_losses = watched
    trainer.train()
    errors, tokens, nlls, right = (sum(column) for column in zip(*parts, strict=True))
    scored = [ids for ids in ROWS if ids and ids[0] != 39]
    places = [len(ids) - (len(ids) > 3) for ids in scored]  # the second token of a longer one is a tool's
    assert tokens == sum(places)
    assert right == sum(n for ids, n in zip(scored, places, strict=True) if ids[0] > 40)
    log = trainer.state.log_history[0]
    assert log["value/loss"] == pytest.approx(errors / tokens, rel=1e-5)
    assert log["policy/positive_nll"] == pytest.approx(nlls / right, rel=1e-5)


# VAPO


def test_vapo_learns_returns_of_lambda_1_and_moves_by_lambda_of_the_length(model_folder: str) -> None:
    """By hand, gamma 1, alpha 0.5: lambda is 0 for two tokens and 0.5 for four; row 2 has no score."""
    trainer = make_trainer(
        "separate",
        model_folder,
        algorithm="vapo",
        beta=None,
        gamma=None,
        gae_lambda=None,
        critic_gae_lambda=None,
        length_adaptive_alpha=0.5,
        epsilon_high=None,
        num_generations=2,
        critic_warmup_steps=0,
    )
    assert trainer.args.critic_gae_lambda == trainer.args.gamma == 1.0
    lengths = torch.tensor([2, 4, 1])
    scores = torch.tensor([1.0, 0.0, math.nan])
    values = [[0.5, 9.0, 0.2, 9.0, 9.0], [0.4, 0.2, 0.1, 0.3, 9.0], [5.0, 9.0, 9.0, 9.0, 9.0]]
    rollout = Rollout(
        scores=scores,
        length_penalty=torch.zeros(3),
        scores_per_func=scores[:, None],
        groups=torch.tensor([0, 0, 1]),
        lengths=lengths,
        mask=torch.tensor([[1, 0, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]),  # the second of row 0 is a tool's
        values=torch.tensor(values),
    )
    targets = trainer.targets(rollout)
    learned = rollout.mask[:2].bool()
    assert targets["returns"][:2][learned].tolist() == pytest.approx([1, 1, 0, 0, 0, 0], abs=1e-6)
    assert targets["returns"][2].isnan().all()
    # Row 0: 0.2 - 0.5, 1 - 0.2. Row 1, from its end: -0.3, 0.2 - 0.15, -0.1 + 0.025, -0.2 - 0.0375.
    raw = [-0.3, 0.8, -0.2375, -0.075, 0.05, -0.3]
    scale = math.sqrt(statistics.variance(raw) + 1e-8)
    expected = [(a - statistics.fmean(raw)) / scale for a in raw]
    assert targets["advantages"][:2][learned].tolist() == pytest.approx(expected, abs=1e-5)
    assert targets["advantages"][2].count_nonzero() == 0
    assert targets["positive"].tolist() == [1.0, 0.0, 0.0]


def test_the_likelihood_is_that_of_completions_right_before_the_length_penalty(model_folder: str) -> None:
    """By hand, 1/10 off for each token beyond 2: the last row's 0.5 becomes -0.3 and counts, row 1's 0 does not."""
    trainer = make_trainer("separate", model_folder, positive_nll_coef=0.3, overlong_buffer=10)
    oracle, seen, made = Oracle(trainer, model_folder), [], trainer.targets

    def targets(rollout: Rollout) -> Any:
        seen.append((rollout, made(rollout)))
        return seen[-1][1]

    trainer.targets = targets
    trainer.train()
    ((rollout, found),) = seen
    scores = [1 - 0.4, 0 - 0.1, 1.75 - 0.6, math.nan, 1.0, 0.25 - 0.3, 2.0, 0.5 - 0.8]
    assert rollout.scores.tolist() == pytest.approx(scores, nan_ok=True)
    assert found["positive"].tolist() == [1, 0, 1, 0, 1, 1, 1, 1]
    right = [row for row, counts in zip(oracle.rows, found["positive"], strict=True) if counts]
    nll = [-row.old_logps[t] for row in right for t in row.places]
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    assert log["policy/positive_nll"] == pytest.approx(statistics.fmean(nll), rel=1e-6)


def test_the_papers_lambda_of_some_lengths() -> None:
    """Alpha 0.05: 0 up to 20 tokens, 0.5 at 40, 0.9 at 200, 0.98 at 1000."""
    found = length_adaptive_lambda(torch.tensor([1, 19, 20, 40, 200, 1000]), 0.05)
    assert found.tolist() == pytest.approx([0, 0, 0, 0.5, 0.9, 0.98], abs=1e-6)


def test_the_row_of_vapo_is_the_papers() -> None:
    args = PolicyConfig(output_dir="unused", algorithm="vapo", use_cpu=True, bf16=False, report_to="none")
    found = (args.epsilon, args.epsilon_high, args.gamma, args.critic_gae_lambda, args.length_adaptive_alpha)
    assert found == (0.2, 0.28, 1.0, 1.0, 0.05)
    assert (args.positive_nll_coef, args.critic_warmup_steps, args.aggregation) == (0.1, 50, "token_mean")
