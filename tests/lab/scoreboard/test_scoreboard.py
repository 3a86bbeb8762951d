"""The scoreboard: what it plays, that it goes on where it stopped, that its figures are proved ones, and its pages."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from equipoise.core import InputError
from equipoise_lab.scoreboard import Budget, Cell, plan, play, read_board
from equipoise_lab.scoreboard.cell import fitting, play_cell

TINY = Budget("digits", 0.001, (4,), (1,), 8, 64, 5e-3, 0.4, 40, flip=False)


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board")
    cells = [Cell("bcop"), Cell("bcop", seed=1), Cell("aol", "la"), Cell("bcop-muon"), Cell("torchlip-spectral")]
    return folder, cells, play(cells, TINY, folder)


def test_certified_is_at_most_attacked_is_at_most_clean(board):
    for cell in board[2].cells:
        if "refused" in cell:
            assert "deel-torchlip" in cell["refused"]
            continue
        shares = [cell["accuracy"], cell["attacked"], *cell["certified"].values()]
        assert shares == sorted(shares, reverse=True)
        assert cell["attacked_samples"] == cell["samples"] == 40


def test_played_cells_are_read_and_not_played_again(board, monkeypatch):
    folder, cells, before = board
    monkeypatch.setattr("equipoise_lab.scoreboard.cell._measured", lambda *_: pytest.fail("played again"))
    again = play(cells[:4], TINY, folder)
    assert again.cells == [c for c in before.cells if "refused" not in c]
    with pytest.raises(InputError, match="another budget"):
        play(cells[:1], Budget("digits", 0.002, (4,), (1,), 8, 64), folder)


def test_rows_are_means_over_seeds_and_pages_hold_them(board):
    folder, cells, found = board
    play(cells[:4], TINY, folder)
    assert read_board(folder).cells == [c for c in found.cells if "refused" not in c]
    rows = {(r["family"], r["loss"]): r for r in found.rows()}
    assert rows["bcop", "lmt"]["accuracy"].seeds == 2
    assert "± " in found.markdown()
    page = (folder / "index.html").read_text()
    assert "<svg" in page
    assert "bcop · lmt" in page
    assert json.loads((folder / "scoreboard.json").read_text())["budget"]["minutes"] == 0.001


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: plan(["bcop"], ["lmt"], 0), "at least one seed"),
        (lambda: plan(["bopc"], ["lmt"], 1), "no family 'bopc'"),
        (lambda: Budget("digits", 0), "positive number of minutes"),
        (lambda: play_cell(Cell("sr", "lmt", 0), Budget("digits", 1), Path("/dev/null/s")), "cannot make"),
    ],
)
def test_what_is_wrong_is_said(call, said):
    with pytest.raises(InputError, match=said):
        call()


@pytest.mark.parametrize(("seconds", "count"), [(0.1, 1000), (3.0, 1000), (1e-3, 60), (1e9, 500)])
def test_the_steps_fit_the_budget(seconds, count):
    budget = Budget("digits", 1.0, batch_size=64)
    epochs, limit = fitting(seconds, budget, count)
    steps = epochs * max(1, limit // 64)
    assert steps == 1 or steps * seconds <= 60
    assert steps == 1 or steps * seconds > 60 * (1 - 1 / max(1, count // 64)) - seconds * epochs
    assert 1 <= limit <= count


def test_a_board_grows_and_can_be_gone_on_with_elsewhere(board, tmp_path, monkeypatch):
    folder, cells, before = board
    (tmp_path / "scoreboard.json").write_text((folder / "scoreboard.json").read_text())
    refuse = lambda cell, *_: {"asked": {"cell": asdict(cell)}, "refused": cell.name}  # noqa: E731
    monkeypatch.setattr("equipoise_lab.scoreboard.board.play_cell", refuse)
    grown = play([Cell("bcop"), Cell("sr")], TINY, tmp_path)
    assert [c for c in grown.cells if "refused" not in c] == [c for c in before.cells if "refused" not in c]
    assert [c["refused"] for c in grown.cells if "refused" in c] == ["sr.lmt.0"]
    with pytest.raises(InputError, match="another budget"):
        play(cells, Budget("digits", 0.002, (4,), (1,), 8, 64), tmp_path)
