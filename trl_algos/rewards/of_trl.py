"""TRL's own reward functions, as a recipe names them: factories take their settings as keywords, text is no error.

TRL's functions read `completion[0]["content"]` and fail on prompts that are plain text. Here each completion is passed
on as one message, so that both kinds of prompts work. TRL is imported when a function is called, since that is slow.
"""

from collections.abc import Callable, Sequence
from typing import Any

from trl_algos.rewards.answers import Completion, completion_text
from trl_algos.rewards.settings import check_setting, require_package

Rewards = list[float] | list[float | None]


def accuracy_reward(completions: Sequence[Completion], solution: Sequence[str], **kwargs: Any) -> Rewards:
    """TRL's: 1.0 where the LaTeX answer equals the column `solution`; None where the solution cannot be parsed.

    Args:
        completions: Completions.
        solution: The data set's column of right answers.
        **kwargs: What else TRL passes; `log_extra` is used.

    Raises:
        ConfigError: math-verify is missing.
    """
    require_package("math_verify", "accuracy_reward", "tasks")
    return _of_trl("accuracy_reward", completions, solution=solution, log_extra=kwargs.get("log_extra"))


def reasoning_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    *,
    reasoning_delimiters: Sequence[str] = ("</think>",),
    **kwargs: Any,
) -> Rewards:
    """TRL's: `accuracy_reward` of what follows the last delimiter; 0.0 where there is no delimiter.

    Args:
        completions: Completions.
        solution: The data set's column of right answers.
        reasoning_delimiters: What ends the reasoning; the first of them that occurs counts.
        **kwargs: What else TRL passes; `log_extra` is used.

    Raises:
        ConfigError: math-verify is missing.
    """
    require_package("math_verify", "reasoning_accuracy_reward", "tasks")
    return _of_trl(
        "reasoning_accuracy_reward",
        completions,
        solution=solution,
        reasoning_delimiters=list(reasoning_delimiters),
        log_extra=kwargs.get("log_extra"),
    )


def think_format_reward(completions: Sequence[Completion], **kwargs: Any) -> Rewards:
    """TRL's: 1.0 where the completion begins with `<think>...</think>`.

    Args:
        completions: Completions.
        **kwargs: What else TRL passes, unused.
    """
    return _of_trl("think_format_reward", completions)


def soft_overlong_punishment_reward(
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_completion_len: int = 1280,
    soft_punish_cache: int = 256,
    **kwargs: Any,
) -> Rewards:
    """TRL's, DAPO eq. 13: 0 up to `max_completion_len - soft_punish_cache` tokens, falling to -1 at the maximum.

    Args:
        completions: Completions.
        completion_ids: Their tokens.
        max_completion_len: Length from which on the reward is -1; the default is that of TRL's script.
        soft_punish_cache: Length of the falling part; the default is that of TRL's script.
        **kwargs: What else TRL passes, unused.

    Raises:
        ConfigError: a setting is out of range.
    """
    check_setting("max_completion_len", max_completion_len, max_completion_len > 0, "at least 1")
    check_setting(
        "soft_punish_cache",
        soft_punish_cache,
        0 <= soft_punish_cache <= max_completion_len,
        f"from 0 to `max_completion_len`, {max_completion_len}",
    )
    return _made_by_trl(
        "get_soft_overlong_punishment",
        {"max_completion_len": max_completion_len, "soft_punish_cache": soft_punish_cache},
        completions,
        completion_ids=completion_ids,
    )


def repetition_penalty_reward(
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
    **kwargs: Any,
) -> Rewards:
    """TRL's: `max_penalty` times the share of n-grams that repeat others, `1 - unique / all`.

    Source: Yeo et al., Demystifying Long Chain-of-Thought Reasoning, 2502.03373, appendix C.2. It counts tokens, or
    words where no tokens are passed; completions shorter than an n-gram get 0.

    Args:
        completions: Completions.
        completion_ids: Their tokens; None for words.
        ngram_size: Tokens of an n-gram.
        max_penalty: Reward that a completion of one n-gram over and over comes close to, 0 or below.
        **kwargs: What else TRL passes, unused.

    Raises:
        ConfigError: a setting is out of range.
    """
    check_setting("ngram_size", ngram_size, ngram_size >= 1, "at least 1")
    check_setting("max_penalty", max_penalty, max_penalty <= 0, "0 or below")
    pieces = completion_ids if completion_ids is not None else [completion_text(c).split() for c in completions]
    return _made_by_trl(
        "get_repetition_penalty_reward",
        {"ngram_size": ngram_size, "max_penalty": max_penalty},
        completions,
        completion_ids=pieces,
    )


def cosine_scaled_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    **kwargs: Any,
) -> Rewards:
    """TRL's: `accuracy_reward` scaled by length along a cosine, so that short right answers are worth most.

    Source: Yeo et al., Demystifying Long Chain-of-Thought Reasoning, 2502.03373, appendix C.1.

    Args:
        completions: Completions.
        solution: The data set's column of right answers.
        completion_ids: The completions' tokens.
        max_len: Length in tokens at which the cosine ends.
        min_value_wrong: Reward of a wrong completion of no length.
        max_value_wrong: Reward of a wrong completion of `max_len` or more.
        min_value_correct: Reward of a right completion of `max_len` or more.
        max_value_correct: Reward of a right completion of no length.
        **kwargs: What else TRL passes, unused.

    Raises:
        ConfigError: a setting is out of range, or math-verify is missing.
    """
    check_setting("max_len", max_len, max_len >= 1, "at least 1")
    require_package("math_verify", "get_cosine_scaled_reward", "tasks")
    settings = {
        "max_len": max_len,
        "min_value_wrong": min_value_wrong,
        "max_value_wrong": max_value_wrong,
        "min_value_correct": min_value_correct,
        "max_value_correct": max_value_correct,
    }
    return _made_by_trl(
        "get_cosine_scaled_reward", settings, completions, solution=solution, completion_ids=completion_ids
    )


TRL_REWARDS: dict[str, Callable[..., Rewards]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "get_soft_overlong_punishment": soft_overlong_punishment_reward,
    "get_repetition_penalty_reward": repetition_penalty_reward,
    "get_cosine_scaled_reward": cosine_scaled_reward,
}
"""By TRL's names. The functions are called what TRL calls what its factories make: metrics keep their names."""


def _of_trl(name: str, completions: Sequence[Completion], **arguments: Any) -> Rewards:
    if not completions:  # as when only the settings are checked: not worth the seconds that the import takes
        return []
    import trl.rewards

    return getattr(trl.rewards, name)(_messages(completions), **arguments)


def _made_by_trl(name: str, settings: dict[str, Any], completions: Sequence[Completion], **arguments: Any) -> Rewards:
    if not completions:
        return []
    import trl.rewards

    return getattr(trl.rewards, name)(**settings)(completions=_messages(completions), **arguments)


def _messages(completions: Sequence[Completion]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": completion_text(completion)}] for completion in completions]
