"""What was really drawn: the setting of a certificate in numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equipoise.smoothing.bounds import Gaussian
from equipoise.smoothing.derive import Setting
from equipoise.smoothing.noise import Stream, noise_key
from equipoise.smoothing.ramp import Floats


@dataclass(frozen=True)
class Drawn:
    """The noise of some inputs: its level."""

    sigma: float

    def __str__(self) -> str:
        return f"N(0, {self.sigma:g}²·I) noise"

    def at(self, k: int) -> Drawn:
        """That of input k."""
        return self

    def setting(self, alpha: float, about: str) -> Setting:
        """What certificates of these inputs rest on."""
        return Setting(Gaussian(self.sigma), alpha, about)


def tie_breaks(seed: int, input_id: int | str) -> Floats:
    """Two uniform numbers of an input, from a stream of their own: fixed before its draws and independent of them."""
    key = noise_key(seed, f"ties/{type(input_id).__name__}:{input_id}", Stream.SELECTION, 0)
    return np.random.Generator(np.random.Philox(key=[key, 0])).random(2)
