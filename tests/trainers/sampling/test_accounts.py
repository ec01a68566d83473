"""The accounts of three calls of the generation, counted by hand."""

import math

import pytest

from trl_algos.trainers.sampling.accounts import Accounts, Sampled, decile, sampling_metrics

FIRST = Sampled(["informative", "all_wrong", "constant"], [0.25, 0.0, 0.5], [30, 10, 20], 4, seconds=6.0, reward=0.25)
SECOND = Sampled(["all_right", "informative"], [1.0, 0.75], [5, 15], 4, seconds=2.0, retried=1, reward=0.875)
PLAIN = Sampled((), [0.5, math.nan], [3, 4], 1, seconds=1.0, reward=0.5)


def test_one_call() -> None:
    assert (FIRST.prompts, FIRST.informative, FIRST.wasted_tokens) == (3, 1, 30)
    assert FIRST.wasted_seconds == pytest.approx(6.0 * 30 / 60)
    assert SECOND.wasted_seconds == pytest.approx(2.0 * 5 / 20)
    assert (PLAIN.wasted_tokens, PLAIN.wasted_seconds, PLAIN.informative) == (0, 0.0, 0)
    assert Sampled(["truncated"], [1.0], [0], 2, 3.0).wasted_seconds == 0.0


def test_the_table_of_a_run() -> None:
    accounts = Accounts()
    for sampled in (FIRST, SECOND):
        accounts.sampled(sampled)
    accounts.trained(groups=2, completions=8, tokens=45, rounds=2)
    accounts.trained(groups=1, completions=4, tokens=9, rounds=5, missing=1)
    table = Accounts(**accounts.state_dict()).table(carried=3)
    assert table == {
        "prompts": 4,
        "retried_prompts": 1,
        "completions": 20,
        "tokens": 80,
        "informative_groups": 2,
        "acceptance_rate": pytest.approx(2 / 5),
        "uninformative_groups": {
            "all_right": 1,
            "all_wrong": 1,
            "constant": 1,
            "unscorable": 0,
            "truncated": 0,
            "outside_range": 0,
        },
        "uninformative_tokens": 35,
        "completions_per_informative_group": 10.0,
        "trained": {"groups": 3, "completions": 12, "tokens": 54},
        "carried_groups": 3,
        "rounds_per_batch": {"mean": 3.5, "most": 5},
        "short_batches": 1,
        "missing_groups": 1,
        "generation_seconds": 8.0,
        "generation_seconds_on_uninformative": 3.5,
        "by_mean_reward": [
            {"from": 0.0, "to": 0.1, "groups": 1, "informative": 0},
            {"from": 0.2, "to": 0.3, "groups": 1, "informative": 1},
            {"from": 0.5, "to": 0.6, "groups": 1, "informative": 0},
            {"from": 0.7, "to": 0.8, "groups": 1, "informative": 1},
            {"from": 0.9, "to": 1.0, "groups": 1, "informative": 0},
        ],
    }


def test_prompts_with_one_completion_have_no_verdicts() -> None:
    accounts = Accounts()
    accounts.sampled(PLAIN)
    table = accounts.table()
    assert (table["prompts"], table["completions"], table["tokens"]) == (2, 2, 7)
    assert (table["informative_groups"], table["completions_per_informative_group"]) == (0, None)
    assert table["by_mean_reward"] == []
    assert set(sampling_metrics([PLAIN])) == {
        "sampling/rounds",
        "sampling/generated_tokens",
        "sampling/generation_seconds",
        "sampling/carried_groups",
        "sampling/missing_groups",
        "sampling/reward",
    }


@pytest.mark.parametrize(("mean", "place"), [(-3.0, 0), (0.0, 0), (0.09, 0), (0.1, 1), (0.95, 9), (1.0, 9), (7.0, 9)])
def test_deciles(mean: float, place: int) -> None:
    assert decile(mean) == place


def test_the_metrics_of_a_batch_of_two_rounds() -> None:
    values = sampling_metrics([FIRST, SECOND], carried=2, missing=1)
    assert values == pytest.approx(
        {
            "sampling/rounds": 2,
            "sampling/generated_tokens": 80,
            "sampling/generation_seconds": 8.0,
            "sampling/carried_groups": 2,
            "sampling/missing_groups": 1,
            "sampling/reward": (0.25 + 0.0 + 0.5 + 1.0 + 0.75) / 5,
            "sampling/acceptance_rate": 2 / 5,
            "sampling/uninformative_seconds": 3.5,
            "sampling/all_right": 1 / 5,
            "sampling/all_wrong": 1 / 5,
            "sampling/constant": 1 / 5,
            "sampling/unscorable": 0.0,
            "sampling/truncated": 0.0,
            "sampling/outside_range": 0.0,
        }
    )
    assert sampling_metrics([])["sampling/rounds"] == 0
