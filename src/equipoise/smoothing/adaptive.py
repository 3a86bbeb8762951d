"""Anytime-valid tests: stop sampling as soon as the answer is known, keeping the risk α at any stopping time.

An e-process is a non-negative process whose mean is at most 1 under the hypothesis at every stopping time; by Ville's
inequality it ever reaches 1/α with probability at most α. The one here bets with a mixture of Bernoulli alternatives.
It
is valid for hard votes and for soft scores in [0, 1] alike: `x → q^x(1−q)^{1−x}/(p^x(1−p)^{1−x})` is convex, so a
score is
never worth more than the coin with the same mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincinv, betaln, ndtr, ndtri

from equipoise.core import InputError, as_upper
from equipoise.smoothing.bounds import Gaussian
from equipoise.smoothing.intervals import complement
from equipoise.smoothing.moments import one_against_rest
from equipoise.smoothing.procedures import Procedure
from equipoise.smoothing.radii import radius_mono, radius_mono_lipschitz
from equipoise.smoothing.ramp import Floats, ramp_mean

_LN_HALF_HALF = float(betaln(0.5, 0.5))


def log_e_value(hits: ArrayLike, draws: ArrayLike, p0: ArrayLike) -> Floats:
    """`ln e` of the truncated-mixture e-process for H0: p ≤ p0 after t draws with A hits, rounded down.

    `ln e = lnB(A+½, t−A+½) − lnB(½,½) + ln I_{1−p0}(t−A+½, A+½) − ln I_{1−p0}(½,½) − A·ln p0 − (t−A)·ln(1−p0)`: the
    likelihood ratio against p0 averaged over the arcsine law restricted to (p0, 1). A may be a sum of scores in [0, 1].

    Guarantee: under H0, `P(∃t: e_t ≥ 1/α) ≤ α`. Reference: Ville (1939); Robbins (1970); Howard et al. (2021).

    >>> bool(log_e_value(990, 1000, 0.9) > np.log(1000)), bool(log_e_value(900, 1000, 0.9) < 0)
    (True, True)
    """
    a, t, p = (np.asarray(v, dtype=np.float64) for v in (hits, draws, p0))
    if not bool(np.all((a >= 0) & (a <= t * (1 + 1e-12)))):
        raise InputError("hits must lie between 0 and the number of draws")
    if not bool(np.all((p > 0) & (p < 1))):
        raise InputError("p0 must lie strictly between 0 and 1")
    miss = np.maximum(t - a, 0.0)
    with np.errstate(divide="ignore"):
        terms = (
            betaln(a + 0.5, miss + 0.5),
            -_LN_HALF_HALF,
            np.log(betainc(miss + 0.5, a + 0.5, 1 - p)),
            -np.log(betainc(0.5, 0.5, 1 - p)),
            -a * np.log(p),
            -miss * np.log1p(-p),
        )
    total = np.zeros(np.broadcast(a, t, p).shape)
    size = np.zeros_like(total)
    for term in terms:
        total = total + term
        size = size + np.where(np.isfinite(term), np.abs(term), 0.0)
    return np.asarray(total - 1e-11 - 4e-14 * size)


def lower_sequence(hits: ArrayLike, draws: ArrayLike, alpha: ArrayLike) -> Floats:
    """A lower confidence *sequence* of p: with probability ≥ 1 − α it is below p at all times t at once.

    The smallest p that the mixture over the whole arcsine law does not refute,
    `B(A+½, t−A+½)/B(½,½) < p^A(1−p)^{t−A}/α`; left of A/t the right-hand side grows with p, so bisection finds it.

    >>> low = lower_sequence(950, 1000, 0.001)
    >>> bool(0.9 < low < 0.95)
    True
    """
    a, t, risk = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (hits, draws, alpha)))
    if not bool(np.all((risk > 0) & (risk < 1))):
        raise InputError(f"the risk alpha must lie strictly between 0 and 1, got {alpha!r}")
    miss = np.maximum(t - a, 0.0)
    goal = betaln(a + 0.5, miss + 0.5) - _LN_HALF_HALF + np.log(risk)
    goal = goal - 1e-11 - 4e-14 * np.abs(goal)
    low, high = np.zeros(a.shape), a / np.maximum(t, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(60):
            p = (low + high) / 2
            likelihood = np.where(a > 0, a * np.log(p), 0.0) + np.where(miss > 0, miss * np.log1p(-p), 0.0)
            refuted = likelihood + 4e-14 * np.abs(likelihood) <= goal
            low, high = np.where(refuted, p, low), np.where(refuted, high, p)
    return low


def upper_sequence(hits: ArrayLike, draws: ArrayLike, alpha: ArrayLike) -> Floats:
    """The mirror image of `lower_sequence`: above p at all times with probability ≥ 1 − α."""
    return complement(lower_sequence(np.asarray(draws) - np.asarray(hits), draws, alpha))


def target_probability(epsilon: float, sigma: float, lipschitz: Any = np.inf) -> float:
    """The p0 with `R(p0) ≥ ε`: Φ(ε/σ), or `G(G⁻¹(½) − ε)` for L-Lipschitz scores; rounded up.

    >>> round(target_probability(0.25, 0.25), 6)
    0.841345
    """
    if not (np.isfinite(epsilon) and epsilon >= 0):
        raise InputError(f"the target radius must be a non-negative number, got {epsilon}")
    constant = as_upper(lipschitz)
    width = 0.0 if np.isinf(constant) else 1 / (max(constant, 1e-300) * sigma)
    p0 = float(ramp_mean(epsilon / sigma, max(width, 1e-9))[1])
    for k in range(50):
        if p0 >= 1:
            break
        reached = radius_mono(p0, sigma) if np.isinf(constant) else radius_mono_lipschitz(p0, sigma, constant)
        if float(reached) >= epsilon:
            return max(p0, 0.5)
        p0 = min(p0 + 2.0 ** (k - 50) * (1 - p0), 1.0)
    raise InputError(f"the target radius {epsilon} cannot be certified at noise level {sigma}: it would need p = 1")


class ScoreTest:
    """The e-process of H0: mean ≤ p0 for scores in [0, 1], fed chunk by chunk; columns are tested side by side.

    Half the stake on the Bernoulli mixture, half on a gambler whose bet for a chunk is the (approximate) Kelly fraction
    `(μ̂ − p0)/(v̂ + (μ̂ − p0)²)`, capped at 0.75/p0, with mean and variance of the *previous* chunks: the second wins when
    the scores vary less than coins. The average of two e-processes is one.

    >>> test = ScoreTest(0.6)
    >>> for _ in range(10):
    ...     e = test.update(np.full(100, 0.7))
    >>> bool(e > np.log(1e3))
    True
    """

    def __init__(self, p0: float) -> None:
        if not 0 < p0 < 1:
            raise InputError(f"p0 must lie strictly between 0 and 1, got {p0}")
        self.p0, self.draws = p0, 0
        self.total = self.squares = self.wealth = np.zeros(())

    def update(self, scores: Floats) -> Floats:
        """Feed a chunk (n,) or (n, columns); returns ln e after it, rounded down."""
        x = np.asarray(scores, dtype=np.float64)
        if not bool(np.all((x >= 0) & (x <= 1))):
            raise InputError("scores must lie in [0, 1]")
        mean = (0.5 + self.total) / (self.draws + 1)
        var = (0.25 + np.maximum(self.squares - self.total * self.total / max(self.draws, 1), 0.0)) / (self.draws + 1)
        edge = mean - self.p0
        bet = np.clip(edge / (var + edge * edge), 0.0, 0.75 / self.p0) if self.draws else np.zeros(())
        self.wealth = self.wealth + np.log1p(bet * (x - self.p0)).sum(axis=0)
        self.draws += len(x)
        self.total = self.total + x.sum(axis=0)
        self.squares = self.squares + (x * x).sum(axis=0)
        mixture = log_e_value(np.minimum(self.total, self.draws), self.draws, self.p0)
        return np.asarray(np.logaddexp(mixture, self.wealth - 1e-12 - 8e-15 * self.draws) - np.log(2.0) - 1e-12)


@dataclass(frozen=True)
class TargetTest:
    """The e-process of "the certified radius is at most ε" for votes: Cohen's test, and tests of class and rivals together.

    The claim is false iff some rival k has `Φ⁻¹(p_A) − Φ⁻¹(p_k) < 2ε/σ`. For a level t fixed beforehand that means
    `p_A ≤ Φ(t)` or `p_k ≥ Φ(t − 2ε/σ)`, so the smaller of the two e-values is an e-value against it; so is any average
    over levels. Each rival is tested at the full α and the smallest counts, which is that of the rival with most votes.
    Cohen's level is `t = ε/σ`, where the second half follows from the first.

    Args:
        levels: pairs (p_A must exceed, p_k must stay below); the second is 1 for Cohen's.
        weights: of the average.
        claimed: lower bound of p_A that certification implies (0 if it implies none).
    """

    levels: tuple[tuple[float, float], ...]
    weights: tuple[float, ...]
    claimed: float

    @classmethod
    def of(cls, row: Procedure, ranked: Floats, epsilon: float, noise: Gaussian, alpha: float) -> TargetTest:
        """Choose the levels on the selection votes, ranked: Cohen's alone where that decides soonest."""
        sigma, spread = float(noise.sigma), float(noise.variation)
        needed = target_probability(epsilon, sigma)
        cohen = min(needed + spread * (1 + 2.0**-50) + 2.0**-52 * (spread > 0), 1 - 2.0**-53)
        alone = cls(((cohen, 1.0),), (1.0,), needed)
        if len(ranked) < 3 or all(o.partition is one_against_rest for o in row.options):
            return alone
        levels, rates, own = [], [], []
        for q, s in ((0.5, 0.5), (0.25, 0.75), (0.75, 0.25)):
            p1, p2 = pictured(ranked[0], ranked[1], ranked.sum(), q, s, len(ranked))
            pair, rate = _best_level(float(p1), float(p2), 2 * epsilon / sigma, spread)
            levels.append(pair)
            rates.append(rate)
            own.append(_information(float(p1), cohen))
        if np.mean(rates) <= 1.1 * np.mean(own):
            return alone
        return cls(((cohen, 1.0), *levels), (0.25, 0.25, 0.25, 0.25), 0.0)

    def log_e(self, hits: float, rival: float, draws: float) -> float:
        """ln e after these votes, rounded down."""
        terms = []
        for (p1, p2), weight in zip(self.levels, self.weights, strict=True):
            e = float(log_e_value(hits, draws, p1))
            if p2 < 1:
                e = min(e, float(log_e_value(draws - rival, draws, 1 - p2)))
            terms.append(e + np.log(weight))
        return float(np.logaddexp.reduce(terms)) - 1e-12


