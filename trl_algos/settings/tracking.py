"""Whether what `report_to` names can be reported to, told before a run starts; no heavy import."""

import importlib.util
from collections.abc import Sequence

from trl_algos.errors import unknown_name

TRACKERS: dict[str, tuple[tuple[str, ...], str]] = {
    "azure_ml": (("azureml",), "azureml-sdk"),
    "clearml": (("clearml",), "clearml"),
    "codecarbon": (("codecarbon",), "codecarbon"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "dagshub": (("dagshub",), "dagshub mlflow"),
    "dvclive": (("dvclive",), "dvclive"),
    "flyte": (("flytekit",), "flytekit"),
    "kubeflow": ((), ""),
    "mlflow": (("mlflow",), "mlflow"),
    "neptune": (("neptune",), "neptune"),
    "swanlab": (("swanlab",), "swanlab"),
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "trackio": (("trackio",), "trackio"),
    "wandb": (("wandb",), "wandb"),
}
"""Name in `report_to` -> modules of which one must be there, and what pip installs. Kubeflow's needs no package."""

_WORDS = ("all", "none")


def report_to_problems(names: str | Sequence[str] | None) -> list[str]:
    """What keeps a run from reporting to `names`.

    Args:
        names: The setting `report_to`: one name, several, or `all` (those installed) or `none` alone.

    Returns:
        One message for each name that is unknown or whose package is not installed.
    """
    names = [names] if isinstance(names, str) else list(names or ())
    if len(names) == 1 and names[0] in _WORDS:
        return []
    return [problem for name in names for problem in _problems(name)]


def _problems(name: str) -> list[str]:
    if name in _WORDS:
        return [f"`report_to`: {name!r} stands alone or not at all, not in a list with others."]
    if name not in TRACKERS:
        return [unknown_name("report_to", name, [*_WORDS, *TRACKERS])]
    modules, packages = TRACKERS[name]
    if not modules or any(map(_installed, modules)):
        return []
    return [f"`report_to`: {name!r} needs a package that is not installed; `pip install {packages}`, or `none`."]


def _installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    # A mere folder, such as the `wandb` that runs leave behind, is found too, but has no source.
    return spec is not None and (spec.origin is not None or module == "azureml")
