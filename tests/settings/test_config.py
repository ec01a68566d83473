import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOConfig

from trl_algos import ALGORITHMS, Algorithm, ConfigError, PolicyConfig, register
from trl_algos.algorithms import COMMON_DEFAULTS, CRITIC_DEFAULTS, advantage_estimators, surrogates
from trl_algos.core import AGGREGATIONS, KL_ESTIMATORS, RATIO_LEVELS, SurrogateTerms, group_centered_advantages

BASE = {
    "output_dir": "unused",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "per_device_train_batch_size": 8,
}
COMPONENTS = ("advantage_estimator", "surrogate", "ratio_level", "aggregation", "kl_placement", "kl_estimator")


def config(**settings: Any) -> PolicyConfig:
    return PolicyConfig(**{**BASE, **settings})


def problems(**settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config(**settings)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def only_problem(**settings: Any) -> str:
    found = problems(**settings)
    assert len(found) == 1, found
    return found[0]


# The rows


@pytest.mark.parametrize("key", ALGORITHMS)
def test_a_row_alone_gives_its_own_defaults(key: str):
    row, built = ALGORITHMS[key], config(algorithm=key)
    assert built.advantage_function is row.advantage
    assert built.surrogate_function is row.surrogate
    for name in ("ratio_level", "aggregation", "kl_placement"):
        assert getattr(built, name) == getattr(row, name)
    assert built.kl_estimator == (None if row.kl_placement == "none" else row.kl_estimator)
    expected = {**COMMON_DEFAULTS, **row.defaults}
    if "critic" in row.needs:
        expected = {**CRITIC_DEFAULTS, "critic_gae_lambda": row.defaults.get("gae_lambda"), **expected}
    assert expected == row.all_defaults
    if 0 < expected["overlong_buffer"] < 1:  # a share of max_completion_length, which is 512
        expected["overlong_buffer"] = round(512 * expected["overlong_buffer"])
    if not expected["overlong_buffer"]:
        expected["overlong_penalty_factor"] = None
    if expected["kl_controller"] == "fixed":
        expected["kl_target"] = expected["kl_horizon"] = None
    if not expected["dynamic_sampling"]:
        unused = [name for name in expected if name.startswith("dynamic_sampling_")]
        assert len(unused) == 4
        expected |= dict.fromkeys(unused)
    assert expected["dynamic_sampling"] == (key == "dapo")
    for name, value in expected.items():
        assert getattr(built, name) == value, name


# The papers' own numbers: DeepSeekMath 4.1 (beta), DAPO 4.1, GSPO 5.1, GMPO 5, SAPO 5, ScaleRL's CISPO cap 5.
PAPERS = {
    "grpo": {"epsilon": 0.2, "epsilon_high": None, "beta": 0.04, "advantage_eps": 1e-4},
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "overlong_buffer": 102},
    "gspo": {"epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.0},
    "cispo": {"epsilon": 1.0, "epsilon_high": 4.0},
    "sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "gmpo": {"epsilon": 0.4, "epsilon_high": 0.4},
    "dis": {"epsilon": 0.3, "epsilon_high": 5.0, "vllm_importance_sampling_correction": False},
    "pass_at_k": {"pass_k": 4},
    "reinforce_pp": {"gamma": 1.0, "num_generations": 1, "beta": 0.01},
    "ppo": {"epsilon": 0.2, "delta": None, "gamma": 1.0, "gae_lambda": 0.95, "critic_gae_lambda": 0.95, "beta": 0.05},
    "dual_clip_ppo": {"epsilon": 0.2, "delta": 3.0, "gae_lambda": 0.95, "num_generations": 1, "num_iterations": 4},
    "vapo": {
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "gae_lambda": None,
        "length_adaptive_alpha": 0.05,
        "critic_gae_lambda": 1.0,
        "positive_nll_coef": 0.1,
        "beta": 0.0,
        "num_generations": 8,
    },
}


@pytest.mark.parametrize("key", PAPERS)
def test_defaults_by_number(key: str):
    built = config(algorithm=key)
    assert {name: getattr(built, name) for name in PAPERS[key]} == PAPERS[key]


@pytest.mark.parametrize("key", ALGORITHMS)
def test_what_the_objective_does_not_use_is_none(key: str):
    built = config(algorithm=key)
    parameters = {"eps": "advantage_eps", "normalize": "advantage_normalize", "k": "pass_k", "gamma": "gamma"}
    parameters |= {"gae_lambda": "gae_lambda", "alpha": "length_adaptive_alpha"}
    taken = {parameters[name] for name in built.advantage_arguments} | set(built.surrogate_arguments)
    every = {*parameters.values(), "epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg"}
    for name in every - taken:
        assert getattr(built, name) is None, name


def test_arguments_of_the_functions():
    built = config(algorithm="dapo", delta=3.0)
    assert built.advantage_arguments == {"eps": 1e-4}
    assert built.surrogate_arguments == {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 3.0}
    assert config(algorithm="pass_at_k", pass_k=2).advantage_arguments == {"k": 2}
    assert config(algorithm="reinforce", gamma=0.9).advantage_arguments == {"gamma": 0.9}
    assert config(algorithm="rloo").surrogate_arguments == {}
    assert config(algorithm="ppo", gae_lambda=0.9).advantage_arguments == {"gamma": 1.0, "gae_lambda": 0.9}
    assert config(algorithm="vapo", gamma=0.9).advantage_arguments == {"gamma": 0.9, "alpha": 0.05}


@pytest.mark.parametrize("key", ALGORITHMS)
def test_a_resolved_config_builds_the_same_config_again(key: str):
    """Trainers copy configs and checkpoints store them; TRL derives `generation_batch_size` and takes one of two."""
    built = config(algorithm=key)
    values = {f.name: getattr(built, f.name) for f in fields(built) if f.init}
    again = PolicyConfig(**{name: value for name, value in values.items() if name != "generation_batch_size"})
    assert {f.name: getattr(again, f.name) for f in fields(again) if f.init} == values


# Precedence


@pytest.mark.parametrize(
    ("key", "name", "value"),
    [
        ("gspo", "epsilon", 0.2),  # the value that GRPO's row and the function's signature have
        ("gspo", "epsilon_high", 0.28),
        ("grpo", "beta", 0.0),  # TRL's default, which the row replaces
        ("grpo", "num_generations", 8),
        ("remax", "num_generations", 8),  # the common default, which the row replaces
        ("dapo", "overlong_buffer", 0),
        ("dapo", "overlong_penalty_factor", 0.5),
        ("dis", "ratio_reference", "policy"),
        ("sapo", "sapo_temperature_neg", 1.0),
        ("pass_at_k", "pass_k", 1),
        ("grpo", "advantage_eps", 0.0),
        ("reinforce_pp", "gamma", 0.0),
        ("grpo", "disable_dropout", False),
        ("grpo", "use_bias_correction_kl", True),
        ("grpo", "mask_truncated_completions", True),
        ("grpo", "num_iterations", 2),
    ],
)
def test_what_was_set_wins(key: str, name: str, value: Any):
    assert getattr(config(algorithm=key, **{name: value}), name) == value


# Parts exchanged one at a time


@pytest.mark.parametrize("name", advantage_estimators())
def test_advantage_estimator_alone(name: str):
    built, plain = config(advantage_estimator=name), config()
    assert built.advantage_function is advantage_estimators()[name]
    assert [getattr(built, part) for part in COMPONENTS[1:]] == [getattr(plain, part) for part in COMPONENTS[1:]]


@pytest.mark.parametrize(
    ("surrogate", "expected"),
    [  # the values of the first row that is built on the surrogate, not those of GSPO, which mean nothing to it
        ("clip", {"epsilon": 3e-4, "epsilon_high": 4e-4, "delta": None}),
        ("cispo", {"epsilon": 1.0, "epsilon_high": 4.0}),
        ("sapo", {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}),
        ("dis", {"epsilon": 0.3, "epsilon_high": 5.0}),
    ],
)
def test_surrogate_alone(surrogate: str, expected: dict[str, Any]):
    built = config(algorithm="gspo", surrogate=surrogate)
    assert built.surrogate_function is surrogates()[surrogate]
    assert built.surrogate_arguments == expected
    assert built.ratio_level == "sequence"


@pytest.mark.parametrize("surrogate", surrogates())
def test_every_surrogate_fits_grpo(surrogate: str):
    assert config(surrogate=surrogate).surrogate == surrogate


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ratio_level", level) for level in RATIO_LEVELS),
        *(("aggregation", mode) for mode in AGGREGATIONS),
        *(("kl_placement", place) for place in ("none", "loss", "reward")),
        *(("kl_estimator", estimator) for estimator in (*KL_ESTIMATORS, "full")),
    ],
)
def test_other_part_alone(name: str, value: str):
    built, plain = config(**{name: value}), config()
    assert getattr(built, name) == value
    for part in set(COMPONENTS) - {name, "kl_estimator" if value in ("none", "reward") else name}:
        assert getattr(built, part) == getattr(plain, part)


