"""Bounds are shown on their own side of the truth."""

import math
import re

import pytest
import torch

from equipoise.core import Bound, Bracket, InputError, Kind, Refused, as_upper, format_down, format_up

THIRD, TWO_THIRDS = 1 / 3, 2 / 3
NUMBERS = (1.23456789, 9.9999999, 0.00012345678, 12345678.9, 1e-300, 5.0, 1.7976e308, 5e-324)
#: what is shown, a value it must not lie below, and one it must not lie above
SHOWN = {
    "upper bound": (repr(Bound(THIRD, Kind.UPPER)), THIRD, math.inf),
    "lower bound": (repr(Bound(TWO_THIRDS, Kind.LOWER)), -math.inf, TWO_THIRDS),
    "upper bounds of a batch": (repr(Bound(torch.full((2,), THIRD, dtype=torch.float64), Kind.UPPER)), THIRD, math.inf),
    "tensor of one entry": (repr(Bound(torch.tensor(THIRD, dtype=torch.float64), Kind.UPPER)), THIRD, math.inf),
    "upper": (format_up(THIRD, 4), THIRD, math.inf),
    "epsilon beside a certified share": (format_down(TWO_THIRDS, 4), -math.inf, TWO_THIRDS),
    "below zero, up": (format_up(-TWO_THIRDS, 4), -TWO_THIRDS, math.inf),
    "below zero, down": (format_down(-THIRD, 4), -math.inf, -THIRD),
    **{f"{x} up to {d}": (format_up(x, d), x, 2 * x if x < 1e308 else math.inf) for x in NUMBERS for d in (1, 3, 6)},
    **{f"{x} down to {d}": (format_down(x, d), 0.4 * x, x) for x in NUMBERS for d in (1, 3, 6)},
}


@pytest.mark.parametrize("name", SHOWN)
def test_numbers_are_rounded_to_their_side(name):
    text, least, most = SHOWN[name]
    numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*(?:[eE][+-]?\d+)?", text.split(" of shape")[0])]
    assert numbers
    assert all(least <= n <= most for n in numbers), text


def test_only_upper_bounds_reach_a_certificate() -> None:
    assert as_upper(Bound(2.0, Kind.UPPER)) == 2.0
    assert as_upper(3) == 3.0
    for kind in (Kind.LOWER, Kind.ESTIMATE, Kind.EXACT):
        with pytest.raises(Refused, match="upper bound"):
            as_upper(Bound(2.0, kind))
    with pytest.raises(InputError, match="non-negative"):
        as_upper(float("nan"))


def test_brackets_check_themselves() -> None:
    with pytest.raises(InputError, match="lower ≤ upper"):
        Bracket(2.0, 1.0)
    with pytest.raises(InputError, match="lower ≤ upper"):
        Bracket(1 + 1e-9, 1.0)
    assert 5e299 not in Bracket(1e300, 2e300)
    assert Bracket(0.0, 0.0, 1e-3).reached
    assert not Bracket(0.0, 1.0, 1e-3).reached
