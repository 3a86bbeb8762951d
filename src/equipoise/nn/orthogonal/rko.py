"""RKO, reshaped kernel orthogonalisation: the kernel as a matrix is made orthogonal.

A convolution multiplies patches: `y = W·patches(x)` with W the kernel as a matrix (out, in·taps). Each pixel lies in at
most c patches, so `‖patches(x)‖² ≤ c·‖x‖²` and the layer `W/√c` with `‖W‖ ≤ 1` is 1-Lipschitz for every input size,
whatever the padding (zeros, or circular that does not enlarge the image). Along one axis with k taps, stride s and
dilation d, c = ⌈k·gcd(s, d)/s⌉: 1 where stride and kernel size are equal, and then the layer is orthogonal. On a circle
whose size s does not divide patches meet at odd distances; the layers refuse it where they are padded at all.

References: Li et al. 2019, §4.1 (RKO); Serrurier et al. 2021; Björck & Bowie 1971; Anil et al. 2019.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.maps.geometry import Geometry
from equipoise.nn.layers import layers_of
from equipoise.nn.method import Method, apart
from equipoise.nn.orthogonal.polar import orthonormal


def overlap(kernel: Geometry, whole_circles: bool = False) -> int:
    """How many patches may hold one pixel: `Π_j ⌈k_j·gcd(s_j, d_j)/s_j⌉`, or Π k_j on circles of any size.

    >>> overlap(Geometry.of((4, 4, 3, 3))), overlap(Geometry.of((4, 4, 2, 2), stride=2))
    (9, 1)
    """
    return math.prod(-(-k // free) for k, free in zip(kernel.shape[2:], apart(kernel, whole_circles), strict=True))


class RKO(Method):
    """`W = orthonormal(raw)/√c` for the reshaped kernel, c the number of patches that share a pixel; dense: no √c.

    Guarantee: norm at most 1 for every raw weight and input size. Dense, and for convolutions with c = 1, singular
    values are 1 where σ_min(raw) ≥ 1e-4·σ_max(raw).

    >>> down = RKOConv2d(3, 12, 2, stride=2, bias=False)  # stride and kernel size agree: orthogonal
    >>> x = torch.randn(1, 3, 8, 8)
    >>> bool((down(x).norm() / x.norm() - 1).abs() < 1e-5)
    True
    """

    name = "rko"
    whole_circles = True
    steps: int | None = None

    def setup(self) -> None:
        """One over √c."""
        self.scale = 1 / math.sqrt(overlap(self.kernel, self.whole)) if self.kernel.dims else 1.0

    def initial(self, raw: Tensor) -> Tensor:
        """The polar factor itself: the same layer, from a raw weight that is as well conditioned as can be."""
        W = self._matrix(raw).double()
        U, _, Vh = torch.linalg.svd(W, full_matrices=False)
        return (U @ Vh).reshape(raw.shape).to(raw.dtype) if bool(torch.isfinite(W).all()) else raw

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight."""
        return orthonormal(self._matrix(raw), self.steps, self.scale).reshape(raw.shape)

    def _matrix(self, raw: Tensor) -> Tensor:
        return self.kernel.grouped(raw).flatten(2)


class Bjorck(RKO):
    """RKO with a number of classical steps `W ← (3/2)W − (1/2)WWᵀW` instead of converged ones.

    Guarantee: norm at most 1 after any number of steps. Singular values start between 0 and 1, grow by 3/2 per step
    while small, and converge quadratically to 1.

    >>> layer = BjorckLinear(6, 4, steps=3)
    >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 1)
    True
    """

    name = "bjorck"
    plain = (nn.Linear, nn.Conv2d)

    def setup(self, steps: int = 15) -> None:
        """The number of steps."""
        super().setup()
        if not isinstance(steps, int) or steps < 1:
            raise InputError(f"Björck needs at least one step, got {steps}")
        self.steps = steps


RKOLinear, RKOConv1d, RKOConv2d, RKOConv3d, RKOConvTranspose2d = layers_of(RKO)
BjorckLinear, BjorckConv2d = layers_of(Bjorck)
