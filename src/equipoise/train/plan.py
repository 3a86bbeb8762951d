"""What a recipe would cost, without running it: parameters, steps, and the time of a step put together from its parts.

At the scale of a paper a single step takes minutes of one core, nearly all of it in layers of a few kinds: seventy equal
convolutions, fifteen equal dense layers. So nothing is measured twice: weights are made once for every *kind* of layer and
counted as often as there are such layers; the network is passed through forward only, with few examples and with one layer
standing for all of its kind, and the way back is counted as twice the way forward.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.checkpoints import load_factory
from equipoise.core.errors import InputError
from equipoise.nn.effective import Effective
from equipoise.nn.layers import Weighted
from equipoise.nn.models import MODELS, input_shape
from equipoise.nn.orthogonal.frame import SizedConv2d
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
    kinds = share_kinds(model)
    if x is None:
        require_fit(model, parts.train.source, recipe.model.factory)
        x, y = parts.train.batch(torch.arange(MORE) % len(parts.train))
    task = fitted(from_table(LOSSES, recipe.loss, "loss"), model)
    step, basis = _step(model, task, recipe.optimizer, kinds, parameters, x, y, recipe.batch_size)
    steps = recipe.epochs * max(1, count // recipe.batch_size)
    return Plan(recipe.name, parameters, count, steps, step, steps * step / 3600, where, recipe.published, basis)


def share_kinds(model: nn.Module) -> Counter[Effective]:
    """Put the first layer of every kind (class, arguments, shapes) in the place of all others; how many each stands for."""
    first: dict[Any, Effective] = {}
    counts: Counter[Effective] = Counter()
    for parent, name, layer in list(_layers(model)):
        kind = type(layer), repr(layer), tuple(t.shape for t in layer.state_dict().values())
        counts[first.setdefault(kind, layer)] += 1
        setattr(parent, name, first[kind])
    return counts if counts or not isinstance(model, Effective) else Counter([model])


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Effective]]:
    """Layers with effective weights, each once, and where they stand."""
    seen = set()
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, Effective) and not isinstance(parent, Effective) and id(child) not in seen:
                seen.add(id(child))
                yield parent, name, child


def _step(
    model: nn.Module, task: Task, chosen: Optimizer, kinds: Counter[Effective], parameters: int, x: Tensor, y: Tensor, batch: int
) -> tuple[float, str]:  # fmt: skip
    """Seconds of a step with `batch` examples, and what they rest on."""
    model.eval()
    weights = {layer: _construction(layer) for layer in kinds if layer.constructions()}
    for layer in kinds:
        if isinstance(layer, SizedConv2d) and _smaller(layer) is not None:
            _unmade(layer)

    def forward(count: int) -> float:
        with torch.no_grad():
            return _seconds(lambda: task.loss(model(x[:count]), y[:count]))

    if len(weights) < len(kinds):  # layers whose weights depend on the size of the image
        forward(1)
        weights |= {layer: _construction(layer) for layer in kinds if layer not in weights}
    one = forward(1)
    more = None if one > LONG else forward(MORE)
    per_example = one if more is None else max(0.0, (more - one) / (MORE - 1))
    moved = [p for p in model.parameters() if p.requires_grad]
    for p in moved:
        p.grad = torch.zeros_like(p)
    update = _seconds(build_optimizer(chosen, model).step) * parameters / max(1, sum(p.numel() for p in moved))
    step = sum(kinds[layer] * seconds for layer, seconds in weights.items()) + update
    step += PASSES * (max(0.0, one - per_example) + batch * per_example)
    large = sum(1 for layer in kinds if _smaller(layer) is not None)
    part = f", {large} of them large ones measured with fewer channels" if large else ""
    made = f"the weights of one layer of each kind ({len(kinds)} of {kinds.total()} layers{part}), " if kinds else ""
    seen = "1 example" if more is None else f"1 and {MORE} examples"
    return step, f"{made}forward passes of {seen}, the way back counted as {PASSES - 1} of them; no step was taken"


def _construction(layer: Effective) -> float:
    """Seconds to make the weights of a layer and to bring gradients back through that; the weights are kept.

    Large layers are measured on a smaller one with the same arguments and the method's defaults: the work grows with the third
    power of the channels, and with the longer side. The weights kept are then zero, which costs as much to apply.
    """
    smaller = _smaller(layer)
    if smaller is not None:
        if isinstance(layer, Weighted):
            _stand_in(layer, (layer.raw.detach().new_zeros(layer.geometry.shape),))
        elif isinstance(layer, SizedConv2d) and isinstance(smaller[0], SizedConv2d):
            for size in layer.sizes():
                smaller[0].effective_at(size)
        return _construction(smaller[0]) * smaller[1]

    def once() -> None:
        for made in layer.constructions():
            values = made._computed()
            graph = [v for v in values if v.requires_grad]
            torch.autograd.backward(graph, [torch.ones_like(v) for v in graph])
            _stand_in(made, tuple(v.detach() for v in values))

    return _seconds(once)


def _stand_in(layer: Effective, values: tuple[Tensor, ...]) -> None:
    """Let evaluation take these tensors for the effective ones: of a network that is built to be timed and thrown away."""
    layer._kept = tuple(t.detach().clone() for t in (*layer.parameters(), *layer.buffers())), values


def _unmade(layer: SizedConv2d) -> None:
    """Let a layer that is built to be timed and thrown away have zeros for its weights, in the shapes an image gives them."""
    shapes = copy.deepcopy(layer).to("meta").compute_at

    def zeros(size: tuple[int, int]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(value.shape, dtype=value.dtype) for value in shapes(size))

    vars(layer)["compute_at"] = zeros


def _smaller(layer: Effective) -> tuple[Effective, float] | None:
    """A layer of the same kind with less work, and how much less; None where it is small enough."""
    if isinstance(layer, Weighted):
        shape, groups, settings = layer.geometry.shape, layer.geometry.groups, dict(layer.settings)
    elif isinstance(layer, SizedConv2d):
        shape, groups, settings = layer.frame.plain.shape, layer.frame.groups, layer.settings()
    else:
        return None
    dense = layer.plain_type is nn.Linear
    if groups > 1 or min(shape[:2]) < (TALL if dense else WIDE):
        return None
    names = ("in_features", "out_features") if dense else ("in_channels", "out_channels")
    part = FREQUENCIES_PART if isinstance(layer, SizedConv2d) else PART
    sizes = [settings[name] // part for name in names]
    few = [min(n, ASPECT * min(sizes)) if dense else n for n in sizes]
    smaller = cast(Any, type(layer))(**settings | dict(zip(names, few, strict=True)))
    return smaller, part**3 * max(sizes) / max(few)


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
