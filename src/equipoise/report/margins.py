"""Deterministic certificates in a folder: `margins.json`, the counterpart of a smoothing run's store."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.digests import sealed, unsealed
from equipoise.core.errors import InputError
from equipoise.core.files import describing, make_folder, read_json, write_whole
from equipoise.report.data import Floats, Ints
from equipoise.runs import AttackRow

NAME = "margins.json"
FORMAT = 1
#: how radii come from margins: by the bound of all logits, or by those of pairs of classes where they are better
GLOBAL, PAIRS = "margin/(√2·L)", "the better of margin/(√2·L) and margin_k/K_yk, by pairs of classes"


@dataclass(frozen=True, eq=False)
class Margins:
    """Margin certificates of some inputs: the constant they rest on, the rule (`GLOBAL`, `PAIRS`), attacks against them."""

    model: Mapping[str, str]
    data: str
    lipschitz: float
    ids: tuple[str, ...]
    labels: Ints
    prediction: Ints
    radius: Floats
    attacks: tuple[AttackRow, ...] = ()
    rule: str = GLOBAL

    def save(self, folder: str | Path) -> Path:
        """Write `margins.json`, whole or not at all."""
        folder = make_folder(folder)
        plain: dict[str, Any] = {
            "format": FORMAT, "model": dict(self.model), "data": self.data, "lipschitz": _plain(self.lipschitz),
            "ids": list(self.ids), "labels": self.labels.tolist(), "prediction": self.prediction.tolist(),
            "radius": [_plain(r) for r in self.radius.tolist()], "attacks": [asdict(a) for a in self.attacks],
            "rule": self.rule,
        }  # fmt: skip
        write_whole(folder / NAME, json.dumps(sealed(plain), ensure_ascii=False, allow_nan=False) + "\n")
        return folder / NAME


def load_margins(folder: str | Path) -> Margins:
    """Read `margins.json`; what is damaged is refused with the file's name."""
    path = Path(folder) / NAME
    with describing(path):
        plain = unsealed(read_json(path, 10**9), str(path))
        if plain["format"] != FORMAT:
            raise InputError(f"{path} has format {plain['format']!r}, this version reads {FORMAT}")
        found = Margins(
            {str(k): str(v) for k, v in plain["model"].items()}, str(plain["data"]), float(plain["lipschitz"]),
            tuple(str(i) for i in plain["ids"]), np.array(plain["labels"], dtype=np.int64),
            np.array(plain["prediction"], dtype=np.int64), np.array([float(r) for r in plain["radius"]]),
            tuple(AttackRow(**a) for a in plain["attacks"]), PAIRS if plain.get("rule") == PAIRS else GLOBAL,
        )  # fmt: skip
    if len({len(found.ids), len(found.labels), len(found.prediction), len(found.radius)}) != 1:
        raise InputError(f"{path} is damaged: its columns have different lengths")
    return found


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
