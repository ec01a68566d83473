"""PPO by hand: policy and critic as two models apart, row by row, without padding, masks or micro-batches."""

import copy
import math
import statistics
from dataclasses import dataclass
from typing import Any

import tiny
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import LlamaModel

from trl_algos.config import PolicyConfig
from trl_algos.trainers import PPOTrainer

BETA, GAMMA, LAMBDA, CRITIC_LAMBDA, VF_COEF, EPSILON, VALUE_CLIP = 0.3, 0.9, 0.8, 0.95, 0.7, 0.05, 0.02
LEARNING_RATE, CRITIC_LEARNING_RATE = 0.2, 0.05
FORMS = {
    "adapter": ("adapter", True, {}),
    "separate": ("separate", False, {}),
    "separate_lora": ("separate", True, {}),
    "separate_whole": ("separate", True, {"critic_use_peft": False}),
    "shared": ("shared", False, {}),
    "shared_lora": ("shared", True, {}),
    "shared_trunk": ("shared", False, {"critic_trunk_gradient": True}),
}
"""Name -> form, whether the policy trains LoRA, further settings."""

# First token 40 + four times the reward; 39 has none. No end token: cut off. The second token is a tool's.
ROWS = [
    [44, 60, 61, 62, 63, tiny.EOS],
    [40, 70, tiny.EOS],
    [47, 80, 81, 82, 83, 84, 85, 86],
    [39, 90, 91, tiny.EOS],
    [],
    [41, 100, 101, 102, tiny.EOS],
    [48, tiny.EOS],
    [42, 110, 111, 112, 113, 114, 115, 116, 117, tiny.EOS],
]


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if ids[0] == 39 else 1.0 if ids[0] == tiny.EOS else (ids[0] - 40) / 4 for ids in completion_ids]


def lora() -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def make_trainer(
    name: str,
    folder: str,
    split: tuple[int, int, int] = (8, 1, 1),
    given_adapter: bool = False,
    rollout_func: Any = None,
    eval_dataset: Any = None,
    **settings: Any,
) -> PPOTrainer:
    """A trainer in float64 whose policy is not its reference, and whose adapters are not empty."""
    form, uses_lora, extra = FORMS[name]
    config = {
        "output_dir": f"{folder}/unused",
        "algorithm": "ppo",
        "critic": form,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": split[0],
        "gradient_accumulation_steps": split[1],
        "steps_per_generation": split[2],
        "max_completion_length": 12,
        "shuffle_dataset": False,
        "max_steps": 1,
        "num_iterations": 1,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "critic_learning_rate": CRITIC_LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "beta": BETA,
        "gamma": GAMMA,
        "gae_lambda": LAMBDA,
        "critic_gae_lambda": CRITIC_LAMBDA,
        "vf_coef": VF_COEF,
        "epsilon": EPSILON,
        "value_clip_range": VALUE_CLIP,
    }
    policy: Any = tiny.llama(seed=1)
    policy.config._name_or_path = folder  # where reference and critic are taken from, which has other weights
    if given_adapter:
        policy = get_peft_model(policy, lora())
        randomise([p for n, p in policy.named_parameters() if "lora_B" in n], seed=5)
    trainer = PPOTrainer(
        policy,
        reward,
        PolicyConfig(**config | extra | settings),
        train_dataset=tiny.prompts(8),
        eval_dataset=eval_dataset,
        processing_class=tiny.tokenizer(),
        rollout_func=rollout_func
        or tiny.fixed_rollout({f"prompt {i}:": [ids] for i, ids in enumerate(ROWS)}, env_mask=True),
        peft_config=lora() if uses_lora and not given_adapter else None,
    )
    names = ("lora_B.critic",) if given_adapter else ("lora_B",)
    randomise([p for n, p in trainer.model.named_parameters() if any(name in n for name in names)], seed=6)
    randomise([trainer.critic.head.weight, trainer.critic.head.bias], seed=7)
    for model in filter(None, (trainer.model, trainer.ref_model)):
        model.double()
    return trainer


