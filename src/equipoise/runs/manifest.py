"""`run.json`: what a run is. Written once, before the first input; a command that means another run is refused."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from equipoise.core import InputError, Refused, format_up
from equipoise.core.digests import Digest, sealed, unsealed
from equipoise.core.files import as_input_error, atomic_write, read_json
from equipoise.runs.inputs import Selection
from equipoise.runs.parameters import Parameters, parse_map
from equipoise.smoothing import SimplexMap

NAME = "run.json"
FORMAT = 1
#: parameters that `--re-derive` can change on a finished run
DERIVED = ("alpha", "procedure", "lipschitz")


@dataclass(frozen=True)
class Constant:
    """A Lipschitz constant of the network and where it comes from: computed here, or claimed by the user."""

    value: float
    source: str

    @property
    def assumed(self) -> bool:
        """Whether it is the user's claim rather than a proved bound."""
        return self.source != "computed"

    def __str__(self) -> str:
        if self.assumed:
            return f"{format_up(self.value)}, given by the user: an assumption, not checked"
        return f"{format_up(self.value)}, computed by equipoise.lipschitz_bound"


def _digest(plain: dict[str, Any]) -> str:
    return Digest(json.dumps(plain, sort_keys=True)).hex()


class Described:
    """What a run is, in a file that is written once and sealed: its identity must not change while the run is continued."""

    file: ClassVar[str]

    def identity(self) -> dict[str, Any]:
        """What must not change while a run is continued, flat, with readable names."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """What the file holds, without its digest."""
        raise NotImplementedError

    def digest(self) -> str:
        """sha256 of the identity."""
        return _digest(self.identity())

    def seal(self) -> str:
        """Digest of all of it, kept in the file and in the store: an edited number is noticed (see `runs.store`)."""
        return str(sealed(self.to_dict())["digest"])

    def write(self, folder: Path) -> None:
        """Write the file, whole or not at all."""
        atomic_write(folder / self.file, json.dumps(sealed(self.to_dict()), indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Manifest(Described):
    """Model, data, inputs and parameters of a run; the map and the constant fixed before it; the versions that began it."""

    model: dict[str, str]
    data: dict[str, Any]
    selection: tuple[Selection, ...]
    total: int
    parameters: Parameters
    map: SimplexMap | None = None
    lipschitz: Constant | None = None
    versions: dict[str, str] = field(default_factory=lambda: versions())
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    file = NAME

    def identity(self) -> dict[str, Any]:
        """Format, model, data, inputs and parameters."""
        plain: dict[str, Any] = {
            "format": FORMAT,
            "model": self.model["hash"],
            "data": self.data["fingerprint"],
            "inputs": [s.to_dict() for s in self.selection],
            "total": self.total,
        }
        return plain | self.parameters.to_dict()

    def stretched(self, constant: Constant | None) -> float | None:
        """The constant in the coordinates in which the noise is round (see `smoothing.noise`)."""
        return None if constant is None else constant.value * self.parameters.levels.stretch

    def digest(self, *, asked: bool = False) -> str:
        """sha256 of the identity; `asked` leaves out a seed that nobody asked for, so that the same command finds its run."""
        plain = self.identity()
        if asked and self.parameters.seed_source == "system":
            del plain["seed"]
        return _digest(plain)

    def to_dict(self) -> dict[str, Any]:
        """What `run.json` holds, without its digest."""
        return {
            "format": FORMAT,
            "created": self.created,
            "model": self.model,
            "data": self.data,
            "inputs": {"selection": [s.to_dict() for s in self.selection], "total": self.total},
            "parameters": self.parameters.to_dict(),
            "map": None if self.map is None else asdict(self.map),
            "lipschitz": None if self.lipschitz is None else asdict(self.lipschitz),
            "versions": self.versions,
        }

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Manifest:
        """The inverse of `to_dict`."""
        if plain.get("format") != FORMAT:
            raise InputError(f"run.json has format {plain.get('format')!r}, this version reads {FORMAT}")
        chosen, constant, inputs = plain.get("map"), plain.get("lipschitz"), plain["inputs"]
        shapes = {"model": dict, "data": dict, "versions": dict, "created": str, "parameters": dict}
        texts = [plain["model"]["hash"], plain["data"]["fingerprint"], *plain["versions"].values()]
        if not all(isinstance(plain[k], kind) for k, kind in shapes.items()) or not all(
            isinstance(t, str) for t in texts
        ):
            raise TypeError("a field is of another kind than this version writes")
        if not isinstance(inputs["total"], int) or inputs["total"] < 1:
            raise ValueError(f"{inputs['total']!r} inputs")
        return cls(
            plain["model"], plain["data"], tuple(Selection(**s) for s in inputs["selection"]), inputs["total"],
            Parameters.from_dict(plain["parameters"]), None if chosen is None else SimplexMap(**chosen),
            None if constant is None else Constant(float(constant["value"]), str(constant["source"])),
            plain["versions"], plain["created"],
        )  # fmt: skip


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a run directory; one that was changed after it was written is refused."""
    path = Path(folder) / NAME
    if not is_run(folder):
        raise InputError(f"{folder} is not a run directory: no readable {NAME}")
    with as_input_error(path, "restore it, or start a new run"):
        found = Manifest.from_dict(unsealed(read_json(path), str(path)))
    _require_consistent(found, path)
    return found


