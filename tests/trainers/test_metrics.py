"""What is logged, against loops over the rows of an optimizer step that was split into unequal micro-batches."""

import math
import statistics
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_algos.config import PolicyConfig
from trl_algos.trainers import PolicyTrainer
from trl_algos.trainers.sampling.verdicts import CAUSES

DURATIONS = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
DURATIONS |= {"sampling/generation_seconds", "sampling/uninformative_seconds"}
"""Logged durations."""


# prompt -> (reward, tokens, ends with the end token) of its two completions
ROWS: dict[str, list[tuple[float | None, int, bool]]] = {
    "prompt 0:": [(1.0, 9, True), (0.0, 1, True)],
    "prompt 1:": [(0.5, 12, True), (None, 4, True)],
    "prompt 2:": [(0.5, 3, True), (0.5, 7, False)],
    "prompt 3:": [(0.0, 14, True), (1.0, 10, False)],
    "prompt 4:": [(1.0, 5, True), (0.5, 8, True)],
}
FIRST_TOKEN = {1.0: 40, 0.0: 41, 0.5: 42, None: 43}
COMPLETIONS = {
    prompt: [
        [FIRST_TOKEN[reward], *(60 + (17 * i + 7 * j * j + length) % 150 for j in range(length - 1))][: length - ends]
        + [tiny.EOS] * ends
        for i, (reward, length, ends) in enumerate(rows)
    ]
    for prompt, rows in ROWS.items()
}
COMPLETIONS["prompt 0:"][1] = [FIRST_TOKEN[0.0], tiny.EOS]  # its reward stands in the first token, so 2 tokens
GENERATED = 9 + 2 + 12 + 4 + 3 + 7 + 14 + 10 + 5 + 8 - 8
"""Tokens sampled: all but the hole that `env_mask` leaves in the 8 completions of more than 3 tokens."""
LEARNED = GENERATED - 6 - 9
"""Tokens trained on: without the two truncated completions."""


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    by_token = {token: value for value, token in FIRST_TOKEN.items()}
    return [by_token[ids[0]] for ids in completion_ids]


class Recording(PolicyTrainer):
    """Keeps the inputs and scores of every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorded: list[dict[str, Any]] = []

    def score(self, model: Any, inputs: dict[str, Any], batch_size: int | None = None) -> Any:
        scores = super().score(model, inputs, batch_size)
        if batch_size is None:
            self.recorded.append(inputs | {"logps": scores.logps.detach(), "entropies": scores.entropies.detach()})
        return scores


def common_settings(model_folder: str) -> dict[str, Any]:
    return {
        "output_dir": f"{model_folder}/unused",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 5,
        "num_generations": 2,
        "max_completion_length": 16,
        "mask_truncated_completions": True,
        "max_steps": 1,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }


def trained(trainer_class: type[GRPOTrainer], model_folder: str, model: Any = None, **settings: Any) -> Any:
    """A trainer of ours or of TRL, after its run."""
    config = GRPOConfig if trainer_class is GRPOTrainer else PolicyConfig
    if trainer_class is Recording:  # all rows, in the micro-batches of two that TRL makes
        settings = {"regroup_micro_batches": False, "skip_idle_rows": False} | settings
    policy = model or tiny.llama()
    policy.config._name_or_path = model_folder  # where TRL takes the reference from
    made = trainer_class(
        policy,
        reward,
        config(**common_settings(model_folder) | settings),
        train_dataset=tiny.prompts(10 // settings.get("num_generations", 2)),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout(
            COMPLETIONS | {f"prompt {i}:": [[40, 50, tiny.EOS]] for i in range(5, 10)}, True
        ),
    )
    made.train()
    return made


def tokens_of(batches: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Row -> its trained tokens, with everything a metric needs; rows without any are left out."""
    rows = []
    for batch in batches:
        mask = batch["completion_mask"] * batch["tool_mask"]
        for i in range(len(mask)):
            tokens = [
                {
                    "A": float(
                        batch["advantages"][i] if batch["advantages"].dim() == 1 else batch["advantages"][i, t]
                    ),
                    "log_ratio": float(batch["logps"][i, t] - batch.get("old_per_token_logps", batch["logps"])[i, t]),
                    "ref": float(batch["logps"][i, t] - batch["ref_per_token_logps"][i, t]),
                    "entropy": float(batch["entropies"][i, t]),
                }
                for t in range(mask.shape[1])
                if mask[i, t]
            ]
            rows += [tokens] if tokens else []
    return rows


