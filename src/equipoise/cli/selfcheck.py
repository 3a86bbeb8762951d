"""`equipoise selfcheck`: the guarantees, tested on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from equipoise.cli.consoles import complain, emit_json, print_table, progress, tell
from equipoise.cli.options import Device, Json

if TYPE_CHECKING:
    from equipoise.testing import Report


def selfcheck(
    suite: Annotated[
        str,
        Argument(
            help="norms, layers or networks; equipoise-lab adds trained, programs, files and peers",
            metavar="[SUITE]",
        ),
    ] = "norms",
    minutes: Annotated[float, Option(help="look for violations this long")] = 1.0,
    device: Device = "cpu",
    seed: Annotated[int, Option(help="draw other operators by another seed", min=0)] = 0,
    json: Json = False,
) -> None:
    """Test the guarantees on your own hardware against a float64 reference.

    `norms`: random matrices and convolutions. `layers`: 1-Lipschitz layers,
    trained to break their constant. `networks`: random compositions of building
    blocks, checked node by node and attacked by pairs and Jacobians.

    Prints how many bounds were compared, how close they came, and how many were
    wrong (by more than 1e-12, the rounding of the reference): none, or the exit
    code is 1.

    With equipoise-lab, `trained` follows the gradient of truth/upper to break the
    bound of a norm, `programs` writes random programs as source code, and `files`
    damages files of every kind that the library reads.

    Examples:

      equipoise selfcheck
      equipoise selfcheck --minutes 10 --device cuda --seed 3
      equipoise selfcheck layers --minutes 5
      equipoise selfcheck programs --minutes 10
    """
    from equipoise.testing import find_suite, run

    checks = find_suite(suite)
    with progress("selfcheck") as update:
        report = run(
            checks, 60 * minutes, device, seed, lambda tally, done: update(round(100 * done), 100)
        )
    if json:
        emit_json(
            {**asdict(report), "comparisons": report.comparisons, "violations": report.violations}
        )
    else:
        _show(report)
    if report.violations:
        complain(f"{report.violations} violations: please report them")
        raise Exit(1)


def _show(report: Report) -> None:
    rows = [
        {
            "check": t.name,
            "bounds": f"{t.comparisons:,}",
            "min upper/truth − 1": f"{t.closest_upper:.1e}",
            "max lower/truth − 1": f"{t.closest_lower - 1:.1e}",
            "violations": str(t.violations),
            "refused": str(t.refused),
            "seconds": f"{t.seconds:.1f}",
        }
        for t in report.tallies
    ]
    print_table("selfcheck", rows)
    for t in report.tallies:
        tell(*(f"  {example}" for example in t.examples))
    verdict = f"{report.violations} VIOLATIONS" if report.violations else "no violations"
    tell(f"{report.comparisons:,} bounds, {verdict} ({report.device}, seed {report.seed})")
