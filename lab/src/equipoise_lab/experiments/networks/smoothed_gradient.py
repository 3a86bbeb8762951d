"""The gradient of a smoothed probit model on a line, and of its quantile, against bounds by noise and Lipschitz constant."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend, line
from equipoise_lab.weierstrass import (
    Probit,
    component_bound,
    lipschitz_local_bound,
    range_bound,
)


@dataclass(frozen=True)
class Settings:
    """Noise, Lipschitz constant of the model, and the points x at which everything is evaluated."""

    sigma: float
    lipschitz: float = 1.0
    reach: float = 3.0
    points: int = 121


def values(settings: Settings, context: Context) -> Iterator[tuple[float, float, float]]:
    """(x, F̃(x), F̃'(x)) along the line, exact."""
    model = Probit(torch.ones(1), 0.0, settings.lipschitz * math.sqrt(2 * math.pi))
    for x in context.steps(np.linspace(-settings.reach, settings.reach, settings.points).tolist()):
        at = torch.tensor([x], dtype=torch.float64)
        yield (
            x,
            float(model.smoothed(at, settings.sigma)),
            float(model.gradient(at, settings.sigma)),
        )


def plain_rows(settings: Settings, context: Context) -> Iterator[Row]:
    """Gradient of F̃ and its bounds: from the range alone, from L alone, and from both."""
    both = component_bound(settings.sigma, settings.lipschitz)
    for x, p, slope in values(settings, context):
        local = lipschitz_local_bound(p, settings.sigma, settings.lipschitz)
        alone = {"range": range_bound(settings.sigma), "lipschitz": settings.lipschitz}
        yield {"x": x, "gradient": slope, **alone, "both": both, "local": local}


def quantile_rows(settings: Settings, context: Context) -> Iterator[Row]:
    """Gradient of Φ⁻¹∘F̃ and its bounds: 1/σ without the constant, the local one with it."""
    for x, p, slope in values(settings, context):
        density = float(stats.norm.pdf(stats.norm.ppf(p)))
        if density > 1e-12:
            local = lipschitz_local_bound(p, settings.sigma, settings.lipschitz) / density
            yield {"x": x, "gradient": slope / density, "range": 1 / settings.sigma, "local": local}


def judge(rows: Sequence[Row], ours: str, others: Sequence[str], published: str) -> Verdict:
    """Every bound must hold everywhere and ours be the smallest; told is how near it comes where F̃ is steepest."""
    holds = all(
        row["gradient"] <= row[name] * (1 + 1e-9) for row in rows for name in (ours, *others)
    )
    tighter = all(row[ours] <= min(row[name] for name in others) * (1 + 1e-9) for row in rows)
    middle = min(rows, key=lambda row: abs(row["x"]))
    rival = min(middle[name] for name in others)
    share, other = middle["gradient"] / middle[ours], middle["gradient"] / rival
    text = f"at x = 0 the gradient is {share:.3f} of our bound and {other:.3f} of the best other; all hold at {len(rows)} points"
    return Verdict(graded(holds and tighter), text, published)


def draw(rows: Sequence[Row], names: dict[str, str], ylabel: str) -> Figure:
    """The gradient and its bounds along the line."""
    figure, (axes,) = canvas(width=5.2)
    x = [row["x"] for row in rows]
    for k, (key, name) in enumerate(names.items()):
        line(
            axes,
            x,
            [row[key] for row in rows],
            name,
            k,
            marker="",
            linewidth=2.2 if key == "gradient" else 1.6,
        )
    axes.set(xlabel="x", ylabel=ylabel)
    axes.set_ylim(top=1.45 * max(row[key] for row in rows for key in names))  # room for the legend
    legend(axes)
    return figure


BOTH = "the bound with both σ and L hugs the gradient (σ = {}, L = 1)"
NAMES = {
    "gradient": "gradient of F̃",
    "both": "σ and L together",
    "local": "σ, L and the value F̃(x)",
    "range": "σ alone",
    "lipschitz": "L alone",
}
QUANTILE_NAMES = {"gradient": "gradient of Φ⁻¹∘F̃", "local": NAMES["local"], "range": "σ alone: 1/σ"}

EXPERIMENTS = (
    of_module(
        __name__,
        id="weierstrass-gradient",
        place="Figure 4.11",
        title="Gradient of a smoothed model",
        claim="Knowing both the noise and the Lipschitz constant bounds the smoothed gradient more tightly than either.",
        published=BOTH.format(0.2),
        laptop=Settings(sigma=0.2),
        paper=Settings(sigma=0.2, points=1001),
        run=plain_rows,
        judge=lambda rows: judge(rows, "both", ("range", "lipschitz"), BOTH.format(0.2)),
        draw=lambda rows: draw(rows, NAMES, "|F̃'(x)| and bounds"),
    ),
    of_module(
        __name__,
        id="quantile-gradient",
        place="Figure 4.12",
        title="Gradient of the quantile of a smoothed model",
        claim="With the Lipschitz constant the quantile's gradient has a bound far below 1/σ, near the gradient itself.",
        published=BOTH.format(0.1),
        laptop=Settings(sigma=0.1, reach=1.2),
        paper=Settings(sigma=0.1, reach=1.2, points=1001),
        run=quantile_rows,
        judge=lambda rows: judge(rows, "local", ("range",), BOTH.format(0.1)),
        draw=lambda rows: draw(rows, QUANTILE_NAMES, "|(Φ⁻¹∘F̃)'(x)| and bounds"),
    ),
)
