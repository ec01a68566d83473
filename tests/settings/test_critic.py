"""Settings of the critic: what follows from what, and what is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from trl_algos import ALGORITHMS, Algorithm, ConfigError, PolicyConfig, register
from trl_algos.algorithms import CRITIC_DEFAULTS, advantage_needs
from trl_algos.core import gae_advantages, group_normalized_advantages, length_adaptive_gae_advantages
from trl_algos.models.critic_folder import CRITIC_FORMS
from trl_algos.recipe.reading import read_recipe
from trl_algos.settings.critic import CRITIC_SETTINGS

WITH_CRITIC = ("ppo", "dual_clip_ppo", "vapo")
VALUES: dict[str, Any] = {
    "critic": "separate",
    "critic_model_name_or_path": "some/model",
    "critic_use_peft": False,
    "critic_trunk_gradient": True,
    "critic_learning_rate": 1e-4,
    "critic_max_grad_norm": 0.5,
    "critic_lr_scheduler_type": "cosine",
    "critic_lr_scheduler_kwargs": {"num_cycles": 0.5},
    "critic_lr_warmup_steps": 0.1,
    "critic_num_iterations": 2,
    "critic_gae_lambda": 0.9,
    "vf_coef": 0.5,
    "value_clip_range": 0.1,
    "bootstrap_truncated": True,
    "critic_warmup_steps": 3,
    "positive_nll_coef": 0.2,
    "push_critic": True,
}


def config(**settings: Any) -> PolicyConfig:
    base = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
    return PolicyConfig(**{**base, "per_device_train_batch_size": 8, **settings})


def only_problem(**settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        config(**settings)
    assert len(error.value.problems) == 1, error.value.problems
    return error.value.problems[0]


def recipe_problem(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_recipe(None, ["--per_device_train_batch_size", "8", *words])
    assert len(error.value.problems) == 1, error.value.problems
    return error.value.problems[0]


def test_rows_with_a_critic_are_those_whose_estimator_takes_values():
    assert {key for key, row in ALGORITHMS.items() if "critic" in row.needs} == set(WITH_CRITIC)
    assert advantage_needs(gae_advantages) == advantage_needs(length_adaptive_gae_advantages) == ("critic",)
    assert advantage_needs(group_normalized_advantages) == ("groups",)


@pytest.mark.parametrize("key", WITH_CRITIC)
def test_everything_that_a_trainer_reads_has_a_value(key: str):
    built = config(algorithm=key, learning_rate=3e-5, max_grad_norm=0.7)
    assert (built.critic_learning_rate, built.critic_max_grad_norm) == (3e-5, 0.7)
    assert (built.critic, built.critic_model_name_or_path, built.critic_trunk_gradient) == (None, None, None)
    assert all(getattr(built, name) is not None for name in CRITIC_DEFAULTS)


def test_the_settings_tested_here_are_all_there_are():
    assert set(CRITIC_SETTINGS) == VALUES.keys()


@pytest.mark.parametrize("name", VALUES)
def test_what_was_set_wins(name: str):
    more = {"critic_trunk_gradient": {"critic": "shared"}, "critic_model_name_or_path": {"critic": "separate"}}
    more["critic_lr_scheduler_kwargs"] = {"critic_lr_scheduler_type": "cosine"}
    built = config(algorithm="ppo", **{**more.get(name, {}), name: VALUES[name]})
    assert getattr(built, name) == VALUES[name]


@pytest.mark.parametrize("name", VALUES)
def test_without_a_critic_its_settings_are_refused(name: str):
    message = only_problem(algorithm="grpo", **{name: VALUES[name]})
    assert message.startswith(
        f"`{name}`: {VALUES[name]!r} is not used: the advantage estimator 'group_normalized' has"
    )
    assert message.endswith("Those with one are gae, length_adaptive_gae, as in ppo, dual_clip_ppo, vapo.")
    assert getattr(config(algorithm="grpo"), name) is None


def test_a_false_is_refused_too_where_nothing_reads_it():
    assert "`push_critic`: False is not used" in only_problem(algorithm="grpo", push_critic=False)


def test_lambda_of_the_returns_follows_that_of_the_advantages():
    assert config(algorithm="ppo", gae_lambda=0.9).critic_gae_lambda == 0.9
    assert config(algorithm="ppo", gae_lambda=0.9, critic_gae_lambda=1.0).critic_gae_lambda == 1.0
    assert config(algorithm="vapo").critic_gae_lambda == 1.0
    assert config(algorithm="vapo", advantage_estimator="gae").critic_gae_lambda == 1.0
    assert config(algorithm="grpo", advantage_estimator="length_adaptive_gae").critic_gae_lambda == 1.0


def test_an_exchanged_estimator_brings_and_takes_away_the_critic():
    built = config(algorithm="grpo", advantage_estimator="gae")
    assert (built.gamma, built.gae_lambda, built.critic_gae_lambda, built.vf_coef) == (1.0, 0.95, 0.95, 0.1)
    assert (built.num_generations, built.positive_nll_coef) == (8, 0.0)
    built = config(algorithm="ppo", advantage_estimator="group_normalized", num_generations=4)
    assert (built.vf_coef, built.gae_lambda, built.gamma, built.value_clip_range) == (None,) * 4


@pytest.mark.parametrize(
    ("settings", "lora", "form"),
    [
        ({}, True, "adapter"),
        ({}, False, "separate"),
        ({"critic": "shared"}, True, "shared"),
        ({"critic": "separate"}, True, "separate"),
        ({"critic_model_name_or_path": "some/model"}, True, "separate"),
    ],
)
def test_form_of_the_critic(settings: dict[str, Any], lora: bool, form: str):
    assert config(algorithm="ppo", **settings).critic_form(uses_lora=lora) == form


def test_what_the_critic_takes_from_the_policy_and_what_not():
    given = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}, "warmup_steps": 0.1}
    built = config(algorithm="ppo", num_iterations=3, **given)
    assert (built.critic_lr_scheduler_type, built.critic_lr_warmup_steps) == ("cosine_with_min_lr", 0.1)
    assert (built.critic_lr_scheduler_kwargs, built.critic_num_iterations) == ({"min_lr": 1e-7}, 3)
    built = config(algorithm="ppo", critic_lr_scheduler_type="constant", **given)
    assert built.critic_lr_scheduler_kwargs is None


def test_an_optimizer_step_within_one_pass():
    passes = {"algorithm": "ppo", "num_iterations": 1, "critic_num_iterations": 2}
    config(**passes, gradient_accumulation_steps=2, steps_per_generation=4)
    config(**passes, gradient_accumulation_steps=2, generation_batch_size=32)
    for settings in ({"steps_per_generation": 3}, {"generation_batch_size": 8}):
        message = only_problem(**passes, gradient_accumulation_steps=2, **settings)
        assert message.startswith("`critic_num_iterations`: 2 differs from `num_iterations` (1), so an optimizer step")
    config(algorithm="ppo", num_iterations=2, gradient_accumulation_steps=2, steps_per_generation=3)


def test_vapo_warms_up_unless_it_is_told_otherwise():
    assert config(algorithm="vapo").critic_warmup_steps == 50
    assert only_problem(algorithm="vapo", max_steps=50).startswith("`critic_warmup_steps`: 50 leaves the policy untra")
    assert config(algorithm="vapo", max_steps=50, critic_warmup_steps=50).critic_warmup_steps == 50
    assert config(algorithm="vapo", max_steps=2, critic_warmup_steps=0).critic_warmup_steps == 0


def test_the_adapter_form_needs_lora():
    built = config(algorithm="ppo", critic="adapter")
    assert built.critic_form(uses_lora=True) == "adapter"
    with pytest.raises(ConfigError, match=r"^`critic`: adapter is a second LoRA adapter"):
        built.critic_form(uses_lora=False)
    assert recipe_problem("--algorithm", "ppo", "--critic", "adapter").startswith("`critic`: adapter is a second LoRA")


@pytest.mark.parametrize(("words", "form"), [((), "separate"), (("--use_peft",), "adapter")])
def test_a_recipe_tells_the_form_and_why(words: tuple[str, ...], form: str):
    recipe = read_recipe(None, ["--algorithm", "ppo", "--per_device_train_batch_size", "8", *words])
    assert (recipe.values["critic"], recipe.sources["critic"]) == (form, "follows from `use_peft`")
    assert recipe.sources["critic_learning_rate"] == "follows from `learning_rate`"
    assert recipe.sources["critic_gae_lambda"] == "follows from `gae_lambda`"
    assert recipe.sources["vf_coef"] == "common default"
    plain = read_recipe(None, ["--algorithm", "grpo", "--per_device_train_batch_size", "8", *words])
    assert plain.values["critic"] is None


def test_a_shared_critic_leaves_the_trunk_alone_unless_told():
    assert config(algorithm="ppo", critic="shared").critic_trunk_gradient is False
    assert config(algorithm="ppo", critic="shared", critic_trunk_gradient=True).critic_trunk_gradient is True


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        (
            {"critic": "adaptor"},
            "`critic`: 'adaptor' is not one of adapter, separate, shared. Did you mean 'adapter'?",
        ),
        (
            {"critic": "shared", "critic_model_name_or_path": "a/b"},
            "`critic_model_name_or_path`: 'a/b' is not used by `critic: shared`",
        ),
        ({"critic_trunk_gradient": False}, "`critic_trunk_gradient`: False is used by `critic: shared` alone"),
        ({"critic": "separate", "critic_trunk_gradient": True}, "`critic_trunk_gradient`: True is used by"),
        ({"bootstrap_truncated": True, "mask_truncated_completions": True}, "`bootstrap_truncated`: true has nothing"),
        ({"critic_lr_scheduler_type": "cosin"}, "`critic_lr_scheduler_type`: 'cosin' is not one of linear, cosine"),
        (
            {"critic_lr_scheduler_type": "linear", "lr_scheduler_type": "greedy", "eval_strategy": "steps"},
            "`critic_lr_scheduler_type`: linear cannot go beside `lr_scheduler_type: greedy`",
        ),
        (
            {"critic_lr_scheduler_type": "greedy", "eval_strategy": "steps"},
            "`critic_lr_scheduler_type`: 'greedy' is not one of",
        ),
        (
            {"critic_lr_warmup_steps": 3, "lr_scheduler_type": "greedy", "eval_strategy": "steps"},
            "`critic_lr_warmup_steps`: is not used by `lr_scheduler_type: greedy`",
        ),
        ({"critic_warmup_steps": 6, "max_steps": 5}, "`critic_warmup_steps`: 6 leaves the policy untrained"),
        ({"ratio_level": "sequence"}, "`ratio_level`: sequence needs one advantage per completion"),
    ],
)
def test_combinations_without_meaning(settings: dict[str, Any], start: str):
    assert only_problem(algorithm="ppo", **settings).startswith(start)


def test_combinations_at_their_edges():
    assert config(algorithm="ppo", critic_warmup_steps=4, max_steps=5).critic_warmup_steps == 4
    assert config(algorithm="ppo", critic_warmup_steps=5).max_steps == -1  # epochs: nobody knows how many steps
    assert config(algorithm="ppo", mask_truncated_completions=True).bootstrap_truncated is False
    assert config(algorithm="ppo", value_clip_range=0).value_clip_range == 0
    assert config(algorithm="vapo", positive_nll_coef=0.0).positive_nll_coef == 0.0


RECOMPUTED_BY_FSDP = ("--fsdp_config", '{"activation_checkpointing": true}', "--gradient_checkpointing", "false")
CLIPPED_APART = ("--max_grad_norm", "0.5", "--critic_max_grad_norm", "0.2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--deepspeed", '{"zero_optimization": {"stage": 2}}', *CLIPPED_APART),
            "`critic_max_grad_norm`: 0.2 differs from `max_grad_norm`, which is 0.5, but DeepSpeed clips",
        ),
        (("--fsdp", "true", "--fsdp_config", '{"version": 1}'), "`fsdp_config`: version 1 is not supported"),
        (
            ("--fsdp", "true", "--fsdp_config", '{"fsdp_state_dict_type": "SHARDED_STATE_DICT"}'),
            "`fsdp_config`: state_dict_type must be FULL_STATE_DICT",
        ),
        (
            ("--use_peft", "--fsdp", "true", *RECOMPUTED_BY_FSDP),
            "`fsdp_config`: activation_checkpointing would recompute the critic's layers with the policy's adapter",
        ),
    ],
)
def test_what_a_backend_cannot_do_with_a_critic(words: tuple[str, ...], message: str):
    assert recipe_problem("--algorithm", "ppo", *words).startswith(message)


@pytest.mark.parametrize(
    "words",
    [
        ("--deepspeed", '{"zero_optimization": {"stage": 3}}', "--max_grad_norm", "0.5"),
        ("--fsdp", "true", *CLIPPED_APART),
        ("--fsdp", "true", *RECOMPUTED_BY_FSDP),
        ("--critic", "shared", "--critic_trunk_gradient", "--fsdp", "full_shard"),
    ],
)
def test_what_a_backend_can_do_with_a_critic(words: tuple[str, ...]):
    read_recipe(None, ["--per_device_train_batch_size", "8", "--algorithm", "ppo", *words])


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("gae_lambda", 1.1),
        ("gae_lambda", -0.1),
        ("critic_gae_lambda", 1.5),
        ("vf_coef", 0.0),
        ("value_clip_range", -0.2),
        ("critic_learning_rate", -1e-6),
        ("critic_max_grad_norm", -1.0),
        ("critic_warmup_steps", 1.5),
        ("critic_lr_warmup_steps", -1.0),
        ("critic_num_iterations", 0),
        ("positive_nll_coef", -0.1),
    ],
)
def test_out_of_range(name: str, bad: float):
    assert only_problem(algorithm="ppo", **{name: bad}).startswith(f"`{name}`: {bad!r} is out of range")


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_alpha_of_vapo_is_positive(bad: float):
    message = only_problem(algorithm="vapo", length_adaptive_alpha=bad)
    assert message.startswith(f"`length_adaptive_alpha`: {bad!r} is out of range")


@pytest.mark.parametrize(
    ("key", "name"), [("ppo", "length_adaptive_alpha"), ("vapo", "gae_lambda"), ("rloo", "gamma")]
)
def test_a_setting_of_another_estimator_is_refused(key: str, name: str):
    assert only_problem(algorithm=key, **{name: 0.9}).startswith(f"`{name}`: 0.9 is not used")


def test_push_critic_needs_a_push():
    message = recipe_problem("--algorithm", "ppo", "--push_critic")
    assert message == "`push_critic`: True is not used: `push_to_hub` is not set."


def test_every_form_is_known_to_its_help():
    text = PolicyConfig.__dataclass_fields__["critic"].metadata["help"]
    assert all(f"{form}: " in text for form in CRITIC_FORMS)


# A row from elsewhere


def td_advantages(token_rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    raise NotImplementedError


@pytest.fixture
def table() -> Iterator[None]:
    before = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


@pytest.mark.usefixtures("table")
def test_a_new_row_with_a_critic():
    """Its estimator has neither gamma nor lambda, but the returns of the critic have."""
    register(Algorithm(key="td", title="TD", paper="-", advantage=td_advantages, defaults={"vf_coef": 0.5}))
    built = config(algorithm="td")
    assert (built.gamma, built.critic_gae_lambda, built.gae_lambda, built.vf_coef) == (1.0, 1.0, None, 0.5)
    assert config(algorithm="td", gamma=0.9).gamma == 0.9


def test_a_row_without_a_critic_cannot_set_its_settings():
    with pytest.raises(ValueError, match="sets vf_coef, which nothing in the row uses"):
        Algorithm(key="x", title="X", paper="-", advantage=group_normalized_advantages, defaults={"vf_coef": 0.5})


def test_a_schedule_that_waits_for_evaluations_cannot_start_after_the_warm_up():
    settings = {"algorithm": "ppo", "lr_scheduler_type": "greedy", "eval_strategy": "steps", "eval_steps": 5}
    config(**settings)
    assert only_problem(critic_warmup_steps=2, **settings).startswith("`lr_scheduler_type`: greedy has no course")


def test_whole_checkpoints_would_be_pushed_with_the_critic():
    settings = {"algorithm": "ppo", "push_to_hub": True, "hub_strategy": "checkpoint"}
    assert only_problem(**settings).startswith("`hub_strategy`: checkpoint pushes whole checkpoints, the critic incl")
    config(push_critic=True, **settings)
    config(**settings | {"hub_strategy": "every_save"})


@pytest.mark.parametrize("path", ["", " ", "true", "False"])
def test_what_names_no_model_is_refused(path: str):
    message = f"`critic_model_name_or_path`: {path!r} names no model; give a folder or a model id, or leave it out."
    assert only_problem(algorithm="ppo", critic_model_name_or_path=path) == message
    assert only_problem(algorithm="ppo", critic="shared", critic_model_name_or_path=path) == message


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"critic_lr_scheduler_kwargs": {"foo": 1}}, "'foo' is no parameter of linear, which takes none"),
        (
            {"critic_lr_scheduler_type": "polynomial", "critic_lr_scheduler_kwargs": {"min_lr": 1}},
            "'min_lr' is no parameter of polynomial, which takes lr_end, power",
        ),
        ({"critic_lr_scheduler_type": "cosine_with_min_lr"}, "{}, but cosine_with_min_lr needs min_lr or min_lr_rate"),
        (
            {
                "critic_lr_scheduler_type": "cosine_with_min_lr",
                "critic_lr_scheduler_kwargs": {"min_lr": 1e-7, "min_lr_rate": 0.1},
            },
            "{'min_lr': 1e-07, 'min_lr_rate': 0.1}, but cosine_with_min_lr needs min_lr or min_lr_rate",
        ),
        (
            {"critic_lr_scheduler_type": "constant", "critic_lr_scheduler_kwargs": {"a": 1}},
            "constant, which takes none",
        ),
    ],
)
def test_parameters_that_are_not_the_schedules(settings: dict[str, Any], says: str):
    message = only_problem(algorithm="ppo", **settings)
    assert message.startswith("`critic_lr_scheduler_kwargs`: ")
    assert says in message


def test_parameters_that_both_schedules_have_are_the_policys():
    given = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"foo": 1}}
    message = only_problem(algorithm="ppo", **given)
    assert message == "`lr_scheduler_kwargs`: 'foo' is no parameter of cosine, which takes num_cycles."
    assert config(algorithm="ppo", critic_lr_scheduler_type="linear", **given).critic_lr_scheduler_kwargs is None
    constant = {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"foo": 1}}  # transformers passes over it
    assert config(algorithm="ppo", **constant).critic_lr_scheduler_kwargs == {"foo": 1}


# How a separate critic is trained


def test_a_separate_critic_is_trained_as_the_policy_is_unless_told():
    ppo = ["--algorithm", "ppo", "--per_device_train_batch_size", "8", "--critic", "separate"]
    for words, expected in (([], False), (["--use_peft"], True), (["--use_peft", "--critic_use_peft=false"], False)):
        recipe = read_recipe(None, [*ppo, *words])
        assert recipe.values["critic_use_peft"] is expected
    assert recipe.sources["critic_use_peft"] == "command line"
    assert read_recipe(None, [*ppo, "--use_peft"]).sources["critic_use_peft"] == "follows from `use_peft`"


def test_critic_use_peft_needs_a_separate_critic_and_for_true_lora():
    ppo = ["--algorithm", "ppo"]
    message = "`critic_use_peft`: False is used by `critic: separate` alone, but the critic here is "
    assert recipe_problem(*ppo, "--use_peft", "--critic_use_peft", "false") == f"{message}adapter."
    assert recipe_problem(*ppo, "--critic", "shared", "--critic_use_peft", "false") == f"{message}shared."
    message = "`critic_use_peft`: true has no LoRA to be like: the policy is trained whole; set `use_peft`"
    assert recipe_problem(*ppo, "--critic_use_peft").startswith(message)
    with pytest.raises(ConfigError, match=r"^`critic_use_peft`: true has no LoRA"):
        config(algorithm="ppo", critic_use_peft=True).critic_form(uses_lora=False)


def test_a_model_to_start_from_makes_the_critic_separate_also_with_lora():
    words = ["--algorithm", "ppo", "--use_peft", "--critic_model_name_or_path", "some/model"]
    assert read_recipe(None, ["--per_device_train_batch_size", "8", *words]).values["critic"] == "separate"
