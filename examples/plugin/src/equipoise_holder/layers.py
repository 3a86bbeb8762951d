"""A 1-Lipschitz layer by Hölder's inequality: `K/σ` with `σ² = ‖A‖₁‖A‖_∞`, A the sum of |K| over the taps."""

from torch import Tensor, nn

from equipoise.nn.parametrize import Parametrization, Parametrized
from equipoise.nn.rescaling import normalised_pair


class Holder(Parametrization):
    """`K/√(‖A‖₁‖A‖_∞)`, A the sum of |K| over the taps; the largest group counts."""

    def construct(self, raw: Tensor) -> Tensor:
        """The weight."""
        K = self.geometry.grouped(raw).double()  # (groups, out, in, *taps)
        A = K.abs().flatten(3).sum(3) if K.dim() > 3 else K.abs()
        rows, columns = A.sum(2).amax(1), A.sum(1).amax(1)
        sigma = (rows.sqrt() * columns.sqrt()).amax()
        delta = 4 * (K[0].numel() + 4) * 2.0**-52
        return normalised_pair(self.geometry.grouped(raw), sigma, delta)[0].reshape(raw.shape)


class HolderConv2d(Parametrized, nn.Conv2d):
    """`nn.Conv2d` through `Holder`."""

    parametrization = Holder
