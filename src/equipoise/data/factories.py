"""`package.module:factory`: data that the user's own code hands over."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.errors import InputError, one_line
from equipoise.core.imports import guarded, resolve
from equipoise.data.columns import IMAGES, LABELS
from equipoise.data.dataset import Dataset, as_array
from equipoise.data.sources import Ints, Layout, channels_first, check_labels, default_scale, require_dtype


@dataclass(frozen=True, eq=False)
class MapSource:
    """A map-style dataset, `items[i] = (input, label)` or a dictionary of them; the label is checked at every reading."""

    items: Any = field(repr=False)
    labels: Ints = field(repr=False)
    name: str
    layout: Layout
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scale: float
    columns: tuple[str, str] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: Ints) -> NDArray[Any]:
        """The inputs of these rows, asked for one by one."""
        found = np.empty((len(rows), *self.shape), self.dtype)
        for position, row in enumerate(rows):
            x, y = item_of(self.items, int(row), self.name, self.layout, self.columns)
            if x.shape != self.shape or x.dtype != self.dtype:
                raise InputError(
                    f"{self.name}: row {row} is {x.dtype} of shape {x.shape}, the first row is {self.dtype} of {self.shape}"
                )
            if y != self.labels[row]:
                raise InputError(f"{self.name}: row {row} has label {y}, but {self.labels[row]} was announced")
            found[position] = x
        return found


def load_object(
    spec: str, split: str | None = None, *, num_classes: int | None = None, layout: Layout = "auto",
    columns: tuple[str, str] | None = None,
) -> Dataset:  # fmt: skip
    """Import the module, call the factory (with `split=` if it takes one), and wrap what it returns."""
    target = resolve(spec)
    if callable(target):
        target = _call(target, spec, split)
    elif split is not None:
        raise InputError(f"{spec} is not a factory, so it has no splits: leave the split out")
    return as_dataset(target, spec, num_classes, layout, columns)


def _call(factory: Any, spec: str, split: str | None) -> Any:
    arguments: dict[str, Any] = {}
    if split is not None:
        try:
            parameters = inspect.signature(factory).parameters.values()
        except (TypeError, ValueError) as error:
            raise InputError(f"the arguments of {spec} are unknown: leave the split out") from error
        if not any(p.name == "split" or p.kind is p.VAR_KEYWORD for p in parameters):
            raise InputError(f"{spec} takes no argument named split: leave the split out, or add it to the factory")
        arguments = {"split": split}
    return guarded(lambda: factory(**arguments), repr(spec))


def as_dataset(
    found: Any,
    name: str,
    num_classes: int | None = None,
    layout: Layout = "auto",
    columns: tuple[str, str] | None = None,
) -> Dataset:
    """A `Dataset` from what a factory may return: one, a pair of arrays or tensors, a map-style dataset of pairs or of
    dictionaries, or an array or tensor alone (inputs without labels)."""
    if isinstance(found, Dataset):
        if num_classes is not None and num_classes != found.num_classes:
            raise InputError(f"{name} has {found.num_classes} classes, {num_classes} were asked for")
        return found
    if isinstance(found, tuple | list) and len(found) == 2 and all(hasattr(part, "shape") for part in found):
        return Dataset.from_arrays(found[0], found[1], name=name, num_classes=num_classes, layout=layout)
    if isinstance(found, np.ndarray | Tensor):
        return Dataset.from_arrays(found, None, name=name, num_classes=num_classes, layout=layout)
    if isinstance(found, Mapping):
        inputs, labels = pair_of(found, columns, name)
        return Dataset.from_arrays(inputs, labels, name=name, num_classes=num_classes, layout=layout)
    if not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
        raise InputError(
            f"{name} gave a {type(found).__name__}; expected a Dataset, a pair (inputs, labels) of arrays, or a "
            "map-style dataset with a length"
        )
    if len(found) == 0:
        raise InputError(f"{name} holds no data")
    first, label = item_of(found, 0, name, layout, columns)
    again, _ = item_of(found, 0, name, layout, columns)
    if first.shape != again.shape or not np.array_equal(first, again, equal_nan=first.dtype.kind == "f"):
        raise InputError(f"{name} gives another input each time row 0 is read: take the random augmentation out")
    labels = _labels(found, name, layout, columns)
    if labels[0] != label:
        raise InputError(f"{name}: row 0 has label {label}, but its list of labels says {labels[0]}")
    source = MapSource(found, labels, name, layout, first.shape, first.dtype, default_scale(first.dtype), columns)
    return Dataset.from_source(source, labels, name=name, num_classes=num_classes)


def _labels(items: Any, name: str, layout: Layout, columns: tuple[str, str] | None) -> Ints:
    """The attribute `targets` or `labels` if it fits, otherwise every item is read once."""
    for attribute in ("targets", "labels"):
        known = getattr(items, attribute, None)
        if known is None or callable(known):
            continue
        array = as_array(known, f"{name}: {attribute}")
        if array.shape == (len(items),) and array.dtype.kind in "iu":
            return check_labels(array, len(items), None, name)[0]
    rows = range(len(items))
    return np.array([item_of(items, row, name, layout, columns)[1] for row in rows], dtype=np.int64)


def pair_of(item: Any, columns: tuple[str, str] | None, where: str) -> tuple[Any, Any]:
    """(input, label) of an item that is a pair, or a dictionary with the two columns named or their usual names.

    >>> pair_of({"idx": 3, "img": "x", "label": 7}, None, "row 0")
    ('x', 7)
    """
    if isinstance(item, Mapping):
        found = []
        for position, usual in enumerate((IMAGES, LABELS)):
            wanted = (columns[position],) if columns is not None else usual
            key = next((key for key in wanted if key in item), None)
            if key is None:
                names = ", ".join(map(str, item))[:200]
                raise InputError(f"{where} has the entries {names}: name the two to use, columns=(image, label)")
            found.append(item[key])
        return found[0], found[1]
    try:
        x, y = item
    except (TypeError, ValueError) as error:
        raise InputError(f"{where} is not a pair (input, label): {one_line(error)}") from error
    return x, y


def item_of(
    items: Any, row: int, name: str, layout: Layout, columns: tuple[str, str] | None = None
) -> tuple[NDArray[Any], int]:
    """(raw input as (C, H, W) or (features,), label) of one row."""
    found = guarded(lambda: items[row], f"row {row} of {name}")
    x, y = pair_of(found, columns, f"{name}: row {row}")
    array, label = as_array(x, f"{name}: row {row}"), as_array(y, f"{name}: the label of row {row}")
    if label.size != 1 or label.dtype.kind not in "iu":
        raise InputError(f"{name}: row {row} has the label {y!r}, expected one integer")
    dtype = require_dtype(array.dtype, f"{name}: row {row}")
    if array.ndim not in (1, 2, 3) or array.size == 0:
        raise InputError(f"{name}: row {row} has shape {array.shape}, expected (features,), (H, W) or three axes")
    if array.ndim == 2:
        array = array[None]
    elif array.ndim == 3 and not channels_first(array.shape, dtype, layout, f"{name}: row {row}"):
        array = array.transpose(2, 0, 1)
    return np.ascontiguousarray(array, dtype=dtype), int(label.reshape(-1)[0])
