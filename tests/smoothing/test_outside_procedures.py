"""A procedure from outside: one row behind an entry point, and the library, runs and the command line see it."""

import numpy as np
import pytest

from equipoise.core import InputError, Refused
from equipoise.smoothing import PROCEDURES, Option, Procedure, certify_counts, clopper_pearson
from equipoise.smoothing.bounds import Gaussian
from equipoise.smoothing.planning import plan_scores
from equipoise.smoothing.procedures import Partition, every_class, find_procedure, one_against_rest, ranking

ROW = """
from equipoise.smoothing import Option, Procedure, Split
from equipoise.smoothing.procedures import every_class

ROW = Procedure("thirds", (Option(every_class, Split(2 / 3)),), True, False, "class at two thirds of the risk", "outside")
"""


def test_a_row_behind_an_entry_point_is_seen_everywhere(install, monkeypatch):
    install("outside_rows", ROW, "procedures", {"thirds": "ROW"})
    monkeypatch.delitem(PROCEDURES, "thirds", raising=False)
    assert find_procedure("thirds").summary == "class at two thirds of the risk"
    found = certify_counts([80, 15, 5], [800, 150, 50], 0.5, 0.01, "thirds")
    assert float(found.p_lower) == float(clopper_pearson(800, 1000, 0.01 * (2 / 3), "lower"))


#: rows that would certify too much: a share above α, a rival that no bucket holds
UNSOUND = {
    "both at α": Option(every_class, lambda p: (np.ones(len(p.order)), np.ones(len(p.order)))),
    "more than all": Option(one_against_rest, lambda p: (np.full(len(p.order), 2.0), np.full(len(p.order), 2.0))),
    "a split beyond 1": Option(every_class, lambda p: (np.full(len(p.order), -1.0), np.full(len(p.order), 2.0))),
    "no number": Option(every_class, lambda p: (np.full(len(p.order), np.nan), np.full(len(p.order), np.nan))),
    "a class left out": Option(lambda selection: Partition(ranking(selection)[:, :-1], np.ones(len(selection), int))),
    "a class twice": Option(lambda selection: Partition(ranking(selection) // 2, np.ones(len(selection), int))),
    "too many alone": Option(lambda selection: Partition(ranking(selection), np.full(len(selection), 9))),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_row_that_spends_too_much_or_loses_a_rival_is_refused(name, monkeypatch):
    row = Procedure("cohen-like", (UNSOUND[name],), True, False, "one Clopper–Pearson bound at α", "outside")
    monkeypatch.setitem(PROCEDURES, row.name, row)
    with pytest.raises((InputError, Refused), match=r"is sound|every class of every input once"):
        certify_counts([[60, 30, 6, 4]], [[600, 300, 60, 40]], 0.5, 0.01, row.name)
    with pytest.raises((InputError, Refused), match=r"is sound|every class of every input once"):
        plan_scores(row, np.full((2, 8, 4), 0.25), 100, Gaussian(0.5), 0.01)
