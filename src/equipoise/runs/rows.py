"""What is stored of one input: the sufficient statistics of its draws, never a radius."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from equipoise.smoothing import SimplexMap
from equipoise.smoothing.partitions import Ints
from equipoise.smoothing.ramp import Floats

InputId = int | str


@dataclass(frozen=True)
class Item:
    """One input on its way to a worker; `position` is its place in the data, `id` the key of its noise."""

    position: int
    id: InputId
    label: int
    x: Tensor


@dataclass(frozen=True, eq=False)
class Soft:
    """Soft votes of one input under one map: its buckets, drawn up on the selection sample, and their moments.

    `order` and `singles` are the `Partition`, `direct` whether margins are bounded directly; `moments` has the rows shift,
    Σ(Z−shift), Σ(Z−shift)² and Σ(Z₀−shift₀)(Z−shift) per bucket, as `smoothing.Moments`.
    """

    map: SimplexMap
    order: Ints
    singles: int
    direct: bool
    moments: Floats


@dataclass(frozen=True, eq=False)
class Row:
    """The result of one input: counts of selection and estimation votes, soft moments if any, or why it failed.

    `n0` and `draws` are the numbers of draws really made; `stopped` says why an adaptive input stopped. `key` is the first
    noise key (documentation of the seed); `seconds` is wall-clock time, the only column that differs between repetitions.
    """

    position: int
    id: InputId
    label: int
    n0: int = 0
    draws: int = 0
    selection: Ints | None = None
    estimation: Ints | None = None
    soft: Soft | None = None
    stopped: str | None = None
    failure: str | None = None
    key: int = 0
    seconds: float = 0.0


def failed(item: Item, reason: str, key: int = 0, seconds: float = 0.0) -> Row:
    """The row of an input that could not be sampled: it certifies nothing, and says why."""
    return Row(item.position, item.id, item.label, failure=reason, key=key, seconds=seconds)


def counts_matrix(values: list[Ints | None], classes: int) -> Ints:
    """Counts of many rows as one (N, classes) array; rows without counts are zero."""
    result = np.zeros((len(values), classes), dtype=np.int64)
    for i, value in enumerate(values):
        if value is not None:
            result[i] = value
    return result


def plain_id(value: Any) -> InputId:
    """A key that survives the store: a Python int or str."""
    return value if isinstance(value, str) else int(value)
