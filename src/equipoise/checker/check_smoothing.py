"""Certificates of randomized smoothing for `check.py`: radii follow from the counts of votes.

This file belongs beside `check.py`; `python check.py DIR` finds it there. A row has the counts of an input: the votes k of its
class, those of its strongest rival, and a procedure that spends the risk α. The radius r is proved if `2r/σ ≤ Φ⁻¹(p) − Φ⁻¹(q)`,
p a lower confidence bound of the class's probability, q an upper one of any rival's.

    bounds  p at level `share·α`, q at `(1 − share)·α`: only the class and its true runner-up matter; or q = 1 − p
    joint   one test of class and rival at level α, see `check_joint`

Binomial tails and Φ are computed with sixty digits and rounded toward rejection. That the votes were really drawn, after
procedure, share, weight and zone were fixed, is evidence, not proof: `equipoise certify --replay` draws them again.
"""

import itertools
from decimal import MIN_EMIN, Decimal, localcontext
from functools import lru_cache
from statistics import NormalDist

if __package__:
    from equipoise.checker.check import *
else:
    from check import *

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")

#: covers the rounding of a few million operations with sixty digits; written out, since sums are rounded to fewer digits here
ROUND_UP = Decimal("1.000000000000000000000000000001")

#: a share of the risk that is spent on events this unlikely
SPARE = Decimal("1e-20")
IMPOSSIBLE = Decimal("1e-40")

#: smallest probability whose quantile is computed
LEAST = Decimal("1e-5000")


@lru_cache(maxsize=8)
def choose(n, k):
    """The binomial coefficient."""
    value = Decimal(1)
    for i in range(min(k, n - k)):
        value = value * (n - i) / (i + 1)
    return value


@lru_cache(maxsize=8)
def binomial_tail(n, k, p, rest):
    """`P(Bin(n, p) ≥ k)` from below and above, with `rest = 1 − p` to its last digits.

    Above the mean, terms are added until what follows is a small geometric series; below it, those of the other tail.
    """
    if k <= 0 or rest <= 0:
        return Decimal(1), Decimal(1)
    if k > n or p <= 0:
        return Decimal(0), Decimal(0)
    if k < n * p:
        low, high = binomial_tail(n, n - k + 1, rest, p)
        return (1 - high) / ROUND_UP, (1 - low) * ROUND_UP
    term = choose(n, k) * p**k * rest ** (n - k)
    total = term
    for i in range(k, n):
        ratio = p * (n - i) / (rest * (i + 1))
        term *= ratio
        total += term
        left = term / (1 - ratio)
        if left < total * Decimal("1e-30"):
            break
    else:
        left = 0
    return total / ROUND_UP, (total + left) * ROUND_UP


def normal_tail(x):
    """`Φ(−x)` from below and above, for x ≥ 0: a series, or Mills' ratio between `x/(1 + x²)` and `1/x`."""
    density = (-x * x / 2).exp() / (2 * PI).sqrt()
    if x > 10:
        return density * x / (1 + x * x) / ROUND_UP, density / x * ROUND_UP
    term = total = x
    odd = 1
    while term > Decimal("1e-60"):
        odd += 2
        term *= x * x / odd
        total += term
    value = Decimal("0.5") - density * total
    return value / ROUND_UP, value * ROUND_UP


def normal_cdf(x):
    """`Φ(x)` from below and above."""
    low, high = normal_tail(abs(x))
    return (low, high) if x <= 0 else (1 - high, 1 - low)


def quantile(low, high):
    """A lower bound of `Φ⁻¹(p)`; p is given by lower bounds `low ≤ p` and `1 − high ≤ p`, of which the sharper is used."""
    small = min(low, high)
    if small < LEAST and small == low:
        return Decimal(-1000)
    small = max(small, LEAST)
    if small > 1e-290:
        guess = Decimal(-NormalDist().inv_cdf(float(small)))
    else:
        square = -2 * small.ln()
        guess = (square - square.ln() - (2 * PI).ln()).sqrt()
    apart = Decimal("1e-9") if guess < 10 else 1 / guess**2
    if small == low:
        x = max(guess + apart, Decimal(0))
        require(normal_tail(x)[1] <= low, "a quantile was computed badly")
        return -x
    x = max(guess - apart, Decimal(0))
    require(normal_tail(x)[0] >= high or (x == 0 and high <= 0.5), "a quantile was computed badly")
    return x


def score(n, k, p, rest):
    """A lower bound of `Φ⁻¹(1 − P(Bin(n, p) ≥ k))`."""
    return quantile(binomial_tail(n, n - k + 1, rest, p)[0], binomial_tail(n, k, p, rest)[1])


