"""Training for stability: recipes, one trainer on Accelerate, exact resume, figures with proved bounds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.train.config import Recipe, bundled, read_recipe
    from equipoise.train.loop import Diverged, Progress, Result, run_recipe

__all__ = ["Diverged", "Progress", "Recipe", "Result", "bundled", "read_recipe", "run_recipe"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'equipoise.train' has no attribute {name!r}")
    home = "config" if name in ("Recipe", "bundled", "read_recipe") else "loop"
    return getattr(importlib.import_module(f"equipoise.train.{home}"), name)