def share(flags: Any) -> float:
    flags = list(flags)
    return sum(flags) / len(flags)


OBJECTIVES = {
    "grpo": {"algorithm": "grpo", "epsilon": 0.02, "epsilon_high": 0.03},
    "dual_clip": {"algorithm": "grpo", "epsilon": 0.02, "epsilon_high": 0.03, "delta": 1.02},
    "gspo": {"algorithm": "gspo", "epsilon": 0.002, "epsilon_high": 0.003, "kl_placement": "loss", "beta": 0.04},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_metrics_of_an_off_policy_step_over_unequal_micro_batches(name: str, model_folder: str) -> None:
    """Second pass over a generation batch: ratios differ from 1, five micro-batches of two rows each."""
    made = trained(Recording, model_folder, num_iterations=2, max_steps=2, **OBJECTIVES[name])
    logged = made.state.log_history[1]
    batches = made.recorded[5:]
    sizes = [int((batch["completion_mask"] * batch["tool_mask"]).sum()) for batch in batches]
    assert len(sizes) == 5
    assert len(set(sizes)) > 1
    rows = tokens_of(batches)
    if name == "gspo":
        for row in rows:
            mean = statistics.fmean(token["log_ratio"] for token in row)
            for token in row:
                token["level"] = math.exp(mean)
    tokens = [token for row in rows for token in row]
    low, high, delta = made.args.epsilon, made.args.epsilon_high, made.args.delta or math.inf
    for token in tokens:
        r = token.setdefault("level", math.exp(token["log_ratio"]))
        token["low"] = token["A"] < 0 and r < 1 - low
        token["high"] = token["A"] > 0 and r > 1 + high
        token["dual"] = token["A"] < 0 and r > delta
        token["gated"] = token["low"] or token["high"] or token["dual"]
        objective = min(r * token["A"], min(max(r, 1 - low), 1 + high) * token["A"])
        token["loss"] = -max(objective, delta * token["A"]) if token["A"] < 0 else -objective
        token["k3"] = math.exp(-token["ref"]) + token["ref"] - 1
    # GSPO decides once for a row, so its shares count rows.
    judged = [row[0] for row in rows] if name == "gspo" else tokens
    open_rows = [row for row in rows if not all(token["gated"] for token in row)]
    policy_loss = statistics.fmean(statistics.fmean(token["loss"] for token in row) for row in rows)
    row_kl = statistics.fmean(statistics.fmean(token["k3"] for token in row) for row in rows)
    ratios = [math.exp(token["log_ratio"]) for token in tokens]
    expected = {
        "entropy": statistics.fmean(token["entropy"] for token in tokens),
        "kl": statistics.fmean(token["k3"] for token in tokens),
        "policy/kl_coef": 0.04,
        "policy_loss": policy_loss,
        "loss": policy_loss + 0.04 * row_kl,
        "policy/learned_tokens": LEARNED,
        "clip_ratio/low_mean": share(token["low"] for token in judged),
        "clip_ratio/high_mean": share(token["high"] for token in judged),
        "clip_ratio/region_mean": share(token["low"] or token["high"] for token in judged),
        "clip_ratio/dual_mean": share(token["dual"] for token in judged),
        "clip_ratio/low_min": min(share(token["low"] for token in row) for row in rows),
        "clip_ratio/high_max": max(share(token["high"] for token in row) for row in rows),
        "policy/approx_kl": statistics.fmean(
            math.exp(token["log_ratio"]) - 1 - token["log_ratio"] for token in tokens
        ),
        "policy/effective_tokens": share(not token["gated"] and token["A"] != 0 for token in tokens),
        "policy/effective_sequences": share(any(not t["gated"] and t["A"] != 0 for t in row) for row in rows),
        "policy/gated_sequences": share(row not in open_rows for row in rows),
        "policy/gated_tokens": sum(token["gated"] for row in open_rows for token in row) / len(tokens),
        **{f"policy/ratio/p{p:02}": float(np.quantile(ratios, p / 100)) for p in (1, 50, 99)},
        "policy/ratio/min": min(ratios),
        "policy/ratio/max": max(ratios),
    }
    assert len(tokens) == LEARNED
    assert {key: logged[key] for key in expected} == pytest.approx(expected, abs=1e-5)
    # The means over micro-batches, which are wrong, are really other numbers.
    kl_of_batches = statistics.fmean(
        statistics.fmean(math.exp(-t["ref"]) + t["ref"] - 1 for row in tokens_of([batch]) for t in row)
        for batch in batches
    )
    assert abs(kl_of_batches - expected["kl"]) > 1e-3
    assert 0 < expected["clip_ratio/region_mean"] < 1
    assert (expected["clip_ratio/dual_mean"] > 0) == (name == "dual_clip")
    assert expected["policy/gated_tokens"] + expected["policy/gated_sequences"] > 0


def test_metrics_of_a_rollout(model_folder: str) -> None:
    """By hand: GRPO's advantages of rewards [1, 0] are ±0.5 / (0.70711 + 1e-4), of [1, 0.5] ±0.25 / (0.35355 + 1e-4).

    Groups with these: the first and the fourth, and the fifth. The second has one scorable row, the third no spread.
    """
    logged = trained(PolicyTrainer, model_folder, algorithm="grpo", beta=0.0).state.log_history[0]
    wide, narrow = 0.5 / (math.sqrt(0.5) + 1e-4), 0.25 / (math.sqrt(0.125) + 1e-4)
    expected = {
        "policy/advantage_mean": 0.0,
        "policy/advantage_std": math.sqrt((4 * wide**2 + 2 * narrow**2) / 9),  # of ten rows, n - 1
        "policy/advantage_min": -wide,
        "policy/advantage_max": wide,
        "reward/unscorable": 1 / 10,
        "reward/zero_variance_groups": 4 / 10,
        "sampling/generated_tokens": GENERATED,
        "policy/learned_tokens": LEARNED,
        # Of the eight rows that are not truncated: both of the first and the fifth group, one of the fourth.
        "policy/effective_sequences": 5 / 8,
        "policy/effective_tokens": (8 + 2 + 13 + 4 + 7) / LEARNED,
    }
    assert {key: logged[key] for key in expected} == pytest.approx(expected, abs=1e-5)
    assert "reward/overlong_penalty" not in logged


def test_overlong_penalty_is_logged_and_leaves_the_zero_variance_share(model_folder: str) -> None:
    """Buffer 4 of 16 tokens: the one completion beyond 12 tokens has 14 and loses 2 / 4."""
    settings = {"algorithm": "dapo", "overlong_buffer": 4, "dynamic_sampling": False}
    logged = trained(PolicyTrainer, model_folder, **settings).state.log_history[0]
    assert logged["reward/overlong_penalty"] == pytest.approx(-(14 - 12) / 4 / 10, abs=1e-6)
    assert logged["reward/zero_variance_groups"] == pytest.approx(4 / 10)


def test_advantage_statistics_of_token_advantages_count_trained_tokens(model_folder: str) -> None:
    """Whitened over the tokens of scorable rows: mean 0 and variance 1 there, and 3 tokens of the other row at 0."""
    made = trained(PolicyTrainer, model_folder, algorithm="reinforce_pp", num_generations=2, beta=0.0)
    logged = made.state.log_history[0]
    assert logged["policy/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    scored = LEARNED - 3
    assert logged["policy/advantage_std"] == pytest.approx(math.sqrt((scored - 1) / (LEARNED - 1)), abs=1e-5)


def test_kl_in_the_reward_is_logged_per_token(model_folder: str) -> None:
    """Mean k1 over the tokens trained on, of the policy that sampled: on the second generation batch not 0."""
    made = trained(Recording, model_folder, algorithm="rloo", max_steps=2)
    logged = made.state.log_history[1]
    terms = [
        float(batch["old_per_token_logps"][place] - batch["ref_per_token_logps"][place])
        for batch in made.recorded[5:]
        for place in zip(*(batch["completion_mask"] * batch["tool_mask"]).nonzero(as_tuple=True), strict=True)
    ]
    assert len(terms) == LEARNED
    assert logged["kl"] == pytest.approx(statistics.fmean(terms), abs=1e-6)
    assert abs(logged["kl"]) > 1e-3
    assert logged["policy/kl_coef"] == 0.05


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_kl_controller_sees_the_kl_of_a_sequence(algorithm: str, model_folder: str) -> None:
    """Ziegler's rule by hand: coefficient · (1 + clip(KL / target - 1, ±0.2) · n / horizon), n sequences.

    KL in the loss: k3 of the policy in training. KL in the reward: k1 of the policy that sampled. Two of the ten rows
    have no token to charge, and do not count.
    """
    n, target = 8, {"grpo": 1.4, "rloo": 1.75}[algorithm]
    adaptive = {"kl_controller": "adaptive", "kl_target": target, "kl_horizon": 50.0}
    made = trained(Recording, model_folder, algorithm=algorithm, beta=0.05, max_steps=2, **adaptive)
    coef, errors = 0.05, []
    for step, log in enumerate(made.state.log_history[:2]):
        assert log["policy/kl_coef"] == pytest.approx(coef, rel=1e-6)
        terms = [token["ref"] for row in tokens_of(made.recorded[5 * step :][:5]) for token in row]
        kl = sum(math.exp(-d) + d - 1 if algorithm == "grpo" else d for d in terms) / n
        errors.append(min(max(kl / target - 1, -0.2), 0.2))
        coef *= 1 + errors[-1] * n / 50
    assert errors[0] == -0.2  # the policy is its reference at first
    assert 1e-3 < abs(errors[1]) < 0.2
    assert made.kl_controller.coef == pytest.approx(coef, rel=1e-5)


@pytest.mark.parametrize("split", [(10, 1), (1, 10)], ids=str)
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo", "reinforce_pp", "rloo", "gmpo"])
def test_no_metric_depends_on_the_micro_batches(algorithm: str, split: tuple[int, int], model_folder: str) -> None:
    """Every number that is logged, durations apart; two passes over one generation batch."""
    logs = []
    for rows, accumulation in ((2, 5), split):
        made = trained(
            PolicyTrainer,
            model_folder,
            algorithm=algorithm,
            num_generations=2,
            num_iterations=2,
            max_steps=2,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
        )
        logs.append([{k: v for k, v in log.items() if k not in DURATIONS} for log in made.state.log_history])
    for log, expected in zip(*logs, strict=True):
        assert log == pytest.approx(expected, rel=1e-5, abs=1e-5)


# What TRL logs


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=258,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=2,
            router_aux_loss_coef=0.1,
            output_router_logits=True,
            pad_token_id=tiny.PAD,
            eos_token_id=tiny.EOS,
        )
    )


