"""From a recipe to what it names: data, network, optimizer."""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checkpoints import load_factory, load_weights
from equipoise.core import InputError, explained, optional
from equipoise.core.files import resolve
from equipoise.nn.orthogonal.polar import orthonormal_parameters
from equipoise.optim.muon import Muon, add_lookahead
from equipoise.train.config import Data, Model, Optimizer, Plain, fill_in
from equipoise.train.processes import generator

_OPTIMIZERS: Plain = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "muon": Muon,
}


@dataclass(frozen=True)
class Part:
    """Some examples of a dataset, and in every epoch `count` examples of another one, drawn anew.

    A dataset has `num_classes`, `input_shape`, a length, `batch(indices)` and `fingerprint()`, as `equipoise.data.Dataset`. It
    may also have `facts` (more arguments for the network) and `real_shape` (the shape of an input to a bound, for tokens).
    """

    source: Any
    indices: Tensor
    extra: Any = None
    count: int = 0

    def __len__(self) -> int:
        return len(self.indices) + self.count

    def order(self, seed: int, epoch: int) -> Tensor:
        """The positions of an epoch, shuffled; those of the other dataset follow the part's own.

        Args:
            seed: of the recipe.
            epoch: counted from 0.
        """
        positions = torch.arange(len(self))
        if self.count:
            source = generator(seed, "extra", epoch)
            others = torch.randint(len(self.extra), (self.count,), generator=source)
            positions[len(self.indices) :] = len(self.indices) + others
        return positions[torch.randperm(len(self), generator=generator(seed, "order", epoch))]

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions."""
        own = positions < len(self.indices)
        parts = [
            (self.source, self.indices[positions[own]]),
            (self.extra, positions[~own] - len(self.indices)),
        ]
        batches = [source.batch(indices) for source, indices in parts if len(indices)]
        x, y = zip(*batches, strict=True)
        return torch.cat(x), torch.cat(y)


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
        """Of the training split, what is mixed in, and the test split."""
        sources = [self.train.source, self.train.extra, self.test and self.test.source]
        return " ".join(source.fingerprint() for source in sources if source is not None)


def build_data(data: Data) -> Parts:
    """The parts; which examples are held out or kept by a limit does not depend on the recipe's seed."""
    whole = _load(data, data.train)
    if whole.num_classes == 1:
        raise InputError(f"{data.path} holds one class only: a classifier needs at least two")
    order = _shuffled(whole, data.limit)
    held = round(data.validation * len(order))
    if data.validation and not 0 < held < len(order):
        raise InputError(
            f"data.validation = {data.validation} of {len(order)} examples leaves one part empty"
        )
    train = Part(whole, order[held:].sort().values)
    if data.extra is not None:
        extra = _load(data.model_copy(update={"path": data.extra}), data.train, whole)
        train = Part(whole, train.indices, extra, round(data.extra_ratio * len(train)))
    validation = Part(whole, order[:held].sort().values) if held else None
    test = None
    if data.test is not None:
        source = _load(data, data.test, whole)
        test = Part(source, _shuffled(source, data.test_limit).sort().values)
    return Parts(train, validation, test)


def _shuffled(source: Any, limit: int | None) -> Tensor:
    return torch.randperm(len(source), generator=generator(0, "split"))[:limit]


def _load(data: Data, split: str, like: Any = None) -> Any:
    """A split, which must go with the training split `like`."""
    from equipoise.data import load_dataset

    path = fill_in(data.path)
    reader = (
        partial(load_dataset, layout=data.layout) if data.reader is None else resolve(data.reader)
    )
    source = reader(path, split)
    if like is not None and (
        source.input_shape != like.input_shape or source.num_classes > like.num_classes
    ):
        raise InputError(
            f"{path}#{split}: inputs of shape {source.input_shape} with {source.num_classes} classes do not go with those of "
            f"the training split, {like.input_shape} with {like.num_classes}: one network cannot take both"
        )
    return source


def build_model(model: Model, source: Any) -> tuple[nn.Module, Plain]:
    """The network and the arguments it was made with, tried on an example of the data.

    `num_classes`, `in_channels`, `input_size`, `in_features` and `input_shape` are filled in from the data where the
    factory takes them and the recipe does not say.

    Args:
        model: the recipe's part.
        source: the dataset.
    """
    arguments = model.arguments
    target = resolve(model.factory)
    if callable(target):
        accepted = inspect.signature(target).parameters
        arguments = {
            name: value for name, value in _facts(source).items() if name in accepted
        } | arguments
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
    failure = f"{name} does not take the data's inputs of shape {tuple(x.shape[1:])}"
    with explained(failure, "; change model.arguments or the data"), torch.no_grad():
        outputs = net.eval()(x.to(device))
    if (
        isinstance(outputs, Tensor)
        and outputs.dim() == 2
        and 1 < outputs.shape[1] < source.num_classes
    ):
        raise InputError(
            f"{name} has {outputs.shape[1]} outputs, but the data {source.num_classes} classes"
        )


def _facts(source: Any) -> Plain:
    """What the data say about the network; inputs are (channels, …) or (features,)."""
    first, *size = shape = list(source.input_shape)
    facts = {"num_classes": source.num_classes, "input_shape": shape}
    facts |= {"in_channels": first, "input_size": size} if size else {"in_features": first}
    return facts | getattr(source, "facts", {})


def build_optimizer(optimizer: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters; `decay: matrices` spares biases and scales from weight decay.

    Args:
        optimizer: the recipe's part.
        model: the network.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError("the network has no parameters to train")
    turned = orthonormal_parameters(model) if optimizer.kind == "muon" else []
    trained = [p for p in trained if all(p is not other for other in turned)]
    spared = [p for p in trained if p.ndim <= 1 and optimizer.decay == "matrices"]
    decayed = [p for p in trained if all(p is not other for other in spared)]
    groups = [
        {"params": decayed, "weight_decay": optimizer.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    if turned:
        groups.append({"params": turned, "orthonormal": True})
    kind = _OPTIMIZERS[optimizer.base if optimizer.two_steps else optimizer.kind]
    accepted = inspect.signature(kind).parameters
    options = {
        name: getattr(optimizer, name)
        for name in ("lr", "momentum", "nesterov", "betas")
        if name in accepted
    }
    if optimizer.two_steps:
        SAM = optional("pytorch_optimizer", "train").SAM
        return SAM(groups, kind, optimizer.rho, optimizer.kind == "asam", **options)
    built = kind(groups, **options)
    return built if optimizer.lookahead is None else add_lookahead(built, optimizer.lookahead)
