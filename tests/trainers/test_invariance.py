"""How rows are split over micro-batches and generation batches changes nothing: one optimizer step, for every row of
`ALGORITHMS` without a critic (`test_ppo_loss.py` has the others), against a step computed row by row without padding,
masks or micro-batches.
"""

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_algos.algorithms import ALGORITHMS
from trl_algos.config import PolicyConfig
from trl_algos.trainers import PolicyTrainer

WITHOUT_CRITIC = [key for key, row in ALGORITHMS.items() if "critic" not in row.needs]
MAX_LENGTH, LEARNING_RATE = 24, 0.25
UNSCORABLE_START = 39
"""First token of completions that the reward function cannot score."""

SETTINGS: dict[str, dict[str, Any]] = {
    "reinforce": {"kl_placement": "reward", "kl_estimator": "k1", "beta": 0.05},
    "pass_at_k": {"pass_k": 2},
    "dapo": {"dynamic_sampling": False},
}
"""Algorithm -> what is set besides its defaults: REINFORCE's KL penalty, a k below the group size of 4, and all groups
for DAPO, those that teach nothing, too."""

SPLITS = [(8, 1, 1), (4, 2, 2), (2, 4, 4), (1, 8, 8), (4, 2, 1), (2, 4, 2), (2, 4, 1)]
"""(per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation): 8 rows per optimizer step."""
ALIGNED = [(4, 2, 2), (1, 8, 8)]
"""Splits besides (8, 1, 1) whose generation batch is an optimizer step, so that two passes over it are two steps."""


# What is sampled


EMPTY, UNSCORABLE = {(1, 1), (7, 0)}, {(2, 1), (5, 0), (0, 2), (6, 3)}
"""(prompt, number) of completions without a token, and of those that the reward function cannot score."""


def _made_completions() -> dict[tuple[int, int], list[int]]:
    """Four completions for each of 12 prompts: 1 to 20 tokens, some cut off before the end token.

    The first token says what the reward is: 40 + three times the reward.
    """
    generator = random.Random(5)
    completions = {}
    for place in itertools.product(range(12), range(4)):
        length, thirds = generator.randint(1, 20), generator.randint(0, 6)
        truncated = generator.random() < 0.25 or place == (3, 1)
        first = UNSCORABLE_START if place in UNSCORABLE else 40 + thirds
        ids = [first] + [generator.randint(50, 250) for _ in range(length - 1)] + [tiny.EOS] * (not truncated)
        completions[place] = [] if place in EMPTY else ids
    return completions


COMPLETIONS = _made_completions()


def completion(prompt: int, number: int) -> list[int]:
    return COMPLETIONS[prompt, number]


def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Rewards 0, 1/3, …, 2, or none; an empty completion, which comes as one end token, gets 1/3."""
    return [
        None if ids[0] == UNSCORABLE_START else 1 / 3 if ids[0] == tiny.EOS else (ids[0] - 40) / 3
        for ids in completion_ids
    ]


def rollout_function(group_size: int, backwards: bool = False) -> Callable[..., dict[str, Any]]:
    """Fixed completions with a hole in the mask; the greedy completion of a prompt is its fourth one."""
    order = range(group_size)[::-1] if backwards else range(group_size)
    sampled = tiny.fixed_rollout({f"prompt {i}:": [completion(i, j) for j in order] for i in range(12)}, env_mask=True)
    greedy = tiny.fixed_rollout({f"prompt {i}:": [completion(i, 3)] for i in range(12)}, env_mask=True)
    return lambda prompts, trainer: (greedy if trainer.greedy else sampled)(prompts, trainer)


def group_size(key: str) -> int:
    return {1: 1}.get(ALGORITHMS[key].defaults.get("num_generations"), 4 if key == "pass_at_k" else 2)


# A run of the trainer


def trainer(
    key: str,
    split: tuple[int, int, int],
    model_folder: str,
    *,
    trainer_class: type[PolicyTrainer] = PolicyTrainer,
    prompts: Any = None,
    rollout_func: Any = None,
    reward: Any = score,
    **settings: Any,
) -> PolicyTrainer:
    """A trainer in float64, whose policy is not its reference: the KL matters in the first step already."""
    rows, accumulation, steps_per_generation = split
    size = settings.get("num_generations", group_size(key))
    config = {
        "output_dir": f"{model_folder}/unused",
        "algorithm": key,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": steps_per_generation,
        "num_generations": size,
        "max_completion_length": MAX_LENGTH,
        "mask_truncated_completions": True,
        "shuffle_dataset": False,
        "max_steps": 1,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    policy = tiny.llama(seed=1)
    policy.config._name_or_path = model_folder  # where TRL takes the reference from
    made = trainer_class(
        policy,
        reward,
        PolicyConfig(**config | SETTINGS.get(key, {}) | settings),
        train_dataset=prompts or tiny.prompts(8 // size),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout_func or rollout_function(size),
    )
    for model in filter(None, (made.model, made.ref_model)):
        model.double()
    return made


def weights_after(made: PolicyTrainer) -> dict[str, Tensor]:
    made.train()
    return {name: p.detach() for name, p in made.model.named_parameters()}


def assert_same_weights(weights: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Equal to `tolerance`, and not because nothing moved."""
    start = dict(tiny.llama(seed=1).named_parameters())
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: n + m)
    moved = [float((weight - start[name]).abs().max()) for name, weight in expected.items()]
    assert min(moved) > 10 * tolerance
    assert max(moved) > 1000 * tolerance


