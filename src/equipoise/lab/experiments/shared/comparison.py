"""Shared by all comparisons of training methods: variants of one recipe over several seeds, paired by seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from equipoise.lab.experiments.experiment import Context, Label, Row, Verdict
from equipoise.lab.experiments.figures import COLOURS, canvas
from equipoise.lab.experiments.intervals import Mean, mean_of
from equipoise.lab.experiments.shared.training import merged, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: what each variant of a recipe changes
Variants = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """One recipe, named variants of it (what they change), and the number of seeds; the first variant is the baseline."""

    recipe: dict[str, Any]
    variants: Variants
    seeds: int
    keep: tuple[str, ...] = field(default=("accuracy",))


def run(settings: Settings, context: Context) -> Iterator[Row]:
    """One row per seed and variant with the figures of the last epoch; the seed fixes the start and the order of the data."""
    for seed in context.steps(range(settings.seeds)):
        for name, change in settings.variants.items():
            result = train(merged(settings.recipe, change), context, seed)
            context.tell(f"seed {seed}, {name}: {result.final['accuracy']:.4f}")
            figures = {key: result.final.get(key) for key in settings.keep}
            epochs = [row["seconds"] for row in result.history]
            yield {"variant": name, "seed": seed, **figures, "seconds per epoch": sum(epochs) / len(epochs)}


def by_variant(rows: Sequence[Row], key: str = "accuracy") -> dict[str, list[float]]:
    """The figures of every variant in the order of the seeds."""
    found: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault(row["variant"], []).append(row[key])
    return found


def gains(rows: Sequence[Row], baseline: str, key: str = "accuracy") -> dict[str, Mean]:
    """Mean paired gain over the baseline in points, with its interval."""
    found = by_variant(rows, key)
    base = found[baseline]
    return {
        name: mean_of([100 * (a - b) for a, b in zip(values, base, strict=True)])
        for name, values in found.items()
        if name != baseline
    }


def verdict_on_gain(rows: Sequence[Row], baseline: str, wanted: str, least: float, published: str) -> Verdict:
    """Reproduced if the mean gain reaches `least` points and its interval excludes 0; in direction if the mean is positive."""
    found = gains(rows, baseline)
    gain = found[wanted]
    label = (
        Label.REPRODUCED if gain.value >= least and gain.low > 0 else Label.DIRECTION if gain.value > 0 else Label.NOT
    )
    base = mean_of([100 * v for v in by_variant(rows)[baseline]])
    others = ", ".join(f"{name} {mean.value:+.2f} ± {mean.half:.2f}" for name, mean in found.items())
    return Verdict(label, f"{baseline} {base.show()}; gain in points: {others}", published)


def draw(rows: Sequence[Row], key: str = "accuracy", ylabel: str = "test accuracy (%)") -> Figure:
    """Every seed as a dot, the mean with its 95 % interval beside."""
    found = by_variant(rows, key)
    figure, (axes,) = canvas(width=max(4.6, 0.95 * len(found)), height=3.4)
    for k, (_, values) in enumerate(found.items()):
        percent = [100 * v for v in values]
        axes.plot([k - 0.12] * len(percent), percent, "o", color=COLOURS[k % 8], alpha=0.45, markersize=4)
        mean = mean_of(percent)
        half = mean.half if mean.seeds > 1 else 0.0
        axes.errorbar([k + 0.12], [mean.value], yerr=[half], fmt="D", color=COLOURS[k % 8], capsize=3, markersize=5)
    axes.set_xticks(range(len(found)), list(found), rotation=25, ha="right")
    axes.set(ylabel=ylabel)
    return figure
