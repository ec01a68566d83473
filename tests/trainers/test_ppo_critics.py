"""How a critic starts, what it leaves alone, and what is refused with one message."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from ppo_oracle import FORMS, critic_state, lora, make_trainer, reward
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaModel

from trl_algos import ConfigError, PolicyTrainer, load_critic
from trl_algos.config import PolicyConfig
from trl_algos.trainers import PPOTrainer, ppo_trainer
from trl_algos.trainers.critic.head import ValueHead
from trl_algos.trainers.critic.making import make_critic
from trl_algos.trainers.critic.metrics import clip_fraction
from trl_algos.trainers.critic.sharded import backend_problems

LORA = {"peft_config": lora()}


def trainer(
    folder: str, trainer_class: type[PolicyTrainer] = PPOTrainer, model: Any = None, rest: Any = None, **settings: Any
) -> Any:
    config = {
        "output_dir": f"{folder}/unused",
        "algorithm": "ppo",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "max_completion_length": 4,
        "max_steps": 2,
    }
    return trainer_class(
        model or folder,
        reward,
        PolicyConfig(**config | settings),
        train_dataset=tiny.prompts(8),
        processing_class=tiny.tokenizer(),
        **rest or {},
    )


# How it starts


def test_first_values_are_near_0_and_differ() -> None:
    torch.manual_seed(0)
    hidden = torch.nn.functional.normalize(torch.randn(2000, 64), dim=-1) * 8
    values = ValueHead(64)(hidden)
    assert values.shape == (2000,)
    assert abs(float(values.mean())) < 0.02
    assert 0.5 / 8 < float(values.std()) < 2 / 8


def test_the_head_computes_in_float32_whatever_the_model_has() -> None:
    head, hidden = ValueHead(8), torch.randn(3, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(hidden)
    assert values.dtype == torch.float32
    assert values.equal(hidden.float() @ head.weight[0] + head.bias)


@pytest.mark.parametrize("name", FORMS)
def test_it_starts_alike_whatever_random_numbers_were_drawn_before(
    name: str, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several processes the policy's random state differs by then; and the run's goes on undisturbed."""
    form, uses_lora, extra = FORMS[name]
    made, drawn = [], []
    for seed in (1, 5):

        def after_drawing(of: PPOTrainer, seed: int = seed) -> Any:
            torch.manual_seed(seed)
            critic = make_critic(of)
            drawn.append(torch.rand(()))
            return critic

        monkeypatch.setattr(ppo_trainer, "make_critic", after_drawing)
        model = tiny.llama(seed=1)
        model.config._name_or_path = model_folder
        made.append(trainer(model_folder, model=model, rest=LORA if uses_lora else None, critic=form, **extra))
        torch.manual_seed(seed)
        assert drawn[-1].equal(torch.rand(()))
    for one, other in zip(*(t.critic.parameters() for t in made), strict=True):
        assert one.equal(other)
    assert made[0].critic.head.weight.dtype == torch.float32