@pytest.mark.parametrize(
    ("ours", "trls", "both"),
    [
        ({"algorithm": "grpo"}, {"loss_type": "grpo"}, {"beta": 0.04}),
        ({"algorithm": "dapo"}, {"loss_type": "dapo"}, {"entropy_coef": 0.1}),
        ({"algorithm": "grpo"}, {"loss_type": "grpo"}, {"beta": 0.0, "use_adaptive_entropy": True}),
        ({"algorithm": "sapo"}, {"loss_type": "sapo"}, {"top_entropy_quantile": 0.5}),
        ({"algorithm": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}, {}),
        ({"algorithm": "dr_grpo"}, {"loss_type": "dr_grpo"}, {"model": mixtral}),
        ({"algorithm": "cispo"}, {"loss_type": "cispo"}, {}),
    ],
    ids=["kl", "entropy bonus", "adaptive entropy", "top entropy", "sequence level", "experts", "cispo"],
)
def test_every_name_that_trl_logs_is_logged(
    ours: dict[str, Any], trls: dict[str, Any], both: dict[str, Any], model_folder: str
) -> None:
    """In training, at its end, and in evaluation."""
    logs = []
    for trainer_class, settings in ((PolicyTrainer, ours), (GRPOTrainer, trls)):
        given = both | ({"model": both["model"]()} if "model" in both else {})
        made = trained(trainer_class, model_folder, **settings, **given)
        made.evaluate(tiny.prompts(4))
        logs.append([set(log) for log in made.state.log_history])
    assert len(logs[0]) == 3
    for log, expected in zip(*logs, strict=True):
        assert expected - log == set()


