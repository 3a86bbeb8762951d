"""What a deterministic run keeps of an input, in the same file, with the same checksums, as a sampled one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from equipoise.core.errors import InputError
from equipoise.runs.rows import InputId, Item
from equipoise.runs.store import Table

_SCHEMA = """
CREATE TABLE IF NOT EXISTS inputs (
  id PRIMARY KEY NOT NULL, position INTEGER NOT NULL, label INTEGER NOT NULL, prediction INTEGER NOT NULL, radius REAL NOT NULL,
  rival INTEGER NOT NULL, margin REAL NOT NULL, method TEXT NOT NULL, failure TEXT, seconds REAL NOT NULL, checksum TEXT)
"""


@dataclass(frozen=True)
class ProvedRow:
    """One input: no point strictly within `radius` has another answer; `rival` is the class that limits it.

    `prediction` is the network's own answer, −1 where rounding leaves it open; `margin` is a lower bound of the margin at the
    input against `rival`; `method` proved the radius. The radius is 0 where the answer is not the label
    (−1: unlabelled, and the answer is the network's own).
    """

    id: InputId
    position: int
    label: int
    prediction: int = -1
    radius: float = 0.0
    rival: int = -1
    margin: float = 0.0
    method: str = ""
    failure: str | None = None
    seconds: float = 0.0


def failed_row(item: Item, reason: str, seconds: float = 0.0) -> ProvedRow:
    """An input about which nothing is proved, and why."""
    return ProvedRow(item.id, item.position, item.label, failure=reason, seconds=seconds)


class ProvedStore(Table[ProvedRow]):
    """The store of a deterministic run."""

    schema = _SCHEMA
    columns = tuple(f.name for f in fields(ProvedRow))

    def encode(self, row: ProvedRow) -> tuple[Any, ...]:
        """The row's own fields."""
        return astuple(row)

    def decode(self, values: Sequence[Any]) -> ProvedRow:
        """The row again, held against what a row can be."""
        row = ProvedRow(*values)
        numbers = (row.radius, row.margin, row.seconds)
        sound = all(isinstance(v, float) for v in numbers) and row.radius >= 0 and not math.isnan(row.margin)
        wrong = row.failure is not None or row.prediction != (row.label if row.label >= 0 else max(row.prediction, 0))
        if not sound or (row.radius > 0 and wrong):
            raise InputError(f"{self.path} is damaged at input {row.id!r}: restore it from a copy")
        return row