def test_a_reward_model_hands_on_its_head(model_folder: str, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(model_folder, num_labels=1)
    reward_model = LlamaForSequenceClassification(config)
    reward_model.save_pretrained(tmp_path)
    made = trainer(model_folder, critic_model_name_or_path=str(tmp_path))
    assert made.critic.head.weight.equal(reward_model.score.weight)
    ids = torch.tensor([[5, 6, 7]])
    values = made.model(input_ids=ids, attention_mask=torch.ones_like(ids), with_values="values")
    expected = reward_model(ids, attention_mask=torch.ones_like(ids)).logits.squeeze()  # of the last token
    torch.testing.assert_close(values[0, -1], expected, rtol=1e-5, atol=1e-6)


def test_a_critic_of_another_size_can_be_taken(model_folder: str, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(model_folder, hidden_size=16, num_hidden_layers=1)
    LlamaModel(config).save_pretrained(tmp_path)
    made = trainer(model_folder, critic_model_name_or_path=str(tmp_path))
    made.train()
    assert made.state.log_history[0]["value/grad_norm"] > 0


@pytest.mark.parametrize("targets", ["all-linear", r"model\.layers\.1\..*(q|up)_proj", ["layers.0.mlp.up_proj"]])
@pytest.mark.parametrize("layers", [2, 3])
def test_a_separate_critic_has_lora_where_the_policy_has_it(
    targets: Any, layers: int, model_folder: str, tmp_path: Path
) -> None:
    """However the layers were named; in another model in all layers of the same kind."""
    path = {}
    if layers != 2:
        config = LlamaConfig.from_pretrained(model_folder, num_hidden_layers=layers)
        LlamaModel(config).save_pretrained(tmp_path)
        path = {"critic_model_name_or_path": str(tmp_path)}
    config = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    made = trainer(model_folder, rest={"peft_config": config}, critic="separate", **path)
    names = [n for n, _ in made.model.named_parameters() if "lora_A" in n]
    policys = {n.split("base_model.model.model.")[1].split(".lora")[0] for n in names if "default" in n}
    critics = {n.split("trunk.base_model.model.")[1].split(".lora")[0] for n in names if "critic" in n}
    assert policys
    kinds = {n.split(".", 2)[2] for n in policys}
    assert critics == (policys if layers == 2 else {f"layers.{i}.{kind}" for i in range(3) for kind in kinds})


def test_dropout_of_the_critic_is_off(tmp_path: Path) -> None:
    tiny.gpt2(dropout=0.5).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    made = trainer(str(tmp_path), critic="separate", disable_dropout=False)
    ids = torch.tensor([[5, 6, 7]])
    assert made.critic.trunk.training
    one, other = (made.model(input_ids=ids, attention_mask=torch.ones_like(ids), with_values="values") for _ in "ab")
    assert one.equal(other)


# What it leaves alone


@pytest.mark.parametrize("name", ["adapter", "separate_lora"])
def test_neither_policy_nor_reference_see_the_critics_adapter(name: str, model_folder: str) -> None:
    made = make_trainer(name, model_folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    policy, values = made.model(**inputs).logits, made.model(**inputs, with_values="values")
    with made.model.disable_adapter():
        reference = made.model(**inputs).logits
    made.critic.restore()
    with torch.no_grad():
        for n, p in made.model.named_parameters():
            if "lora_B.critic" in n:
                p.mul_(100)
    assert made.model(**inputs).logits.equal(policy)
    assert not made.model(**inputs, with_values="values").equal(values)
    with made.model.disable_adapter():
        assert made.model(**inputs).logits.equal(reference)
    made.critic.restore()
    with torch.no_grad():
        before = made.model(**inputs, with_values="values")
        for n, p in made.model.named_parameters():
            if "lora_B.default" in n:
                p.mul_(100)
    assert made.model(**inputs, with_values="values").equal(before)
    assert not made.model(**inputs).logits.equal(policy)


@pytest.mark.parametrize("name", ["adapter", "separate_lora"])
def test_switching_adapters_for_the_reference_leaves_the_critic_trainable(name: str, model_folder: str) -> None:
    made = make_trainer(name, model_folder, given_adapter=True)
    trainable = {n for n, p in made.model.named_parameters() if p.requires_grad}
    made.train()  # whose KL in the reward asks the adapter called ref
    assert {n for n, p in made.model.named_parameters() if p.requires_grad} == trainable
    assert sum("critic" in n and "lora_" in n for n in trainable) == sum("default" in n for n in trainable) == 12


@pytest.mark.parametrize("name", ["adapter", "separate_lora"])
def test_the_exact_kl_asks_the_reference_before_the_backward_pass_and_leaves_the_critic_its_gradient(
    name: str, model_folder: str
) -> None:
    learned = []
    for kl in ({"kl_placement": "loss", "kl_estimator": "full", "beta": 0.5}, {"kl_placement": "none", "beta": None}):
        made = make_trainer(name, model_folder, **kl)
        start = critic_state(made)
        made.train()
        learned.append(critic_state(made))
        assert not any(learned[-1][n].equal(start[n]) for n in start if "lora" in n or "head" in n)
    for n in learned[0]:
        torch.testing.assert_close(learned[0][n], learned[1][n], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", FORMS)
def test_while_it_is_hidden_the_tree_is_the_policys(name: str, model_folder: str) -> None:
    made = make_trainer(name, model_folder)
    names = list(made.model.state_dict())
    with made.critic.hidden():
        assert not [n for n in made.model.state_dict() if "critic" in n or "value_head" in n]
        assert [n for n in names if "critic" not in n and "value_head" not in n] == list(made.model.state_dict())
    assert list(made.model.state_dict()) == names


@pytest.mark.parametrize("name", FORMS)
def test_while_completions_are_made_an_engine_would_be_sent_the_policy_alone(name: str, model_folder: str) -> None:
    sent: list[str] = []

    def rollout(prompts: list[str], made: Any) -> dict[str, Any]:
        sent.extend(n for n, _ in made.model.named_parameters())
        return tiny.fixed_rollout({f"prompt {i}:": [[44, 60, tiny.EOS]] for i in range(8)})(prompts, made)

    make_trainer(name, model_folder, rollout_func=rollout).train()
    assert sent
    assert not [n for n in sent if "critic" in n or "value_head" in n]


def test_a_run_warns_of_nothing_new(model_folder: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make_trainer("separate_lora", model_folder)
        made.train()
    assert not [str(w.message) for w in caught if "adapter" in str(w.message)]


# What is refused


def test_another_tokenizer_is_refused(model_folder: str, tmp_path: Path) -> None:
    LlamaModel(LlamaConfig.from_pretrained(model_folder)).save_pretrained(tmp_path)
    other = tiny.tokenizer()
    other.add_tokens(["word"])
    other.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^`critic_model_name_or_path`: '.*' has another tokenizer than the policy"):
        trainer(model_folder, critic_model_name_or_path=str(tmp_path))


def test_a_smaller_vocabulary_is_refused(model_folder: str, tmp_path: Path) -> None:
    LlamaModel(LlamaConfig.from_pretrained(model_folder, vocab_size=200)).save_pretrained(tmp_path)
    message = r"^`critic_model_name_or_path`: '.*' knows 200 tokens, but the policy's tokenizer has 258\.$"
    with pytest.raises(ConfigError, match=message):
        trainer(model_folder, critic_model_name_or_path=str(tmp_path))


def test_a_critic_that_is_not_there_is_refused(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^`critic_model_name_or_path`: '.*/nothing' cannot be loaded: "):
        trainer(model_folder, critic_model_name_or_path=str(tmp_path / "nothing"))
    model = tiny.llama()
    model.config._name_or_path = ""
    with pytest.raises(ConfigError, match=r"^`critic_model_name_or_path`: not set, and the policy was not loaded"):
        trainer(model_folder, model=model, beta=0.0)


def test_an_adapter_needs_plain_lora(model_folder: str) -> None:
    with pytest.raises(ConfigError, match=r"^`critic`: adapter "):
        trainer(model_folder, critic="adapter")
    saved = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    prefix = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = tiny.llama()
    model.config._name_or_path = model_folder
    model = get_peft_model(model, prefix)
    for form in ("adapter", "separate"):
        with pytest.raises(ConfigError, match=r"^`critic`: needs a policy that trains LoRA alone, without"):
            trainer(model_folder, critic=form, rest={"peft_config": saved})
        with pytest.raises(ConfigError, match=r"^`critic`: needs a policy with LoRA, not PrefixTuningConfig"):
            trainer(model_folder, model=model, critic=form, beta=0.0)


def test_what_the_trainer_cannot_do_is_refused_at_once(model_folder: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError) as error:
        trainer(model_folder, rest={"optimizers": (optimizer, None)}, critic="shared", disable_dropout=False)
    keys = [problem.split(":")[0] for problem in error.value.problems]
    assert keys == ["`optimizers`", "`disable_dropout`"]


def test_what_accelerates_own_config_asks_for_is_judged_too() -> None:
    deepspeed = SimpleNamespace(deepspeed_config={"optimizer": {}, "zero_optimization": {"stage": 2}})
    fsdp = SimpleNamespace(fsdp_version=1, activation_checkpointing=True, state_dict_type="SHARDED_STATE_DICT")
    state = SimpleNamespace(deepspeed_plugin=deepspeed, fsdp_plugin=fsdp)
    args = SimpleNamespace(max_grad_norm=1.0, critic_max_grad_norm=0.5, num_iterations=1, critic_num_iterations=2)
    args.critic_use_peft, policy = None, torch.nn.Linear(1, 1)
    made: Any = SimpleNamespace(
        accelerator=SimpleNamespace(state=state), args=args, critic_form="adapter", model=policy
    )
    made.is_deepspeed_enabled, made.is_fsdp_enabled = True, False
    assert [problem.split(":")[0] for problem in backend_problems(made)] == [
        "`deepspeed`",
        "`critic_max_grad_norm`",
        "`critic_num_iterations`",
    ]
    made.is_deepspeed_enabled, made.is_fsdp_enabled = False, True
    keys = [problem.partition(": ")[2].split(" ")[0] for problem in backend_problems(made)]
    assert keys == ["2", "version", "state_dict_type", "activation_checkpointing"]
    args.critic_use_peft, made.model = False, get_peft_model(tiny.llama(), lora())
    assert next(backend_problems(made)).startswith(
        "`critic_use_peft`: false beside a policy with LoRA is not supported"
    )


def test_each_trainer_names_the_other(model_folder: str) -> None:
    with pytest.raises(TypeError, match=r"'gae' needs a critic, so take trl_algos\.PPOTrainer"):
        trainer(model_folder, PolicyTrainer)
    with pytest.raises(TypeError, match=r"'group_normalized' has no use for a critic, so take .*\.PolicyTrainer"):
        trainer(model_folder, algorithm="grpo", num_generations=2)


# What is logged


def test_the_clip_fraction_counts_values_that_are_held_back() -> None:
    """Old 0, bound 0.2. Held: 0.5 on the way to 1 (the clipped 0.2 errs more). Free: 0.5 on its way back to 0, 0.1."""
    values = torch.tensor([[0.5, 0.5, 0.1, -0.5, 9.0]])
    returns = torch.tensor([[1.0, 0.0, 1.0, -2.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    assert clip_fraction(values, torch.zeros(1, 5), returns, mask, 0.2).item() == 0.5
    assert clip_fraction(values, torch.zeros(1, 5), returns, mask, None).item() == 0.0


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ref_model", "the reference is `model` as it starts"),
        ("reward_model", "pass it in `reward_funcs`"),
        ("value_model", "set `critic_model_name_or_path` in `args`"),
    ],
)
def test_arguments_of_trls_former_trainer_say_what_to_pass_instead(name: str, instead: str, model_folder: str) -> None:
    with pytest.raises(TypeError, match=f"^`{name}` is an argument of TRL's former PPOTrainer; here {instead}"):
        trainer(model_folder, rest={name: None})


def test_a_whole_critic_beside_lora_is_float32_on_a_bfloat16_policy(model_folder: str, tmp_path: Path) -> None:
    """As LoRA's own weights are; and it is read back so."""
    init = {"critic": "separate", "critic_use_peft": False, "model_init_kwargs": {"dtype": "bfloat16"}}
    made = trainer(model_folder, rest=LORA, **init)
    assert next(p for n, p in made.model.named_parameters() if "embed" in n).dtype == torch.bfloat16
    assert {p.dtype for p in made.critic.parameters()} == {torch.float32}
    assert len(made.critic.parameters()) == len(list(made.critic.trunk.parameters())) + 2
    made.save_model(str(tmp_path))
    loaded, ids = load_critic(tmp_path / "critic"), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "with_values": "values"}
        assert loaded(ids).equal(made.model(**inputs))


def test_a_saved_whole_critic_beside_lora_says_how_to_go_on(model_folder: str, tmp_path: Path) -> None:
    settings = {"critic": "separate", "critic_use_peft": False}
    trainer(model_folder, rest=LORA, **settings).save_model(str(tmp_path))
    start = {"critic_model_name_or_path": str(tmp_path / "critic")}
    with pytest.raises(ConfigError, match=r"with LoRA. Set `critic_use_peft: false` to train it whole.$"):
        trainer(model_folder, rest=LORA, **start)
    trainer(model_folder, rest=LORA, **start, critic_use_peft=False)
