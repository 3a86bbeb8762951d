"""Training for stability: recipes, one trainer on Accelerate, exact resume, figures with proved bounds."""

from equipoise.train.build import build_data
from equipoise.train.config import Recipe, bundled, read_recipe
from equipoise.train.loop import Diverged, Progress, Result, run_recipe
from equipoise.train.losses import LOSSES, OBJECTIVES
from equipoise.train.robustify import plan_robustify, robustify
from equipoise.train.terms import AUGMENTATIONS, PROJECTIONS, REGULARIZERS

__all__ = [
    "AUGMENTATIONS", "LOSSES", "OBJECTIVES", "PROJECTIONS", "REGULARIZERS", "Diverged", "Progress", "Recipe",
    "Result", "build_data", "bundled", "plan_robustify", "read_recipe", "robustify", "run_recipe",
]  # fmt: skip
