"""What a run with a critic leaves and takes up again: checkpoints, the final folder, the warm-up, the metrics."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from ppo_oracle import FORMS, LAMBDA, Oracle, critic_state, make_trainer, policy_state
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from trl_algos import ConfigError, load_critic
from trl_algos.config import PolicyConfig
from trl_algos.trainers import PPOTrainer


def sampling_trainer(name: str, folder: str, output: Path, **settings: Any) -> PPOTrainer:
    """A trainer that samples, with dropout in the policy's adapter, which is turned off."""
    form, uses_lora, extra = FORMS[name]
    config = {
        "output_dir": str(output),
        "algorithm": "ppo",
        "critic": form,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "max_completion_length": 6,
        "num_iterations": 1,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "critic_learning_rate": 2e-2,
        "weight_decay": 0.1,
        "kl_controller": "adaptive",
    }
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.3, task_type="CAUSAL_LM")
    return PPOTrainer(
        folder,
        lambda completions, completion_ids, **_: [sum(ids) % 5 / 4 for ids in completion_ids],
        PolicyConfig(**config | extra | settings),
        train_dataset=tiny.prompts(8),
        eval_dataset=tiny.prompts(8),
        peft_config=lora if uses_lora else None,
    )


def states(trainer: PPOTrainer) -> dict[str, Tensor]:
    """All that is trained."""
    return {f"policy.{n}": p for n, p in policy_state(trainer).items()} | critic_state(trainer)


def logs(trainer: PPOTrainer) -> list[dict[str, float]]:
    durations = ("time", "second")  # parts of their names
    return [
        {k: v for k, v in log.items() if not any(part in k for part in durations) and k != "train_loss"}
        for log in trainer.state.log_history
        if "loss" in log
    ]


