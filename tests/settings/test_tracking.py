import sys
from pathlib import Path

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from trl_algos.settings.tracking import TRACKERS, report_to_problems


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that modules are found in."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for modules, _ in TRACKERS.values():
        for module in modules:  # what is loaded already would be found all the same
            monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def test_the_known_names_are_those_of_transformers() -> None:
    assert TRACKERS.keys() == INTEGRATION_TO_CALLBACK.keys()


@pytest.mark.parametrize("names", [None, [], "none", "all", ["none"], ["all"], "kubeflow"])
def test_nothing_to_install(names: str | list[str] | None, installed: Path) -> None:
    assert report_to_problems(names) == []


@pytest.mark.parametrize("name", sorted(TRACKERS.keys() - {"kubeflow"}))
def test_a_missing_package_is_named_with_the_command(name: str, installed: Path) -> None:
    (problem,) = report_to_problems(name)
    assert problem.startswith(f"`report_to`: {name!r} needs a package that is not installed; `pip install ")


def test_any_of_the_modules_will_do(installed: Path) -> None:
    assert len(report_to_problems(["tensorboard", "wandb"])) == 2
    (installed / "tensorboardX.py").write_text("")
    (problem,) = report_to_problems(["tensorboard", "wandb"])
    assert "'wandb'" in problem
    assert "`pip install wandb`" in problem


def test_a_folder_of_that_name_is_no_package(installed: Path) -> None:
    (installed / "wandb").mkdir()
    assert report_to_problems("wandb")
    (installed / "wandb" / "__init__.py").write_text("")
    assert report_to_problems("wandb") == []


def test_an_unknown_name_gets_the_nearest() -> None:
    (problem,) = report_to_problems(["tensorbord"])
    assert problem.startswith("`report_to`: 'tensorbord' is not one of all, none, azure_ml, ")
    assert problem.endswith("Did you mean 'tensorboard'?")


@pytest.mark.parametrize("word", ["all", "none"])
def test_all_and_none_stand_alone(word: str, installed: Path) -> None:
    assert report_to_problems(["kubeflow", word]) == [
        f"`report_to`: {word!r} stands alone or not at all, not in a list with others."
    ]
