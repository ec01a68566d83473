"""Faults that users of such trainers met in public, each as a short run on a tiny model."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback

from trl_algos import PolicyConfig, PolicyTrainer

Settings = dict[str, Any]


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    """Share of digits, plus a little for every character so that ties are rare."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) + 0.01 * len(text) for text in completions]


def config(folder: Path, **settings: Any) -> PolicyConfig:
    defaults: Settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_completion_length": 6,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return PolicyConfig(**(defaults | settings))


def trainer(
    args: PolicyConfig, reward: Callable[..., list[Any]] = digits, model: Any = None, **kwargs: Any
) -> PolicyTrainer:
    kwargs.setdefault("train_dataset", tiny.prompts(8))
    kwargs.setdefault("processing_class", tiny.tokenizer())
    return PolicyTrainer(tiny.llama() if model is None else model, reward, args, **kwargs)


def parameters(run: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.model.named_parameters()}


def change(run: PolicyTrainer) -> float:
    """Largest change of a parameter over the training of `run`."""
    before = parameters(run)
    run.train()
    return max((value - before[name]).abs().max().item() for name, value in run.model.named_parameters())


def logged(run: PolicyTrainer, key: str) -> list[float]:
    return [entry[key] for entry in run.state.log_history if key in entry]


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every micro-batch that was trained on, those of its rows that teach nothing, too."""
    seen: list[dict[str, Any]] = []
    original = PolicyTrainer._open_window

    def spy(self: PolicyTrainer, batches: list[Any]) -> None:
        original(self, batches)
        seen.extend(self._window)

    monkeypatch.setattr(PolicyTrainer, "_open_window", spy)
    return seen


def advantages_in_data_order(windows: list[dict[str, Any]]) -> list[float]:
    """Row advantages of one generation batch, TRL's shuffle undone."""
    rows = torch.cat([batch["rollout_row"] for batch in windows])
    values = torch.cat([batch["advantages"] for batch in windows])
    return values[rows.argsort()].tolist()


@pytest.mark.parametrize("algorithm", ["reinforce", "reinforce_pp", "remax"])
def test_grp_1_one_sample_per_prompt_trains_where_the_baseline_is_no_group(algorithm: str, tmp_path: Path) -> None:
    run = trainer(config(tmp_path, algorithm=algorithm, num_generations=1, beta=0.0, per_device_train_batch_size=3))
    assert change(run) > 1e-4
    assert "frac_reward_zero_std" not in run.state.log_history[0]


