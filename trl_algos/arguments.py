"""The argument classes of TRL's scripts, built from a recipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from accelerate import ParallelismConfig
from trl import DatasetMixtureConfig, ModelConfig

from trl_algos.config import PolicyConfig
from trl_algos.errors import ConfigError
from trl_algos.recipe import Recipe
from trl_algos.run_arguments import RunArguments


@dataclass
class Arguments:
    """What a recipe says, as the classes that TRL's functions take."""

    run: RunArguments
    policy: PolicyConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig


def build(recipe: Recipe) -> Arguments:
    """The arguments of a recipe.

    Raises:
        ConfigError: TRL or transformers refuse a setting.
    """
    problems: list[str] = []
    policy = recipe.part("policy")
    if policy.get("parallelism_config") is not None:
        with _refusals("parallelism_config", problems):
            policy["parallelism_config"] = ParallelismConfig(**policy["parallelism_config"])
    built = {}
    for part, cls in (("run", RunArguments), ("model", ModelConfig), ("mixture", DatasetMixtureConfig)):
        with _refusals(None, problems):
            built[part] = cls(**recipe.part(part))
    with _refusals(None, problems):
        built["policy"] = PolicyConfig(**policy)
    if problems:
        raise ConfigError(problems)
    return Arguments(**built)


@contextmanager
def _refusals(key: str | None, problems: list[str]) -> Iterator[None]:
    """Collects what is refused: TRL's and transformers' own checks raise whatever comes."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
    except Exception as error:
        problems.append(f"`{key}`: {error}" if key else f"{error}")
