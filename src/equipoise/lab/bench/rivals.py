"""How much `rivals` gains: its mean radius over that of the other vote procedures, on a map of laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from equipoise.smoothing import certify_counts

OTHERS = ("cohen", "bonferroni", "cpm")


@dataclass(frozen=True)
class Law:
    """Votes: a class of probability p1, a runner-up with this part of the rest, the other classes share what is left."""

    classes: int
    p1: float
    share: float

    def probabilities(self) -> np.ndarray:
        """All of them; the class comes first."""
        p = np.full(self.classes, (1 - self.p1) * (1 - self.share) / max(self.classes - 2, 1))
        p[:2] = self.p1, (1 - self.p1) * self.share
        return p / p.sum()


@dataclass(frozen=True)
class Point:
    """Mean radii at one law and sample size, in units of σ; `ratio` is that of rivals over the best of the others."""

    law: Law
    n: int
    n0: int
    radii: dict[str, float]

    @property
    def ratio(self) -> float:
        """1 where nobody certifies anything."""
        best = max(self.radii[name] for name in OTHERS)
        return self.radii["rivals"] / best if best > 0 else 1.0


def compare(law: Law, n: int, n0: int = 100, *, alpha: float = 1e-3, repetitions: int = 200, seed: int = 0) -> Point:
    """Mean radii of all vote procedures on the same votes; a wrong class counts as radius 0.

    >>> compare(Law(1000, 0.3, 0.1), 1000, repetitions=50).ratio > 1.2
    True
    """
    rng, p = np.random.default_rng(seed), law.probabilities()
    first, second = rng.multinomial(n0, p, repetitions), rng.multinomial(n, p, repetitions)
    radii = {}
    for name in (*OTHERS, "rivals"):
        found = certify_counts(first, second, 1.0, alpha, name)
        radii[name] = float(np.where(found.selected == 0, found.radius, 0.0).mean())
    return Point(law, n, n0, radii)


def rivals_map(
    classes: Sequence[int] = (4, 30, 1000),
    p1: Sequence[float] = (0.35, 0.45, 0.55, 0.7, 0.85, 0.95, 0.995),
    shares: Sequence[float] = (0.05, 0.2, 0.4, 0.65, 0.9, 1.0),
    sizes: Sequence[tuple[int, int]] = ((1000, 30), (1000, 100), (1000, 1000), (10_000, 100)),
    *,
    repetitions: int = 60,
    seed: int = 1,
) -> list[Point]:
    """The map over (c, p₁, runner-up's part, n, n0), where the class is the most likely one.

    The planner was made on c = 3, 10, 100, 1000, p₁ = 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99, 0.999, shares 0.1, 0.3, 0.5, 0.8,
    0.95, 1 and n0 = 100: but for the edge "one rival holds the rest" and the largest c, the points here are others.
    """
    laws = [Law(c, p, s) for c in classes for p in p1 for s in shares]
    kept = [law for law in laws if law.probabilities().argmax() == 0 and (law.probabilities()[1:] < law.p1).all()]
    return [compare(law, n, n0, repetitions=repetitions, seed=seed) for law in kept for n, n0 in sizes]


def draw_map(path: str | Path, points: Sequence[Point]) -> None:
    """The map as a figure: one panel per number of classes and of draws (n, n0), the ratio written in every cell."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    classes = sorted({p.law.classes for p in points})
    sizes = sorted({(p.n, p.n0) for p in points})
    p1, shares = (sorted({f(p) for p in points}) for f in (lambda p: p.law.p1, lambda p: p.law.share))
    figure = Figure(figsize=(3.1 * len(classes), 2.9 * len(sizes)), layout="constrained")
    axes = figure.subplots(len(sizes), len(classes), squeeze=False)
    image = None
    for i, (n, n0) in enumerate(sizes):
        for j, c in enumerate(classes):
            cells = np.full((len(shares), len(p1)), np.nan)
            for p in points:
                if (p.n, p.n0, p.law.classes) == (n, n0, c):
                    cells[shares.index(p.law.share), p1.index(p.law.p1)] = p.ratio
            image = axes[i, j].imshow(
                np.clip(cells, 0.9, 1.3), vmin=0.9, vmax=1.3, cmap="RdYlGn", origin="lower", aspect="auto"
            )
            for (row, column), value in np.ndenumerate(cells):
                if np.isfinite(value):
                    text = f"{value:.2f}" if value < 9.995 else "≥10"
                    axes[i, j].text(column, row, text, ha="center", va="center", fontsize=5.5)
            axes[i, j].set_title(f"c = {c}, n = {n:,}, n0 = {n0:,}", fontsize=8)
            axes[i, j].set_xticks(range(len(p1)), [f"{v:g}" for v in p1], fontsize=6)
            axes[i, j].set_yticks(range(len(shares)), [f"{v:g}" for v in shares], fontsize=6)
            axes[i, j].set_xlabel("p₁", fontsize=7)
            axes[i, j].set_ylabel("runner-up's part of the rest", fontsize=7)
    if image is not None:
        figure.colorbar(image, ax=axes, label="mean radius of rivals / best of the others", shrink=0.8)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "rivals"}):
        figure.savefig(path, metadata={"Date": None})
