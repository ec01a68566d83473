"""What a run sampled and what became of it, for the console; `training_summary.json` has all of it."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table


def sampling_table(sampling: dict[str, Any]) -> Table:
    """A table of a few lines.

    Args:
        sampling: the totals, as `Accounts.table` gives them.
    """
    table = Table(title="Sampled in training")
    for heading, side in (("what", "left"), ("number", "right"), ("of it", "left")):
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    for what, number, part in _lines(sampling):
        table.add_row(what, number, part)
    return table


def _lines(sampling: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    rejected = {cause.replace("_", " "): n for cause, n in sampling["uninformative_groups"].items() if n}
    judged = sampling["informative_groups"] + sum(rejected.values())
    retried = sampling["retried_prompts"]
    yield "prompts", f"{sampling['prompts']:,}", f"and {retried:,} tried again" if retried else ""
    yield "completions", f"{sampling['completions']:,}", f"trained on: {sampling['trained']['completions']:,}"
    wasted = f"of groups that teach nothing: {sampling['uninformative_tokens']:,}" if judged else ""
    yield "tokens", f"{sampling['tokens']:,}", wasted
    if judged:
        yield "groups that teach", f"{sampling['informative_groups']:,}", f"{sampling['acceptance_rate']:.0%} of all"
        yield "others", f"{sum(rejected.values()):,}", ", ".join(f"{cause} {n:,}" for cause, n in rejected.items())
    seconds = f"of groups that teach nothing: {sampling['generation_seconds_on_uninformative']:.0f}" if judged else ""
    yield "seconds of generation", f"{sampling['generation_seconds']:.0f}", seconds
    rounds, short = sampling["rounds_per_batch"], sampling["short_batches"]
    if rounds["most"] > 1 or short:
        lacking = f"; groups missing: {sampling['missing_groups']:,}" if short else ""
        yield "rounds per batch", f"{rounds['mean']:.2f}", f"at most {rounds['most']}{lacking}"
