"""Fourier transforms and the operations on complex numbers between them, which count as pairs of real ones.

A transform of N points is √N times an isometry. Only the operations listed here take complex numbers: rules for real ones
read constants as real.
"""

from math import prod, sqrt
from typing import Any

from equipoise.core import inflate, root
from equipoise.lipschitz.rules import shapes
from equipoise.lipschitz.rules.affine import by_matrices
from equipoise.lipschitz.rules.registry import Call, Signal, Step, complex_rule, copies, largest


def _transform(call: Call, count: int, gain: float) -> Step:
    """`normalization`: 0 none, 1 divided by √N, 2 by N."""
    scale = (1.0, 1 / root(count) * (1 + 2.0**-50), 1 / count * (1 + 2.0**-50))
    return Step(
        ((call.x, inflate(gain * scale[int(call["normalization"])])),),
        "Fourier transform",
        offset=0.0,
    )


@complex_rule("aten._fft_r2c.default", "aten._fft_c2c.default")
def forward(call: Call) -> Step:
    """`√N` over N points; a constant real signal attains it in one half of its spectrum too."""
    count = prod(call.x.shape[d] for d in call["dim"])
    return _transform(call, count, root(count))


@complex_rule("aten._fft_c2r.default")
def backward(call: Call) -> Step:
    """`√(2N)`: one half of a spectrum stands for both, its ends apart."""
    last = int(call["last_dim_size"])
    count = prod(call.x.shape[d] for d in call["dim"][:-1]) * last
    return _transform(call, count, root(2 * count if last > 2 else count))


@complex_rule("aten.view_as_real.default", "aten.view_as_complex.default", "aten._conj.default", "aten.neg.default",
              "aten._neg_view.default", "aten._to_copy.default", "aten.to.dtype", "aten.resolve_conj.default",
              "aten.view_as_real_copy.default")  # fmt: skip
def isometry(call: Call) -> Step:
    """The same numbers, as pairs or as one, turned or reflected."""
    x, dtype = call.x, call.node.meta["val"].dtype
    if x.dtype.is_complex and not dtype.is_complex and prod(call.shape) == x.numel:
        call.refuse("a cast that drops imaginary parts", "take .real")
    # a complex number is as large as both of its parts together
    pairs = dtype.is_complex and not x.dtype.is_complex
    peak = inflate(sqrt(2) * x.peak) if pairs else x.peak
    return Step(((x, 1.0),), "complex numbers", offset=0.0, norm=x.norm, peak=peak)


@complex_rule("aten.abs.default")
def modulus(call: Call) -> Step:
    """`|z|`: 1."""
    return Step(((call.x, 1.0),), "modulus", offset=0.0, peak=call.x.peak, low=0.0)


# `low` of a complex signal is -inf, and so are bounds from below that these rules derive from it
complex_rule(*(f"aten.{name}" for name in shapes.VIEWS))(shapes.view)
complex_rule(*(f"aten.{name}" for name in shapes.COPIES))(shapes.identity)
complex_rule(*(f"aten.{name}" for name in shapes.SELECTIONS))(shapes.selection)
complex_rule("aten.slice_scatter.default", "aten.select_scatter.default")(shapes.overwrite_part)
complex_rule("aten.copy.default")(shapes.overwrite)
complex_rule("aten.constant_pad_nd.default")(shapes.pad)


@complex_rule("aten.mul.Tensor", "aten.mul.Scalar")
def scaling(call: Call) -> Step:
    """By a constant: max|c|."""
    x, constant = _factors(call)
    top = inflate(largest(constant))
    return Step(
        ((x, inflate(top * copies(x, call.shape))),),
        "scaling",
        offset=0.0,
        peak=inflate(top * x.peak),
    )


@complex_rule("aten.matmul.default", "aten.mm.default", "aten.bmm.default")
def matrices(call: Call) -> Step:
    """By constant matrices: the largest spectral norm."""
    return by_matrices(call, *_factors(call))


def _factors(call: Call) -> tuple[Signal, Any]:
    """The factor that depends on the input, and the constant one."""
    a, b = call.arguments.values()
    if isinstance(a, Signal) and isinstance(b, Signal):
        call.refuse(
            "a product of two spectra that depend on the input", "bound the parts separately"
        )
    return (a, b) if isinstance(a, Signal) else (b, a)
