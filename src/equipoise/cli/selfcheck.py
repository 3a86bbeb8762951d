"""`equipoise selfcheck`: the guarantees, tested on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.consoles import emit_json, messages, progress, results, table
from equipoise.cli.options import Json

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.testing import Report


def selfcheck(
    suite: Annotated[
        str,
        typer.Argument(
            help="norms, layers or networks; equipoise-lab adds programs, files and peers.", metavar="[SUITE]"
        ),
    ] = "norms",
    minutes: Annotated[float, typer.Option(help="How long to look for violations.")] = 1.0,
    device: Annotated[str, typer.Option(help="cpu, cuda (or cuda:1) or mps.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Other seeds test other operators.")] = 0,
    scripts: Annotated[
        Path | None, typer.Option(help="Folder for the scripts that show violations of `programs` and `files`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Test the guarantees on your own hardware against a float64 reference.

    `norms`: random and trained matrices and convolutions; the trained ones follow the
    gradient of truth/upper to break the bound. `layers`: 1-Lipschitz layers, trained to
    break their constant. `networks`: random compositions of building blocks, whose facts
    are checked node by node and whose bounds are attacked by pairs and Jacobians.

    Prints how many operators were tested, how close the bounds came, and how many were
    wrong: 0, or the exit code is 1. An end counts as wrong beyond 1e-12 relative, the
    rounding of the reference.

    With equipoise-lab installed, `programs` writes random programs as source code, and
    `files` damages files of every kind that the library reads.

    Examples:

      equipoise selfcheck
      equipoise selfcheck --minutes 10 --device cuda --seed 3
      equipoise selfcheck layers --minutes 5
      equipoise selfcheck programs --minutes 10 --scripts found
    """
    from equipoise.core.files import make_folder
    from equipoise.testing import find_suite, run

    checks = find_suite(suite)
    with progress() as bar:
        task = bar.add_task("selfcheck", total=100)
        report = run(
            checks,
            60 * minutes,
            device,
            seed,
            lambda tally, done: bar.update(task, completed=round(100 * done)),
        )
    if as_json:
        emit_json(report.to_dict())
    else:
        show(report, results())
    if scripts is not None:
        make_folder(scripts)
        for number, text in enumerate(text for t in report.tallies for text in t.scripts):
            (scripts / f"violation-{number:03d}.py").write_text(text)
    if report.violations:
        messages().print(f"equipoise: {report.violations} violations: please report them", style="red")
        raise typer.Exit(1)


def show(report: Report, console: Console) -> None:
    """Print a report as a table and its verdict."""
    import torch

    numbers = (
        "operators",
        "brackets",
        "min upper/truth − 1",
        "max lower/truth − 1",
        "violations",
        "refused",
        "seconds",
    )
    rows = table("selfcheck", "check", *numbers, right=numbers)
    for t in report.tallies:
        rows.add_row(
            t.name,
            f"{t.operators:,}",
            f"{t.comparisons:,}",
            f"{t.closest_upper:.1e}",
            f"{t.closest_lower - 1:.1e}",
            str(t.violations),
            str(t.refused),
            f"{t.seconds:.1f}",
        )
    console.print(rows)
    for t in report.tallies:
        for example in t.examples:
            console.print(f"  {example}", markup=False)
        for text in t.scripts:
            long = max(map(len, text.splitlines())) > 500  # files packed as text: --scripts keeps them
            console.print(f"\n{text[:300] + ' …' if long else text}", markup=False, highlight=False, soft_wrap=True)
    verdict = "no violations" if not report.violations else f"{report.violations} VIOLATIONS"
    console.print(
        f"{report.operators:,} operators, {verdict} "
        f"({report.device}, seed {report.seed}, torch {torch.__version__}, {torch.get_num_threads()} threads)",
        style="bold green" if not report.violations else "bold red",
    )
