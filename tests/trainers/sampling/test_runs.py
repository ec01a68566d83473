"""Whole runs, with what else a trainer can do: dynamic sampling changes which prompts are trained on, and no more."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from scripted import VALUES, Script, reward, script_of, tag
from transformers import LlamaConfig, LlamaForSequenceClassification

from trl_algos import PolicyConfig, PolicyTrainer


def sampled(folder: Path, score: Any = None, **settings: Any) -> PolicyTrainer:
    """A trainer that samples by itself."""

    def parity(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 3 == 0) for ids in completion_ids]

    defaults = {
        "algorithm": "dapo",
        "overlong_buffer": 0,
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    args = PolicyConfig(**(defaults | settings))
    data, tokenizer = tiny.prompts(16), tiny.tokenizer()
    return PolicyTrainer(tiny.llama(), score or parity, args, train_dataset=data, processing_class=tokenizer)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def by_tokens(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs from completion to completion."""
    return [float(sum(ids)) / 500 for ids in completion_ids]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps_per_generation": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
        {"num_iterations": 2},
    ],
    ids=str,
)
def test_where_all_groups_teach_nothing_changes(settings: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for dynamic in (True, False):
        run = sampled(tmp_path, by_tokens, dynamic_sampling=dynamic, **settings)
        run.train()
        runs.append(run)
    first, second = (weights(run) for run in runs)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    tables = [run.accounts.table() for run in runs]
    for table in tables:
        assert table.pop("generation_seconds") > 0
    assert tables[0] == tables[1]
    assert tables[0]["acceptance_rate"] == 1.0


def test_the_plain_run_keeps_the_same_accounts(tmp_path: Path) -> None:
    """Prompts 0 to 7 as they come: what would have been rejected is told apart, and trained on."""
    run = Script(script_of("twrntctt"), tmp_path, dynamic_sampling=False).train()
    table = run.table()
    assert (table["prompts"], table["completions"], table["informative_groups"]) == (8, 16, 4)
    assert table["uninformative_groups"] | {"unscorable": 1} == {
        **dict.fromkeys(("all_right", "all_wrong", "constant", "unscorable"), 1),
        **dict.fromkeys(("truncated", "outside_range"), 0),
    }
    assert table["trained"] == {"groups": 8, "completions": 16, "tokens": table["tokens"]}
    assert table["rounds_per_batch"] == {"mean": 1.0, "most": 1}
    assert run.logged("sampling/acceptance_rate") == pytest.approx([1 / 4, 3 / 4])
    assert run.logged("sampling/all_right") == pytest.approx([1 / 4, 0.0])


def test_evaluation_between_steps_changes_nothing_and_refills_nothing(tmp_path: Path) -> None:
    plain = Script(script_of("wwwttttttttttttt"), tmp_path).train()
    evaluation = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "num_generations_eval": 2,
    }
    data = {"trainer": {"eval_dataset": tiny.prompts(4)}}
    run = Script(script_of("wwwttttttttttttt"), tmp_path, **evaluation, **data)
    run.train()
    for name, value in run.weights.items():  # evaluation draws random numbers, which changes the order of rows
        torch.testing.assert_close(value, plain.weights[name], rtol=0, atol=1e-6)
    assert run.table() | {"generation_seconds": 0, "generation_seconds_on_uninformative": 0} == plain.table() | {
        "generation_seconds": 0,
        "generation_seconds_on_uninformative": 0,
    }
    assert run.logged("eval_sampling/acceptance_rate") == pytest.approx([1 / 4] * 2)
    assert run.logged("eval_sampling/rounds") == [1, 1]


