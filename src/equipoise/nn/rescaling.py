"""Rescaling: W·R with a diagonal R (AOL, SR) or a number (SN), so that the norm is at most 1.

If `(WᵀW)^p ⪯ D` for a diagonal D ≥ 0 and p = 2^(t−1), then `WᵀW ⪯ D^(1/p)` (Löwner–Heinz), hence `‖W·D^(−1/2p)‖ ≤ 1`. Diagonal
dominance gives such a D, for every q > 0:

    D_ii = Σ_j |(WᵀW)^p|_ij q_j/q_i,          R = D^(−2^−t).

A convolution is the same with the table of its Gram operator: the sum runs over channels and offsets. With a stride the input is
read through space-to-depth, so that every phase of an input channel is a channel.

Rounding. The sums are taken in float64, whatever the parameters' dtype. A computed power differs from the true one by an operator
of norm at most `δ·‖(WᵀW)^p‖` (`rounding`), so `(1 + δ)D + δ·max_i Σ_j|…|_ij` is a true majorant. The last product, rounded to
the parameters' dtype of unit roundoff u, moves the norm by at most `u·√(taps·min(m, n))`: the result is shrunk by that.

References: Prach & Lampert 2022 (AOL); Delattre et al. 2024 (spectral rescaling); Miyato et al. 2018 (spectral normalisation).
"""

from math import prod, sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.core import Shape, require_number, require_one_of, unit_roundoff
from equipoise.maps.geometry import Axis, Geometry, Lattice, polyphase, rejoined, zero_lattice
from equipoise.nn.parametrize import Parametrization, Parametrized, differentiated, is_plain_call
from equipoise.nn.powers import count_taps, largest_exponent, powers, refuse_large, totals
from equipoise.norms.differentiable import gram_norm, symbol_norm

Side = Literal["input", "output", "smaller"]
#: largest |log q|: the ratio of two entries of q stays far from overflow
_LOG_Q = 40.0


