"""A 1-Lipschitz layer by Hölder's inequality: `‖E(ω)‖₂ ≤ √(‖E(ω)‖₁·‖E(ω)‖_∞)`."""

from __future__ import annotations

from equipoise.nn.diagonal import normalised
from torch import Tensor, nn

from equipoise.nn import Method


class Holder(Method):
    """`K/√(‖A‖₁‖A‖_∞)`, A the sum of |K| over the taps; the largest group counts."""

    name, plain = "holder", (nn.Linear, nn.Conv2d)

    def forward(self, raw: Tensor) -> Tensor:
        """The weight of norm at most 1, its rounding paid for."""
        K = self.kernel.grouped(raw).double()  # (groups, out, in, *taps)
        A = K.abs().flatten(3).sum(3) if K.dim() > 3 else K.abs()
        rows, columns = A.sum(2).amax(1), A.sum(1).amax(1)
        sigma = (rows.sqrt() * columns.sqrt()).amax()
        delta = 4 * (K[0].numel() + 4) * 2.0**-52
        return normalised(self.kernel.grouped(raw), sigma, delta).reshape(raw.shape)