def test_async_rewards_and_rewards_of_models_judge_as_others_do(tmp_path: Path) -> None:
    async def later(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        await asyncio.sleep(0)
        return [VALUES[ids[1] - 30] for ids in completion_ids]

    expected = Script(script_of("twtrtttt"), tmp_path).train()
    run = Script(script_of("twtrtttt"), tmp_path, trainer={"reward_funcs": later}).train()
    assert run.trained == expected.trained
    torch.manual_seed(0)
    size = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    judge = LlamaForSequenceClassification(
        LlamaConfig(**size, num_attention_heads=2, pad_token_id=tiny.PAD, num_labels=1)
    )
    settings = {"reward_processing_classes": tiny.tokenizer(), "reward_funcs": judge}
    run = Script(script_of("twtrtttt"), tmp_path, trainer=settings).train()
    assert run.trained == [[p for p in batch for _ in range(2)] for batch in ([0, 1, 2, 3], [4, 5, 6, 7])]


def test_fields_of_a_rollout_function_reach_rewards_and_come_back(tmp_path: Path) -> None:
    """Fields that it returns besides, and a mask with holes: the carried group's too."""
    seen: list[tuple[int, int]] = []

    def scored(completions: list[str], completion_ids: list[list[int]], turns: list[int], **_: Any) -> list[Any]:
        seen.extend(zip([ids[0] - 100 for ids in completion_ids], turns, strict=True))
        return reward(completions, completion_ids)

    run = Script(script_of("wwwttttttttttttt"), tmp_path, trainer={"reward_funcs": scored})
    original = run.trainer.rollout_func

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = original(prompts, trainer)
        ids = output["completion_ids"]
        return output | {
            "turns": [row[0] - 100 for row in ids],
            "env_mask": [[1, 0, *[1] * (len(row) - 2)] for row in ids],
        }

    run.trainer.rollout_func = rollout
    run.train()
    assert all(prompt == turn for prompt, turn in seen)
    assert len(seen) == 2 * sum(map(len, run.rounds))  # once for each completion: nothing is scored twice
    for batch in run.batches:
        assert (batch["tool_mask"][:, 1] == 0).all()
        assert (batch["tool_mask"][:, 0] == 1).all()
    tokens = sum(int((batch["tool_mask"] * batch["completion_mask"]).sum()) for batch in run.batches)
    assert run.table()["trained"]["tokens"] == tokens


def test_what_reward_functions_log(tmp_path: Path) -> None:
    """Columns follow their rows into the table of completions; numbers count all that was sampled."""

    def logging(
        completions: list[str], completion_ids: list[list[int]], log_extra: Any, log_metric: Any, **_: Any
    ) -> Any:
        log_extra("number", [ids[0] - 100 for ids in completion_ids])
        log_metric("rows", float(len(completions)))
        return reward(completions, completion_ids)

    run = Script(script_of("twtwtttttttttttt"), tmp_path, trainer={"reward_funcs": logging}, log_completions=True)
    run.train()
    for step in (1, 2):
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        assert [f"prompt {n}:" for n in table["number"]] == table["prompt"].tolist()
        assert len(table) == 8 * step or len(table) == 8
        assert set(table["logging"]) == {0.0, 1.0}
        assert table["advantage"].abs().min() > 0.5
    assert run.logged("rows")[0] == pytest.approx(8.0)


def test_remax_compares_with_greedy_completions_of_kept_prompts_alone(tmp_path: Path) -> None:
    """Greedy completions are the first ones, which are right: the advantages are 0 and -1."""
    run = Script(script_of("twttwttt"), tmp_path, algorithm="remax", beta=0.0, num_generations=2, max_steps=1)
    asked: list[list[Any]] = []
    original = run.trainer.rollout_func

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if trainer.greedy:
            asked.append(prompts)
        return original(prompts, trainer)

    run.trainer.rollout_func = rollout
    run.train()
    kept = [0, 2, 3, 5]
    assert asked == [[f"prompt {p}:" for p in kept]]
    (batch,) = run.batches
    order = batch["rollout_row"].argsort()
    assert batch["advantages"][order].tolist() == [0.0, -1.0] * 4


class Engine:
    """A stand-in for vLLM: its log-probs are those of the policy less 0.1."""

    temperature = 1.0

    def __init__(self, run: Script) -> None:
        self.run, self.synced = run, 0

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any) -> tuple[Any, ...]:
        assert num_generations == 2
        texts = [self.run.trainer.processing_class.decode(ids) for ids in prompts]
        answers = self.run.rollout(texts, self.run.trainer)["completion_ids"]
        logprobs = []
        for prompt, ids in zip(prompts, answers, strict=True):
            with torch.no_grad():
                logits = self.run.trainer.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logps = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
            logprobs.append([[x - 0.1] for x in logps.tolist()])
        return prompts, answers, logprobs, None


def test_an_engine_is_corrected_by_the_policy_that_it_sampled_for(tmp_path: Path) -> None:
    """All weights are e^0.1, those of groups that waited through a large step, too; one sync for all rounds."""
    settings = {"learning_rate": 0.5, "vllm_importance_sampling_mode": "token_truncate"}
    run = Script(script_of("wwwttttttttttttt"), tmp_path, trainer={"rollout_func": None}, **settings)
    engine = Engine(run)
    run.trainer.use_vllm, run.trainer.vllm_generation, run.trainer._last_loaded_step = True, engine, -1
    run.train()
    second = run.batches[1]
    assert 7 in {tag(ids) for ids in second["completion_ids"]}
    used = second["completion_mask"].bool()
    ratios = second["importance_sampling_ratio"][used]
    torch.testing.assert_close(ratios, torch.full_like(ratios, math.exp(0.1)), rtol=0, atol=1e-4)
    assert run.logged("sampling/importance_sampling_ratio/max") == pytest.approx([math.exp(0.1)] * 2, abs=1e-4)
    assert run.logged("sampling/sampling_logp_difference/max") == pytest.approx([0.1] * 2, abs=1e-4)
    assert run.logged("policy/ratio/max")[1] > 1.01
    assert engine.synced == 1 < len(run.rounds)  # an engine is asked for more: the second batch had waited whole


def test_metrics_of_the_batch_are_those_of_its_rows(tmp_path: Path) -> None:
    """TRL's are over what was sampled where they are about completions, and over the batch where about rewards."""
    run = Script(script_of("wtwttttt"), tmp_path, max_steps=1).train()
    assert run.logged("reward") == [0.5]
    assert run.logged("rewards/reward/mean") == [0.5]
    assert run.logged("frac_reward_zero_std") == [0.0]
    means = [0.5 if p not in (0, 2) else 0.0 for asked in run.rounds for p in asked]
    assert run.logged("sampling/reward") == pytest.approx([sum(means) / len(means)])
    (batch,) = run.batches
    assert run.logged("policy/learned_tokens") == [float(batch["completion_mask"].sum())]
