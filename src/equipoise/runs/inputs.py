"""The inputs of a run: ids, labels and a fingerprint from any dataset, read one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import EquipoiseError, InputError, fresh_strides
from equipoise.core.digests import Digest
from equipoise.core.documents import Count, Document, PositiveCount
from equipoise.data.dataset import UNKNOWN, pair_of
from equipoise.smoothing.procedures import Ints

InputId = int | str


@dataclass(frozen=True)
class Item:
    """One input on its way to a worker; `position` is its place in the data, `id` the key of its noise.

    `problem` says why it could not be read.
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
        """Positions in the data, in its order; `labels` are those of the whole data.

        >>> Selection(limit=4, balanced=True).positions(6, [0, 0, 0, 0, 1, 1])
        array([0, 1, 4, 5])
        """
        positions = np.arange(count, dtype=np.int64)[self.skip :: self.stride]
        if self.balanced and labels is not None and self.limit is not None:
            order = in_turn(np.asarray(labels, dtype=np.int64)[positions])
            positions = positions[np.sort(order[: self.limit])]
        positions = positions[: self.limit]

        if len(positions) == 0:
            raise InputError(f"the data has {count} inputs: skip={self.skip} leaves none")
        return positions


def _plain_id(value: Any) -> InputId:
    """A key that survives the store: a Python int or str."""
    return value if isinstance(value, str) else int(value)


def in_turn(labels: Ints) -> Ints:
    """The order in which every class gives its first, then every class its second, and so on."""
    turn = np.zeros(len(labels), dtype=np.int64)
    for k in np.unique(labels):
        members = np.flatnonzero(labels == k)
        turn[members] = np.arange(len(members))
    return np.lexsort((np.arange(len(labels)), labels, turn)).astype(np.int64)


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
        """Read off a dataset what is there."""
        labelled = not isinstance(dataset, Tensor | np.ndarray) and getattr(dataset, "labelled", True) is True
        if isinstance(dataset, Tensor | np.ndarray):
            dataset = (dataset, np.full(len(dataset) if dataset.ndim else 0, UNKNOWN))
        if isinstance(dataset, tuple | list) and len(dataset) == 2 and isinstance(dataset[0], Tensor | np.ndarray):
            try:
                x, y = (torch.as_tensor(v) for v in dataset)
            except (TypeError, ValueError, RuntimeError) as error:
                raise InputError(f"expected a pair of inputs and labels, got {type(dataset[1]).__name__}") from error
            if not x.ndim or y.ndim != 1 or len(x) != len(y):
                raise InputError(f"expected as many labels as inputs, got shapes {tuple(x.shape)} and {tuple(y.shape)}")
            dataset = torch.utils.data.TensorDataset(x, y)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise InputError(f"expected a dataset of (input, label) or a pair (x, y), got {type(dataset).__name__}")
        if len(dataset) == 0:
            raise InputError("the data holds no inputs")
        names = tuple(_plain_id(i) for i in getattr(dataset, "ids", range(len(dataset))))
        if len(names) != len(dataset) or len(set(names)) != len(names):
            raise InputError(f"the ids of the data must be distinct, one for each of the {len(dataset)} inputs")
        labels = getattr(dataset, "labels", None)
        known = None if labels is None else tuple(int(v) for v in labels)
        shown = name or getattr(dataset, "name", None) or type(dataset).__name__
        classes = getattr(dataset, "classes", None)
        words = isinstance(classes, list | tuple) and all(isinstance(c, str) for c in classes)
        return cls(
            dataset, str(shown), names, known, getattr(dataset, "num_classes", None), tuple(classes or ()) if words else None,
            labelled,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, position: int) -> Item:
        """Read one input; a label that is no whole number or an input that is no float tensor is refused."""
        found = self.dataset[position]
        try:
            x, label = pair_of(found, None, "it") if isinstance(found, Mapping) else (found[0], found[1])
            y = int(label)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise InputError(f"input {self.ids[position]!r} is not a pair (input, label): {error}") from error
        x = torch.as_tensor(x)
        if not x.is_floating_point():
            raise InputError(f"input {self.ids[position]!r} is {x.dtype}; expected floats, e.g. x.float() / 255")
        if not bool(torch.isfinite(x).all()):
            raise InputError(f"input {self.ids[position]!r} holds NaN or infinity")
        return Item(position, self.ids[position], y, fresh_strides(x))

    def attempt(self, position: int, classes: int | None) -> Item:
        """The input, or a blank with why it could not be read. A label of no class is refused."""
        try:
            item = self.item(position)
        except (EquipoiseError, OSError) as error:
            label = -1 if self.labels is None else self.labels[position]
            return Item(position, self.ids[position], label, torch.empty(0), f"it could not be read: {error}")
        if self.labelled and classes is not None:
            check_label(item.id, item.label, classes)
        return item

    def some(self, positions: Ints, count: int) -> list[Item]:
        """A few inputs spread over these positions; those that cannot be read are left out (they will be failed rows)."""
        found = []
        for place in np.unique(np.linspace(0, len(positions) - 1, count).astype(int)):
            with contextlib.suppress(EquipoiseError, OSError):
                found.append(self.item(int(positions[place])))
        return found

    def fingerprint(self, positions: Ints) -> str:
        """Of the whole data where that is cheap or the dataset knows its own; else of the selected inputs, read once."""
        own = getattr(self.dataset, "fingerprint", None)
        if callable(own):
            return str(own())
        if isinstance(self.dataset, torch.utils.data.TensorDataset):
            positions = np.arange(len(self))
        digest = Digest("inputs")
        for item in self.read(positions):
            head = f"{item.id!r}|{item.label}|{item.x.dtype}|{tuple(item.x.shape)}|"
            digest.feed(head.encode()).feed(
                item.x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        return str(digest)

    def read(self, positions: Ints) -> Iterator[Item]:
        """The inputs at these positions, one by one."""
        return (self.item(int(p)) for p in positions)

    def check_labels(self, positions: Ints, classes: int) -> None:
        """Refuse labels that the model has no logit for, before anything is sampled."""
        if self.labelled and self.labels is not None:
            for p in positions:
                check_label(self.ids[p], self.labels[p], classes)


def check_label(name: InputId, label: int, classes: int) -> None:
    """A label must be one of the model's classes."""
    if not 0 <= label < classes:
        raise InputError(
            f"input {name!r} has label {label}, but the model tells {classes} classes apart (0 … {classes - 1}): "
            "is this the data the model was trained for?"
        )