def test_settings_of_an_exchanged_part_come_from_their_owner():
    assert config(algorithm="dr_grpo", advantage_estimator="group_normalized").advantage_eps == 1e-4
    assert config(algorithm="grpo", advantage_estimator="pass_at_k").pass_k == 4
    assert config(algorithm="grpo", advantage_estimator="reinforce_pp").gamma == 1.0
    assert config(algorithm="grpo", advantage_estimator="best_of_group").advantage_normalize is True


@pytest.mark.parametrize("key", ["grpo", "dr_grpo", "gspo"])
def test_best_of_group_has_the_eps_of_its_signature(key: str):
    """No row is built on it, so its own 1e-6 holds, not the 1e-4 that GRPO's row gives to its own estimator."""
    assert config(algorithm=key, advantage_estimator="best_of_group").advantage_eps == 1e-6


# What the objective would not use


@pytest.mark.parametrize(
    ("key", "name", "value"),
    [
        ("sapo", "epsilon", 0.2),
        ("grpo", "sapo_temperature_pos", 1.0),
        ("cispo", "delta", 3.0),
        ("gspo", "pass_k", 4),
        ("grpo", "gamma", 1.0),
        ("dr_grpo", "advantage_eps", 1e-4),
        ("grpo", "advantage_normalize", True),
        ("rloo", "epsilon", 0.2),
        ("remax", "gamma", 1.0),
    ],
)
def test_a_setting_of_another_algorithm_is_refused(key: str, name: str, value: Any):
    message = only_problem(algorithm=key, **{name: value})
    assert message.startswith(f"`{name}`: {value!r} is not used")
    built = config(algorithm=key)
    assert repr(built.advantage_estimator) in message
    assert repr(built.surrogate) in message