def randomise(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def policy_state(trainer: PPOTrainer) -> dict[str, Tensor]:
    """What the policy trains: its adapter, or all of it."""
    with trainer.critic.hidden():
        adapted = hasattr(trainer.model, "peft_config")
        state = get_peft_model_state_dict(trainer.model) if adapted else trainer.model.state_dict()
    return copy.deepcopy(state)


def critic_state(trainer: PPOTrainer) -> dict[str, Tensor]:
    """What the critic trains, the head as `head.*`."""
    critic = trainer.critic
    state = {f"head.{name}": p.detach().clone() for name, p in critic.head.named_parameters()}
    if trainer.critic_form == "adapter":
        state |= get_peft_model_state_dict(critic.policy, adapter_name="critic")
    elif trainer.critic_form == "separate":
        adapted = hasattr(critic.trunk, "peft_config")
        state |= (
            get_peft_model_state_dict(critic.trunk, adapter_name="critic") if adapted else critic.trunk.state_dict()
        )
    return copy.deepcopy(state)


class Oracle:
    """Policy, reference and critic as models that share nothing, with the weights that a trainer has now."""

    def __init__(self, trainer: PPOTrainer, folder: str, given_adapter: bool = False) -> None:
        self.args, self.form = trainer.args, trainer.critic_form
        uses_lora = hasattr(trainer.model, "peft_config")
        policy: Any = tiny.llama(seed=1).double()
        self.reference: Any = tiny.llama(seed=1 if uses_lora else 0).double()
        if uses_lora:
            policy = get_peft_model(policy, lora()).double()
            set_peft_model_state_dict(policy, policy_state(trainer))
        if given_adapter:
            self.reference = copy.deepcopy(policy)
        self.policy = policy
        self.head = nn.Linear(32, 1).double()
        state = critic_state(trainer)
        self.head.load_state_dict({name[5:]: state.pop(name) for name in ("head.weight", "head.bias")})
        self.critic: Any = None
        if self.form == "adapter":
            self.critic = get_peft_model(tiny.llama(seed=1).double(), lora()).double()
            set_peft_model_state_dict(self.critic, state)
        elif self.form == "separate":
            self.critic = LlamaModel.from_pretrained(folder).double()
            if uses_lora and trainer.args.critic_use_peft is None:
                config = lora()
                config.task_type = None
                self.critic = get_peft_model(self.critic, config).double()
                set_peft_model_state_dict(self.critic, state)
        self.uses_lora = uses_lora
        self.rows = [Row.make(self, i, ids) for i, ids in enumerate(ROWS)]
        self._estimate()

    def hidden(self, ids: list[int]) -> Tensor:
        """(L, width) last hidden states that the head reads."""
        tokens = torch.tensor([ids])
        if self.form == "separate":
            return self.critic(tokens).last_hidden_state[0]
        if self.form == "adapter":
            return self.critic.get_base_model().model(tokens).last_hidden_state[0]
        trunk = (self.policy.get_base_model() if self.uses_lora else self.policy).model
        hidden = trunk(tokens).last_hidden_state[0]
        return hidden if self.args.critic_trunk_gradient else hidden.detach()

    def values(self, prompt: list[int], ids: list[int]) -> Tensor:
        """(T + 1,) before each token and after the last."""
        return self.head(self.hidden([*prompt, *ids])).squeeze(-1)[len(prompt) - 1 :]

    def _estimate(self) -> None:
        """Returns, advantages and the divisors of both losses, from what holds at sampling."""
        scored = [row for row in self.rows if not math.isnan(row.score)]
        for row in scored:
            row.returns = [a + v for a, v in zip(self.gae(row, CRITIC_LAMBDA), row.old_values, strict=False)]
            row.advantages = self.gae(row, self._lambda(row))
        every = [row.advantages[t] for row in scored for t in row.places]
        mean, scale = statistics.fmean(every), math.sqrt(statistics.variance(every) + 1e-8)
        for row in scored:
            row.advantages = [(a - mean) / scale for a in row.advantages]
        self.tokens = sum(len(row.places) for row in self.rows)
        self.value_tokens = sum(len(row.places) for row in scored)
        self.positive_tokens = sum(len(row.places) for row in scored if row.score > 0)

    def _lambda(self, row: "Row") -> float:
        alpha = self.args.length_adaptive_alpha
        return LAMBDA if alpha is None or not row.places else max(0.0, 1 - 1 / (alpha * len(row.places)))

    def gae(self, row: "Row", gae_lambda: float) -> list[float]:
        advantages, running = [0.0] * len(row.ids), 0.0
        following = row.last_value if row.cut_off and self.args.bootstrap_truncated else 0.0
        for t in reversed(row.places):
            r = -self.args.beta * (row.old_logps[t] - row.ref_logps[t]) + (row.score if t == row.places[-1] else 0.0)
            running = r + GAMMA * following - row.old_values[t] + GAMMA * gae_lambda * running
            advantages[t], following = running, row.old_values[t]
        return advantages

    def loss(self) -> Tensor:
        """The whole loss of the eight rows."""
        total = torch.zeros((), dtype=torch.float64)
        for row in self.rows:
            logps = log_probabilities(self.policy, row.prompt, row.ids)
            values = self.values(row.prompt, row.ids)
            scored = not math.isnan(row.score)
            for t in row.places:
                if not scored:
                    continue
                ratio = (logps[t] - row.old_logps[t]).exp()
                bounded = ratio.clamp(1 - EPSILON, 1 + (self.args.epsilon_high or EPSILON))
                gain = torch.minimum(ratio * row.advantages[t], bounded * row.advantages[t])
                if self.args.delta is not None and row.advantages[t] < 0:
                    gain = gain.clamp(min=self.args.delta * row.advantages[t])
                total = total - gain / self.tokens
                near = row.old_values[t] + (values[t] - row.old_values[t]).clamp(-VALUE_CLIP, VALUE_CLIP)
                error = torch.maximum((values[t] - row.returns[t]) ** 2, (near - row.returns[t]) ** 2)
                total = total + VF_COEF * 0.5 * error / self.value_tokens
                if self.args.positive_nll_coef and row.score > 0:
                    total = total - self.args.positive_nll_coef * logps[t] / self.positive_tokens
        return total

    def step(self) -> float:
        """One step of gradient descent; the loss before it."""
        models = [m for m in (self.policy, self.critic, self.head) if m is not None]
        for model in models:
            model.zero_grad()
        loss = self.loss()
        loss.backward()
        for model in models:
            rate = LEARNING_RATE if model is self.policy else CRITIC_LEARNING_RATE
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= rate * parameter.grad
        return loss.item()

    def policy_state(self) -> dict[str, Tensor]:
        return get_peft_model_state_dict(self.policy) if self.uses_lora else self.policy.state_dict()

    def critic_state(self) -> dict[str, Tensor]:
        state = {f"head.{name}": p for name, p in self.head.named_parameters()}
        if self.critic is not None:
            state |= (
                get_peft_model_state_dict(self.critic)
                if hasattr(self.critic, "peft_config")
                else self.critic.state_dict()
            )
        return state


@dataclass
class Row:
    """One completion, and what holds of it at sampling."""

    prompt: list[int]
    ids: list[int]
    places: list[int]
    score: float
    cut_off: bool
    old_logps: list[float]
    ref_logps: list[float]
    old_values: list[float]
    last_value: float
    returns: Any = None
    advantages: Any = None

    @classmethod
    def make(cls, oracle: Oracle, number: int, ids: list[int]) -> "Row":
        """What becomes of completion `ids`: an empty one is one end token, which nobody generated."""
        prompt = tiny.tokenizer()(f"prompt {number}:")["input_ids"]
        places = [t for t in range(len(ids)) if not (t == 1 and len(ids) > 3)]
        full = ids or [tiny.EOS]
        cut_off = full[-1] != tiny.EOS
        (score,) = reward([], [full])
        if cut_off and oracle.args.mask_truncated_completions:
            places = []
        with torch.no_grad():
            *values, last = oracle.values(prompt, full).tolist()
            old = log_probabilities(oracle.policy, prompt, full).tolist()
            reference = log_probabilities(oracle.reference, prompt, full).tolist()
        return cls(prompt, full, places, math.nan if score is None else score, cut_off, old, reference, values, last)


def log_probabilities(model: Any, prompt: list[int], ids: list[int]) -> Tensor:
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(ids)), ids]


def assert_equal_states(
    found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor], tolerance: float = 1e-7
) -> None:
    """Equal to `tolerance`, and not because nothing moved."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value.double(), expected[name].double(), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert max(float((found[name] - start[name]).abs().max()) for name in found) > 1e3 * tolerance
