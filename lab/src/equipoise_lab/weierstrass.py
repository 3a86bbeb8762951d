"""How smooth is a smoothed function? Bounds of the Weierstrass transform `F̃(x) = E F(x + δ)`, δ ~ N(0, σ²I).

All bounds are rounded up. `lipschitz` goes through `core.as_upper`: an estimate is refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri
from torch import Tensor

from equipoise.core import InputError, as_upper
from equipoise.smoothing.radii import positive
from equipoise.smoothing.ramp import ramp_quantile

_UP = 1 + 2.0**-48
_DOWN = 1 - 2.0**-49


def range_bound(sigma: float, *, mass: float = 1.0) -> float:
    """`Lip(F̃_k) ≤ r/(√(2π)·σ)` for a scalar function with values in [0, r]; attained by a half-space.

    >>> round(range_bound(0.5), 6)
    0.797885
    """
    positive(sigma, "sigma")
    positive(mass, "mass")
    return mass / (math.sqrt(2 * math.pi) * sigma) * _UP


def salman_bound(sigma: float) -> float:
    """`Lip(F̃) ≤ √(2/π)/σ` for |f| ≤ 1 (Salman et al. 2019, Lemma 1): the range bound of an interval of length 2.

    >>> salman_bound(0.5) == range_bound(0.5, mass=2.0)
    True
    """
    return range_bound(sigma, mass=2.0)


def component_bound(sigma: float, lipschitz: Any = np.inf, *, mass: float = 1.0) -> float:
    """`Lip(F̃_k) ≤ L·erf(r/(2√2·L·σ))`, rounded up, for an L-Lipschitz function with values in [0, r], smoothed.

    Attained by a clipped ramp; never above `min(L, r/(√(2π)σ))`, which it is for L = ∞. (The constant 2√2 is that of the
    thesis' text; its code has √2: errata 19.)

    Args:
        sigma: standard deviation of the noise.
        lipschitz: upper bound of L.
        mass: r.

    >>> round(component_bound(0.5, 1.0), 6), round(component_bound(0.5), 6)
    (0.682689, 0.797885)
    """
    return _erf_bound(sigma, lipschitz, mass, 2 * math.sqrt(2), math.sqrt(2 * math.pi))


def vector_bound(sigma: float, lipschitz: Any = np.inf, *, mass: float = 1.0) -> float:
    """`Lip(F̃) ≤ L·erf(r/(2·L·σ))`, rounded up, for an L-Lipschitz map into the simplex of mass r; at most `min(L, r/(√π·σ))`.

    Args:
        sigma: standard deviation of the noise.
        lipschitz: upper bound of L.
        mass: r.

    >>> round(vector_bound(0.5, 1.0), 6)
    0.842701
    """
    return _erf_bound(sigma, lipschitz, mass, 2.0, math.sqrt(math.pi))


def optimal_sigma(lipschitz: Any, *, mass: float = 1.0, vector: bool = False) -> float:
    """The σ where the two simple bounds L and r/(√(2π)σ) meet: `σ* = r/(√(2π)·L)`; vector map: `r/(√π·L)` (errata 11).

    Args:
        lipschitz: L.
        mass: r.
        vector: whether L is the constant of the vector map.

    >>> round(optimal_sigma(1.0), 6), round(optimal_sigma(1.0, vector=True), 6)
    (0.398942, 0.56419)
    """
    constant = as_upper(lipschitz)
    return (
        mass / (math.sqrt(math.pi if vector else 2 * math.pi) * constant)
        if constant > 0
        else math.inf
    )


def _erf_bound(
    sigma: float, lipschitz: Any, mass: float, factor: float, range_factor: float
) -> float:
    positive(sigma, "sigma")
    positive(mass, "mass")
    constant = as_upper(lipschitz)
    cap = mass / (range_factor * sigma) * _UP
    if constant == 0 or math.isinf(constant):
        return min(constant, cap)
    scale = factor * constant * sigma
    # the quotient would leave the normal floats; the two limits hold anyway
    if not 1e-250 < scale / mass < 1e250:
        return min(constant, cap)
    return min(constant * math.erf(mass / scale) * _UP, constant, cap)


def gap(sigma: float, lipschitz: Any, *, mass: float = 1.0) -> float:
    """`Δ(σ) = min(L, r/(√(2π)σ)) − L·erf(r/(2√2·L·σ))`: what the erf bound gains; largest at σ*.

    >>> round(gap(optimal_sigma(2.0), 2.0), 4)
    0.4202
    """
    return min(as_upper(lipschitz), range_bound(sigma, mass=mass)) - component_bound(
        sigma, lipschitz, mass=mass
    )


def radius_weak(
    p1: ArrayLike, p2: ArrayLike, sigma: float, lipschitz: Any = np.inf, *, mass: float = 1.0
) -> NDArray[np.float64]:
    """`R = margin/(2·Lip(F̃_k))` with the bound of `component_bound`: the weak law, coordinate by coordinate.

    Guarantee: as `radius_multi_lipschitz`, which is never smaller. Without a constant the bound is mass/(√(2π)σ).

    >>> round(float(radius_weak(0.9, 0.1, 0.5, 1.0)), 4)
    0.5859
    """
    return _over(p1, p2, 2 * component_bound(sigma, lipschitz, mass=mass))


def radius_weak_global(
    p1: ArrayLike, p2: ArrayLike, sigma: float, lipschitz: Any = np.inf, *, mass: float = 1.0
) -> NDArray[np.float64]:
    """`R = margin/(√2·Lip(F̃))` with the bound of `vector_bound` (lipschitz: of the vector map F).

    >>> round(float(radius_weak_global(0.9, 0.1, 0.5, 1.0)), 4)
    0.6713
    """
    return _over(p1, p2, float(np.sqrt(2.0)) * vector_bound(sigma, lipschitz, mass=mass))


def _over(p1: ArrayLike, p2: ArrayLike, slope: float) -> NDArray[np.float64]:
    """`(p1 − p2)/slope`, rounded down, 0 without a margin and infinite for a slope of 0."""
    margin = np.maximum((np.asarray(p1) - np.asarray(p2)) * _DOWN, 0.0)
    if slope == 0:
        return np.where(margin > 0, np.inf, 0.0)
    return np.asarray(margin / slope * _DOWN)


@dataclass(frozen=True)
class Probit:
    """`F(x) = Φ(λ(wᵀx + b))`, the scalar model whose smoothed version is known exactly.

    `F̃(x) = Φ(λ(wᵀx + b)/√(1 + λ²σ²‖w‖²))`; λ → ∞ is a half-space.

    >>> m = Probit(torch.tensor([3.0, 4.0]), 0.0, 2.0)
    >>> round(float(m.smoothed(torch.tensor([0.1, 0.1]), 0.5)), 6), round(m.lipschitz, 6)
    (0.608174, 3.989423)
    """

    weight: Tensor
    bias: float = 0.0
    slope: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """`F(x)`."""
        value: Tensor = torch.special.ndtr(self.slope * self._score(x))
        return value

    @property
    def lipschitz(self) -> float:
        """`Lip(F) = λ‖w‖/√(2π)`."""
        return self.slope * self._norm / math.sqrt(2 * math.pi)

    def smoothed(self, x: Tensor, sigma: float) -> Tensor:
        """`F̃(x)`, exact up to float64 rounding."""
        value: Tensor = torch.special.ndtr(self._scale(sigma) * self._score(x))
        return value

    def gradient(self, x: Tensor, sigma: float) -> Tensor:
        """`∇F̃(x)`."""
        t = self._scale(sigma) * self._score(x)
        return (self._scale(sigma) * torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)).unsqueeze(
            -1
        ) * self.weight.double()

    def radius(self, x: Tensor) -> Tensor:
        """Distance of x to the decision boundary F = ½, the same for F and F̃."""
        return self._score(x).abs() / self._norm

    @property
    def _norm(self) -> float:
        return float(self.weight.double().norm())

    def _score(self, x: Tensor) -> Tensor:
        return x.double() @ self.weight.double() + self.bias

    def _scale(self, sigma: float) -> float:
        return self.slope / math.sqrt(1 + (self.slope * sigma * self._norm) ** 2)


@dataclass(frozen=True)
class Estimate:
    """A Monte-Carlo mean with its interval: `P(lower ≤ truth ≤ upper) ≥ 1 − alpha`, per entry."""

    mean: Tensor
    lower: Tensor
    upper: Tensor
    draws: int
    alpha: float


def smooth_value(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    sigma: float,
    n: int,
    *,
    alpha: float = 1e-3,
    seed: int = 0,
) -> Estimate:
    """Monte-Carlo estimate of `F̃(x)` for F with values in [0, 1], with Hoeffding's two-sided interval per entry.

    Args:
        function: maps a batch (n, *x.shape) to (n,) or (n, c), values in [0, 1] (checked).
        x: one input.
        sigma: noise level.
        n: number of draws.
        alpha: risk of each entry's interval.
        seed: of the noise.
    """
    values = function(_noisy(x, sigma, n, seed)[0]).double()
    if bool(((values < 0) | (values > 1) | values.isnan()).any()):
        raise InputError("the function must take values in [0, 1] for the interval to hold")
    mean, half = values.mean(0), math.sqrt(math.log(2 / alpha) / (2 * n)) * _UP
    return Estimate(mean, (mean - half).clamp(min=0), (mean + half).clamp(max=1), n, alpha)


def smooth_gradient(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    sigma: float,
    n: int,
    *,
    alpha: float = 1e-3,
    seed: int = 0,
) -> Estimate:
    """Stein's lemma: `∇F̃(x) = E[δ·F(x + δ)]/σ²` for a scalar F with values in [0, 1], no derivative of F needed.

    Antithetic draws ±δ. Interval per entry: `δ_j(F(x+δ) − F(x−δ))/(2σ²)` is g/σ times a factor in [−½, ½] with g
    standard normal, hence sub-Gaussian around its mean with parameter at most 1/σ: half-width `√(2·ln(2/α)/n)/σ`.
    """
    noisy, noise = _noisy(x, sigma, n, seed)
    difference = (function(noisy) - function(x - noise)).double()
    if difference.ndim != 1 or bool((difference.abs() > 1).any()) or bool(difference.isnan().any()):
        raise InputError("Stein's estimate needs a scalar function with values in [0, 1]")
    mean = (noise.double() * difference.reshape(-1, *[1] * x.ndim)).mean(0) / (2 * sigma * sigma)
    half = math.sqrt(2 * math.log(2 / alpha) / n) / sigma * _UP
    return Estimate(mean, mean - half, mean + half, n, alpha)


def _noisy(x: Tensor, sigma: float, n: int, seed: int) -> tuple[Tensor, Tensor]:
    positive(sigma, "sigma")
    generator = torch.Generator(device=x.device).manual_seed(seed)
    noise = sigma * torch.randn((n, *x.shape), generator=generator, dtype=x.dtype, device=x.device)
    return x + noise, noise


def gaussian_bound(p: float, sigma: float) -> float:
    """`|∇F̃_k(x)| ≤ φ(Φ⁻¹(p))/σ` where `F̃_k(x) = p`: the local form of the range bound, exact for a half-space.

    >>> round(gaussian_bound(0.5, 1.0), 6)
    0.398942
    """
    positive(sigma, "sigma")
    return math.exp(-0.5 * float(ndtri(p)) ** 2) / math.sqrt(2 * math.pi) / sigma * (1 + 1e-12)


def lipschitz_local_bound(p: float, sigma: float, lipschitz: Any) -> float:
    """`|∇F̃_k(x)| ≤ L(Φ_σ(s₀ + 1/L) − Φ_σ(s₀))`, `s₀ = G⁻¹(p)`: the same when F_k is L-Lipschitz.

    >>> round(lipschitz_local_bound(0.5, 0.5, 1.0), 6) == round(component_bound(0.5, 1.0), 6)
    True
    """
    constant = as_upper(lipschitz)
    if math.isinf(constant):
        return gaussian_bound(p, sigma)
    a = 1 / (constant * sigma)
    low, up = (abs(float(v)) for v in ramp_quantile(p, a))
    t = min(low, up)  # the slope of H decreases away from the centre
    return min(constant * float(ndtr(a / 2 - t) - ndtr(-a / 2 - t)) * (1 + 1e-9), constant)
