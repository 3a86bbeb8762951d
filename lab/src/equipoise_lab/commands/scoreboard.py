"""`equipoise scoreboard`: every family of 1-Lipschitz layers × loss under one budget, with proved certificates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, results, say, tell
from equipoise.cli.options import Json

if TYPE_CHECKING:
    from equipoise_lab.scoreboard import Cell


def scoreboard(
    data: Annotated[
        str, typer.Option(help="train on digits, or on a file or folder, here or in EQUIPOISE_DATA")
    ] = "digits",
    minutes: Annotated[
        float, typer.Option(help="train every cell for so many processor minutes")
    ] = 1.0,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="write cells and result into this folder")
    ] = Path("scoreboard"),
    families: Annotated[
        str,
        typer.Option(
            help="compare these families, separated by commas; all: those of equipoise, without peers"
        ),
    ] = "all",
    losses: Annotated[str, typer.Option(help="train every family with these losses")] = "lmt",
    all_losses: Annotated[str, typer.Option(help="train these families with every loss")] = "",
    seeds: Annotated[int, typer.Option(help="repeat every cell with so many seeds")] = 1,
    workers: Annotated[
        int, typer.Option(help="train so many cells at once, on Ray; 0: one by one")
    ] = 0,
    autoattack: Annotated[
        int,
        typer.Option(help="attack so many test images by AutoAttack too (torchattacks)"),
    ] = 0,
    small: Annotated[
        bool, typer.Option("--small", help="use a network for 8×8 images (digits)")
    ] = False,
    listed: Annotated[bool, typer.Option("--plan", help="list the cells and stop")] = False,
    as_json: Json = False,
) -> None:
    """Compare 1-Lipschitz layers on one budget of processor time.

    Families × losses × seeds: clean accuracy, accuracy certified by proved bounds
    (by pairs of classes), accuracy under PGD (and AutoAttack, if asked for) and
    the cost of a step, as means over seeds with intervals. Writes OUT/index.html,
    README.md and scoreboard.json. After a stop the same command continues, and
    another one with the same budget adds its cells.

    Examples:

      equipoise scoreboard --small --minutes 0.5
      equipoise scoreboard --data cifar10-full.npz --minutes 20 --seeds 3 --plan
      equipoise scoreboard --data cifar10-full.npz --minutes 20 --all-losses bcop
    """
    from equipoise.nn.models.lipschitz import families as every
    from equipoise_lab.scoreboard import Budget, plan, play

    selected = list(every()) if families == "all" else _names(families)
    cells = plan(selected, _names(losses), seeds, _names(all_losses))
    shape: dict[str, Any] = (
        {"channels": (16, 32), "depths": (2, 1), "hidden": 64, "batch_size": 64} if small else {}
    )
    if small:
        shape |= {"lr": 5e-3, "epsilon": 0.4, "flip": False}
    budget = Budget(data, minutes, **shape)
    if listed:
        total = minutes * len(cells)
        if as_json:
            emit_json({"cells": [c.name for c in cells], "processor_minutes": total})
        else:
            results().print("\n".join(c.name for c in cells), markup=False)
            results().print(
                f"{len(cells)} cells, {total:g} processor minutes of training", markup=False
            )
        return
    board = play(
        cells, budget, out, workers=workers, tell=None if as_json else _tell, autoattack=autoattack
    )
    if as_json:
        emit_json({"budget": board.budget, "cells": board.cells, "out": str(out)})
    else:
        tell(board.markdown())
        results().print(f"wrote {out / 'index.html'}", markup=False)
    if all("refused" in cell for cell in board.cells):
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _tell(cell: Cell, figures: dict[str, Any]) -> None:
    if "refused" in figures:
        say(f"{cell.name}: refused: {figures['refused']}")
        return
    from equipoise.core.accuracy import percent

    first = next(iter(figures["certified"].values()))
    line = f"{cell.name}: clean {figures['accuracy']:.2%}, certified {percent(first)}%, {figures['step_seconds']:.3f} s a step"
    say(line)