# Groups (public fault GRP-1) and batch sizes

GROUP_ESTIMATORS = (
    "group_normalized",
    "group_centered",
    "leave_one_out",
    "length_weighted",
    "best_of_group",
    "pass_at_k",
    "gpg",
    "reinforce_pp_baseline",
)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_baseline_refuses_groups_of_one(name: str):
    message = next(m for m in problems(advantage_estimator=name, num_generations=1) if "num_generations`: 1 is" in m)
    assert repr(name) in message


@pytest.mark.parametrize("key", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k", "dapo", "gspo", "cispo"])
def test_an_algorithm_with_a_group_baseline_refuses_groups_of_one(key: str):
    name = config(algorithm=key).advantage_estimator
    assert any(repr(name) in message for message in problems(algorithm=key, num_generations=1))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
@pytest.mark.parametrize("key", ["reinforce_pp", "remax", "reinforce", "ppo", "dual_clip_ppo"])
def test_groups_of_one_where_the_baseline_is_another(key: str, batch_size: int):
    built = config(algorithm=key, per_device_train_batch_size=batch_size)
    assert built.num_generations == 1
    assert type(built.num_generations) is int  # nothing special is left behind
    assert built.num_generations < 2
    assert built.generation_batch_size == batch_size


def test_the_remaining_estimators_take_groups_of_one():
    others = set(advantage_estimators()) - set(GROUP_ESTIMATORS)
    assert others == {"greedy_baseline", "discounted_returns", "reinforce_pp", "gae", "length_adaptive_gae"}
    for name in others:
        assert config(advantage_estimator=name, num_generations=1).num_generations == 1


def test_groups_are_not_torn_apart():
    """A group must not straddle two generation batches: 8 rows hold no whole number of groups of 3."""
    (message,) = problems(num_generations=3)
    assert message.startswith("`num_generations`: 3 does not divide the 8 completions")
    assert message.endswith("set `per_device_train_batch_size` to 9, or `num_generations` to 2 or 4 or 8.")


# Evaluation with another group size (public fault EVL-1)


@pytest.mark.parametrize(("group", "batch"), [(2, 2), (1, 1), (1, 3), (None, 4)])
def test_evaluation_has_its_own_group_size(group: int | None, batch: int):
    built = config(
        num_generations=4,
        num_generations_eval=group,
        per_device_eval_batch_size=batch,
        eval_strategy="steps",
        eval_steps=5,
    )
    assert (built.num_generations, built.num_generations_eval) == (4, group)


def test_evaluation_of_single_samples():
    built = config(algorithm="remax", per_device_eval_batch_size=3, eval_strategy="steps", eval_steps=5)
    assert built.num_generations == 1


# Ranges (public faults PPO-1, OBJ-2)


@pytest.mark.parametrize(
    ("key", "name", "bad"),
    [
        *(("grpo", "delta", value) for value in (1, 1.0, 0.5, -3.0, math.nan)),
        *(("sapo", f"sapo_temperature_{sign}", value) for sign in ("pos", "neg") for value in (0, 0.0, -1.0)),
        *(("grpo", "epsilon", value) for value in (0.0, -0.2, 1.0, 1.5, math.nan)),
        ("dapo", "epsilon_high", 0.0),
        ("grpo", "beta", -0.1),
        ("grpo", "beta", math.inf),
        ("grpo", "num_generations", math.inf),
        ("grpo", "advantage_eps", -1e-4),
        ("reinforce", "gamma", 1.1),
        ("reinforce", "gamma", -0.1),
        ("pass_at_k", "pass_k", 0),
        ("pass_at_k", "pass_k", 1.5),
        ("pass_at_k", "pass_k", 9),  # num_generations is 8
        ("grpo", "num_generations", 0),
        ("grpo", "num_iterations", 0),
        ("grpo", "max_completion_length", 0),
        ("grpo", "temperature", 0.0),
        ("grpo", "top_entropy_quantile", 0.0),
        ("grpo", "top_entropy_quantile", 1.2),
        ("dapo", "overlong_buffer", -1),
        ("dapo", "overlong_penalty_factor", -1.0),
        ("grpo", "epsilon", "0.2"),
        ("grpo", "beta", True),
    ],
)
def test_out_of_range(key: str, name: str, bad: Any):
    message = only_problem(algorithm=key, **{name: bad})
    assert message.startswith(f"`{name}`: {bad!r}")


def test_edges_of_ranges():
    assert config(delta=1.01).delta == 1.01
    assert config(algorithm="cispo", epsilon=1.5).epsilon == 1.5  # no lower bound, as in the paper
    assert config(algorithm="gmpo", epsilon=1.5).epsilon == 1.5  # in log space
    assert config(algorithm="reinforce", gamma=0.0).gamma == 0.0
    assert config(algorithm="pass_at_k", pass_k=7).pass_k == 7
    assert config(top_entropy_quantile=1.0).top_entropy_quantile == 1.0


@pytest.mark.parametrize("name", ["num_generations", "num_iterations", "max_completion_length", "pass_k"])
def test_whole_numbers_become_integers(name: str):
    """They are counted with, by us and by TRL: `range(2.0)` is an error long after the config was accepted."""
    value = getattr(config(**({"algorithm": "pass_at_k"} if name == "pass_k" else {}), **{name: 4.0}), name)
    assert (value, type(value)) == (4, int)


# Length (public faults DAP-1, AGG-1)


@pytest.mark.parametrize(
    ("buffer", "length", "tokens"),
    [
        (0.2, 20480, 4096),
        (0.2, 512, 102),
        (0.5, 64, 32),
        (0.2, 3, 1),
        (0.1, 2, 1),
        (1, 64, 1),
        (64, 64, 64),
        (0, 64, 0),
    ],
)
def test_a_buffer_below_one_is_a_share(buffer: float, length: int, tokens: int):
    """The paper's 4096 of 20480 tokens is the share 0.2; a share never rounds to nothing."""
    built = config(algorithm="dapo", overlong_buffer=buffer, max_completion_length=length)
    assert built.overlong_buffer == tokens
    assert built.overlong_penalty_factor == (1.0 if tokens else None)


def test_a_buffer_beyond_the_limit_is_refused():
    message = only_problem(algorithm="dapo", overlong_buffer=65, max_completion_length=64)
    assert message.startswith("`overlong_buffer`: 65")
    assert "64" in message


def test_a_penalty_without_a_buffer_is_refused():
    assert only_problem(overlong_penalty_factor=0.5).startswith("`overlong_penalty_factor`: 0.5 is not used")


def test_a_constant_divisor_needs_a_length():
    """Without it Dr. GRPO would divide by the padded width of each batch: the length bias that it removes."""
    assert any(
        "max_completion_length" in message for message in problems(algorithm="dr_grpo", max_completion_length=None)
    )


# KL


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"algorithm": "dapo", "beta": 0.1}, "beta"),
        ({"kl_placement": "none", "beta": 0.04}, "beta"),
        ({"kl_placement": "none", "kl_estimator": "k3"}, "kl_estimator"),
        ({"kl_placement": "none", "kl_target": 6.0}, "kl_target"),
        ({"kl_placement": "none", "kl_horizon": 100}, "kl_horizon"),
        ({"kl_placement": "none", "kl_controller": "adaptive"}, "kl_controller"),
        ({"kl_placement": "reward", "kl_estimator": "k1+"}, "kl_estimator"),
        ({"kl_placement": "reward", "kl_estimator": "k3+"}, "kl_estimator"),
        ({"kl_controller": "adaptive", "beta": 0.0}, "kl_controller"),
        ({"kl_target": 6.0}, "kl_target"),
        ({"kl_horizon": 10000}, "kl_horizon"),
        ({"kl_controller": "fixed", "kl_target": 6.0}, "kl_target"),
        ({"kl_controller": "adaptiv"}, "kl_controller"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"algorithm": "dapo", "use_bias_correction_kl": True}, "use_bias_correction_kl"),
        ({"algorithm": "rloo", "use_bias_correction_kl": True}, "use_bias_correction_kl"),
    ],
)
def test_kl_combinations_without_meaning(settings: dict[str, Any], name: str):
    assert only_problem(**settings).startswith(f"`{name}`")


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_placement": "none"},
        {"kl_placement": "none", "beta": 0.0},
        {"kl_placement": "none", "kl_controller": "fixed"},
        {"kl_placement": "loss", "kl_estimator": "full"},
        {"kl_placement": "reward", "kl_estimator": "full"},
        {"kl_placement": "reward", "kl_estimator": "abs"},
        {"kl_placement": "loss", "kl_estimator": "k3+"},
        {"kl_controller": "adaptive"},
        {"algorithm": "rloo", "kl_controller": "adaptive", "kl_target": 3.0, "kl_horizon": 1e3},
        {"algorithm": "dapo", "kl_placement": "loss", "beta": 0.01},
    ],
)
def test_kl_combinations_that_hold(settings: dict[str, Any]):
    built = config(**settings)
    assert {name: getattr(built, name) for name in settings} == settings


