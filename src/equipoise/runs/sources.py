"""The inputs and the model of a run.

Inputs: ids, labels and a fingerprint from any dataset, read one at a time. The model: sent to workers, hashed so that a changed
one is noticed, with its preprocessing in front.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from equipoise.checkpoints import Loaded
from equipoise.checkpoints.sources import program_input
from equipoise.core import (
    EquipoiseError,
    InputError,
    Ints,
    Refused,
    Shape,
    explained,
    fresh_strides,
    guarded,
    require_eval,
)
from equipoise.core.files import Count, Digest, Document, PositiveCount, digest_bytes
from equipoise.data.dataset import UNKNOWN, pair_of
from equipoise.nn.models.plain import Normalise
from equipoise.onnx import OnnxNetwork

InputId = int | str


@dataclass(frozen=True)
class Item:
    """One input on its way to a worker.

    Args:
        position: its place in the data.
        id: the key of its noise.
        label: −1 where the data has none.
        x: the input.
        problem: why it could not be read.
    """

    position: int
    id: InputId
    label: int
    x: Tensor
    problem: str | None = None


class Selection(Document):
    """Which inputs of the data: every `stride`-th after the first `skip`, at most `limit`.

    `balanced`: where `limit` leaves some out, the first of every class in turn instead of the order of the data.
    """

    skip: Count = 0
    limit: PositiveCount | None = None
    stride: PositiveCount = 1
    balanced: bool = False

    def positions(self, count: int, labels: Sequence[int] | None = None) -> Ints:
        """Positions in the data, in its order.

        Args:
            count: number of inputs of the data.
            labels: those of the whole data.

        >>> Selection(limit=4, balanced=True).positions(6, [0, 0, 0, 0, 1, 1])
        array([0, 1, 4, 5])
        """
        positions = np.arange(count, dtype=np.int64)[self.skip :: self.stride]
        if self.balanced and self.limit is not None:
            if labels is None:
                raise InputError(
                    "balanced=True needs labels that are there without reading the inputs: use eq.data.Dataset"
                )
            own = np.asarray(labels)[positions]
            turn = np.zeros(len(own))  # how many inputs of its class come before each
            for label in np.unique(own):
                members = own == label
                turn[members] = np.arange(members.sum())
            positions = positions[np.sort(np.lexsort((own, turn))[: self.limit])]
        if len(positions) == 0:
            raise InputError(f"the data has {count} inputs: skip={self.skip} leaves none")
        return positions[: self.limit]


@dataclass(frozen=True, eq=False)
class Inputs:
    """A dataset with the ids of its inputs; labels where they are known without reading the inputs.

    Accepts `equipoise.data.Dataset`, any map-style dataset of (tensor, label) or of dictionaries with the usual names, a pair
    of tensors (x, y), or inputs x alone, which have no labels.
    """

    dataset: Any
    name: str
    ids: tuple[InputId, ...]
    labels: Shape | None
    num_classes: int | None
    classes: tuple[str, ...] | None = None
    labelled: bool = True

    @classmethod
    def of(cls, dataset: Any, name: str | None = None) -> Inputs:
        """Read ids, labels and class names off a dataset.

        Args:
            dataset: any of the kinds above.
            name: for the record; by default the dataset's own.
        """
        labelled = getattr(dataset, "labelled", True) is True
        if isinstance(dataset, Tensor | np.ndarray):
            labelled = False
            dataset = (dataset, np.full(len(dataset) if dataset.ndim else 0, UNKNOWN))
        if (
            isinstance(dataset, tuple | list)
            and len(dataset) == 2
            and isinstance(dataset[0], Tensor | np.ndarray)
        ):
            parts = dataset
            dataset = guarded(
                lambda: torch.utils.data.TensorDataset(*map(torch.as_tensor, parts)),
                "a pair (x, y) with as many labels as inputs is expected: joining the two",
            )
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise InputError(
                f"expected a dataset of (input, label) or a pair (x, y), got {type(dataset).__name__}"
            )
        if len(dataset) == 0:
            raise InputError("the data holds no inputs")

        # Python's int and str survive the store, NumPy's do not
        ids = tuple(
            i if isinstance(i, str) else int(i)
            for i in getattr(dataset, "ids", range(len(dataset)))
        )
        if len(set(ids)) != len(dataset):
            raise InputError(
                f"the ids of the data must be distinct, one for each of the {len(dataset)} inputs"
            )
        labels = getattr(dataset, "labels", None)
        classes = getattr(dataset, "classes", None)
        return cls(
            dataset,
            str(name or getattr(dataset, "name", None) or type(dataset).__name__),
            ids,
            None if labels is None else tuple(int(label) for label in labels),
            getattr(dataset, "num_classes", None),
            tuple(map(str, classes)) if isinstance(classes, list | tuple) else None,
            labelled,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, position: int) -> Item:
        """Read one input; a label that is no whole number or an input that is no float tensor is refused."""
        name = self.ids[position]
        pair = self.dataset[position]
        x, label = pair_of(pair, None, f"input {name!r}")
        with explained(f"input {name!r} is not a pair (input, label)"):
            x = torch.as_tensor(x)
            label = int(label)
        if not x.is_floating_point():
            raise InputError(f"input {name!r} is {x.dtype}; expected floats, e.g. x.float() / 255")
        if not torch.isfinite(x).all():
            raise InputError(f"input {name!r} holds NaN or infinity")
        return Item(position, name, label, fresh_strides(x))

    def attempt(self, position: int, classes: int | None) -> Item:
        """The input, or a blank that says why it could not be read; a label of no class is refused.

        Args:
            position: its place in the data.
            classes: how many classes the model has.
        """
        try:
            item = self.item(position)
        except (EquipoiseError, OSError) as error:
            label = UNKNOWN if self.labels is None else self.labels[position]
            problem = f"it could not be read: {error}"
            return Item(position, self.ids[position], label, torch.empty(0), problem)
        if self.labelled and classes is not None:
            check_label(item.id, item.label, classes)
        return item

    def some(self, positions: Ints, count: int) -> list[Item]:
        """A few inputs spread over these positions; those that cannot be read are left out (they will be failed rows).

        Args:
            positions: places in the data.
            count: how many.
        """
        places = np.unique(np.linspace(0, len(positions) - 1, count).astype(int))
        items = [self.attempt(int(position), None) for position in positions[places]]
        return [item for item in items if item.problem is None]

    def fingerprint(self, positions: Ints) -> str:
        """Of the whole data where that is cheap or the dataset has its own; else of the selected inputs, read once."""
        own = getattr(self.dataset, "fingerprint", None)
        if callable(own):
            return str(own())
        if isinstance(self.dataset, torch.utils.data.TensorDataset):
            positions = np.arange(len(self))
        digest = Digest("inputs")
        for item in self.read(positions):
            digest.add(f"{item.id!r}|{item.label}", item.x)
        return str(digest)

    def read(self, positions: Ints) -> Iterator[Item]:
        """The inputs at these positions, one by one."""
        return (self.item(int(position)) for position in positions)


def check_label(name: InputId, label: int, classes: int) -> None:
    """Refuse a label that is none of the model's classes.

    Args:
        name: id of the input.
        label: its label.
        classes: how many classes the model has.
    """
    if not 0 <= label < classes:
        raise InputError(
            f"input {name!r} has label {label}, but the model tells {classes} classes apart (0 … {classes - 1}): "
            "is this the data the model was trained for?"
        )


@dataclass(frozen=True, eq=False)
class Portable:
    """A model that can be pickled to a worker.

    Args:
        payload: a module as it is, an exported program as the bytes of its `.pt2`.
        hash: digest of the stored network: of the file for a `.pt2`, so that it does not depend on the batch it is loaded at.
        source: the name of the model.
        batch: the batch size a program or an ONNX network was exported with; None: any.
        front: what comes before the model.
    """

    payload: nn.Module | bytes
    hash: str
    source: str
    batch: int | None = None
    front: nn.Module | None = None

    def build(self, device: str | torch.device = "cpu") -> nn.Module:
        """The module, on a device."""
        module = self.payload
        if isinstance(module, bytes):  # which this process, or the first one, wrote
            module = torch.export.load(io.BytesIO(module)).module()
        if self.front is not None:
            module = nn.Sequential(self.front, module)
        for part in module.modules():
            part.training = False  # `.eval()` of an exported program raises
        return module.to(device)

    def network(self, device: str | torch.device = "cpu") -> nn.Module:
        """The module for batches of any size."""
        module = self.build(device)
        return module if self.batch is None else Batched(module, self.batch)


class Batched(nn.Module):
    """Runs a batch in pieces of exactly `size` rows, the last one filled up, and joins the results."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model = model
        self.size = size
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Row i of the result is the model's output for row i."""
        parts = []
        for piece in x.split(self.size):
            filling = piece[:1].expand(self.size - len(piece), *piece.shape[1:])
            parts.append(self.model(torch.cat([piece, filling]))[: len(piece)])
        return torch.cat(parts)


