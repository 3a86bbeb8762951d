"""Floating point, taken seriously: roundoff constants, outward rounding, and full-precision matrix products.

Model of arithmetic (Higham 2002, §2–3): every operation is correctly rounded with unit roundoff `u`, sums of
products may be taken in any order and with fused multiply-add. Then a computed inner product of length m differs
from the true one by at most `γ_m Σ|a_i||b_i|` with `γ_m = m·u/(1 − m·u)`, plus `m·η` for underflow, where η is the
smallest normal number (which also covers hardware that flushes subnormals to zero).
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.core.errors import InputError, Refused

FloatOrTensor = TypeVar("FloatOrTensor", float, Tensor)

#: factor that absorbs the rounding of a handful of float64 operations on non-negative numbers
_SLACK = 2.0**-49
#: a handful of steps between the numbers below the smallest normal one, where a factor is lost in rounding
_STEPS = 8 * 2.0**-1074


def unit_roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff `u = eps/2` of a real or complex floating dtype."""
    return torch.finfo(dtype).eps / 2


def gamma(m: int | float, dtype: torch.dtype) -> float:
    """`γ_m = m·u/(1 − m·u)`, rounded up; refused where `m·u ≥ 1/2`, since nothing can be guaranteed there.

    Args:
        m: number of roundings.
        dtype: the arithmetic.

    >>> gamma(1000, torch.float32) > 1000 * 2**-24
    True
    """
    mu = m * unit_roundoff(dtype)
    if mu >= 0.5:
        raise Refused(
            f"inner dimension {m:g} is too long for {dtype}: nothing can be guaranteed; compute in float64"
        )
    return inflate(mu / (1 - mu))


def float64(value: Any) -> Tensor:
    """A tensor or a Python number in float64; `torch.as_tensor(0.7).double()` would round the number to float32 first.

    >>> float(float64(0.7)) == 0.7, float(torch.as_tensor(0.7).double()) == 0.7
    (True, False)
    """
    if isinstance(value, Tensor):
        return value.detach().double()
    return torch.tensor(value, dtype=torch.float64)


def inflate(x: FloatOrTensor) -> FloatOrTensor:
    """Enlarge a non-negative float64 number or tensor so that it covers the rounding of a few operations.

    Numbers below the smallest normal one grow by a few steps; 0 stays 0.

    >>> inflate(5e-324) > 5e-324, inflate(0.0), bool(inflate(torch.tensor(5e-324, dtype=torch.float64)) > 5e-324)
    (True, 0.0, True)
    """
    if isinstance(x, Tensor):
        return torch.where(x == 0, x, x * (1 + _SLACK) + _STEPS)
    return x * (1 + _SLACK) + _STEPS if x else x


def deflate(x: FloatOrTensor) -> FloatOrTensor:
    """Shrink a non-negative float64 number or tensor so that it covers the rounding of a few operations."""
    return x * (1 - _SLACK)


