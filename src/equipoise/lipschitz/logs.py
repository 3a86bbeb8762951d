"""Products of many constants in the log domain, rounded up: 10^264 happens, and must still be an upper bound.

A Lipschitz bound L is carried as `log L`; `-inf` is the constant map. Every operation adds a term that covers its own
rounding, so the number stays above the logarithm of the true product or sum.
"""

from collections.abc import Iterable
from math import ceil, exp, floor, fsum, inf, isfinite, isinf, isnan, log

_SLACK = 2.0**-48


def _raise(x: float) -> float:
    return x if isinf(x) else x + _SLACK * (1 + abs(x))


def log_up(x: float) -> float:
    """`log x`, rounded up; `-inf` for 0.

    >>> log_up(0.0), log_up(1.0) >= 0
    (-inf, True)
    """
    if isnan(x) or x < 0:
        raise ValueError(f"a Lipschitz constant is a non-negative number, got {x}")
    return -inf if x == 0 else _raise(log(x))


def log_product(*logs: float) -> float:
    """`log Π exp(l)`, rounded up; a zero factor wins over an infinite one (the map is constant).

    >>> log_product(-inf, inf)
    -inf
    """
    if -inf in logs:
        return -inf
    return _raise(fsum(logs)) if all(map(isfinite, logs)) else inf


def log_sum(logs: Iterable[float]) -> float:
    """`log Σ exp(l)`, rounded up.

    >>> round(log_sum([0.0, 0.0]), 6)
    0.693147
    """
    kept = [v for v in logs if v != -inf]
    if not kept:
        return -inf
    top = max(kept)
    if len(kept) == 1 or isinf(top):
        return top
    return _raise(_raise(log(fsum(exp(v - top) for v in kept))) + top)


def log_root(logs: Iterable[float]) -> float:
    """`log √Σ exp(2l)`, rounded up: the bound of a concatenation.

    >>> round(exp(log_root([log(3), log(4)])), 6)
    5.0
    """
    kept = [2 * v for v in logs]
    return log_sum(kept) / 2 if len(kept) != 1 else kept[0] / 2


def exp_up(x: float) -> float:
    """`exp x`, rounded up; infinite where it does not fit a float, and 0 for the constant map only.

    >>> exp_up(1000.0)
    inf
    """
    if x == -inf:
        return 0.0
    return max(exp(x) * (1 + _SLACK * (1 + abs(x))), 2.0**-1022) if x < 709 else inf


def show_log(x: float) -> str:
    """Print exp(x) with four significant digits, rounded up, also beyond the floats.

    >>> show_log(700 * log(10)), show_log(0.0)
    ('1.001e+700', '1.000')
    """
    if x == -inf:
        return "0"
    if x == inf:
        return "inf"
    tens = x / log(10)
    power = floor(tens)
    mantissa = ceil(10 ** (tens - power) * (1 + 1e-12 * abs(x)) * 1000) / 1000
    if -3 <= power < 6:
        return f"{mantissa * 10.0**power:.{max(0, 3 - power)}f}"
    return f"{mantissa:.3f}e{power:+03d}"
