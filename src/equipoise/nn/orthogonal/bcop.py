"""BCOP: convolutions that are orthogonal at every frequency, as products of projections.

For a symmetric P with `0 ⪯ P ⪯ I` the two-tap kernel `(P, I − P)` has the symbol `P + (I − P)e^{−iω}`, whose
eigenvalues are convex combinations of 1 and e^{−iω}: norm at most 1, and unitary where P is a projection. Products of
such kernels along both axes, times a matrix H with orthonormal rows or columns, have as many taps as one likes:

    K = H · Π_j (P_j, I − P_j)_vertical · Π_j (Q_j, I − Q_j)_horizontal,      sup_ω ‖K(ω)‖ ≤ 1,

so that the guarantee holds with zero padding (errata 7) on every input size, also before P has become a projection.

Stride s, dilation d: H reads patches of `s/gcd(s, d)` taps along each axis, which do not meet (it is orthogonal as a strided
convolution), the two-tap kernels stand before it: a composition of contractions with k taps. On a circle that s does not
divide patches would meet at odd distances: there H has one tap, and the layer contracts.

References: Li et al. 2019 (BCOP); Xiao et al. 2018; Boissin et al. 2025 (stride by composition).

RKO, reshaped kernel orthogonalisation: the kernel as a matrix is made orthogonal.

A convolution multiplies patches: `y = W·patches(x)` with W the kernel as a matrix (out, in·taps). Each pixel lies in at
most c patches, so `‖patches(x)‖² ≤ c·‖x‖²` and the layer `W/√c` with `‖W‖ ≤ 1` is 1-Lipschitz for every input size,
whatever the padding (zeros, or circular that does not enlarge the image). Along one axis with k taps, stride s and
dilation d, c = ⌈k·gcd(s, d)/s⌉: 1 where stride and kernel size are equal, and then the layer is orthogonal. On a circle
whose size s does not divide patches meet at odd distances, so with circular padding c is the number of taps.

References: Li et al. 2019, §4.1 (RKO); Serrurier et al. 2021; Björck & Bowie 1971; Anil et al. 2019.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.precision import unit_roundoff
from equipoise.maps.geometry import Geometry
from equipoise.nn.orthogonal.polar import orthonormal
from equipoise.nn.parametrize import Parametrization, Parametrized


def _apart(geometry: Geometry) -> tuple[int, ...]:
    """Along each axis how many taps patches may have that do not meet: `s/gcd(s, d)`, for patches of taps at distance d.

    `i·s + a·d = j·s + b·d` means that `s/gcd(s, d)` divides a − b, on the line; on a circle that s does not divide patches
    meet at odd distances: 1.
    """
    if geometry.padding == "circular":
        return (1,) * geometry.dims
    return tuple(axis.stride // math.gcd(axis.stride, axis.dilation) for axis in geometry.axes)


def overlap(geometry: Geometry) -> int:
    """How many patches may hold one pixel: `Π_j ⌈k_j·gcd(s_j, d_j)/s_j⌉`, or Π k_j on circles.

    >>> overlap(Geometry.of((4, 4, 3, 3))), overlap(Geometry.of((4, 4, 2, 2), stride=2))
    (9, 1)
    """
    return math.prod(-(-k // free) for k, free in zip(geometry.shape[2:], _apart(geometry), strict=True))


def _polar_factor(W: Tensor) -> Tensor:
    """The nearest matrices with orthonormal rows or columns, by a singular value decomposition in float64."""
    U, _, Vh = torch.linalg.svd(W.double().nan_to_num(), full_matrices=False)
    return (U @ Vh).to(W.dtype)


class RKO(Parametrization):
    """`W = orthonormal(raw)/√c` for the reshaped kernel, c the number of patches that share a pixel; dense: no √c.

    Guarantee: norm at most 1 for every raw weight and input size. Dense, and for convolutions with c = 1, singular
    values are 1 where σ_min(raw) ≥ 1e-4·σ_max(raw).

    >>> down = RKOConv2d(3, 12, 2, stride=2, bias=False)  # stride and kernel size agree: orthogonal
    >>> x = torch.randn(1, 3, 8, 8)
    >>> bool((down(x).norm() / x.norm() - 1).abs() < 1e-5)
    True
    """

    steps: int | None = None

    def construct(self, raw: Tensor) -> Tensor:
        """The weight."""
        scale = 1 / math.sqrt(overlap(self.geometry)) if self.geometry.dims else 1.0
        return orthonormal(self.geometry.grouped(raw).flatten(2), self.steps, scale).reshape(raw.shape)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The polar factor: the same layer, from a raw weight that is as well conditioned as can be."""
        return _polar_factor(self.geometry.grouped(weight).flatten(2)).reshape(weight.shape)


class Bjorck(RKO):
    """RKO with a number of classical steps `W ← (3/2)W − (1/2)WWᵀW` instead of converged ones.

    Guarantee: norm at most 1 after any number of steps. Singular values start between 0 and 1, grow by 3/2 per step
    while small, and converge quadratically to 1.

    Args:
        geometry: of the layer.
        steps: how many.

    >>> layer = BjorckLinear(6, 4, steps=3)
    >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 1)
    True
    """

    kinds = (nn.Linear, nn.Conv2d)

    def __init__(self, geometry: Geometry, steps: int = 15, **factory: Any) -> None:
        super().__init__(geometry, **factory)
        if not isinstance(steps, int) or steps < 1:
            raise InputError(f"Björck needs at least one step, got {steps}")
        self.steps = steps