# The same step by hand


@dataclass(frozen=True)
class Row:
    """One completion: ids, kept[t] = 1 where token t is trained on, log-probs and what the reward function said."""

    prompt: int
    ids: tuple[int, ...]
    kept: tuple[int, ...]
    generated: int
    score: float  # NaN = none
    greedy_score: float
    logps: tuple[float, ...] = ()
    ref_logps: tuple[float, ...] = ()

    def kl(self, t: int) -> float:
        """k1 estimate."""
        return self.logps[t] - self.ref_logps[t]


def made_row(prompt: int, number: int) -> Row:
    """What becomes of a completion: an empty one is one end token, masked; a truncated one is masked whole."""
    ids = completion(prompt, number)
    holes = [int(not (t == 1 and len(ids) > 3)) for t in range(len(ids))]
    truncated = bool(ids) and ids[-1] != tiny.EOS
    kept = [0] if not ids else [0] * len(ids) if truncated else holes
    (reward,), (greedy,) = score([], [ids or [tiny.EOS]]), score([], [completion(prompt, 3)])
    return Row(
        prompt,
        tuple(ids or [tiny.EOS]),
        tuple(kept),
        sum(holes),
        math.nan if reward is None else reward,
        math.nan if greedy is None else greedy,
    )


def log_probabilities(model: LlamaForCausalLM, row: Row) -> Tensor:
    """(T,) of the completion, alone in its batch."""
    prompt = tiny.tokenizer()(f"prompt {row.prompt}:")["input_ids"]
    logits = model(torch.tensor([[*prompt, *row.ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(row.ids)), list(row.ids)]


def scored_rows(rows: list[Row], policy: LlamaForCausalLM, reference: LlamaForCausalLM) -> list[Row]:
    with torch.no_grad():
        return [
            replace(
                row,
                logps=tuple(log_probabilities(policy, row).tolist()),
                ref_logps=tuple(log_probabilities(reference, row).tolist()),
            )
            for row in rows
        ]


def peers(rows: list[Row], row: Row) -> list[Row]:
    """The scorable rows of the group of `row`."""
    return [other for other in rows if other.prompt == row.prompt and not math.isnan(other.score)]


def minus_mean(rows: list[Row], row: Row) -> float:
    return row.score - statistics.fmean(other.score for other in peers(rows, row))


def normalized(rows: list[Row], row: Row) -> float:
    return minus_mean(rows, row) / (statistics.stdev(other.score for other in peers(rows, row)) + 1e-4)


def penalised(row: Row, beta: float) -> float:
    """Score less the KL of the tokens trained on."""
    return row.score - beta * sum(row.kl(t) for t, kept in enumerate(row.kept) if kept)


def leave_one_out(rows: list[Row], row: Row) -> float:
    others = [penalised(other, 0.05) for other in peers(rows, row) if other is not row]
    return penalised(row, 0.05) - statistics.fmean(others)


def optimal_baseline(rows: list[Row], row: Row) -> float:
    group = peers(rows, row)
    return row.score - sum(r.generated * r.score for r in group) / sum(r.generated for r in group)


def gpg(rows: list[Row], row: Row) -> float:
    scorable = [other for other in rows if not math.isnan(other.score)]
    useful = [other for other in scorable if len({r.score for r in peers(rows, other)}) > 1]
    return len(scorable) / len(useful) * minus_mean(rows, row)


def pass_at_2(rows: list[Row], row: Row) -> float:
    """Mean standardised score of the pairs that hold `row`; a pair scores 1 if one of its rows has a reward."""
    pairs = list(itertools.combinations(peers(rows, row), 2))
    scores = [float(any(r.score > 0 for r in pair)) for pair in pairs]
    mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
    if deviation == 0:
        return 0.0
    return statistics.fmean((s - mean) / deviation for s, pair in zip(scores, pairs, strict=True) if row in pair)


def returns(row: Row, beta: float) -> list[float]:
    """Reward to go of each token, its own KL penalty included."""
    places = [t for t, kept in enumerate(row.kept) if kept]
    return [
        row.score - beta * sum(row.kl(s) for s in places if s >= t) if t in places else 0.0
        for t in range(len(row.kept))
    ]


def whitened(rows: list[Row], values: dict[Row, list[float]]) -> dict[Row, list[float]]:
    """Values of the tokens trained on, standardised over the rows that have any."""
    every = [v for row, of_row in values.items() for v, kept in zip(of_row, row.kept, strict=True) if kept]
    mean, scale = statistics.fmean(every), math.sqrt(statistics.variance(every) + 1e-8)
    return {row: [(v - mean) / scale for v in of_row] for row, of_row in values.items()}


ROW_ADVANTAGES: dict[str, Callable[[list[Row], Row], float]] = {
    **dict.fromkeys(["grpo", "dapo", "gspo", "gspo_token", "sapo", "cispo", "gmpo", "dis"], normalized),
    "dr_grpo": minus_mean,
    "rloo": leave_one_out,
    "remax": lambda rows, row: penalised(row, 0.05) - row.greedy_score,
    "opo": optimal_baseline,
    "gpg": gpg,
    "pass_at_k": pass_at_2,
}


def token_advantages(key: str, rows: list[Row]) -> dict[Row, list[float]]:
    """Row -> advantage of each token; 0 for rows without a score or, in estimators with groups, without a peer."""
    scorable = [row for row in rows if not math.isnan(row.score)]
    if key in ("reinforce", "reinforce_pp"):
        by_row = {row: returns(row, {"reinforce": 0.05, "reinforce_pp": 0.01}[key]) for row in scorable}
        return by_row if key == "reinforce" else whitened(rows, by_row)
    if "groups" in ALGORITHMS[key].needs:
        scorable = [row for row in scorable if len(peers(rows, row)) > 1]
    if key == "reinforce_pp_baseline":
        return whitened(rows, {row: [minus_mean(rows, row)] * len(row.ids) for row in scorable})
    by_row = {row: [ROW_ADVANTAGES[key](rows, row)] * len(row.ids) for row in scorable}
    return {row: [0.0 if math.isnan(a) else a for a in of_row] for row, of_row in by_row.items()}


def overlong(key: str, row: Row) -> Row:
    """DAPO's punishment: its buffer is 0.2 · 24 = 5 tokens, so it grows from token 19 to token 24."""
    return replace(row, score=row.score - min(max(len(row.ids) - 19, 0) / 5, 1)) if key == "dapo" else row


LOSS_KL = {"grpo": lambda d: 0.04 * (torch.exp(-d) + d - 1), "reinforce_pp_baseline": lambda d: 0.01 * d**2 / 2}
"""Where the KL is part of the loss: beta times the estimator of d = logps - ref_logps."""


def loss_by_hand(key: str, sampled: list[Row], window: list[Row], policy: Any, reference: Any) -> Tensor:
    """Loss of the rows of `window`, whose gradient at ratio 1 is that of every surrogate.

    Args:
        key: the algorithm.
        sampled: the rows that advantages are estimated from.
        window: the rows of the optimizer step, among those of `sampled`.
        policy: model with gradient.
        reference: reference model.
    """
    finished = {
        row: overlong(key, scored)
        for row, scored in zip(sampled, scored_rows(sampled, policy, reference), strict=True)
    }
    advantages = token_advantages(key, list(finished.values()))
    trained = [row for row in window if any(row.kept)]
    tokens = sum(sum(row.kept) for row in trained)
    total = torch.zeros((), dtype=torch.float64)
    for row in trained:
        logps, scored = log_probabilities(policy, row), finished[row]
        terms = -torch.tensor(advantages.get(scored, [0.0] * len(row.ids)), dtype=torch.float64) * logps
        if key in LOSS_KL:
            terms = terms + LOSS_KL[key](logps - torch.tensor(scored.ref_logps, dtype=torch.float64))
        summed = (terms * torch.tensor(row.kept)).sum()
        total = (
            total
            + summed
            / {
                "token_mean": tokens,
                "seq_mean_token_mean": sum(row.kept) * len(trained),
                "seq_mean_token_sum": len(trained),
                "seq_mean_token_sum_norm": len(trained) * MAX_LENGTH,
            }[ALGORITHMS[key].aggregation]
        )
    return total


def sgd_step(policy: LlamaForCausalLM, loss: Tensor) -> None:
    policy.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= LEARNING_RATE * parameter.grad


def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Policy and reference as the trainer has them at its start."""
    return tiny.llama(seed=1).double(), tiny.llama(seed=0).double()


def eight_rows(key: str, size: int | None = None) -> list[Row]:
    size = size or group_size(key)
    return [made_row(prompt, number) for prompt in range(8 // size) for number in range(size)]


_BY_HAND: dict[str, dict[str, Tensor]] = {}


def weights_by_hand(key: str) -> dict[str, Tensor]:
    """Weights after one step on the eight rows."""
    if key not in _BY_HAND:
        policy, reference = models()
        sgd_step(policy, loss_by_hand(key, eight_rows(key), eight_rows(key), policy, reference))
        _BY_HAND[key] = {name: p.detach() for name, p in policy.named_parameters()}
    return _BY_HAND[key]


# Tests


def pairs_of_a_group() -> list[tuple[Row, Row]]:
    rows = eight_rows("grpo")
    return [(a, b) for a in rows for b in peers(rows, a) if a is not b]


def test_the_rows_hold_every_special_case() -> None:
    for key in ("grpo", "pass_at_k", "remax"):
        rows = eight_rows(key)
        assert max(sum(row.kept) for row in rows) > 5 * min(sum(row.kept) for row in rows if any(row.kept))
        assert any(math.isnan(row.score) and any(row.kept) for row in rows)
        assert any(row.generated > 0 and not any(row.kept) for row in rows)  # truncated
        assert any(0 < sum(row.kept) < len(row.kept) for row in rows)  # a hole
        assert len({row.score for row in rows}) > 3
    # A truncated row is the baseline of one that is trained on.
    assert any(any(a.kept) and not any(b.kept) and b.generated and a.score != b.score for a, b in pairs_of_a_group())


@pytest.mark.parametrize(
    ("key", "split"),
    [(key, split) for key in WITHOUT_CRITIC for split in SPLITS if split[0] * split[2] >= group_size(key)],
    ids=str,
)
def test_one_step_however_split(key: str, split: tuple[int, int, int], model_folder: str) -> None:
    assert_same_weights(weights_after(trainer(key, split, model_folder)), weights_by_hand(key))


@pytest.mark.parametrize("split", [(8, 1, 1), (2, 4, 1), (1, 8, 8)], ids=str)
def test_remax_with_groups_of_two(split: tuple[int, int, int], model_folder: str) -> None:
    """The greedy score of a prompt is the baseline of both its completions."""
    rows = eight_rows("remax", size=2)
    assert len({row.greedy_score for row in rows}) > 2
    policy, reference = models()
    sgd_step(policy, loss_by_hand("remax", rows, rows, policy, reference))
    expected = {name: p.detach() for name, p in policy.named_parameters()}
    assert_same_weights(weights_after(trainer("remax", split, model_folder, num_generations=2)), expected)


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "wider, groups backwards": {"pad_to_multiple_of": 17},
    "prompts shuffled": {"shuffle_dataset": True, "seed": 3},
    "as TRL splits it": {"regroup_micro_batches": False, "skip_idle_rows": False},
    "passes of 40 tokens": {"max_tokens_per_micro_batch": 40},
    "passes of one row": {"max_tokens_per_micro_batch": 1},
    "one pass": {"max_tokens_per_micro_batch": 10_000, "skip_idle_rows": False},
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("key", WITHOUT_CRITIC)
def test_one_step_however_arranged(key: str, arrangement: str, model_folder: str) -> None:
    """Padding columns, the order inside groups and that of prompts; more passes than micro-batches, and fewer."""
    size = group_size(key)
    arranged = {name: dict(settings) for name, settings in ARRANGEMENTS.items()}
    arranged["wider, groups backwards"]["rollout_func"] = rollout_function(size, backwards=True)
    made = trainer(key, (2, 4, 2) if size < 4 else (2, 4, 4), model_folder, **arranged[arrangement])
    assert_same_weights(weights_after(made), weights_by_hand(key))


OFF_POLICY = {"dr_grpo": {"learning_rate": 3.0}, "cispo": {"epsilon_high": 0.2}}
"""Algorithm -> what it takes for ratios to reach the clip bound in the second step."""


@pytest.mark.parametrize("key", WITHOUT_CRITIC)
def test_two_passes_over_a_generation_however_split(key: str, model_folder: str) -> None:
    """The second step is off-policy: ratios, clipping and the KL to the reference differ from those of the first."""
    two_passes = {"num_iterations": 2, "max_steps": 2} | OFF_POLICY.get(key, {})
    expected = trainer(key, (8, 1, 1), model_folder, **two_passes)
    expected_weights = weights_after(expected)
    scored = trainer(key, (4, 2, 2), model_folder, reuse_first_pass=False, **two_passes)
    assert_same_weights(weights_after(scored), expected_weights)
    for split in ALIGNED:
        made = trainer(key, split, model_folder, **two_passes)
        assert_same_weights(weights_after(made), expected_weights)
    logged = expected.state.log_history[1]
    assert logged["policy/ratio/max"] > 1.01
    if expected.args.surrogate in ("clip", "cispo", "gmpo"):
        assert logged["clip_ratio/region_mean"] > 0


class Recording(PolicyTrainer):
    """Keeps the micro-batches of the first optimizer step."""

    recorded: list[dict[str, Any]]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.state.global_step == 0:
            self.recorded = list(self._window)
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("key", WITHOUT_CRITIC)
def test_a_generation_batch_of_two_optimizer_steps(key: str, model_folder: str) -> None:
    """Advantages come from all eight rows sampled, the divisor from the four rows of the step alone.

    TRL would divide by half of the generation batch's tokens here, whatever tokens the step has.
    """
    made = trainer(key, (2, 2, 4), model_folder, trainer_class=Recording)
    weights = weights_after(made)
    by_ids = {row.ids: row for row in eight_rows(key)}
    window = [
        by_ids[tuple(ids[: mask.sum()].tolist())]
        for inputs in made.recorded
        for ids, mask in zip(inputs["completion_ids"], (inputs["completion_ids"] != tiny.PAD).long(), strict=True)
    ]
    assert len(set(window)) == 4
    policy, reference = models()
    sgd_step(policy, loss_by_hand(key, eight_rows(key), window, policy, reference))
    assert_same_weights(weights, {name: p.detach() for name, p in policy.named_parameters()})


@pytest.mark.parametrize("key", [key for key in WITHOUT_CRITIC if group_size(key) < 4])
def test_a_last_window_shorter_than_the_accumulation(key: str, model_folder: str) -> None:
    """One epoch of 12 rows: a step on the first eight, then one on the remaining four, divided by their own count."""
    size = group_size(key)
    made = trainer(key, (2, 4, 1), model_folder, prompts=tiny.prompts(12 // size), max_steps=-1, num_train_epochs=1)
    weights = weights_after(made)
    assert made.state.global_step == 2
    rows = [made_row(prompt, number) for prompt in range(12 // size) for number in range(size)]
    policy, reference = models()
    for window in (rows[:8], rows[8:]):
        sgd_step(policy, loss_by_hand(key, window, window, policy, reference))
    assert_same_weights(weights, {name: p.detach() for name, p in policy.named_parameters()})


@pytest.mark.parametrize("key", WITHOUT_CRITIC)
def test_nothing_but_truncated_completions(key: str, model_folder: str) -> None:
    """Loss 0, no NaN anywhere in the log, and the weights do not move at all."""
    cut = tiny.fixed_rollout({f"prompt {i}:": [[41 + 3 * j, 50, 60] for j in range(4)] for i in range(8)})
    made = trainer(key, (4, 2, 1), model_folder, rollout_func=cut, entropy_coef=0.1)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    weights = weights_after(made)
    assert all(torch.equal(weights[name], before[name]) for name in before)
    logged = made.state.log_history[0]
    assert logged["loss"] == logged["policy_loss"] == logged["grad_norm"] == 0
    assert not any(isinstance(value, float) and math.isnan(value) for value in logged.values())


# Four micro-batches of 2, 4, 6 and 8 tokens, whose tokens lose 1, 2, 3 and 4 each: 60 / 20 tokens = 3.
STEPS_OF_TOKENS = {
    f"prompt {i}:": [
        [60 + i, *range(70, 70 + i), tiny.EOS][-i - 1 :],
        [90 + i, *range(70, 70 + i), tiny.EOS][-i - 1 :],
    ]
    for i in range(4)
}


def no_reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def minus_micro_batch_number(completion_lengths: Tensor) -> Tensor:
    """Advantages -1, -2, -3, -4 of completions with 1, 2, 3, 4 tokens: the clipped surrogate at ratio 1 loses -A."""
    return -completion_lengths.float()


class TokenLosses(PolicyTrainer):
    def estimate_advantages(self, rollout: Any) -> Tensor:
        return minus_micro_batch_number(rollout.lengths)


@pytest.mark.parametrize("split", [(2, 4, 4), (2, 4, 1)], ids=str)
@pytest.mark.parametrize("key", [key for key in WITHOUT_CRITIC if ALGORITHMS[key].aggregation == "token_mean"])
def test_a_mean_over_tokens_spans_the_accumulation_window(
    key: str, split: tuple[int, int, int], model_folder: str
) -> None:
    """Hand-made: (1·2 + 2·4 + 3·6 + 4·8) / 20 = 3; mean of the micro-batches' means 2.5; divided twice 0.75."""
    made = trainer(
        key,
        split,
        model_folder,
        trainer_class=TokenLosses,
        rollout_func=tiny.fixed_rollout(STEPS_OF_TOKENS),
        reward=no_reward,
        num_generations=2,
        prompts=tiny.prompts(4),
        **({"beta": 0.0} if ALGORITHMS[key].kl_placement != "none" else {}),
    )
    weights = weights_after(made)
    logged = made.state.log_history[0]
    if made.args.surrogate in ("clip", "dis"):
        assert logged["loss"] == pytest.approx(3.0, abs=1e-6)
        assert logged["policy_loss"] == pytest.approx(3.0, abs=1e-6)
    policy, _ = models()
    rows = [
        Row(i, tuple(ids), (1,) * len(ids), 0, 0.0, 0.0) for i in range(4) for ids in STEPS_OF_TOKENS[f"prompt {i}:"]
    ]
    sgd_step(policy, sum(len(row.ids) * log_probabilities(policy, row).sum() for row in rows) / 20)
    assert_same_weights(weights, {name: p.detach() for name, p in policy.named_parameters()})


class TokenLossesOfTrl(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        return output | {"advantages": minus_micro_batch_number(output["completion_mask"].sum(1))}


@pytest.mark.parametrize(("steps_per_generation", "loss"), [(4, 3.0), (1, 2.5)])
def test_trls_mean_over_tokens_depends_on_the_split(steps_per_generation: int, loss: float, model_folder: str) -> None:
    """Why the divisor here is counted anew: TRL's is exact only where a generation batch is an optimizer step."""
    config = GRPOConfig(
        output_dir=f"{model_folder}/unused",
        loss_type="dapo",
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        steps_per_generation=steps_per_generation,
        num_generations=2,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
    )
    made = TokenLossesOfTrl(
        model_folder,
        no_reward,
        config,
        train_dataset=tiny.prompts(4),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout(STEPS_OF_TOKENS),
    )
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("split", [(2, 4, 4), (1, 8, 8), (2, 4, 1)], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "grpo", "entropy_coef": 0.5},
        {"algorithm": "dapo", "use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_target": 9.0},
        {"algorithm": "grpo", "kl_controller": "adaptive", "kl_target": 0.1, "kl_horizon": 20.0},
        {"algorithm": "rloo", "kl_controller": "adaptive", "kl_target": 0.1, "kl_horizon": 20.0},
    ],
    ids=lambda settings: "-".join(list(settings)[:2]) + f"-{settings['algorithm']}",
)
def test_entropy_bonus_and_controllers_however_split(
    settings: dict[str, Any], split: tuple[int, int, int], model_folder: str
) -> None:
    """Two steps, each on its own generation batch: coefficients that one step moved act on the next."""
    settings = settings | {"max_steps": 2, "learning_rate": 0.1}
    key = settings.pop("algorithm")
    expected = trainer(key, (8, 1, 1), model_folder, **settings)
    made = trainer(key, split, model_folder, **settings)
    assert_same_weights(weights_after(made), weights_after(expected))
    for name in ("policy/kl_coef", "entropy_coef"):
        logged, theirs = ([log.get(name) for log in t.state.log_history[:2]] for t in (made, expected))
        assert logged == (theirs if None in theirs else pytest.approx(theirs, rel=1e-6))
    assert made.kl_controller.coef == pytest.approx(expected.kl_controller.coef, rel=1e-6)
    assert (made.kl_controller.coef != made.args.beta) == ("kl_controller" in settings)
    assert (made.entropy_coef != made.args.entropy_coef) == ("use_adaptive_entropy" in settings)