@pytest.mark.parametrize("name", FORMS)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(name: str, model_folder: str, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "critic_warmup_steps": 1, "num_iterations": 2}
    whole = sampling_trainer(name, model_folder, tmp_path, **settings)
    whole.train()
    resumed = sampling_trainer(name, model_folder, tmp_path, **settings)
    start = states(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert states(resumed).keys() == states(whole).keys()
    for key, value in states(resumed).items():
        assert value.equal(states(whole)[key]), key
    assert any(not value.equal(start[key]) for key, value in states(resumed).items() if key.startswith("policy."))
    assert logs(resumed) == logs(whole)


@pytest.mark.parametrize("name", ["adapter", "separate", "shared"])
def test_the_best_checkpoint_is_loaded_with_its_critic(name: str, model_folder: str, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_made_up", "greater_is_better": False}
    every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = sampling_trainer(name, model_folder, tmp_path, **best, **every, per_device_eval_batch_size=8)
    trainer.evaluate = lambda *_, **__: {"eval_made_up": trainer.state.global_step}
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    head = load_file(tmp_path / "checkpoint-1/critic/value_head.safetensors")
    assert trainer.critic.head.weight.equal(head["weight"])
    assert not head["weight"].equal(load_file(tmp_path / "checkpoint-4/critic/value_head.safetensors")["weight"])
    assert all(p.requires_grad for p in trainer.critic.parameters())


def test_a_checkpoint_without_its_critic_is_refused(model_folder: str, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    sampling_trainer("adapter", model_folder, tmp_path, **settings).train()
    settings |= {"max_steps": 3}
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"^`resume_from_checkpoint`: '.*critic' holds a critic of the form adapter"):
        sampling_trainer("separate_lora", model_folder, tmp_path, **settings).train(resume_from_checkpoint=checkpoint)
    (tmp_path / "checkpoint-2/critic/adapter/adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"^`resume_from_checkpoint`: .*adapter_model.safetensors is missing"):
        sampling_trainer("adapter", model_folder, tmp_path, **settings).train(resume_from_checkpoint=checkpoint)
    (tmp_path / "checkpoint-2/checkpoint.json").unlink()  # as one of a run of TRL's own
    shutil.rmtree(tmp_path / "checkpoint-2/critic")
    with pytest.raises(ConfigError, match=r"^`resume_from_checkpoint`: .*critic' holds no critic"):
        sampling_trainer("adapter", model_folder, tmp_path, **settings).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("name", FORMS)
def test_the_final_folder_holds_a_critic_with_equal_values_and_a_policy_without_it(
    name: str, model_folder: str, tmp_path: Path
) -> None:
    trainer = sampling_trainer(name, model_folder, tmp_path, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path))
    ids = torch.randint(2, 258, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        values = trainer.model(input_ids=ids, attention_mask=mask, with_values="values")
        assert load_critic(tmp_path / "critic")(ids, mask).equal(values)
        uses_lora = FORMS[name][1]
        auto_class = AutoPeftModelForCausalLM if uses_lora else AutoModelForCausalLM
        logits = auto_class.from_pretrained(tmp_path)(ids, attention_mask=mask).logits
        assert logits.equal(trainer.model(input_ids=ids, attention_mask=mask).logits)
    (weights,) = tmp_path.glob("*model.safetensors")
    assert not [key for key in load_file(weights) if "critic" in key or "value_head" in key]
    assert values.std() > 0


def test_what_an_earlier_critic_left_in_the_folder_is_not_read(model_folder: str, tmp_path: Path) -> None:
    for name in ("adapter", "separate"):
        trainer = sampling_trainer(name, model_folder, tmp_path, max_steps=1)
        trainer.save_model(str(tmp_path))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        values = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), with_values="values")
        assert load_critic(tmp_path / "critic")(ids).equal(values)


def test_a_critic_that_is_not_pushed_lies_where_the_hub_does_not_look(model_folder: str, tmp_path: Path) -> None:
    trainer = make_trainer("separate", model_folder)
    trainer.args.output_dir = str(tmp_path)
    assert trainer.critic_folder(tmp_path) == tmp_path / "critic"
    trainer.args.push_to_hub = True
    assert trainer.critic_folder(tmp_path) == tmp_path / "_critic"
    assert trainer.critic_folder(tmp_path / "checkpoint-2") == tmp_path / "checkpoint-2/critic"
    trainer.args.push_critic = True
    assert trainer.critic_folder(tmp_path) == tmp_path / "critic"


def test_a_folder_without_a_critic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`folder`: .* holds no critic: critic.json and value_head.safetensors"):
        load_critic(tmp_path)


@pytest.mark.parametrize("name", FORMS)
def test_the_warm_up_trains_the_critic_alone(name: str, model_folder: str, tmp_path: Path) -> None:
    """After it AdamW starts afresh: its first step moves each weight by the learning rate."""
    settings = {"critic_warmup_steps": 2, "lr_scheduler_type": "constant", "max_steps": 3, "weight_decay": 0.0}
    trainer = sampling_trainer(name, model_folder, tmp_path, **settings)
    start = states(trainer)
    seen: list[dict[str, Tensor]] = []
    step = trainer._get_grad_norm

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(states(trainer))  # before the step
        return step(*args, **kwargs)

    trainer._get_grad_norm = watched
    trainer.train()
    seen.append(states(trainer))
    for before in seen[:3]:
        for key, value in before.items():
            if key.startswith("policy."):
                assert value.equal(start[key]), key
    assert not seen[2]["head.weight"].equal(start["head.weight"])
    change = max(float((seen[3][k] - start[k]).abs().max()) for k in start if k.startswith("policy."))
    assert change == pytest.approx(1e-2, rel=1e-3)
    assert [log["learning_rate"] for log in logs(trainer)] == [0.0, 0.0, 1e-2]
    assert [log["value/learning_rate"] for log in logs(trainer)] == [2e-2] * 3


def test_the_schedule_of_the_policy_starts_after_the_warm_up(model_folder: str, tmp_path: Path) -> None:
    """Linear to 0: the critic's over 4 steps, the policy's over the last 2."""
    trainer = sampling_trainer("separate", model_folder, tmp_path, critic_warmup_steps=2)
    trainer.train()
    assert [log["learning_rate"] for log in logs(trainer)] == pytest.approx([0.0, 0.0, 1e-2, 0.5e-2])
    assert [log["value/learning_rate"] for log in logs(trainer)] == pytest.approx([2e-2, 1.5e-2, 1e-2, 0.5e-2])


def test_gradients_are_clipped_apart(model_folder: str, tmp_path: Path) -> None:
    """With plain gradient descent a step is as long as its clipped gradient times the learning rate."""
    settings = {"optim": "sgd", "max_steps": 1, "max_grad_norm": 0.3, "critic_max_grad_norm": 0.001, "weight_decay": 0}
    settings["vf_coef"] = 10  # so that both gradients would count in a common norm
    trainer = sampling_trainer("separate", model_folder, tmp_path, **settings)
    start = states(trainer)
    trainer.train()
    moved = {key: value - start[key] for key, value in states(trainer).items()}
    policy = torch.cat([m.flatten() for k, m in moved.items() if k.startswith("policy.")])
    critic = torch.cat([m.flatten() for k, m in moved.items() if not k.startswith("policy.")])
    assert float(policy.norm()) == pytest.approx(1e-2 * 0.3, rel=1e-3)
    assert float(critic.norm()) == pytest.approx(2e-2 * 0.001, rel=1e-3)
    assert logs(trainer)[0]["grad_norm"] > 0.3  # before it was clipped
    assert logs(trainer)[0]["value/grad_norm"] > 0.001


def test_metrics_of_the_values_are_those_by_hand(model_folder: str) -> None:
    trainer = make_trainer("separate", model_folder)
    oracle = Oracle(trainer, model_folder)
    raw = [a for row in oracle.rows if row.returns for a in oracle.gae(row, LAMBDA) if a]
    pairs = [(row.returns[t], row.old_values[t]) for row in oracle.rows if row.returns for t in row.places]
    returns, values = torch.tensor(pairs, dtype=torch.float64).T
    error = 0.5 * ((values - returns) ** 2).mean()
    trainer.train()
    (log,) = logs(trainer)
    expected = {
        "value/loss": error,
        "value/clip_fraction": 0.0,
        "value/mean": values.mean(),
        "value/return_mean": returns.mean(),
        "value/return_std": returns.std(),
        "value/explained_variance": 1 - (returns - values).var() / returns.var(),
        "policy/raw_advantage_mean": torch.tensor(raw).mean(),
        "policy/raw_advantage_std": torch.tensor(raw).std(),
    }
    for name, value in expected.items():
        assert log[name] == pytest.approx(float(value), rel=1e-5, abs=1e-7), name


def test_evaluation_values_completions_and_trains_nothing(model_folder: str) -> None:
    trainer = make_trainer("separate", model_folder, per_device_eval_batch_size=4)
    before = states(trainer)
    metrics = trainer.evaluate(tiny.prompts(8))
    assert metrics["eval_value/loss"] > 0
    assert metrics["eval_value/explained_variance"] < 1
    assert all(value.equal(before[key]) for key, value in states(trainer).items())