class BCOP(Parametrization):
    """`K = H·Π(P, I − P)` with `H = orthonormal(raw)` and `P = VVᵀ`, `V = orthonormal(projections)` of half rank; dense: `K = H`.

    Guarantee: norm at most 1 for every raw weight. With circular padding and stride 1 all singular values that the shape
    allows are 1 (where raw weights are not deficient); with stride s, zeros and k ≥ s the layer is so up to the border.

    >>> layer = BCOPConv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
    >>> x = torch.randn(1, 4, 8, 8)
    >>> bool((layer(x).norm() / x.norm() - 1).abs() < 1e-5)
    True
    """

    projections: nn.Parameter | None

    def __init__(self, geometry: Geometry, **factory: Any) -> None:
        super().__init__(geometry, **factory)
        #: the taps of H along each axis: as many as patches that do not meet may have
        self.core = tuple(map(min, geometry.shape[2:], _apart(geometry)))
        self.factors = sum(k - m for k, m in zip(geometry.shape[2:], self.core, strict=True))
        out, ins = geometry.shape[0] // geometry.groups, geometry.shape[1]
        #: the projections stand on the wider side, where there are more of them
        self.outside = out > ins and math.prod(self.core) == 1
        side = out if self.outside else ins
        self.register_parameter("projections", None)
        if self.factors:
            V = torch.randn(self.factors, geometry.groups, side, max(1, side // 2), dtype=torch.float64)
            self.projections = nn.Parameter(torch.linalg.qr(V)[0].to(**self.factory).contiguous())

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The taps that H has, made orthogonal: an orthogonal layer near the weight, not the weight itself."""
        K = self.geometry.grouped(weight)
        for axis, m in enumerate(self.core):
            K = K.narrow(3 + axis, (K.shape[3 + axis] - m) // 2, m)
        return _polar_factor(K.flatten(2))

    def construct(self, raw: Tensor) -> Tensor:
        """The weight."""
        H = orthonormal(raw)
        if not self.geometry.dims:
            return H.reshape(self.geometry.shape)
        H = H.double().reshape(*H.shape[:2], -1, *self.core)
        K = H.transpose(1, 2) if self.outside else H
        if self.projections is not None:
            V = orthonormal(self.projections).double()
            P = V @ V.mT
            axes = [3 + axis for axis, m in enumerate(self.core) for _ in range(self.geometry.shape[2 + axis] - m)]
            for j, axis in enumerate(axes):
                K = two_taps(K, P[j], axis)
        K = K.transpose(1, 2) if self.outside else K
        return (K * (1 - self._rounding(raw.dtype))).reshape(self.geometry.shape).to(raw.dtype)

    def _rounding(self, dtype: torch.dtype) -> float:
        """`Σ_a ‖ΔK_a‖ ≤ u·√taps·‖K‖_F ≤ u·√(taps·c)`, c the smaller number of channels, and float64 products of the kernels."""
        taps, (out, ins) = math.prod(self.geometry.shape[2:]), self.geometry.shape[:2]
        narrow = min(out // self.geometry.groups, ins * math.prod(self.core))
        length = 8 * (self.factors + 2) * (max(out, ins) + 8)
        products = length * taps * narrow * unit_roundoff(torch.float64)
        return 1.5 * unit_roundoff(dtype) * math.sqrt(taps * narrow) + products


def two_taps(K: Tensor, P: Tensor, axis: int) -> Tensor:
    """`K ⊠ (P, I − P)` along an axis of `K (g, m, c, *taps)`: tap a becomes `K_a·P + K_{a−1}(I − P)`."""
    last = K.movedim(2, -1)  # channels last: one product for all taps
    kept = (last.flatten(1, -2) @ P).reshape(last.shape).movedim(-1, 2)
    none = torch.zeros_like(K.narrow(axis, 0, 1))
    return torch.cat([kept, none], axis) + torch.cat([none, K - kept], axis)


class BCOPLinear(Parametrized, nn.Linear):
    """`nn.Linear` as an orthogonal operator, see `BCOP`."""

    parametrization = BCOP


class BCOPConv1d(Parametrized, nn.Conv1d):
    """`nn.Conv1d` as an orthogonal operator, see `BCOP`."""

    parametrization = BCOP


class BCOPConv2d(Parametrized, nn.Conv2d):
    """`nn.Conv2d` as an orthogonal operator, see `BCOP`."""

    parametrization = BCOP


class BCOPConv3d(Parametrized, nn.Conv3d):
    """`nn.Conv3d` as an orthogonal operator, see `BCOP`."""

    parametrization = BCOP


class BCOPConvTranspose2d(Parametrized, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` as an orthogonal operator, see `BCOP`."""

    parametrization = BCOP


class RKOLinear(Parametrized, nn.Linear):
    """`nn.Linear` with an orthogonal kernel matrix, see `RKO`."""

    parametrization = RKO


class RKOConv1d(Parametrized, nn.Conv1d):
    """`nn.Conv1d` with an orthogonal kernel matrix, see `RKO`."""

    parametrization = RKO


class RKOConv2d(Parametrized, nn.Conv2d):
    """`nn.Conv2d` with an orthogonal kernel matrix, see `RKO`."""

    parametrization = RKO


class RKOConv3d(Parametrized, nn.Conv3d):
    """`nn.Conv3d` with an orthogonal kernel matrix, see `RKO`."""

    parametrization = RKO


class RKOConvTranspose2d(Parametrized, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` with an orthogonal kernel matrix, see `RKO`."""

    parametrization = RKO


class BjorckLinear(Parametrized, nn.Linear):
    """`nn.Linear` by steps of Björck & Bowie, see `Bjorck`."""

    parametrization = Bjorck


class BjorckConv2d(Parametrized, nn.Conv2d):
    """`nn.Conv2d` by steps of Björck & Bowie, see `Bjorck`."""

    parametrization = Bjorck
