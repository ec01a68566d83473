"""A finished run folder to the Hub, at the end of training or later; nothing here needs torch or TRL."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trl_algos.data.arithmetic_task import BUNDLED_MODELS
from trl_algos.data.sources import kind_of
from trl_algos.errors import ConfigError, HubError, nearest
from trl_algos.hub.card import CARD_FILE, CardFacts, model_card
from trl_algos.hub.files import has_weights, is_adapter, model_files
from trl_algos.hub.privacy import Privacy, places_in
from trl_algos.hub.upload import TIMEOUT_SECONDS, commit, opened_repo, told
from trl_algos.objective import objective_text, references, unused_text
from trl_algos.recipe import schema
from trl_algos.run.folder import (
    PAIR_PLOT_FILE,
    PLOT_FILE,
    RECIPE_FILE,
    SUMMARY_FILE,
    recipe_text,
    strict_json,
    take_folder,
    write_text,
)
from trl_algos.settings.kinds import kind_of as kind_of_algorithm

_OPTIONS = ("--repo", "--private", "--timeout")


@dataclass(frozen=True)
class PushArguments:
    """What `trl-algos push` was told.

    Args:
        folder: the run's.
        repo: id of the repository; None for the recipe's `hub_model_id`, or else the folder's name.
        private: whether a new repository is private; None for what the recipe says.
        timeout: seconds that the Hub may be silent.
    """

    folder: str
    repo: str | None = None
    private: bool | None = None
    timeout: float = TIMEOUT_SECONDS


def push_arguments(words: Sequence[str]) -> PushArguments:
    """The arguments of `trl-algos push RUN_DIR [--repo ID] [--private] [--timeout SECONDS]`.

    Raises:
        ConfigError: a word is none of these, or one is missing.
    """
    folders: list[str] = []
    told_of: dict[str, Any] = {}
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        word = rest.pop(0)
        if word == "--private":
            told_of["private"] = True
        elif word in ("--repo", "--timeout"):
            if not rest or not rest[0] or rest[0].startswith("--"):
                raise ConfigError([f"push: `{word}` needs a value."])
            value = rest.pop(0)
            told_of[word[2:]] = value if word == "--repo" else _seconds(value)
        elif word.startswith("-"):
            raise ConfigError([f"push: there is no option {word!r}.{nearest(word, _OPTIONS)}"])
        else:
            folders.append(word)
    if len(folders) != 1:
        raise ConfigError(["push: name one run folder: `trl-algos push RUN_DIR [--repo ID] [--private]`."])
    return PushArguments(folders[0], **told_of)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise ConfigError([f"push: `--timeout`: {text!r} must be a number of seconds above 0."])
    return seconds


def card_block(settings: Mapping[str, Any], rewards: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """What a card needs beyond settings and figures, and what only the machine of the run can tell.

    Args:
        settings: every setting as resolved.
        rewards: name and weight of each reward function.

    Returns:
        Plain values for `training_summary.json`; `places` in it stays here.
    """
    places = sorted({*places_in(settings), str(settings["output_dir"])})
    model, data = settings["model_name_or_path"], [settings.get("dataset_name"), settings.get("dataset_test_name")]
    data += [entry.get("path") for entry in settings.get("datasets") or [] if isinstance(entry, Mapping)]
    privacy, bundled = Privacy(tuple(places)), model in BUNDLED_MODELS and model not in places
    return {
        "objective": objective_text(settings),
        "not_used": unused_text(settings),
        "references": references(settings),
        "base_model": None if bundled else privacy.hub_id(model),
        "bundled": model if bundled else None,
        "datasets": sorted({name for name in data if name and kind_of(name) == "hub" and privacy.hub_id(name)}),
        "rewards": [list(reward) for reward in rewards],
        "places": places,
    }


def facts_of(summary: Mapping[str, Any], folder: Path) -> CardFacts:
    """What a card tells of a run.

    Args:
        summary: as in `training_summary.json`, or its `settings` and `card` alone while the run goes on.
        folder: the run's.
    """
    kind = kind_of_algorithm(summary["settings"]["algorithm"])
    return CardFacts(
        settings=summary["settings"],
        defaults={key: setting.default for key, setting in schema.settings(kind).items()},
        is_adapter=is_adapter(folder),
        summary=summary,
        versions=summary.get("versions", {}),
        plots=[name for name in (PLOT_FILE, PAIR_PLOT_FILE) if (folder / name).is_file()],
        **{**summary["card"], "rewards": [(name, weight) for name, weight in summary["card"]["rewards"]]},
    )


def write_card(summary: Mapping[str, Any], folder: Path, repo: str) -> None:
    """Put the card into the run folder, in the place of PEFT's."""
    write_text(folder / CARD_FILE, model_card(facts_of(summary, folder), repo))


