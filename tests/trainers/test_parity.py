"""Our loss against TRL's own: same weights, same batch, equal loss and equal gradients; then whole runs.

With one micro-batch per optimizer step, one process and no empty row TRL's divisors are ours, so `GRPOTrainer` is an
independent reference for every algorithm that it knows.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_algos.config import PolicyConfig
from trl_algos.trainers import PolicyTrainer
from trl_algos.trainers.window.opening import set_divisors

# Algorithm -> (our settings, TRL's settings). Bounds are narrow enough for the random ratios to be clipped.
ALGORITHMS = {
    "grpo": ({"algorithm": "grpo", "epsilon": 0.1}, {"loss_type": "grpo", "epsilon": 0.1}),
    "dual_clip": (
        {"algorithm": "grpo", "epsilon": 0.1, "delta": 1.2},
        {"loss_type": "grpo", "epsilon": 0.1, "delta": 1.2},
    ),
    "dr_grpo": (
        {"algorithm": "dr_grpo", "epsilon": 0.1},
        {"loss_type": "dr_grpo", "epsilon": 0.1, "scale_rewards": "none"},
    ),
    "dapo": (
        {"algorithm": "dapo", "epsilon": 0.1, "epsilon_high": 0.14, "overlong_buffer": 0},
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.14},
    ),
    "gspo": (
        {"algorithm": "gspo", "epsilon": 0.01, "epsilon_high": 0.02},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02},
    ),
    # TRL's epsilon_high is the cap itself, ours the distance of the cap from 1; epsilon 1 leaves out the lower bound.
    "cispo": (
        {"algorithm": "cispo", "epsilon": 1.0, "epsilon_high": 0.2},
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    "sapo": ({"algorithm": "sapo"}, {"loss_type": "sapo"}),
}
WITHOUT_KL = {"kl_placement": "none", "beta": None}
KL = {"kl_placement": "loss", "kl_estimator": "k3", "beta": 0.3}
BONUS = {"entropy_coef": 0.2}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_coef_delta": 0.1, "entropy_coef_max": 1.0}

# Feature -> settings of both configs (KL settings that TRL does not know are left out there).
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": KL | {"use_bias_correction_kl": False},
    "kl_times_ratio": KL | {"use_bias_correction_kl": True},
    "entropy_bonus": BONUS,
    # Mean entropies of the batch are about 4 nats: the first target lets the bonus grow, the second lets it fall.
    "adaptive_entropy_rises": ADAPTIVE | {"entropy_target": 6.0},
    "adaptive_entropy_falls": ADAPTIVE | {"entropy_target": 0.1},
    "tool_mask": {},
    "off_policy_mask": {"off_policy_mask_threshold": 0.02},
    "off_policy_mask_with_engine_logps": {"off_policy_mask_threshold": 0.02},
    "top_entropy": {"top_entropy_quantile": 0.5},
    "top_entropy_with_bonus": {"top_entropy_quantile": 0.5} | BONUS,
    "engine_ratio": {},
    "engine_ratio_per_row": {},
    "token_advantages": {},
    "everything": KL
    | BONUS
    | {"use_bias_correction_kl": True, "off_policy_mask_threshold": 0.02, "top_entropy_quantile": 0.5},
}


def never_scores(completions: list[str], **_: Any) -> list[float]:
    raise AssertionError("no completion is generated here")


def common_settings(model_folder: str) -> dict[str, Any]:
    return {
        "output_dir": f"{model_folder}/unused",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 12,
        "disable_dropout": True,
    }


def pair_of_trainers(
    algorithm: str, settings: dict[str, Any], model_folder: str, model: Callable[[], Any] = tiny.llama, **kwargs: Any
) -> tuple[PolicyTrainer, GRPOTrainer]:
    """Our trainer and TRL's with the matching settings and equal weights; the reference has them too.

    Ours pads, as TRL does: `packing/test_policy_packing.py` compares real tokens alone with padded rows.
    """
    ours, trls = ALGORITHMS[algorithm]
    ours = (
        common_settings(model_folder)
        | {"padding_free": False}
        | ({} if "beta" in settings else WITHOUT_KL)
        | ours
        | settings
    )
    known_to_trl = {k: v for k, v in settings.items() if k not in ("kl_placement", "kl_estimator")}
    trls = common_settings(model_folder) | {"beta": 0.0, "use_bias_correction_kl": False} | trls | known_to_trl
    made = []
    for trainer_class, config in ((PolicyTrainer, PolicyConfig(**ours)), (GRPOTrainer, GRPOConfig(**trls))):
        policy = model()
        policy.config._name_or_path = model_folder  # where TRL takes the reference from
        trainer = trainer_class(
            policy,
            args=config,
            processing_class=tiny.tokenizer(),
            **{"reward_funcs": never_scores, "train_dataset": tiny.prompts(4)} | kwargs,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        made.append(trainer)
    return made[0], made[1]


def hand_made_inputs(trainer: GRPOTrainer, seed: int = 0) -> dict[str, Tensor]:
    """Four rows of 9, 4, 1 and 7 tokens; old log-probs are the current ones off by up to ±0.4."""
    generator = torch.Generator().manual_seed(seed)
    lengths, width = torch.tensor([9, 4, 1, 7]), 9
    prompt_mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 1, 1, 1, 1], [1] * 5])
    mask = (torch.arange(width) < lengths[:, None]).long()
    inputs = {
        "prompt_ids": torch.randint(2, 258, (4, 5), generator=generator) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(2, 258, (4, width), generator=generator) * mask,
        "completion_mask": mask,
        "advantages": torch.tensor([1.5, -0.7, 0.4, -1.3]),
        "num_items_in_batch": mask.sum(),
    }
    with torch.no_grad():
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([prompt_mask, mask], 1),
            width,
        )
    inputs["old_per_token_logps"] = logps + 0.8 * (torch.rand(4, width, generator=generator) - 0.5)
    inputs["ref_per_token_logps"] = logps + torch.randn(4, width, generator=generator)
    return inputs


def with_feature(inputs: dict[str, Tensor], feature: str) -> dict[str, Tensor]:
    """`inputs` with the tensors that a feature needs."""
    inputs, shape = dict(inputs), inputs["completion_mask"].shape
    generator = torch.Generator().manual_seed(9)
    if feature in ("tool_mask", "everything"):
        inputs["tool_mask"] = torch.ones(shape, dtype=torch.long)
        inputs["tool_mask"][0, 2:5] = inputs["tool_mask"][3, 0] = inputs["tool_mask"][1, 3] = 0
        inputs["num_items_in_batch"] = (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    if feature in ("off_policy_mask_with_engine_logps", "everything"):
        # Keeps the second row and drops the fourth, the other way round than the log-probs before the update do.
        shift = torch.tensor([[0.0], [-1.0], [0.0], [1.0]])
        inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"] + shift
    if feature in ("engine_ratio", "everything"):
        ratio = 2 * torch.rand(shape, generator=generator)
        inputs["importance_sampling_ratio"] = torch.where(ratio < 0.4, 0.0, ratio)
    if feature == "engine_ratio_per_row":
        inputs["importance_sampling_ratio"] = torch.tensor([[0.5], [1.7], [0.0], [0.9]])
    if feature == "token_advantages":
        inputs["advantages"] = torch.randn(shape, generator=generator)
    return inputs


def loss_and_gradients(trainer: GRPOTrainer, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def assert_same_loss(ours: PolicyTrainer, trls: GRPOTrainer, inputs: dict[str, Tensor]) -> float:
    """The loss, after the check that both have the same loss and gradients to 1e-6."""
    expected, expected_gradients = loss_and_gradients(trls, inputs)
    windowed = dict(inputs)
    set_divisors(ours, [windowed])
    loss, gradients = loss_and_gradients(ours, windowed)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-3
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: n + m
        )
    return loss.item()


@pytest.fixture(scope="module")
def plain_losses(model_folder: str) -> dict[str, float]:
    """TRL's loss of the batch without any feature, by algorithm."""
    losses = {}
    for algorithm in ALGORITHMS:
        _, trls = pair_of_trainers(algorithm, {}, model_folder)
        losses[algorithm] = loss_and_gradients(trls, hand_made_inputs(trls))[0].item()
    return losses


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_and_gradients_are_those_of_trl(
    algorithm: str, feature: str, model_folder: str, plain_losses: dict[str, float]
) -> None:
    settings = FEATURES[feature]
    ours, trls = pair_of_trainers(algorithm, settings, model_folder)
    if feature in ("engine_ratio", "engine_ratio_per_row", "everything"):
        for trainer in (ours, trls):
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    adaptive = "use_adaptive_entropy" in settings
    for seed in range(2 if adaptive else 1):
        inputs = with_feature(hand_made_inputs(trls, seed), feature)
        loss = assert_same_loss(ours, trls, inputs)
        assert ours.entropy_coef == pytest.approx(trls.entropy_coef)
        assert ours._last_world_entropy == pytest.approx(trls._last_world_entropy, rel=1e-6)
    # The feature is really in the numbers: the controller moved by 0.1 a step, and other features change the loss.
    if adaptive:
        assert ours.entropy_coef == pytest.approx({6.0: 0.4, 0.1: 0.0}[settings["entropy_target"]])
    else:
        assert (abs(loss - plain_losses[algorithm]) > 1e-4) == (feature != "plain")
    if feature == "off_policy_mask_with_engine_logps":  # they decide, not the log-probs before the update
        del inputs["sampling_per_token_logps"]
        assert abs(assert_same_loss(ours, trls, inputs) - loss) > 1e-4