def rescaling_pair(K: Tensor, t: int = 1, log_q: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`(K·R, R)` with `R_ii = (Σ_j |G_t|_ij q_j/q_i)^(−2^−t)`, `G_t = (KᵀK)^(2^(t−1))`; R is (g, n).

    Guarantee: `K·R` has norm at most 1, also in floating point.

    Args:
        K: matrices `(g, m, n)` or kernels `(g, co, ci, *taps)` of stride 1: one block per group.
        t: 1 is AOL; every step halves what is left to spectral normalisation.
        log_q: `(g, n)`, the logarithm of the positive weights q; None is q = 1.

    >>> W = torch.tensor([[[3.0, 0.0], [0.0, 1e-30]]])
    >>> rescaling_pair(W)[0].round(decimals=4).tolist()
    [[[1.0, 0.0], [0.0, 0.0]]]
    """
    check_steps(t)
    refuse_large(K, t)
    if is_plain_call(K) and _in_closed_form(K, t):
        return _Rescaled.apply(K, log_q, t)
    return _by_operators(K, t, log_q)


def check_steps(t: int) -> None:
    """t ≥ 1: at t = 0 there is no symmetric matrix to sum over."""
    require_number(t, "the number of steps t of spectral rescaling", least=1, most=12, whole=True)


def _in_closed_form(K: Tensor, t: int) -> bool:
    """Whether `_Rescaled` is for the kernel: wide matrices go another way, and numbers must not be too large or small."""
    wide = t > 1 and count_taps(K) == 1 and K.shape[1] < K.shape[2]
    return not wide and bool(largest_exponent(K, 0).abs().amax() <= 30)


def _by_operators(K: Tensor, t: int, log_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(K·R, R)` by operators that torch differentiates and traces itself."""
    exponent = largest_exponent(K, 0)
    total, log2 = totals(K, exponent, t)
    weighted, majorant = _majorant(K, t, total, log_q)
    present = weighted > 0
    safe = torch.where(present, majorant, 1.0)
    R = torch.where(present, torch.exp2(-(safe.log2() + log2) * 2.0**-t), 0.0)
    factors = (R * torch.exp2(-exponent.reshape(-1, 1))).clamp(max=torch.finfo(K.dtype).max)

    # the power of two in two parts, one to K (exactly) and one to R: 2^-exponent alone may overflow
    half = (exponent / 2).floor()
    scale = R.reshape(_across(K)) * _factor(K) * torch.exp2(half - exponent)
    weight = (K * torch.exp2(-half).to(K)) * scale.to(K)
    return weight, factors.to(K.dtype)


def _majorant(K: Tensor, t: int, total: Tensor, log_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row sums `Σ_j T_ij q_j/q_i` as computed, and at least the exact ones, both (g, n)."""
    delta = rounding(K.shape[1], K.shape[2], count_taps(K), t)
    plain = weighted = total.sum(-1)
    if log_q is not None:
        log_q = log_q.to(total.device, total.dtype).clamp(-_LOG_Q, _LOG_Q)
        weighted = (total @ log_q.exp()[..., None])[..., 0] * (-log_q).exp()
    return weighted, weighted * (1 + delta) + delta * plain.detach().amax(-1, keepdim=True)


class _Rescaled(torch.autograd.Function):
    """`(K·R, R)` with a closed gradient.

    A gradient g for R is `−2^−t·g·R/D` for the majorant D, and its outer product with q for T. One function for all of it:
    kernels are small, and every operation that autograd records costs as much as the products.
    """

    @staticmethod
    def forward(ctx: Any, K: Tensor, log_q: Tensor | None, t: int) -> tuple[Tensor, Tensor]:
        """The weight and its factors.

        Args:
            ctx: autograd's context.
            K: kernels `(g, co, ci, *taps)`.
            log_q: logarithm of the weights q, or None.
            t: steps of spectral rescaling.
        """
        table = powers(K, t)
        weighted, majorant = _majorant(K, t, table.T, log_q)
        R = torch.exp2(-(majorant.log2() + table.log2) * 2.0**-t)
        if not (weighted > 0).all():
            R = torch.where(weighted > 0, R, 0.0)
        factor = (R * _factor(K)).to(K.dtype).reshape(_across(K))
        ctx.save_for_backward(K, log_q, R, majorant, weighted, factor)
        ctx.table = table
        ctx.t = t
        ctx.set_materialize_grads(False)
        return K * factor, R.to(K.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients for K and log q."""
        K, log_q, R, majorant, weighted, factor = ctx.saved_tensors
        g, g_R = gradients
        if torch.is_grad_enabled():  # for higher derivatives
            pairs = zip(_by_operators(K, ctx.t, log_q), gradients, strict=True)
            values, outer = zip(*[pair for pair in pairs if pair[1] is not None], strict=True)
            return *differentiated(values, outer, K, log_q), None

        own = None
        total = torch.zeros_like(R) if g_R is None else g_R.to(R)
        if g is not None:
            own = g * factor
            total = total + (g * K).sum([d for d in range(K.dim()) if d not in (0, 2)]) * _factor(K)
        c = torch.where(R > 0, total * R / majorant, 0.0) * -(2.0**-ctx.t)
        q = None
        inside = None
        if log_q is None:
            g_T = c[..., :, None].expand_as(ctx.table.T)
        else:
            wide = log_q.to(R)
            q = wide.clamp(-_LOG_Q, _LOG_Q).exp()
            inside = wide.abs() <= _LOG_Q
            g_T = (c / q)[..., :, None] * q[..., None, :]
        g_K = ctx.table.gradient(g_T).reshape(K.shape)
        g_K = g_K.to(K.dtype) if own is None else own.add_(g_K)
        if q is None or inside is None:
            return g_K, None, None
        along = (ctx.table.T.mT @ (c / q)[..., None])[..., 0] * q - c * weighted
        return g_K, (along * inside).to(log_q.dtype), None


def _across(K: Tensor) -> Shape:
    """The shape of R (g, n) beside kernels `(g, m, n, …)`."""
    return (K.shape[0], 1, -1, *[1] * (K.dim() - 3))


def normalised_pair(K: Tensor, bound: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """`(K/bound, 1/bound)` in the dtype of K, of norm at most 1; 0 where the bound is 0.

    Rounding changes each entry by at most u times itself, and `Σ_a ‖K_a‖_F ≤ √(taps·min(m, n))·sup‖E‖` (Parseval).

    Args:
        K: `(g, m, n, …)`.
        bound: `bound·(1 + delta)` is at least the norm of K; in float64.
        delta: relative error of the bound.
    """
    present = bound != 0  # the norm of a NaN weight is NaN, and stays so
    safe = torch.where(present, bound, 1.0) * (1 + delta)
    weight = torch.where(present, K.to(bound.dtype) / safe, 0.0)
    factor = torch.where(present, 1 / safe, 0.0).clamp(max=torch.finfo(K.dtype).max)
    return (weight * _shrunk(K)).to(K), factor.to(K)


def _factor(like: Tensor) -> float:
    """What R is multiplied by: its own rounding, and that of the product."""
    return _shrunk(like) - 2 * unit_roundoff(like.dtype)


def _shrunk(like: Tensor) -> float:
    """1 minus what rounding to the dtype adds to the norm."""
    taps = count_taps(like)
    u = unit_roundoff(like.dtype)
    return (
        1
        - 1.01 * u * sqrt(taps * min(like.shape[1], like.shape[2]))
        - 8 * unit_roundoff(torch.float64)
    )


def rounding(rows: int, columns: int, taps: int, t: int) -> float:
    """δ: a computed `(KᵀK)^(2^(t−1))` is off by an operator of norm at most δ times its own.

    A product of length ℓ of matrices with r columns is off by at most `γ_ℓ·‖A‖_F‖B‖_F ≤ γ_ℓ·r·‖A‖‖B‖`; a transform over B points
    by `γ_B·B·r`; powers of one matrix multiply their norms exactly, so relative errors add, and double with every squaring.

    Args:
        rows: of K.
        columns: of K.
        taps: number of taps of the kernel, 1 for a matrix.
        t: steps.
    """
    points = taps if taps == 1 else taps * 2 ** (t * 2)
    length = rows + columns + 2 * points + 16
    return 4.0 * 2.0**t * length * columns * points * unit_roundoff(torch.float64)


def _lattices(geometry: Geometry) -> list[Lattice]:
    """How the kernel acts on the phases of its input: `(g, co, ci, *k) ↔ (g, co, ci·phases, *lengths)`.

    With zero padding the norms agree for every input size. With circular padding they do only where the stride divides the
    size; there the kernel is left alone: its symbol at stride 1 bounds every size.
    """
    axes = [
        Axis(a.kernel, a.stride if geometry.padding == "zeros" else 1, a.dilation)
        for a in geometry.axes
    ]
    return [lattice for lattice in map(zero_lattice, axes) if lattice is not None]


class SN(Parametrization):
    """Spectral normalisation `W/σ` with σ ≥ ‖W‖ an upper bound by Gram iteration.

    Convolutions use the bound over all input sizes from `grid` frequencies per unit of (k − 1)/2 and axis: it exceeds the norm of
    3×3 kernels by 4 % at 16, by 1 % at 32, which costs four times as much. After `iterations` products a map whose n singular
    values are all equal is bounded with a factor n^(2^−(iterations + 1)), 1.008 for 64 and 8.

    Args:
        geometry: of the layer.
        iterations: of the bound.
        grid: frequencies per unit.
        device: of the buffers.
        dtype: of the buffers.

    >>> W = SN(Geometry((2, 2)))(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    >>> round(float(torch.linalg.matrix_norm(W, 2)), 5)
    1.0

    References: Miyato et al. 2018; Delattre et al. 2023.
    """

    def __init__(
        self, geometry: Geometry, iterations: int = 8, grid: int = 16, **factory: Any
    ) -> None:
        super().__init__(geometry, **factory)
        require_number(iterations, "iterations", least=1, most=30, whole=True)
        require_number(grid, "grid", least=4, whole=True)
        self.iterations = iterations
        self.grid = grid
        self.lattices = _lattices(geometry)

    def construct(self, raw: Tensor) -> Tensor:
        """`W/σ`."""
        return normalised_pair(self.geometry.grouped(raw), *self.bound(raw))[0].reshape(raw.shape)

    def bound(self, raw: Tensor) -> tuple[Tensor, float]:
        """`(σ, δ)` with `‖W‖ ≤ σ·(1 + δ)`: float64, differentiable."""
        geometry = self.geometry
        if prod(geometry.shape[2:]) > 1:
            return symbol_norm(
                polyphase(geometry.grouped(raw), self.lattices), self.iterations, self.grid
            )
        blocks = raw.double().reshape(geometry.groups, -1, geometry.shape[1])
        delta = rounding(geometry.shape[0], geometry.shape[1], 1, 1)
        return gram_norm(blocks, self.iterations).amax(), delta


class SR(Parametrization):
    """Spectral rescaling: one factor per input channel from the power `G_t = (WᵀW)^(2^(t−1))`, with learnable q > 0.

        W·R,   R_ii = (Σ_j |G_t|_ij q_j/q_i)^(−2^−t)

    `t = 1` with q = 1 is AOL, `t → ∞` is spectral normalisation. q = exp(log_q) starts at 1; every q keeps the guarantee.

    Args:
        geometry: of the layer.
        t: steps.
        learn_q: whether q is a parameter.
        side: what is rescaled, inputs (`W·R`) or outputs (`R·W` with the R of Wᵀ). "smaller" takes the side with fewer
            channels, inputs where they are as many; with a stride every phase of an input channel is one. The guarantee is
            the same, the sums are shorter.
        device: of the parameters.
        dtype: of the parameters.

    >>> sr = SR(Geometry((3, 3)), t=3)
    >>> bool(torch.linalg.matrix_norm(sr(torch.randn(3, 3)), 2) <= 1)
    True

    Reference: Delattre et al. 2024, corollary for t ≥ 1.
    """

    log_q: nn.Parameter | None

    def __init__(
        self,
        geometry: Geometry,
        t: int = 2,
        learn_q: bool = True,
        side: Side = "smaller",
        **factory: Any,
    ) -> None:
        super().__init__(geometry, **factory)
        check_steps(t)
        require_one_of(Side, side=side)
        self.t = t
        self.lattices = _lattices(geometry)
        ins = prod([geometry.shape[1], *(lattice.phases for lattice in self.lattices)])
        out = geometry.shape[0] // geometry.groups
        self.transposed = side == "output" or (side == "smaller" and out < ins)
        zeros = torch.zeros(geometry.groups, out if self.transposed else ins, **self.factory)
        self.register_parameter("log_q", nn.Parameter(zeros) if learn_q else None)

    def construct(self, raw: Tensor) -> Tensor:
        """`W·R`, or `R·W`."""
        S = polyphase(self.geometry.grouped(raw), self.lattices)
        S = S.transpose(1, 2) if self.transposed else S
        S = rescaling_pair(S, self.t, self.log_q)[0]
        S = S.transpose(1, 2) if self.transposed else S
        return rejoined(S, self.lattices).reshape(raw.shape)


class AOL(SR):
    """Almost-orthogonal layers: every input channel is divided by the root of its row sum of |WᵀW|.

        W·diag(Σ_j |WᵀW|_ij)^(−1/2)

    Args:
        geometry: of the layer.
        side: what is rescaled, see `SR`.

    >>> W = AOL(Geometry((2, 2)))(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    >>> float(torch.linalg.matrix_norm(W, 2)) <= 1
    True

    Reference: Prach & Lampert 2022, theorem 1.
    """

    def __init__(self, geometry: Geometry, side: Side = "smaller", **factory: Any) -> None:
        super().__init__(geometry, 1, False, side, **factory)


class SNLinear(Parametrized, nn.Linear):
    """`nn.Linear` over an upper bound of its norm, see `SN`."""

    parametrization = SN


class SNConv1d(Parametrized, nn.Conv1d):
    """`nn.Conv1d` over an upper bound of its norm, see `SN`."""

    parametrization = SN


class SNConv2d(Parametrized, nn.Conv2d):
    """`nn.Conv2d` over an upper bound of its norm, see `SN`."""

    parametrization = SN


class SNConv3d(Parametrized, nn.Conv3d):
    """`nn.Conv3d` over an upper bound of its norm, see `SN`."""

    parametrization = SN


class SNConvTranspose2d(Parametrized, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` over an upper bound of its norm, see `SN`."""

    parametrization = SN


class AOLLinear(Parametrized, nn.Linear):
    """Almost-orthogonal `nn.Linear`, see `AOL`."""

    parametrization = AOL


class AOLConv1d(Parametrized, nn.Conv1d):
    """Almost-orthogonal `nn.Conv1d`, see `AOL`."""

    parametrization = AOL


class AOLConv2d(Parametrized, nn.Conv2d):
    """Almost-orthogonal `nn.Conv2d`, see `AOL`."""

    parametrization = AOL


class AOLConv3d(Parametrized, nn.Conv3d):
    """Almost-orthogonal `nn.Conv3d`, see `AOL`."""

    parametrization = AOL


class AOLConvTranspose2d(Parametrized, nn.ConvTranspose2d):
    """Almost-orthogonal `nn.ConvTranspose2d`, see `AOL`."""

    parametrization = AOL


class SRLinear(Parametrized, nn.Linear):
    """`nn.Linear` by spectral rescaling, see `SR`."""

    parametrization = SR


class SRConv1d(Parametrized, nn.Conv1d):
    """`nn.Conv1d` by spectral rescaling, see `SR`."""

    parametrization = SR


class SRConv2d(Parametrized, nn.Conv2d):
    """`nn.Conv2d` by spectral rescaling, see `SR`."""

    parametrization = SR


class SRConv3d(Parametrized, nn.Conv3d):
    """`nn.Conv3d` by spectral rescaling, see `SR`."""

    parametrization = SR


class SRConvTranspose2d(Parametrized, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` by spectral rescaling, see `SR`."""

    parametrization = SR
