"""Orthogonal factors by matrix products or reflections, and the last step that makes any matrix a contraction.

One step of Björck & Bowie is `f(W) = (3/2)W − (1/2)WWᵀW`: each singular value σ becomes `f(σ) = σ(3 − σ²)/2`. On [0, 2]
we have `|f(σ)| ≤ 1`, with f(1) = 1 and f'(1) = 0. Two things follow:

* the iteration needs no proof of convergence to be sound: whatever came before, **one last step** taken in float64
  leaves a matrix of norm at most 1, as long as it started from norm at most 2, which a Frobenius or row-sum bound of
  the Gram matrix ensures (`last_step`);
* what comes before may be anything: on a processor the polar factor from the eigenvectors of the Gram matrix, with its
  derivative in closed form (`Polar`); elsewhere steps in float32 with scalings that converge faster than the classical
  ones (`scaled_steps`).

References: Björck & Bowie 1971; Anil et al. 2019; Chen & Chow 2014 (scaling of Newton–Schulz); Higham 2008, chapter 8.

BCOP: convolutions that are orthogonal at every frequency, as products of projections.

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

from math import gcd, prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from equipoise.core import Shape, or_one, require_counts, unit_roundoff
from equipoise.maps.geometry import Geometry
from equipoise.nn.parametrize import Parametrization, Parametrized, is_plain_call

#: singular values above this part of the largest are brought to 1 by `orthonormal`; smaller ones grow, and stay below 1
SMALLEST = 1e-4


#: raw matrices with `‖WWᵀ − I‖_F` below this are orthonormal up to a step, which squares what is missing
NEARLY = 1e-4
#: matrices with at most this many rows take all steps in float64: they cost nothing, and gradients keep their digits
FEW_ROWS = 128


def orthonormal(raw: Tensor, steps: int | None = None, scale: float = 1.0) -> Tensor:
    """`scale` times the nearest matrix with orthonormal rows or columns, `U·Vᵀ` of `raw = U·Σ·Vᵀ (..., m, n)`: norm at
    most `scale` in any case.

    `steps = None` takes the scaled steps that converge for σ_min ≥ 1e-4·σ_max; a number takes so many classical steps.
    Directions in which the raw matrix vanishes stay zero: the result is then a contraction, not an isometry.

    Args:
        raw: matrices (..., m, n).
        steps: number of classical steps, None for the polar factor.
        scale: of the result.

    >>> orthonormal(torch.tensor([[3.0, 0.0], [0.0, 1e-2]])).round(decimals=5).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    tall = raw.shape[-2] > raw.shape[-1]
    W = raw.mT if tall else raw
    if steps is None and raw.device.type == "cpu" and is_plain_call(raw):
        W = Polar.apply(W)[0]
    else:
        W = by_steps(W, CONVERGING if steps is None else (1.0,) * (steps - 1)).to(raw.dtype)
    W = W * scale if scale != 1 else W
    return W.mT if tall else W


def _precision(raw: Tensor) -> torch.dtype:
    return torch.float64 if raw.shape[-2] <= FEW_ROWS else raw.dtype


def by_steps(raw: Tensor, alphas: tuple[float, ...]) -> Tensor:
    """`f(…f(α₁·raw/‖raw‖)…)`, the last step in float64.

    Args:
        raw: matrices with no more rows than columns.
        alphas: scalings of the steps.
    """
    W = normalised(raw.to(_precision(raw)))
    for alpha in alphas:
        W = _step(W, alpha)
    return last_step(W, raw.dtype)