def test_kl_resolves():
    """Placed nowhere the coefficient of GRPO's row is gone; the controller of 1909.08593 has its own defaults."""
    built = config(kl_placement="none")
    assert (built.beta, built.kl_estimator) == (0.0, None)
    built = config(kl_controller="adaptive")
    assert (built.beta, built.kl_target, built.kl_horizon) == (0.04, 6.0, 10000.0)
    assert config(algorithm="dapo", kl_placement="reward", beta=0.1).kl_estimator == "k1"
    assert config(algorithm="dapo", kl_placement="loss", beta=0.1).kl_estimator == "k3"


@pytest.mark.parametrize(("name", "value"), [("kl_estimator", "k2"), ("use_bias_correction_kl", True)])
def test_kl_settings_without_a_coefficient_are_refused(name: str, value: Any):
    """With beta 0 no KL is computed, so what says how would be ignored."""
    assert any(message.startswith(f"`{name}`") for message in problems(beta=0.0, **{name: value}))


# Other combinations


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "rloo", "ratio_level": "sequence"},
        {"algorithm": "gmpo", "ratio_level": "sequence_token"},
        {"algorithm": "gspo", "surrogate": "reinforce"},
        {"algorithm": "gspo", "surrogate": "gmpo"},
        {"algorithm": "reinforce_pp", "ratio_level": "sequence"},
        {"algorithm": "gspo", "advantage_estimator": "reinforce_pp_baseline"},
    ],
)
def test_ratio_levels_without_meaning(settings: dict[str, Any]):
    message = only_problem(**settings)
    assert message.startswith("`ratio_level`")


