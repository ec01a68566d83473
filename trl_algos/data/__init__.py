"""Data that a recipe can name: bundled and generated tasks, files, folders and the Hub."""

from trl_algos.data.arithmetic_task import (
    BUNDLED_MODELS,
    SOURCES,
    SPLITS,
    Split,
    arithmetic,
    arithmetic_preferences,
    bundled_model_path,
    is_held_out,
)

__all__ = [
    "BUNDLED_MODELS",
    "SOURCES",
    "SPLITS",
    "Split",
    "arithmetic",
    "arithmetic_preferences",
    "bundled_model_path",
    "is_held_out",
]