def push_run(arguments: PushArguments, token: str | None = None) -> str:
    """Push a finished run: model, tokenizer, recipe, summary, plots and card, in one commit.

    What is in the repository already is not sent again, so a push can be repeated.

    Args:
        arguments: what to push, and where to.
        token: with write access; None for that of the environment or of `hf auth login`.

    Returns:
        Address of the repository's new commit.

    Raises:
        ConfigError: the folder is no finished run.
        HubError: it did not work; the folder is as it was.
    """
    folder = Path(arguments.folder)
    summary = _summary(folder)
    settings = summary["settings"]
    name = arguments.repo or settings.get("hub_model_id") or folder.absolute().name
    private = settings.get("hub_private_repo") if arguments.private is None else arguments.private
    repo = opened_repo(name, token, private, arguments.timeout)
    files = run_files(folder, summary, repo)
    done = told(
        files,
        repo,
        lambda: commit(files, repo, "Push of a run", token, settings.get("hub_revision"), arguments.timeout),
    )
    return str(done.commit_url)


def push_finished(folder: str, token: str | None) -> str:
    """`push_run` at the end of training, with what to do where it does not work.

    Raises:
        HubError: so it is.
    """
    try:
        return push_run(PushArguments(folder), token)
    except (HubError, ConfigError, OSError) as error:
        raise HubError(
            f"the run is trained and saved, but not pushed: {error} Push it later by `trl-algos push {folder}`."
        ) from error


def run_files(folder: Path, summary: Mapping[str, Any], repo: str) -> dict[str, Path | bytes]:
    """What of a run folder goes to the Hub: path in the repository -> file or bytes.

    Args:
        folder: the run's.
        summary: its `training_summary.json`.
        repo: id that the card tells to load the model by.
    """
    facts = facts_of(summary, folder)
    privacy = facts.privacy
    files = model_files(folder, privacy, bool(summary["settings"].get("push_critic")))
    recipe = yaml.safe_load((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    card = {name: value for name, value in summary["card"].items() if name != "places"}
    public = {**summary, "settings": privacy.settings(summary["settings"]), "card": card}
    files[RECIPE_FILE] = recipe_text(privacy.settings(recipe)).encode()
    files[SUMMARY_FILE] = (json.dumps(strict_json(privacy.value(public)), indent=2) + "\n").encode()
    files |= {name: folder / name for name in facts.plots}
    files[CARD_FILE] = model_card(facts, repo).encode()
    return files


def _summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run.

    Raises:
        ConfigError: there is none, or nothing to go with it.
    """
    if not folder.is_dir():
        raise ConfigError([f"push: there is no folder {str(folder)!r}."])
    if not (folder / RECIPE_FILE).is_file():
        raise ConfigError(
            [f"push: {str(folder)!r} is no run folder: it has no {RECIPE_FILE}. In a script, `trainer.push_to_hub()`."]
        )
    try:
        lock = take_folder(folder)
    except OSError:  # a folder that cannot be written is nobody's
        lock = None
    if lock is not None:
        lock.close()
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        recipe = yaml.safe_load((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"push: the run in {str(folder)!r} is not finished: it has no {SUMMARY_FILE}."]) from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"push: the records in {str(folder)!r} cannot be read: {str(error)[:200]}"]) from None
    if not isinstance(recipe, dict) or not isinstance(summary, dict) or not {"settings", "card"} <= summary.keys():
        raise ConfigError([f"push: {folder / SUMMARY_FILE} is not of a run of this version of trl_algos."])
    if not has_weights(folder):
        raise ConfigError([f"push: there is no model in {str(folder)!r}."])
    return dict(summary)
