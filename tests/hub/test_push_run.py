"""A run's folder on the Hub: what is there, what is not, and that plain transformers and peft load it."""

import json
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from stub import HubStub
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl_algos.cli import main
from trl_algos.data import arithmetic_preferences, bundled_model_path
from trl_algos.errors import ConfigError, HubError
from trl_algos.objective import objective_text
from trl_algos.recipe.reading import read_recipe
from trl_algos.run.pushing import PushArguments, push_arguments, push_run
from trl_algos.run.training import train

ROOT = Path(__file__).parents[2]
PAIRS = ROOT / "recipes" / "rlhf_arithmetic"
OWNER, MACHINE = "xavierqz", "quixhost77"
SECRETS = {"WANDB_API_KEY": "wandb0123456789", "HF_HOME": f"/home/{OWNER}/cache", "MY_LABEL": f"of-{OWNER}"}
TOKEN_OF_RECIPE = "hf_" + "r" * 30
DATA = f"sums_of_{OWNER}_on_{MACHINE}.jsonl"
SHORT = {"max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
PROMPTS = ["1+2=", "7+8=", "12+30="]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with a model, data and rewards of their own in it."""
    folder = tmp_path_factory.mktemp("home") / OWNER
    shutil.copytree(bundled_model_path(), folder / "models" / "base")
    (folder / "my_rewards.py").write_text(
        "def digits(completions, **kwargs):\n    return [float(text[:1].isdigit()) for text in completions]\n"
    )
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(32)]
    (folder / DATA).write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """This user and this machine have the names that stand in the nasty recipe."""
    monkeypatch.setenv("LOGNAME", OWNER)
    monkeypatch.setattr(platform, "node", lambda: MACHINE)


def trained(path: Path, folder: Path, **more: Any) -> Path:
    train(
        read_recipe(str(path), [f"--{key}={value}" for key, value in ({"output_dir": folder} | SHORT | more).items()])
    )
    return folder


@pytest.fixture(scope="module")
def nasty_run(home: Path) -> Path:
    """A whole policy, trained by a recipe that names this user wherever one can, and a model by a relative path."""
    recipe = yaml.safe_load((ROOT / "recipes/quickstart.yaml").read_text()) | {
        "output_dir": str(home / "runs" / "first"),
        "model_name_or_path": "models/base",  # an id of the Hub by its looks
        "dataset_name": str(home / DATA),
        "prompt_template": "{question}",
        "column_mapping": None,
        "held_out_prompts": 0,
        "reward_funcs": ["exact_match", f"{home}/my_rewards.py:digits"],
        "reward_weights": [1.0, 0.25],
        "run_name": f"{OWNER}@{MACHINE}",
        "hub_token": TOKEN_OF_RECIPE,
        "env": SECRETS,
    }
    path = home / "nasty.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
    here = Path.cwd()
    os.chdir(home)
    try:
        return trained(path, home / "runs" / "first", per_device_train_batch_size=16, gradient_accumulation_steps=1)
    finally:
        os.chdir(here)


def trained_adapter(recipe: str, folder: Path) -> Path:
    """A short run of LoRA on pairs in a file."""
    data = folder.parent / "pairs.jsonl"
    data.write_text("\n".join(json.dumps(dict(row)) for row in arithmetic_preferences("train", size=40)))
    words = {"dataset_name": data, "dataset_test_name": data, "dataset_parameters": "null", "held_out_pairs": 20}
    words |= {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear", "warmup_steps": 0}
    return trained(PAIRS / recipe, folder, per_device_train_batch_size=8, **words)


@pytest.fixture(scope="module")
def dpo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_adapter("dpo.yaml", tmp_path_factory.mktemp("dpo") / "dpo")


@pytest.fixture(scope="module")
def scorer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_adapter("1_reward_model.yaml", tmp_path_factory.mktemp("scorer") / "scorer")


def logps(model: Any, folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model(**tokenizer(p, return_tensors="pt")).logits[:, -1].log_softmax(-1) for p in PROMPTS])


def loaded_by_card(folder: Path, repo: str) -> dict[str, Any]:
    """What the card's own code loads, with the download in the place of the repository."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1].replace(f'"{repo}"', repr(str(folder))), names)
    return names


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def test_nothing_that_is_pushed_tells_of_this_machine_or_its_user(
    nasty_run: Path, home: Path, hub: HubStub, at_home: None
) -> None:
    push_run(PushArguments(str(nasty_run), repo="first-model"))
    files = hub.repos["someone/first-model"]
    for name, content in files.items():
        for told in (OWNER, str(home.parent), MACHINE, TOKEN_OF_RECIPE, "wandb0123", str(Path.home()) + "/"):
            assert told.encode() not in content, (name, told)
        assert not re.search(rb"(?<![\w/.:<])/(?:tmp|home|root)/", content), name
    assert files.keys() == {
        *("README.md", "recipe.yaml", "training_summary.json", "reward.png", "config.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    } | ({"chat_template.jinja"} & files.keys())
    assert "base_model" not in metadata(files["README.md"].decode())  # it was a path, though it looks like an id
    assert hub.commits["someone/first-model"] == ["Push of a run"]


def test_the_run_folder_itself_holds_no_secret(nasty_run: Path) -> None:
    for path in nasty_run.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert TOKEN_OF_RECIPE.encode() not in content, path
            assert b"wandb0123" not in content, path


def test_the_card_says_what_was_trained_and_how(nasty_run: Path, hub: HubStub, at_home: None) -> None:
    push_run(PushArguments(str(nasty_run), repo="org/model"))
    files = hub.repos["org/model"]
    card, summary = files["README.md"].decode(), json.loads((nasty_run / "training_summary.json").read_text())
    for line in objective_text(summary["settings"]):
        assert line in card
    assert "(https://arxiv.org/abs/" in card
    assert "| `exact_match` | 1 |\n| `digits` | 0.25 |" in card
    assert f"| completions | {summary['sampling']['completions']:,} |" in card
    assert "| trained / groups |" in card
    assert "![reward.png](reward.png)" in card
    assert f"- torch {torch.__version__}" in card
    assert "in 2 optimizer steps" in card
    divisor = card.split("## Divisor")[1].split("##")[0]
    assert "aggregation: " in divisor
    settings = yaml.safe_load(card.split("~~~~~yaml\n")[1].split("~~~~~")[0])
    assert settings["reward_funcs"] == ["exact_match", "my_rewards.py:digits"]
    assert settings["dataset_name"] == "sums_of_***_on_***.jsonl"
    assert settings["learning_rate"] == 0.01
    assert metadata(card)["library_name"] == "transformers"
    # The recipe that is pushed is one, and says the same.
    assert yaml.safe_load(files["recipe.yaml"])["reward_weights"] == [1.0, 0.25]
    assert "places" not in json.loads(files["training_summary.json"])["card"]
    assert "TrainOutput" not in card
    assert "None" not in card


def test_a_whole_policy_is_loaded_with_equal_log_probs(nasty_run: Path, hub: HubStub, tmp_path: Path) -> None:
    push_run(PushArguments(str(nasty_run), repo="org/whole"))
    folder = hub.downloaded("org/whole", tmp_path)
    model = loaded_by_card(folder, "org/whole")["model"]
    assert torch.equal(logps(model, folder), logps(AutoModelForCausalLM.from_pretrained(nasty_run), nasty_run))
    start = logps(AutoModelForCausalLM.from_pretrained(bundled_model_path()), nasty_run)
    assert (logps(model, folder) - start).abs().max() > 1e-4


def test_an_adapter_is_loaded_with_equal_log_probs(dpo_run: Path, hub: HubStub, tmp_path: Path) -> None:
    from peft import PeftModel

    push_run(PushArguments(str(dpo_run)))
    folder = hub.downloaded("someone/dpo", tmp_path)
    base = AutoModelForCausalLM.from_pretrained(bundled_model_path())
    start = logps(base, folder)
    model = loaded_by_card(folder, "someone/dpo")["model"]
    assert torch.equal(logps(model, folder), logps(PeftModel.from_pretrained(base, dpo_run), folder))
    assert (logps(model, folder) - start).abs().max() > 1e-4
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    card = (folder / "README.md").read_text()
    assert metadata(card)["library_name"] == "peft"
    assert "datasets" not in metadata(card)  # generated here: the name is no data set of the Hub
    assert "| rewards/accuracies |" in card
    assert "| train / dropped | 0 |" in card


def test_a_reward_model_is_loaded_with_equal_scores(scorer_run: Path, hub: HubStub, tmp_path: Path) -> None:
    from peft import PeftModel

    push_run(PushArguments(str(scorer_run)))
    folder = hub.downloaded("someone/scorer", tmp_path)
    names = loaded_by_card(folder, "someone/scorer")
    base = AutoModelForSequenceClassification.from_pretrained(bundled_model_path(), num_labels=1)
    base.config.pad_token_id = names["tokenizer"].pad_token_id
    here = PeftModel.from_pretrained(base, scorer_run)
    inputs = names["tokenizer"](["1+2=3", "7+8=16"], return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        assert torch.equal(names["model"](**inputs).logits, here(**inputs).logits)
        assert here(**inputs).logits.std() > 1e-4
    figures = json.loads((folder / "reward_model.json").read_text())
    assert figures == json.loads((scorer_run / "reward_model.json").read_text())
    assert metadata((folder / "README.md").read_text())["pipeline_tag"] == "text-classification"


def test_what_is_there_is_not_sent_again(dpo_run: Path, hub: HubStub) -> None:
    push_run(PushArguments(str(dpo_run)))
    first, sent = dict(hub.repos["someone/dpo"]), len(hub.requests)
    push_run(PushArguments(str(dpo_run)))
    assert hub.repos["someone/dpo"] == first
    assert hub.commits["someone/dpo"] == ["Push of a run"]
    assert not any(request.startswith("PUT") for request in hub.requests[sent:])


def test_a_private_repository_of_another_name(dpo_run: Path, hub: HubStub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(dpo_run), "--repo", "org/mine", "--private"]) == 0
    assert hub.visibility == {"org/mine": "private"}
    told = capsys.readouterr()
    assert told.out.startswith(f"Pushed: {hub.endpoint}/org/mine/commit/")
    assert f"Pushing {len(hub.repos['org/mine'])} files" in told.err


@pytest.mark.parametrize(
    ("failing", "says"),
    [
        ({"repos/create": 401}, "does not accept the token"),
        ({"/commit/": 403}, "may not write to 'someone/dpo'"),
        ({"/commit/": 500}, "refused the push to 'someone/dpo'"),
        ({"/preupload/": 500}, "refused the push to 'someone/dpo'"),
        ({"/objects/": 503}, "refused the push to 'someone/dpo'"),
        ({"/objects/": "drop"}, "broke off"),
        ({"/commit/": "drop"}, "broke off"),
    ],
)
def test_a_push_that_fails_can_be_repeated(
    failing: dict[str, Any], says: str, dpo_run: Path, hub: HubStub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.failing = failing
    assert main(["push", str(dpo_run)]) == 2
    told = capsys.readouterr().err.split("trl-algos: cannot run:\n")[1].splitlines()
    assert len(told) == 1
    assert says in told[0]
    assert hub.repos.get("someone/dpo", {}) == {}  # nothing of it is seen
    hub.failing = {}
    assert main(["push", str(dpo_run)]) == 0
    assert {"README.md", "adapter_model.safetensors"} <= hub.repos["someone/dpo"].keys()


def test_a_silent_server_is_given_up(dpo_run: Path, hub: HubStub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.delay = 30.0
    assert main(["push", str(dpo_run), "--timeout=0.2"]) == 2
    assert "was silent for 0.2 seconds" in capsys.readouterr().err


def test_a_slow_server_is_waited_for(
    dpo_run: Path, hub: HubStub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_algos.hub.upload._TOLD_EVERY_SECONDS", 0.1)
    hub.delay = 0.2
    assert main(["push", str(dpo_run)]) == 0
    assert "Still pushing to someone/dpo, after" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name one run folder"),
        (["a", "b"], "name one run folder"),
        (["a", "--repos", "b"], "there is no option '--repos'. Did you mean '--repo'?"),
        (["a", "--repo"], "`--repo` needs a value"),
        (["a", "--timeout=-1"], "`--timeout`: '-1' must be a number of seconds above 0"),
    ],
)
def test_words_that_push_does_not_know(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        push_arguments(words)


def test_folders_that_are_no_finished_runs(dpo_run: Path, tmp_path: Path, hub: HubStub) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        push_run(PushArguments(str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"is no run folder: it has no recipe\.yaml"):
        push_run(PushArguments(str(tmp_path)))
    shutil.copy(dpo_run / "recipe.yaml", tmp_path)
    with pytest.raises(ConfigError, match="is not finished"):
        push_run(PushArguments(str(tmp_path)))
    (tmp_path / "training_summary.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        push_run(PushArguments(str(tmp_path)))
    (tmp_path / "training_summary.json").write_text('{"settings": {}}')
    with pytest.raises(ConfigError, match="not of a run of this version"):
        push_run(PushArguments(str(tmp_path)))
    shutil.copy(dpo_run / "training_summary.json", tmp_path)
    with pytest.raises(ConfigError, match="there is no model"):
        push_run(PushArguments(str(tmp_path)))
    assert not hub.requests


def test_without_a_token_or_a_name_or_a_network_nobody_is_asked(
    dpo_run: Path, hub: HubStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(HubError, match="'a/b/c' is no name of a repository"):
        push_run(PushArguments(str(dpo_run), repo="a/b/c"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="There is no token"):
        push_run(PushArguments(str(dpo_run)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"):
        push_run(PushArguments(str(dpo_run)))
    assert not hub.requests


def test_a_hub_that_cannot_be_reached(dpo_run: Path, hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.server.server_close()
    with pytest.raises(HubError, match="cannot be reached"):
        push_run(PushArguments(str(dpo_run)))
