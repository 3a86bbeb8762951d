"""A dataset: inputs read when asked for, labels and ids at hand, and a fingerprint of the content."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import InputError, fresh_strides
from equipoise.core.digests import Digest
from equipoise.core.errors import did_you_mean
from equipoise.data.sources import Ints, Layout, Source, array_source, as_array, check_labels, first_non_finite

_CHUNK_BYTES = 16 * 2**20
#: the label of an input without one
UNKNOWN = -1


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Labelled inputs: `ds[i]` is (float32 tensor, int), `ds.batch(indices)` is (float32 (B, …), int64 (B,)).

    Images are (channels, height, width). Bytes are divided by 255, floats are kept; NaN and infinity are refused.
    `ids` are the row numbers in the source and survive `select`, so results can be joined and noise keyed by them.
    Data without labels has `num_classes` 0 and the label −1 everywhere (`labelled` is False).

    >>> import numpy as np
    >>> ds = Dataset.from_arrays(np.zeros((5, 4, 4), np.uint8), np.array([0, 1, 2, 0, 1]), name="zeros")
    >>> ds
    Dataset('zeros', 5 inputs of 1×4×4, 3 classes)
    >>> ds.select(skip=1, stride=2).ids
    array([1, 3])
    """

    name: str
    source: Source
    num_classes: int
    all_labels: Ints
    ids: Ints
    classes: tuple[str, ...] | None = None
    parent: Dataset | None = None

    @classmethod
    def from_source(
        cls,
        source: Source,
        labels: Any,
        *,
        name: str,
        num_classes: int | None = None,
        classes: Sequence[str] | None = None,
    ) -> Dataset:
        """A dataset over all rows of a source; labels are checked, and the number of classes inferred if need be.

        `labels=None`: there are none.
        """
        if num_classes is None and classes is not None:
            num_classes = len(classes)
        if num_classes is not None and num_classes < 1:
            raise InputError(f"{name}: num_classes must be positive, got {num_classes}")
        if labels is None:
            found, count = np.full(len(source), UNKNOWN, dtype=np.int64), 0
        else:
            found, count = check_labels(labels, len(source), num_classes, name)
        ids = np.arange(len(source), dtype=np.int64)
        ids.flags.writeable = False
        names = tuple(classes) if classes is not None and len(classes) == count else None
        return cls(name, source, count, found, ids, names)

    @classmethod
    def from_arrays(
        cls,
        inputs: Any,
        labels: Any,
        *,
        name: str = "arrays",
        num_classes: int | None = None,
        layout: Layout = "auto",
        scale: float | None = None,
    ) -> Dataset:
        """A dataset over arrays or tensors in memory; see `channels_first` for the layout rule."""
        inputs = as_array(inputs, f"{name}: the inputs")
        labels = None if labels is None else as_array(labels, f"{name}: the labels")
        source = array_source(inputs.copy(), name, layout, scale)  # what the caller changes later is not our content
        return cls.from_source(source, labels, name=name, num_classes=num_classes)

    def __repr__(self) -> str:
        shape = "×".join(str(d) for d in self.input_shape)
        known = f"{self.num_classes} classes" if self.labelled else "no labels"
        return f"Dataset({self.name!r}, {len(self)} inputs of {shape}, {known})"

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} in a dataset of {len(self)}")
        x, y = self.batch([position % len(self)])
        return x[0], int(y[0])

    @property
    def labelled(self) -> bool:
        """Whether the inputs have labels."""
        return self.num_classes > 0

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.source.shape

    @cached_property
    def labels(self) -> Ints:
        """The labels, in order; no input is read for them."""
        labels: Ints = self.all_labels[self.ids]
        labels.flags.writeable = False
        return labels

    def batch(self, indices: Sequence[int] | Ints | Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions, in this order."""
        positions = as_array(indices, "indices").reshape(-1)
        if positions.dtype.kind not in "iu" or len(positions) == 0:
            raise InputError(f"expected a non-empty list of integer indices, got {positions.dtype} × {len(positions)}")
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= len(self):
            raise InputError(f"index {low if low < 0 else high} in a dataset of {len(self)}")
        raw = self._raw(positions.astype(np.int64))
        x = torch.from_numpy(raw).to(torch.float32)
        if self.source.scale != 1.0:
            x = x / self.source.scale
        return fresh_strides(x), torch.from_numpy(self.labels[positions])

    def select(self, skip: int = 0, limit: int | None = None, stride: int = 1) -> Dataset:
        """Every `stride`-th example after the first `skip`, at most `limit` of them; they keep their ids."""
        if skip < 0 or stride < 1 or (limit is not None and limit < 1):
            raise InputError(
                f"expected skip ≥ 0, stride ≥ 1, limit ≥ 1, got skip={skip}, stride={stride}, limit={limit}"
            )
        ids = self.ids[skip::stride][:limit].copy()
        if len(ids) == 0:
            raise InputError(f"{self.name} has {len(self)} examples: skip={skip} leaves none")
        ids.flags.writeable = False
        root = self if self.parent is None else self.parent
        return Dataset(self.name, self.source, self.num_classes, self.all_labels, ids, self.classes, root)

    def with_classes(self, order: Sequence[str] | Mapping[str, int]) -> Dataset:
        """The same inputs with the classes numbered as the model numbers them.

        Args:
            order: the names of the model's classes in the order of its logits, or the number of each class of this data.
                Where the data has class names its labels are changed to fit; where it has none the names are only noted.

        >>> import numpy as np
        >>> ds = Dataset.from_arrays(np.zeros((2, 4)), np.array([0, 1]), name="pets").with_classes(["dog", "cat"])
        >>> ds.with_classes(["cat", "bird", "dog"]).labels
        array([2, 0])
        """
        if not self.labelled:
            raise InputError(f"{self.name} has no labels whose classes could be named")
        numbers = order if isinstance(order, Mapping) else {name: k for k, name in enumerate(order)}
        if not numbers or (not isinstance(order, Mapping) and len(numbers) != len(order)):
            raise InputError("the names of the classes must be distinct, and at least one")
        if self.classes is None:
            if len(numbers) < self.num_classes or sorted(numbers.values()) != list(range(len(numbers))):
                raise InputError(
                    f"{self.name} has {self.num_classes} classes without names, the list names {len(numbers)}: expected a name "
                    "for every class, in the order of the labels"
                )
            return replace(
                self, classes=tuple(sorted(numbers, key=lambda name: numbers[name])), num_classes=len(numbers)
            )
        missing = [name for name in self.classes if name not in numbers]
        if missing:
            hint = did_you_mean(missing[0], numbers)
            raise InputError(f"{self.name} has the class {missing[0]!r}, which the list of classes does not name{hint}")
        changed = np.array([numbers[name] for name in self.classes], dtype=np.int64)
        if len(np.unique(changed)) != len(changed) or int(changed.min()) < 0:
            raise InputError(f"{self.name}: two classes have the same number in the list of classes")
        count = max(len(numbers), int(changed.max()) + 1)
        names = {k: name for name, k in numbers.items()}
        labels: Ints = changed[self.all_labels]
        labels.flags.writeable = False
        parent = None if self.parent is None else self.parent.with_classes(order)
        classes = tuple(names.get(k, f"class {k}") for k in range(count))
        return replace(self, all_labels=labels, num_classes=count, classes=classes, parent=parent)

    def fingerprint(self) -> str:
        """`sha256:…` of the content: shape, dtype, scale, every input byte, label and id in order; no path, no date.

        The same pictures as PNG files, Parquet or an array have the same fingerprint. Streamed once, then kept.
        """
        return self._fingerprint

    def parent_fingerprint(self) -> str:
        """Fingerprint of the dataset this one was selected from (its own if it is whole)."""
        return (self if self.parent is None else self.parent).fingerprint()

    @cached_property
    def _fingerprint(self) -> str:
        little = self.source.dtype.newbyteorder("<")
        head = ["equipoise-data-1", little.str, (len(self), *self.input_shape), self.source.scale]
        digest = Digest(repr(head))
        row_bytes = little.itemsize * int(np.prod(self.input_shape))
        chunk = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, len(self), chunk):
            positions = np.arange(start, min(start + chunk, len(self)), dtype=np.int64)
            digest.feed(np.ascontiguousarray(self._raw(positions), dtype=little).data)
        for numbers in (self.labels, self.ids):
            digest.feed(np.ascontiguousarray(numbers, dtype="<i8").data)
        return str(digest)

    def _raw(self, positions: Ints) -> NDArray[Any]:
        rows = self.ids[positions]
        raw = self.source.read(rows)
        if raw.shape != (len(rows), *self.input_shape) or raw.dtype != self.source.dtype:
            raise InputError(
                f"{self.name}: read {raw.dtype} of shape {raw.shape[1:]} where {self.source.dtype} of shape "
                f"{self.input_shape} was announced (rows {int(rows[0])} … {int(rows[-1])})"
            )
        bad = first_non_finite(raw)
        if bad is not None:
            row = int(rows[bad])
            raise InputError(f"{self.name}: row {row} holds NaN, infinity or a number too large for float32")
        return raw
