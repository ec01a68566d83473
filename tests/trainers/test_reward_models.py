"""Reward models inside RL: the same score wherever it is read, whole or as an adapter, and normalised scores."""

import json
import math

import preference_pairs as pairs
import pytest
import tiny
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2ForSequenceClassification

from trl_algos import (
    BradleyTerryConfig,
    BradleyTerryTrainer,
    PolicyConfig,
    PolicyTrainer,
    PPOTrainer,
    load_reward_model,
)
from trl_algos.errors import ConfigError
from trl_algos.trainers.reward_models import reward_scale

CHAT = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
MEAN, STD = 3.0, 0.25


def pad_is_eos():
    """The policy's tokenizer, which ends each message with the token that it pads with."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"unk_token": "!"})
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = CHAT
    return tokenizer


def conversation(row):
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {key: [{"role": roles[key], "content": text}] for key, text in row.items()}


def test_learned_positions_are_counted_from_the_first_token(tmp_path):
    """GPT-2 alone would give padding in front of a text positions, too, and read another text."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=260, n_positions=40, n_embd=16, n_layer=2, n_head=2, num_labels=1, pad_token_id=0)
    model = GPT2ForSequenceClassification(config)
    for parameter in model.parameters():
        parameter.data.mul_(4.0)
    model.save_pretrained(tmp_path)
    loaded, texts = load_reward_model(tmp_path), [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    with torch.no_grad():
        alone = [loaded(input_ids=torch.tensor([ids])).logits[0, 0] for ids in texts]
        ids = torch.tensor([[0] * 4 + texts[0], texts[1]])
        together = loaded(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, 0]
        plain = GPT2ForSequenceClassification.from_pretrained(tmp_path)(
            input_ids=ids, attention_mask=(ids != 0).long()
        )
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=1e-5)
    assert abs(plain.logits[0, 0] - alone[0]) > 1e-2


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a model whose scores are far apart, from which reward models are trained on."""
    folder = tmp_path_factory.mktemp("base")
    pairs.classifier().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def trained(folder, base, adapter, tokenizer, dtype="float32", chats=True):
    """A reward model that was trained, evaluated and saved in `folder`."""
    trainer = BradleyTerryTrainer(
        str(base),
        BradleyTerryConfig(**pairs.settings(folder, learning_rate=1e-2, model_init_kwargs={"dtype": dtype})),
        train_dataset=pairs.dataset([conversation(row) if chats else row for row in pairs.ROWS]),
        eval_dataset=pairs.dataset([conversation(row) if chats else row for row in pairs.ROWS]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapter else None,
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    return trainer


def policy_of(folder, *rewards, trainer_class=PolicyTrainer, **settings):
    settings = {"algorithm": "reinforce", "beta": 0.0, "max_completion_length": 8, **pairs.CPU, **settings}
    return trainer_class(
        tiny.llama(),
        list(rewards),
        args=PolicyConfig(str(folder), **settings),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
    )


def rewards_inside(trainer, chats=True):
    """(rows, functions) rewards of the chosen completions of `pairs.ROWS`, as the trainer computes them."""
    rows = [conversation(row) if chats else row for row in pairs.ROWS]
    prompts, completions = ([row[key] for row in rows] for key in ("prompt", "chosen"))
    return trainer._calculate_rewards([{"prompt": p} for p in prompts], prompts, completions, [[2]] * len(prompts))


# The score


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_the_score_is_the_same_in_its_trainer_alone_and_inside_rl(adapter, dtype, tolerance, base, tmp_path):
    """By itself in its trainer, padded on either side where the policy pads with EOS, and in both policy trainers."""
    trainer = trained(tmp_path / "rm", base, adapter, pad_is_eos(), dtype)
    rows = [row["chosen_ids"] for row in trainer.train_dataset]
    assert all(ids[-1] == tiny.EOS for ids in rows)
    with torch.no_grad():
        model = trainer.model.eval()
        expected = torch.cat([model(input_ids=torch.tensor([ids])).logits[:, 0] for ids in rows]).float()
        spread = (expected.max() - expected.min()).item()
        assert spread > 0.5
        loaded = load_reward_model(tmp_path / "rm", dtype=dtype)
        tokenizer = trainer.processing_class
        assert tokenizer.pad_token_id == loaded.config.pad_token_id != tiny.EOS
        for side in ("left", "right"):
            batch = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt")
            found = loaded(**batch).logits[:, 0].float()
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for trainer_class, settings in ((PolicyTrainer, {}), (PPOTrainer, {"algorithm": "ppo", "critic": "shared"})):
        settings["model_init_kwargs"] = {"dtype": dtype}
        policy = policy_of(tmp_path / "rl", str(tmp_path / "rm"), trainer_class=trainer_class, **settings)
        assert policy.reward_func_names == ["rm"]
        torch.testing.assert_close(rewards_inside(policy)[:, 0], expected, rtol=tolerance, atol=tolerance)


def test_an_adapter_has_its_own_figures_and_not_those_of_its_base(base, tmp_path):
    first = trained(tmp_path / "first", base, adapter=False, tokenizer=tiny.tokenizer(), chats=False)
    second = trained(tmp_path / "second", tmp_path / "first", adapter=True, tokenizer=tiny.tokenizer(), chats=False)
    for trainer, name in ((first, "first"), (second, "second")):
        config = load_reward_model(tmp_path / name).config
        assert config.reward_mean == trainer.model.config.reward_mean
        assert config.reward_std == trainer.model.config.reward_std
    assert second.model.config.reward_mean != pytest.approx(first.model.config.reward_mean, abs=1e-3)
    # Trained on, the scores are others, of which nothing is known before the next evaluation.
    second.train()
    second.save_model()
    assert not hasattr(load_reward_model(tmp_path / "second").config, "reward_mean")
    with pytest.raises(
        ConfigError, match=r"`reward_normalization`: .*'second' has no `reward_mean` and no `reward_std"
    ):
        policy_of(tmp_path / "rl", str(tmp_path / "second"), reward_normalization=True)


def test_an_adapter_whose_base_is_gone_says_so(base, tmp_path):
    trained(tmp_path / "rm", base, adapter=True, tokenizer=tiny.tokenizer(), chats=False)
    config = json.loads((tmp_path / "rm" / "adapter_config.json").read_text())
    (tmp_path / "rm" / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "./gone"}))
    with pytest.raises(ConfigError, match=r"`reward_funcs`: '.*rm', an adapter on './gone', cannot be loaded"):
        policy_of(tmp_path / "rl", str(tmp_path / "rm"))


# Normalised scores


def model_with(mean, std, seed=0):
    """A reward model, and the raw scores it gives the chosen completions of `pairs.ROWS`."""
    model = pairs.classifier(seed)
    model.config.reward_mean, model.config.reward_std = mean, std
    model.config._name_or_path = f"model_{seed}"
    tokenizer = tiny.tokenizer()
    with torch.no_grad():
        texts = [row["prompt"] + row["chosen"] for row in pairs.ROWS]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        raw = torch.cat([model.eval()(input_ids=torch.tensor([row])).logits[:, 0] for row in ids])
    return model, raw


def vowels(completions, **_):
    """A function that does not score everything."""
    return [None if "x" in text else float(len(text)) for text in completions]


def test_each_model_is_normalised_by_its_own_figures_and_functions_are_not(tmp_path):
    (one, raw_one), (two, raw_two) = model_with(MEAN, STD), model_with(-1.0, 2.0, seed=1)
    trainer = PolicyTrainer(
        tiny.llama(),
        [one, vowels, two],
        args=PolicyConfig(
            str(tmp_path),
            algorithm="reinforce",
            max_completion_length=8,
            reward_weights=[1.0, 10.0, 0.5],
            reward_normalization=True,
            **pairs.CPU,
        ),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
        reward_processing_classes=[tiny.tokenizer(), None, tiny.tokenizer()],
    )
    found = rewards_inside(trainer, chats=False)
    torch.testing.assert_close(found[:, 0], (raw_one - 3.0) / 0.25, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[:, 2], (raw_two + 1.0) / 2.0, rtol=1e-5, atol=1e-4)
    assert found[:, 1].tolist()[::2] == [4.0, 5.0]
    assert math.isnan(found[1, 1])
    unscored = 4.0 * (raw_one[1] - 3.0) + 0.25 * (raw_two[1] + 1.0)  # without the function's part
    torch.testing.assert_close(trainer.weighted_scores(found)[1], unscored, rtol=1e-5, atol=1e-4)
    metrics = trainer.reward_scale.raw_metrics(found)
    assert metrics == pytest.approx(
        {"rewards/model_0/raw_mean": raw_one.mean().item(), "rewards/model_1/raw_mean": raw_two.mean().item()},
        abs=1e-5,
    )


def one_step(folder, policy, algorithm, normalised):
    """The rollout of a first step, and what it logged."""
    model, _ = model_with(MEAN, STD)
    kept = []
    base = PPOTrainer if algorithm == "ppo" else PolicyTrainer

    class Keeping(base):
        def estimate_advantages(self, rollout):
            kept.append(rollout)
            return super().estimate_advantages(rollout)

    settings = {
        "remax": {"beta": 0.0},
        "ppo": {"beta": 0.1, "critic": "shared"},
        "rloo": {"beta": 0.1, "kl_placement": "reward", "num_generations": 2},
        "dapo": {"num_generations": 2, "overlong_buffer": 0, "dynamic_sampling_tolerance": 1e-6},
    }[algorithm]
    trainer = Keeping(
        policy,
        model,
        args=PolicyConfig(
            str(folder),
            algorithm=algorithm,
            max_completion_length=4,
            max_steps=1,
            per_device_train_batch_size=4,
            save_strategy="no",
            logging_steps=1,
            reward_normalization=normalised,
            **settings,
            **pairs.CPU,
        ),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
        reward_processing_classes=tiny.tokenizer(),
    )
    trainer.train()
    return kept[0], next(log for log in trainer.state.log_history if "reward" in log)


@pytest.mark.parametrize("algorithm", ["remax", "ppo", "rloo", "dapo"])
def test_baselines_kl_critic_and_dynamic_sampling_see_normalised_scores(algorithm, model_folder, tmp_path):
    raw, raw_log = one_step(tmp_path / "raw", model_folder, algorithm, normalised=False)
    found, log = one_step(tmp_path / "normalised", model_folder, algorithm, normalised=True)

    def close(one, other):
        torch.testing.assert_close(one, (other - MEAN) / STD, rtol=1e-4, atol=1e-4)

    close(found.scores_per_func, raw.scores_per_func)
    close(found.scores, raw.scores)
    if algorithm == "remax":
        close(found.baselines, raw.baselines)
    if algorithm in ("ppo", "rloo"):
        assert raw.kl is not None
        torch.testing.assert_close(found.rewards - found.scores, raw.rewards - raw.scores, rtol=1e-4, atol=1e-4)
    name = "rewards/model_0/mean"
    assert log[name] == pytest.approx((raw_log[name] - MEAN) / STD, abs=1e-3)
    assert log["rewards/model_0/raw_mean"] == pytest.approx(raw_log[name], abs=1e-4)
    assert "rewards/model_0/raw_mean" not in raw_log
    assert log["reward"] == pytest.approx((raw_log["reward"] - MEAN) / STD, abs=1e-3)


@pytest.mark.parametrize("normalised", [True, False])
def test_a_critic_that_starts_from_the_reward_model_starts_from_the_scores_as_they_are_used(
    normalised, model_folder, base, tmp_path
):
    """Its value after the last token of a text is the reward of the text."""
    trained(tmp_path / "rm", base, adapter=False, tokenizer=tiny.tokenizer(), chats=False)
    settings = {"algorithm": "ppo", "critic": "separate", "critic_model_name_or_path": str(tmp_path / "rm")}
    trainer = PPOTrainer(
        model_folder,
        str(tmp_path / "rm"),
        args=PolicyConfig(
            str(tmp_path / "rl"), max_completion_length=8, reward_normalization=normalised, **settings, **pairs.CPU
        ),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
    )
    expected = rewards_inside(trainer, chats=False)[:, 0]
    for row, reward in zip(pairs.ROWS, expected, strict=True):
        ids = tiny.tokenizer()(row["prompt"] + row["chosen"], add_special_tokens=False, return_tensors="pt")
        values = trainer.model(**ids, with_values="values")
        torch.testing.assert_close(values[0, -1], reward, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ((None, None), "'model_0' has no `reward_mean` and no `reward_std`; BradleyTerryTrainer writes them"),
        ((1.0, None), "'model_0' has no `reward_std`;"),
        ((1.0, 0.0), "`reward_std` of the reward model 'model_0' is 0.0; it must be above 0"),
        ((1.0, math.nan), "is nan; it must be above 0"),
        ((math.inf, 1.0), "`reward_mean` of the reward model 'model_0' is inf; it must be a finite number"),
        (("1", 1.0), "is '1'; it must be a finite number"),
    ],
)
def test_figures_that_scores_cannot_be_normalised_by_are_refused(figures, message):
    model, _ = model_with(*figures)
    with pytest.raises(ConfigError) as error:
        reward_scale([vowels, model], ["vowels", "model_0"])
    assert message in str(error.value)


def test_without_a_reward_model_there_is_nothing_to_normalise(tmp_path):
    with pytest.raises(ConfigError, match="`reward_normalization`: true, but no reward in `reward_funcs` is a model"):
        policy_of(tmp_path, vowels, reward_normalization=True)


def test_the_users_list_is_left_as_it_is(base, tmp_path):
    trained(tmp_path / "rm", base, adapter=True, tokenizer=tiny.tokenizer(), chats=False)
    rewards = [str(tmp_path / "rm")]
    PolicyTrainer(
        tiny.llama(),
        rewards,
        args=PolicyConfig(str(tmp_path), algorithm="reinforce", max_completion_length=8, **pairs.CPU),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
    )
    assert rewards == [str(tmp_path / "rm")]