def working_dtype(dtype: torch.dtype, wanted: torch.dtype | None = None) -> torch.dtype:
    """The dtype to compute in: the wanted one, never half precision, complex where the input is complex.

    Args:
        dtype: of the input.
        wanted: the precision that the caller chose, if any.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        raise InputError(
            f"expected floating-point weights, got {dtype}; convert them first, e.g. weight.double()"
        )
    # float8 and friends: every value is exact in float32
    base = torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)
    if wanted is None:
        return base
    if wanted not in (torch.float32, torch.float64):
        raise InputError(f"dtype must be torch.float32 or torch.float64, got {wanted}")
    return wanted.to_complex() if base.is_complex else wanted


def require_finite(x: Tensor, what: str = "weight") -> Tensor:
    """Return `x`, or refuse it if it is empty, or holds NaN or infinities (a bound of those is not a number).

    Args:
        x: the tensor.
        what: its name, for the message.
    """
    if x.numel() == 0:
        raise InputError(f"the {what} is empty (shape {tuple(x.shape)}): it has no norm")
    # one fast pass: a sum with NaN or an infinity in it is not finite
    if torch.isfinite(x.sum()):
        return x
    bad = ~torch.isfinite(x)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise InputError(
            f"the {what} has {int(bad.sum())} non-finite value(s), the first at index {where}"
        )
    return x


def root(n: int) -> float:
    """√n, rounded up; exact for squares.

    >>> root(4), root(9), root(2) ** 2 > 2
    (2.0, 3.0, True)
    """
    whole = math.isqrt(n)
    return float(whole) if whole * whole == n else inflate(math.sqrt(n))


def single_down(x: float) -> float:
    """The largest number of single precision up to x ≥ 0: a factor that means the same in float32 and in float64.

    >>> single_down(3.0), 0 < 0.1 - single_down(0.1) < 1e-8
    (3.0, True)
    """
    mantissa, exponent = math.frexp(x)
    return math.ldexp(math.trunc(mantissa * 2**24), exponent - 24)


def power_of_two_scale(largest: Tensor) -> Tensor:
    """For each `largest = max|a_ij| > 0` the exponent e with `2^-e·largest ∈ [1/2, 1)`; 0 where `largest` is 0.

    Multiplying by a power of two is exact, so iterates can be rescaled without an error term.
    """
    exponent = torch.frexp(largest.double())[1]
    return torch.where(largest == 0, 0, exponent)


def rescaled(x: Tensor) -> tuple[Tensor, int]:
    """`(2^-e·x, e)` with the largest entry near 1, exactly; in two steps, since 2^-e alone may overflow.

    Where it lies between 2^-10 and 2^10 already, x is returned as it is.
    """
    e = int(power_of_two_scale(x.abs().amax()))
    if abs(e) <= 10:
        return x, 0
    return x * 2.0 ** -(e // 2) * 2.0 ** -(e - e // 2), e


def ldexp_up(x: float, e: int) -> float:
    """`x·2^e` or a little more: exact but for numbers below all normal ones, infinite beyond the largest.

    Args:
        x: a number.
        e: the exponent.

    >>> ldexp_up(1.5, -1074), ldexp_up(3.0, 2000), ldexp_up(3.0, 2)
    (1e-323, inf, 12.0)
    """
    try:
        scaled = math.ldexp(x, e)
    except OverflowError:
        return math.inf
    return scaled if math.ldexp(scaled, -e) >= x else math.nextafter(scaled, math.inf)


def ldexp_down(x: float, e: int) -> float:
    """`x·2^e ≥ 0` or a little less: exact but for numbers below all normal ones, the largest float beyond it.

    Args:
        x: a number.
        e: the exponent.

    >>> ldexp_down(1.5, -1074), ldexp_down(3.0, 2000) < math.inf, ldexp_down(3.0, 2)
    (5e-324, True, 12.0)
    """
    try:
        scaled = math.ldexp(x, e)
    except OverflowError:
        return sys.float_info.max
    return scaled if math.ldexp(scaled, -e) <= x else math.nextafter(scaled, 0.0)


def frobenius(x: Tensor, dims: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Frobenius norm over `dims` as float64, rounded up (real or complex).

    The last of `dims` is summed in the arithmetic of x (fast), the others in float64; the error bound covers both.

    Args:
        x: the tensor.
        dims: dimensions over which squares are summed.
    """
    if x.is_complex():
        return inflate((frobenius(x.real, dims).square() + frobenius(x.imag, dims).square()).sqrt())
    count = math.prod(x.shape[d] for d in dims)
    dims = tuple(sorted(d % x.dim() for d in dims))
    rows = torch.linalg.vector_norm(x, dim=dims[-1]).double()
    norm = torch.linalg.vector_norm(rows, dim=dims[:-1]) if len(dims) > 1 else rows
    slack = (1 + gamma(x.shape[dims[-1]] + 8, x.dtype)) * (1 + gamma(count + 8, torch.float64))
    if x.dtype is torch.float32 and x.device.type == "cpu" and (norm < 1e-9).any():
        return frobenius(x.double(), dims)  # what underflow may lose would count
    lost = math.sqrt(count) * math.sqrt(torch.finfo(x.dtype).tiny)  # squares below this underflow
    result = inflate(norm * slack) + lost
    vanished = norm == 0
    if x.device.type != "cpu" or vanished.any():  # exactly zero, or squares that underflowed?
        result = torch.where(vanished & ~(x != 0).any(dims), 0.0, result)
    return result


def or_one(scale: Tensor) -> Tensor:
    """What to divide by: 1 where there is nothing to scale."""
    return torch.where(scale > 0, scale, 1.0)


def row_lengths(x: Tensor) -> Tensor:
    """`‖x_i‖₂` of every row of a float64 matrix, rounded up; each is divided by its largest entry first, so that no square
    vanishes or overflows.

    >>> row_lengths(torch.tensor([[3e-200, 4e-200], [0.0, 0.0]], dtype=torch.float64)).tolist()[1]
    0.0
    """
    largest = x.abs().amax(1)
    unit = x / or_one(largest)[:, None]
    return inflate(
        largest * torch.linalg.vector_norm(unit, dim=1) * (1 + gamma(x.shape[1] + 8, torch.float64))
    )


def safe_root(square: Tensor) -> Tensor:
    """`√s` for s ≥ 0, with the derivative 0 at 0, where that of the root is infinite."""
    return torch.where(square > 0, or_one(square).sqrt(), 0.0)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Inside, float32 matrix products really are float32: no TF32, no bfloat16 passes, no autocast, no flushing.

    The previous settings are restored on exit. Every function that returns a guarantee runs under it.
    """
    with contextlib.ExitStack() as stack:
        backends: Any = torch.backends
        for owner in (
            backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv,
        ):  # fmt: skip
            stack.callback(setattr, owner, "fp32_precision", owner.fp32_precision)
            owner.fp32_precision = "ieee"
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False, dtype=torch.bfloat16))
        if float64(2.0**-1060) * 1.0 == 0:  # subnormal numbers are flushed
            torch.set_flush_denormal(False)
            stack.callback(torch.set_flush_denormal, True)
        yield


@contextlib.contextmanager
def proving() -> Iterator[None]:
    """Full precision without gradients: what proofs run under."""
    with torch.no_grad(), full_precision():
        yield
