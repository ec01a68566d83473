"""The rows of the algorithms on preference pairs, and what the README says of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from trl import DPOConfig, RewardConfig

from trl_algos import PREFERENCE_ALGORITHMS, BradleyTerryConfig, PreferenceConfig
from trl_algos.cli import main
from trl_algos.core import bradley_terry_loss
from trl_algos.errors import ConfigError
from trl_algos.preference_algorithms import preference_keys
from trl_algos.settings.resolution import resolve

README = (Path(__file__).parents[1] / "README.md").read_text()
POLICY_KEYS = preference_keys("policy")


def config(**settings):
    return PreferenceConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings)


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
        ({"algorithm": "cdpo", "label_smoothing": 0.5}, r"`label_smoothing`: 0.5 must be a number in \[0, 0.5\)"),
        ({"beta": 0}, "`beta`: 0 must be a number above 0"),
        ({"beta": float("nan")}, "`beta`: nan"),
        ({"algorithm": "rpo", "nll_coef": -1}, "`nll_coef`: -1 must be a number 0 or above"),
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
        ({"ld_alpha": 2}, r"`ld_alpha`: 2 must be a number in \[0, 1\]"),
        ({"max_length": 1}, "`max_length`: 1 must be"),
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


@pytest.mark.parametrize("key", PREFERENCE_ALGORITHMS)
def test_recipes_and_commands_say_that_they_cannot_do_it_yet(key: str, capsys) -> None:
    assert main(["list", key]) == main(["init", key]) == 2
    assert capsys.readouterr().err.count(f"{key} trains on preference pairs, which recipes") == 2
    with pytest.raises(ConfigError, match=f"'{key}' trains on preference pairs, which recipes and the command line"):
        resolve({"algorithm": key, "loss_type": None}, {})
