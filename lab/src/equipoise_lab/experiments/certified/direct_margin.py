"""`direct`, one interval for the margin itself, against separate intervals of class and rival: votes, soft votes, risk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.smoothing import certify_counts, certify_scores, clopper_pearson, radius_multi
from equipoise_lab.bench.smoothing import Law
from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import COLOURS, MARKERS, Figure, canvas, legend
from equipoise_lab.experiments.intervals import Mean, gain_label, mean_of

#: what `direct` is compared with, for votes and for scores of a simplex map
SEPARATE = {"votes": ("cohen", "bonferroni", "cpm", "rivals"), "soft votes": ("lvm", "rivals")}


@dataclass(frozen=True)
class Settings:
    """The map of laws, draws, repetitions; the spread of soft votes; trials of the risk."""

    classes: tuple[int, ...] = (3, 10, 50)
    tops: tuple[float, ...] = (0.3, 0.5, 0.75, 0.9, 0.99)
    shares: tuple[float, ...] = (0.1, 0.5, 0.95)
    n: int = 1000
    n0: int = 100
    repetitions: int = 20
    spread: float = 1.0
    trials: int = 20_000
    alpha: float = 1e-3


def draws(law: Law, settings: Settings, kind: str, context: Context) -> dict[str, np.ndarray]:
    """Radii in units of σ by procedure, the same draws for all."""
    generator = np.random.default_rng([context.seed, law.classes])
    p, count = law.probabilities(), context.steps_of(settings.repetitions)
    sizes = settings.n0, settings.n
    names = ("direct", *SEPARATE[kind])
    if kind == "votes":
        first, second = (generator.multinomial(n, p, count) for n in sizes)
        return {m: certify_counts(first, second, 1.0, settings.alpha, m).radius for m in names}

    def scores(n: int) -> np.ndarray:
        z = np.log(p) + settings.spread * generator.standard_normal((count, n, len(p)))
        weights = np.exp(z - z.max(axis=2, keepdims=True))
        return np.asarray(weights / weights.sum(axis=2, keepdims=True))

    first, second = (scores(n) for n in sizes)
    return {m: certify_scores(first, second, 1.0, settings.alpha, m).radius for m in names}


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """Mean radii by law and procedure for votes and soft votes, then how often a radius is too large."""
    laws = [Law(c, p, s) for c in settings.classes for p in settings.tops for s in settings.shares]
    for law in context.steps(law for law in laws if (law.probabilities()[1:] < law.p1).all()):
        for kind in SEPARATE:
            radii = {m: float(r.mean()) for m, r in draws(law, settings, kind, context).items()}
            where = {"classes": law.classes, "p1": law.p1, "share": law.share}
            yield {"kind": kind, **where, **radii}
    generator = np.random.default_rng(context.seed)
    trials, alpha = context.steps_of(settings.trials), 0.05
    for classes in settings.classes:
        p = np.full(classes, 0.55 / (classes - 1))
        p[0] = 0.45
        true = float(radius_multi(p[0], p[1], 1.0))
        first, second = generator.multinomial(100, p, trials), generator.multinomial(400, p, trials)
        certificates = certify_counts(first, second, 1.0, alpha, "direct")
        wrong = int(
            (
                (certificates.selected != 0) & (certificates.radius > 0)
                | (certificates.radius > true)
            ).sum()
        )
        lower = float(clopper_pearson(wrong, trials, 1e-3, "lower"))
        risk = {"wrong": wrong / trials, "lower": lower, "alpha": alpha}
        yield {"kind": "risk", "classes": classes, **risk}


def gain(rows: Sequence[Row], kind: str, rival: str) -> Mean:
    """Mean over the laws of the difference in radius, where either certifies."""
    some = [r for r in rows if r["kind"] == kind and max(r["direct"], r[rival]) > 0]
    return mean_of([r["direct"] - r[rival] for r in some])


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Larger on average than each way with separate intervals, for votes and for soft votes; and the risk."""
    verdicts = []
    for kind, rivals in SEPARATE.items():
        gains = {rival: gain(rows, kind, rival) for rival in rivals if rival != "rivals"}
        labels = [gain_label(one) for one in gains.values()]
        text = ", ".join(f"{g.signed} over {rival}" for rival, g in gains.items())
        beside = f"; {gain(rows, kind, 'rivals').signed} over rivals, which may choose it"
        full, partly = (set(labels) == {"reproduced"}, "reproduced" in labels)
        laws = sum(r["kind"] == kind for r in rows)
        verdicts.append(
            Verdict(
                graded(full, partly),
                f"mean radius in units of σ over {laws} laws: {text}{beside}",
                "our own claim",
                kind,
            )
        )
    risky = [r for r in rows if r["kind"] == "risk"]
    counted = ", ".join(f"{r['wrong']:.2%} (c = {r['classes']})" for r in risky)
    kept = all(r["lower"] <= r["alpha"] for r in risky)
    text = f"wrong certificates with all rivals level {counted} at α = {risky[0]['alpha']:.0%}"
    return (*verdicts, Verdict(graded(kept), text, "at most α", "risk"))


def draw(rows: Sequence[Row]) -> Figure:
    """Radius of `direct` over that of separate intervals, by p₁."""
    figure, panels = canvas(2)
    for axes, (kind, rivals) in zip(panels, SEPARATE.items(), strict=True):
        for k, rival in enumerate(rivals):
            some = [r for r in rows if r["kind"] == kind and r[rival] > 0]
            x = [r["p1"] + 0.006 * (k - 1.5) for r in some]
            ratios = [min(r["direct"] / r[rival], 10.0) for r in some]
            axes.plot(x, ratios, MARKERS[k], color=COLOURS[k], label=rival, markersize=4)
        axes.axhline(1, color="0.3", linewidth=0.8)
        axes.set(xlabel="p₁", ylabel="radius of direct over", title=kind)
        legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    own=True,
    title="Bounding the margin itself",
    claim="One interval for each margin, at the full risk, certifies more than separate intervals of class and rival.",
    published="no figure: an open problem of the thesis",
    laptop=Settings(classes=(3, 10), trials=4000),
    desk=Settings(),
    paper=Settings(n=10_000, repetitions=100, trials=200_000),
)
