"""The benchmark runs and has its rows; the figures themselves are measured, never asserted."""

from equipoise_lab.bench.training import sections


def test_quick_sections_have_all_rows():
    steps, memory, control = sections(quick=True)
    assert [row["step"] for row in steps.rows][:4] == ["plain", "plain, again", "activation decay", "spectral, tracked"]
    assert all(row["seconds"] > 0 for row in steps.rows)
    assert all(row["explicit MB"] > 0 and row["autodiff MB"] > 0 for row in memory.rows)
    assert control.rows
    assert steps.to_dict()["goals"] == []
