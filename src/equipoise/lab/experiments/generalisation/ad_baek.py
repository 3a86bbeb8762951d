"""Activation decay against the layer-wise variant of Baek et al."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.lab.experiments.experiment import Experiment, Label, Row, Verdict
from equipoise.lab.experiments.generalisation.ad_mlp import AD, SMALL, perceptron
from equipoise.lab.experiments.intervals import gain_label, mean_of, parity_label, power_of
from equipoise.lab.experiments.shared.comparison import Settings, Variants, draw, paired, run

VARIANTS: Variants = {
    "baseline": {},
    "AD": {"regularizers": [AD]},
    "Baek": {"regularizers": [{"kind": "layerwise-decay"}]},
}
PUBLISHED = "65.05 [64.86, 65.23] (Baek) and 65.11 [64.90, 65.33] (AD): equal"
#: points of AD over the baseline of the same table
GAIN = 65.11 - 62.17


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """A gain over the baseline first: two methods that do nothing are equal too. Then parity within one point."""
    gain, difference = mean_of(paired(rows, "AD")), mean_of(paired(rows, "AD", "Baek"))
    first = gain_label(gain, GAIN)
    parity = parity_label(difference, 1.0) if first in (Label.REPRODUCED, Label.DIRECTION) else Label.INCONCLUSIVE
    without = "" if parity is not Label.INCONCLUSIVE else "; decides nothing without a gain to share"
    return (
        Verdict(first, f"AD {gain.show()} points over the baseline", "62.17 → 65.11", "gain of AD"),
        Verdict(parity, f"AD − Baek {difference.show()} points{without}", PUBLISHED, "AD as good as Baek"),
    )


EXPERIMENT = Experiment(
    id="ad-baek",
    chapter="Generalisation",
    place="Table D.2",
    title="Activation decay and Baek's layer-wise variant",
    claim="Decaying only the last layer's input does as well as decaying all layers.",
    published=PUBLISHED,
    laptop=Settings(perceptron("cifar10.npz", [128] * 3, 8, **SMALL), VARIANTS, seeds=2),
    desk=Settings(perceptron("cifar10.npz", [128] * 3, 12, **SMALL), VARIANTS, seeds=5),
    paper=Settings(perceptron("cifar10-full.npz", [512] * 3, 200), VARIANTS, seeds=10),
    run=run,
    judge=judge,
    power=lambda rows: power_of(paired(rows, "AD"), GAIN),
    draw=draw,
    needs=("cifar10.npz",),
)
