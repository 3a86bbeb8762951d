"""Bounds are shown on their own side of the truth."""

from __future__ import annotations

import math
import re

import pytest
import torch

from equipoise.core.bounds import Bound, Bracket, Kind, format_down, format_up

THIRD, TWO_THIRDS = 1 / 3, 2 / 3
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
    "beyond plain digits": (format_up(1.23456789e300, 3), 1.23456789e300, math.inf),
}


@pytest.mark.parametrize("name", SHOWN)
def test_numbers_are_rounded_to_their_side(name):
    text, least, most = SHOWN[name]
    numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*(?:[eE][+-]?\d+)?", text.split(" of shape")[0])]
    assert numbers
    assert all(least <= n <= most for n in numbers), text


def test_a_bracket_of_tensors_contains_what_it_shows():
    lower = torch.tensor([THIRD, TWO_THIRDS], dtype=torch.float64)
    text = repr(Bracket(lower, lower))
    shown = [float(n) for n in re.findall(r"\d\.\d+", text)]
    assert shown[0] <= THIRD <= shown[2]
    assert shown[1] <= TWO_THIRDS <= shown[3]
    assert math.isclose(shown[0], shown[2], rel_tol=1e-5)
