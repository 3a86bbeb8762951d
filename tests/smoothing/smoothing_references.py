"""Slow, obviously right versions: 50-digit arithmetic and plain Python loops."""

import mpmath as mp

mp.mp.dps = 50


def ramp_mean(t: float, a: float) -> mp.mpf:
    """Gaussian mean of a ramp of width a, seen from t."""
    t, a = mp.mpf(t), mp.mpf(a)

    def antiderivative(x):
        return x * mp.ncdf(x) + mp.npdf(x)

    return (antiderivative(t + a / 2) - antiderivative(t - a / 2)) / a


def quantile(p: float) -> mp.mpf:
    return mp.sqrt(2) * mp.erfinv(2 * mp.mpf(p) - 1)


def spec_radius(p1: float, p2: float, sigma: float, lipschitz: float) -> mp.mpf:
    """½(ψ(p1) − ψ(p2)) straight from the definition of G, by bisection."""
    s, c = mp.mpf(sigma), mp.mpf(lipschitz)

    def integral(x):
        return x * mp.ncdf(x / s) + s * mp.npdf(x / s)

    def g(x):
        return 1 - c * (integral(x + 1 / c) - integral(x))

    def psi(p):
        low, high = -60 * s - 2 / c, 60 * s + 2 / c
        for _ in range(150):
            middle = (low + high) / 2
            low, high = (middle, high) if g(middle) > p else (low, middle)
        return -low

    return (psi(mp.mpf(p1)) - psi(mp.mpf(p2))) / 2


def binomial_tail(k: int, n: int, p: float) -> mp.mpf:
    """P(Bin(n, p) ≥ k), summed term by term until nothing is left."""
    p = mp.mpf(p)
    term = mp.exp(mp.loggamma(n + 1) - mp.loggamma(k + 1) - mp.loggamma(n - k + 1)) * p**k * (1 - p) ** (n - k)
    total = mp.mpf(0)
    for j in range(k, n + 1):
        total += term
        term *= mp.mpf(n - j) / (j + 1) * p / (1 - p)
        if j > n * p and term < total * mp.mpf(10) ** -40:
            break
    return total


def cpm_buckets(counts: list[int]) -> list[list[int]]:
    """The class partitioning method, word for word."""
    order = sorted(range(len(counts)), key=lambda k: (-counts[k], k))
    buckets, rest = [[order[0]], [order[1]]], order[2:]
    while rest and sum(counts[k] for k in rest) > counts[order[1]]:
        buckets.append([rest.pop(0)])
    return buckets + ([rest] if rest else [])
