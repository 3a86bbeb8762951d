"""Activation decay against the layer-wise variant of Baek et al."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.lab.experiments.experiment import Experiment, Label, Row, Verdict
from equipoise.lab.experiments.generalisation.ad_mlp import AD, recipe
from equipoise.lab.experiments.intervals import mean_of
from equipoise.lab.experiments.shared.comparison import Settings, Variants, by_variant, draw, gains, run

VARIANTS: Variants = {
    "baseline": {},
    "AD": {"regularizers": [AD]},
    "Baek": {"regularizers": [{"kind": "layerwise-decay"}]},
}
PUBLISHED = "65.05 (AD) vs 65.11 (Baek): equal"


def judge(rows: Sequence[Row]) -> Verdict:
    """Equal within one point: the interval of the paired difference must lie inside ±1 to be called reproduced."""
    found = by_variant(rows)
    difference = mean_of([100 * (a - b) for a, b in zip(found["AD"], found["Baek"], strict=True)])
    over = gains(rows, "baseline")
    inside = difference.low > -1 and difference.high < 1
    label = Label.REPRODUCED if inside else Label.DIRECTION if abs(difference.value) < 1 else Label.NOT
    text = f"AD − Baek {difference.show()} points; over the baseline AD {over['AD'].value:+.2f}, Baek {over['Baek'].value:+.2f}"
    return Verdict(label, text, PUBLISHED)


EXPERIMENT = Experiment(
    id="ad-baek",
    chapter="Generalisation",
    title="Activation decay and Baek's layer-wise variant",
    claim="Decaying only the last layer's input does as well as decaying all layers.",
    published=PUBLISHED,
    laptop=Settings(recipe("cifar10.npz", [128, 128, 128], 8), VARIANTS, seeds=4),
    paper=Settings(recipe("cifar10-full.npz", [512, 512, 512], 200), VARIANTS, seeds=5),
    run=run,
    judge=judge,
    draw=draw,
    needs=("cifar10.npz",),
)
