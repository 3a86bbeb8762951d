"""What decides the result of a run: `Settings`, and the documents that `run.json` consists of.

A run is determined by its settings, its model and its data; `Manifest.digest` is the one digest over the three.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field

from equipoise.core.bounds import format_up
from equipoise.core.digests import digest_document
from equipoise.core.documents import Count, Document, NonNegative, PositiveCount, check_document
from equipoise.core.errors import InputError, Refused, did_you_mean
from equipoise.core.files import atomic_write, read_json
from equipoise.runs.inputs import Selection
from equipoise.smoothing import SimplexMap
from equipoise.smoothing.noise import Grid, Levels, NoiseName, NoiseSpec
from equipoise.smoothing.procedures import DEFAULT, Procedure, find_procedure

NAME = "run.json"

#: settings that `equipoise derive` can change on stored counts
DERIVABLE = ("alpha", "lipschitz", "procedure", "target_radius")

Kind = Literal["sampled", "proved"]
Norm = Literal["l2", "linf", "l1"]
Draws = Annotated[int, Field(ge=1, le=10**10)]
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
        map: of soft procedures: "global" (calibrated once, on 32 inputs), "per-input", or such as "softmax:0.5".
        lipschitz: None, a number (the user's own claim), or "auto" (`equipoise.lipschitz_bound`).
        target_radius: adaptive: stop an input as soon as it is certified or hopeless at this radius.
        relative: adaptive: stop within this share of the radius that n draws could still give.
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
    n: Draws = 10_000
    alpha: Share = 1e-3
    procedure: str = DEFAULT
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    seed_source: Literal["user", "system"] = "user"
    chunk_size: Annotated[int, Field(ge=1, le=10**6)] = 100
    map: str | None = None
    lipschitz: NonNegative | Literal["auto"] | None = None
    target_radius: Positive | None = None
    relative: Share | None = None
    nonfinite: Literal["refuse", "miss"] = "refuse"
    noise: NoiseName | None = None
    cells: Positive | None = None
    dimension: PositiveCount | None = None

    norm: Norm = "l2"
    effort: Literal["auto", "fast", "relaxation", "integral"] = "auto"
    seconds: Positive | None = None
    deployed: Literal["float32"] | None = None

    @classmethod
    def of(cls, kind: Kind, keywords: Mapping[str, Any], others: Iterable[str] = ()) -> Self:
        """Settings from the keywords of `certify` or `prove`.

        Args:
            kind: of the run.
            keywords: fields of `Settings`, and skip, limit, stride, balanced; sigma may be a list, map a `SimplexMap`.
            others: further parameter names, for the "did you mean" of an unknown one.
        """
        function = "certify" if kind == "sampled" else "prove"
        values = {name: _plain(value) for name, value in keywords.items()}
        chosen = {name: values.pop(name) for name in Selection.model_fields if name in values}

        allowed = (_PROVED if kind == "proved" else _SAMPLED) | {"num_classes", "device"}
        for name in values:
            if name not in allowed:
                hint = did_you_mean(name, [*allowed, *Selection.model_fields, *others])
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")

        if kind == "sampled":
            if values.get("sigma") is None:
                raise TypeError("certify() needs sigma, the noise level in the units of the model's input")
            levels = Levels.of(values["sigma"])
            values |= {"sigma": float(levels.sigma), "channels": levels.channels}

        try:
            made = check_document({"kind": kind, "inputs": [chosen], **values}, cls, f"{function}()")
        except TypeError as error:
            raise InputError(f"{function}(): a setting is not a plain value: {error}") from error
        made.check()
        return made

    def check(self) -> None:
        """Refuse combinations of settings that mean nothing, or that no certificate covers."""
        if self.kind == "proved":
            return
        levels = self.levels
        row = self.row
        fixed = parse_map(self.map)

        if self.noise == "grid" and self.lipschitz is not None:
            raise Refused(
                "the Lipschitz-aware radius needs Lipschitz scores, and rounding to the grid is not Lipschitz: use "
                "--noise float, whose gap the certificates state"
            )
        if self.target_radius is not None and self.relative is not None:
            raise InputError("give either target_radius or relative, not both")
        if self.adaptive and row.soft and not row.hard:
            raise Refused(
                f"adaptive runs test the majority vote, {self.procedure!r} works on soft scores: use a vote procedure (cohen)"
            )
        if not row.soft and self.map is not None:
            raise InputError(
                f"{self.procedure!r} counts votes and takes no map: leave map out, or use 'rivals', 'lvm' or 'direct'"
            )
        votes = not row.soft or self.adaptive or (fixed is not None and fixed.votes)
        if self.lipschitz is not None and votes:
            raise InputError(
                "votes have no Lipschitz constant: --lipschitz goes with soft scores, --procedure rivals, lvm or direct"
            )
        if self.cells is not None:
            for level in levels.channels or (levels.sigma,):
                Grid(level, self.cells)

    @property
    def levels(self) -> Levels:
        """The noise levels."""
        if self.sigma is None:
            raise InputError("a proved run has no noise level")
        found = Levels.of(self.channels or self.sigma)
        if found.sigma != self.sigma:
            raise InputError(
                f"channels hold the noise levels {self.channels}, whose smallest is not sigma = {self.sigma}"
            )
        return found

    @property
    def row(self) -> Procedure:
        """The procedure."""
        return find_procedure(self.procedure)

    @property
    def adaptive(self) -> bool:
        """Whether inputs stop as soon as their answer is known."""
        return self.target_radius is not None or self.relative is not None

    @property
    def soft(self) -> bool:
        """Whether scores rather than votes are sampled (unless the map turns out to be the hardmax)."""
        wanted = self.map is not None or self.lipschitz is not None
        return self.row.soft and not self.adaptive and (wanted or self.row.map != "hardmax")

    def noise_law(self) -> NoiseSpec:
        """The law of the noise that is sampled."""
        chosen = self.seed_source == "user"
        dimension = self.dimension or 0
        return NoiseSpec(self.levels, self.noise, self.cells, dimension, self.chunk_size, self.seed or 0, chosen)

    def to_dict(self) -> dict[str, Any]:
        """Plain data of the settings that belong to this kind of run and are set."""
        own = _PROVED if self.kind == "proved" else _SAMPLED
        plain = self.model_dump(mode="json", include=own | {"kind", "inputs", "num_classes", "device"})
        return {name: value for name, value in plain.items() if value is not None}


_PROVED = {"norm", "effort", "seconds", "deployed"}
_SAMPLED = set(Settings.model_fields) - _PROVED - {"kind", "inputs", "num_classes", "device"}


def _plain(value: Any) -> Any:
    """Numbers of NumPy as Python's, maps as text, lists as tuples."""
    if isinstance(value, SimplexMap):
        # mass r at temperature T certifies what mass 1 at temperature r·T does (see `smoothing.simplex`)
        return map_text(value)
    if isinstance(value, np.generic):
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def parse_map(text: str | None) -> SimplexMap | None:
    """The map that a text fixes, None for "global" and "per-input".

    >>> parse_map("softmax:0.5")
    SimplexMap(name='softmax', temperature=0.5, mass=1.0)
    """
    if text in (None, "global", "per-input"):
        return None
    name, _, temperature = str(text).partition(":")
    try:
        if name not in ("softmax", "sparsemax", "hardmax"):
            raise ValueError
        return SimplexMap(name, float(temperature) if temperature else 1.0)  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(
            f"map must be 'global', 'per-input', 'hardmax', 'softmax:T' or 'sparsemax:T' with T > 0, got {text!r}"
        ) from error


