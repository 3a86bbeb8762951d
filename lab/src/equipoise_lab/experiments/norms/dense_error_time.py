"""Error ratio against time on Gaussian matrices: power iteration from below, Gram iteration from above, SVD as reference."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from equipoise.norms.gram import gram_norm_plain
from equipoise_lab.experiments.experiment import (
    NEEDS_GPU,
    Context,
    Label,
    Row,
    Verdict,
    graded,
    of_module,
)
from equipoise_lab.experiments.figures import Figure, canvas, legend, line, published
from equipoise_lab.peers import power_iterates
from equipoise_lab.timing import take_turns

SHOWN = ("PI 10", "PI 100", "PI 1000", "GI 10", "GI 11", "GI 12")


#: seconds and |error| of 10, 11 and 12 Gram iterations and of 10, 100 and 1000 power iterations, Table A.1 of the thesis
PUBLISHED_TABLE = {
    "Gram iteration": ((1.83e-3, 1.99e-3, 2.13e-3), (6.75e-6, 4.73e-8, 4.33e-12)),
    "power iteration": ((1.12e-3, 1.03e-2, 1.04e-1), (3.27e-2, 1.41e-3, 2.43e-6)),
}


@dataclass(frozen=True)
class Settings:
    """Matrices, iterations of both methods, rounds of timing."""

    matrices: int
    shape: tuple[int, int]
    gram: tuple[int, ...] = (10, 11, 12)
    power: tuple[int, ...] = (10, 100, 1000)
    rounds: int = 3


def contestants(W: Tensor, settings: Settings, context: Context) -> dict[str, Callable[[], float]]:
    """Each method as a function of nothing; the SVD first."""
    methods: dict[str, Callable[[], float]] = {"SVD": lambda: float(torch.linalg.svdvals(W)[0])}
    for t in context.steps(settings.power):
        methods[f"PI {t}"] = partial(lambda t: power_iterates(W, t)[-1], t)
    for t in context.steps(settings.gram):
        methods[f"GI {t}"] = partial(lambda t: float(gram_norm_plain(W, t)), t)
    return methods


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per matrix and method: signed error ratio and median seconds, float64, all methods taking turns."""
    generator = torch.Generator().manual_seed(context.seed)
    for k in context.steps(range(settings.matrices)):
        shape = [context.size_of(n) for n in settings.shape]
        W = torch.randn(shape, generator=generator, dtype=torch.float64).to(context.device)
        contest = take_turns(contestants(W, settings, context), context.steps_of(settings.rounds))
        reference = contest.results["SVD"]
        context.tell(f"matrix {k + 1} of {settings.matrices}")
        for name, value in contest.results.items():
            yield {
                "matrix": k,
                "method": name,
                "error": value / reference - 1,
                "seconds": contest.seconds[name],
            }


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """The values: signs on every matrix, and the sizes of GI 10 and PI 100. The speed: GI 12 against the SVD, and PI 100."""
    error = {
        m: median(r["error"] for r in rows if r["method"] == m) for m in {r["method"] for r in rows}
    }
    time = {m: median(r["seconds"] for r in rows if r["method"] == m) for m in error}
    ours = [r for r in rows if r["method"] != "SVD"]
    signs = all(
        r["error"] < 1e-12 if r["method"].startswith("PI") else r["error"] > -1e-12 for r in ours
    )
    sizes = error["GI 10"] < 7e-5 and error["PI 100"] < -1e-4
    shown = ", ".join(f"{m.replace(' ', '')} {error[m]:.1e}" for m in SHOWN)
    ratio = {m: time["GI 12"] / time[m] for m in ("SVD", "PI 100")}
    speed = f"time of GI12 is {ratio['SVD']:.2f} of the SVD's and {ratio['PI 100']:.2f} of PI100's {NEEDS_GPU}"
    return (
        Verdict(graded(signs and sizes, signs), shown, EXPERIMENT.published, "values"),
        Verdict(Label.NOT_COMPARABLE, speed, "SVD 1.47 s, GI ≈ 2 ms (GPU)", "speed"),
    )


def draw(rows: Sequence[Row]) -> Figure:
    """Absolute error ratio over seconds; filled above the truth, open below."""
    figure, (axes,) = canvas()
    for k, family in enumerate(("GI", "PI")):
        names = sorted(
            {r["method"] for r in rows if r["method"].startswith(family)},
            key=lambda m: int(m.split()[1]),
        )
        x = [median(r["seconds"] for r in rows if r["method"] == m) for m in names]
        y = [max(abs(median(r["error"] for r in rows if r["method"] == m)), 1e-16) for m in names]
        label = (
            "Gram iteration (upper bounds)" if family == "GI" else "power iteration (lower bounds)"
        )
        line(axes, x, y, label, k, markerfacecolor=None if family == "GI" else "white")
        for name, a, b in zip(names, x, y, strict=True):
            axes.annotate(
                name.split()[1], (a, b), textcoords="offset points", xytext=(5, 4), fontsize=8
            )
    for k, (name, (seconds, errors)) in enumerate(PUBLISHED_TABLE.items()):
        published(axes, seconds, errors, f"published, GPU: {name}", k)
    axes.axvline(
        median(r["seconds"] for r in rows if r["method"] == "SVD"),
        color="0.5",
        linestyle=":",
        label="time of the SVD",
    )
    axes.set(xscale="log", yscale="log", xlabel="seconds", ylabel="|σ₁ computed / σ₁ − 1| (median)")
    legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Figure 3.4, Table A.1",
    title="Error over time on dense matrices",
    claim="Power iteration approaches from below and slowly; each further Gram iteration squares the error, from above.",
    published="PI10 −3.3e-2, PI100 −1.4e-3, PI1000 −2.4e-6; GI10 6.8e-6, GI11 4.7e-8, GI12 4.3e-12; SVD 1.47 s, GI ≈ 2 ms (GPU)",
    laptop=Settings(matrices=3, shape=(2000, 1000)),
    paper=Settings(matrices=100, shape=(2000, 1000)),
)