def test_a_group_of_one_has_no_spread_to_log(model_folder: str) -> None:
    """The only name of TRL's that goes away, and ours with it, with the verdicts on groups."""
    names = []
    for size in (2, 1):
        made = trained(PolicyTrainer, model_folder, algorithm="reinforce_pp", beta=0.0, num_generations=size)
        names.append(set(made.state.log_history[0]))
    verdicts = {f"sampling/{name}" for name in (*CAUSES, "acceptance_rate", "uninformative_seconds")}
    assert names[0] - names[1] == {"frac_reward_zero_std", "reward/zero_variance_groups"} | verdicts


# Clip shares and the sequence ratio, with log-probs given by hand


def stubbed(model_folder: str, logps: Tensor, **settings: Any) -> PolicyTrainer:
    """A trainer whose forward pass gives `logps`."""
    made = PolicyTrainer(
        tiny.llama(),
        reward,
        PolicyConfig(**common_settings(model_folder) | settings),
        train_dataset=tiny.prompts(4),
        processing_class=tiny.tokenizer(),
    )
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    made._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.ones_like(logps), None)
    return made


def batch_of(mask: list[list[int]], advantages: list[float]) -> dict[str, Tensor]:
    shape = (len(mask), len(mask[0]))
    return {
        "prompt_ids": torch.full((shape[0], 1), 40),
        "prompt_mask": torch.ones(shape[0], 1, dtype=torch.long),
        "completion_ids": torch.full(shape, 50),
        "completion_mask": torch.tensor(mask),
        "old_per_token_logps": torch.zeros(shape),
        "advantages": torch.tensor(advantages),
    }


