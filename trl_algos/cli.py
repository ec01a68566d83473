"""The command line: `trl-algos COMMAND ...`. Commands that only read a recipe answer without torch or TRL."""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

from trl_algos._version import __version__
from trl_algos.errors import ConfigError, HubError, RewardError, SamplingError, nearest, unknown_name

USAGE = """usage: trl-algos train RECIPE [--key value ...]     train as a recipe says; any setting can be overridden
       trl-algos check RECIPE [--key value ...] [--config_file FILE] [--num_processes N]
                                                    all that is wrong with it, without loading model or data; for a
                                                    launch by that config of accelerate's, with so many processes
       trl-algos explain RECIPE [--key value ...]   the objective in words, every setting and where it comes from
       trl-algos explain --diff RECIPE RECIPE       what two recipes do not have in common
       trl-algos list [ALGORITHM ...]               the algorithms; of those named, their defaults too
       trl-algos list rewards                       reward functions that a recipe can name, and their settings
       trl-algos list KEY ...                       what settings mean, their types and defaults
       trl-algos init ALGORITHM [FILE]              write a starter recipe
       trl-algos plot RUN ... [--output FILE] [--metrics NAME ...] [--by KEY ...]
                                                    curves of runs, those that differ in the seed as a band
       trl-algos merge RUN OUT [--dtype NAME] [--base MODEL] [--trust_remote_code]
                                                    a saved adapter and its base model as one model
       trl-algos push RUN [--repo ID] [--private] [--timeout SECONDS]
                                                    a finished run to the Hub, or again where a push broke off
       trl-algos --version

`--debug` on its own shows where an error comes from. Also as `python -m trl_algos`, and under
`accelerate launch -m trl_algos train RECIPE`; `--config RECIPE` works as well."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0: done. 1: a run stopped by an error of its own. 2: the input cannot run; nothing was written. 130: interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or {"-h", "--help"} & set(words):
        _write(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        _write(__version__)
        return 0
    debug, words = _debug_flag(words)
    if not words or words[0] not in _COMMANDS:
        name = words[0] if words else "--debug"
        return _refuse([f"{name!r} is not a command; there are {', '.join(_COMMANDS)}.{nearest(name, _COMMANDS)}"])
    try:
        return _COMMANDS[words[0]](words[1:])
    except BrokenPipeError:  # the reader has seen enough: `trl-algos list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        return _exit_code(words[0], error)


def _exit_code(command: str, error: BaseException) -> int:
    """Say what went wrong, where it is something that a user can act on; raise the error where it is not."""
    if isinstance(error, ConfigError):
        return _refuse(error.problems)
    if isinstance(error, HubError) and command != "train":
        return _refuse([f"{command}: {error}"])
    if isinstance(error, HubError | RewardError | SamplingError | FloatingPointError):
        return _stop(str(error))
    if isinstance(error, KeyboardInterrupt):
        _stop("interrupted")
        return 130
    # Files can be strange in ways that no check foresaw. In a run an error keeps its traceback: it may come late.
    if isinstance(error, OSError | RecursionError) and command != "train":
        return _refuse([f"{command}: {type(error).__name__}: {str(error)[:300]}"])
    raise error


def _debug_flag(words: list[str]) -> tuple[bool, list[str]]:
    """Whether `--debug` stands on its own; before a value it is the setting of that name."""
    for place, word in enumerate(words):
        next_word = words[place + 1] if place + 1 < len(words) else "--"
        if word == "--debug" and (next_word.startswith("--") or next_word in _COMMANDS or "." in next_word):
            return True, words[:place] + words[place + 1 :]
    return False, words


def _train(words: list[str]) -> int:
    from trl_algos.recipe.checks import checked_recipe
    from trl_algos.recipe.doubts import recipe_doubts
    from trl_algos.recipe.reading import placed

    recipe = checked_recipe(*_recipe_and_words("train", words))
    for doubt in recipe_doubts(recipe):
        _complain(f"trl-algos: {doubt}")
        warnings.filterwarnings("ignore", message=re.escape(doubt))  # said once; scripts are warned by the config
    # Before torch is imported: it reads OMP_NUM_THREADS and its like only then.
    os.environ.update(recipe.environment)
    _leave_out_renamings()
    from trl_algos.recipe.arguments import named
    from trl_algos.run.training import train

    try:
        train(recipe)
    except ConfigError as error:
        raise ConfigError(
            [placed(named(message, recipe.kind), recipe.written) for message in error.problems]
        ) from error
    return 0


def _check(words: list[str]) -> int:
    from trl_algos.recipe.checks import checked_recipe
    from trl_algos.recipe.launch_file import read_launch
    from trl_algos.recipe.summary import summary

    path, words = _recipe_and_words("check", words)
    processes, words = _taken(words, "--num_processes")
    file, words = _taken(words, "--config_file")
    count = _count("--num_processes", processes)
    recipe = checked_recipe(path, words, count, None if file is None else read_launch(file, count))
    _write("\n".join(summary(recipe)))
    return 0


def _explain(words: list[str]) -> int:
    from trl_algos.recipe.explain import difference, explanation
    from trl_algos.recipe.reading import read_recipe

    if "--diff" in words:
        words = [word for word in words if word != "--diff"]
        if len(words) != 2:
            raise ConfigError(["explain: `--diff` takes two recipes, and nothing else."])
        _write("\n".join(difference(read_recipe(words[0]), read_recipe(words[1]))))
    else:
        _write("\n".join(explanation(read_recipe(*_recipe_and_words("explain", words)))))
    return 0


def _list(words: list[str]) -> int:
    from trl_algos.recipe.explain import described
    from trl_algos.recipe.listing import all_algorithms, one_algorithm
    from trl_algos.recipe.schema import every_key

    if words == ["rewards"]:
        return _list_rewards()
    if words and all(word in every_key() for word in words):
        lines = [described(word) for word in words]
    else:
        _known_algorithms("list", words)
        lines = [line for word in words for line in one_algorithm(word)] or list(all_algorithms())
    _write("\n".join(lines))
    return 0


def _list_rewards() -> int:
    from trl_algos.rewards.spec import reward_names

    for reward in reward_names():
        _write(f"{reward.name:<30} {reward.summary}")
        if reward.settings:
            _write(f"{'':<30} settings: {reward.settings}")
    return 0


def _init(words: list[str]) -> int:
    from trl_algos.recipe.starter import write_starter

    if not 1 <= len(words) <= 2 or any(not word or word.startswith("-") for word in words):
        raise ConfigError(["init: name an algorithm, and a file if it is not to be ALGORITHM.yaml."])
    _known_algorithms("init", words[:1])
    path = write_starter(words[0], words[1] if len(words) == 2 else f"{words[0]}.yaml")
    _write(f"Wrote {path}. Next: trl-algos check {path}")
    return 0


def _plot(words: list[str]) -> int:
    from trl_algos.run.comparison import plot_arguments
    from trl_algos.run.plots import compare_runs

    arguments = plot_arguments(words)
    _write(f"Wrote {compare_runs(arguments.runs, arguments.output, arguments.metrics, arguments.by)}")
    return 0


def _leave_out_renamings() -> None:
    """TRL's and PEFT's use of what transformers will rename is nothing that a user could change."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")