def test_token_advantages_fit_the_token_form_of_gspo():
    assert config(algorithm="gspo_token", advantage_estimator="reinforce_pp").ratio_level == "sequence_token"


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_a_lower_cap_of_engine_weights_that_only_cap_from_above(mode: str):
    message = only_problem(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=0.5)
    assert message.startswith("`vllm_importance_sampling_clip_min`: 0.5")
    assert config(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_min=0.5)


# TRL's fields that `algorithm` replaces

INSTEAD_OF_LOSS_TYPE = {
    "grpo": {"aggregation": "seq_mean_token_mean"},
    "dr_grpo": {"aggregation": "seq_mean_token_sum_norm"},
    "dapo": {"aggregation": "token_mean"},
    "bnpo": {"aggregation": "token_mean"},
    "cispo": {"surrogate": "cispo"},
    "sapo": {"surrogate": "sapo"},
    "luspo": {"ratio_level": "sequence", "aggregation": "seq_mean_token_sum"},
    "vespo": {},
}


def test_every_loss_type_of_trl_is_covered():
    text = next(f for f in fields(GRPOConfig) if f.name == "loss_type").metadata["help"]
    assert {name for name in INSTEAD_OF_LOSS_TYPE if f"'{name}'" in text} == INSTEAD_OF_LOSS_TYPE.keys()


