import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.report import Attacks, figures

RADII = st.lists(st.floats(0, 5, allow_subnormal=False), min_size=1, max_size=60)


def drawn(x, y, at, first):
    """The height of a drawn step curve: "vh" takes the next point's height, "hv" the previous one's."""
    x = np.asarray(x)
    k = np.searchsorted(x, at, side="left") if first == "v" else np.searchsorted(x, at, side="right") - 1
    return np.asarray(y)[np.clip(k, 0, len(x) - 1)]


@settings(max_examples=60, deadline=None)
@given(radii=RADII, points=st.integers(2, 20), levels=st.lists(st.floats(0, 6), min_size=1, max_size=30))
def test_a_thinned_curve_never_shows_more_than_was_certified(report_parts, radii, points, levels):
    s = report_parts.certified(radii)
    old, figures.POINTS = figures.POINTS, points
    try:
        x, y = figures.certified_curve(s, 7.0)
    finally:
        figures.POINTS = old
    for e in levels:
        assert drawn(x, y, e, "v") <= s.results.accuracy(e)


@settings(max_examples=60, deadline=None)
@given(RADII, st.lists(st.floats(0, 6), min_size=1, max_size=30))
def test_a_drawn_attack_never_shows_fewer_survivors_than_there_were(distances, levels):
    a = Attacks("m", "r", "base", tuple(map(str, range(len(distances)))), np.array(distances))
    x, y = figures.attack_curve(a, 7.0)
    for e in levels:
        assert drawn(x, y, e, "h") >= a.accuracy(e)


def test_curves_of_ten_thousand_inputs_are_short(report_parts):
    figure = figures.curves([report_parts.series(10_000)], [], 3.0)
    assert len(figure["data"][0]["x"]) <= figures.POINTS + 2


def test_no_two_curves_look_alike(report_parts):
    several = [
        report_parts.certified([1.0], procedure=p, run=r) for r in "abc" for p in ("cohen", "cpm", "lvm", "unheard of")
    ]
    traces = figures.curves(several, [], 2.0)["data"]
    assert len({(t["line"]["color"], t["line"]["dash"]) for t in traces}) == len(several)
    assert len({t["name"] for t in traces}) == len(several)


def test_layer_shares_name_the_layers(report_parts):
    figure = figures.layer_shares("m", report_parts.bound("<conv>")["layers"])
    assert figure["data"][0]["y"][0] == "1 · &lt;conv&gt;.0 convolution"
    assert figure["data"][0]["x"][0] == pytest.approx(0.4)
    many = figures.layer_shares("m", report_parts.bound("encoder." * 20, layers=90)["layers"])["data"][0]
    assert len(many["y"]) == len(set(many["y"])) == figures.BARS
    assert max(map(len, many["y"])) < 40
    json.dumps(figure, allow_nan=False)
