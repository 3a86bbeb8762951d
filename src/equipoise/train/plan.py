"""What a recipe would cost, without running it: parameters, steps, and the time of a step put together from its parts.

At the scale of a paper a single step takes minutes of one core, nearly all of it in layers of a few kinds: seventy equal
convolutions, fifteen equal dense layers. So nothing is measured twice: weights are made once for every *kind* of layer and
counted as often as there are such layers; the network is passed through forward only, with few examples and with one layer
standing for all of its kind, and the way back is counted as twice the way forward.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.checkpoints import load_factory
from equipoise.core.errors import InputError
from equipoise.nn.models import MODELS, input_shape
from equipoise.train.build import build_data, build_optimizer, from_table, made_for, require_fit
from equipoise.train.losses import LOSSES
from equipoise.train.recipe import Optimizer, Recipe
from equipoise.train.task import Task, fitted

#: the forward pass is measured with one example and with so many; it is a line through both
MORE = 5
#: what took less processor time than this, in seconds, is measured once more: the first call warms up
BRIEF = 0.2
#: a forward pass of one example that took longer than this is not measured with more
LONG = 1.0
#: convolutions of at least so many channels, and dense layers of so many features, are measured with a fourth of them …
WIDE, TALL, PART = 256, 1024, 4
#: … those with a matrix per frequency with half of them: many matrices of a quarter of the size are slower than their work says
FREQUENCIES_PART = 2
#: … and a dense layer with at most so many times the features of its shorter side on the longer one
ASPECT = 4
#: a step's passes through the network, in units of the forward pass: forward, gradients of inputs, gradients of weights
PASSES = 3


@dataclass(frozen=True)
class Plan:
    """What would run. `hours` is for this machine as it is now; `where` and `basis` say what the figures rest on."""

    name: str
    parameters: int
    examples: int
    steps: int
    step_seconds: float
    hours: float
    where: str
    published: str
    basis: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def plan_recipe(recipe: Recipe) -> Plan:
    """Build the network, measure the parts of a step, and multiply; no step is taken.

    A step takes `a + b·n` seconds of one process for n examples: a for the weights of 1-Lipschitz layers and the optimizer, b for
    the network. Where the data are not at hand, `data.examples` of the recipe is believed, and inputs are random.

    >>> from equipoise.train import read_recipe
    >>> plan_recipe(read_recipe("sll-sr-digits")).steps
    660
    """
    torch.manual_seed(recipe.seed)
    x, y = None, torch.arange(MORE) % 2
    try:
        parts = build_data(recipe.data)
    except InputError as error:
        if recipe.data.examples is None:
            raise
        model, shape = _without_data(recipe)
        x = torch.rand(MORE, *shape, generator=torch.Generator().manual_seed(0))
        count, where = recipe.data.examples, f"the recipe; the data are not at hand ({error})"
    else:
        with Hurried():
            model, _ = made_for(recipe.model, parts.train.source)
        count, where = len(parts.train), "the data"
    parameters = sum(p.numel() for p in model.parameters())
    if x is None:
        require_fit(model, parts.train.source, recipe.model.factory)
        x, y = parts.train.batch(torch.arange(MORE) % len(parts.train))
    task = fitted(from_table(LOSSES, recipe.loss, "loss"), model)
    step, basis = _step(model, task, recipe.optimizer, parameters, x, y, recipe.batch_size)
    steps = recipe.epochs * max(1, count // recipe.batch_size)
    return Plan(recipe.name, parameters, count, steps, step, steps * step / 3600, where, recipe.published, basis)


def _step(
    model: nn.Module, task: Task, chosen: Optimizer, parameters: int, x: Tensor, y: Tensor, batch: int
) -> tuple[float, str]:
    """Seconds of a step with `batch` examples, and what they rest on."""
    model.train()

    def passes(count: int) -> float:
        return _seconds(lambda: task.loss(model(x[:count]), y[:count]).backward())

    one = passes(2)
    more = None if one > LONG else passes(MORE)
    per_example = one / 2 if more is None else max(0.0, (more - one) / (MORE - 2))
    moved = [p for p in model.parameters() if p.requires_grad]
    update = _seconds(build_optimizer(chosen, model).step) * parameters / max(1, sum(p.numel() for p in moved))
    step = max(0.0, one - 2 * per_example) + batch * per_example + update
    seen = "2 examples" if more is None else f"2 and {MORE} examples"
    return step, f"forward and backward passes of {seen}; no step was taken"


def _seconds(work: Callable[[], object]) -> float:
    """Processor seconds, the smaller of two where one was brief."""
    found: list[float] = []
    while len(found) < 2 and (not found or found[0] < BRIEF):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def _without_data(recipe: Recipe) -> tuple[nn.Module, tuple[int, ...]]:
    """The network from the recipe's own arguments, and the shape of its inputs."""
    name = recipe.model.factory.rpartition(":")[2]
    if name not in MODELS:
        raise InputError(f"the shape of the inputs of {recipe.model.factory} is not known without the data")
    with Hurried():
        model = load_factory(recipe.model.factory, recipe.model.arguments)
    return model, input_shape(name, **recipe.model.arguments)


class Hurried(TorchDispatchMode):
    """For networks that are built only to be timed: large weights start from repeated numbers, and none is made orthogonal.

    For the largest networks of the recipes that would take more than a minute, and no figure of a plan depends on it.
    """

    #: random numbers drawn for a tensor; a prime, so that rows differ
    DRAWN = 1_000_003

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Factors of a QR or SVD factorisation that have the right shapes, one of them the matrix itself."""
        aten, A = torch.ops.aten, cast(Any, args[0] if args else None)
        if func in (aten.normal_.default, aten.uniform_.default) and A.numel() > self.DRAWN and A.is_contiguous():
            flat = A.view(-1)
            func(flat[: self.DRAWN], *args[1:], **(kwargs or {}))
            for begin in range(self.DRAWN, A.numel(), self.DRAWN):
                flat[begin : begin + self.DRAWN] = flat[: min(self.DRAWN, A.numel() - begin)]
            return A
        if func in (aten.linalg_qr.default, aten._linalg_svd.default):
            n, rest = min(A.shape[-2:]), A.shape[:-2]
            one, tall = torch.eye(n, dtype=A.dtype).expand(*rest, n, n), n == A.shape[-1]
            if func is aten._linalg_svd.default:
                return (A, A.new_ones(*rest, n), one) if tall else (one, A.new_ones(*rest, n), A)
            if tall:
                return A, one
        return func(*args, **(kwargs or {}))


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
