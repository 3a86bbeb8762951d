"""From a recipe to what it names: data, network, optimizer."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checkpoints import load_factory, load_weights
from equipoise.core.errors import InputError, did_you_mean, one_line
from equipoise.core.files import resolve
from equipoise.optim.muon import Muon, add_lookahead
from equipoise.train.config import Data, Document, Model, Optimizer, Recipe, fill_in
from equipoise.train.processes import generator


@dataclass(frozen=True)
class Part:
    """Some examples of a dataset and, in every epoch, `added` random ones of another.

    A dataset has `num_classes`, `input_shape`, a length, `batch(indices)` and `fingerprint()`, as `equipoise.data.Dataset`. It
    may also have `facts` (more arguments for the network) and `real_shape` (the shape of an input to a bound, for tokens).
    """

    source: Any
    indices: Tensor
    extra: Any = None
    added: int = 0

    def __len__(self) -> int:
        return len(self.indices) + self.added

    def order(self, seed: int, epoch: int) -> Tensor:
        """The positions of an epoch; those from `len(indices)` on belong to the other dataset.

        Args:
            seed: of the recipe.
            epoch: counted from 0.
        """
        own = len(self.indices)
        positions = torch.arange(own)
        if self.added:
            chosen = torch.randint(len(self.extra), (self.added,), generator=generator(seed, "extra", epoch))
            positions = torch.cat([positions, own + chosen])
        return positions[torch.randperm(len(self), generator=generator(seed, "order", epoch))]

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions."""
        own = positions < len(self.indices)
        x, y = self.source.batch(self.indices[positions.where(own, 0)])
        if not bool(own.all()):
            x[~own], y[~own] = self.extra.batch(positions[~own] - len(self.indices))
        return x, y

    def fingerprint(self) -> str:
        """Of the dataset, or of both."""
        own: str = self.source.fingerprint()
        return own if self.extra is None else f"{own} + {self.extra.fingerprint()}"


@dataclass(frozen=True)
class Parts:
    """The examples for training, those measured every epoch, and those measured at the end."""

    train: Part
    validation: Part | None = None
    test: Part | None = None

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
    whole = _load(data, data.path, data.train)
    if whole.num_classes == 1:
        raise InputError(f"{data.path} holds one class only: a classifier needs at least two")
    order = _shuffled(whole, data.limit)
    held = round(data.validation * len(order))
    if data.validation and not 0 < held < len(order):
        raise InputError(f"data.validation = {data.validation} of {len(order)} examples leaves one part empty")
    train = Part(whole, order[held:].sort().values)
    if data.extra is not None:
        extra = _load(data, data.extra.path, data.extra.train, whole)
        train = Part(whole, train.indices, extra, round(data.extra.ratio * len(train)))
    validation = Part(whole, order[:held].sort().values) if held else None
    test = None
    if data.test is not None:
        source = _load(data, data.path, data.test, whole)
        test = Part(source, _shuffled(source, data.test_limit).sort().values)
    return Parts(train, validation, test)


def _shuffled(source: Any, limit: int | None) -> Tensor:
    return torch.randperm(len(source), generator=generator(0, "split"))[:limit]


def _load(data: Data, path: str, split: str, like: Any = None) -> Any:
    """A split, which must go with the training split `like`."""
    from equipoise.data import load_dataset

    if data.reader is not None:
        source = resolve(data.reader)(fill_in(path), split)
    else:
        source = load_dataset(fill_in(path), split, layout=data.layout)
    if like is not None and (source.input_shape != like.input_shape or source.num_classes > like.num_classes):
        raise InputError(
            f"{path}#{split}: inputs of shape {source.input_shape} with {source.num_classes} classes do not go with those of "
            f"the training split, {like.input_shape} with {like.num_classes}: one network cannot take both"
        )
    return source


def random_parts(recipe: Recipe) -> Parts:
    """`data.examples` random inputs for the recipe's network, to time it without its data."""
    from equipoise.data import Dataset
    from equipoise.nn.models import MODELS, input_shape

    name = recipe.model.factory.rpartition(":")[2]
    if name not in MODELS:
        raise InputError(f"the shape of the inputs of {recipe.model.factory} is not known without the data")
    shape = input_shape(name, **recipe.model.arguments)
    classes = int(recipe.model.arguments.get("num_classes", 10))
    x, y = torch.rand(8, *shape, generator=generator(0, "plan")), torch.arange(8) % classes
    source = Dataset.from_arrays(x, y, name="random", num_classes=classes, layout="as-is")
    return Parts(Part(source, torch.arange(recipe.data.examples or 8) % 8))


def build_model(model: Model, source: Any) -> tuple[nn.Module, Document]:
    """The network and the arguments it was made with, tried on an example of the data.

    `num_classes`, `in_channels`, `input_size`, `in_features` and `input_shape` are filled in from the data where the
    factory takes them and the recipe does not say.

    Args:
        model: the recipe's part.
        source: the dataset.
    """
    arguments = dict(model.arguments)
    accepted = _parameters(model.factory)
    if accepted is not None:
        arguments = {name: value for name, value in _facts(source).items() if name in accepted} | arguments
        unknown = [name for name in arguments if name not in accepted]
        if unknown:
            raise InputError(f"{model.factory} takes no argument {unknown[0]!r}{did_you_mean(unknown[0], accepted)}")
    net = load_factory(model.factory, arguments)
    if model.weights is not None:
        load_weights(net, fill_in(model.weights))
    return net, arguments


def require_fit(net: nn.Module, source: Any, name: str) -> None:
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


def _facts(source: Any) -> Document:
    """What the data say about the network; inputs are (channels, …) or (features,)."""
    shape = list(source.input_shape)
    facts: Document = {"num_classes": source.num_classes, "input_shape": shape, **getattr(source, "facts", {})}
    if len(shape) == 1:
        return facts | {"in_features": shape[0]}
    return facts | {"in_channels": shape[0], "input_size": shape[1:]}


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
    spared = [p for p in trained if p.ndim <= 1 and optimizer.decay == "matrices"]
    decayed = [p for p in trained if p.ndim > 1 or optimizer.decay == "all"]
    groups: list[Document] = [{"params": decayed, "weight_decay": optimizer.weight_decay}]
    if spared:
        groups.append({"params": spared, "weight_decay": 0.0})

    kinds: Document = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "nadam": torch.optim.NAdam,
        "muon": Muon,
    }
    kind = kinds[optimizer.base if optimizer.two_steps else optimizer.kind]
    accepted = inspect.signature(kind).parameters
    options = {name: getattr(optimizer, name) for name in ("momentum", "nesterov", "betas") if name in accepted}
    if not optimizer.two_steps:
        built: torch.optim.Optimizer = kind(groups, lr=optimizer.lr, **options)
        return built if optimizer.lookahead is None else add_lookahead(built, optimizer.lookahead)
    try:
        from pytorch_optimizer import SAM
    except ImportError as error:
        raise InputError(f"{optimizer.kind} needs pytorch-optimizer: pip install 'equipoise[train]'") from error
    return SAM(groups, kind, rho=optimizer.rho, adaptive=optimizer.kind == "asam", lr=optimizer.lr, **options)
