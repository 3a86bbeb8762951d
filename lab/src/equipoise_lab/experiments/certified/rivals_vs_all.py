"""`rivals` against every other way to bound votes, over a map of laws; and its risk, counted at the worst of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.smoothing import certify_counts, clopper_pearson, radius_multi
from equipoise_lab.bench.smoothing import OTHERS, Law, compare
from equipoise_lab.experiments.experiment import Context, Row, Verdict, graded, of_module
from equipoise_lab.experiments.figures import COLOURS, MARKERS, Figure, canvas, legend


@dataclass(frozen=True)
class Settings:
    """The map of laws, draws, repetitions of each; laws with level rivals and repetitions of the risk."""

    classes: tuple[int, ...] = (3, 10, 100, 1000)
    tops: tuple[float, ...] = (0.3, 0.5, 0.75, 0.9, 0.99)
    shares: tuple[float, ...] = (0.1, 0.5, 0.8, 0.95)
    sizes: tuple[int, ...] = (1000, 10_000)
    repetitions: int = 40
    risky: tuple[int, ...] = (3, 10, 50)
    trials: int = 20_000
    alpha: float = 0.05


def radii(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per law and sample size: mean radii in units of σ."""
    laws = [Law(c, p, s) for c in settings.classes for p in settings.tops for s in settings.shares]
    for law in context.steps(law for law in laws if (law.probabilities()[1:] < law.p1).all()):
        for n in settings.sizes:
            point = compare(
                law, n, repetitions=context.steps_of(settings.repetitions), seed=context.seed
            )
            yield {
                "kind": "radius", "classes": law.classes, "p1": law.p1, "share": law.share, "n": n,
                "ratio": min(point.ratio, 10.0), **point.radii,
            }  # fmt: skip


def risks(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per law and procedure: how often a radius is larger than the true one. All rivals are level, the worst case."""
    generator = np.random.default_rng(context.seed)
    for classes in context.steps(settings.risky):
        p = np.full(classes, 0.55 / (classes - 1))
        p[0] = 0.45
        true = float(radius_multi(p[0], p[1], 1.0))
        trials = context.steps_of(settings.trials)
        first, second = generator.multinomial(100, p, trials), generator.multinomial(400, p, trials)
        for name in (*OTHERS, "rivals"):
            certificates = certify_counts(first, second, 1.0, settings.alpha, name)
            wrong = int(
                (
                    (certificates.selected != 0) & (certificates.radius > 0)
                    | (certificates.radius > true)
                ).sum()
            )
            upper = float(clopper_pearson(wrong, trials, 1e-3, "upper"))
            lower = float(clopper_pearson(wrong, trials, 1e-3, "lower"))
            yield {"kind": "risk", "classes": classes, "method": name, "wrong": wrong / trials,
                   "lower": lower, "upper": upper, "alpha": settings.alpha}  # fmt: skip


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """Radii over the map, then the risk."""
    yield from radii(settings, context)
    yield from risks(settings, context)


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Never below the best of the others by more than 1 %; larger on average; and its risk below α, by an interval."""
    points = [
        r for r in rows if r["kind"] == "radius" and max(r[m] for m in (*OTHERS, "rivals")) > 0
    ]
    ratios = [r["ratio"] for r in points]
    total = {m: sum(r[m] for r in points) for m in (*OTHERS, "rivals")}
    gain = ", ".join(f"{m} {total['rivals'] / total[m]:.2f}" for m in OTHERS)
    worst = min(points, key=lambda r: r["ratio"])
    risky = [r for r in rows if r["kind"] == "risk" and r["method"] == "rivals"]
    counted = ", ".join(f"{r['wrong']:.2%} (c = {r['classes']})" for r in risky)
    where = f"c = {worst['classes']}, p₁ = {worst['p1']:g}, n = {worst['n']}"
    claim = "our own claim"
    least = f"radius over the best of the others at least {min(ratios):.3f} ({where})"
    mean = f"mean radius over {len(points)} laws, relative to {gain}"
    risk = f"wrong certificates with all rivals level {counted}, at α = {risky[0]['alpha']:.0%}"
    return (
        Verdict(graded(min(ratios) >= 0.99, min(ratios) >= 0.9), least, claim, "never worse"),
        Verdict(
            graded(all(total["rivals"] > total[m] for m in OTHERS)),
            mean,
            claim,
            "larger on average",
        ),
        Verdict(graded(all(r["lower"] <= r["alpha"] for r in risky)), risk, "at most α", "risk"),
    )


def draw(rows: Sequence[Row]) -> Figure:
    """The ratio over p₁ by number of classes, one panel per sample size, and the risk."""
    points = [r for r in rows if r["kind"] == "radius"]
    sizes = sorted({r["n"] for r in points})
    figure, panels = canvas(len(sizes) + 1, width=3.6)
    for axes, n in zip(panels, sizes, strict=False):
        for k, c in enumerate(sorted({r["classes"] for r in points})):
            matching = [r for r in points if (r["n"], r["classes"]) == (n, c)]
            x = [r["p1"] + 0.006 * (k - 1.5) for r in matching]
            axes.plot(
                x,
                [r["ratio"] for r in matching],
                MARKERS[k],
                color=COLOURS[k],
                label=f"{c} classes",
                markersize=4,
            )
        axes.axhline(1, color="0.3", linewidth=0.8)
        axes.set(
            xlabel="p₁",
            ylabel="radius of rivals / best of the others",
            yscale="log",
            title=f"n = {n}",
        )
        axes.set_yticks(
            [0.9, 1, 1.2, 1.5, 2, 3, 5, 10], ["0.9", "1", "1.2", "1.5", "2", "3", "5", "≥10"]
        )
        axes.minorticks_off()
    risky = [r for r in rows if r["kind"] == "risk"]
    last = panels[-1]
    for k, name in enumerate((*OTHERS, "rivals")):
        matching = [r for r in risky if r["method"] == name]
        x = [i + 0.15 * (k - 1.5) for i in range(len(matching))]
        y = [100 * r["wrong"] for r in matching]
        ends = [
            [100 * (r["wrong"] - r["lower"]) for r in matching],
            [100 * (r["upper"] - r["wrong"]) for r in matching],
        ]
        last.errorbar(
            x,
            y,
            yerr=ends,
            fmt=MARKERS[k + 4],
            color=COLOURS[k + 4],
            capsize=2,
            label=name,
            markersize=4,
        )
    names = [str(r["classes"]) for r in risky if r["method"] == "rivals"]
    last.set_xticks(range(len(names)), names)
    last.axhline(100 * risky[0]["alpha"], color="0.3", linewidth=0.8)
    last.set(
        xlabel="classes, all rivals level",
        ylabel="wrong certificates (%)",
        title="risk; the line is α",
    )
    legend(panels[0])
    legend(last)
    return figure


EXPERIMENT = of_module(
    __name__,
    own=True,
    title="Bounding rivals without a union",
    claim="The class at α₁ and every rival at α₂ certify at least as much as any other way to share the risk, which they keep.",
    published="no figure: the thesis shares the risk among buckets of classes",
    laptop=Settings(classes=(3, 10, 1000), sizes=(1000,), repetitions=20, trials=4000),
    desk=Settings(),
    paper=Settings(
        tops=(0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99, 0.999),
        shares=(0.1, 0.3, 0.5, 0.8, 0.95, 1.0),
        repetitions=200,
        risky=(3, 10, 50, 200, 1000),
        trials=200_000,
    ),
)
