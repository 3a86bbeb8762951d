"""`equipoise demo`: the main job on the bundled digits: train, audit, certify, attack, report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, messages, progress, results, table
from equipoise.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from equipoise.report import ReportData


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the networks, the runs and the report.")] = Path(
        "equipoise-demo"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds: every step, little of each.")] = False,
    as_json: Json = False,
) -> None:
    """The main job on bundled digits, in a minute or two: no download, no GPU.

    Trains a 1-Lipschitz network and one under noise, bounds both, certifies them by margin
    and by smoothing (Cohen, CPM, LVM-RS with and without Lipschitz), attacks them inside every
    certificate and writes OUT/report.html. Exit code 1: an attack contradicts a certificate.

    Examples:

      equipoise demo
      equipoise demo --out /tmp/demo --quick
      equipoise report equipoise-demo/runs/* -o again.html
    """
    import torch

    from equipoise.demo import QUICK, Settings, showcase

    torch.set_num_threads(1)  # networks this small spend more time on sharing work than on doing it

    began = time.monotonic()
    with _telling(quiet=as_json) as tell:
        data = showcase(out, QUICK if quick else Settings(), tell)
    seconds = time.monotonic() - began
    page = out / "report.html"
    if as_json:
        from equipoise.report.collect import as_document

        emit_json({**as_document(data), "report": str(page), "seconds": round(seconds, 1)})
    else:
        _show(data, results())
        _close(data, page, seconds, results())
    if data.tested is None or data.tested.broken:
        said = "nothing was attacked"
        if data.tested is not None:
            said = f"an attack contradicts a certificate, please report this: {'; '.join(data.tested.where[:3])}"
        messages().print(f"equipoise: {said}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1)


@contextmanager
def _telling(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar per step on a terminal, a line per step elsewhere; nothing when only JSON is wanted and nobody watches."""
    console, tasks = messages(), dict[str, Any]()
    with progress() as bar:

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                if not console.is_terminal and not quiet:
                    console.print(what, markup=False, soft_wrap=True)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield tell


def _show(data: ReportData, console: Console) -> None:
    from equipoise.core.accuracy import percent
    from equipoise.core.bounds import format_down, format_up
    from equipoise.lipschitz.logs import show_log

    bounds = ("product", "fused", "best proved", "near some inputs")
    shown = table("how much the networks can stretch a distance, at most", "network", *bounds, right=bounds)
    for a in data.audits:
        logs = [show_log(float(a.bound[k])) for k in ("log_product", "log_fused", "log_upper")]
        shown.add_row(a.model, *logs, format_up(max(p["upper"] for p in a.local), 4) if a.local else "")
    console.print(shown, markup=False)
    levels = (0.0, 0.1, 0.25, 0.5)
    numbers = (*(f"ε = {e:g}" for e in levels), "average radius")
    shown = table("certified accuracy, at least", "network", "procedure", *numbers, right=numbers)
    for s in data.series:
        shares = [f"{percent(float(s.accuracy(e)), 1)} %" for e in levels]
        shown.add_row(s.model, s.procedure, *shares, format_down(s.average_radius, 3))
    for attack in data.attacks:
        shares = [f"{100 * float(attack.accuracy(e)):.1f} %" for e in levels]
        shown.add_row(attack.model, f"under attack ({attack.kind}, {attack.run}), at most", *shares, "")
    console.print(shown, markup=False)


def _close(data: ReportData, page: Path, seconds: float, console: Console) -> None:
    if data.tested is not None and not data.tested.broken:
        line = f"{data.tested.tried:,} inputs attacked inside a certified radius, no certificate broken"
        console.print(line, style="bold green")
    console.print(f"{seconds:.0f} s; the report: {page}", soft_wrap=True, markup=False)
    console.print(
        f"again from the stored runs: equipoise report {page.parent}/runs/* -o again.html", soft_wrap=True, markup=False
    )
