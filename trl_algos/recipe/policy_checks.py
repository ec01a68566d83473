"""What can be found wrong with a recipe of an algorithm that samples, beyond what all recipes share."""

from collections.abc import Iterator, Sequence

from trl_algos.errors import counted
from trl_algos.models.reward_folder import normalization_problems, reward_model_problems
from trl_algos.recipe.critic_checks import critic_problems
from trl_algos.recipe.model_checks import model_folder
from trl_algos.recipe.reading import Recipe
from trl_algos.recipe.sampling import dynamic_sampling_problems
from trl_algos.rewards.spec import reward_problems
from trl_algos.settings.trainer_checks import steps_per_generation


def policy_problems(recipe: Recipe, columns: Sequence[str] | None) -> Iterator[str]:
    """A message for each thing wrong with rewards, critic, dynamic sampling and sizes.

    Args:
        recipe: the recipe.
        columns: of the data; None where they are not known.
    """
    values = recipe.values
    key = "reward_model_name_or_path"
    if values[key] is not None:
        yield from reward_model_problems(key, values[key], values["trust_remote_code"])
    if values["use_vllm"] and values["vllm_mode"] == "colocate" and values["load_in_8bit"]:
        yield "`load_in_8bit`: true, which vLLM cannot have with `vllm_mode: colocate`; take `load_in_4bit`."
    yield from critic_problems(values, model_folder(values["model_name_or_path"]))
    yield from _reward_problems(recipe, columns)
    yield from dynamic_sampling_problems(values, columns)
    yield from _size_problems(recipe) if values["num_generations"] else ()


def _reward_problems(recipe: Recipe, columns: Sequence[str] | None) -> Iterator[str]:
    specs, model = recipe.values["reward_funcs"], recipe.values["reward_model_name_or_path"]
    if not specs and model is None:
        yield "`reward_funcs`: not set; give the name or path of at least one reward function."
        return
    if specs:
        yield from reward_problems(specs, columns)
    weights, count = recipe.values["reward_weights"], len(specs or []) + (model is not None)
    if weights is not None and len(weights) != count:
        yield f"`reward_weights`: {len(weights)} weights for {count} rewards; give one for each."
    if recipe.values["reward_normalization"]:
        yield from normalization_problems(model)


def _size_problems(recipe: Recipe) -> Iterator[str]:
    """Generated data of too few prompts for one generation batch, or for all processes."""
    values, processes = recipe.values, recipe.num_processes
    sizes = values["dataset_parameters"] or {}
    batch = values["per_device_train_batch_size"] * processes * steps_per_generation(values, processes)
    needed, size = batch // values["num_generations"], sizes.get("size")
    if isinstance(size, int) and size < needed:
        prompts = counted(needed, "prompt")
        yield f"`dataset_parameters`: size {size} is too small: one generation batch takes {prompts}."
    held_out, test_size = values["held_out_prompts"], sizes.get("test_size")
    if isinstance(test_size, int) and test_size < held_out:
        yield f"`held_out_prompts`: {held_out}, but `dataset_parameters` make {test_size} test prompts."
    if 0 < held_out < processes:
        yield f"`held_out_prompts`: {held_out}, but each of {processes} processes needs one."
