import json
import re

import numpy as np
import pytest
from markupsafe import escape

from equipoise.report import Attacks, Checked, ReportData, figures, render

PLOTLY = "window.Plotly = null;"


def payload(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_hostile_strings_stay_text(report_parts):
    page = render(report_parts.whole(12, report_parts.hostile), PLOTLY)
    assert "<img src=x" not in page
    assert page.count("</script>") == 3
    assert str(escape(report_parts.hostile)) in page
    data = payload(page)
    assert data["series"][0]["model"] == report_parts.hostile  # the numbers themselves are what they were
    for figure in data["charts"].values():
        assert all("<" not in trace["name"] for trace in figure["data"])


def test_marks_of_the_template_in_data_are_not_filled_in():
    page = render(ReportData("a {{ plotly }} b"), "SECRET", refresh=7)
    assert page.count("SECRET") == 1
    assert "a {{ plotly }} b" in page
    assert '<meta http-equiv="refresh" content="7">' in page
    assert 'http-equiv="refresh"' not in render(ReportData("t"), "")


def test_right_answers_without_a_proof_are_a_status_of_their_own(report_parts):
    details = {"procedure": "deterministic", "rivals": (1, 1, 0), "methods": ("margin", "", "")}
    s = report_parts.certified([0.5, 0.0, 0.0], [0, -1, -1], [0, 0, 1], **details)
    page = render(ReportData("t", (s,)), PLOTLY)
    assert "1 wrong, 1 right, not certified, 1 certified" in page
    assert payload(page)["series"][0]["status"] == ["certified", "right, not certified", "wrong"]
    assert "33.3 %" in page  # certified at ε = 0: one of three


def test_hover_texts_round_towards_safety(report_parts):
    s = report_parts.certified([0.123456, 0.3, 0], [0, 0, -1])
    texts = figures.curves([s], [], 1.0)["data"][0]["customdata"]
    assert "ε = 0.1234<br>at least 66.6 % certified" in texts
    attacks = Attacks("net", "run", "base", ("0", "1", "2"), np.array([0.123456, np.inf, np.inf]))
    texts = figures.curves([], [attacks], 1.0)["data"][0]["customdata"]
    assert "ε = 0.1235<br>at most 66.67 % withstand" in texts


def test_every_number_is_in_the_page_with_its_limits_and_nothing_is_loaded(report_parts):
    """Norms are rounded up, what is not guaranteed is stated, and no address but the page's own is in it."""
    whole = report_parts.whole()
    page = render(whole, PLOTLY)
    for words in (
        "1.2345", "1.2346", "What is not guaranteed", "1 − 0.001", "Choosing the best of several curves",
        "rounding inside the network", "no guarantee: a stronger attack", "seed", "default-src 'none'",
    ):  # fmt: skip
        assert words.lower() in page.lower(), words
    assert not re.search(r"""(src|href)\s*=\s*["']?(?!#|data:image/png)[a-z/]""", page)
    assert not re.search(r"@import|url\((?!data:)", page)
    data = payload(page)
    for stored, s in zip(data["series"], whole.series, strict=True):
        assert np.array_equal(stored["radius"], s.results.radius)
        assert np.array_equal(stored["prediction"], s.results.prediction)
        assert tuple(stored["ids"]) == s.ids
    assert data["audits"][0]["layers"][0]["upper"] == 1.23456799


def test_broken_certificates_are_alarming(report_parts):
    data = ReportData("t", (report_parts.series(),), tested=Checked(5, ("input <3>",)))
    page = render(data, PLOTLY)
    assert 'role="alert"' in page
    assert "input &lt;3&gt;" in page
    assert 'class="card bad"' in page


@pytest.mark.parametrize("empty", [ReportData("nothing"), ReportData("tested", tested=Checked(0))])
def test_sections_without_data_are_left_out(empty):
    page = render(empty, PLOTLY)
    assert "curves-section" not in page.split("<script")[0]
    assert payload(page)["series"] == []


def test_infinite_radii_and_bounds_are_drawn_and_stored(report_parts):
    s = report_parts.series(20)
    s.results.radius[3] = np.inf
    bound = {**report_parts.bound(), "upper": None, "log_upper": 2000.0, "log_product": 2000.0}
    page = render(ReportData("t", (s,), audits={"deep": bound}), PLOTLY)
    assert "e+868" in page.replace("e868", "e+868") or "10^868" in page or "868" in page
    json.dumps(payload(page))
