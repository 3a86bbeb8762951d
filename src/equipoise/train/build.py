"""From a recipe to the things it names: data, network, optimizer."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from equipoise.checkpoints import load_factory, load_weights
from equipoise.core.errors import InputError, did_you_mean, one_line
from equipoise.core.imports import resolve
from equipoise.optim.muon import Muon, add_lookahead
from equipoise.train.config import Data, Model, Optimizer, Recipe, fill_in
from equipoise.train.randomness import data_order, generator


class Source(Protocol):
    """What a trainer needs of a dataset (`equipoise.data.Dataset` has it).

    A source may also have `facts` (arguments that a network wants to know) and `real_shape` (the shape of one input as a bound
    sees it, where inputs are tokens).
    """

    @property
    def num_classes(self) -> int:
        """How many labels there are."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""

    def __len__(self) -> int: ...

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions."""

    def fingerprint(self) -> str:
        """A digest of the content."""


@dataclass(frozen=True)
class Part:
    """Some examples of a dataset."""

    source: Source
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions of the part."""
        return self.source.batch(self.indices[positions])

    def order(self, seed: int, epoch: int) -> Tensor:
        """The positions of an epoch, in the order they are learnt in."""
        return data_order(seed, epoch, len(self))

    def fingerprint(self) -> str:
        """Of the dataset."""
        return self.source.fingerprint()


