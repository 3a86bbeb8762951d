"""BCOP: convolutions that are orthogonal at every frequency, as products of projections.

For a symmetric P with `0 ⪯ P ⪯ I` the two-tap kernel `(P, I − P)` has the symbol `P + (I − P)e^{−iω}`, whose
eigenvalues are convex combinations of 1 and e^{−iω}: norm at most 1, and unitary where P is a projection. Products of
such kernels along both axes, times a matrix H with orthonormal rows or columns, have as many taps as one likes:

    K = H · Π_j (P_j, I − P_j)_vertical · Π_j (Q_j, I − Q_j)_horizontal,      sup_ω ‖K(ω)‖ ≤ 1,

so that the guarantee holds with zero padding (errata 7) on every input size, also before P has become a projection.

Stride s, dilation d: H reads patches of `s/gcd(s, d)` taps along each axis, which do not meet (it is orthogonal as a strided
convolution), the two-tap kernels stand before it: a composition of contractions with k taps. On a circle that s does not
divide patches meet; the layers refuse it.

References: Li et al. 2019 (BCOP); Xiao et al. 2018; Boissin et al. 2025 (stride by composition).

RKO, reshaped kernel orthogonalisation: the kernel as a matrix is made orthogonal.

A convolution multiplies patches: `y = W·patches(x)` with W the kernel as a matrix (out, in·taps). Each pixel lies in at
most c patches, so `‖patches(x)‖² ≤ c·‖x‖²` and the layer `W/√c` with `‖W‖ ≤ 1` is 1-Lipschitz for every input size,
whatever the padding (zeros, or circular that does not enlarge the image). Along one axis with k taps, stride s and
dilation d, c = ⌈k·gcd(s, d)/s⌉: 1 where stride and kernel size are equal, and then the layer is orthogonal. On a circle
whose size s does not divide patches meet at odd distances; the layers refuse it where they are padded at all.

References: Li et al. 2019, §4.1 (RKO); Serrurier et al. 2021; Björck & Bowie 1971; Anil et al. 2019.
"""

import math

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.precision import unit_roundoff
from equipoise.maps.geometry import Geometry
from equipoise.nn.layers import enter, layers_of
from equipoise.nn.method import Method, apart
from equipoise.nn.orthogonal.polar import orthonormal
from equipoise.nn.orthogonal.root import orthonormal_linear


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

    def applied(self, x: Tensor, raw: Tensor) -> Tensor | None:
        """A dense layer without its bias."""
        return None if self.kernel.dims or self.steps is not None else orthonormal_linear(x, raw)

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


class BCOP(Method):
    """`K = H·Π(P, I − P)` with `H = orthonormal(raw)` and `P = VVᵀ`, `V = orthonormal(projections)` of half rank; dense: `K = H`.

    Guarantee: norm at most 1 for every raw weight. With circular padding that returns every s-th pixel all singular values
    that the shape leaves room for are 1 (where raw weights are not deficient): with k ≥ s the layer is norm-preserving if
    out ≥ in·s², and its adjoint is if out ≤ in·s².

    >>> layer = BCOPConv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
    >>> x = torch.randn(1, 4, 8, 8)
    >>> bool((layer(x).norm() / x.norm() - 1).abs() < 1e-5)
    True
    """

    name = "bcop"
    whole_circles = True
    projections: nn.Parameter | None

    def setup(self) -> None:
        """Projections, and the taps of H along each axis: as many as patches that do not meet may have."""
        kernel, dtype = self.kernel, self.factory["dtype"] or torch.get_default_dtype()
        self.core = tuple(map(min, kernel.shape[2:], apart(kernel, self.whole)))
        self.factors = sum(k - m for k, m in zip(kernel.shape[2:], self.core, strict=True))
        out, ins = kernel.shape[0] // kernel.groups, kernel.shape[1]
        #: the projections stand on the wider side, where there are more of them
        self.outside = out > ins and math.prod(self.core) == 1
        side = out if self.outside else ins
        self.register_parameter("projections", None)
        if self.factors:
            V = torch.randn(self.factors, kernel.groups, side, max(1, side // 2), dtype=torch.float64)
            V = torch.linalg.qr(V)[0].to(device=self.factory["device"], dtype=dtype)
            self.projections = nn.Parameter(V.contiguous())

    def initial(self, raw: Tensor) -> Tensor:
        """The taps that H has room for, made orthogonal."""
        K = self.kernel.grouped(raw)
        for axis, m in enumerate(self.core):
            K = K.narrow(3 + axis, (K.shape[3 + axis] - m) // 2, m)
        U, _, Vh = torch.linalg.svd(K.flatten(2).double(), full_matrices=False)
        return (U @ Vh).to(raw.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What `torch.nn.utils.parametrize` stores for a given weight: an orthogonal layer near it, not the weight itself."""
        return self.initial(weight)

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight."""
        H = orthonormal(raw)
        if not self.kernel.dims:
            return H.reshape(self.kernel.shape)
        H = H.double().reshape(*H.shape[:2], -1, *self.core)
        K = H.transpose(1, 2) if self.outside else H
        if self.projections is not None:
            V = orthonormal(self.projections).double()
            P = V @ V.mT
            j = 0
            for axis, (k, m) in enumerate(zip(self.kernel.shape[2:], self.core, strict=True)):
                for _ in range(k - m):
                    K = two_taps(K, P[j], 3 + axis)
                    j += 1
        K = K.transpose(1, 2) if self.outside else K
        return (K * (1 - self._rounding(raw.dtype))).reshape(self.kernel.shape).to(raw.dtype)

    def applied(self, x: Tensor, raw: Tensor) -> Tensor | None:
        """A dense layer without its bias."""
        return None if self.kernel.dims else orthonormal_linear(x, raw.reshape(self.kernel.shape))

    def _rounding(self, dtype: torch.dtype) -> float:
        """`Σ_a ‖ΔK_a‖ ≤ u·√taps·‖K‖_F ≤ u·√(taps·c)`, c the smaller number of channels, and float64 products of the kernels."""
        taps, (out, ins) = math.prod(self.kernel.shape[2:]), self.kernel.shape[:2]
        narrow = min(out // self.kernel.groups, ins * math.prod(self.core))
        length = 8 * (self.factors + 2) * (max(out, ins) + 8)
        products = length * taps * narrow * unit_roundoff(torch.float64)
        return 1.5 * unit_roundoff(dtype) * math.sqrt(taps * narrow) + products


def two_taps(K: Tensor, P: Tensor, axis: int) -> Tensor:
    """`K ⊠ (P, I − P)` along an axis of `K (g, m, c, *taps)`: tap a becomes `K_a·P + K_{a−1}(I − P)`."""
    last = K.movedim(2, -1)  # channels last: one product for all taps
    kept = (last.flatten(1, -2) @ P).reshape(last.shape).movedim(-1, 2)
    none = torch.zeros_like(K.narrow(axis, 0, 1))
    return torch.cat([kept, none], axis) + torch.cat([none, K - kept], axis)


BCOPLinear, BCOPConv1d, BCOPConv2d, BCOPConv3d, BCOPConvTranspose2d = layers_of(BCOP)
#: the same layers under the name of Boissin et al. 2025: BCOP composed with a kernel that does not overlap, for stride, groups,
#: dilation and transposition
AOCConv1d, AOCConv2d, AOCConvTranspose2d = (
    enter("aoc", kind, layer)
    for kind, layer in ((nn.Conv1d, BCOPConv1d), (nn.Conv2d, BCOPConv2d), (nn.ConvTranspose2d, BCOPConvTranspose2d))
)