def pictured(most: Any, second: Any, total: Any, q: float, s: float, classes: int) -> tuple[Floats, Floats]:
    """A picture of (p₁, p₂) that fits selection votes: quantile q of the share against the class, s of the runner-up's part."""
    against = np.maximum(total - most, 0.0)
    rest = betaincinv(against + 0.5, most + 0.5, q)
    share = betaincinv(second + 0.5, against - second + 0.35, s) if classes > 2 else 1.0
    return 1 - rest, np.maximum(rest * share, rest / max(classes - 1, 1))


def _best_level(p1: float, p2: float, gap: float, spread: float) -> tuple[tuple[float, float], float]:
    """The level at which class and rival are told apart at the same speed, and that speed."""
    t = np.linspace(ndtri(p2) + gap, ndtri(p1), 33)[1:-1] if 0 < p2 < p1 < 1 else np.array([])
    t = t[ndtri(p1) - t > 0] if len(t) and ndtri(p2) + gap < ndtri(p1) else np.array([gap / 2])
    up, down = (
        np.minimum(ndtr(t) + 2.0**-45 + spread, 1 - 2.0**-50),
        np.maximum(ndtr(t - gap) - 2.0**-45 - spread, 1e-12),
    )
    rate = np.minimum(_information(p1, up), _information(1 - p2, 1 - down))
    best = int(rate.argmax())
    return (float(up[best]), float(down[best])), float(rate[best])


def _information(p: float, against: Any) -> Floats:
    """Kullback–Leibler divergence of coins, 0 where p is on the wrong side: nats gained per draw."""
    p = min(max(p, 1e-12), 1 - 1e-12)
    found = p * np.log(p / against) + (1 - p) * np.log((1 - p) / (1 - np.asarray(against)))
    return np.where(p > against, found, 0.0)
