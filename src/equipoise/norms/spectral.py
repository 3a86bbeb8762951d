"""`spectral_norm`: one function for matrices and layers, one contract: a proved bracket; `bracket` does it for linear maps."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from equipoise.core import Bracket, InputError
from equipoise.core.precision import (
    deflate,
    frobenius,
    full_precision,
    inflate,
    require_finite,
    unit_roundoff,
    working_dtype,
)
from equipoise.maps.geometry import Axis, padding_norm
from equipoise.maps.linear import Adjoint, Convolution, Diagonal, Linear, Matrix, Padding
from equipoise.maps.reading import read
from equipoise.norms.cholesky import LARGE, cholesky_bracket, dense_bracket, single_thread
from equipoise.norms.convolution import conv_bracket
from equipoise.norms.gram import complete_pair, gram_bracket, scaled, wide
from equipoise.norms.sharded import is_sharded, sharded_norm

Method = Literal["auto", "gram", "cholesky"]


def spectral_norm(
    operator: Tensor | nn.Module,
    *,
    rtol: float = 1e-3,
    input_size: int | tuple[int, ...] | None = None,
    method: Method = "auto",
    dtype: torch.dtype | None = None,
    vectors: bool = False,
) -> Bracket:
    """How much can this linear map amplify a vector in ℓ2? A bracket `lower ≤ σ₁ ≤ upper`, proved in floating point.

    Guarantee: both ends hold for the exact real numbers stored in the weights (half-precision weights are read as the
    numbers they are). The upper end is an a-priori rounding analysis of Gram iteration or a verified Cholesky
    factorisation, never a power iteration; `upper ≤ (1 + rtol)·lower` where the precision allows, else `note` says why not.

    Args:
        operator: matrices `(..., m, n)`, real or complex, batched; or an `nn.Linear`, `nn.Conv1d/2d/3d`,
            `nn.ConvTranspose1d/2d/3d` whose padding mode, stride, groups, dilation and effective weight are read off
            the module. Anything else, and modules with hooks or an own forward, are refused. A sharded matrix (`DTensor`) is
            bounded on its shards; all its processes have to call.
        rtol: relative gap to reach.
        input_size: spatial size of the layer's input. Unknown: the bracket is that of the supremum over all sizes.
        method: for matrices `gram` (Gram iteration), `cholesky` (Lanczos and a verified factorisation) or `auto`.
        dtype: arithmetic for `gram`; by default float64, in which the rounding costs nothing. float32 is faster on
            hardware that is slow in float64; its bracket is wider by about `m·2^-24·‖W‖_F²/σ₁²`.
        vectors: also return the dominant pair `(u, v)` for matrices.

    >>> eye = torch.eye(3)
    >>> spectral_norm(2 * eye).upper <= 2.002
    True
    >>> conv = nn.Conv2d(8, 8, 3, padding=1)
    >>> b = spectral_norm(conv, input_size=(16, 16), rtol=1e-2)
    >>> b.lower <= b.upper
    True

    References: Delattre et al. 2023 (Gram iteration); Rump 2006 (verified positive definiteness); Sedghi et al. 2019
    and Senderovich et al. 2022 (symbol and strides).
    """
    if not rtol > 0:
        raise InputError(f"rtol must be positive, got {rtol}")
    if method not in get_args(Method):
        raise InputError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    with torch.no_grad(), full_precision():
        if isinstance(operator, nn.Module):
            form = read(operator, input_size)
            if not isinstance(form, Matrix):
                conv = form.conv if isinstance(form, Adjoint) else form
                assert isinstance(conv, Convolution)
                return _noted(conv_bracket(conv.with_weight(_computable(conv.weight)), rtol))
            operator = form.matrix
        if not isinstance(operator, Tensor):
            raise InputError(f"expected a tensor or a layer, got {type(operator).__name__}")
        if is_sharded(operator):
            return _noted(sharded_norm(operator, rtol))
        W = _computable(operator.detach())
        with single_thread(W.numel() * min(W.shape[-2:], default=1)):
            return _noted(_matrix_bracket(W, rtol, method, dtype, vectors))


def _computable(weight: Tensor) -> Tensor:
    """Weights that can be computed with: floating point, at least float32, finite, on the CPU, where proofs run."""
    if weight.layout is not torch.strided:
        raise InputError(
            f"expected a dense tensor, got the layout {weight.layout}; call .to_dense() first"
        )
    if weight.is_nested:
        raise InputError("expected one tensor, got a nested one; bound its parts")
    if weight.is_meta:
        raise InputError("the weight is on the meta device: it has no values")
    return require_finite(weight.to("cpu", working_dtype(weight.dtype)))


def _matrix_bracket(
    W: Tensor, rtol: float, method: Method, dtype: torch.dtype | None, vectors: bool
) -> Bracket:
    if W.dim() < 2:
        raise InputError(f"expected matrices of shape (..., m, n), got shape {tuple(W.shape)}")
    if method == "cholesky" and W.dim() > 2:
        raise InputError("method='cholesky' takes one matrix; use 'auto' or 'gram' for a batch")
    narrow = working_dtype(W.dtype, dtype or torch.float64)
    used: str = method
    if method == "cholesky":
        lower, upper, v = cholesky_bracket(W, rtol)
        low, high = torch.tensor([lower, upper], dtype=torch.float64)
    elif dtype is torch.float32 and W.dtype is not narrow:
        normal, e = scaled(W)
        low, high, v = gram_bracket(normal.to(narrow), rtol)
        tiny = W.shape[-1] * W.shape[-2] * torch.finfo(narrow).tiny
        lost = inflate(2 * unit_roundoff(narrow) * frobenius(normal)) + 2 * tiny  # by the cast
        low, high = torch.ldexp((low - lost).clamp_min(0), e), torch.ldexp(inflate(high + lost), e)
        used = "gram, float32"
    elif method == "gram" or dtype is torch.float32:
        low, high, v = gram_bracket(W.to(narrow), rtol)
    else:
        low, high, v = dense_bracket(wide(W) if min(W.shape[-2:]) < LARGE else W, rtol)
    # a norm beyond all floats is still a number
    low = low.clamp_max(torch.finfo(torch.float64).max)
    # rounded among the smallest
    low = torch.where(low < 2.0**-1000, torch.nextafter(low, torch.zeros_like(low)), low)
    pair = complete_pair(W, v)[1:] if vectors else None
    if W.dim() == 2:
        return Bracket(float(low), float(high), rtol, used, "", pair)
    return Bracket(low, high, rtol, used, "", pair)


def _noted(bracket: Bracket) -> Bracket:
    """The bracket, with a note where it is wider than asked for."""
    if bracket.reached or bracket.note or math.isnan(bracket.rtol):
        return bracket
    gap = float(torch.as_tensor(bracket.gap).max())
    note = f"gap {gap:.2g}: the precision does not allow less; compute in float64 or ask for a larger rtol"
    return replace(bracket, note=note)


@dataclass(frozen=True)
class Cache:
    """Brackets already computed, by the identity of the weights and the geometry: shared modules are bounded once."""

    rtol: float = 1e-3
    brackets: dict[object, tuple[Tensor, Bracket]] = field(default_factory=dict)


def bracket(form: Linear, cache: Cache) -> Bracket:
    """Proved bracket of the norm of a linear map, rounding of its composition included.

    Args:
        form: the linear map.
        cache: the tolerance, and brackets of weights seen before.

    >>> bracket(Diagonal(torch.tensor([3.0, -4.0]), 1), Cache()).upper
    4.0
    """
    if isinstance(form, Diagonal):
        top = float(form.factor.abs().max()) if form.factor.numel() else 0.0
        return Bracket(
            max(0.0, top - form.error),
            inflate(top + form.error) if form.error else top,
            method="exact",
        )
    if isinstance(form, Adjoint):
        return bracket(form.conv, cache)
    if isinstance(form, Padding):
        axes = [
            Axis(1, left=a, right=b, size=n)
            for (a, b), n in zip(form.amount, form.size, strict=True)
        ]
        top = math.prod(padding_norm(axis, form.padding) for axis in axes)
        return Bracket(deflate(top), top if top == 1 else inflate(top), method="exact")

    weight = form.matrix if isinstance(form, Matrix) else form.weight
    geometry = None if isinstance(form, Matrix) else form.geometry
    key = (weight.data_ptr(), tuple(weight.shape), weight.dtype, tuple(weight.stride()), geometry)
    if key not in cache.brackets:
        with torch.no_grad(), full_precision():
            result = (
                spectral_norm(weight, rtol=cache.rtol)
                if isinstance(form, Matrix)
                else conv_bracket(form, cache.rtol)
            )
        # keeping the weight keeps its address from being reused
        cache.brackets[key] = (
            weight,
            result,
        )
    result = cache.brackets[key][1]
    if form.error:
        lower, upper = float(result.lower), float(result.upper)
        result = replace(
            result, lower=max(0.0, lower - form.error), upper=inflate(upper + form.error)
        )
    return _noted(result)
