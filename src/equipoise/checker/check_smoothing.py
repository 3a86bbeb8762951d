"""Check certificates of randomized smoothing: `python check_smoothing.py FILE` prints ACCEPTED or REJECTED.

This file needs Python 3.10 alone. It proves that every claimed radius follows from its counts: that p bounds the probability of
the class at the claimed confidence, and that the radius is at most `σ(Φ⁻¹(p) − Φ⁻¹(q))/2`. Binomial tails and Φ are computed
with sixty digits and rounded toward rejection. That the counts were really drawn is evidence, not proof: `equipoise certify
--replay` draws them again.
"""

import argparse
import json
import math
import sys
from decimal import Decimal, getcontext
from pathlib import Path

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
#: covers the rounding of a few thousand operations with sixty digits
ROUND_UP = 1 + Decimal("1e-30")


class Rejected(Exception):
    """A claim that does not hold, or a file that cannot be read."""


def require(condition, reason):
    """Reject unless the condition holds."""
    if not condition:
        raise Rejected(reason)


def number(value, whole=False):
    """A finite number of a JSON document; texts and truth values are none."""
    require(type(value) is int or (type(value) is float and not whole), f"expected a number, got {str(value)[:40]!r}")
    require(abs(value) < math.inf, "expected a finite number")
    return value


def binomial_tail(n, k, p):
    """`P(Bin(n, p) ≥ k)`, rounded up: the first term, then the terms' ratios until the rest is a small geometric series."""
    require(0 <= k <= n <= 10**7 and 0 < p < 1, "impossible counts")
    p = Decimal(p)
    term = total = Decimal(math.comb(n, k)) * p**k * (1 - p) ** (n - k)
    for i in range(k, n):
        ratio = Decimal(n - i) / (i + 1) * p / (1 - p)
        term *= ratio
        total += term
        if ratio < 0.9 and term < total * Decimal("1e-30"):
            total += 10 * term
            break
    return total * ROUND_UP


def normal_cdf(x):
    """`Φ(x) = 1/2 + φ(x)·(x + x³/3 + x⁵/(3·5) + …)` to forty digits."""
    require(abs(x) <= 10, "a quantile is out of range")
    x = Decimal(x)
    term = total = x
    for odd in range(3, 1_001, 2):
        term *= x * x / odd
        total += term
    return Decimal("0.5") + (-x * x / 2).exp() / (2 * PI).sqrt() * total


def check_smoothing(claim):
    """Radii of randomized smoothing from counts: `σ(Φ⁻¹(p₁) − Φ⁻¹(p₂))/2`, p₁ and p₂ confidence bounds at level α.

    A row has the count k of its class out of n, a bound p and a radius; with the procedure `bonferroni` also the largest count of
    another class and its bound q, and α is shared by all classes. The counts themselves are evidence, not proved here.
    """
    getcontext().prec = 60
    sigma, n, classes = number(claim["sigma"]), number(claim["n"], True), number(claim.get("classes", 1), True)
    require(0 < sigma < 1e100 and claim["procedure"] in ("cohen", "bonferroni"), "impossible noise or procedure")
    shared = claim["procedure"] == "bonferroni"
    alpha = Decimal(number(claim["alpha"])) / (classes if shared else 1)
    require(0 < alpha < 1 and classes >= 1, "impossible level")
    for index, row in enumerate(claim["rows"]):
        p, radius = number(row["p"]), number(row["radius"])
        require(
            0 <= radius < math.inf and binomial_tail(n, number(row["k"], True), p) <= alpha,
            f"row {index}: p is no bound",
        )
        q = number(row["q"]) if shared else None
        if shared:
            require(
                binomial_tail(n, n - number(row["rival"], True), 1 - Decimal(q)) <= alpha, f"row {index}: q is no bound"
            )
        low = Decimal(number(row["quantile"]))
        high = Decimal(number(row["rival_quantile"])) if shared else -low
        require(normal_cdf(low) * ROUND_UP <= Decimal(p), f"row {index}: quantile too large")
        require(not shared or normal_cdf(high) >= Decimal(q) * ROUND_UP, f"row {index}: quantile too small")
        require(2 * Decimal(radius) * ROUND_UP <= Decimal(sigma) * (low - high), f"row {index}: radius too large")


def check(path):
    """Check a file of claims; returns their number."""
    path = Path(path)
    require(path.is_file() and path.stat().st_size <= 2**30, f"{path.name} is missing, too large or not a regular file")
    document = json.loads(path.read_bytes())
    require(document["format"] == "equipoise-smoothing" and document["version"] == 1, "not a file of version 1")
    check_smoothing(document["claims"])
    return len(document["claims"]["rows"])


def main():
    """Print the verdict; exit code 0 if the claims are accepted."""
    parser = argparse.ArgumentParser(description="Check certificates of randomized smoothing.")
    parser.add_argument("file", help="a JSON file of claims")
    try:
        count = check(parser.parse_args().file)
    except Exception as error:  # a malformed file is rejected, whatever it breaks
        kind = "" if isinstance(error, Rejected) else f"malformed file ({type(error).__name__}): "
        print(f"REJECTED: {kind}{str(error)[:300]}")
        sys.exit(1)
    print(f"ACCEPTED\n  {count} radii follow from their counts")


if __name__ == "__main__":
    main()
