"""From a recipe to the things it names: data, network, optimizer, penalties, projections."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from equipoise.checkpoints import load_factory, load_weights
from equipoise.core.errors import InputError, one_line
from equipoise.core.imports import resolve
from equipoise.optim.muon import Muon, add_lookahead
from equipoise.train.reading import fill_in, nearest
from equipoise.train.recipe import Choice, Data, Model, Optimizer, data_order, generator
from equipoise.train.text import READERS

Penalty = Callable[[], Tensor]


class Source(Protocol):
    """What a trainer needs of a dataset (`equipoise.data.Dataset` and `train.text.Snips` have it)."""

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


def real_shape(source: Source) -> tuple[int, ...]:
    """The shape of one input as a bound sees it: that of the one-hot rows where inputs are tokens."""
    return tuple(getattr(source, "real_shape", source.input_shape))


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
        place = torch.arange(epoch * self.added, (epoch + 1) * self.added)
        rounds = (place // count).unique().tolist()
        others = torch.cat([
            torch.randperm(count, generator=generator(seed, "extra", r))[place[place // count == r] % count]
            for r in rounds
        ]) if self.added else place  # fmt: skip
        every = torch.cat([torch.arange(own), own + others])
        return every[data_order(seed, epoch, len(every))]

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions, own examples first."""
        own = positions < len(self.indices)
        parts = []
        if bool(own.any()):
            parts.append((own, self.source.batch(self.indices[positions[own]])))
        if not bool(own.all()):
            parts.append((~own, self.extra.batch(positions[~own] - len(self.indices))))
        if len(parts) == 1:
            return parts[0][1]
        x0, y0 = parts[0][1]
        x, y = x0.new_empty(len(positions), *x0.shape[1:]), y0.new_empty(len(positions))
        for where, (inputs, labels) in parts:
            x[where], y[where] = inputs, labels
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
    whole = _load(path, data.train)
    if whole.num_classes == 1:
        raise InputError(f"{path} holds one class only: a classifier needs two to tell apart")
    order = torch.randperm(len(whole), generator=generator(0, "split"))[: data.limit]
    held = round(data.validation * len(order))
    if data.validation and not 0 < held < len(order):
        raise InputError(f"data.validation = {data.validation} of {len(order)} examples leaves one part empty")
    train, kept = order[held:].sort().values, order[:held].sort().values
    test = None
    if data.test is not None:
        source = _load(path, data.test)
        if source.input_shape != whole.input_shape:
            raise InputError(
                f"{path}: inputs of the split {data.test!r} have shape {source.input_shape}, those of {data.train!r} "
                f"{whole.input_shape}: one network cannot take both"
            )
        chosen = torch.randperm(len(source), generator=generator(0, "split"))[: data.test_limit].sort().values
        test = Part(source, chosen)
    return Parts(_mixed(Part(whole, train), data), Part(whole, kept) if held else None, test)


def _mixed(part: Part, data: Data) -> Part:
    """The training examples with the extra ones of the recipe, which have to look like them."""
    if data.extra is None:
        return part
    extra = _load(fill_in(data.extra.path), data.extra.train)
    if extra.input_shape != part.source.input_shape or extra.num_classes != part.source.num_classes:
        raise InputError(
            f"data.extra: inputs of shape {extra.input_shape} with {extra.num_classes} classes do not go with those of the "
            f"training split, {part.source.input_shape} with {part.source.num_classes}"
        )
    return Mixed(part.source, part.indices, extra, data.extra.ratio)


def _load(path: str, split: str) -> Source:
    kind, _, rest = path.partition(":")
    if kind in READERS and rest:
        read: Source = READERS[kind](rest, split)
        return read
    from equipoise.data import load_dataset

    return load_dataset(path, split)


def build_model(model: Model, source: Source) -> tuple[nn.Module, dict[str, Any]]:
    """The network and the arguments it was made with, tried on an example of the data."""
    net, arguments = made_for(model, source)
    require_fit(net, source, model.factory)
    return net.train(), arguments


def made_for(model: Model, source: Source) -> tuple[nn.Module, dict[str, Any]]:
    """The network and its arguments, not yet tried.

    `num_classes`, `in_channels`, `input_size`, `in_features` and `input_shape` are filled in from the data where the
    factory takes them and the recipe does not say.
    """
    arguments = dict(model.arguments)
    known = _parameters(model.factory)
    if known is not None:
        for name, value in _facts(source).items():
            if name in known and name not in arguments:
                arguments[name] = value
        unknown = [a for a in arguments if a not in known]
        if unknown:
            raise InputError(f"{model.factory} takes no argument {unknown[0]!r}{nearest(unknown[0], known)}")
    net = load_factory(model.factory, arguments)
    if model.weights is not None:
        load_weights(net, fill_in(model.weights))
    return net, arguments


def require_fit(net: nn.Module, source: Source, name: str) -> None:
    """Refuse a network that does not take the data's inputs, or has too few outputs for its classes."""
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


def from_table(table: Mapping[str, Callable[..., Any]], choice: Choice, where: str, *first: Any) -> Any:
    """The row of a table called with `first` and the choice's arguments; unknown kinds and arguments get suggestions."""
    if choice.kind not in table:
        raise InputError(f"{where}: no kind {choice.kind!r}{nearest(choice.kind, table)}")
    row = table[choice.kind]
    parameters = inspect.signature(row).parameters
    known = list(parameters)[len(first) :]
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in choice.arguments:
        if name not in known and not free:
            raise InputError(f"{where}: {choice.kind!r} takes no {name!r}{nearest(name, known)}")
    for name in known:
        parameter = parameters[name]
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if required and name not in choice.arguments:
            raise InputError(f"{where}: {choice.kind!r} needs {name!r}")
    try:
        return row(*first, **choice.arguments)
    except TypeError as error:
        raise InputError(f"{where}: {choice.kind!r} cannot use {choice.arguments}: {error}") from error


def build_optimizer(optimizer: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters; `decay: matrices` spares biases and scales from weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError("the network has no parameters to train")
    groups: list[dict[str, Any]] = [{"params": trained, "weight_decay": optimizer.weight_decay}]
    if optimizer.decay == "matrices":
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
    built = _built(optimizer, groups)
    return built if optimizer.lookahead is None else add_lookahead(built, optimizer.lookahead)


def _built(optimizer: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if optimizer.kind not in ("sam", "asam"):
        kind, options = _base(optimizer, optimizer.kind)
        made: torch.optim.Optimizer = kind(groups, **options)
        return made
    try:
        from pytorch_optimizer import SAM
    except ImportError as error:
        raise InputError(f"{optimizer.kind} needs pytorch-optimizer: pip install 'equipoise[train]'") from error
    kind, options = _base(optimizer, optimizer.base)
    return SAM(groups, kind, rho=optimizer.rho, adaptive=optimizer.kind == "asam", **options)


#: optimizers that take `betas`
_ADAPTIVE = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam}


def _base(optimizer: Optimizer, kind: str) -> tuple[Any, dict[str, Any]]:
    if kind == "sgd":
        return torch.optim.SGD, {"lr": optimizer.lr, "momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
    if kind == "muon":
        return Muon, {"lr": optimizer.lr, "momentum": optimizer.momentum, "betas": optimizer.betas}
    return _ADAPTIVE[kind], {"lr": optimizer.lr, "betas": optimizer.betas}