@dataclass(frozen=True)
class Mixed(Part):
    """Some examples of a dataset and, to every one of them, `ratio` examples of another: an epoch has both, shuffled.

    The epochs go through the other dataset one part after the other, in a seeded order, and start over when it ends.
    """

    extra: Source
    ratio: float

    @property
    def added(self) -> int:
        """How many of the other examples an epoch has."""
        return round(self.ratio * len(self.indices))

    def __len__(self) -> int:
        return len(self.indices) + self.added

    def order(self, seed: int, epoch: int) -> Tensor:
        """All of the own examples, and the epoch's share of the others (positions from `len(indices)` on)."""
        own, count = len(self.indices), len(self.extra)
        start, stop = epoch * self.added, (epoch + 1) * self.added
        chunks = [torch.arange(own)]
        while start < stop:  # one round through the other dataset after the other, each in its own order
            end = min(stop, (start // count + 1) * count)
            order = torch.randperm(count, generator=generator(seed, "extra", start // count))
            chunks.append(own + order[start % count :][: end - start])
            start = end
        every = torch.cat(chunks)
        return every[data_order(seed, epoch, len(every))]

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions, own examples first."""
        own = positions < len(self.indices)
        x, y = self.source.batch(self.indices[positions.where(own, 0)])
        if not bool(own.all()):
            x[~own], y[~own] = self.extra.batch(positions[~own] - len(self.indices))
        return x, y

    def fingerprint(self) -> str:
        """Of both datasets."""
        return f"{self.source.fingerprint()} + {self.extra.fingerprint()}"


@dataclass(frozen=True)
class Parts:
    """The examples that are learnt, those measured every epoch, and those measured at the end."""

    train: Part
    validation: Part | None
    test: Part | None

    @property
    def measured(self) -> tuple[str, Part] | None:
        """What is measured every epoch: the held-out part, else the test split."""
        if self.validation is not None:
            return "validation", self.validation
        return ("test", self.test) if self.test is not None else None

    def fingerprint(self) -> str:
        """Of the training split and the test split."""
        return " ".join(p.fingerprint() for p in (self.train, self.test) if p is not None)


def build_data(data: Data) -> Parts:
    """The parts; which examples are held out or kept by a limit does not depend on the recipe's seed."""
    path = fill_in(data.path)
    whole = _load(path, data.train, data.reader)
    if whole.num_classes == 1:
        raise InputError(f"{path} holds one class only: a classifier needs at least two")
    order = torch.randperm(len(whole), generator=generator(0, "split"))[: data.limit]
    held = round(data.validation * len(order))
    if data.validation and not 0 < held < len(order):
        raise InputError(f"data.validation = {data.validation} of {len(order)} examples leaves one part empty")
    train = Part(whole, order[held:].sort().values)
    validation = Part(whole, order[:held].sort().values) if held else None
    test = None
    if data.test is not None:
        source = _load(path, data.test, data.reader)
        if source.input_shape != whole.input_shape:
            raise InputError(
                f"{path}: inputs of the split {data.test!r} have shape {source.input_shape}, those of {data.train!r} "
                f"{whole.input_shape}: one network cannot take both"
            )
        kept = torch.randperm(len(source), generator=generator(0, "split"))[: data.test_limit]
        test = Part(source, kept.sort().values)
    if data.extra is not None:
        extra = _load(fill_in(data.extra.path), data.extra.train, data.reader)
        if extra.input_shape != whole.input_shape or extra.num_classes != whole.num_classes:
            raise InputError(
                f"data.extra: inputs of shape {extra.input_shape} with {extra.num_classes} classes do not go with those of "
                f"the training split, {whole.input_shape} with {whole.num_classes}"
            )
        train = Mixed(whole, train.indices, extra, data.extra.ratio)
    return Parts(train, validation, test)


def _load(path: str, split: str, reader: str | None) -> Source:
    from equipoise.data import load_dataset

    read = load_dataset if reader is None else resolve(reader)
    source: Source = read(path, split)
    return source


def random_parts(recipe: Recipe) -> Parts:
    """`data.examples` random inputs for the recipe's network, to time it without its data."""
    from equipoise.data import Dataset
    from equipoise.nn.models import MODELS, input_shape

    name = recipe.model.factory.rpartition(":")[2]
    if name not in MODELS:
        raise InputError(f"the shape of the inputs of {recipe.model.factory} is not known without the data")
    shape = input_shape(name, **recipe.model.arguments)
    x = torch.rand(8, *shape, generator=generator(0, "plan")).numpy()
    classes = int(recipe.model.arguments.get("num_classes", 10))
    source = Dataset.from_arrays(
        x, torch.arange(8).numpy() % classes, name="random", num_classes=classes, layout="NCHW"
    )
    return Parts(Part(source, torch.arange(recipe.data.examples or 8) % 8), None, None)


def build_model(model: Model, source: Source) -> tuple[nn.Module, dict[str, Any]]:
    """The network and the arguments it was made with, tried on an example of the data.

    `num_classes`, `in_channels`, `input_size`, `in_features` and `input_shape` are filled in from the data where the
    factory takes them and the recipe does not say.

    Args:
        model: the recipe's part.
        source: the dataset.
    """
    arguments = dict(model.arguments)
    known = _parameters(model.factory)
    if known is not None:
        arguments = {name: value for name, value in _facts(source).items() if name in known} | arguments
        unknown = [name for name in arguments if name not in known]
        if unknown:
            raise InputError(f"{model.factory} takes no argument {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    net = load_factory(model.factory, arguments)
    if model.weights is not None:
        load_weights(net, fill_in(model.weights))
    require_fit(net, source, model.factory)
    return net.train(), arguments


def require_fit(net: nn.Module, source: Source, name: str) -> None:
    """Refuse a network that does not take the data's inputs, or has too few outputs for its classes.

    Args:
        net: the network.
        source: the dataset.
        name: of the network, for messages.
    """
    x, _ = source.batch(torch.zeros(1, dtype=torch.int64))
    device = next((p.device for p in net.parameters()), x.device)
    try:
        with torch.no_grad():
            outputs = net.eval()(x.to(device))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise InputError(
            f"{name} does not take the data's inputs of shape {tuple(x.shape[1:])}: {one_line(error)[:200]}; "
            "change model.arguments or the data"
        ) from error
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and 1 < outputs.shape[1] < source.num_classes:
        raise InputError(f"{name} has {outputs.shape[1]} outputs, but the data {source.num_classes} classes")


def _facts(source: Source) -> dict[str, Any]:
    """What the data say about the network; images are (channels, height, width), other inputs are (features,)."""
    shape = list(source.input_shape)
    facts: dict[str, Any] = {"num_classes": source.num_classes, "input_shape": shape, **getattr(source, "facts", {})}
    if len(shape) == 3:
        return facts | {"in_channels": shape[0], "input_size": shape[1:]}
    return facts | {"in_features": shape[0]} if len(shape) == 1 else facts


def _parameters(factory: str) -> list[str] | None:
    """The names a factory takes, or None if it takes any."""
    try:
        parameters = inspect.signature(resolve(factory)).parameters
    except (InputError, ValueError, TypeError):
        return None  # load_factory says what is wrong
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return list(parameters)


def build_optimizer(optimizer: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters; `decay: matrices` spares biases and scales from weight decay.

    Args:
        optimizer: the recipe's part.
        model: the network.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError("the network has no parameters to train")
    decayed = [p for p in trained if p.ndim > 1 or optimizer.decay == "all"]
    spared = [p for p in trained if p.ndim <= 1 and optimizer.decay == "matrices"]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": optimizer.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    sharpness = optimizer.kind in ("sam", "asam")
    kind, options = _base(optimizer, optimizer.base if sharpness else optimizer.kind)
    if not sharpness:
        built: torch.optim.Optimizer = kind(groups, lr=optimizer.lr, **options)
        return built if optimizer.lookahead is None else add_lookahead(built, optimizer.lookahead)
    try:
        from pytorch_optimizer import SAM
    except ImportError as error:
        raise InputError(f"{optimizer.kind} needs pytorch-optimizer: pip install 'equipoise[train]'") from error
    return SAM(groups, kind, rho=optimizer.rho, adaptive=optimizer.kind == "asam", lr=optimizer.lr, **options)


def _base(optimizer: Optimizer, kind: str) -> tuple[Any, dict[str, Any]]:
    """The class and its options beside the learning rate."""
    momentum = {"momentum": optimizer.momentum}
    betas = {"betas": optimizer.betas}
    rows: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, {**momentum, "nesterov": optimizer.nesterov}),
        "adam": (torch.optim.Adam, betas),
        "adamw": (torch.optim.AdamW, betas),
        "nadam": (torch.optim.NAdam, betas),
        "muon": (Muon, {**momentum, **betas}),
    }
    return rows[kind]