class Polar(torch.autograd.Function):
    """`Q = (WWᵀ)^(−1/2)·W` of matrices with no more rows than columns, brought to norm at most 1 by the last step.

    With `WWᵀ = U·diag(s²)·Uᵀ`, a gradient g for Q, `B = gQᵀ`, `S⁻¹ = U·diag(1/s)·Uᵀ` and Y with the entries
    `(Uᵀ(B − Bᵀ)U)_ij/(s_i + s_j)` in the basis U, the gradient for W is `S⁻¹g + (Y − S⁻¹B)Q`: three large products instead of
    four for every step taken. (From `dW = dS·Q + S·dQ` with a skew `dQ·Qᵀ`; the last step has derivative 1 on such dQ.)
    Higher derivatives go through the steps. Where W is orthonormal up to `NEARLY`, as `optim.Muon` keeps it, Q is W up to the
    last step, and the gradient is `g − ½(B + Bᵀ)Q`.
    """

    @staticmethod
    def forward(raw: Tensor) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
        """Q, and what the gradient needs where W is not orthonormal: Q with its digits, U, and s in the units of raw."""
        W = raw.double()
        gram = W @ W.mT
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        if (torch.linalg.matrix_norm(gram - identity) < NEARLY).all():
            return last_step(W, raw.dtype, gram).to(raw.dtype), None, None, None
        scale = or_one(W.abs().amax((-2, -1), keepdim=True))
        W = W / scale
        gram = W @ W.mT
        whole = gram.isfinite().all((-2, -1), keepdim=True)
        squares, U = torch.linalg.eigh(torch.where(whole, gram, 0.0))
        most = squares[..., -1:]
        s = squares.maximum(SMALLEST**2 * or_one(most)).sqrt()
        Q = (U / s[..., None, :]) @ (U.mT @ W)
        result = torch.where(whole, last_step(Q, raw.dtype), torch.nan).to(raw.dtype)
        dtype = _precision(raw)
        return result, Q.to(dtype), U.to(dtype), (s * scale[..., 0]).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the gradient needs.

        Args:
            ctx: autograd's context.
            inputs: those of `forward`.
            output: that of `forward`.
        """
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*(t for t in output[1:] if t is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        """The gradient for W."""
        g, (raw, Q, U, s) = gradients[0], ctx.saved_tensors
        if g is None:
            return None
        if torch.is_grad_enabled():  # for higher derivatives
            values = by_steps(raw, CONVERGING).to(raw.dtype)
            return torch.autograd.grad(values, raw, g, create_graph=True)[0]
        g = g.to(_precision(raw))
        if Q is None:
            Q = raw.to(g.dtype)
            B = g @ Q.mT
            return (g - (B + B.mT) / 2 @ Q).to(raw.dtype)
        B = g @ Q.mT
        C = U.mT @ B @ U
        Y = (C - C.mT) / (s[..., :, None] + s[..., None, :]) - C / s[..., :, None]
        S = (U / s[..., None, :]) @ U.mT
        return (S @ g + (U @ Y @ U.mT) @ Q).to(raw.dtype)


def normalised(raw: Tensor) -> Tensor:
    """`raw/s` with `s = ‖WWᵀ‖_F^(1/2) ≥ σ_max`; the result does not depend on the size of raw, from 1e-37 to 1e37."""
    W = raw / or_one(raw.detach().abs().amax((-2, -1), keepdim=True))
    size = (W @ W.mT).square().sum((-2, -1), keepdim=True).clamp_min(1.0)  # at least 1 unless W = 0
    return W / size.sqrt().sqrt()


def _step(W: Tensor, alpha: float) -> Tensor:
    """`f(αW)` for matrices with no more rows than columns."""
    return 1.5 * alpha * W - (0.5 * alpha**3) * (W @ W.mT @ W)


def scaled_steps() -> tuple[float, ...]:
    """Scalings α_k ≤ √3 with which `f(α_k·)` takes [ℓ, 1] to [ℓ', 1] with the largest ℓ', from ℓ = `SMALLEST` up to 1 − 1e-9."""
    alphas = []
    low = SMALLEST
    while low < 1 - 1e-5:  # the last step squares what is left
        alpha = sqrt(3 / (1 + low + low * low))
        low = alpha * low * (3 - (alpha * low) ** 2) / 2
        alphas.append(alpha)
    return tuple(alphas)


#: the scalings that `orthonormal` takes
CONVERGING = scaled_steps()


def last_step(W: Tensor, dtype: torch.dtype | None = None, gram: Tensor | None = None) -> Tensor:
    """`f(W)` in float64 for any W with no more rows than columns: norm at most 1, also once it is rounded to `dtype` (that of W).

    The norm is first brought to at most 2 with `σ² ≤ min(‖WWᵀ‖_F, ‖WWᵀ‖_∞)`, which changes nothing near convergence.
    Rounding the result to unit roundoff u moves the norm by at most `u·√m`, rounding in float64 by far less: the result
    is multiplied by 1 minus both.

    Args:
        W: matrices with no more rows than columns.
        dtype: that the result will be rounded to.
        gram: `WW*` in float64, where it is known.
    """
    dtype = dtype or W.dtype
    W = W.to(torch.complex128 if W.is_complex() else torch.float64)
    m, n = W.shape[-2:]
    G = W @ W.mH if gram is None else gram
    bound = torch.minimum(torch.linalg.matrix_norm(G), G.abs().sum(-1).amax(-1))[..., None, None]
    c2 = (bound / 3.9).clamp_min(1.0)
    W = W / c2.sqrt()
    G = G / c2
    margin = 1.5 * unit_roundoff(dtype) * sqrt(m) + (4 * n + 64) * m * unit_roundoff(torch.float64)
    return (1.5 * W - 0.5 * (G @ W)) * (1 - margin)


def project_to_contraction(W: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`last_step` of a W whose rows are orthonormal by construction, with the derivatives of W itself.

    `f(W) = W` for all such W, so the derivatives of every order agree; the products of the step need not be differentiated.

    Args:
        W: matrices with orthonormal rows.
        dtype: that the result will be rounded to.
    """
    value = last_step(W.detach(), dtype or W.dtype)
    like = W.to(value.dtype)
    return value + (like - like.detach())


def _apart(geometry: Geometry) -> Shape:
    """Along each axis how many taps patches may have that do not meet: `s/gcd(s, d)`, for patches of taps at distance d.

    `i·s + a·d = j·s + b·d` means that `s/gcd(s, d)` divides a − b, on the line; on a circle that s does not divide patches
    meet at odd distances: 1.
    """
    if geometry.padding == "circular":
        return (1,) * geometry.dims
    return tuple(axis.stride // gcd(axis.stride, axis.dilation) for axis in geometry.axes)


def overlap(geometry: Geometry) -> int:
    """How many patches may hold one pixel: `Π_j ⌈k_j·gcd(s_j, d_j)/s_j⌉`, or Π k_j on circles.

    >>> overlap(Geometry.of((4, 4, 3, 3))), overlap(Geometry.of((4, 4, 2, 2), stride=2))
    (9, 1)
    """
    return prod(-(-k // free) for k, free in zip(geometry.shape[2:], _apart(geometry), strict=True))


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
        scale = 1 / sqrt(overlap(self.geometry)) if self.geometry.dims else 1.0
        W = orthonormal(self.geometry.grouped(raw).flatten(2), self.steps, scale)
        return W.reshape(raw.shape)

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
        require_counts(steps=steps)
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
        out = geometry.shape[0] // geometry.groups
        ins = geometry.shape[1]
        #: the projections stand on the wider side, where there are more of them
        self.outside = out > ins and prod(self.core) == 1
        side = out if self.outside else ins
        self.register_parameter("projections", None)
        if self.factors:
            V = torch.randn(
                self.factors, geometry.groups, side, max(1, side // 2), dtype=torch.float64
            )
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
            axes = [
                3 + axis
                for axis, m in enumerate(self.core)
                for _ in range(self.geometry.shape[2 + axis] - m)
            ]
            for j, axis in enumerate(axes):
                K = two_taps(K, V[j], axis)
        K = K.transpose(1, 2) if self.outside else K
        return (K * (1 - self._rounding(raw.dtype))).reshape(self.geometry.shape).to(raw.dtype)

    def _rounding(self, dtype: torch.dtype) -> float:
        """`Σ_a ‖ΔK_a‖ ≤ u·√taps·‖K‖_F ≤ u·√(taps·c)`, c the smaller number of channels, and float64 products of the kernels."""
        taps, (out, ins) = prod(self.geometry.shape[2:]), self.geometry.shape[:2]
        narrow = min(out // self.geometry.groups, ins * prod(self.core))
        length = 8 * (self.factors + 2) * (max(out, ins) + 8)
        products = length * taps * narrow * unit_roundoff(torch.float64)
        return 1.5 * unit_roundoff(dtype) * sqrt(taps * narrow) + products


def orthonormal_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all BCOP layers: stacks of matrices `(…, m, n)` that the layers make orthonormal."""
    return [
        p
        for module in model.modules()
        if isinstance(module, ParametrizationList) and isinstance(module[0], BCOP)
        for p in module.parameters()
    ]


def two_taps(K: Tensor, V: Tensor, axis: int) -> Tensor:
    """`K ⊠ (P, I − P)` with `P = VVᵀ` along an axis of `K (g, m, c, *taps)`: tap a becomes `K_a·P + K_{a−1}(I − P)`.

    Args:
        K: kernel.
        V: orthonormal columns (g, c, r).
        axis: of the new tap.
    """
    last = K.movedim(2, -1)  # channels last: one product for all taps
    first = (last.flatten(1, -2) @ V @ V.mT).reshape(last.shape).movedim(-1, 2)
    none = torch.zeros_like(K.narrow(axis, 0, 1))
    return torch.cat([first, none], axis) + torch.cat([none, K - first], axis)


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