def map_text(value: SimplexMap) -> str:
    """The text of a map, which `parse_map` reads.

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
        if self.assumed:
            return f"{format_up(self.value)}, given by the user: an assumption, not checked"
        return f"{format_up(self.value)}, computed by equipoise.lipschitz_bound"


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
    size: tuple[Annotated[int, Field(ge=1, le=10**5)], Annotated[int, Field(ge=1, le=10**5)]] | None = None
    columns: tuple[str, str] | None = None
    classes: tuple[str, ...] | dict[str, int] | None = None


def versions() -> dict[str, str]:
    """The software that computes."""
    import scipy
    import torch

    from equipoise import __version__

    return {
        "equipoise": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
    }


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

    def identity(self) -> dict[str, Any]:
        """What must not change while a run is continued, flat, with readable names."""
        plain = {"model": self.model.hash, "data": self.data.fingerprint, "total": self.total}
        return plain | self.settings.to_dict()

    def digest(self, *, any_seed: bool = False) -> str:
        """The digest of the run: settings, model, data, and the map and the constant that were fixed beforehand.

        Args:
            any_seed: leave out what is not decided by the command: a seed from the system, the map, the constant.
        """
        plain = self.identity()
        if not any_seed:
            plain |= {"fixed map": self.map, "constant": str(self.lipschitz)}
        elif self.settings.seed_source == "system":
            plain.pop("seed", None)
        return digest_document(plain)

    def stretched(self, constant: Constant | None) -> float | None:
        """The constant in the coordinates in which the noise is round (see `smoothing.noise`)."""
        return None if constant is None else constant.value * self.settings.levels.stretch

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: what `run.json` holds."""
        plain = self.model_dump(mode="json", exclude={"settings"})
        return plain | {"settings": self.settings.to_dict(), "digest": self.digest()}

    def write(self, folder: Path) -> None:
        """Write `run.json`, whole or not at all."""
        atomic_write(folder / NAME, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")


def as_path(value: Any) -> Path:
    """A path; what is none is refused."""
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
    try:
        manifest.settings.check()
    except InputError as error:
        raise InputError(f"{path} is damaged: {error}") from error

    settings = manifest.settings
    unset = settings.num_classes is None
    if settings.kind == "sampled":
        unset = unset or settings.seed is None or settings.dimension is None
    if unset or stored != manifest.digest():
        raise InputError(f"{path} was changed after it was written (its digest does not fit): restore it")
    return manifest


def differences(old: Manifest, new: Manifest, ignore: Sequence[str] = ()) -> list[str]:
    """`name: old → new` for everything that differs, but for seeds that were drawn from the operating system.

    Args:
        old: a manifest.
        new: another one.
        ignore: names that may differ.
    """
    before, after = old.identity(), new.identity()
    skipped = {"seed_source", *ignore}
    if old.settings.seed_source == new.settings.seed_source == "system":
        skipped.add("seed")
    names = sorted(set(before) | set(after) - skipped)
    return [
        f"{name}: {_short(name, before.get(name))} → {_short(name, after.get(name))}"
        for name in names
        if name not in skipped and before.get(name) != after.get(name)
    ]


def require_same(folder: Path, old: Manifest, new: Manifest) -> None:
    """Refuse to continue a run with another model, other data or other settings.

    Args:
        folder: of the run.
        old: its manifest.
        new: the manifest of the command.
    """
    found = differences(old, new)
    if not found:
        return
    names = {line.partition(":")[0] for line in found}
    hint = "give another --run directory"
    if names <= set(DERIVABLE):
        hint = f"to change {' and '.join(sorted(names))} without sampling: equipoise derive {folder}"
    raise Refused(f"{folder} holds another run ({'; '.join(found)}): {hint}")


def _short(name: str, value: Any) -> str:
    if name == "inputs" and isinstance(value, list):
        return " + ".join(f"skip {s['skip']} limit {s['limit']} stride {s['stride']}" for s in value)
    text = "unset" if value is None else str(value)
    return text[:19] + "…" if text.startswith("sha256:") else text