def portable(model: Any, source: str | None = None) -> Portable:
    """Accept a module in evaluation mode, an exported program, what `load_model` returned, or a `Portable`.

    Args:
        model: the model.
        source: its name.
    """
    if isinstance(model, Portable):
        return model
    if isinstance(model, Loaded):
        made = portable(model.model, model.source)
        return replace(made, hash=model.digest or made.hash)
    if isinstance(model, ExportedProgram):
        _require_inference(model)
        value = program_input(model)
        if value is None or value.ndim < 2:
            raise InputError(
                "the exported program must take one tensor with a batch dimension: hold other inputs as buffers"
            )
        size = value.shape[0]
        buffer = io.BytesIO()
        torch.export.save(model, buffer)
        content = buffer.getvalue()
        name = source or "an exported program"
        return Portable(
            content, digest_bytes(content), name, size if isinstance(size, int) else None
        )
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected an nn.Module, an exported program or a loaded model, got {type(model).__name__}"
        )

    require_eval(model)
    kind = type(model)
    fixed = [part.batch for part in model.modules() if isinstance(part, OnnxNetwork)]
    return Portable(
        model,
        hash_module(model),
        source or f"{kind.__module__}:{kind.__qualname__}",
        next((batch for batch in fixed if batch is not None), None),
    )