@pytest.mark.parametrize("loss_type", [*INSTEAD_OF_LOSS_TYPE, "unknown"])
def test_loss_types_are_refused_with_what_to_set(loss_type: str):
    message = only_problem(loss_type=loss_type)
    assert message.startswith(f"`loss_type`: {loss_type!r}")
    assert "algorithm" in message
    instead = INSTEAD_OF_LOSS_TYPE.get(loss_type, {})
    for name, value in instead.items():
        assert f"{name}: {value}" in message
    config(**instead)  # the advice holds


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("importance_sampling_level", ["token", "sequence"]),
        ("scale_rewards", ["group", "batch", "none", True, False]),
        ("multi_objective_aggregation", ["sum_then_normalize", "normalize_then_sum"]),
        ("vespo_k_pos", [2.0]),
        ("vespo_lambda_pos", [3.0]),
        ("vespo_k_neg", [3.0]),
        ("vespo_lambda_neg", [2.0]),
    ],
)
def test_replaced_fields_are_refused(name: str, values: list[Any]):
    """Also with the value that is TRL's default: whoever sets it expects an effect."""
    for value in values:
        assert only_problem(**{name: value}).startswith(f"`{name}`: {value!r}")
    assert getattr(config(), name) is None


# Messages


def test_all_problems_in_one_error():
    found = problems(algorithm="dapo", loss_type="dapo", scale_rewards="none", delta=0.5, beta=-1.0, gamma=2.0)
    assert {message.split("`")[1] for message in found} == {"loss_type", "scale_rewards", "delta", "beta", "gamma"}
    found = problems(algorithm="dapo", beta=0.1, pass_k=3, overlong_buffer=600, use_bias_correction_kl=True)
    names = {message.split("`")[1] for message in found}
    assert names == {"beta", "pass_k", "overlong_buffer", "use_bias_correction_kl"}


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("algorithm", "dappo", "dapo"),
        ("algorithm", "gspo-token", "gspo_token"),
        ("algorithm", "GRPO", None),
        ("advantage_estimator", "group_normalised", "group_normalized"),
        ("surrogate", "clipp", "clip"),
        ("ratio_level", "sequences", "sequence"),
        ("aggregation", "token-mean", "token_mean"),
        ("kl_placement", "rewards", "reward"),
        ("kl_controller", "adaptve", "adaptive"),
        ("surrogate", "xyz", None),
    ],
)
def test_the_nearest_name_is_suggested(name: str, value: str, near: str | None):
    message = only_problem(**{name: value})
    assert message.startswith(f"`{name}`: {value!r} is not one of ")
    if near:
        assert message.endswith(f"Did you mean {near!r}?")
    else:
        assert "Did you mean" not in message


def test_a_config_error_is_a_value_error():
    with pytest.raises(ValueError, match="delta"):
        config(delta=0.5)


# Rows from elsewhere


@pytest.fixture
def table() -> Iterator[None]:
    before = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def half_advantages(rewards: Tensor, groups: Tensor, eps: float, share: float = 0.5) -> Tensor:
    return share * rewards + eps