def check_bounds(claim, row):
    """Two confidence bounds: p of the class and q of its strongest rival."""
    n = claim["n"]
    alpha = Decimal(claim["alpha"])
    share = Decimal(number(row["share"], 0, 1))
    p = Decimal(number(row["p"], 0, 1))
    require(binomial_tail(n, row["k"], p, 1 - p)[1] <= share * alpha, "p is not a confidence bound")
    q = Decimal(number(row["q"], 0, 1))
    # no rival is more probable than all together
    if q < 1 - p:
        require(
            binomial_tail(n, n - row["rival"], 1 - q, q)[1] <= (1 - share) * alpha,
            "q is not a confidence bound",
        )
    return quantile(p, 1 - p) + quantile(1 - q, q)


def check_joint(claim, row):
    """One test of class and rival together: `Φ⁻¹(p) − Φ⁻¹(q) ≥ gap` is shown if every `t = Φ⁻¹(p)` with less is rejected.

    With `q ≥ Φ(t − gap)`, the votes of the class have the p-value `U₁ = P(Bin(n, Φ(t)) ≥ k)`. Given them, those of the rival
    are binomial among the rest, with probability at least `θ = Φ(t − gap)/(1 − Φ(t))`, and have the p-value
    `U₂ = P(Bin(n − k, θ) ≤ rival)`. For a weight w fixed before the draws, `w·Φ⁻¹(1 − U₁) + √(1 − w²)·Φ⁻¹(1 − U₂) ≥ Φ⁻¹(1 − α)`
    has probability at most α (Stouffer 1949). Below the zone of t the class alone decides, above it the rival alone. On a
    cell [a, b] of the zone, U₁ is largest at b and θ smallest at a. A t at which as few or as many votes as k are next to
    impossible is rejected too.
    """
    n, k, gap = claim["n"], row["k"], Decimal(number(row["gap"]))
    weight = Decimal(number(row["weight"], 0, 1))
    cells = [Decimal(number(t, -8, 8)) for t in row["cells"]]
    require(cells == sorted(cells) and len(cells) <= 200, "expected cells in order")
    alpha = Decimal(claim["alpha"]) * (1 - SPARE)
    needed = -quantile(alpha, 1 - alpha)

    def own(t):
        p = normal_cdf(t)[1]
        return score(n, k, p, 1 - p)

    def rival(t):
        theta = normal_cdf(t - gap)[0] / normal_cdf(-t)[1] / ROUND_UP
        return score(n - k, n - k - row["rival"], 1 - theta, theta)

    require(own(cells[0]) >= needed, "the class alone does not decide below the zone")
    require(rival(cells[-1]) >= needed, "the rival alone does not decide above the zone")
    other = (1 - weight * weight).sqrt()
    for a, b in itertools.pairwise(cells):
        # so few or so many votes at such a t: events on which α·SPARE is spent
        above, below = normal_cdf(-a)[1], normal_cdf(b)[1]
        few = binomial_tail(n, n - k, above, 1 - above)[1]
        many = binomial_tail(n, k, below, 1 - below)[1]
        if min(few, many) <= IMPOSSIBLE:
            continue
        require(
            (weight * own(b) + other * rival(a)) / ROUND_UP >= needed,
            "a cell of the joint test is not rejected",
        )
    return gap


#: the words of a claim, and of a row
CLAIM = "sigma alpha n rows"
ROW = "input k rival procedure radius share p q gap weight cells"

PROCEDURES = {"bounds": check_bounds, "joint": check_joint}


def check_smoothing(network, inputs, claim):
    """Prove the radius of every row, with sixty digits."""
    with localcontext() as context:
        context.prec = 60
        # tails have no float's exponents: one that became 0 would be no upper bound
        context.Emin = MIN_EMIN
        return check_rows(claim)


def check_rows(claim):
    """Prove the radius of every row."""
    known(claim, CLAIM)
    sigma = Decimal(number(claim["sigma"]))
    number(claim["alpha"], 1e-15, 0.5)
    integer(claim["n"], 1, 10**6)
    chosen = {integer(row["input"], 0) for row in claim["rows"]}
    require(len(chosen) == len(claim["rows"]), "an input has two radii")
    for index, row in enumerate(claim["rows"]):
        known(row, ROW)
        votes = integer(row["k"], 0, claim["n"]) + integer(row["rival"], 0, claim["n"])
        require(votes <= claim["n"], f"row {index}: more votes than draws")
        gap = PROCEDURES[row["procedure"]](claim, row)
        radius = Decimal(number(row["radius"], 0))
        require(
            2 * radius * ROUND_UP <= sigma * gap,
            f"row {index}: the radius {radius} does not follow from the counts",
        )
    return [f"{len(claim['rows'])} radii of randomized smoothing follow from their counts"]


CLAIMS["smoothing"] = check_smoothing
