"""The inputs of a run: ids, labels and a fingerprint from any dataset, read one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import EquipoiseError, InputError, fresh_strides
from equipoise.core.files import Count, Digest, Document, PositiveCount
from equipoise.data.dataset import UNKNOWN, pair_of
from equipoise.smoothing.procedures import Ints

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
        if self.balanced and labels is not None:
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
    labels: tuple[int, ...] | None
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
        if isinstance(dataset, tuple | list) and len(dataset) == 2 and isinstance(dataset[0], Tensor | np.ndarray):
            try:
                dataset = torch.utils.data.TensorDataset(*(torch.as_tensor(part) for part in dataset))
            except (TypeError, ValueError, RuntimeError, IndexError, AssertionError) as error:
                raise InputError(
                    "expected a pair (x, y) with as many labels as inputs, got "
                    + " and ".join(str(getattr(part, "shape", type(part).__name__)) for part in dataset)
                ) from error
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise InputError(f"expected a dataset of (input, label) or a pair (x, y), got {type(dataset).__name__}")
        if len(dataset) == 0:
            raise InputError("the data holds no inputs")

        # Python's int and str survive the store, NumPy's do not
        ids = tuple(i if isinstance(i, str) else int(i) for i in getattr(dataset, "ids", range(len(dataset))))
        if len(set(ids)) != len(dataset):
            raise InputError(f"the ids of the data must be distinct, one for each of the {len(dataset)} inputs")
        labels = getattr(dataset, "labels", None)
        classes = getattr(dataset, "classes", None) or ()
        named = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
        return cls(
            dataset,
            str(name or getattr(dataset, "name", None) or type(dataset).__name__),
            ids,
            None if labels is None else tuple(int(label) for label in labels),
            getattr(dataset, "num_classes", None),
            tuple(classes) if classes and named else None,
            labelled,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, position: int) -> Item:
        """Read one input; a label that is no whole number or an input that is no float tensor is refused."""
        name = self.ids[position]
        pair = self.dataset[position]
        try:
            x, label = pair_of(pair, None, "it")
            x, label = torch.as_tensor(x), int(label)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise InputError(f"input {name!r} is not a pair (input, label): {error}") from error
        if not x.is_floating_point():
            raise InputError(f"input {name!r} is {x.dtype}; expected floats, e.g. x.float() / 255")
        if not bool(torch.isfinite(x).all()):
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
            return Item(position, self.ids[position], label, torch.empty(0), f"it could not be read: {error}")
        if self.labelled and classes is not None:
            check_label(item.id, item.label, classes)
        return item

    def some(self, positions: Ints, count: int) -> list[Item]:
        """A few inputs spread over these positions; those that cannot be read are left out (they will be failed rows).

        Args:
            positions: places in the data.
            count: how many.
        """
        items = []
        for place in np.unique(np.linspace(0, len(positions) - 1, count).astype(int)):
            with contextlib.suppress(EquipoiseError, OSError):
                items.append(self.item(int(positions[place])))
        return items

    def fingerprint(self, positions: Ints) -> str:
        """Of the whole data where that is cheap or the dataset has its own; else of the selected inputs, read once."""
        own = getattr(self.dataset, "fingerprint", None)
        if callable(own):
            return str(own())
        if isinstance(self.dataset, torch.utils.data.TensorDataset):
            positions = np.arange(len(self))
        digest = Digest("inputs")
        for item in self.read(positions):
            head = f"{item.id!r}|{item.label}|{item.x.dtype}|{tuple(item.x.shape)}|"
            body = item.x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.feed(head.encode()).feed(body.numpy().tobytes())
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
