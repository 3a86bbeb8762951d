"""The scoreboard: what it plays, that it goes on where it stopped, that its figures are proved ones, and its pages."""

from pathlib import Path

import pytest

from equipoise.core import InputError
from equipoise_lab.scoreboard import Board, Budget, Cell, plan, play, read_board
from equipoise_lab.scoreboard.cell import fitting, play_cell

TINY = Budget("digits", 0.001, (4,), (1,), 8, 64, 5e-3, 0.4, 40, flip=False)


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board")
    cells = [Cell("bcop"), Cell("bcop", seed=1), Cell("aol", "la"), Cell("bcop-desk"), Cell("torchlip-spectral")]
    cells += [Cell("lot", "emma"), Cell("lipnext", "ce")]
    return folder, cells, play(cells, TINY, folder)


def test_certified_is_at_most_attacked_is_at_most_clean(board):
    for cell in board[2].cells:
        if "refused" in cell:
            assert "deel-torchlip" in cell["refused"]
            continue
        for shares in ([cell["accuracy"], cell["attacked"], *cell["certified"].values()], [*cell["curve"].values()]):
            rounded = [round(share, 12) for share in shares]
            assert rounded == sorted(rounded, reverse=True)
        assert cell["certified"].items() <= cell["curve"].items()
        assert cell["attacked_samples"] == cell["samples"] == 40


def test_played_cells_are_read_and_not_played_again(board):
    folder, cells, found = board

    def written():
        return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.parent != folder}

    (folder / "scoreboard.json").unlink()  # every cell has its own result
    before = written()
    again = play([c for c in cells if c.family != "torchlip-spectral"], TINY, folder)
    assert written() == before
    assert again.cells == read_board(folder).cells == [c for c in found.cells if "refused" not in c]
    rows = {(r["family"], r["loss"]): r for r in found.rows()}
    assert rows["bcop", "lmt"]["accuracy"].seeds == 2
    assert "± " in found.markdown()
    assert "bcop · lmt" in (folder / "index.html").read_text()
    assert (folder / "curves.svg").read_text().count("<svg") == 1


def test_cells_without_a_curve_or_a_radius_stay_on_the_board(board):
    old = {**board[2].cells[0], "certified": dict(list(board[2].cells[0]["certified"].items())[:3])}
    del old["curve"]
    shown = Board(board[2].budget, [old, *board[2].cells[1:]])
    assert "| – |" in shown.markdown()
    assert shown.curves() != board[2].curves()


def test_a_board_can_be_gone_on_with_elsewhere_at_the_same_budget(board, tmp_path):
    folder, cells, before = board
    (tmp_path / "scoreboard.json").write_text((folder / "scoreboard.json").read_text())
    grown = play([cells[0], Cell("torchlip-spectral", seed=1)], TINY, tmp_path)
    assert [c for c in grown.cells if "refused" not in c] == [c for c in before.cells if "refused" not in c]
    assert len([c for c in grown.cells if "refused" in c]) == 1
    with pytest.raises(InputError, match="another budget"):
        play(cells, Budget("digits", 0.002, (4,), (1,), 8, 64), tmp_path)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: plan(["bcop"], ["lmt"], 0), "at least one seed"),
    (lambda: plan(["bopc"], ["lmt"], 1), "no family 'bopc'"),
    (lambda: Budget("digits", 0), "positive number of minutes"),
    (lambda: play_cell(Cell("sr", "lmt", 0), Budget("digits", 1), Path("/dev/null/s")), "cannot make"),
])  # fmt: skip
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
