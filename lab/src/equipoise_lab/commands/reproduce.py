"""`equipoise reproduce`: the experiments of the thesis, with verdicts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, messages, print_table, tell
from equipoise.cli.options import Json

#: the results of this checkout, absent where only the package is installed
COMMITTED = Path(__file__).parents[3] / "results" / "experiments"

if TYPE_CHECKING:
    from equipoise_lab.experiments import Experiment, Outcome


def reproduce(
    identifiers: Annotated[
        list[str] | None,
        typer.Argument(help='names or places ("Table 5.1"), as --list shows them'),
    ] = None,
    list_all: Annotated[
        bool,
        typer.Option("--list", help="list the experiments with place, claim and stored verdict"),
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="run every experiment, keeping stored results")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            help="run at laptop (minutes), desk (up to forty minutes each) or paper scale (the thesis' settings)"
        ),
    ] = "laptop",
    seed: Annotated[int, typer.Option(help="seed everything random")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="read data files from here; default: EQUIPOISE_DATA")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="write a folder per experiment below this one")
    ] = Path("results"),
    again: Annotated[
        bool, typer.Option("--again", help="run even if a result with these settings is stored")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="build everything, take two steps of every loop, write nothing"
        ),
    ] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="print what would run, with settings and data, and stop"),
    ] = False,
    device: Annotated[str, typer.Option(help="run on cpu, cuda or mps")] = "cpu",
    page: Annotated[
        Path | None,
        typer.Option(help="write a page of the stored results and stop"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Reproduce tables and figures of the thesis, with verdicts.

    Each result is a folder with result.json, rows.parquet, figure.svg and
    figure.png; --all adds summary.md. A result with the same settings, scale and
    seed is not measured again, so a stopped run continues where it was.

    Examples:

      equipoise reproduce --list
      equipoise reproduce --all --plan
      equipoise reproduce dense-convergence
      equipoise reproduce "Table 5.1"
      equipoise reproduce --all -o results
      equipoise reproduce -o results --page results.md
      equipoise reproduce sll-aol-sr --scale paper --dry-run
    """
    from equipoise.core.errors import InputError
    from equipoise.runs.jobs import usable_device
    from equipoise_lab.experiments import Context
    from equipoise_lab.experiments import every as chosen_experiments
    from equipoise_lab.experiments.page import summary
    from equipoise_lab.experiments.runner import reproduce_all

    if list_all:
        _list(out, as_json)
        return
    if page is not None:
        from equipoise.core.files import atomic_write
        from equipoise_lab.experiments.page import stored

        here = os.path.relpath(out, page.parent)
        atomic_write(page, summary(stored(chosen_experiments(identifiers or ()), out), here))
        return
    if not identifiers and not every:
        raise InputError(
            "name an experiment (`equipoise reproduce --list` shows them) or pass --all"
        )
    selected = chosen_experiments(identifiers or ())
    for experiment in selected:
        experiment.settings(scale)  # an unknown scale is refused before anything runs
    folder = data or (
        Path(os.environ["EQUIPOISE_DATA"]) if os.environ.get("EQUIPOISE_DATA") else None
    )
    if plan:
        _plan(selected, scale, seed, folder, out, as_json)
        return
    usable_device(device)
    if not dry_run:
        _require_folder(out)
    console = messages()
    context = Context(
        seed,
        folder,
        device,
        dry_run,
        lambda text: console.print(f"  {text}", style="dim", markup=False),
    )
    outcomes: list[Outcome] = []
    for outcome in reproduce_all(
        selected,
        scale,
        context,
        out,
        again=again,
        before=lambda e: console.print(f"{e.id}: {e.title}", markup=False),
    ):
        outcomes.append(outcome)
        if not as_json:
            tell(f"{outcome.experiment.id}: {_line(outcome)}")
    if every and not dry_run:
        from equipoise.core.files import atomic_write

        atomic_write(out / "summary.md", summary(outcomes, "."))
    if as_json:
        emit_json([_document(outcome) for outcome in outcomes])
    if any(outcome.result is None for outcome in outcomes):
        raise typer.Exit(2)


def _plan(
    selected: list[Experiment], scale: str, seed: int, data: Path | None, out: Path, as_json: bool
) -> None:
    from dataclasses import asdict

    from equipoise_lab.experiments.runner import plan

    planned = plan(selected, scale, seed, data, out)
    if as_json:
        emit_json([{**asdict(p), "action": p.action} for p in planned])
        return
    rows = [
        {
            "id": p.id,
            "what happens": p.action,
            "minutes before": "" if p.seconds is None else f"{p.seconds / 60:.1f}",
            "power": p.power,
            "settings": ", ".join(f"{k} = {v}" for k, v in p.settings.items())[:160],
        }
        for p in planned
    ]
    print_table(f"{scale} scale, seed {seed}", rows)


def _require_folder(out: Path) -> None:
    """Minutes of measuring are not to be lost for want of a place to write to."""
    from equipoise.core.errors import InputError
    from equipoise.core.files import make_folder

    make_folder(out)
    if not os.access(out, os.W_OK | os.X_OK):
        raise InputError(f"cannot write in {out}: check its permissions")


def _line(outcome: Outcome) -> str:
    if outcome.result is None:
        return f"not run: {outcome.failure}"
    return "; ".join(map(str, outcome.result.verdicts)) + (
        " (stored)" if outcome.stored else f" ({outcome.result.seconds:.0f} s)"
    )


def _document(outcome: Outcome) -> dict[str, object]:
    if outcome.result is None:
        return {"id": outcome.experiment.id, "failure": outcome.failure}
    return {**outcome.result.to_json(), "stored": outcome.stored}


def _list(out: Path, as_json: bool) -> None:
    """Every experiment with its place in the thesis and its stored verdicts: those of the folder, else those of the checkout."""
    from equipoise_lab.experiments import every
    from equipoise_lab.experiments.page import stored, undecided

    rows: list[dict[str, Any]] = []
    committed = stored(every(), COMMITTED)
    for own, shipped in zip(stored(every(), out), committed, strict=True):
        outcome = own if own.result else shipped
        experiment = outcome.experiment
        verdicts = outcome.result.verdicts if outcome.result else ()
        labels = [
            f"{verdict.part}: {verdict.label}".removeprefix(": ")
            + (" (our own claim)" if verdict.own and not experiment.own else "")
            for verdict in verdicts
        ]
        rows.append(
            {
                "id": experiment.id,
                "place": "our own claim" if experiment.own else experiment.place,
                "chapter": experiment.chapter,
                "claim": experiment.claim,
                "published": experiment.published,
                "verdicts": labels or [f"{undecided(outcome)[0]} (not run)"],
            }
        )
    if as_json:
        emit_json(rows)
        return
    cells = [
        {name: row[name] for name in ("id", "place", "claim")}
        | {"verdict": "\n".join(row["verdicts"])}
        for row in rows
    ]
    print_table("Experiments of the thesis", cells)
