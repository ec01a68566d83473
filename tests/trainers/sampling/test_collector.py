"""Which prompts are sampled, kept, carried and trained on, with rewards that are written down."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from scripted import Script, reward, script_of

from trl_algos.errors import ConfigError, SamplingError
from trl_algos.trainers.sampling import collector


def twice(prompts: list[int]) -> list[int]:
    return [prompt for prompt in prompts for _ in range(2)]


def test_a_full_first_round_is_the_plain_batch(tmp_path: Path) -> None:
    run = Script(script_of("tttttttt"), tmp_path).train()
    assert run.rounds == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert run.trained == [twice([0, 1, 2, 3]), twice([4, 5, 6, 7])]


def test_dap_3_keeps_whole_groups_in_order(tmp_path: Path) -> None:
    """P2 and P5 of five groups of four; two are needed. The fifth prompt is reached in the third round."""
    rewards: dict[int, list[float | None]] = {
        0: [0.5] * 4,
        1: [0.0, 0.25, 0.25, 0.25],
        2: [0.0] * 4,
        3: [1.0] * 4,
        4: [0.0, 0.25, 0.5, 1.0],
    }
    run = Script(rewards, tmp_path, algorithm="dr_grpo", num_generations=4, max_steps=1).train()
    assert run.rounds == [[0, 1], [2, 3], [4, 0]]
    (batch,) = run.batches
    order = batch["rollout_row"].argsort()
    assert (batch["completion_ids"][order, 0] - 100).tolist() == [1] * 4 + [4] * 4
    assert (batch["completion_ids"][order, 1] - 30).tolist() == [2, 3, 3, 3, 2, 3, 4, 6]
    expected = [-0.1875, 0.0625, 0.0625, 0.0625, -0.4375, -0.1875, 0.0625, 0.5625]
    assert batch["advantages"][order].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_round_asks_for_what_is_missing_over_the_acceptance_rate(tmp_path: Path) -> None:
    """One group of one counts as accepted at the start, and each round leaves nine tenths of what was counted."""
    run = Script(script_of("twtt" * 12), tmp_path, max_steps=3).train()
    accepted = judged = 1.0
    expected, waiting, place = [], 0, 0
    for _ in range(3):
        while waiting < 4:
            size = min(math.ceil((4 - waiting) * judged / accepted), 4)
            asked = list(range(place, place + size))
            place += size
            expected.append(asked)
            found = sum(prompt % 4 != 1 for prompt in asked)
            accepted, judged, waiting = 0.9 * accepted + found, 0.9 * judged + size, waiting + found
        waiting -= 4
    assert run.rounds == expected
    assert len({len(asked) for asked in expected}) > 1
    assert run.trainer.collector.acceptance_rate == pytest.approx(accepted / judged)


def test_an_engine_may_be_asked_for_two_batches(tmp_path: Path) -> None:
    """After rounds with 0, 4 and 4 of 4 groups the rate is 8.329 / 11.569: two are wanted of three prompts."""
    run = Script(script_of("wwwwtttttttt"), tmp_path, max_steps=2).train()
    collector = run.trainer.collector
    assert collector.acceptance_rate == pytest.approx((0.9 * (0.9 * 0.9 + 4) + 4) / (0.9 * (0.9 * 4.9 + 4) + 4))
    assert [collector._round_size(missing, 4) for missing in (2, 4)] == [3, 4]
    run.trainer.use_vllm = True
    assert [collector._round_size(missing, 4) for missing in (2, 4, 8)] == [3, 6, 8]


def test_left_over_groups_wait_first_in_first_out(tmp_path: Path) -> None:
    """The second round asks for three at a rate of 1.9 / 4.9, is bounded at four, and finds four: one is left over."""
    run = Script(script_of("wwwttttttttttttt"), tmp_path, max_steps=3).train()
    assert run.rounds[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert run.trained[0] == twice([3, 4, 5, 6])
    assert run.trained[1][:2] == twice([7])
    assert run.logged("sampling/carried_groups")[0] == 1
    order = [prompt for batch in run.trained for prompt in batch[::2]]
    assert order == list(range(3, 15))


def test_every_kept_group_is_trained_exactly_once_until_the_data_end(tmp_path: Path) -> None:
    """Two epochs of 21 prompts, 9 of which teach: 18 groups in steps of four, the last of which has two."""
    pattern = "twrwtntcwttrwwtwtttrw"
    run = Script(script_of(pattern), tmp_path, max_steps=-1, num_train_epochs=2, shuffle_dataset=True).train()
    teaching = {place for place, letter in enumerate(pattern) if letter == "t"}
    assert Counter(p for batch in run.trained for p in batch) == dict.fromkeys(teaching, 4)
    assert Counter(p for asked in run.rounds for p in asked) == dict.fromkeys(range(21), 2)
    assert run.trainer.state.global_step == math.ceil(2 * len(teaching) / 4)
    table = run.table()
    assert table["prompts"] == 42
    assert table["completions"] == 84
    assert table["informative_groups"] == table["trained"]["groups"] == 2 * len(teaching)
    assert table["carried_groups"] == 0
    assert table["uninformative_groups"] == {
        "all_right": 2 * pattern.count("r"),
        "all_wrong": 2 * pattern.count("w"),
        "constant": 2 * pattern.count("c"),
        "unscorable": 2 * pattern.count("n"),
        "truncated": 0,
        "outside_range": 0,
    }


@pytest.mark.parametrize(("accumulation", "steps_per_generation"), [(2, 1), (1, 2), (3, 2), (2, 4)])
def test_however_steps_and_generations_lie_no_group_is_lost(
    accumulation: int, steps_per_generation: int, tmp_path: Path
) -> None:
    pattern = "twtwttwrtwttwtrwttwt"
    run = Script(
        script_of(pattern),
        tmp_path,
        max_steps=-1,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
    ).train()
    trained = Counter(p for batch in run.trained for p in batch)
    left = {group.place for group in run.trainer.collector.waiting}
    teaching = {place for place, letter in enumerate(pattern) if letter == "t"}
    assert not set(trained) & left
    assert trained == dict.fromkeys(teaching - left, 2)
    assert not left  # fewer steps than the data loader has


def test_what_is_left_of_a_batch_is_trained_on_where_the_data_end(tmp_path: Path) -> None:
    """The second step begins with the second half of the second batch, and finds nothing for a third one."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "steps_per_generation": 2}
    run = Script(script_of("ttttttttwwww"), tmp_path, max_steps=-1, num_train_epochs=1, **sizes).train()
    assert Counter(p for batch in run.trained for p in batch) == dict.fromkeys(range(8), 2)
    assert run.trainer.state.global_step == 2


