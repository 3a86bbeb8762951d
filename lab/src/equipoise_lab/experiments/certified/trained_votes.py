"""Networks trained for the soft vote, and for the Lipschitz-aware radius, against every other certificate of the same network."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from equipoise.smoothing import Certificates, SimplexMap, certify_counts, certify_scores
from equipoise.smoothing.simplex import apply_map
from equipoise_lab.experiments.experiment import Context, Label, Row, Verdict, of_module
from equipoise_lab.experiments.figures import Figure, canvas, legend, line
from equipoise_lab.experiments.intervals import Mean, mean_of
from equipoise_lab.experiments.shared.smoothed_networks import (
    Rated,
    Sampling,
    curves,
    logits,
    pick,
    prepared,
    votes,
)
from equipoise_lab.experiments.shared.training import merged

PROVED, COHEN, RIVALS, SOFT, AWARE = (
    "deterministic",
    "cohen",
    "rivals",
    "soft votes",
    "soft votes and L",
)
METHODS = (PROVED, COHEN, RIVALS, SOFT, AWARE)


@dataclass(frozen=True)
class Case:
    """A network by the bundled recipe it is trained with: its noise, its map, and the method it is trained for.

    Votes are certified at a noise level of their own: small noise, which Lipschitz scores like, caps what votes can show.
    """

    recipe: str
    sigma: float
    map: SimplexMap
    trained_for: str
    votes: float


CASES = (
    Case("soft-vote-digits", 0.5, SimplexMap("softmax", 0.3), SOFT, 0.5),
    Case("radius-sll-digits", 0.1, SimplexMap("sparsemax", 1.0), AWARE, 0.25),
)


@dataclass(frozen=True)
class Settings:
    """The networks, the draws and the radii at which certified accuracy is compared."""

    cases: tuple[Case, ...] = CASES
    sampling: Sampling = Sampling(2000)  # noqa: RUF009 - frozen
    inputs: int = 60
    epochs: int | None = None
    epsilons: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per network, method and ε; votes share their draws, and so do scores."""
    from equipoise.lipschitz import certified_radius, lipschitz_bound
    from equipoise.train import read_recipe

    for case in context.steps(settings.cases):
        change: dict[str, Any] = {
            "data": {"validation": 0.02, "test_limit": settings.inputs},
            "metrics": {"bound": False},
        }
        if settings.epochs is not None:
            change["epochs"] = settings.epochs
        network = prepared(merged(read_recipe(case.recipe).to_dict(), change), context)
        labels, x = network.y, network.x
        constant = lipschitz_bound(network.model, x[:1]).upper
        proved = certified_radius(
            network.model, x, torch.from_numpy(labels), effort="fast"
        ).radius.numpy()
        context.tell(f"{case.recipe}: Lipschitz constant at most {constant:.3g}")
        parts: dict[str, list[Rated]] = {}
        for level, rate in ((case.votes, hard), (case.sigma, partial(soft, case, constant))):
            for part, first, second in logits(
                network.classifier(level), x, settings.sampling, context
            ):
                for name, certified in rate(first, second, level, settings.sampling.alpha).items():
                    parts.setdefault(name, []).append(
                        Rated(certified.radius, certified.prediction == labels[part])
                    )
        methods = {PROVED: Rated(proved, proved > 0)} | {n: _joined(p) for n, p in parts.items()}
        for row in curves(methods, (COHEN, RIVALS, PROVED), settings.epsilons):
            ours, rival = methods[case.trained_for], methods[row["method"]]
            gain = mean_of((_counted(ours) - _counted(rival)).tolist())
            yield {
                "recipe": case.recipe, "trained for": case.trained_for, "map": str(case.map), "sigma": case.sigma,
                "sigma of votes": case.votes,
                "lipschitz": constant, **row, "gain": gain.value, "gain ±": gain.half if np.isfinite(gain.half) else 0.0,
            }  # fmt: skip


def hard(
    first: np.ndarray, second: np.ndarray, sigma: float, alpha: float
) -> dict[str, Certificates]:
    """Cohen and rivals on the votes."""
    counts = votes(first), votes(second)
    return {name: certify_counts(*counts, sigma, alpha, name) for name in (COHEN, RIVALS)}


def soft(
    case: Case, constant: float, first: np.ndarray, second: np.ndarray, sigma: float, alpha: float
) -> dict[str, Certificates]:
    """Rivals on the scores of the map, without and with the network's constant."""
    scores = apply_map(case.map, first), apply_map(case.map, second)
    component, pair = (
        case.map.component_lipschitz(constant, second.shape[-1]),
        case.map.pair_lipschitz(constant),
    )
    return {
        SOFT: certify_scores(*scores, sigma, alpha),
        AWARE: certify_scores(*scores, sigma, alpha, lipschitz=component, pair_lipschitz=pair),
    }


def _joined(parts: Sequence[Rated]) -> Rated:
    return Rated(
        np.concatenate([p.radius for p in parts]), np.concatenate([p.correct for p in parts])
    )


def _counted(rated: Rated) -> np.ndarray:
    """Radii of right answers, 0 elsewhere: their mean is the average certified radius."""
    return np.where(rated.correct, rated.radius, 0.0)


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Per network: the average certified radius of what it was trained for over that of every rival, by its interval."""
    verdicts = []
    for recipe in dict.fromkeys(r["recipe"] for r in rows):
        own = pick(rows, recipe=recipe)
        aim = own[0]["trained for"]
        others = [m for m in (PROVED, COHEN, RIVALS) if pick(own, method=m)]
        gains = {
            m: Mean(
                pick(own, method=m)[0]["gain"], pick(own, method=m)[0]["gain ±"], own[0]["inputs"]
            )
            for m in others
        }
        low = [g for g in gains.values() if g.high < 0]
        won = all(g.low > 0 for g in gains.values())
        label = Label.REPRODUCED if won else Label.REFUTED if low else Label.OPEN
        radii = ", ".join(
            f"{m} {pick(own, method=m)[0]['average radius']:.3f}"
            for m in METHODS
            if pick(own, method=m)
        )
        over = ", ".join(f"{g.value:+.3f} ± {g.half:.3f} over {m}" for m, g in gains.items())
        verdicts.append(
            Verdict(
                label,
                f"average certified radius {radii}; {aim}: {over}",
                "more than all others",
                recipe,
            )
        )
    return tuple(verdicts)


def draw(rows: Sequence[Row]) -> Figure:
    """Certified accuracy over ε, one panel per network."""
    recipes = list(dict.fromkeys(r["recipe"] for r in rows))
    figure, panels = canvas(len(recipes), width=4.6 * len(recipes), height=3.6)
    for axes, recipe in zip(panels, recipes, strict=True):
        for k, name in enumerate(METHODS):
            matching = pick(rows, recipe=recipe, method=name)
            line(axes, [r["epsilon"] for r in matching], [r["accuracy"] for r in matching], name, k)
        axes.set(
            xlabel="ℓ2 radius ε", ylabel="certified accuracy (%)", ylim=(0, None), title=recipe
        )
        legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    own=True,
    title="Networks trained for the certificate they get",
    claim="A network trained through map and temperature for the soft vote, or for the Lipschitz-aware radius, certifies more by "
    "it than by Cohen's bound, by rivals and by the deterministic certificate.",
    published="not in the thesis, which trains under plain noise",
    laptop=Settings(),
    paper=Settings(inputs=360, sampling=Sampling(100_000)),
)
