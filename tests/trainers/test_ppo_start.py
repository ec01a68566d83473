"""A critic that starts from a saved one, and what is refused of a saved one: at the start and on resuming."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig
from ppo_oracle import FORMS, critic_state
from safetensors.torch import load_file, save_file
from test_ppo_critics import trainer as plain_trainer
from test_ppo_state import logs, sampling_trainer, states
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from trl_algos import ConfigError, load_critic
from trl_algos.trainers import PPOTrainer
from trl_algos.trainers.critic.files import save_critic

START = "critic_model_name_or_path"


def pretrained(name: str, model_folder: str, folder: Path) -> PPOTrainer:
    """A run of the critic alone, saved in `folder`."""
    made = sampling_trainer(name, model_folder, folder, critic_warmup_steps=2, max_steps=2)
    made.train()
    made.save_model(str(folder))
    return made


@pytest.mark.parametrize("name", FORMS)
def test_a_critic_that_was_trained_alone_is_the_start_of_the_next_run(
    name: str, model_folder: str, tmp_path: Path
) -> None:
    """Its values go on as they were, and so do its weights: the next stage is PPO with both."""
    first = pretrained(name, model_folder, tmp_path / "first")
    settings = {START: str(tmp_path / "first/critic"), "seed": 7, "max_steps": 1}
    second = sampling_trainer(name, model_folder, tmp_path / "second", **settings)
    assert critic_state(first).keys() == critic_state(second).keys()
    assert all(value.equal(critic_state(second)[key]) for key, value in critic_state(first).items())
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "with_values": "values"}
        assert first.model(**inputs).equal(second.model(**inputs))
    before = states(second)
    second.train()
    changed = {key for key, value in states(second).items() if not value.equal(before[key])}
    assert any(key.startswith("policy.") for key in changed)
    assert any(key.startswith("head.") for key in changed)
    assert {id(p) for g in second.optimizer.param_groups if g.get("role") for p in g["params"]} == {
        id(p) for p in second.critic.parameters()
    }


def test_the_form_follows_from_the_folder(model_folder: str, tmp_path: Path) -> None:
    pretrained("shared", model_folder, tmp_path)
    made = plain_trainer(model_folder, **{START: str(tmp_path / "critic")})
    assert made.critic_form == "shared"


def test_a_shared_critic_goes_on_with_the_policy_beside_it(model_folder: str, tmp_path: Path) -> None:
    first = sampling_trainer("shared_trunk", model_folder, tmp_path, max_steps=1)
    first.train()
    first.save_model(str(tmp_path))
    second = plain_trainer(str(tmp_path), critic="shared", **{START: str(tmp_path / "critic")})
    assert second.critic.head.weight.equal(first.critic.head.weight)


# What does not fit


def changed(folder: Path, **about: Any) -> None:
    file = folder / "critic.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | about))


def head_of_another_width(folder: Path) -> None:
    save_file({"weight": torch.zeros(1, 16), "bias": torch.zeros(1)}, folder / "value_head.safetensors")


def cut_short(file: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:-10])

    return cut


def gone(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def of_another_rank(folder: Path) -> None:
    file = folder / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 8}))


def on_other_layers(folder: Path) -> None:
    file = folder / "adapter/adapter_model.safetensors"
    weights = {name.replace("q_proj", "k_proj"): w for name, w in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no JSON": ("adapter", lambda f: (f / "critic.json").write_text("{"), r"critic\.json is not valid JSON"),
    "a list": ("shared", lambda f: (f / "critic.json").write_text("[]"), r"critic\.json must hold a JSON object"),
    "no form": (
        "shared",
        lambda f: changed(f, form="none"),
        r"critic\.json does not describe a critic: look at 'form'",
    ),
    "another form": (
        "adapter",
        lambda f: changed(f, form="shared", lora=False),
        "holds a critic of the form shared, wi",
    ),
    "no head": (
        "shared",
        gone("value_head.safetensors"),
        "holds no critic: critic.json and value_head.safetensors are",
    ),
    "cut head": ("shared", cut_short("value_head.safetensors"), r"value_head\.safetensors is (not whole|not a safet)"),
    "other width": ("shared", head_of_another_width, r"reads hidden states of width 16, but those (here|of its mo)"),
    "other width of adapter": (
        "adapter",
        head_of_another_width,
        "reads hidden states of width 16, but those here hav",
    ),
    "no head in it": ("shared", lambda f: save_file({"w": torch.zeros(2)}, f / "value_head.safetensors"), "no value"),
    "no adapter": ("adapter", gone("adapter/adapter_model.safetensors"), r"adapter_model\.safetensors is missing"),
    "cut adapter": (
        "separate_lora",
        cut_short("adapter/adapter_model.safetensors"),
        "adapter_model.safetensors is not",
    ),
    "other rank": ("separate_lora", of_another_rank, "adapter_config.json says `r` 8, but in this run it is 2"),
    "other layers": ("adapter", on_other_layers, r"holds an adapter on other layers: .*(k|q)_proj.* is in "),
    "no weights": ("separate", gone("model.safetensors"), "has no weights: neither model.safetensors nor"),
    "cut weights": ("separate", cut_short("model.safetensors"), r"model\.safetensors is not whole"),
    "other vocabulary": ("shared", lambda f: changed(f, vocabulary="0" * 16), "reads the tokens of another tokenizer"),
}


@pytest.fixture(scope="module")
def checkpoints(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Form -> a run's folder with a checkpoint after its first step."""
    made = {}
    for name in FORMS:
        made[name] = tmp_path_factory.mktemp(name)
        settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
        sampling_trainer(name, model_folder, made[name], **settings).train()
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", BROKEN)
def test_a_saved_critic_that_does_not_fit_is_refused(
    case: str, checkpoints: dict[str, Path], model_folder: str, tmp_path: Path
) -> None:
    """One message, before anything is trained or written; as a start and in a checkpoint."""
    name, break_it, message = BROKEN[case]
    shutil.copytree(checkpoints[name], tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoint-1"
    (checkpoint / "checkpoint.json").unlink()  # which knows what was saved
    break_it(checkpoint / "critic")
    before = files(tmp_path)
    made = sampling_trainer(name, model_folder, tmp_path / "run", max_steps=2)
    start = states(made)
    with pytest.raises(ConfigError, match=f"^`resume_from_checkpoint`: .*{message}") as error:
        made.train(resume_from_checkpoint=str(checkpoint))
    assert len(error.value.problems) == 1
    assert made.state.global_step == 0
    assert all(value.equal(start[key]) for key, value in states(made).items())
    with pytest.raises(ConfigError, match=f"^`{START}`: .*{message}") as error:
        sampling_trainer(name, model_folder, tmp_path / "run", **{START: str(checkpoint / "critic")})
    assert len(error.value.problems) == 1
    assert files(tmp_path) == before


def test_a_folder_of_a_run_that_is_missing_its_critic(
    checkpoints: dict[str, Path], model_folder: str, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints["separate"], tmp_path / "run")
    (tmp_path / "run/checkpoint-1/checkpoint.json").unlink()  # which knows what was saved
    shutil.rmtree(tmp_path / "run/checkpoint-1/critic")
    made = sampling_trainer("separate", model_folder, tmp_path / "run", max_steps=2)
    with pytest.raises(ConfigError, match=r"^`resume_from_checkpoint`: '.*checkpoint-1/critic' holds no critic"):
        made.train(resume_from_checkpoint=True)  # the latest


@pytest.mark.parametrize("name", ["adapter", "shared"])
def test_a_critic_on_another_models_layers_is_refused(
    name: str, checkpoints: dict[str, Path], model_folder: str, tmp_path: Path
) -> None:
    tiny.llama(seed=4).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    start = str(checkpoints[name] / "checkpoint-1/critic")
    with pytest.raises(ConfigError, match=rf"^`{START}`: .* on the layers of '{model_folder}', but the policy is '"):
        sampling_trainer(name, str(tmp_path), tmp_path / "run", **{START: start})


def test_lora_of_another_scale_or_on_other_layers_is_refused(
    checkpoints: dict[str, Path], model_folder: str, tmp_path: Path
) -> None:
    start = {START: str(checkpoints["adapter"] / "checkpoint-1/critic")}
    lora = {"r": 2, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    plain_trainer(model_folder, rest={"peft_config": LoraConfig(**lora)}, **start)
    for other, message in (
        ({"r": 4}, "says `r` 2, but in this run it is 4"),
        ({"lora_alpha": 3}, "says `lora_alpha` 8, but in this run it is 3"),
        ({"target_modules": ["q_proj"]}, "holds an adapter on other layers: .*up_proj.* is in the saved critic alone"),
        ({"target_modules": ["q_proj", "up_proj", "k_proj"]}, "other layers: .*k_proj.* is in this run alone"),
    ):
        with pytest.raises(ConfigError, match=f"^`{START}`: .*{message}"):
            plain_trainer(model_folder, rest={"peft_config": LoraConfig(**lora | other)}, **start)


def test_another_form_or_lora_than_that_of_the_folder_is_refused(
    checkpoints: dict[str, Path], model_folder: str
) -> None:
    for name, form, message in (
        ("shared", "separate", "of the form shared, without LoRA, but that of this run is separate, without LoRA"),
        ("separate_lora", "separate", "of the form separate, with LoRA, but that of this run is separate, without L"),
        ("separate", "shared", "of the form separate, without LoRA, but that of this run is shared, without LoRA"),
    ):
        start = {START: str(checkpoints[name] / "checkpoint-1/critic")}
        with pytest.raises(ConfigError, match=f"^`{START}`: .*{message}") as error:
            plain_trainer(model_folder, critic=form, **start)
        assert len(error.value.problems) == 1
    with pytest.raises(ConfigError, match=r"^`critic`: adapter is a second LoRA adapter") as error:
        plain_trainer(model_folder, **{START: str(checkpoints["adapter"] / "checkpoint-1/critic")})
    assert len(error.value.problems) == 1


def test_what_is_no_decoder_is_refused(model_folder: str, tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=258, **small)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^`{START}`: '.*' is an encoder, whose states have seen the tokens to c"):
        plain_trainer(model_folder, **{START: str(tmp_path)})


def test_a_file_and_cut_weights_are_refused(model_folder: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no model")
    LlamaModel(LlamaConfig.from_pretrained(model_folder)).save_pretrained(tmp_path)
    cut_short("model.safetensors")(tmp_path)
    for path in (file, tmp_path):
        with pytest.raises(ConfigError, match=rf"^`{START}`: '.*' cannot be loaded: ") as error:
            plain_trainer(model_folder, **{START: str(path)})
        assert "\n" not in str(error.value)


def test_a_critic_saved_without_a_digest_is_taken(model_folder: str, tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    made = plain_trainer(model_folder, critic="shared")
    save_critic(made.critic, tmp_path, writes=True)
    assert plain_trainer(model_folder, **{START: str(tmp_path)}).critic.head.weight.equal(made.critic.head.weight)
    assert not logs(made)


def reworded(folder: Path, **changes: Any) -> None:
    """Other words in the critic.json of `folder`."""
    file = folder / "critic.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", ["adapter", "separate_lora", "separate", "shared"])
def test_an_unknown_dtype_is_refused(name: str, model_folder: str, tmp_path: Path) -> None:
    pretrained(name, model_folder, tmp_path)
    reworded(tmp_path / "critic", dtype="int4")
    message = r"critic.json: `dtype` 'int4' is none of float32, bfloat16"
    with pytest.raises(ConfigError, match=rf"^`folder`: .*{message}") as error:
        load_critic(tmp_path / "critic")
    assert len(error.value.problems) == 1
    with pytest.raises(ConfigError, match=rf"`{START}`: .*{message}"):
        sampling_trainer(name, model_folder, tmp_path / "next", **{START: str(tmp_path / "critic")})


@pytest.mark.parametrize("name", ["adapter", "separate_lora"])
def test_a_base_model_that_is_gone_is_named(name: str, model_folder: str, tmp_path: Path) -> None:
    pretrained(name, model_folder, tmp_path)
    reworded(tmp_path / "critic", base_model=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"^`folder`: the critic reads the model '.*/gone', which cannot be loaded;"):
        load_critic(tmp_path / "critic")
    with pytest.raises(ConfigError, match=rf"^`{START}`: '.*critic' holds .*/gone'.*change `base_model` in its crit"):
        sampling_trainer(name, model_folder, tmp_path / "next", **{START: str(tmp_path / "critic")})


def test_a_shared_critic_without_its_policy_is_refused(model_folder: str, tmp_path: Path) -> None:
    pretrained("shared", model_folder, tmp_path / "run")
    shutil.copytree(tmp_path / "run/critic", tmp_path / "elsewhere/critic")
    with pytest.raises(ConfigError, match=r"^`folder`: the critic reads the model '.*/elsewhere', which cannot be lo"):
        load_critic(tmp_path / "elsewhere/critic")
