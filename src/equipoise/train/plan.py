"""What a recipe would cost, without running it: parameters, steps, and the time of a step measured on two small batches."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checkpoints import load_factory
from equipoise.core.errors import InputError
from equipoise.nn.models import MODELS, input_shape
from equipoise.train.build import build_data, build_model, build_optimizer, from_table
from equipoise.train.losses import LOSSES
from equipoise.train.recipe import Recipe
from equipoise.train.task import Task, fitted

#: batches that the time of a step is measured with; it is a line through both
SMALL, LARGE = 2, 6


@dataclass(frozen=True)
class Plan:
    """What would run. `hours` is for this machine as it is now; `where` says what the number of examples rests on."""

    name: str
    parameters: int
    examples: int
    steps: int
    step_seconds: float
    hours: float
    where: str
    published: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def plan_recipe(recipe: Recipe) -> Plan:
    """Build the network, take a few steps on random inputs of its shape, and multiply.

    A step takes `a + b·n` seconds for n examples: a for the weights of 1-Lipschitz layers, b for the network; both from two small
    batches, processor time of one process. Where the data are not at hand, `data.examples` of the recipe is believed.

    >>> from equipoise.train import read_recipe
    >>> plan_recipe(read_recipe("sll-sr-digits")).steps
    660
    """
    torch.manual_seed(recipe.seed)
    try:
        parts = build_data(recipe.data)
    except InputError as error:
        if recipe.data.examples is None:
            raise
        model, shape = _without_data(recipe)
        count, where = recipe.data.examples, f"the recipe; the data are not at hand ({error})"
    else:
        model, _ = build_model(recipe.model, parts.train.source)
        shape, count, where = tuple(parts.train.source.input_shape), len(parts.train), "the data"
    task = fitted(from_table(LOSSES, recipe.loss, "loss"), model)
    steps = recipe.epochs * max(1, count // recipe.batch_size)
    optimizer = build_optimizer(recipe.optimizer, model)
    few, more = (_seconds(model, task, optimizer, shape, n) for n in (SMALL, LARGE))
    per_example = max(0.0, (more - few) / (LARGE - SMALL))
    step = max(0.0, few - SMALL * per_example) + recipe.batch_size * per_example
    parameters = sum(p.numel() for p in model.parameters())
    return Plan(recipe.name, parameters, count, steps, step, steps * step / 3600, where, recipe.published)


def _without_data(recipe: Recipe) -> tuple[nn.Module, tuple[int, ...]]:
    """The network from the recipe's own arguments, and the shape of its inputs."""
    name = recipe.model.factory.rpartition(":")[2]
    if name not in MODELS:
        raise InputError(f"the shape of the inputs of {recipe.model.factory} is not known without the data")
    return load_factory(recipe.model.factory, recipe.model.arguments).train(), input_shape(
        name, **recipe.model.arguments
    )


def _seconds(
    model: nn.Module, task: Task, optimizer: torch.optim.Optimizer, shape: tuple[int, ...], count: int
) -> float:
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))
    return step_seconds(model, task, optimizer, x, torch.arange(count) % 2)


def step_seconds(
    model: nn.Module, task: Task, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int = 2
) -> float:
    """Processor seconds of a step, the smallest of several after one to warm up."""
    found = []
    for _ in range(steps + 1):
        began = time.process_time()
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()
        found.append(time.process_time() - began)
    return min(found[1:])