def row(**changes: Any) -> Algorithm:
    return Algorithm(
        **{"key": "mine", "title": "Mine", "paper": "-", "advantage": group_centered_advantages, **changes}
    )


@pytest.mark.usefixtures("table")
def test_a_new_row_works():
    assert register(row(advantage=half_advantages, defaults={"advantage_eps": 0.25, "epsilon": 0.1})).key == "mine"
    built = config(algorithm="mine")
    assert (built.advantage_estimator, built.epsilon, built.kl_placement) == ("half", 0.1, "none")
    assert built.advantage_arguments == {"eps": 0.25}
    function = built.advantage_function
    values = function(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), **built.advantage_arguments)
    assert values.tolist() == [0.75, 1.75]
    assert config(algorithm="grpo", advantage_estimator="half", advantage_eps=0.5).advantage_arguments == {"eps": 0.5}
    assert config(algorithm="mine", advantage_eps=1.0).advantage_arguments == {"eps": 1.0}
    assert any("'half'" in message for message in problems(algorithm="mine", num_generations=1))


@pytest.mark.usefixtures("table")
def test_a_new_row_without_a_default_for_what_it_needs():
    register(row(advantage=half_advantages))
    assert only_problem(algorithm="mine").startswith("`advantage_eps`: not set")
    assert config(algorithm="mine", advantage_eps=0.5).advantage_eps == 0.5


@pytest.mark.usefixtures("table")
def test_a_new_surrogate_keeps_its_own_settings():
    """A keyword that no config field has stays at the function's default; one without default is refused."""

    def sharp(
        logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float, sharpness: float = 2.0
    ) -> SurrogateTerms:
        raise NotImplementedError

    register(row(surrogate=sharp, defaults={"epsilon": 0.3}))
    assert config(algorithm="mine").surrogate_arguments == {"epsilon": 0.3}
    assert config(surrogate="sharp", epsilon=0.5).surrogate_arguments == {"epsilon": 0.5}

    def sharper(
        logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, sharpness: float
    ) -> SurrogateTerms:
        raise NotImplementedError

    register(row(key="yours", surrogate=sharper))
    assert only_problem(algorithm="yours").startswith("`sharpness`: not set")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "defaults",
    [
        {"beta": 0.1, "kl_controller": "adaptive", "kl_target": 1.0, "kl_horizon": 50.0},
        {"overlong_buffer": 4.0, "overlong_penalty_factor": 0.5},
        {"num_generations": 4, "num_iterations": 2, "mask_truncated_completions": True, "disable_dropout": False},
    ],
)
def test_defaults_of_a_new_row_hold(defaults: dict[str, Any]):
    register(row(kl_placement="loss", defaults=defaults))
    built = config(algorithm="mine")
    assert {name: getattr(built, name) for name in defaults} == defaults


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"key": "My-Row"}, "key"),
        ({"key": "Mine"}, "key"),
        ({"key": "2nd"}, "key"),
        ({"key": "with space"}, "key"),
        ({"key": ""}, "key"),
        ({"ratio_level": "word"}, "ratio_level"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"kl_placement": "both"}, "kl_placement"),
        ({"kl_estimator": "k9"}, "kl_estimator"),
        ({"advantage": lambda rewards, answers: rewards}, "answers"),
    ],
)
def test_a_row_that_no_trainer_could_run(changes: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=f"`{named}`"):
        row(**changes)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("defaults", [{"epsilonn": 0.3}, {"temperature": 0.7}, {"pass_k": 3}])
def test_a_default_of_a_new_row_is_never_ignored(defaults: dict[str, Any]):
    """Misspelt, a field that rows do not set, or a setting of another part: refused, or else it holds."""
    name, value = next(iter(defaults.items()))
    try:
        register(row(defaults=defaults))
        built = config(algorithm="mine")
    except ValueError:
        return
    assert getattr(built, name, None) == value


@pytest.mark.usefixtures("table")
def test_a_taken_key():
    with pytest.raises(ValueError, match="'grpo' is taken"):
        register(row(key="grpo"))
    assert ALGORITHMS["grpo"].title.startswith("GRPO")


def group_normalized_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    raise NotImplementedError


