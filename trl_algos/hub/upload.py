"""The upload by the client of the Hub: a repository, one commit, and one clear message when it does not work."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session, validate_repo_id
from huggingface_hub.utils import logging as hub_logging

from trl_algos._version import __version__
from trl_algos.errors import HubError
from trl_algos.hub.files import Files, size
from trl_algos.settings.public import public_settings

TIMEOUT_SECONDS = 60.0
"""How long the Hub may be silent before a request is given up; the client tries most of them again."""

_TOLD_EVERY_SECONDS = 20.0

_Result = TypeVar("_Result")


def opened_repo(
    name: str,
    token: str | None = None,
    private: bool | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> str:
    """The repository of this name, made if there is none; private or not is decided where it is made.

    Args:
        name: `name` of the token's own account, or `owner/name`.
        token: with write access; None for that of the environment or of `hf auth login`.
        private: None for the account's default.
        timeout: seconds of silence.

    Returns:
        Its id `owner/name`.

    Raises:
        HubError: it cannot be had; the message says why.
    """
    token = _checked(name, token)
    with _translated(name, timeout):
        return _client(token).create_repo(name, private=private, exist_ok=True).repo_id


def commit(
    files: Files,
    repo: str,
    message: str,
    token: str | None = None,
    revision: str | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> CommitInfo:
    """Put files into a repository in one commit, or none where it has all of them already.

    Until the commit nothing of it is seen in the repository: one that breaks off leaves what was there.

    Args:
        files: path in the repository -> file or bytes.
        repo: its id, `owner/name`.
        message: of the commit.
        token: as `opened_repo` takes it.
        revision: branch; None for the main one.
        timeout: seconds of silence.

    Raises:
        HubError: as `opened_repo`.
    """
    token = _checked(repo, token)
    with _translated(repo, timeout):
        operations = [CommitOperationAdd(name, _content(file)) for name, file in files.items()]
        return _client(token).create_commit(repo, operations, commit_message=message, revision=revision)


def told(files: Files, repo: str, upload: Callable[[], _Result]) -> _Result:
    """The result of an upload, with a line on standard error at its beginning, and more while it takes long."""
    megabytes = size(files) / 1e6
    say(f"Pushing {len(files)} files ({megabytes:.1f} MB) to {repo} ...")
    done = threading.Event()

    def remind() -> None:
        seconds = 0.0
        while not done.wait(_TOLD_EVERY_SECONDS):
            seconds += _TOLD_EVERY_SECONDS
            say(f"Still pushing to {repo}, after {seconds:.0f} s ...")

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        return upload()
    finally:
        done.set()
        reminder.join()


def _client(token: str | None) -> HfApi:
    return HfApi(token=token, library_name="trl_algos", library_version=__version__)


def _checked(name: str, token: str | None) -> str:
    """The token to use, where this machine alone can tell that there is one and that the name is good."""
    if huggingface_hub.constants.is_offline_mode():
        raise HubError("The Hub is not asked, since HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: unset it.")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise HubError(
            f"`hub_model_id`: {name!r} is no name of a repository, which is `name` or `owner/name` of letters, "
            "digits, and `-`, `_`, `.` between them."
        ) from None
    token = token or huggingface_hub.get_token()
    if not token:
        raise HubError("There is no token for the Hub: set HF_TOKEN, or log in by `hf auth login`.")
    return token


@contextmanager
def _translated(name: str, timeout: float) -> Iterator[None]:
    """Requests that give up after `timeout` seconds of silence, without the client's own warnings, and one message."""
    level = hub_logging.get_verbosity()
    session = get_session()
    usual = session.timeout
    hub_logging.set_verbosity_error()
    session.timeout = timeout
    try:
        yield
    except Exception as error:  # of whatever library is below the client: an upload must not end a run by a traceback
        raise HubError(_reason(error, name, timeout)) from error
    finally:
        session.timeout = usual
        hub_logging.set_verbosity(level)


def _reason(error: BaseException, name: str, timeout: float) -> str:
    endpoint = huggingface_hub.constants.ENDPOINT
    chain = list(_causes(error))
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in chain):
        return "The Hub is not asked, since HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: unset it."
    status = next((s for cause in chain if (s := _status(cause)) is not None), None)
    said = _first_line(chain[-1] if status is None else next(c for c in chain if _status(c) is not None))
    if status == 401:
        return (
            f"{endpoint} does not accept the token, or knows no {name!r}: see HF_TOKEN and `hf auth login`. ({said})"
        )
    if status == 403:
        return f"The token may not write to {name!r} at {endpoint}. ({said})"
    if status is not None:
        return f"{endpoint} refused the push to {name!r}. ({said})"
    if any("Timeout" in type(cause).__name__ for cause in chain):
        return f"{endpoint} was silent for {timeout:g} seconds."
    if any("Connect" in type(cause).__name__ for cause in chain):
        return f"{endpoint} cannot be reached. ({said})"
    return f"The push to {name!r} at {endpoint} broke off. ({said})"


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    text: Any = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return str(public_settings({"": text})[""])[:200]


def _content(file: Path | bytes) -> str | bytes:
    return os.fspath(file) if isinstance(file, Path) else file


def say(line: str) -> None:
    """A line of progress, on standard error."""
    sys.stderr.write(f"trl-algos: {line}\n")
    sys.stderr.flush()
