"""`equipoise demo`: the main job on the bundled digits: train, certify, prove, attack, audit, report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from equipoise.cli.consoles import complain, emit_json, print_table, progress, say, tell
from equipoise.cli.options import Json

if TYPE_CHECKING:
    from equipoise.report import ReportData


def demo(
    out: Annotated[
        Path, Option("--out", "-o", help="write networks, runs and report into this folder")
    ] = Path("equipoise-demo"),
    quick: Annotated[bool, Option("--quick", help="do a little of every step, in seconds")] = False,
    json: Json = False,
) -> None:
    """Train, audit, certify and attack on bundled digits: no download, no GPU.

    Takes a minute or two. Trains a network under noise beside a 1-Lipschitz one,
    bounds both, certifies them by proof and by smoothing (Cohen, rivals, LVM-RS
    with and without a Lipschitz constant), attacks every certificate inside its
    radius and writes OUT/report.html. Exit code 1: a certificate broke.

    Examples:

      equipoise demo
      equipoise demo --out /tmp/demo --quick
      equipoise report equipoise-demo/runs/* -o again.html
    """
    import torch

    from equipoise.demo import QUICK, Settings, showcase
    from equipoise.report import as_document

    torch.set_num_threads(1)  # networks this small spend more time on sharing work than on doing it
    steps: set[str] = set()
    with progress("demo") as update:

        def show(what: str, done: int, total: int) -> None:
            """A line per step, and a bar on a terminal."""
            if what not in steps and not json:
                say(what)
            steps.add(what)
            update(done, total, description=what)

        data = showcase(out, QUICK if quick else Settings(), show)
    if json:
        emit_json({**as_document(data), "report": str(out / "report.html")})
    else:
        _show(data, out)
    if data.tested is None or data.tested.broken:
        complain(
            f"an attack contradicts a certificate, or nothing was attacked, please report this: {data.tested}"
        )
        raise Exit(1)


def _show(data: ReportData, out: Path) -> None:
    from equipoise.core.accuracy import percent
    from equipoise.core.bounds import format_up
    from equipoise.lipschitz.logs import show_log

    bounds = [
        {"network": name, "best proved": show_log(bound["log_upper"])}
        for name, bound in data.audits.items()
    ]
    print_table("how much the networks can stretch a distance, at most", bounds)

    levels = (0.0, 0.1, 0.25, 0.5)
    rows = []
    for s in data.series:
        shares = {f"ε = {e}": f"{percent(float(s.results.accuracy(e)), 1)} %" for e in levels}
        rows.append({"network": s.model, "procedure": s.procedure, **shares})
    for attack in data.attacks:
        shares = {f"ε = {e}": f"{format_up(100 * float(attack.accuracy(e)), 3)} %" for e in levels}
        name = f"under attack ({attack.kind}, {attack.run}), at most"
        rows.append({"network": attack.model, "procedure": name, **shares})
    print_table("certified accuracy, at least", rows)
    if data.tested is not None and not data.tested.broken:
        tell(
            f"{data.tested.tried:,} certificates attacked inside their radius, no certificate broken"
        )
    tell(
        f"the report: {out / 'report.html'}",
        f"again from the stored runs: equipoise report {out}/runs/* -o again.html",
    )
