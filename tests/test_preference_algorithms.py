"""The rows of the algorithms on preference pairs, and what the README says of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from trl import DPOConfig, RewardConfig

from trl_algos import PREFERENCE_ALGORITHMS, BradleyTerryConfig, PolicyConfig, PreferenceConfig
from trl_algos.core import bradley_terry_loss
from trl_algos.errors import ConfigError
from trl_algos.preference_algorithms import preference_keys

README = (Path(__file__).parents[1] / "README.md").read_text()
POLICY_KEYS = preference_keys("policy")


def config(**settings):
    return PreferenceConfig(
        **{"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none", **settings}
    )


def reward_config(**settings):
    return BradleyTerryConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings)


@pytest.mark.parametrize("row", PREFERENCE_ALGORITHMS.values(), ids=lambda row: row.key)
def test_the_readme_has_the_row(row) -> None:
    settings = ", ".join(f"`{name}` {value}" for name, value in row.defaults.items())
    assert f"| {row.key} | {row.title} | {row.paper} | {row.loss_name} | {settings} |" in README


def test_the_rows() -> None:
    assert POLICY_KEYS == ("dpo", "ipo", "cdpo", "robust_dpo", "rpo")
    assert preference_keys("reward_model") == ("bradley_terry",)
    assert PREFERENCE_ALGORITHMS["bradley_terry"].loss is bradley_terry_loss
    for key, row in PREFERENCE_ALGORITHMS.items():
        assert (row.key, bool(row.paper), bool(row.differs)) == (key, True, True)


def test_reading_the_table_loads_no_torch() -> None:
    code = (
        "import sys, trl_algos.preference_algorithms\nassert 'torch' not in sys.modules and 'trl' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("key", POLICY_KEYS)
def test_what_is_unset_comes_from_the_row(key: str) -> None:
    row = PREFERENCE_ALGORITHMS[key]
    made = config(algorithm=key)
    for name in ("beta", "label_smoothing", "nll_coef"):
        assert getattr(made, name) == row.defaults.get(name, 0.0)
    assert made.loss_type == [row.loss]
    assert made.max_length == DPOConfig.max_length
    assert made.row is row
    again = config(**{name: getattr(made, name) for name in ("algorithm", "beta", "label_smoothing", "nll_coef")})
    assert again.loss_type == made.loss_type


def test_what_is_set_wins() -> None:
    made = config(algorithm="cdpo", beta=0.3, label_smoothing=0.2)
    assert (made.beta, made.label_smoothing) == (0.3, 0.2)
    assert reward_config(label_smoothing=0.1).label_smoothing == 0.1
    plain = reward_config()
    assert (plain.center_rewards_coefficient, plain.label_smoothing) == (0.0, 0.0)
    assert plain.learning_rate == RewardConfig.learning_rate


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing": 0.1}, "`label_smoothing`: 0.1 has no effect with `algorithm` dpo; .*cdpo, robust_dpo"),
        ({"algorithm": "ipo", "nll_coef": 1.0}, "`nll_coef`: 1.0 has no effect with `algorithm` ipo; .* rpo"),
        (
            {"algorithm": "cdpo", "label_smoothing": 0.5},
            r"`label_smoothing`: 0.5 is out of range; it must be at least 0 and below 0.5",
        ),
        ({"beta": 0}, "`beta`: 0 is out of range; it must be above 0"),
        ({"beta": float("nan")}, "`beta`: nan"),
        ({"algorithm": "rpo", "nll_coef": -1}, "`nll_coef`: -1 is out of range; it must be at least 0"),
        ({"algorithm": "rpo", "use_weighting": True}, "`use_weighting`"),
        ({"loss_type": ["hinge"]}, r"`loss_type`: \['hinge'\] is replaced by `algorithm`"),
        ({"loss_weights": [1.0]}, "`loss_weights`"),
        ({"padding_free": "yes"}, "`padding_free`"),
        ({"discopop_tau": 0.1}, "`discopop_tau`"),
        ({"f_divergence_type": "kl"}, "`f_divergence_type`: 'kl' is not one of reverse_kl"),
        ({"f_alpha_divergence_coef": 0.7}, "`f_alpha_divergence_coef`: 0.7 has no effect unless"),
        ({"ref_model_sync_steps": 3}, "`ref_model_sync_steps`: 3 has no effect unless `sync_ref_model` is True"),
        ({"precompute_ref_batch_size": 3}, "`precompute_ref_batch_size`"),
        ({"truncation_mode": "keep"}, "`truncation_mode`: 'keep'"),
        ({"ld_alpha": 2}, "`ld_alpha`: 2 is out of range; it must be between 0 and 1"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor`: 0.1 has no effect"),
        ({"save_strategy": "best"}, "`save_strategy`: best needs evaluations"),
        ({"fp16": True, "bf16": True}, "`fp16`: true together with `bf16`"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size`: 0 is out of range"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "`sync_ref_model`: true moves the reference"),
        ({"loss_type": "ipo"}, "`loss_type`: 'ipo' is replaced by `algorithm`. Set `algorithm: ipo`"),
        ({"max_length": 1}, "`max_length`: 1 is out of range; it must be a whole number of tokens, 2 or more"),
        ({"algorithm": "dpoo"}, "`algorithm`: 'dpoo' is not one of dpo.* Did you mean 'dpo'"),
        ({"algorithm": "bradley_terry"}, "It is one of BradleyTerryConfig and BradleyTerryTrainer"),
    ],
)
def test_what_has_no_effect_or_is_out_of_range_is_refused(settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        config(beta=-1, label_smoothing=0.2, padding_free=2)
    assert len(error.value.problems) == 3


def test_a_reward_model_has_its_own_ranges() -> None:
    with pytest.raises(ConfigError, match=r"`center_rewards_coefficient`: -0\.1"):
        reward_config(center_rewards_coefficient=-0.1)
    with pytest.raises(ConfigError, match="`pad_token`: '<eos>' decides where scores are read"):
        reward_config(pad_token="<eos>")
    with pytest.raises(ConfigError, match="It is one of PreferenceConfig"):
        reward_config(algorithm="dpo")


@pytest.mark.parametrize("settings", [{"save_strategy": "best"}, {"learning_rate": -1.0}, {"save_total_limit": 0}])
def test_what_every_trainer_refuses_is_said_of_a_reward_model_by_key(settings) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^`{name}`: "):
        reward_config(**settings)


def test_a_loss_that_is_another_algorithm_s_is_doubted() -> None:
    with pytest.warns(UserWarning, match="`nll_coef` is 0, so rpo is the loss of dpo"):
        config(algorithm="rpo", nll_coef=0.0)


def test_a_policy_s_config_names_the_classes_for_pairs() -> None:
    with pytest.raises(ConfigError, match=r"'dpo' is not one of grpo, .* It is one of PreferenceConfig"):
        PolicyConfig("unused", algorithm="dpo", use_cpu=True, bf16=False)
