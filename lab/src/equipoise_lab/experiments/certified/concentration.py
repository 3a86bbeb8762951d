"""Corrected radii from Bernstein's interval, which sees the variance, and from Hoeffding's, which does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.smoothing import SimplexMap, betting, empirical_bernstein, hoeffding, radius_multi
from equipoise.smoothing.simplex import apply_map
from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import canvas, legend, line
from equipoise_lab.experiments.intervals import gain_label, mean_of
from equipoise_lab.experiments.shared import smoothed_networks as smoothed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from equipoise.smoothing.intervals import OneSide

HOEFFDING, BERNSTEIN, BETTING = "Hoeffding", "empirical Bernstein", "betting"


@dataclass(frozen=True)
class Settings:
    """The recipe at noise σ, numbers of draws, temperatures of the softmax to choose from."""

    recipe: dict[str, Any]
    draws: tuple[int, ...]
    sigma: float = 1.0
    temperatures: int = 16
    n0: int = 100
    alpha: float = 1e-3


#: bounds (N, c) of the class means from scores (N, n, c)
INTERVALS: dict[str, Callable[[np.ndarray, float, OneSide], np.ndarray]] = {
    HOEFFDING: lambda z, risk, side: hoeffding(z.mean(axis=1).clip(0, 1), z.shape[1], risk, side),
    BERNSTEIN: lambda z, risk, side: empirical_bernstein(
        z.mean(axis=1).clip(0, 1), z.var(axis=1, ddof=1), z.shape[1], risk, side
    ),
    BETTING: lambda z, risk, side: betting(
        np.moveaxis(z, 2, 1), np.full((len(z), z.shape[2]), risk), side
    ),
}


def radii(
    scores: np.ndarray, top: np.ndarray, sigma: float, alpha: float, interval: str
) -> np.ndarray:
    """R_mult with every class bounded at α/c."""
    bound, rows = INTERVALS[interval], np.arange(len(scores))
    risk = alpha / scores.shape[2]
    lower = bound(scores[rows, :, top][:, :, None], risk, "lower")[:, 0]
    upper = bound(scores, risk, "upper")
    upper[rows, top] = 0.0
    return np.asarray(radius_multi(lower, np.minimum(upper.max(axis=1), 1 - lower), sigma))


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per number of draws, interval and input; the softmax's temperature is fixed on held-out inputs."""
    network = smoothed.prepared(smoothed.under_noise(settings.recipe, settings.sigma), context)
    classifier = network.classifier(settings.sigma)
    largest = smoothed.Sampling(max(settings.draws), settings.n0, settings.alpha)
    grid = [
        SimplexMap("softmax", t) for t in np.geomspace(0.01, 50, settings.temperatures).tolist()
    ]
    n0 = context.steps_of(settings.n0)
    simplex: SimplexMap = classifier.calibrate(
        network.calibration, n0=n0, n=largest.n, alpha=settings.alpha, grid=grid
    )
    context.tell(f"{simplex}")
    for part, first, second in smoothed.logits(classifier, network.x, largest, context):
        top = apply_map(simplex, first).mean(axis=1).argmax(axis=1)
        scores = apply_map(simplex, second)
        for n in context.steps(settings.draws):
            for name in INTERVALS:
                measured = radii(scores[:, :n], top, settings.sigma, settings.alpha, name)
                for i, radius in enumerate(measured.tolist(), part.start):
                    yield {
                        "draws": n,
                        "interval": name,
                        "input": i,
                        "radius": radius,
                        "map": str(simplex),
                    }


def paired(rows: Sequence[Row], n: int, name: str) -> list[float]:
    """Radii at n draws in the order of the inputs."""
    return [
        r["radius"]
        for r in sorted(smoothed.pick(rows, draws=n, interval=name), key=lambda r: r["input"])
    ]


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """At the largest n: the mean paired difference Bernstein − Hoeffding by its interval, and the share of inputs, apart."""
    every = sorted({r["draws"] for r in rows})
    n = every[-1]
    both = {
        k: list(zip(paired(rows, k, BERNSTEIN), paired(rows, k, HOEFFDING), strict=True))
        for k in every
    }
    gap = {k: mean_of([b - h for b, h in pairs]) for k, pairs in both.items()}
    certified = [(b, h) for b, h in both[n] if max(b, h)]
    share = sum(b > h for b, h in certified) / max(len(certified), 1)
    means = ", ".join(f"{name} {np.mean(paired(rows, n, name)):.4f}" for name in INTERVALS)
    gaps = ", ".join(f"{g.value:+.4f} ± {g.half:.4f} (n = {k})" for k, g in gap.items())
    text = f"mean radius at n = {n}: {means}; Bernstein − Hoeffding {gaps} ({rows[0]['map']})"
    where = f"larger at {share:.0%} of {len(certified)} inputs at n = {n}"
    return (
        Verdict(gain_label(gap[n]), text, EXPERIMENT.published, "on average"),
        Verdict(
            graded(share > 0.9, share > 0.5),
            where,
            "every point above the diagonal",
            "at every input",
        ),
    )


def draw(rows: Sequence[Row]) -> Figure:
    """Radii of every input against each other at the largest n, and mean radii over n."""
    figure, (left, right) = canvas(columns=2, width=4.2, height=3.6)
    every = sorted({r["draws"] for r in rows})
    x = paired(rows, every[-1], HOEFFDING)
    for k, name in ((0, BERNSTEIN), (1, BETTING)):
        line(
            left, x, paired(rows, every[-1], name), name, k, linestyle="", markersize=3.5, alpha=0.7
        )
    end = max(r["radius"] for r in rows) * 1.05
    left.plot([0, end], [0, end], color="0.3", linewidth=0.8)
    left.set(
        xlabel=f"radius with Hoeffding, n = {every[-1]}", ylabel="radius with another interval"
    )
    legend(left)
    for k, name in enumerate((BERNSTEIN, BETTING, HOEFFDING)):
        line(right, every, [float(np.mean(paired(rows, n, name))) for n in every], name, k)
    right.set(xlabel="draws n", ylabel="mean certified radius", xscale="log")
    right.set_xticks(every, [str(n) for n in every])
    right.minorticks_off()
    legend(right)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Figure C.6",
    title="Bernstein's and Hoeffding's intervals for soft votes",
    claim="Bernstein's interval gives larger corrected radii than Hoeffding's.",
    published="Bernstein larger (1000 ImageNet images, σ = 1)",
    laptop=Settings(smoothed.FASHION, (250, 500, 1000, 2000)),
    paper=Settings(smoothed.CIFAR, (1000, 10_000), temperatures=50),
    needs=("fashion_mnist.npz",),
)
