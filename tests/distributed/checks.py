"""What holds for a run under any backend, against one plain process and against itself."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import WRAPPERS
from common import assert_logs, assert_weights
from policy_worker import CASES, RESUMED, ROWS_PER_PROCESS, TEXT, run
from safetensors.torch import load_file

from trl_algos.models.memory import estimate
from trl_algos.trainers import PPOTrainer
from trl_algos.trainers.critic import load_critic


def check_case(case: str, ranks: list[dict[str, Any]], folder: str, family: str) -> None:
    """Weights and logs of all ranks are those of one plain process.

    Args:
        case: one of `CASES`.
        ranks: rank -> case -> outcome.
        folder: of the tiny model.
        family: of the backend; DeepSpeed clips policy and critic together, and logs one norm.
    """
    expected, half = _alone(case, folder, len(ranks), family == "deepspeed"), CASES[case].get("half", False)
    assert expected["processes"] == 1
    norms = [log["grad_norm"] for log in expected["logs"] if "grad_norm" in log]  # steps of the critic alone have none
    assert norms
    assert min(norms[-2:]) > 0
    for rank in ranks:
        assert rank[case]["processes"] == len(ranks)
        assert rank[case]["model"].startswith(WRAPPERS[family])
        assert_weights(rank[case]["weights"], expected["weights"], atol=1e-2 if half else 1e-5)
    assert sum("loss" in log for log in expected["logs"]) == CASES[case].get("max_steps", 3)
    if not half:
        assert_logs(ranks[0][case]["logs"], expected["logs"])


@functools.cache
def _alone(case: str, folder: str, processes: int, jointly: bool) -> dict[str, Any]:
    """What one process comes to with the rows of `processes`."""
    with pytest.MonkeyPatch.context() as patch:
        if jointly:
            patch.setattr(PPOTrainer, "_clip_grad_norm", _clip_jointly)
        return run(case, folder, 1, processes * ROWS_PER_PROCESS)


def _clip_jointly(self: Any, model: torch.nn.Module) -> torch.Tensor:
    self.append_metrics({"value/learning_rate": self.optimizer.param_groups[-1]["lr"]})
    critic = {id(p) for p in self.critic.parameters()}
    for parameter in model.parameters():
        if not self.learners.policy and id(parameter) not in critic:
            parameter.grad = None
    return torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm or torch.inf)


def check_memory(name: str, outcome: dict[str, Any], folder: str, backend: dict[str, Any]) -> None:
    """A process holds what `trl-algos check` estimates.

    But for the padding of parts to equal lengths, and the value head, whose only row FSDP2 leaves to one process.
    """
    case = RESUMED[name]
    lora = {"use_peft": True, "lora_r": 2, "lora_target_modules": ["q_proj", "down_proj"]} if case.get("lora") else {}
    told = {"critic": case["critic"], "vf_coef": 0.1, "optim": case["optim"], "dtype": "float32"}
    memory = estimate(folder, told | lora | backend, num_processes=2)
    found = outcome["whole"]["held"]
    assert found["weights"] == pytest.approx(memory.parameters + memory.adapter + memory.critic, rel=0.01)
    assert found["optimizer"] == pytest.approx(memory.optimizer, rel=0.01, abs=8 * (32 + 1) / 2 + 16)


def check_resumed(name: str, outcome: dict[str, Any], checkpoint: Path) -> None:
    """A run that was interrupted ends with the same weights and logs; its checkpoint holds policy and critic apart."""
    whole, resumed = outcome["whole"], outcome["resumed"]
    assert_weights(resumed["weights"], whole["weights"], atol=0)
    assert_logs(resumed["logs"][:-1], whole["logs"][:-1])
    losses = [log["value/loss"] for log in whole["logs"][:-1]]
    assert len(set(losses)) == len(losses) == 4
    lora = RESUMED[name].get("lora", False)
    policy = load_file(checkpoint / ("adapter_model.safetensors" if lora else "model.safetensors"))
    weights = {key: weight for key, weight in whole["weights"].items() if not lora or "lora_" in key}
    critics = {key for key in weights if "critic." in key or "value_head." in key}
    own = {key.replace(".default", ""): weights[key] for key in weights.keys() - critics}
    assert_weights(policy, own, atol=0)
    if name == "adapter":  # whose base model lies elsewhere in these tests than where it is said to come from
        critic = load_file(checkpoint / "critic" / "adapter" / "adapter_model.safetensors")
        assert_weights(critic, {k.replace(".critic", ""): w for k, w in weights.items() if ".critic." in k}, atol=0)
    else:
        values = load_critic(checkpoint / "critic")(TEXT)
        torch.testing.assert_close(values, outcome["values"], rtol=0, atol=1e-6)
