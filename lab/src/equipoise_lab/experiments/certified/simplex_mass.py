"""The mass of the simplex as a knob: certified accuracy of one smoothed Lipschitz network for several masses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.smoothing import SimplexMap
from equipoise_lab.experiments.certified.rs_new_bound import (
    LAPTOP_NETWORK,
    LIPSCHITZ,
    MASS,
    PAPER_NETWORK,
)
from equipoise_lab.experiments.experiment import Context, Label, Row, Verdict, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend, line
from equipoise_lab.experiments.shared import smoothed_networks as smoothed
from equipoise_lab.weierstrass import optimal_sigma, radius_weak

USUAL = "r = 1"


@dataclass(frozen=True)
class Settings:
    """The recipe of the 5-Lipschitz network, masses r, draws, radii ε."""

    recipe: dict[str, Any]
    sampling: smoothed.Sampling
    masses: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
    epsilons: tuple[float, ...] = tuple(round(0.04 * k, 2) for k in range(26))


def radii(
    first: np.ndarray, second: np.ndarray, labels: np.ndarray, settings: Settings, sigma: float
) -> dict[str, smoothed.Rated]:
    """R = margin/(2·Lip(F̃_k)) with the bound of σ, L and r, for every mass on the same draws.

    Mass r at temperature 1 is mass 1 at temperature r: the knob is the temperature of the scores.
    """
    result = {}
    for r in settings.masses:
        simplex = SimplexMap("sparsemax", 1.0, r)
        certificates = smoothed.certify_logits(
            simplex, first, second, sigma, settings.sampling.alpha
        )
        constant = simplex.component_lipschitz(LIPSCHITZ, second.shape[-1]) * simplex.mass
        radius = radius_weak(
            r * certificates.p_lower, r * certificates.p_upper, sigma, constant, mass=r
        )
        result[f"r = {r:g}"] = smoothed.Rated(
            radius, (certificates.selected == labels) & (radius > 0)
        )
    return result


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per mass and ε; intervals of the gain over r = 1 hold for all masses and radii at once (Bonferroni)."""
    network = smoothed.prepared(settings.recipe, context)
    sigma = optimal_sigma(LIPSCHITZ, mass=MASS, vector=True)
    blocks = smoothed.logits(network.classifier(sigma), network.x, settings.sampling, context)
    methods = smoothed.joined(
        radii(first, second, network.y[part], settings, sigma) for part, first, second in blocks
    )
    level = 1 - 0.05 / (len(settings.masses) * len(settings.epsilons))
    yield from smoothed.curves(methods, (USUAL,), settings.epsilons, level)


def judge(rows: Sequence[Row]) -> Verdict:
    """Some other mass certifies more than r = 1 at some ε > 0, with a simultaneous 95 % interval above 0, and no mass is best
    at every ε: the profiles are there, but they are those of other temperatures (erratum 29).
    """
    key = f"over {USUAL}"
    others = [r for r in rows if r["method"] != USUAL and r["epsilon"] > 0]
    best = max(others, key=lambda r: r[key] - r[f"{key} ±"])
    winners = {}
    for epsilon in sorted({r["epsilon"] for r in rows}):
        here = smoothed.pick(rows, epsilon=epsilon)
        top = max(r["accuracy"] for r in here)
        winners[epsilon] = {r["method"] for r in here if r["accuracy"] == top and top > 0}
    crossing = not set.intersection(*(w for w in winners.values() if w))
    sure = best[key] - best[f"{key} ±"] > 0
    label = Label.CORRECTED if sure and crossing else Label.OPEN
    text = (
        f"{best['method']} at ε = {best['epsilon']:g}: {smoothed.gain_of(best, USUAL).signed} points over {USUAL} "
        f"({best['inputs']} inputs, simultaneous interval); "
        f"{'the best mass depends on ε' if crossing else 'one mass is best at every ε'}; mass r is temperature r"
    )
    return Verdict(label, text, EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Certified accuracy over ε for every mass."""
    figure, (axes,) = canvas(width=5.4, height=3.6)
    for k, name in enumerate(dict.fromkeys(r["method"] for r in rows)):
        matching = smoothed.pick(rows, method=name)
        x, y = [r["epsilon"] for r in matching], [r["accuracy"] for r in matching]
        line(axes, x, y, f"{name} (usual)" if name == USUAL else name, k, markevery=3)
    axes.set(xlabel="ℓ2 radius ε", ylabel="certified accuracy (%)", ylim=(0, None))
    legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Figure 5.2",
    title="Certified accuracy for several simplex masses",
    claim="Masses other than r = 1 give other robustness profiles, with more certified accuracy at some radii.",
    published="new profiles beyond r = 1",
    laptop=Settings(LAPTOP_NETWORK, smoothed.Sampling(1000)),
    paper=Settings(PAPER_NETWORK, smoothed.Sampling(10_000)),
    needs=("fashion_mnist.npz",),
)