def test_a_constant_reward_ends_after_the_asked_rounds(tmp_path: Path) -> None:
    run = Script(script_of("wrcnwrcnwrcn"), tmp_path, dynamic_sampling_max_rounds=2)
    start = run.weights
    with pytest.raises(SamplingError) as error:
        run.train()
    assert run.rounds == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert str(error.value) == (
        "`dynamic_sampling`: 0 of 4 groups that teach were found in 2 rounds (`dynamic_sampling_max_rounds`: 2) and 8 "
        "prompts; the others: all_right 2, all_wrong 2, constant 2, unscorable 2. It was step 1; no checkpoint was "
        "saved."
    )
    assert error.value.problems == [str(error.value)]
    assert all(torch.equal(value, start[name]) for name, value in run.weights.items())


def test_data_that_end_without_any_group_are_an_error_too(tmp_path: Path) -> None:
    run = Script(script_of("wrwrwr"), tmp_path, max_steps=-1, num_train_epochs=1)
    with pytest.raises(
        SamplingError, match=r"0 of 4 groups .* in 2 rounds .* and 6 prompts; .*all_right 3, all_wrong 3"
    ):
        run.train()


def test_data_that_end_when_a_step_begins_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Eight groups that teach are two steps; what is left of three planned ones is none."""
    run = Script(
        script_of("ttttttttwwww"), tmp_path, max_steps=-1, num_train_epochs=1, save_strategy="steps", save_steps=100
    ).train()
    assert run.trainer.state.global_step == 2
    assert (tmp_path / "checkpoint-2" / "sampling.pt").is_file()
    assert "train_runtime" in run.trainer.state.log_history[-1]


def test_too_few_groups_raise_where_that_is_asked_for(tmp_path: Path) -> None:
    """The step before is kept: what was found for the failing one waits in the checkpoint again."""
    settings = {"dynamic_sampling_max_rounds": 2, "dynamic_sampling_on_exhausted": "raise", "max_steps": 3}
    saving = {"save_strategy": "steps", "save_steps": 50}
    run = Script(script_of("tttttwtwwwwwwwww"), tmp_path, **settings, **saving)
    with pytest.raises(SamplingError, match=r"2 of 4 groups .* It was step 2; the last checkpoint is .*checkpoint-1"):
        run.train()
    state = torch.load(tmp_path / "checkpoint-1" / "sampling.pt", weights_only=True)["collector"]
    assert [group["place"] for group in state["waiting"]] == [4, 6]
    again = Script(script_of("ttttttttttttt" + "ttt"), tmp_path, **settings, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [batch[::2] for batch in again.trained] == [[4, 6, 11, 12], [13, 14, 15, 0]]


def test_a_failing_second_batch_of_a_step_hands_the_first_one_back(tmp_path: Path) -> None:
    """Two batches of two groups make a step; the second step finds three groups."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    asked = {"dynamic_sampling_max_rounds": 2, "dynamic_sampling_on_exhausted": "raise"}
    run = Script(
        script_of("tttttttwwwwwwwww"), tmp_path, **settings, **asked, save_strategy="steps", save_steps=50, max_steps=2
    )
    with pytest.raises(SamplingError, match="1 of 2 groups"):
        run.train()
    folder = tmp_path / "checkpoint-1"
    state = torch.load(folder / "sampling.pt", weights_only=True)["collector"]
    assert [group["place"] for group in state["waiting"]] == [4, 5, 6]
    assert torch.load(folder / "generation_batch_0.pt", weights_only=True)["step"] == 2