def _require_consistent(manifest: Manifest, path: Path) -> None:
    """The map and the constant that were settled must be what the parameters ask for; this holds without a digest, too."""
    asked, settled = manifest.parameters.lipschitz, manifest.lipschitz
    fits = (
        settled is None
        if asked is None
        else settled is not None and math.isfinite(settled.value) and settled.value >= 0
    )
    if fits and settled is not None:
        fits = settled.source == "computed" if asked == "auto" else settled == Constant(float(asked or 0), "given")
    if not fits:
        raise InputError(f"{path} is damaged: it holds the Lipschitz constant {settled}, but {asked!r} was asked for")
    p = manifest.parameters
    if p.soft and p.map not in (None, "global", "per-input") and manifest.map != parse_map(p.map):
        raise InputError(f"{path} is damaged: it holds the map {manifest.map}, but {p.map!r} was asked for")


def is_run(folder: str | Path) -> bool:
    """Whether a directory holds a run."""
    return (Path(folder) / NAME).is_file()


def differences(old: Manifest, new: Manifest) -> list[str]:
    """`name: old → new` for everything that differs, but for seeds that were drawn from the operating system.

    >>> from equipoise.runs.parameters import Parameters, parse_map
    >>> one = Manifest({"hash": "a"}, {"fingerprint": "b"}, (Selection(),), 5, Parameters(0.25, 10))
    >>> two = Manifest({"hash": "a"}, {"fingerprint": "b"}, (Selection(),), 5, Parameters(0.5, 10, n=500))
    >>> differences(one, two)
    ['n: 10000 → 500', 'sigma: 0.25 → 0.5']
    """
    before, after = old.identity(), new.identity()
    names = sorted((set(before) | set(after)) - {"seed_source"})
    if old.parameters.seed_source == new.parameters.seed_source == "system":
        names.remove("seed")  # nobody asked for it: the stored one is kept
    return [
        f"{k}: {_short(k, before.get(k))} → {_short(k, after.get(k))}" for k in names if before.get(k) != after.get(k)
    ]


def require_same(folder: Path, old: Manifest, new: Manifest) -> None:
    """Refuse to continue a run with another model, other data or other parameters."""
    found = differences(old, new)
    if not found:
        return
    names = {line.partition(":")[0] for line in found}
    hint = "give another --run directory"
    if old.parameters.noise is None:
        hint = (
            "it was sampled by the first release, whose noise is no longer drawn. Give another --run directory; what it "
            f"holds can be derived again: equipoise certify {folder} --re-derive --procedure rivals"
        )
    if names <= set(DERIVED):
        hint = f"to change {' and '.join(sorted(names))} without sampling: equipoise certify {folder} --re-derive"
    raise Refused(f"{folder} holds another run ({'; '.join(found)}): {hint}")


def _short(name: str, value: Any) -> str:
    if name == "inputs" and isinstance(value, list):
        return " + ".join(f"skip {s['skip']} limit {s['limit']} stride {s['stride']}" for s in value)
    text = "unset" if value is None else str(value)
    return text[:19] + "…" if text.startswith("sha256:") else text


def versions() -> dict[str, str]:
    """The software that computes."""
    import numpy
    import scipy
    import torch

    from equipoise import __version__

    return {
        "equipoise": __version__, "torch": torch.__version__, "numpy": numpy.__version__, "scipy": scipy.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
