"""The metric that `metric_for_best_model` names, among those that an evaluation has."""

from collections.abc import Mapping
from typing import Any

from trl_algos.errors import ConfigError, nearest

_NO_QUALITY = ("runtime", "per_second", "preparation_time")


def check_best_metric(args: Any, metrics: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where an evaluation lacks the metric by which the best model is found.

    Args:
        args: with `metric_for_best_model`, which may leave out `eval_`.
        metrics: name -> value, of an evaluation.
    """
    name = args.metric_for_best_model
    key = name and f"eval_{name.removeprefix('eval_')}"
    if key is None or key in metrics:
        return
    found = [other for other in metrics if other.startswith("eval_") and not other.endswith(_NO_QUALITY)]
    raise ConfigError(
        [
            f"`metric_for_best_model`: {name!r} is no metric of this evaluation, which has "
            f"{', '.join(found) or 'none'}.{nearest(key, found)}"
        ]
    )