@pytest.mark.parametrize("columns", [0, 2])
def test_clip_shares_count_what_min_clips(columns: int, model_folder: str) -> None:
    """Hand-made: ratios [1.5, 1.5, 1.4, 0.5], all A = 1, bounds 0.2 / 0.28: three tokens are clipped from above.

    A comparison the wrong way round gives 0.25, one blind to the sign of A gives 1; padding has ratio 99.
    """
    ratios = torch.tensor([[1.5, 1.5, 1.4, 0.5], [1.5, 0.5, 1.5, 1.4]])
    logps = torch.cat([ratios, torch.full((2, columns), 99.0)], dim=1).log().requires_grad_()
    made = stubbed(model_folder, logps, algorithm="dapo", epsilon=0.2, epsilon_high=0.28, overlong_buffer=0)
    made._compute_loss(made.model, batch_of([[1] * 4 + [0] * columns] * 2, [1.0, 1.0]))
    metrics = made._metrics["train"]
    expected = {"high_mean": 0.75, "low_mean": 0.0, "region_mean": 0.75, "high_max": 0.75, "low_min": 0.0}
    assert {name: metrics[f"clip_ratio/{name}"] for name in expected} == {
        name: [pytest.approx(value, abs=1e-6)] for name, value in expected.items()
    }
    assert metrics["policy/ratio/max"] == [pytest.approx(1.5, abs=1e-6)]


@pytest.mark.parametrize(
    ("second_advantage", "loss", "high", "second_gradient"),
    [
        # s = exp(mean) = [1.105171, 1.822119]; A = [1, -2]: (-1.105171 + 3.644238) / 2, nothing is clipped.
        (-2.0, 1.269533, 0.0, 0.911059),
        # A = [1, 2]: the second row is clipped at 1.28, one of two sequences (but two of five tokens), no gradient.
        (2.0, -(1.105171 + 2 * 1.28) / 2, 0.5, 0.0),
    ],
)
def test_sequence_ratio_through_the_trainer(
    second_advantage: float, loss: float, high: float, second_gradient: float, model_folder: str
) -> None:
    logps = torch.tensor([[0.2, -0.1, 0.2, 9.0], [0.6, 0.6, 0.0, 0.0]], requires_grad=True)
    made = stubbed(model_folder, logps, algorithm="gspo", epsilon=0.2, epsilon_high=0.28)
    value = made._compute_loss(made.model, batch_of([[1, 1, 1, 0], [1, 1, 0, 0]], [1.0, second_advantage]))
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-5)
    expected = torch.tensor([[-0.184195] * 3 + [0.0], [second_gradient] * 2 + [0.0] * 2])
    torch.testing.assert_close(logps.grad, expected, rtol=0, atol=1e-5)
    assert made._metrics["train"]["clip_ratio/high_mean"] == [pytest.approx(high, abs=1e-6)]
    assert made._metrics["train"]["clip_ratio/low_mean"] == [0.0]
