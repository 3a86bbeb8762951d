"""RKO, reshaped kernel orthogonalisation: the kernel as a matrix is made orthogonal.

A convolution multiplies patches: `y = W·patches(x)` with W the kernel as a matrix (out, in·taps). Each pixel lies in at
most c patches, so `‖patches(x)‖² ≤ c·‖x‖²` and the layer `W/√c` with `‖W‖ ≤ 1` is 1-Lipschitz for every input size,
whatever the padding (zeros, or circular that does not enlarge the image). Along one axis with k taps, stride s and
dilation d, c = ⌈k·gcd(s, d)/s⌉: 1 where stride and kernel size are equal, and then the layer is orthogonal. On a circle
whose size s does not divide patches meet at odd distances; the layers refuse it where they are padded at all.

References: Li et al. 2019, §4.1 (RKO); Serrurier et al. 2021.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.nn.layers import Conv1dLayer, Conv2dLayer, ConvTranspose2dLayer, LinearLayer
from equipoise.nn.method import Kernel, Method
from equipoise.nn.orthogonal.polar import orthonormal


def overlap(kernel: Kernel) -> int:
    """How many patches may hold one pixel: `Π_j ⌈k_j·gcd(s_j, d_j)/s_j⌉`, or Π k_j on circles of any size.

    >>> overlap(Kernel((4, 4, 3, 3), 1, (1, 1), (1, 1))), overlap(Kernel((4, 4, 2, 2), 1, (2, 2), (1, 1)))
    (9, 1)
    """
    return math.prod(-(-k // apart) for k, apart in zip(kernel.shape[2:], kernel.apart, strict=True))


class RKO(Method):
    """`W = orthonormal(raw)/√c` for the reshaped kernel, c the number of patches that share a pixel; dense: no √c.

    Guarantee: norm at most 1 for every raw weight and input size. Dense, and for convolutions with c = 1, singular
    values are 1 where σ_min(raw) ≥ 1e-4·σ_max(raw).
    """

    name = "rko"
    whole_circles = True
    steps: int | None = None

    def __init__(self, kernel: Kernel, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(kernel, device=device, dtype=dtype)
        self.scale = 1 / math.sqrt(overlap(kernel)) if kernel.dims else 1.0

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


class RKOLinear(LinearLayer):
    """`nn.Linear` with an orthogonal matrix (orthonormal rows or columns): norm at most 1.

    >>> W = RKOLinear(6, 4).weight
    >>> bool((W @ W.mT - torch.eye(4)).abs().max() < 1e-5)
    True
    """

    method_type = RKO


class RKOConv1d(Conv1dLayer):
    """`nn.Conv1d` with an orthogonal reshaped kernel over √overlap."""

    method_type = RKO


class RKOConv2d(Conv2dLayer):
    """`nn.Conv2d` with an orthogonal reshaped kernel over √overlap; orthogonal where stride and kernel size agree.

    >>> down = RKOConv2d(3, 12, 2, stride=2, bias=False)
    >>> x = torch.randn(1, 3, 8, 8)
    >>> bool((down(x).norm() / x.norm() - 1).abs() < 1e-5)
    True
    """

    method_type = RKO


class RKOConvTranspose2d(ConvTranspose2dLayer):
    """`nn.ConvTranspose2d` with an orthogonal reshaped kernel over √overlap: the adjoint of `RKOConv2d`."""

    method_type = RKO
