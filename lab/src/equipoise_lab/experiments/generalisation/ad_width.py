"""Activation decay across widths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from equipoise_lab.experiments.experiment import Context, Precondition, Row, Verdict, of_module
from equipoise_lab.experiments.figures import COLOURS, MARKERS, Figure, canvas, intervals, legend
from equipoise_lab.experiments.generalisation.activation_decay import (
    AD,
    MLP,
    SCALE,
    SMALL,
    perceptron,
)
from equipoise_lab.experiments.intervals import Mean, combined, gain_label, mean_of, power_of
from equipoise_lab.experiments.shared.training import Settings as Comparison
from equipoise_lab.experiments.shared.training import by_variant, paired
from equipoise_lab.experiments.shared.training import run as compare


@dataclass(frozen=True)
class Settings:
    """Data, widths of the two hidden layers, seeds, epochs and further settings of the recipe."""

    data: str
    widths: tuple[int, ...]
    seeds: int
    epochs: int
    options: dict[str, Any] = field(default_factory=dict)


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """Baseline and activation decay at every width."""
    for width in context.steps(settings.widths):
        base = perceptron(settings.data, [width] * 2, settings.epochs, **settings.options)
        comparison = Comparison(
            base, {"baseline": {}, "AD": {"regularizers": [AD]}}, settings.seeds
        )
        for row in compare(comparison, context, f"width {width}, "):
            yield {"width": width, **row}


#: no number is printed for this figure; the same MLP with one layer more gains this
GAIN = 2.63


def by_width(rows: Sequence[Row]) -> dict[int, list[float]]:
    """Paired gains of activation decay in points, by width."""
    widths = sorted({row["width"] for row in rows})
    return {w: paired([r for r in rows if r["width"] == w], "AD") for w in widths}


def judge(rows: Sequence[Row]) -> Verdict:
    """Improves at every width: each interval against the gain printed for the deeper MLP."""
    means: dict[int, Mean] = {w: mean_of(gains) for w, gains in by_width(rows).items()}
    text = ", ".join(f"{w}: {g.signed}" for w, g in means.items())
    label = combined([gain_label(g, GAIN) for g in means.values()])
    return Verdict(label, f"gain in points by width {text}", EXPERIMENT.published)


def precondition(rows: Sequence[Row]) -> Precondition:
    """The baseline's mean accuracy at its best width."""
    baseline = [row for row in rows if row["variant"] == "baseline"]
    widths = {row["width"] for row in baseline}
    best = max(
        mean_of([100 * r["accuracy"] for r in baseline if r["width"] == w]).value for w in widths
    )
    return Precondition("best baseline", best, MLP)


def draw(rows: Sequence[Row]) -> Figure:
    """Mean accuracy with interval against width."""
    figure, (axes,) = canvas()
    widths = sorted({row["width"] for row in rows})
    for k, name in enumerate(("baseline", "AD")):
        means = [
            mean_of([100 * v for v in by_variant([r for r in rows if r["width"] == w])[name]])
            for w in widths
        ]
        intervals(axes, widths, means, color=COLOURS[k], marker=MARKERS[k], capsize=3, label=name)
    axes.set(xscale="log", xlabel="width of the hidden layers", ylabel="test accuracy (%)")
    axes.set_xticks(widths, [str(w) for w in widths])
    axes.minorticks_off()
    legend(axes)
    return figure


EXPERIMENT = of_module(
    __name__,
    place="Figure 7.3",
    title="Activation decay across widths",
    claim="The gain of activation decay does not depend on the network's width.",
    published="improves at every width (figure; +2.63 for four layers)",
    laptop=Settings("cifar10.npz", widths=(64, 256), seeds=2, epochs=6, options=SMALL),
    desk=Settings("cifar10-full.npz", widths=(128, 512, 1024), seeds=3, epochs=60),
    paper=Settings(
        "cifar10-full.npz", widths=(64, 128, 256, 512, 1024, 2048), seeds=10, epochs=200
    ),
    power=lambda rows: power_of(
        min(by_width(rows).items())[1], GAIN, "points (printed for four layers)"
    ),
    notes=(SCALE,),
    precondition=precondition,
    needs=("cifar10.npz",),
)
