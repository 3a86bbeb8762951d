"""How cost grows: one size is varied, the others stay, and the exponent is the slope in a plot of logarithms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.core.checks import require_one_of
from equipoise.core.errors import InputError
from equipoise.lipschitz import lipschitz_bound
from equipoise.norms.spectral import spectral_norm
from equipoise_lab.bench.layers import conv, train_step
from equipoise_lab.bench.norms import Layer, Section
from equipoise_lab.experiments.figures import canvas
from equipoise_lab.timing import take_turns

Work = Callable[[], Any]


@dataclass(frozen=True)
class Sweep:
    """What is varied, over which values (a few small ones for a quick look), and the work at a value."""

    title: str
    values: tuple[int, ...]
    few: tuple[int, ...]
    work: Callable[[int], Work]


def _norm(channels: int = 64, kernel: int = 3, size: int = 32) -> Work:
    layer = Layer("", channels, channels, kernel, 1, size)
    return partial(
        spectral_norm, layer.module(layer.gaussian(0)), rtol=1e-2, input_size=(size, size)
    )


def _audit(depth: int) -> Work:
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(depth)]
    net, x = nn.Sequential(*blocks).eval(), torch.zeros(1, 16, 16, 16)
    return partial(lipschitz_bound, net, x, rtol=0.05)


def _step(batch: int) -> Work:
    x = torch.randn(batch, 32, 16, 16, requires_grad=True)
    return partial(train_step, conv("sr", t=2)(32), x, torch.randn(batch, 32, 16, 16))


SWEEPS: Mapping[str, Sweep] = {
    "channels": Sweep(
        "spectral_norm, 3×3, 32×32 pixels, by channels",
        (16, 32, 64, 128, 256, 512, 1024),
        (4, 8),
        lambda c: _norm(c),
    ),
    "kernel": Sweep(
        "spectral_norm, 64 channels, 32×32 pixels, by kernel size",
        (1, 3, 5, 7, 9, 11),
        (1, 3),
        lambda k: _norm(kernel=k),
    ),
    "input": Sweep(
        "spectral_norm, 64 channels, 3×3, by pixels per side",
        (8, 16, 32, 64, 128, 256, 512, 1024),
        (8, 12),
        lambda n: _norm(size=n),
    ),
    "depth": Sweep(
        "lipschitz_bound of a chain of convolutions, by layers",
        (2, 4, 8, 16, 32, 64),
        (1, 2),
        _audit,
    ),
    "batch": Sweep(
        "training step of SR t=2, 32 channels, by batch",
        (1, 2, 4, 8, 16, 32, 64, 128),
        (1, 2),
        _step,
    ),
}


def exponent(values: list[float], seconds: list[float]) -> float:
    """Slope of log seconds over log values in the upper half of the values, where constant costs matter least.

    >>> round(exponent([1, 2, 4, 8], [1.0, 1.0, 4.0, 16.0]), 2)
    2.0
    """
    half = max(2, (len(values) + 1) // 2)
    slope, _ = np.polyfit(np.log(values[-half:]), np.log(seconds[-half:]), 1)
    return float(slope)


def grow(what: str, repeats: int = 3, most: int | None = None, quick: bool = False) -> Section:
    """The rows of one sweep, and its exponent in the note; `most` leaves larger values out."""
    require_one_of(SWEEPS, what=what)
    sweep = SWEEPS[what]
    values = [v for v in (sweep.few if quick else sweep.values) if most is None or v <= most]
    if len(values) < 2:
        raise InputError(
            f"an exponent needs two values at least; {what} starts at {sweep.values[:2]}, got --most {most}"
        )
    works = {str(v): sweep.work(v) for v in values}
    take_turns(works, 1)  # first calls plan and allocate
    contest = take_turns(works, repeats)
    seconds = [contest.seconds[str(v)] for v in values]
    slope = exponent([float(v) for v in values], seconds)
    rows = [
        {what: v, "seconds": s, "least": min(contest.rounds[str(v)])}
        for v, s in zip(values, seconds, strict=True)
    ]
    return Section(sweep.title, rows, note=f"exponent {slope:.2f} in the upper half of the values")


def draw(section: Section, path: Path) -> None:
    """The figure of one sweep: seconds over the size, both logarithmic, with the slope."""
    key = next(iter(section.rows[0]))
    x, y = ([float(row[name]) for row in section.rows] for name in (key, "seconds"))
    figure, (axes,) = canvas()
    axes.loglog(x, y, "o-")
    slope = exponent(x, y)
    axes.loglog(x, [y[-1] * (v / x[-1]) ** slope for v in x], ":", label=f"slope {slope:.2f}")
    axes.set(xlabel=key, ylabel="seconds", title=section.title)
    axes.set_xticks(x, [f"{v:g}" for v in x])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=150)