def clip(logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> SurrogateTerms:
    raise NotImplementedError


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("part", [{"advantage": group_normalized_advantages}, {"surrogate": clip}])
def test_a_function_name_that_is_taken(part: dict[str, Any]):
    """Parts go by the names of their functions: a second function of the same name must not replace the first."""
    kind, function = next(iter(part.items()))
    with pytest.raises(ValueError, match=function.__name__):
        register(row(**part))
    assert getattr(config(), f"{kind}_function") is getattr(ALGORITHMS["grpo"], kind)


def test_rows_are_frozen():
    with pytest.raises(AttributeError):
        ALGORITHMS["grpo"].title = "x"  # type: ignore[misc]


def test_a_ratio_of_another_level_brings_bounds_of_its_own_scale():
    """GSPO's 3e-4 is for means over a sequence, 0.2 for single tokens."""
    assert config(algorithm="gspo", ratio_level="token").epsilon == 0.2
    assert config(algorithm="grpo", ratio_level="sequence").epsilon == 3e-4
    assert config(algorithm="gspo", ratio_level="sequence_token").epsilon_high == 4e-4


@pytest.mark.parametrize(("algorithm", "placement", "estimator"), [("rloo", "loss", "k3"), ("grpo", "reward", "k1")])
def test_a_moved_kl_takes_the_estimator_of_its_new_place(algorithm: str, placement: str, estimator: str):
    assert config(algorithm=algorithm, kl_placement=placement).kl_estimator == estimator


def test_problems_of_every_kind_come_together():
    with pytest.raises(ConfigError) as error:
        config(algorithm="dapo", beta=0.1, loss_type="grpo", epsilon=-1, surrogate="clp", gamma=0.9)
    named = [problem.split("`")[1] for problem in error.value.problems]
    assert sorted(named) == ["beta", "epsilon", "gamma", "loss_type", "surrogate"]


def test_rollout_fields_are_those_of_a_rollout():
    from dataclasses import fields

    from trl_algos import Rollout
    from trl_algos.algorithms import ROLLOUT_FIELDS

    properties = {name for name, value in vars(Rollout).items() if isinstance(value, property)}
    assert set(ROLLOUT_FIELDS) == {f.name for f in fields(Rollout)} | properties - {"single_samples"}


@pytest.mark.parametrize("k", [4, 5])
def test_pass_at_k_needs_more_than_k_completions(k: int):
    """Of k in a group of k there is one subset, and nothing to compare it with: every advantage would be 0."""
    assert any("`pass_k`" in message for message in problems(algorithm="pass_at_k", num_generations=4, pass_k=k))


@pytest.mark.parametrize("shaping", [{"overlong_buffer": 4}, {"kl_placement": "reward", "beta": 0.1}])
def test_pass_at_k_takes_rewards_as_right_or_wrong(shaping: dict[str, Any]):
    assert any("pass_at_k" in message for message in problems(algorithm="pass_at_k", **shaping))


@pytest.mark.parametrize("settings", [{"num_iterations": 2}, {"steps_per_generation": 2}])
def test_stale_completions_without_a_ratio_are_warned_of(settings: dict[str, Any]):
    with pytest.warns(UserWarning, match="reinforce has no ratio"):
        config(algorithm="rloo", **settings)


def test_a_horizon_that_one_update_exceeds():
    assert any("`kl_horizon`" in message for message in problems(kl_controller="adaptive", kl_horizon=1.0))


def test_the_engine_is_corrected_for_once():
    """DIS takes its ratio to the engine; weights for the same mismatch would count it twice."""
    assert any("`ratio_reference`" in m for m in problems(algorithm="dis", vllm_importance_sampling_correction=True))
    weighted = config(algorithm="dis", ratio_reference="policy", vllm_importance_sampling_correction=True)
    assert weighted.vllm_importance_sampling_correction


@pytest.mark.parametrize("value", ["no", "false", 1])
def test_dynamic_sampling_is_not_switched_on_by_text(value: Any):
    assert only_problem(algorithm="dapo", dynamic_sampling=value) == (
        f"`dynamic_sampling`: {value!r} must be true or false."
    )


def test_a_tolerance_below_that_of_the_advantages_is_refused():
    """A group could be kept for a spread that gives it no advantage."""
    assert only_problem(algorithm="dapo", dynamic_sampling_tolerance=0.0).startswith(
        "`dynamic_sampling_tolerance`: 0.0 is out of range; it must be at least 1e-6"
    )