def normalised(model: Any, mean: Sequence[float], std: Sequence[float]) -> Portable:
    """`(x − mean)/std` per channel before a model that was trained on such inputs: noise and radii are in units of x.

    Args:
        model: as for `portable`.
        mean: one number per channel.
        std: one positive number per channel.
    """
    inner = portable(model)
    front = f"inputs (x − {tuple(mean)})/{tuple(std)}"
    digest = Digest("normalised").add("model", inner.hash).add("front", front)
    name = f"{inner.source}, {front}"
    return replace(inner, hash=str(digest), source=name, front=Normalise(mean, std))


def _require_inference(program: ExportedProgram) -> None:
    """A program exported in training mode draws random numbers of its own, or mixes the inputs of a batch."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(() if schema is None else schema.arguments):
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if argument.name in ("train", "training") and value is True:
                raise Refused(
                    f"the program was exported in training mode ({node.name}): call model.eval() before exporting it"
                )


def hash_module(model: nn.Module) -> str:
    """sha256 over weights, buffers, the tree of modules with their settings, and the source of classes outside torch.

    Settings are the public attributes; what a forward pass reads from anywhere else (files, globals, private attributes) is
    not part of it.
    """
    digest = Digest("module")
    for name, value in sorted(model.state_dict().items()):
        digest.add(name, value)
    for name, module in model.named_modules():
        kind = type(module)
        digest.add(name, f"{kind.__module__}.{kind.__qualname__}({module.extra_repr()})")
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and key != "training":
                digest.add(f"{name}.{key}", _text(value))
        if not kind.__module__.startswith("torch."):
            with contextlib.suppress(OSError, TypeError):  # typed into a session: it has none
                digest.add(kind.__qualname__, inspect.getsource(kind))
    return str(digest)


def _text(value: Any) -> str:
    """An attribute as text that is the same in every process: tensors by their digest, and no addresses."""
    exact = pytree.tree_map_only(
        (Tensor, np.ndarray), lambda part: Digest("").add("", part).hex(), value
    )
    return re.sub(r" at 0x[0-9a-f]+", "", repr(exact))
