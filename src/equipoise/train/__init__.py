"""Training for stability: recipes, one trainer on Accelerate, exact resume, figures with proved bounds."""

from equipoise.train.config import Recipe, bundled, read_recipe
from equipoise.train.loop import Diverged, Progress, Result, run_recipe

__all__ = ["Diverged", "Progress", "Recipe", "Result", "bundled", "read_recipe", "run_recipe"]
