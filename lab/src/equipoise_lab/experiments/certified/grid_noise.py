"""A certificate that float noise gets wrong, its absence with exact noise on a grid, and what exactness costs.

The classifier reads the rounding of x + δ: class 0 where every coordinate is a whole multiple of 2⁻²⁴. Real noise
never is; sums of floats near 1 always are, and near 0.7 hardly ever. Float noise certifies class 0 at the point of
ones with a radius beyond the distance to a point where the same smoothed classifier answers class 1.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.smoothing import SmoothedClassifier, Stream
from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import COLOURS, Figure, canvas

NOISES: tuple[Literal["float", "grid"], ...] = ("float", "grid")


@dataclass(frozen=True)
class Settings:
    """Dimension, σ, draws, points tried inside the radius, and inputs, draws and repetitions of the timing."""

    dimension: int = 16
    sigma: float = 0.5
    draws: int = 20_000
    tried: int = 40
    images: int = 20
    timed_draws: int = 500
    repetitions: int = 5


class Multiples(nn.Module):
    """Class 0 where every coordinate is a whole multiple of 2⁻²⁴, else class 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Both scores."""
        scaled = x.double() * 2**24
        whole = (scaled == scaled.round()).all(dim=1).double()
        return torch.stack([whole, 1 - whole], dim=1)


def points(settings: Settings, radius: float) -> Iterator[Tensor]:
    """Points of the 8-bit grid closer to the ones than the radius: on the diagonal, then at random."""
    ones = torch.ones(1, settings.dimension)
    generator = torch.Generator().manual_seed(0)
    diagonal = -torch.ones(1, settings.dimension) / settings.dimension**0.5
    random = torch.randn(settings.tried, settings.dimension, generator=generator)
    for share, step in [
        (0.5, diagonal),
        (0.7, diagonal),
        (0.95, diagonal),
        *((0.9, r[None] / r.norm()) for r in random),
    ]:
        near = ((ones + share * min(radius, 1.9) * step) * 255).round() / 255
        if float((near - ones).norm()) < radius:
            yield near


def certificates(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per kind of noise: the radius at the ones, and how many points inside it get another answer."""
    ones = torch.ones(1, settings.dimension)
    for noise in NOISES:
        smooth = SmoothedClassifier(Multiples().eval(), settings.sigma, 2, noise=noise, seed=1)
        certified = smooth.certify(ones, n=settings.draws)
        radius, answer = float(certified.radius[0]), int(certified.prediction[0])
        inside = list(context.steps(points(settings, radius)))
        other = sum(int(smooth.predict(x, n=1000)[0]) not in (answer, -1) for x in inside)
        yield {"kind": "certificate", "noise": noise, "radius": radius, "answer": answer,
               "inside": len(inside), "other answers": other}  # fmt: skip


def costs(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per repetition: processor seconds of votes with either noise, in turns, on a small CNN over 8-bit images."""
    from equipoise.nn.models import build

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        model = build("cnn", in_channels=1, input_size=28, channels=(8, 16), hidden=64).eval()
        count = context.steps_of(settings.images)
        x = torch.randint(0, 256, (count, 1, 28, 28)).float() / 255
    smooth = {noise: SmoothedClassifier(model, 0.25, 10, noise=noise, seed=0) for noise in NOISES}

    for k in range(context.steps_of(settings.repetitions)):
        row: Row = {"kind": "cost", "repetition": k}
        for noise in NOISES if k % 2 else NOISES[::-1]:
            start = time.process_time()
            for xi, i in smooth[noise].inputs(x, None):
                smooth[noise].counts(xi, settings.timed_draws, input_id=i, stream=Stream.ESTIMATION)
            row[f"{noise} seconds"] = time.process_time() - start
        yield row


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """Certificates, then costs."""
    yield from certificates(settings, context)
    yield from costs(settings, context)


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Float: an answer that changes inside the radius. Grid: none. Cost: at most a tenth more, in the median."""
    by_noise = {r["noise"]: r for r in rows if r["kind"] == "certificate"}
    texts = {
        noise: f"radius {r['radius']:.3f} for class {r['answer']}, another at {r['other answers']} of {r['inside']} points inside"
        for noise, r in by_noise.items()
    }
    ratio = median(r["grid seconds"] / r["float seconds"] for r in rows if r["kind"] == "cost")
    claim = "our own claim"
    right = by_noise["grid"]["other answers"] == 0 and by_noise["grid"]["inside"] > 0
    return (
        Verdict(graded(by_noise["float"]["other answers"] > 0), texts["float"], claim, "float noise certifies wrongly"),
        Verdict(graded(right), texts["grid"], claim, "grid noise does not"),
        Verdict(graded(ratio <= 1.1, ratio <= 1.5), f"votes take {ratio:.2f} times as long", claim, "cost"),
    )  # fmt: skip


def draw(rows: Sequence[Row]) -> Figure:
    """Radii with the answers inside, and the time of votes."""
    figure, (left, right) = canvas(2, width=3.8)
    matching = [r for r in rows if r["kind"] == "certificate"]
    bars = left.bar(
        [r["noise"] for r in matching],
        [r["radius"] for r in matching],
        0.6,
        color=COLOURS[:2],
        hatch="",
    )
    left.bar_label(
        bars,
        [f"{r['other answers']} of {r['inside']} answers differ" for r in matching],
        fontsize=9,
    )
    left.set(
        ylabel="certified radius",
        ylim=(0, 1.25 * max(r["radius"] for r in matching)),
        xlabel="noise",
    )
    cost = [r for r in rows if r["kind"] == "cost"]
    right.plot(
        [r["repetition"] for r in cost],
        [r["grid seconds"] / r["float seconds"] for r in cost],
        "o",
        color=COLOURS[2],
    )
    right.axhline(1, color="0.3", linewidth=0.8)
    right.set(xlabel="repetition", ylabel="time of votes, grid / float", ylim=(0, None))
    right.set_xticks(range(len(cost)))
    return figure


EXPERIMENT = of_module(
    __name__,
    own=True,
    title="Noise that is what the theorem says",
    claim="Float noise can certify a radius inside which the answer changes; exact noise on a grid cannot, at no cost.",
    published="no figure: the thesis draws noise in floating point",
    laptop=Settings(),
    paper=Settings(draws=100_000, tried=1000, images=100, repetitions=15),
)
