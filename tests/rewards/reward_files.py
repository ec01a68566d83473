"""A user's reward functions of all kinds, in files."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = """
import functools
from collections import Counter

def score(completions, scale: float = 1.0, **kwargs):
    return [scale] * len(completions)

def needy(completions, solution, **kwargs):
    return [float(s) for s in solution]

def keyed(completions, *, scale: float = 1.0, level, **kwargs):
    return [scale * level] * len(completions)

def by_prompt(prompt, completions, **kwargs):
    return []

def by_position(completions, /, **kwargs):
    return []

def closed(completions, answer):
    return []

def all_of_it(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer):
    return [1.0] * len(completions)

async def later(completions, scale: float = 1.0, **kwargs):
    return [scale] * len(completions)

@functools.cache
def cached(x):
    return []

def wrapped(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

@wrapped
def decorated(completions, scale=1.0, **kwargs):
    return [scale] * len(completions)

class Judge:
    def __init__(self, model: str, votes: int = 1):
        self.votes = votes

    def __call__(self, completions, **kwargs):
        return [float(self.votes)] * len(completions)

class Silent:
    pass

class Waiting:
    async def __call__(self, completions, **kwargs):
        return [2.0] * len(completions)

text = "x"
short = lambda completions, **kwargs: [3.0] * len(completions)
made = functools.partial(score, scale=4.0)

if True:
    def inner(completions, **kwargs):
        return [5.0] * len(completions)
"""


@contextmanager
def working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in `folder`, with `SOURCE` as `mine.py`; forget what was imported meanwhile."""
    (folder / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
