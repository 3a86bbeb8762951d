"""The table of families in the docs, row by row."""

import re
from pathlib import Path

import pytest
import torch
from lipschitz_nets import BOUNDED, REFUSED

from equipoise.core import EquipoiseError, Refused
from equipoise.lipschitz import lipschitz_bound, local_lipschitz

PAGE = Path(__file__).parents[2] / "docs" / "lipschitz" / "families.md"


def rows(columns: int) -> dict[str, list[str]]:
    """The rows of the table with so many columns, by their first cell."""
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return {c[0]: c[1:] for c in cells if len(c) == columns and c[0] not in ("family", "---")}


def test_the_tables_hold_these_families():
    assert list(rows(5)) == list(BOUNDED)
    assert list(rows(2)) == list(REFUSED)


@pytest.mark.medium
@pytest.mark.parametrize("family", BOUNDED)
def test_a_family_has_the_bounds_the_table_says(family):
    network, shape, ball = BOUNDED[family]
    everywhere, on_ball, around, _ = rows(5)[family]
    assert (everywhere, on_ball, around) == ("no" if ball else "yes", "yes", "yes")
    network, x = network.eval(), torch.full((1, *shape), 0.3)
    if ball:
        with pytest.raises(Refused, match="ball"):
            lipschitz_bound(network, x)
    assert 0 < lipschitz_bound(network, x, ball=ball).upper < 1000
    assert 0 < float(local_lipschitz(network, x, 0.05, steps=0, effort="fast").upper) < 1000


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_for_the_reason_the_table_gives(family):
    network, example, words = REFUSED[family]
    with pytest.raises(EquipoiseError, match=words):
        lipschitz_bound(network if family == "training mode" else network.eval(), example)
