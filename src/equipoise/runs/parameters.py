"""What a run is asked for, checked before anything is sampled: `Settings` as callers give them, `Parameters` as they are stored.

A field that changes numbers stands once, in `Sampling`, with its default and its check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Required, TypedDict

import torch

from equipoise.core import InputError, Refused
from equipoise.core.errors import did_you_mean
from equipoise.runs.inputs import Selection
from equipoise.smoothing import SimplexMap
from equipoise.smoothing.grid import Grid
from equipoise.smoothing.noise import Levels, NoiseName, NoiseSpec, Sigma, fresh_seed
from equipoise.smoothing.procedures import DEFAULT, Procedure, find_procedure

_MAPS = ("softmax", "sparsemax", "hardmax")


@dataclass(frozen=True)
class Sampling:
    """What changes the numbers of a run, whoever says it.

    Args:
        sigma: noise level, in the units of the model's input; a list has one level per channel.
        num_classes: number of logits.
        n0: selection draws per input.
        n: estimation draws per input (the most, for adaptive runs).
        alpha: risk per input.
        procedure: a row of `smoothing.PROCEDURES`.
        seed: of the noise, given by the user or drawn from the operating system.
        chunk_size: draws per noise key; part of the key.
        map: of soft procedures: "global" (calibrated once before the run), "per-input", or a map such as "softmax:0.5".
        calibration: inputs the global map is calibrated on.
        lipschitz: None, a number (the user's own claim), or "auto" (`equipoise.lipschitz_bound`).
        target_radius: adaptive: stop an input as soon as it is certified or hopeless at this radius.
        relative: adaptive: stop within this share of the radius that n draws could still give.
        hopeless: adaptive: risk of giving up an input that would have been certified.
        nonfinite: "refuse" records an input with a NaN or infinite logit as failed, "miss" counts such draws for no class.
        noise_dtype: "float32" or "float64"; None: that of the input.
        device: kind of device the network ran on.
        noise: "grid" (exact integers) or "float".
    """

    sigma: Sigma
    num_classes: int | None
    n0: int = 100
    n: int = 10_000
    alpha: float = 1e-3
    procedure: str = DEFAULT
    seed: int | None = None
    chunk_size: int = 100
    map: str | SimplexMap | None = None
    calibration: int | None = None
    lipschitz: float | Literal["auto"] | None = None
    target_radius: float | None = None
    relative: float | None = None
    hopeless: float | None = None
    nonfinite: Literal["refuse", "miss"] = "refuse"
    noise_dtype: str | None = None
    device: str = "cpu"
    noise: NoiseName | None = None

    def __post_init__(self) -> None:
        for name in ("n0", "n", "chunk_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} must be a positive whole number, got {value!r}")
        if not 0 < self.alpha < 1:
            raise InputError(f"the risk alpha must lie strictly between 0 and 1, got {self.alpha}")
        if self.num_classes is not None and self.num_classes < 2:
            raise InputError(f"a classifier has at least two classes, got {self.num_classes}")
        if self.nonfinite not in ("refuse", "miss"):
            raise InputError(f"nonfinite must be 'refuse' or 'miss', got {self.nonfinite!r}")
        if self.noise_dtype not in (None, "float32", "float64"):
            raise InputError(f"noise_dtype must be 'float32' or 'float64', got {self.noise_dtype!r}")
        if self.noise not in (None, "grid", "float"):
            raise InputError(f"noise must be 'grid' or 'float', got {self.noise!r}")
        if self.noise == "grid" and self.lipschitz is not None:
            raise Refused(
                "the Lipschitz-aware radius needs Lipschitz scores, and rounding to the grid is not Lipschitz: use "
                "--noise float, whose gap the certificates state"
            )
        self._check_adaptive()
        self._check_soft()

    def _check_adaptive(self) -> None:
        if self.target_radius is not None and self.relative is not None:
            raise InputError("give either target_radius or relative, not both")
        if not self.adaptive:
            return
        if self.row.soft and not self.row.hard:
            raise Refused(
                f"adaptive runs test the majority vote, {self.procedure!r} works on soft scores: use a vote procedure "
                "(cohen), or smoothing.certify_adaptive with a map"
            )
        if self.target_radius is not None:
            _positive("target_radius", self.target_radius)
        if self.relative is not None and not 0 < self.relative < 1:
            raise InputError(f"relative must lie strictly between 0 and 1, got {self.relative}")
        if self.hopeless is not None and not 0 < self.hopeless < 1:
            raise InputError(f"hopeless must lie strictly between 0 and 1, got {self.hopeless}")

    def _check_soft(self) -> None:
        fixed = parse_map(self.map)
        if not self.row.soft and self.map is not None:
            raise InputError(
                f"{self.procedure!r} counts votes and takes no map: leave map out, or use 'rivals', 'lvm' or 'direct'"
            )
        if self.lipschitz is None:
            return
        if self.lipschitz != "auto" and not (math.isfinite(self.lipschitz) and self.lipschitz >= 0):
            raise InputError(f"lipschitz must be a non-negative number or 'auto', got {self.lipschitz!r}")
        if not self.row.soft or self.adaptive or (fixed is not None and fixed.votes):
            raise InputError(
                "votes have no Lipschitz constant: --lipschitz goes with soft scores, --procedure rivals, lvm or direct"
            )

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
        asked = self.map is not None or self.lipschitz is not None
        return self.row.soft and not self.adaptive and (asked or self.row.map != "hardmax")


@dataclass(frozen=True)
class Settings(Sampling):
    """Everything a caller can set: what changes the numbers, the inputs to certify, and how the passes are made.

    `certify`, `describe`, the command line, predictions and attacks all go through it.

    Args:
        denoiser: a network from noisy image to image, put before the model.
        skip: leave out the first inputs.
        limit: at most this many.
        stride: take every so many-th.
        balanced: with `limit`, the first of every class in turn.
        batch_size: the most draws per forward pass (memory); no number depends on it.
        name: of the data, for the record.

    >>> Settings(0.25, map=SimplexMap("softmax", 0.5), procedure="lvm").settled(10, 4, "float").to_dict()["map"]
    'softmax:0.5'
    """

    num_classes: int | None = None
    denoiser: Any = None
    skip: int = 0
    limit: int | None = None
    stride: int = 1
    balanced: bool = False
    batch_size: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        Levels.of(self.sigma)
        super().__post_init__()
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch_size must be positive, got {self.batch_size}")

    @classmethod
    def of(cls, keywords: Mapping[str, Any], others: Iterable[str] = ()) -> Settings:
        """From keywords; one that is not known is refused with the nearest one, of `others` too."""
        known = [f.name for f in fields(cls)]
        for name in keywords:
            if name not in known:
                hint = did_you_mean(name, [*known, *others])
                raise TypeError(f"certify() got an unexpected keyword argument {name!r}{hint}")
        if "sigma" not in keywords:
            raise TypeError("certify() needs sigma, the noise level in the units of the model's input")
        return cls(**keywords)

    @property
    def levels(self) -> Levels:
        """The noise levels."""
        return Levels.of(self.sigma)

    def selection(self, labelled: bool) -> Selection:
        """Which inputs; those without labels cannot be balanced."""
        return Selection(self.skip, self.limit, self.stride, self.balanced and self.limit is not None and labelled)

    def settled(self, num_classes: int, dimension: int, noise: NoiseName, cells: float | None = None) -> Parameters:
        """With what the model and the data say, the defaults of soft and adaptive runs, and a seed if none was given."""
        same = {f.name: getattr(self, f.name) for f in fields(Sampling)}
        text = f"{self.map.name}:{self.map.temperature!r}" if isinstance(self.map, SimplexMap) else self.map
        if self.soft and text is None:
            text = "global"
        return Parameters(**same | {
            "sigma": self.levels.sigma, "channels": self.levels.channels, "num_classes": num_classes, "map": text,
            "calibration": 32 if text == "global" and self.calibration is None else self.calibration,
            "hopeless": 0.05 if self.adaptive and self.hopeless is None else self.hopeless,
            "device": torch.device(self.device).type, "noise": noise, "cells": cells, "dimension": dimension,
            "seed": fresh_seed() if self.seed is None else self.seed,
            "seed_source": "system" if self.seed is None else "user",
        })  # fmt: skip


class Keywords(TypedDict, total=False):
    """The fields of `Settings` as keywords, for the type checker; a test holds the two together."""

    sigma: Required[Sigma]
    num_classes: int | None
    n0: int
    n: int
    alpha: float
    procedure: str
    seed: int | None
    chunk_size: int
    map: str | SimplexMap | None
    calibration: int | None
    lipschitz: float | Literal["auto"] | None
    target_radius: float | None
    relative: float | None
    hopeless: float | None
    nonfinite: Literal["refuse", "miss"]
    noise_dtype: str | None
    device: str
    noise: NoiseName | None
    denoiser: Any
    skip: int
    limit: int | None
    stride: int
    balanced: bool
    batch_size: int | None
    name: str | None


@dataclass(frozen=True)
class Parameters(Sampling):
    """What stands in `run.json`; together with the model and the data it determines every count of the run.

    Args:
        noise: None in runs of the first release, whose noise was float and keyed by 32 bits.
        cells: points per unit of the grid.
        dimension: numbers in one input.
        seed_source: "user" or "system".
        channels: the noise level of every channel, where they differ; `sigma` is the smallest.
    """

    sigma: float
    num_classes: int
    seed: int = 0
    map: str | None = None
    cells: float | None = None
    dimension: int | None = None
    seed_source: Literal["user", "system"] | None = None
    channels: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _positive("sigma", self.sigma)
        for name in ("num_classes", "seed"):
            if not isinstance(getattr(self, name), int):
                raise InputError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        super().__post_init__()
        if self.channels is not None and Levels.of(self.channels) != self.levels:
            raise InputError(
                f"channels hold the noise levels {self.channels}, whose smallest is not sigma = {self.sigma}"
            )
        if self.seed_source not in (None, "user", "system"):
            raise InputError(f"seed_source must be 'user' or 'system', got {self.seed_source!r}")
        if (self.noise == "grid") != (self.cells is not None):
            raise InputError("the number of cells per unit belongs to noise on a grid, and a grid needs one")
        if self.noise == "grid":
            for level in self.channels or (self.sigma,):
                Grid(level, float(self.cells or 0.0))
            if not isinstance(self.dimension, int) or self.dimension < 1:
                raise InputError(f"noise on a grid needs the dimension of the inputs, got {self.dimension!r}")

    def drawn(self) -> NoiseSpec:
        """What the noise of the run is."""
        chosen = self.seed_source != "system"
        return NoiseSpec(self.levels, self.noise, self.cells, self.dimension or 0, self.chunk_size, self.seed, chosen)

    @property
    def levels(self) -> Levels:
        """The noise levels."""
        return Levels(self.sigma, self.channels)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; settings left alone are left out."""
        plain = asdict(self) | {"channels": None if self.channels is None else list(self.channels)}
        return {k: v for k, v in plain.items() if v is not None}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Parameters:
        """The inverse of `to_dict`; unknown names are refused."""
        unknown = set(plain) - {f.name for f in fields(cls)}
        if unknown:
            raise InputError(f"unknown parameters {', '.join(sorted(unknown))}: written by a newer version?")
        several = plain.get("channels")
        if several is not None and not isinstance(several, list | tuple):
            raise InputError(f"channels must be a list of noise levels, got {several!r}")
        return cls(**plain | ({} if several is None else {"channels": tuple(several)}))


def parse_map(text: str | SimplexMap | None) -> SimplexMap | None:
    """The map that a text fixes, None for "global" and "per-input".

    >>> parse_map("softmax:0.5")
    SimplexMap(name='softmax', temperature=0.5, mass=1.0)
    """
    if isinstance(text, SimplexMap):
        return text
    if text in (None, "global", "per-input"):
        return None
    name, _, temperature = str(text).partition(":")
    try:
        if name not in _MAPS:
            raise ValueError
        return SimplexMap(name, float(temperature) if temperature else 1.0)  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(
            f"map must be 'global', 'per-input', 'hardmax', 'softmax:T' or 'sparsemax:T' with T > 0, got {text!r}"
        ) from error


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise InputError(f"{name} must be a positive number, got {value!r}")
