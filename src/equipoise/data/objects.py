"""Data that the user's own code hands over: arrays, tensors, map-style datasets, and `package.module:factory`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.errors import InputError, one_line
from equipoise.core.imports import guarded, resolve
from equipoise.data.dataset import Dataset
from equipoise.data.files import IMAGES, LABELS
from equipoise.data.sources import Ints, Layout, Options, Source, as_array, channels_ahead, check_labels, default_scale


def load_object(spec: str, split: str | None, options: Options) -> Dataset:
    """Import the module, call the factory (with `split=` if it takes one), and wrap what it returns.

    Args:
        spec: `package.module:factory`.
        split: handed to the factory.
        options: num_classes, layout and columns.
    """
    target = resolve(spec)
    if callable(target):
        given = {} if split is None else {"split": split}
        target = guarded(lambda: target(**given), repr(spec))
    elif split is not None:
        raise InputError(f"{spec} is not a factory, so it has no splits: leave the split out")
    return as_dataset(target, spec, options.num_classes, options.layout, options.columns)


def as_dataset(
    data: Any,
    name: str,
    num_classes: int | None = None,
    layout: Layout = "auto",
    columns: tuple[str, str] | None = None,
) -> Dataset:
    """A `Dataset` from what a user has.

    Args:
        data: a `Dataset`; a pair of arrays or tensors, or a dictionary of them; an array or tensor alone (inputs without
            labels); or a map-style dataset of pairs or of dictionaries.
        name: of the dataset.
        num_classes: checked against the labels.
        layout: of images.
        columns: the names of inputs and labels, for dictionaries.
    """
    if isinstance(data, Dataset):
        if num_classes is not None and num_classes != data.num_classes:
            raise InputError(f"{name} has {data.num_classes} classes, {num_classes} were asked for")
        return data
    if isinstance(data, np.ndarray | Tensor):
        return Dataset.from_arrays(data, None, name=name, num_classes=num_classes, layout=layout)
    pair = isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(part, "shape") for part in data)
    if pair or isinstance(data, Mapping):
        inputs, labels = pair_of(data, columns, name)
        return Dataset.from_arrays(inputs, labels, name=name, num_classes=num_classes, layout=layout)

    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise InputError(
            f"{name} gave a {type(data).__name__}; expected a Dataset, a pair (inputs, labels) of arrays, or a "
            "map-style dataset with a length"
        )
    if len(data) == 0:
        raise InputError(f"{name} holds no data")
    rows = _Rows(data, name, layout, columns)
    (first, label), (again, _) = rows.item(0), rows.item(0)
    if first.shape != again.shape or not np.array_equal(first, again, equal_nan=first.dtype.kind == "f"):
        raise InputError(f"{name} gives another input each time row 0 is read: take the random augmentation out")

    labels = rows.labels()
    if labels[0] != label:
        raise InputError(f"{name}: row 0 has label {label}, but its list of labels says {labels[0]}")
    read = functools.partial(rows.read, labels, first.shape, first.dtype)
    source = Source(len(labels), first.shape, first.dtype, default_scale(first.dtype), read)
    return Dataset.from_source(source, labels, name=name, num_classes=num_classes)


@dataclass(frozen=True)
class _Rows:
    """A map-style dataset, whose rows are read one by one."""

    data: Any
    name: str
    layout: Layout
    columns: tuple[str, str] | None

    def item(self, row: int) -> tuple[NDArray[Any], int]:
        """(raw input as (C, H, W) or (features,), label) of one row."""
        where = f"{self.name}: row {row}"
        x, y = pair_of(guarded(lambda: self.data[row], f"row {row} of {self.name}"), self.columns, where)
        array, label = as_array(x, where), as_array(y, f"{self.name}: the label of row {row}")
        if label.size != 1 or label.dtype.kind not in "iu":
            raise InputError(f"{where} has the label {y!r}, expected one integer")
        return np.ascontiguousarray(channels_ahead(array[None], where, self.layout)[0]), int(label.reshape(-1)[0])

    def labels(self) -> Ints:
        """The attribute `targets` or `labels` if it fits, otherwise every item is read once."""
        for attribute in ("targets", "labels"):
            announced = getattr(self.data, attribute, None)
            if announced is None or callable(announced):
                continue
            array = as_array(announced, f"{self.name}: {attribute}")
            if array.shape == (len(self.data),) and array.dtype.kind in "iu":
                return check_labels(array, len(array), None, self.name)[0]
        return np.array([self.item(row)[1] for row in range(len(self.data))], dtype=np.int64)

    def read(self, labels: Ints, shape: tuple[int, ...], dtype: np.dtype[Any], rows: Ints) -> NDArray[Any]:
        """The inputs of these rows; shape, type and label are checked at every reading."""
        found = np.empty((len(rows), *shape), dtype)
        for position, row in enumerate(rows):
            x, y = self.item(int(row))
            if x.shape != shape or x.dtype != dtype:
                raise InputError(
                    f"{self.name}: row {row} is {x.dtype} of shape {x.shape}, the first row is {dtype} of {shape}"
                )
            if y != labels[row]:
                raise InputError(f"{self.name}: row {row} has label {y}, but {labels[row]} was announced")
            found[position] = x
        return found


def pair_of(item: Any, columns: tuple[str, str] | None, where: str) -> tuple[Any, Any]:
    """(input, label) of an item that is a pair, or a dictionary with the two columns named or their usual names.

    Args:
        item: the pair or the dictionary.
        columns: the names of the two; None: the usual ones.
        where: what error messages call it.

    >>> pair_of({"idx": 3, "img": "x", "label": 7}, None, "row 0")
    ('x', 7)
    """
    if isinstance(item, Mapping):
        wanted = [(name,) for name in columns] if columns is not None else [IMAGES, LABELS]
        keys = [next((key for key in names if key in item), None) for names in wanted]
        if None in keys:
            names = ", ".join(map(str, item))[:200]
            raise InputError(f"{where} has the entries {names}: name the two to use, columns=(image, label)")
        return item[keys[0]], item[keys[1]]
    try:
        x, y = item
    except (TypeError, ValueError) as error:
        raise InputError(f"{where} is not a pair (input, label): {one_line(error)}") from error
    return x, y