def test_a_short_batch_is_trained_on_with_a_warning_and_a_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    logging.getLogger("trl_algos").propagate = True
    with caplog.at_level(logging.WARNING):
        run = Script(script_of("twwtwwww"), tmp_path, dynamic_sampling_max_rounds=1, max_steps=1).train()
    assert run.trained == [twice([0, 3])]
    assert run.logged("sampling/missing_groups") == [2]
    assert run.logged("reward/unscorable") == [0.0]
    assert run.logged("reward/zero_variance_groups") == [0.0]
    table = run.table()
    assert (table["short_batches"], table["missing_groups"], table["trained"]["groups"]) == (1, 2, 2)
    assert table["trained"]["tokens"] == sum(int(b["completion_mask"].sum()) for b in run.batches) - 4
    (message,) = [m for m in caplog.messages if "dynamic_sampling" in m]
    assert "2 of 4 groups" in message
    assert "Step 1 trains on what there is." in message


def test_rejected_prompts_are_tried_again_and_counted(tmp_path: Path) -> None:
    """Prompts 1 and 3 are wrong the first time, and teach at the end of the epoch."""
    rewards = script_of("twtwtt")
    run = Script(rewards, tmp_path, dynamic_sampling_retry=1, max_steps=-1, num_train_epochs=1)
    original, seen = run.trainer.rollout_func, Counter()

    def improving(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        for prompt in set(prompts):
            seen[prompt] += 1
            if seen[prompt] == 2:
                rewards[int(prompt.split()[1][:-1])] = [1.0, 0.0]
        return original(prompts, trainer)

    run.trainer.rollout_func = improving
    run.train()
    assert [p for batch in run.trained for p in batch[::2]] == [0, 2, 4, 5, 1, 3]
    assert (run.table()["prompts"], run.table()["retried_prompts"]) == (6, 2)


# What a group is judged by


def test_length_shaping_is_not_judged(tmp_path: Path) -> None:
    """Prompts 0 and 1 differ in the penalty alone; the score of those that are kept holds it."""
    rewards = script_of("rrtt")
    run = Script(rewards, tmp_path, overlong_buffer=10, per_device_train_batch_size=4, max_steps=1).train()
    assert run.trained == [twice([2, 3])]
    assert run.logged("reward/overlong_penalty")[0] < 0
    assert run.table()["uninformative_groups"]["all_right"] == 2


def test_a_group_of_truncated_completions_alone_is_rejected_where_they_are_left_out(tmp_path: Path) -> None:
    """Prompt 0: both cut off. Prompt 1: one of them. The second round reaches prompt 2, and prompt 0 again."""
    rewards: dict[int, list[float | None]] = {0: [0.75, 0.75], 1: [0.75, 0.0], 2: [1.0, 0.0]}
    settings = {"per_device_train_batch_size": 4, "max_steps": 1}
    run = Script(rewards, tmp_path, mask_truncated_completions=True, **settings).train()
    assert run.trained == [twice([1, 2])]
    assert run.table()["uninformative_groups"]["truncated"] == 2
    run = Script(rewards, tmp_path, **settings).train()
    assert run.table()["uninformative_groups"]["constant"] == 2


def by_length(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def test_one_reward_function_may_judge_alone(tmp_path: Path) -> None:
    """The sum always differs, since lengths do; `reward` teaches at two prompts."""
    both = {"trainer": {"reward_funcs": [by_length, reward]}, "per_device_train_batch_size": 4, "max_steps": 1}
    assert Script(script_of("wrtt"), tmp_path, **both).train().trained == [twice([0, 1])]
    run = Script(script_of("wrtt"), tmp_path, **both, dynamic_sampling_metric="reward").train()
    assert run.trained == [twice([2, 3])]
    with pytest.raises(ConfigError, match=r"`dynamic_sampling_metric`: 'rewards' is not one of .* mean 'reward'\?"):
        Script(script_of("wrtt"), tmp_path, **both, dynamic_sampling_metric="rewards")


def test_weights_count_in_the_sum(tmp_path: Path) -> None:
    settings = {"trainer": {"reward_funcs": [by_length, reward]}, "per_device_train_batch_size": 4, "max_steps": 1}
    run = Script(script_of("wrtt"), tmp_path, **settings, reward_weights=[0.0, 1.0]).train()
    assert run.trained == [twice([2, 3])]


def test_a_range_of_mean_rewards(tmp_path: Path) -> None:
    rewards: dict[int, list[float | None]] = {0: [0.25, 0.0], 1: [1.0, 0.75], 2: [0.5, 0.25], 3: [1.0, 0.0]}
    settings = {"per_device_train_batch_size": 4, "max_steps": 1}
    run = Script(rewards, tmp_path, **settings, dynamic_sampling_range=[0.2, 0.7]).train()
    assert run.trained == [twice([2, 3])]
    assert run.table()["uninformative_groups"]["outside_range"] == 2


def test_the_tolerance(tmp_path: Path) -> None:
    rewards: dict[int, list[float | None]] = {0: [0.25, 0.5], 1: [1.0, 0.75], 2: [0.5, 0.0], 3: [1.0, 0.0]}
    settings = {"per_device_train_batch_size": 4, "max_steps": 1}
    assert Script(rewards, tmp_path, **settings, dynamic_sampling_tolerance=0.25).train().trained == [twice([2, 3])]


def test_rewards_of_none(tmp_path: Path) -> None:
    """A group with one score is rejected, one with two of three kept."""
    rewards: dict[int, list[float | None]] = {
        0: [None, 1.0, None],
        1: [None, 1.0, 0.0],
        2: [None] * 3,
        3: [1.0, 0.0, 0.0],
    }
    run = Script(rewards, tmp_path, num_generations=3, per_device_train_batch_size=6, max_steps=1).train()
    assert [p for batch in run.trained for p in batch] == [1] * 3 + [3] * 3
    assert run.table()["uninformative_groups"]["unscorable"] == 2


# Data


def test_a_stream(tmp_path: Path) -> None:
    rows = tiny.prompts(6).to_iterable_dataset()
    run = Script(script_of("twttwt"), tmp_path, trainer={"train_dataset": rows}).train()
    assert [batch[::2] for batch in run.trained] == [[0, 2, 3, 5], [0, 2, 3, 5]]
    with pytest.raises(ConfigError, match=r"`dynamic_sampling_retry`: 1 is not possible with a streamed data set"):
        Script(script_of("twttwt"), tmp_path, trainer={"train_dataset": rows}, dynamic_sampling_retry=1)


def test_images_are_refused(tmp_path: Path) -> None:
    rows = tiny.prompts(4, image=[None] * 4)
    with pytest.raises(ConfigError, match=r"not supported with prompts that hold images \(column 'image'\)"):
        Script(script_of("tttt"), tmp_path, trainer={"train_dataset": rows})


def test_columns_that_no_checkpoint_can_hold_are_refused_where_rows_are_kept(tmp_path: Path) -> None:
    import datetime

    rows = tiny.prompts(4, when=[datetime.datetime(2026, 1, 1)] * 4)
    saving = {"save_strategy": "steps", "max_steps": 1}
    with pytest.raises(ConfigError, match=r"could not be saved: `when` \(datetime\)"):
        Script(script_of("tttt"), tmp_path, trainer={"train_dataset": rows.to_iterable_dataset()}, **saving).train()
    Script(script_of("tttt"), tmp_path, trainer={"train_dataset": rows}, **saving).train()


def test_memory_of_rounds_is_a_tenth_each() -> None:
    assert collector.MEMORY == 0.9


def test_a_step_that_is_not_taken_is_not_counted_as_trained(tmp_path: Path) -> None:
    """Two generation batches make a step: the first is found, the second is not, and all groups wait again."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "dynamic_sampling_max_rounds": 1}
    run = Script(script_of("ttttwwtt"), tmp_path, dynamic_sampling_on_exhausted="raise", **settings)
    with pytest.raises(SamplingError):
        run.train()
    accounts, waiting = run.trainer.accounts, len(run.trainer.collector.waiting)
    assert (accounts.trained_groups, accounts.verdicts["informative"], waiting) == (0, 6, 6)


def test_a_stream_shorter_than_a_batch_is_refused_before_training(tmp_path: Path) -> None:
    run = Script(script_of("tttt"), tmp_path)
    run.trainer.train_dataset = run.trainer.train_dataset.select(range(3)).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"^`train_dataset` has 3 prompts, but one generation batch takes 4"):
        run.train()
