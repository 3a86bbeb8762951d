"""Activation decay across widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.lab.experiments.experiment import Context, Experiment, Label, Row, Verdict
from equipoise.lab.experiments.figures import COLOURS, MARKERS, canvas, legend
from equipoise.lab.experiments.generalisation.ad_mlp import AD, recipe
from equipoise.lab.experiments.intervals import mean_of
from equipoise.lab.experiments.shared.comparison import Settings as Comparison
from equipoise.lab.experiments.shared.comparison import by_variant, gains
from equipoise.lab.experiments.shared.comparison import run as compare

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """The gain must be positive at every width, and clearly so (interval above 0) at most of them."""
    widths = sorted({row["width"] for row in rows})
    found = {w: gains([r for r in rows if r["width"] == w], "baseline")["AD"] for w in widths}
    positive, clear = sum(g.value > 0 for g in found.values()), sum(g.low > 0 for g in found.values())
    label = Label.REPRODUCED if positive == len(widths) and clear > len(widths) / 2 else Label.DIRECTION
    text = ", ".join(f"{w}: {g.value:+.2f} ± {g.half:.2f}" for w, g in found.items())
    return Verdict(
        label if positive > len(widths) / 2 else Label.NOT, f"gain in points by width {text}", EXPERIMENT.published
    )


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