class TestUnscorable:
    """RWD-1: a completion that no function can score leaves the baseline and is not trained on."""

    def test_row_of_none(self, tmp_path: Path, windows: list[dict[str, Any]]) -> None:
        # [1, None, 0, 1] -> RLOO over the three scored ones.
        run = trainer(
            config(tmp_path, algorithm="rloo", num_generations=4, beta=0.0), reward=lambda **kw: [1.0, None, 0.0, 1.0]
        )
        run.train()
        assert advantages_in_data_order(windows) == pytest.approx([0.5, 0.0, -1.0, 0.5], abs=1e-6)
        assert logged(run, "reward/unscorable") == [0.25]

    @pytest.mark.parametrize("algorithm", ["grpo", "opo", "gpg", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"])
    def test_group_of_none_only(self, algorithm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        run = trainer(
            config(tmp_path, algorithm=algorithm, num_generations=4, **WITHOUT_KL.get(algorithm, {"beta": 0.0})),
            reward=lambda completions, **kw: [None] * len(completions),
        )
        logging.getLogger("trl").propagate = True
        with caplog.at_level(logging.WARNING):
            moved = change(run)
        assert moved == 0.0
        assert sum("All reward functions returned None" in record.getMessage() for record in caplog.records) == 1
        numbers = {k: v for k, v in run.state.log_history[0].items() if isinstance(v, float)}
        assert numbers["policy_loss"] == 0.0
        assert numbers["reward/unscorable"] == 1.0
        assert not [name for name, value in numbers.items() if value != value]


# Rows that have no KL to turn off, with what else they need in groups of four.
WITHOUT_KL: dict[str, Settings] = {"opo": {}, "gpg": {}, "pass_at_k": {"pass_k": 2}}


@pytest.mark.parametrize("algorithm", ["dapo", "gspo", "reinforce_pp", "gmpo"])
def test_rwd_4_empty_completion(algorithm: str, tmp_path: Path, windows: list[dict[str, Any]]) -> None:
    """An empty completion neither crashes nor enters loss, whitening or token counts."""
    rollout = tiny.fixed_rollout({f"prompt {i}:": [[], [5, 6, tiny.EOS]] for i in range(8)})
    run = trainer(
        config(
            tmp_path,
            algorithm=algorithm,
            num_generations=2,
            mask_truncated_completions=True,
            **({"beta": 0.0} if algorithm == "reinforce_pp" else {}),
        ),
        reward=lambda completions, **kw: [5.0, 1.0] * (len(completions) // 2),
        rollout_func=rollout,
    )
    run.train()
    (batch,) = windows
    mask = batch["completion_mask"] * batch["tool_mask"]
    empty = batch["rollout_row"] % 2 == 0
    assert mask[empty].sum() == 0
    assert mask[~empty].sum(1).tolist() == [3, 3]
    assert logged(run, "policy/learned_tokens") == [6.0]
    assert logged(run, "sampling/generated_tokens") == [6.0]
    if algorithm == "dapo":
        assert batch["loss_divisor"] == 6.0
    if algorithm == "reinforce_pp":  # only the second rows are left, all alike: whitened to 0
        assert batch["advantages"].eq(0).all()


def test_bas_2_the_baseline_is_of_the_shaped_rewards(tmp_path: Path, windows: list[dict[str, Any]]) -> None:
    # Lengths 12, 16, 20 and 12 of at most 20 with a buffer of 8: penalties 0, -0.5, -1, 0 on rewards 1, 1, 1, 0.
    answers = [[5] * (n - 1) + [tiny.EOS] for n in (12, 16, 20, 12)]
    run = trainer(
        config(
            tmp_path,
            algorithm="dr_grpo",
            num_generations=4,
            max_completion_length=20,
            overlong_buffer=8,
        ),
        reward=lambda **kw: [1.0, 1.0, 1.0, 0.0],
        rollout_func=tiny.fixed_rollout({f"prompt {i}:": answers for i in range(8)}),
    )
    run.train()
    assert advantages_in_data_order(windows) == pytest.approx([0.625, 0.125, -0.375, -0.375], abs=1e-6)
    assert logged(run, "reward/overlong_penalty") == pytest.approx([-0.375])


def test_dap_1_a_completion_cut_at_the_limit_gets_the_whole_penalty(
    tmp_path: Path, windows: list[dict[str, Any]]
) -> None:
    answers = [[5] * 20, [5] * 11 + [tiny.EOS]]  # 20 tokens without an end; 12 tokens
    run = trainer(
        config(tmp_path, algorithm="dr_grpo", num_generations=2, max_completion_length=20, overlong_buffer=4),
        reward=lambda completions, **kw: [0.0] * len(completions),
        rollout_func=tiny.fixed_rollout({f"prompt {i}:": answers for i in range(8)}),
    )
    run.train()
    assert advantages_in_data_order(windows) == pytest.approx([-0.5, 0.5] * 2)


class TestReMax:
    """BAS-3: one greedy completion per distinct prompt, scored alike, not trained on, not in the metrics."""

    SAMPLED = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0)
    GREEDY = (0.5, 1.0)

    def run(self, folder: Path) -> tuple[PolicyTrainer, list[int]]:
        calls: list[int] = []
        sampled, greedy = self.SAMPLED, self.GREEDY

        def reward(completions: list[str], **kwargs: Any) -> list[float]:
            return list(greedy if len(completions) == len(greedy) else sampled)

        args = config(folder, algorithm="remax", num_generations=3, per_device_train_batch_size=6, beta=0.0)
        run = trainer(args, reward=reward)
        generate = run.model.generate

        def counting(*inputs: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(len(kwargs["input_ids"]))
            assert kwargs["generation_config"].do_sample == (len(calls) == 1)
            return generate(*inputs, **kwargs)

        run.model.generate = counting
        return run, calls

    def test_advantages_and_number_of_completions(self, tmp_path: Path, windows: list[dict[str, Any]]) -> None:
        run, calls = self.run(tmp_path)
        sampling = run.generation_config.to_dict(), dict(run.generation_kwargs), run.num_generations
        run.train()
        assert calls == [6, 2]  # six sampled rows, then one greedy row for each of two prompts
        assert advantages_in_data_order(windows) == pytest.approx([0.5, -0.5, 0.5, -1.0, -1.0, 0.0])
        assert sum(len(batch["advantages"]) for batch in windows) == 6
        assert (run.generation_config.to_dict(), run.generation_kwargs, run.num_generations) == sampling

    def test_metrics_are_those_of_the_sampled_completions(self, tmp_path: Path) -> None:
        run, _ = self.run(tmp_path)
        run.train()
        assert logged(run, "reward") == pytest.approx([0.5])
        assert len(run._metrics["train"]) == 0
        assert len(run._logs["prompt"]) == 6
        prompt_tokens = 6 * len("prompt 0:")
        assert run.state.num_input_tokens_seen == prompt_tokens + logged(run, "sampling/generated_tokens")[0]

    def test_evaluation_makes_no_greedy_completion(self, tmp_path: Path) -> None:
        args = config(tmp_path, algorithm="remax", num_generations=2, beta=0.0)
        run = trainer(args, eval_dataset=tiny.prompts(4))
        calls: list[int] = []
        generate = run.model.generate
        run.model.generate = lambda *a, **k: (calls.append(1), generate(*a, **k))[1]
        assert "eval_reward" in run.evaluate()
        assert len(calls) == 2  # four prompts, two completions each, batches of four


class TestKLPlacement:
    """KLR-3: KL is charged once, where `kl_placement` says."""

    def batch(self, run: PolicyTrainer) -> dict[str, Any]:
        """One response of two tokens, on-policy, reference 0.5 nats less likely at each."""
        inputs = {
            "prompt_ids": torch.tensor([[10, 11]]),
            "prompt_mask": torch.ones(1, 2, dtype=torch.long),
            "completion_ids": torch.tensor([[12, 13]]),
            "completion_mask": torch.ones(1, 2, dtype=torch.long),
        }
        logps = run.score(run.model, inputs).logps.detach()
        return inputs | {"old_per_token_logps": logps, "ref_per_token_logps": logps - 0.5}

    def test_in_the_loss(self, tmp_path: Path, model_folder: str) -> None:
        run = trainer(config(tmp_path, algorithm="grpo", beta=0.1, num_generations=2), model=model_folder)
        inputs = self.batch(run) | {"advantages": torch.ones(1)}
        # k3 of a log-ratio of 0.5: e^-0.5 + 0.5 - 1 = 0.106531
        assert run._compute_loss(run.model, inputs).item() == pytest.approx(-1 + 0.1 * 0.106531, abs=1e-6)

    def test_in_the_reward(self, tmp_path: Path, model_folder: str) -> None:
        settings = {"algorithm": "reinforce", "surrogate": "clip", "aggregation": "token_mean"}
        run = trainer(config(tmp_path, **settings, kl_placement="reward", beta=0.1), model=model_folder)
        inputs = self.batch(run)
        rollout = run_rollout(run, inputs)
        # token rewards -0.05 and 0.95; returns 0.9 and 0.95
        advantages = run.estimate_advantages(rollout)
        assert advantages.tolist()[0] == pytest.approx([0.9, 0.95], abs=1e-6)
        loss = run._compute_loss(run.model, inputs | {"advantages": advantages})
        assert loss.item() == pytest.approx(-0.925, abs=1e-6)
        loss.backward()
        with_reference = gradients(run)
        plain = trainer(config(tmp_path, **settings, beta=0.0), model=model_folder)
        plain._compute_loss(plain.model, inputs | {"advantages": advantages}).backward()
        torch.testing.assert_close(with_reference, gradients(plain), rtol=0, atol=0)

    @pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "full"])
    @pytest.mark.parametrize("placement", ["loss", "reward"])
    def test_every_estimator_trains_in_both_places(
        self, placement: str, estimator: str, tmp_path: Path, model_folder: str
    ) -> None:
        args = config(
            tmp_path,
            algorithm="rloo",
            num_generations=2,
            beta=0.1,
            kl_placement=placement,
            kl_estimator=estimator,
            max_steps=2,
        )
        run = trainer(args, model=model_folder)
        assert change(run) > 1e-4
        first, second = logged(run, "kl")
        assert first == pytest.approx(0.0, abs=1e-6)
        assert second != 0.0

    def test_full_kl_is_the_mean_of_k1_over_the_vocabulary(self, tmp_path: Path, model_folder: str) -> None:
        """Against a direct computation from two plain forward passes."""
        args = config(tmp_path, algorithm="grpo", num_generations=2, kl_estimator="full", beta=0.1)
        run = trainer(args, model=model_folder)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        inputs = self.batch(run) | {"advantages": torch.zeros(1)}
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        policy = run.model(ids).logits[:, 1:3].log_softmax(-1)
        reference = run.ref_model(ids).logits[:, 1:3].log_softmax(-1)
        expected = (policy.exp() * (policy - reference)).sum(-1).mean()
        assert run._compute_loss(run.model, inputs).item() == pytest.approx(0.1 * expected.item(), rel=1e-5)

    @pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce_pp"])
    def test_no_reference_is_loaded_without_a_coefficient(self, algorithm: str, tmp_path: Path) -> None:
        run = trainer(config(tmp_path, algorithm=algorithm, beta=0.0, num_generations=2))
        assert run.ref_model is None
        run.train()
        assert logged(run, "kl") == []


def gradients(run: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}


def run_rollout(run: PolicyTrainer, inputs: dict[str, Any]) -> Any:
    """The rollout of one completion with score 1."""
    run._scored, run._generated_lengths = (torch.ones(1, 1), [2]), [2]
    run.model.train()
    return run._collect([{"prompt": "x"}], inputs)


@pytest.mark.parametrize("lora", [False, True])
def test_lgp_2_dropout_does_not_touch_the_first_ratio(lora: bool, tmp_path: Path) -> None:
    """GPT-2 with all dropouts 0.1 and LoRA dropout 0.5, learning rate 0, two passes over one generation batch."""
    folder = tmp_path / "gpt2"
    tiny.gpt2(dropout=0.1).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    args = config(
        tmp_path, algorithm="grpo", learning_rate=0.0, num_iterations=2, max_steps=2, num_generations=2, beta=0.04
    )
    peft_config = LoraConfig(r=4, lora_dropout=0.5, target_modules=["c_attn"], init_lora_weights=False)
    run = trainer(args, model=str(folder), peft_config=peft_config if lora else None)
    run.train()
    for log in run.state.log_history[:2]:
        assert log["policy/ratio/min"] == pytest.approx(1.0, abs=1e-5)
        assert log["policy/ratio/max"] == pytest.approx(1.0, abs=1e-5)
        assert log["policy/approx_kl"] < 1e-6
        assert log["clip_ratio/region_mean"] == 0.0
        if not lora:
            assert log["kl"] == pytest.approx(0.0, abs=1e-6)


def test_plain_number_dropout_is_off_as_well(tmp_path: Path) -> None:
    """Llama keeps its attention dropout as a number, which no `nn.Dropout` module shows."""
    model = tiny.llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    run = trainer(
        config(tmp_path, algorithm="dapo", num_generations=2, num_iterations=2, max_steps=2, learning_rate=0.0),
        model=model,
    )
    run.train()
    assert logged(run, "policy/ratio/max") == pytest.approx([1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_lor_4_gradient_checkpointing_with_lora_trains_every_adapter(use_reentrant: bool, tmp_path: Path) -> None:
    args = config(
        tmp_path,
        algorithm="dapo",
        num_generations=2,
        max_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
    )
    run = trainer(args, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    run.train()
    adapters = {name: p for name, p in run.model.named_parameters() if "lora_B" in name}
    assert len(adapters) == 4
    assert all(p.abs().max() > 0 for p in adapters.values())


class TestKLController:
    """RES-1: the adaptive coefficient is part of the checkpoint."""

    def test_coefficients_of_the_case(self, tmp_path: Path, model_folder: str) -> None:
        def adaptive() -> PolicyTrainer:
            settings = {"kl_controller": "adaptive", "beta": 0.1, "kl_target": 6.0, "kl_horizon": 10_000}
            return trainer(config(tmp_path, algorithm="rloo", num_generations=2, **settings), model=model_folder)

        run = adaptive()
        for kl in (9.0, 9.0):
            run._update_kl_controller(kl, 64)
        assert run.kl_controller.coef == pytest.approx(0.10025616, abs=1e-8)
        run.create_optimizer_and_scheduler(1)
        run._save_checkpoint(run.model, None)
        resumed = adaptive()
        resumed.create_optimizer_and_scheduler(1)
        resumed._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-0"))
        resumed._update_kl_controller(3.0, 64)
        assert resumed.kl_controller.coef == pytest.approx(0.10012784, abs=1e-8)

    @pytest.mark.parametrize("placement", ["loss", "reward"])
    def test_a_resumed_run_equals_the_uninterrupted_one(
        self, placement: str, tmp_path: Path, model_folder: str
    ) -> None:
        def adaptive(folder: Path, steps: int) -> PolicyTrainer:
            args = config(
                folder,
                algorithm="grpo",
                kl_placement=placement,
                num_generations=2,
                kl_controller="adaptive",
                kl_target=0.01,
                kl_horizon=20,
                max_steps=4,
                lr_scheduler_type="constant",
                save_strategy="steps",
                save_steps=2,
            )
            args.max_steps = steps
            return trainer(args, model=model_folder)

        whole = adaptive(tmp_path / "whole", 4)
        whole.train()
        half = adaptive(tmp_path / "half", 2)
        half.train()
        resumed = adaptive(tmp_path / "half", 4)
        resumed.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
        coefficients = logged(whole, "policy/kl_coef")
        assert len(set(coefficients)) == 4
        assert logged(resumed, "policy/kl_coef") == coefficients
        torch.testing.assert_close(parameters(resumed), parameters(whole), rtol=0, atol=0)

    def test_evaluation_does_not_move_it(self, tmp_path: Path, model_folder: str) -> None:
        args = config(
            tmp_path, algorithm="rloo", num_generations=2, kl_controller="adaptive", kl_target=1e-3, beta=0.1
        )
        run = trainer(args, model=model_folder, eval_dataset=tiny.prompts(4))
        run.evaluate()
        assert run.kl_controller.coef == 0.1


class TestEvaluation:
    """EVL-1: evaluation has a group size of its own and leaves training alone."""

    @pytest.mark.parametrize("group", [1, 2])
    @pytest.mark.parametrize("algorithm", ["grpo", "rloo", "opo", "gpg", "pass_at_k", "reinforce_pp_baseline"])
    def test_other_group_size(self, algorithm: str, group: int, tmp_path: Path) -> None:
        args = config(
            tmp_path,
            algorithm=algorithm,
            num_generations=4,
            num_generations_eval=group,
            per_device_eval_batch_size=2,
            **WITHOUT_KL.get(algorithm, {"beta": 0.0}),
        )
        run = trainer(args, eval_dataset=tiny.prompts(4))
        figures = run.evaluate()
        assert all(value == value for value in figures.values() if isinstance(value, float))

    def test_groups_are_those_of_evaluation(self, tmp_path: Path) -> None:
        args = config(tmp_path, algorithm="dr_grpo", num_generations=4, num_generations_eval=2)
        run = trainer(args, reward=lambda **kw: [1.0, 0.0, 1.0, 1.0], eval_dataset=tiny.prompts(2))
        run.model.eval()
        output = run._generate_and_score_completions([{"prompt": f"prompt {i // 2}:"} for i in range(4)])
        assert output["advantages"].tolist() == [0.5, -0.5, 0.0, 0.0]

    def test_training_goes_on_as_if_nothing_had_happened(self, tmp_path: Path) -> None:
        def run(evaluates: bool) -> PolicyTrainer:
            args = config(
                tmp_path,
                algorithm="dapo",
                num_generations=2,
                max_steps=2,
                eval_strategy="steps" if evaluates else "no",
                eval_steps=1,
            )
            rollout = tiny.fixed_rollout({f"prompt {i}:": [[5, 6, 7], [50, tiny.EOS]] for i in range(8)})
            result = trainer(args, eval_dataset=tiny.prompts(2), rollout_func=rollout)
            result.train()
            return result

        torch.testing.assert_close(parameters(run(True)), parameters(run(False)), rtol=0, atol=1e-7)


def test_gen_2_the_real_eos_is_trained_on_when_it_is_also_the_padding(
    tmp_path: Path, windows: list[dict[str, Any]]
) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    args = config(
        tmp_path, algorithm="dapo", num_generations=2, per_device_train_batch_size=2, max_completion_length=5
    )
    run = trainer(args, processing_class=tokenizer)
    eos = tokenizer.eos_token_id
    answers = torch.tensor([[7, 8, eos, eos, eos], [7, 8, 9, 5, 6]])
    run.model.generate = lambda **kwargs: torch.cat([kwargs["input_ids"], answers], dim=1)
    run.train()
    (batch,) = windows
    rows = batch["completion_mask"][batch["rollout_row"].argsort()]
    assert rows.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert logged(run, "completions/clipped_ratio") == [0.5]


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(tmp_path: Path) -> None:
    """KLR-2: a NaN at a trained token must surface."""
    run = trainer(config(tmp_path, algorithm="dapo", num_generations=2))
    before = parameters(run)
    original = run._get_per_token_logps_and_entropies

    def broken(*args: Any, **kwargs: Any) -> Any:
        logps, *rest = original(*args, **kwargs)
        return logps * torch.where(torch.arange(logps.shape[1]) == 0, torch.nan, 1.0), *rest

    run._get_per_token_logps_and_entropies = broken
    with pytest.raises(FloatingPointError, match="step 1 is nan"):
        run.train()
    torch.testing.assert_close(parameters(run), before, rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "reinforce"])
def test_token_rewards_are_there_when_the_kl_is_in_the_loss(algorithm: str, tmp_path: Path, model_folder: str) -> None:
    args = config(tmp_path, algorithm=algorithm, num_generations=1, kl_placement="loss", kl_estimator="k2", beta=0.1)
    assert change(trainer(args, model=model_folder)) > 1e-4


def test_a_hook_that_returns_nan_is_named(tmp_path: Path) -> None:
    class Broken(PolicyTrainer):
        def estimate_advantages(self, rollout: Any) -> torch.Tensor:
            return rollout.rewards * torch.nan

    run = Broken(
        tiny.llama(),
        digits,
        config(tmp_path, algorithm="dapo", num_generations=2),
        train_dataset=tiny.prompts(8),
        processing_class=tiny.tokenizer(),
    )
    with pytest.raises(FloatingPointError, match="`estimate_advantages`"):
        run.train()


def test_the_mean_length_penalty_counts_steps_without_one(tmp_path: Path) -> None:
    """One completion at the limit in the first of two steps, none in the second."""
    answers = {f"prompt {i}:": [[5, tiny.EOS], [5] * 4 if i < 2 else [6, tiny.EOS]] for i in range(4)}
    args = config(
        tmp_path,
        algorithm="dapo",
        num_generations=2,
        dynamic_sampling=False,
        max_completion_length=4,
        overlong_buffer=1,
        max_steps=2,
        logging_steps=2,
        shuffle_dataset=False,
    )
    run = trainer(args, rollout_func=tiny.fixed_rollout(answers), train_dataset=tiny.prompts(4))
    run.train()
    assert logged(run, "reward/overlong_penalty") == pytest.approx([-0.25])


def test_klr_2_a_nan_kl_in_the_reward_surfaces(tmp_path: Path, model_folder: str) -> None:
    """It must not pass for a completion that no function scored."""
    run = trainer(config(tmp_path, algorithm="rloo", num_generations=2, beta=0.1), model=model_folder)
    original = run._get_per_token_logps_and_entropies

    def broken(model: Any, *args: Any, **kwargs: Any) -> Any:
        logps, *rest = original(model, *args, **kwargs)
        if model is run.ref_model:
            logps[0, 0] = torch.nan
        return logps, *rest

    run._get_per_token_logps_and_entropies = broken
    with pytest.raises(FloatingPointError, match="KL to the reference is NaN"):
        run.train()


def test_a_fixed_coefficient_is_a_setting_and_not_state(tmp_path: Path, model_folder: str) -> None:
    """Resuming with another `beta` uses it."""

    def run(beta: float, steps: int) -> PolicyTrainer:
        settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": steps}
        return trainer(
            config(tmp_path, algorithm="grpo", num_generations=2, beta=beta, **settings), model=model_folder
        )

    run(0.04, 1).train()
    resumed = run(0.5, 2)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "policy/kl_coef")[-1] == 0.5


def test_evaluation_logs_the_kl_of_the_reward(tmp_path: Path, model_folder: str) -> None:
    args = config(tmp_path, algorithm="rloo", num_generations=2, beta=0.1)
    figures = trainer(args, model=model_folder, eval_dataset=tiny.prompts(4)).evaluate()
    assert figures["eval_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_moe_loss_is_averaged_over_the_accumulation(accumulation: int, tmp_path: Path) -> None:
    """Equal micro-batches have equal balancing losses, so the step's gradient does not depend on their number."""
    torch.manual_seed(0)
    moe = MixtralConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        pad_token_id=tiny.PAD,
    )
    args = config(
        tmp_path,
        algorithm="dapo",
        dynamic_sampling=False,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1.0,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
    )
    run = trainer(
        args,
        reward=lambda completions, **kw: [1.0] * len(completions),  # no advantage: the router alone is trained
        model=MixtralForCausalLM(moe),
        train_dataset=Dataset.from_dict({"prompt": ["same:"] * 4}),
        rollout_func=tiny.fixed_rollout({"same:": [[5, 6, 7, tiny.EOS]]}),
    )
    before = parameters(run)
    run.train()
    moved = {name: value - before[name] for name, value in parameters(run).items() if "gate" in name}
    reference = MOE_CHANGE.setdefault("first", moved)
    assert any(value.abs().max() > 1e-6 for value in moved.values())
    torch.testing.assert_close(moved, reference, rtol=1e-5, atol=1e-8)


MOE_CHANGE: dict[str, dict[str, torch.Tensor]] = {}


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_step_without_a_trained_token_leaves_the_adaptive_coefficient_alone(
    placement: str, tmp_path: Path, model_folder: str
) -> None:
    args = config(
        tmp_path,
        algorithm="grpo",
        num_generations=2,
        kl_placement=placement,
        kl_controller="adaptive",
        beta=0.1,
        mask_truncated_completions=True,
    )
    rollout = tiny.fixed_rollout({f"prompt {i}:": [[5, 6], [7, 8]] for i in range(8)})
    run = trainer(args, model=model_folder, rollout_func=rollout)
    assert change(run) == 0.0
    assert run.kl_controller.coef == 0.1


def test_evaluation_within_a_step_leaves_its_metrics_alone(tmp_path: Path) -> None:
    class EvaluateBetween(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            run.evaluate()

    def steps(callbacks: list[TrainerCallback]) -> PolicyTrainer:
        args = config(
            tmp_path,
            algorithm="dapo",
            num_generations=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
        )
        rollout = tiny.fixed_rollout({f"prompt {i}:": [[5, 6, 7], [50 + i, tiny.EOS]] for i in range(8)})
        return trainer(args, rollout_func=rollout, callbacks=callbacks, eval_dataset=tiny.prompts(2))

    plain = steps([])
    plain.train()
    run = steps([EvaluateBetween()])
    run.train()
    for name in ("policy_loss", "policy/learned_tokens", "entropy"):
        assert logged(run, name) == pytest.approx(logged(plain, name), abs=1e-6)


def test_a_data_set_that_fills_no_generation_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 1 prompts, but one generation batch takes 2"):
        trainer(config(tmp_path, algorithm="dapo", num_generations=2), train_dataset=tiny.prompts(1)).train()


@pytest.mark.parametrize("returned", [None, [0.0] * 4, torch.zeros(3)])
def test_a_hook_that_returns_something_else_is_told_what_to_return(returned: Any, tmp_path: Path) -> None:
    class Odd(PolicyTrainer):
        def estimate_advantages(self, rollout: Any) -> Any:
            return returned

    args = config(tmp_path, algorithm="gspo", num_generations=2)
    run = Odd(tiny.llama(), digits, args, train_dataset=tiny.prompts(8), processing_class=tiny.tokenizer())
    with pytest.raises(ValueError, match=r"must return a tensor of shape \(4,\), not"):
        run.train()
