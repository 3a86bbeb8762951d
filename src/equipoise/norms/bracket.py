"""The proved bracket of any linear map, and a memory of those already proved."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equipoise.core.bounds import Bracket
from equipoise.core.precision import deflate, full_precision, inflate
from equipoise.maps.geometry import Axis, padding_norm
from equipoise.maps.linear import Adjoint, Convolution, Diagonal, Linear, Matrix, Padding
from equipoise.norms import coarse
from equipoise.norms.convolution import conv_bracket
from equipoise.norms.spectral import spectral_norm


@dataclass(frozen=True)
class Cache:
    """Brackets already computed, by the identity of the weights and the geometry: shared modules are bounded once.

    `scaled` holds brackets of convolutions times a scaling of their output channels, with the factors they are for.
    """

    rtol: float = 1e-3
    known: dict[object, tuple[Tensor, Bracket]] = field(default_factory=dict)
    scaled: dict[object, tuple[Tensor, Bracket]] = field(default_factory=dict)


def bracket(form: Linear, cache: Cache, factors: Tensor | None = None) -> Bracket:
    """Proved bracket of the operator norm, rounding of the composition included.

    `factors` (one per output channel of a convolution) announces that the convolution will be scaled by them later.

    >>> bracket(Diagonal(torch.tensor([3.0, -4.0]), 1), Cache()).upper
    4.0
    """
    if isinstance(form, Diagonal):
        top = float(form.factor.abs().max()) if form.factor.numel() else 0.0
        return Bracket(max(0.0, top - form.error), inflate(top + form.error) if form.error else top, method="exact")
    if isinstance(form, Adjoint):
        return bracket(form.conv, cache)
    if isinstance(form, Padding):
        axes = [Axis(1, left=a, right=b, size=n) for (a, b), n in zip(form.amount, form.size, strict=True)]
        top = math.prod(padding_norm(axis, form.padding) for axis in axes)
        return Bracket(deflate(top), top if top == 1 else inflate(top), method="exact")
    key = _key(form)
    if key not in cache.known:
        with torch.no_grad(), full_precision():
            found = _computed(form, cache, factors)
        weight = form.matrix if isinstance(form, Matrix) else form.weight
        cache.known[key] = (weight, found)  # keeping the weight keeps its address from being reused
    found = cache.known[key][1]
    if form.error == 0:
        return found
    lower, upper = float(found.lower), float(found.upper)
    return replace(found, lower=max(0.0, lower - form.error), upper=inflate(upper + form.error))


def _key(form: Matrix | Convolution) -> object:
    weight = form.matrix if isinstance(form, Matrix) else form.weight
    geometry = None if isinstance(form, Matrix) else form.geometry
    return (weight.data_ptr(), tuple(weight.shape), weight.dtype, tuple(weight.stride()), geometry)


def _computed(form: Matrix | Convolution, cache: Cache, factors: Tensor | None) -> Bracket:
    if isinstance(form, Matrix):
        return spectral_norm(form.matrix, rtol=cache.rtol)
    if form.origin is not None:
        first, factor = form.origin
        known = cache.scaled.get(_key(first))
        if known is not None and torch.equal(known[0], factor):
            return known[1]
    spec = coarse.spectrum(form, cache.rtol) if cache.rtol >= coarse.COARSE else None
    if spec is None:
        return conv_bracket(form, cache.rtol)
    alone, together = coarse.pair(spec, factors, cache.rtol)
    if factors is not None and together is not None:
        cache.scaled[_key(form)] = (factors, together)
    return alone
