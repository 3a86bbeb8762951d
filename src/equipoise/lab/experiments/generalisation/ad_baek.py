"""Activation decay against the layer-wise variant of Baek et al."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.lab.experiments.experiment import Label, Row, Verdict
from equipoise.lab.experiments.generalisation.ad_mlp import AD, SCALE, SMALL, perceptron
from equipoise.lab.experiments.intervals import mean_of, parity_label
from equipoise.lab.experiments.shared.comparison import Claim, Settings, Variants, compared, gain_verdicts, paired

VARIANTS: Variants = {
    "baseline": {},
    "AD": {"regularizers": [AD]},
    "Baek": {"regularizers": [{"kind": "layerwise-decay"}]},
}
PUBLISHED = "65.05 [64.86, 65.23] (Baek) and 65.11 [64.90, 65.33] (AD): equal"
CLAIMS = (
    Claim("gain of AD", "AD", 65.11 - 62.17, "62.17 → 65.11"),
    Claim("AD − Baek", "AD", 0.06, PUBLISHED, rival="Baek"),
)


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """A gain over the baseline first: two methods that do nothing are equal too. Then parity within one point."""
    (gain,) = gain_verdicts(rows, CLAIMS[:1])
    difference = mean_of(paired(rows, "AD", "Baek"))
    shared = gain.label in (Label.REPRODUCED, Label.DIRECTION)
    parity = parity_label(difference, 1.0) if shared else gain.label
    without = "" if shared else "; without a gain there is nothing to be equal in"
    text = f"AD − Baek {difference.show()} points{without}"
    return gain, Verdict(parity, text, PUBLISHED, "AD gains as much as Baek")


EXPERIMENT = compared(
    __name__,
    claims=CLAIMS,
    judge=judge,
    place="Table D.2",
    title="Activation decay and Baek's layer-wise variant",
    claim="Decaying only the last layer's input does as well as decaying all layers.",
    published=PUBLISHED,
    notes=(SCALE,),
    laptop=Settings(perceptron("cifar10.npz", [128] * 3, 8, **SMALL), VARIANTS, seeds=2),
    desk=Settings(perceptron("cifar10.npz", [128] * 3, 12, **SMALL), VARIANTS, seeds=4),
    paper=Settings(perceptron("cifar10-full.npz", [512] * 3, 200), VARIANTS, seeds=10),
)
