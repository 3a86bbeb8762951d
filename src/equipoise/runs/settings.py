"""What decides the result of a run: `Settings`, and the documents that `run.json` consists of.

A run is determined by its settings, its model and its data; `Manifest.digest` is the one digest over the three.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field

from equipoise.core.bounds import format_up
from equipoise.core.errors import InputError, Refused, did_you_mean
from equipoise.core.files import (
    Count,
    Document,
    NonNegative,
    PositiveCount,
    atomic_write,
    check_document,
    digest_document,
    read_json,
)
from equipoise.runs.inputs import Selection
from equipoise.smoothing import SimplexMap
from equipoise.smoothing.noise import Grid, Levels, NoiseName, NoiseSpec
from equipoise.smoothing.procedures import DEFAULT, Procedure, find_procedure

NAME = "run.json"

#: settings that `equipoise derive` can change on stored counts
DERIVABLE = ("alpha", "lipschitz", "procedure", "target_radius")

Kind = Literal["sampled", "proved"]
Norm = Literal["l2", "linf", "l1"]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Settings(Document):
    """Everything that changes the numbers of a run, apart from the model and the data.

    Args:
        kind: "sampled" (randomized smoothing) or "proved" (deterministic radii).
        inputs: which inputs of the data; several for merged runs.
        num_classes: number of logits; None: read off the model.
        sigma: noise level in the units of the model's input, the smallest one where channels differ.
        channels: the noise level of every channel, where they differ.
        n0: selection draws per input.
        n: estimation draws per input (the most, for adaptive runs).
        alpha: risk per input.
        procedure: a row of `smoothing.PROCEDURES`.
        seed: of the noise; None: drawn from the operating system.
        seed_source: "user" or "system".
        chunk_size: draws per noise key; part of the key.
        map: of soft procedures: "global" (calibrated once, on 32 inputs), or such as "softmax:0.5".
        lipschitz: None, a number (the user's own claim), or "auto" (`equipoise.lipschitz_bound`).
        target_radius: adaptive: stop an input as soon as it is certified or hopeless at this radius.
        nonfinite: "refuse" records an input with a NaN or infinite logit as failed, "miss" counts such draws for no class.
        noise: "grid" (exact integers) or "float"; None: the grid for 8-bit data.
        cells: points per unit of the grid.
        dimension: numbers in one input.
        device: kind of device the network runs on.
        norm: proved: of the ball.
        effort: proved: as in `eq.certified_radius`.
        seconds: proved: budget of processor time per input; the best radius so far counts when it ends.
        deployed: proved: "float32" adds radii of the forward pass in float32.
    """

    kind: Kind = "sampled"
    inputs: tuple[Selection, ...] = (Selection(),)
    num_classes: Annotated[int, Field(ge=2, le=10**7)] | None = None
    device: str = "cpu"

    sigma: Positive | None = None
    channels: tuple[Positive, ...] | None = None
    n0: Annotated[int, Field(ge=1, le=10**7)] = 100
    n: Annotated[int, Field(ge=1, le=10**10)] = 10_000
    alpha: Share = 1e-3
    procedure: str = DEFAULT
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    seed_source: Literal["user", "system"] = "user"
    chunk_size: Annotated[int, Field(ge=1, le=10**6)] = 100
    map: str | None = None
    lipschitz: NonNegative | Literal["auto"] | None = None
    target_radius: Positive | None = None
    nonfinite: Literal["refuse", "miss"] = "refuse"
    noise: NoiseName | None = None
    cells: Positive | None = None
    dimension: PositiveCount | None = None

    norm: Norm = "l2"
    effort: Literal["auto", "fast", "relaxation", "integral"] = "auto"
    seconds: Positive | None = None
    deployed: Literal["float32"] | None = None

    @classmethod
    def of(cls, kind: Kind, keywords: Mapping[str, Any]) -> Self:
        """Settings from the keywords of `certify` or `prove`, checked.

        Args:
            kind: of the run.
            keywords: fields of `Settings`, and skip, limit, stride, balanced; sigma may be a list, map a `SimplexMap`.
        """
        command = _COMMAND[kind]
        values = {name: _plain(value) for name, value in keywords.items()}
        selection = {name: values.pop(name) for name in Selection.model_fields if name in values}
        for name in values:
            if name not in _FIELDS[kind]:
                hint = did_you_mean(name, _FIELDS[kind])
                raise TypeError(f"{command}() got an unexpected keyword argument {name!r}{hint}")

        if kind == "sampled":
            if values.get("sigma") is None:
                raise TypeError("certify() needs sigma, the noise level in the units of the model's input")
            levels = Levels.of(values["sigma"])
            values |= {"sigma": float(levels.sigma), "channels": levels.channels}
        settings = check_document({"kind": kind, "inputs": [selection], **values}, cls, f"{command}()")
        settings.check()
        return settings

    def check(self) -> None:
        """Refuse combinations of settings that mean nothing, or that no certificate covers."""
        if self.kind == "proved":
            return
        procedure = self.row
        fixed = parse_map(self.map)
        if self.noise == "grid" and self.lipschitz is not None:
            raise Refused(
                "the Lipschitz-aware radius needs Lipschitz scores, and rounding to the grid is not Lipschitz: use "
                "--noise float, whose gap the certificates state"
            )
        if self.adaptive and procedure.soft and not procedure.hard:
            raise Refused(
                f"adaptive runs test the majority vote, {self.procedure!r} works on soft scores: use a vote procedure (cohen)"
            )
        if not procedure.soft and self.map is not None:
            raise InputError(
                f"{self.procedure!r} counts votes and takes no map: leave map out, or use 'rivals', 'lvm' or 'direct'"
            )
        votes = not procedure.soft or self.adaptive or (fixed is not None and fixed.votes)
        if self.lipschitz is not None and votes:
            raise InputError(
                "votes have no Lipschitz constant: --lipschitz goes with soft scores, --procedure rivals, lvm or direct"
            )
        for level in self.levels.channels or (self.levels.sigma,):
            if self.cells is not None:
                Grid(level, self.cells)

    @property
    def levels(self) -> Levels:
        """The noise levels."""
        levels = Levels.of(self.channels or self.sigma)
        if levels.sigma != self.sigma:
            raise InputError(f"sigma must be the smallest of the channels {self.channels}, got {self.sigma}")
        return levels

    @property
    def row(self) -> Procedure:
        """The procedure."""
        return find_procedure(self.procedure)

    @property
    def adaptive(self) -> bool:
        """Whether inputs stop as soon as their answer is certain."""
        return self.target_radius is not None

    @property
    def soft(self) -> bool:
        """Whether scores rather than votes are sampled (unless the map turns out to be the hardmax)."""
        wanted = self.map is not None or self.lipschitz is not None
        return self.row.soft and not self.adaptive and (wanted or self.row.map != "hardmax")

    def noise_law(self) -> NoiseSpec:
        """The law of the noise that is sampled."""
        return NoiseSpec(
            self.levels,
            self.noise,
            self.cells,
            self.dimension or 0,
            self.chunk_size,
            self.seed or 0,
            self.seed_source == "user",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data of the settings that belong to this kind of run and are set."""
        return self.model_dump(mode="json", include=_FIELDS[self.kind] | {"kind", "inputs"}, exclude_none=True)


_COMMAND: dict[Kind, str] = {"sampled": "certify", "proved": "prove"}
_PROVED = {"norm", "effort", "seconds", "deployed"}
_FIELDS: dict[Kind, set[str]] = {
    "sampled": set(Settings.model_fields) - _PROVED - {"kind", "inputs"},
    "proved": _PROVED | {"num_classes", "device", "dimension"},
}


def _plain(value: Any) -> Any:
    """NumPy numbers as Python numbers, maps as text."""
    if isinstance(value, SimplexMap):
        return map_text(value)
    return value.item() if isinstance(value, np.generic) else value


def parse_map(text: str | None) -> SimplexMap | None:
    """The map that a text fixes, None for "global".

    >>> parse_map("softmax:0.5")
    SimplexMap(name='softmax', temperature=0.5, mass=1.0)
    """
    if text in (None, "global"):
        return None
    name, _, temperature = str(text).partition(":")
    try:
        return SimplexMap(name, float(temperature or 1.0))  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(
            f"map must be 'global', 'hardmax', 'softmax:T' or 'sparsemax:T' with T > 0, got {text!r}"
        ) from error


def map_text(value: SimplexMap) -> str:
    """The text of a map, which `parse_map` reads.

    Mass r at temperature T certifies what mass 1 at temperature r·T does (see `smoothing.simplex`).

    >>> map_text(SimplexMap("softmax", 0.5))
    'softmax:0.5'
    """
    return f"{value.name}:{value.temperature * value.mass!r}"


class Constant(Document):
    """A Lipschitz constant of the network and where it comes from: computed here, or claimed by the user."""

    value: NonNegative
    source: Literal["computed", "given"]

    @property
    def assumed(self) -> bool:
        """Whether it is the user's claim rather than a proved bound."""
        return self.source == "given"

    def __str__(self) -> str:
        origin = "given by the user: an assumption, not checked"
        return f"{format_up(self.value)}, {origin if self.assumed else 'computed by equipoise.lipschitz_bound'}"


class ModelRecord(Document):
    """The model: its name, the digest of the stored network."""

    source: str
    hash: str


class DataRecord(Document):
    """The data: its name, its fingerprint, how many inputs it has, and the class names where it has some."""

    source: str
    fingerprint: str
    inputs: Count
    classes: tuple[str, ...] | None = None


class Recipe(Document):
    """How a command loads model and data again: sources and preprocessing, as the options were given."""

    model: str
    data: str
    weights: str | None = None
    denoiser: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    split: str | None = None
    layout: str | None = None
    size: tuple[PositiveCount, PositiveCount] | None = None
    columns: tuple[str, str] | None = None


def versions() -> dict[str, str]:
    """The software that computes."""
    names = ("equipoise", "torch", "numpy", "scipy")
    return {name: metadata.version(name) for name in names} | {"python": platform.python_version()}


class Manifest(Document):
    """`run.json`: what a run is. Written once, before the first input."""

    format: Literal[1] = 1
    created: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    model: ModelRecord
    data: DataRecord
    settings: Settings
    total: PositiveCount
    map: str | None = None
    lipschitz: Constant | None = None
    note: str = ""
    recipe: Recipe | None = None
    versions: dict[str, str] = Field(default_factory=versions)

    @property
    def simplex(self) -> SimplexMap | None:
        """The map of soft votes, fixed before the run."""
        return parse_map(self.map)

    @property
    def scored(self) -> bool:
        """Whether soft votes are sampled: the run is soft, and its map is not the majority vote."""
        return self.settings.soft and self.simplex is not None and not self.simplex.votes

    def identity(self) -> dict[str, Any]:
        """What must not change while a run is continued, flat, with readable names."""
        return {
            "model": self.model.hash,
            "data": self.data.fingerprint,
            "total": self.total,
            "fixed map": self.map,
            "constant": str(self.lipschitz),
            **self.settings.to_dict(),
        }

    def digest(self) -> str:
        """The digest of the run: settings, model, data, and the map and the constant that were fixed beforehand."""
        return digest_document(self.identity())

    def stretched(self, constant: Constant | None) -> float | None:
        """The constant in the coordinates in which the noise is round (see `smoothing.noise`)."""
        return None if constant is None else constant.value * self.settings.levels.stretch

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: what `run.json` holds."""
        return self.model_dump(mode="json") | {"settings": self.settings.to_dict(), "digest": self.digest()}

    def write(self, folder: Path) -> None:
        """Write `run.json`, whole or not at all."""
        atomic_write(folder / NAME, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")


def as_path(value: Any) -> Path:
    """A path; anything else is refused."""
    if not isinstance(value, str | Path):
        raise InputError(f"expected a path, got {type(value).__name__}")
    return Path(value)


def is_run(folder: str | Path) -> bool:
    """Whether a directory holds a run."""
    return (as_path(folder) / NAME).is_file()


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a run directory; one that was changed after it was written is refused.

    Args:
        folder: the run directory.
    """
    path = as_path(folder) / NAME
    if not is_run(folder):
        raise InputError(f"{folder} is not a run directory: it has no {NAME}")

    plain = read_json(path)
    stored = plain.pop("digest", None) if isinstance(plain, dict) else None
    manifest = check_document(plain, Manifest, str(path))
    settings = manifest.settings
    settings.check()
    if settings.num_classes is None or settings.dimension is None or stored != manifest.digest():
        raise InputError(f"{path} was changed after it was written (its digest does not fit): restore it")
    return manifest


def differences(old: Manifest, new: Manifest, ignore: Iterable[str]) -> list[str]:
    """`name: old → new` for everything that differs, but for seeds that were drawn from the operating system.

    Args:
        old: a manifest.
        new: another one.
        ignore: names that may differ.
    """
    before = old.identity()
    after = new.identity()
    skipped = {"seed_source", *ignore}
    if old.settings.seed_source == new.settings.seed_source == "system":
        skipped.add("seed")
    return [
        f"{name}: {_short(before.get(name))} → {_short(after.get(name))}"
        for name in sorted(before.keys() | after.keys())
        if name not in skipped and before.get(name) != after.get(name)
    ]


def require_same(folder: Path, old: Manifest, new: Manifest) -> None:
    """Refuse to continue a run with another model, other data or other settings.

    Args:
        folder: of the run.
        old: its manifest.
        new: the manifest of the command, whose map and constant are not fixed yet.
    """
    changes = differences(old, new, ("fixed map", "constant"))
    if not changes:
        return
    names = {line.partition(":")[0] for line in changes}
    hint = "give another --run directory"
    if names <= set(DERIVABLE):
        hint = f"to change {' and '.join(sorted(names))} without sampling: equipoise derive {folder}"
    raise Refused(f"{folder} holds another run ({'; '.join(changes)}): {hint}")


def _short(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text[:19] + "…" if text.startswith("sha256:") else text