@pytest.mark.parametrize("algorithm", ["grpo", "dual_clip", "dr_grpo", "dapo", "gspo"])
def test_the_hand_made_ratios_are_clipped_as_in_trl(algorithm: str, model_folder: str) -> None:
    """Otherwise the comparison above would hold for any clip; the shares are TRL's."""
    ours, trls = pair_of_trainers(algorithm, {}, model_folder)
    inputs = hand_made_inputs(trls)
    assert_same_loss(ours, trls, inputs)
    for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"):
        ((share,), (expected,)) = (trainer._metrics["train"][f"clip_ratio/{name}"] for trainer in (ours, trls))
        assert share == pytest.approx(expected, abs=1e-6)
        assert 0 <= share < 1 or name == "high_max"
    assert ours._metrics["train"]["clip_ratio/region_mean"][0] > 0.1
    assert (ours._metrics["train"]["clip_ratio/dual_mean"][0] > 0) == (algorithm == "dual_clip")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_evaluation_loss_is_that_of_trl(algorithm: str, model_folder: str) -> None:
    """Evaluation has no optimizer window: the divisor is the batch's own, whatever the accumulation."""
    ours, trls = pair_of_trainers(algorithm, FEATURES["everything"], model_folder)
    inputs = with_feature(hand_made_inputs(trls), "everything")
    losses = []
    for trainer in (ours, trls):
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        trainer.current_gradient_accumulation_steps = 4
        trainer.model.eval()
        losses.append(trainer._compute_loss(trainer.model, inputs).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def mixtral(aux_loss_coef: float) -> MixtralForCausalLM:
    """Two-layer mixture of four experts."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        router_aux_loss_coef=aux_loss_coef,
        output_router_logits=True,
        pad_token_id=tiny.PAD,
        eos_token_id=tiny.EOS,
    )
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_load_balancing_loss_of_a_mixture_of_experts(algorithm: str, model_folder: str) -> None:
    losses = {}
    for coef in (0.0, 0.5):
        ours, trls = pair_of_trainers(algorithm, {}, model_folder, lambda coef=coef: mixtral(coef))
        losses[coef] = assert_same_loss(ours, trls, hand_made_inputs(trls))
        assert ours._metrics["train"]["aux_loss"] == pytest.approx(trls._metrics["train"]["aux_loss"])
    # The loss of balanced experts is the number of experts per token, 2, and more where they are not balanced.
    assert losses[0.5] - losses[0.0] > 0.5 * 2 - 0.1


# Names that TRL 1.16 hands to the forward pass besides text.
IMAGE_KEYWORDS = {
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
}


@pytest.mark.parametrize("present", [True, False])
def test_image_keywords_reach_the_forward_pass(present: bool, model_folder: str) -> None:
    """TRL's own loss, called with the same stub, says which keywords there are."""
    inputs_of, received = {}, {}
    signature = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)
    assert set(signature.parameters) >= IMAGE_KEYWORDS
    for trainer in pair_of_trainers("grpo", {}, model_folder):
        inputs = hand_made_inputs(trainer)
        if present:
            inputs |= {name: object() for name in IMAGE_KEYWORDS}
        width = inputs["completion_ids"].shape[1]

        def stub(*args: Any, _trainer: GRPOTrainer = trainer, _width: int = width, **kwargs: Any) -> tuple[Any, ...]:
            received[type(_trainer)] = signature.bind(_trainer, *args, **kwargs).arguments
            return torch.zeros(4, _width, requires_grad=True), torch.ones(4, _width), None

        trainer._get_per_token_logps_and_entropies = stub
        trainer._compute_loss(trainer.model, inputs)
        inputs_of[type(trainer)] = inputs
    for trainer_class, arguments in received.items():
        for name in IMAGE_KEYWORDS:
            assert arguments[name] is inputs_of[trainer_class].get(name)
    assert {k for k, v in received[PolicyTrainer].items() if v is not None} == {
        k for k, v in received[GRPOTrainer].items() if v is not None
    }


