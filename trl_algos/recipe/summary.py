"""What a recipe without problems will do, in a few lines: sizes of a step, doubts, and memory."""

from trl_algos.errors import ConfigError, counted
from trl_algos.models.memory import describe, estimate
from trl_algos.objective.facts import passes
from trl_algos.recipe import schema
from trl_algos.recipe.doubts import recipe_doubts
from trl_algos.recipe.model_checks import model_folder
from trl_algos.recipe.reading import Recipe
from trl_algos.settings.critic import critic_stands_alone
from trl_algos.settings.kinds import row_of
from trl_algos.settings.trainer_checks import completions_per_update, steps_per_generation


def summary(recipe: Recipe) -> list[str]:
    """What a recipe without problems will do: sizes of a step, and the memory of weights where they lie here."""
    values, processes = recipe.values, recipe.num_processes
    step = _sampled(recipe) if recipe.kind == "policy" else _compared(recipe)
    lines = [
        f"{recipe.path}: no problem found. {row_of(values['algorithm']).title}.",
        f"  {counted(processes, 'process')}, {step}; output in {values['output_dir']}.",
        *([f"  {_CRITIC_ALONE}"] if recipe.kind == "policy" and critic_stands_alone(values) else []),
        *(f"  Doubt: {message}" for message in recipe_doubts(recipe)),
    ]
    folder = model_folder(values["model_name_or_path"])
    if values["optim"] == schema.COMPUTED:
        values = {**values, "optim": "adamw_torch"}  # fused or not, the states are the same
    if folder is None:
        return [*lines, "  Memory: not estimated, since the model does not lie here."]
    try:
        memory = describe(estimate(folder, values, processes, recipe.kind))
    except ConfigError as error:  # such as weights that are no safetensors, which train all the same
        memory = [f"Memory: not estimated. {' '.join(error.problems)}"]
    return [*lines, *(f"  {line}" for line in memory)]


_CRITIC_ALONE = (
    "The critic alone is trained, and the policy stays as it is: `critic_warmup_steps` is all of `max_steps`. Start "
    "the next run from it with `critic_model_name_or_path` on this one's folder `critic`."
)


def _sampled(recipe: Recipe) -> str:
    rows = completions_per_update(recipe.values, recipe.num_processes)
    prompts = rows // recipe.values["num_generations"]
    return (
        f"{counted(rows, 'completion')} of {counted(prompts, 'prompt')} sampled at a time, "
        f"{counted(_optimizer_steps(recipe), 'optimizer step')} on them"
    )


def _compared(recipe: Recipe) -> str:
    values = recipe.values
    micro = values["per_device_train_batch_size"] * recipe.num_processes
    pairs = counted(micro * values["gradient_accumulation_steps"], "pair")
    length = values["max_length"]
    what = "cut to" if recipe.kind == "preference" else "left out where a side is longer than"
    limit = "of any length" if length is None else f"{what} {length} tokens"
    return f"{pairs} per optimizer step, {limit}"


def _optimizer_steps(recipe: Recipe) -> int:
    values = recipe.values
    steps = steps_per_generation(values, recipe.num_processes) * passes(values)
    return max(1, int(steps // values["gradient_accumulation_steps"]))
