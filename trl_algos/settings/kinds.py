"""The kinds of training, which follow from the algorithm's key: what is trained, on what, and by which classes.

`policy`: completions are sampled and rewarded. `preference`: a policy is trained on preference pairs.
`reward_model`: a reward model is trained on preference pairs. Nothing here needs torch or TRL.
"""

from collections.abc import Mapping
from typing import Any

from trl_algos.algorithms import ALGORITHMS, Algorithm
from trl_algos.errors import closest, unknown_name
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS, PreferenceAlgorithm, preference_keys

KINDS = ("policy", "preference", "reward_model")

WHO: Mapping[str, str] = {
    "policy": "algorithms that sample",
    "preference": "policies trained on preference pairs",
    "reward_model": "reward models",
}
"""Kind -> those of it, in words."""

DOES: Mapping[str, str] = {
    "policy": "samples",
    "preference": "trains on pairs",
    "reward_model": "trains a reward model on pairs",
}
"""Kind -> what an algorithm of it does, in words."""

CLASSES: Mapping[str, str] = {
    "policy": "PolicyConfig and PolicyTrainer",
    "preference": "PreferenceConfig and PreferenceTrainer",
    "reward_model": "BradleyTerryConfig and BradleyTerryTrainer",
}
"""Kind -> the classes that do it in a script."""


def keys_of(kind: str) -> tuple[str, ...]:
    """Keys of the algorithms of a kind."""
    if kind == "policy":
        return tuple(ALGORITHMS)
    return preference_keys("policy" if kind == "preference" else kind)


def some_keys(kind: str) -> str:
    """The first keys of a kind, for a sentence: `grpo, dr_grpo, dapo, ...`."""
    first, more = keys_of(kind)[:3], keys_of(kind)[3:]
    return ", ".join([*first, *(["..."] if more else [])])


def all_keys() -> tuple[str, ...]:
    """Keys of all algorithms, whatever their kind."""
    return (*ALGORITHMS, *PREFERENCE_ALGORITHMS)


def kind_of(key: Any) -> str:
    """Kind of the algorithm of this key; of a key that there is not, that of the nearest one.

    Args:
        key: what a recipe says; None where it says nothing, which is a policy's algorithm.
    """
    known = key if key is None or key in all_keys() else closest(key, all_keys())
    return next((kind for kind in KINDS if known in keys_of(kind)), "policy")


def tells_kind(key: Any) -> bool:
    """Whether `kind_of` knows the kind of the algorithm of this key, or that of a near one."""
    return key is not None and (key in all_keys() or closest(key, all_keys()) is not None)


def row_of(key: str) -> Algorithm | PreferenceAlgorithm:
    """The row of an algorithm of any kind.

    Raises:
        KeyError: there is none.
    """
    return PREFERENCE_ALGORITHMS[key] if key in PREFERENCE_ALGORITHMS else ALGORITHMS[key]


def unknown_algorithm(key: Any, kind: str) -> str:
    """The message about a key that is none of a kind; one of another kind is told its classes."""
    if key not in all_keys():
        return unknown_name("algorithm", key, keys_of(kind))
    return f"`algorithm`: {key!r} is not one of {', '.join(keys_of(kind))}. It is one of {CLASSES[kind_of(key)]}."