COMPLETIONS = {
    # Lengths from 1 to 12 tokens, with and without an end token, two completions per prompt.
    f"prompt {i}:": [
        [40 + (7 * i + 11 * j + 3 * k) % 200 for k in range(1 + (5 * i + 3 * j) % 12)] + [tiny.EOS] * ((i + j) % 2)
        for j in range(2)
    ]
    for i in range(4)
}


def sum_of_ids(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Some number that differs between completions."""
    return [sum(ids) % 7 / 3 for ids in completion_ids]


@pytest.mark.parametrize("feature", ["plain", "kl", "kl_times_ratio", "entropy_bonus", "top_entropy"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_three_optimizer_steps_end_at_trls_weights(algorithm: str, feature: str, model_folder: str) -> None:
    """SGD, all 8 rows in every step, two passes over each generation batch: the second step is off-policy."""
    run = {
        "per_device_train_batch_size": 8,
        "num_iterations": 2,
        "max_steps": 3,
        "optim": "sgd",
        "learning_rate": 0.2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
    }
    ours, trls = pair_of_trainers(
        algorithm,
        FEATURES[feature] | run,
        model_folder,
        reward_funcs=sum_of_ids,
        rollout_func=tiny.fixed_rollout(COMPLETIONS, env_mask=True),
    )
    start = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    for trainer in (ours, trls):
        trainer.train()
    moved = 0.0
    expected = dict(trls.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6, msg=lambda m, n=name: n + m)
        moved = max(moved, float((parameter - start[name]).abs().max()))
    assert moved > 1e-2
