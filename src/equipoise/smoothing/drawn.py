"""What was really drawn: the setting of a certificate in numbers and in words."""

import math
from dataclasses import dataclass

import numpy as np

from equipoise.smoothing.bounds import Gaussian
from equipoise.smoothing.certificates import NOT_COVERED
from equipoise.smoothing.derive import Setting
from equipoise.smoothing.grid import Grid
from equipoise.smoothing.noise import GENERATOR, Levels, NoiseName, Stream, noise_key, philox
from equipoise.smoothing.ramp import Floats


@dataclass(frozen=True)
class Drawn:
    """The noise of a sample: level, law, dimension of the inputs, shape of the batches and where the seed comes from.

    `noise=None` is a sample of which nothing is known but its level: counts from elsewhere, or a run of the first release.
    """

    levels: Levels
    noise: NoiseName | None = None
    cells: float | None = None
    dimension: int = 0
    batch: int = 0
    seed: int = 0
    chosen: bool = True

    def __str__(self) -> str:
        return str(self.levels)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grid, if there is one: of all channels, or of each."""
        return (
            ()
            if self.cells is None
            else tuple(Grid(s, self.cells) for s in self.levels.channels or (self.levels.sigma,))
        )

    @property
    def grid(self) -> Grid | None:
        """The first grid: all have one step."""
        return self.grids[0] if self.grids else None

    @property
    def variation(self) -> float:
        """Total variation between one draw and the law of the theorem, as far as it is counted: 0 for float noise."""
        each = self.dimension // max(1, len(self.grids))
        return math.nextafter(math.fsum(g.variation(each) for g in self.grids), 1.0) if self.grids else 0.0

    def setting(self, alpha: float, about: str) -> Setting:
        """What certificates of these draws rest on."""
        distance = 0.0 if self.grid is None else self.grid.distance(self.dimension)
        return Setting(
            Gaussian(self.levels.sigma, self.variation), alpha, about + self.shape(), self.caveats(), distance
        )

    def shape(self) -> str:
        """What more than a ball is certified, where the channels have levels of their own."""
        if self.levels.channels is None:
            return ""
        axes = ", ".join(f"{c / self.levels.sigma:.4g}" for c in self.levels.channels)
        return (
            f" (radii R are ℓ2, by the smallest level; certified is the ellipsoid of semi-axes R·({axes}), per channel)"
        )

    def caveats(self) -> str:
        """What is not covered, from what was used."""
        if self.noise is None:
            return NOT_COVERED + (" The draws were keyed by 32 bits, so that some may coincide." if self.batch else "")
        source = (
            f"Seed {self.seed} was chosen by the user: nothing is certified of a model or an input made knowing its draws."
            if self.chosen
            else f"The seed {self.seed} was drawn from the operating system."
        )
        generator = f"the quality of the pseudo-random generator ({GENERATOR})"
        shape = f"The network is evaluated in batches of {self.batch}; predict in the same shape."
        grid = self.grid
        if grid is None:
            return (
                "Not covered: noise drawn in floating point instead of real numbers, rounding inside the network's forward "
                f"pass, {generator}. {source}"
            )
        step = "1/255" if grid.image else f"{grid.step:g}"
        whole = "its inputs are 8-bit images" if grid.image else "what rounding moves is subtracted from the radius"
        return (
            f"Inputs and noise lie on the grid of step {step}, exactly: {whole}, and a total variation of "
            f"{self.variation:.1e} is counted. {shape} Not covered: {generator}. {source}"
        )


def tie_breaks(seed: int, input_id: int | str) -> Floats:
    """Two uniform numbers of an input, from a stream of their own: fixed before its draws and independent of them."""
    return np.random.Generator(philox(noise_key(seed, input_id, Stream.TIES, 0))).random(2)
