"""What of a run with a critic is uploaded to the Hub: never the critic, unless `push_critic` is set."""

from pathlib import Path
from typing import Any

import pytest
from stub import HubStub
from test_ppo_state import sampling_trainer

from trl_algos import load_critic
from trl_algos.trainers import PPOTrainer


def trained(name: str, model_folder: str, output: Path, **settings: Any) -> PPOTrainer:
    trainer = sampling_trainer(name, model_folder, output, max_steps=2, **settings)
    trainer.train()
    return trainer


def of_critic(hub: HubStub, output: Path) -> set[str]:
    """Files of a critic in the repository of an output folder."""
    pushed = hub.repos[f"someone/{output.name}"]
    assert {"README.md", "tokenizer.json"} < pushed.keys()
    return {path for path in pushed if "critic" in path or "value_head" in path}


@pytest.mark.parametrize("name", ["adapter", "separate", "shared"])
def test_a_push_by_hand_leaves_the_critic_out(name: str, model_folder: str, tmp_path: Path, hub: HubStub) -> None:
    trainer = trained(name, model_folder, tmp_path)
    trainer.save_model(str(tmp_path))  # as `critic`, since nothing is pushed so far
    assert (tmp_path / "critic/critic.json").is_file()
    trainer.push_to_hub()
    trainer.save_model(str(tmp_path))  # while the upload may still read the folder
    assert not of_critic(hub, tmp_path)
    assert not (tmp_path / "critic").exists()
    assert load_critic(tmp_path / "_critic").head.weight.equal(trainer.critic.head.weight)


def test_what_an_earlier_run_left_is_not_pushed(model_folder: str, tmp_path: Path, hub: HubStub) -> None:
    """The first upload is that of a checkpoint, before the run has saved a critic in the output folder itself."""
    trained("adapter", model_folder, tmp_path).save_model(str(tmp_path))
    pushes = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 1}
    trainer = trained("adapter", model_folder, tmp_path, **pushes)
    assert not of_critic(hub, tmp_path)
    trainer.push_to_hub()
    assert not of_critic(hub, tmp_path)
    assert (tmp_path / "checkpoint-2/critic/critic.json").is_file()


def test_a_critic_that_was_cut_short_is_not_pushed(model_folder: str, tmp_path: Path, hub: HubStub) -> None:
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic/value_head.safetensors").touch()
    trained("adapter", model_folder, tmp_path).push_to_hub()
    assert not of_critic(hub, tmp_path)


def test_with_push_critic_it_is_pushed(model_folder: str, tmp_path: Path, hub: HubStub) -> None:
    trainer = trained("adapter", model_folder, tmp_path, push_critic=True)
    trainer.push_to_hub()
    assert {"critic/critic.json", "critic/value_head.safetensors"} < of_critic(hub, tmp_path)
