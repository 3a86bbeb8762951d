"""Activation decay across widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equipoise.lab.experiments.experiment import Context, Experiment, Row, Verdict
from equipoise.lab.experiments.figures import COLOURS, MARKERS, Figure, canvas, legend
from equipoise.lab.experiments.generalisation.ad_mlp import AD, recipe
from equipoise.lab.experiments.intervals import combined, gain_label, mean_of
from equipoise.lab.experiments.shared.comparison import Settings as Comparison
from equipoise.lab.experiments.shared.comparison import by_variant, paired
from equipoise.lab.experiments.shared.comparison import run as compare


@dataclass(frozen=True)
class Settings:
    """Widths of the hidden layers, seeds and epochs."""

    data: str
    widths: tuple[int, ...]
    seeds: int
    epochs: int


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """Baseline and activation decay at every width."""
    for width in context.steps(settings.widths):
        base = recipe(settings.data, [width] * 3, settings.epochs)
        chosen = Comparison(base, {"baseline": {}, "AD": {"regularizers": [AD]}}, settings.seeds)
        for row in compare(chosen, context):
            yield {"width": width, **row}


def judge(rows: Sequence[Row]) -> Verdict:
    """Improves at every width: every interval above 0; no number was published."""
    widths = sorted({row["width"] for row in rows})
    found = {w: mean_of(paired([r for r in rows if r["width"] == w], "AD")) for w in widths}
    text = ", ".join(f"{w}: {g.signed}" for w, g in found.items())
    label = combined([gain_label(g) for g in found.values()])
    return Verdict(label, f"gain in points by width {text}", EXPERIMENT.published)


def draw(rows: Sequence[Row]) -> Figure:
    """Mean accuracy with interval against width."""
    figure, (axes,) = canvas()
    widths = sorted({row["width"] for row in rows})
    for k, name in enumerate(("baseline", "AD")):
        means = [mean_of([100 * v for v in by_variant([r for r in rows if r["width"] == w])[name]]) for w in widths]
        half = [m.half if m.seeds > 1 else 0.0 for m in means]
        axes.errorbar(
            widths, [m.value for m in means], yerr=half, color=COLOURS[k], marker=MARKERS[k], capsize=3, label=name
        )
    axes.set(xscale="log", xlabel="width of the hidden layers", ylabel="test accuracy (%)")
    axes.set_xticks(widths, [str(w) for w in widths])
    axes.minorticks_off()
    legend(axes)
    return figure


EXPERIMENT = Experiment(
    id="ad-width",
    chapter="Generalisation",
    place="Figure 7.3",
    title="Activation decay across widths",
    claim="The gain of activation decay does not depend on the network's width.",
    published="improves at every width (figure)",
    laptop=Settings("cifar10.npz", widths=(64, 256), seeds=3, epochs=6),
    paper=Settings("cifar10-full.npz", widths=(128, 256, 512, 1024, 2048), seeds=5, epochs=200),
    run=run,
    judge=judge,
    draw=draw,
    needs=("cifar10.npz",),
)
