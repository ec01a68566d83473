"""Folders that are whole whenever they have their name: written elsewhere, and renamed when they are complete.

What is being written lies in `_saving` beside its place: on the same file system, so that renaming is one step, and
under a name that uploads and searches for checkpoints leave out. A process that is killed leaves it there.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trl_algos.checkpoints.latest import checkpoints_in, order_of
from trl_algos.checkpoints.record import flush, write_record

SAVING = "_saving"
_MODEL = "model"
_REPLACED = "replaced-"
_REMOVED = "removed-"

_SHARD = re.compile(r"(adapter_model|model|pytorch_model)-\d{5}-of-\d{5}\.(safetensors|bin)")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def draft_of(folder: Path) -> Path:
    """Where a checkpoint is written that shall be called `folder`."""
    return folder.parent / SAVING / folder.name


def model_draft_of(folder: Path) -> Path:
    """Where the files are written that shall lie in `folder`, among others."""
    return folder / SAVING / _MODEL


def publish_checkpoint(folder: Path, run: Mapping[str, Any]) -> None:
    """Complete the draft of the checkpoint `folder` with its record, and give it its name.

    A checkpoint of that name is out of the way for no longer than two renamings take, and others are untouched.

    Args:
        folder: the checkpoint to be.
        run: as of `write_record`.
    """
    draft, replaced = draft_of(folder), draft_of(folder).with_name(_REPLACED + folder.name)
    if not draft.is_dir():  # on a disk that processes share another one has done it
        return
    write_record(draft, run, order=1 + max(map(order_of, checkpoints_in(folder.parent)), default=0))
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(draft, folder)
    flush(folder.parent)
    _remove(replaced)
    _remove_if_empty(draft.parent)


def publish_files(folder: Path) -> None:
    """Move the files drafted for `folder` into it, each at once over the one that it replaces.

    Weights of another form, which loading would prefer or mix in, are removed.
    """
    draft = model_draft_of(folder)
    if not draft.is_dir():
        return
    names = [path.relative_to(draft) for path in sorted(draft.rglob("*")) if path.is_file()]
    for name in names:
        flush(draft / name)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(draft / name, folder / name)
    new = {name.as_posix() for name in names}
    if new & set(_WEIGHTS):
        for path in folder.iterdir():
            if path.name not in new and (path.name in _WEIGHTS or _SHARD.fullmatch(path.name)):
                path.unlink()
    flush(folder)
    _remove(draft)
    _remove_if_empty(draft.parent)


def keep_newest(output_dir: Path, limit: int | None, protected: Collection[str | None]) -> None:
    """Remove the checkpoints saved first until `limit` are left; never the one saved last, nor those `protected`.

    As transformers' `rotate_checkpoints`, but by what the records count rather than by the times of folders; what is
    being removed has no longer the name of a checkpoint.
    """
    if limit is None or limit <= 0:
        return
    oldest_first = sorted(checkpoints_in(output_dir), key=lambda path: (order_of(path), path.stat().st_mtime))
    kept = {os.path.realpath(path) for path in (*oldest_first[-1:], *protected) if path}
    excess = [path for path in oldest_first if os.path.realpath(path) not in kept][: max(len(oldest_first) - limit, 0)]
    for path in excess:
        removed = draft_of(path).with_name(_REMOVED + path.name)
        removed.parent.mkdir(exist_ok=True)
        _remove(removed)
        os.replace(path, removed)
        _remove(removed)
        _remove_if_empty(removed.parent)


def discard_drafts(output_dir: str | Path) -> list[str]:
    """Remove what a killed run has left half written or half removed; the names of the checkpoints among it.

    One that it had put aside for another, which then did not get its name, gets it back.
    """
    saving = Path(output_dir) / SAVING
    if not saving.is_dir():
        return []
    for aside in saving.glob(f"{_REPLACED}*"):
        folder = saving.parent / aside.name.removeprefix(_REPLACED)
        if not folder.exists():
            os.replace(aside, folder)
    names = sorted(path.name for path in saving.glob("checkpoint-*"))
    _remove(saving)
    return names


def discard_draft(draft: Path) -> None:
    """Remove a draft that was begun before; its parent stays."""
    _remove(draft)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another machine, whose disk this is, too, has something there
        folder.rmdir()
