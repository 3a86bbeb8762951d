"""Training for stability: recipes, one trainer on Accelerate, exact resume, figures with proved bounds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from equipoise.core.errors import InputError

if TYPE_CHECKING:
    from equipoise.train.loop import Diverged
    from equipoise.train.reading import bundled, read_recipe
    from equipoise.train.recipe import Recipe
    from equipoise.train.run import Progress, Result, run_recipe

__all__ = ["Diverged", "Progress", "Recipe", "Result", "bundled", "read_recipe", "run_recipe"]

_HOME = {
    "Diverged": "loop",
    "Progress": "run",
    "Recipe": "recipe",
    "Result": "run",
    "bundled": "reading",
    "read_recipe": "reading",
    "run_recipe": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'equipoise.train' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"equipoise.train.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name in ("pydantic", "yaml"):
            raise InputError(f"training needs {error.name}: pip install 'equipoise[train]'") from error
        raise