def _merge(words: list[str]) -> int:
    dtype, words = _taken(words, "--dtype")
    base, words = _taken(words, "--base")
    trusts, words = "--trust_remote_code" in words, [word for word in words if word != "--trust_remote_code"]
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        options = ("--dtype", "--base", "--trust_remote_code")
        near = nearest(unknown[0], options)
        raise ConfigError(
            [f"merge: {unknown[0]!r} is no option, or lacks its value; there are {', '.join(options)}.{near}"]
        )
    if len(words) != 2 or not all(words):
        raise ConfigError(["merge: name the folder of a run or adapter, and a folder to write."])
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError([unknown_name("--dtype", dtype, _DTYPES)])
    _leave_out_renamings()
    from trl_algos.run.merging import MergeArguments, merge

    for line in merge(MergeArguments(words[0], words[1], dtype, base, trusts)):
        _write(line)
    return 0


_DTYPES = ("bfloat16", "float16", "float32")


def _push(words: list[str]) -> int:
    from trl_algos.run.pushing import push_arguments, push_run

    _write(f"Pushed: {push_run(push_arguments(words))}")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "check": _check,
    "explain": _explain,
    "list": _list,
    "init": _init,
    "plot": _plot,
    "merge": _merge,
    "push": _push,
}


def _known_algorithms(command: str, words: list[str]) -> None:
    from trl_algos.settings.kinds import all_keys

    known = all_keys()
    problems = [
        f"{command}: {word}: no such algorithm; there are {', '.join(known)}.{nearest(word, known)}"
        for word in words
        if word not in known
    ]
    if problems:
        raise ConfigError(problems)


def _recipe_and_words(command: str, words: list[str]) -> tuple[str, list[str]]:
    """The recipe, named first or by `--config`, and the other words.

    Raises:
        ConfigError: no recipe is named, or two are.
    """
    path, rest = _taken(words, "--config")
    if rest and not rest[0].startswith("--"):
        if path is not None:
            raise ConfigError([f"{command}: {rest[0]!r} and `--config {path}` are two recipes; name one."])
        path, rest = rest[0], rest[1:]
    if not path:
        raise ConfigError([f"{command}: name a recipe: `trl-algos {command} RECIPE [--key value ...]`."])
    return path, rest


def _taken(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """Value of an option that is no setting of the recipe, and the other words."""
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            return words[place + 1], words[:place] + words[place + 2 :]
        if word.startswith(f"{option}="):
            return word.partition("=")[2], words[:place] + words[place + 1 :]
    return None, words


def _count(option: str, text: str | None) -> int | None:
    if text is not None and (not text.isdecimal() or int(text) < 1):
        raise ConfigError([f"`{option}`: {text!r} must be a whole number of at least 1."])
    return None if text is None else int(text)


def _refuse(problems: list[str]) -> int:
    _complain("trl-algos: cannot run:", *(f"  {problem}" for problem in problems))
    return 2


def _stop(reason: str) -> int:
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"trl-algos: stopped{'' if rank == '0' else f' (process {rank})'}: {reason}\n")
    return 1


def _complain(*lines: str) -> None:
    """To standard error, once for all processes of a launch."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("\n".join(lines) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
