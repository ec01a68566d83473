"""Rewards for the shape of a completion, whatever it says: its tags and its length."""

import re
from collections.abc import Sequence
from typing import Any

from trl_algos.rewards.answers import Completion, completion_text
from trl_algos.rewards.settings import check_setting


def format_tags(
    completions: Sequence[Completion],
    *,
    tags: Sequence[str] = ("think", "answer"),
    strict: bool = True,
    partial: bool = False,
    **kwargs: Any,
) -> list[float]:
    """1.0 where every tag is opened and closed exactly once, one after the other in the order given.

    Args:
        completions: Completions.
        tags: Names of the tags, as in `<think>...</think>`.
        strict: Nothing but white space may stand outside of the tags.
        partial: Instead of 0.0, the share of what is right: each tag that is opened once and then closed once, and
            order and `strict` together, count one each.
        **kwargs: What TRL passes, unused.

    Returns:
        One reward per completion.

    Raises:
        ConfigError: a tag has no name that can stand between `<` and `>`, or stands twice.
    """
    named = all(re.fullmatch(r"[^\s<>/]+", tag) for tag in tags)
    check_setting(
        "tags", list(tags), bool(tags) and named and len(set(tags)) == len(tags), "different names, no < or >"
    )
    inside = "(.*?)".join(f"{re.escape(f'<{tag}>')}.*?{re.escape(f'</{tag}>')}" for tag in tags)
    whole = re.compile(f"(.*?){inside}(.*)", re.DOTALL)

    def reward(completion: Completion) -> float:
        text = completion_text(completion)
        right = sum(_once(text, tag) for tag in tags)
        found = whole.fullmatch(text) if right == len(tags) else None
        if found and not (strict and any(part.strip() for part in found.groups())):
            return 1.0
        return right / (len(tags) + 1) if partial else 0.0

    return [reward(completion) for completion in completions]


def length(
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    best: int,
    worst: int,
    **kwargs: Any,
) -> list[float]:
    """From 1.0 at the best length to 0.0 at the worst, linear between, level beyond: (worst - n) / (worst - best).

    With `best` below `worst` short completions are rewarded, with `best` above `worst` long ones.

    Args:
        completions: Completions.
        completion_ids: Their tokens, as TRL passes them; without them, words are counted.
        best: Length that gets 1.0.
        worst: Length that gets 0.0.
        **kwargs: What else TRL passes, unused.

    Returns:
        One reward per completion.

    Raises:
        ConfigError: a length is negative, or both are the same.
    """
    check_setting("best", best, best >= 0, "0 or more")
    check_setting("worst", worst, worst >= 0 and worst != best, f"0 or more, and not `best`, {best}")
    pieces = completion_ids if completion_ids is not None else [completion_text(c).split() for c in completions]
    return [min(1.0, max(0.0, (worst - len(piece)) / (worst - best))) for piece in pieces]


def _once(text: str, tag: str) -> bool:
    opening, closing = f"<{tag}>", f"</{tag}>"
    return text.count(opening) == text.count(closing) == 1 and text.index(opening) < text.index(closing)
