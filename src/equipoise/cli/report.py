"""`equipoise report`: several runs on one self-contained page."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.consoles import emit_json, tell
from equipoise.core.errors import InputError


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="run directories, or certification logs (.tsv)")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the page")] = Path("report.html"),
    audit: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="bound this network too; may be given several times")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="weights for a factory given to --audit, as .safetensors")
    ] = None,
    input_shape: Annotated[str | None, typer.Option(help="shape of one input for --audit, e.g. 3,32,32")] = None,
    alpha: Annotated[float | None, typer.Option(help="risk per input; default that of each run")] = None,
    title: Annotated[str | None, typer.Option(help="heading of the page")] = None,
    refresh: Annotated[int | None, typer.Option(help="the page reloads itself after so many seconds", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the numbers as one JSON document as well")] = False,
) -> None:
    """Compare runs on one page: curves, radii, attacks, bounds, and what is not guaranteed.

    RUN is a directory made by `equipoise certify`, `prove` or `demo`, or a certification log in
    Cohen's format; certificates are derived from stored counts, nothing is sampled. The page
    works offline, in light and dark, on a phone and on paper; every number on it can be saved
    as JSON or CSV.

    Examples:

      equipoise report runs/a runs/b -o compare.html
      equipoise report runs/a --audit model.pt2 -o a.html
      equipoise report runs/a --alpha 0.01 --json > numbers.json
      equipoise report --audit package.module:factory --input-shape 3,32,32 -o audit.html
    """
    from equipoise.cli.audit import parse_shape
    from equipoise.report import ReportData, audit_source, collect, write_report
    from equipoise.report.collect import as_document

    if not runs and not audit:
        raise InputError("name at least one run directory, or a network with --audit: see equipoise report --help")
    if alpha is not None and not 0 < alpha < 1:
        raise InputError(f"the risk alpha must lie strictly between 0 and 1, got {alpha}")
    shape = parse_shape(input_shape) if input_shape is not None else None
    audits = [audit_source(name, weights, shape) for name in audit or []]
    if runs:
        data = collect(runs, title=title or "Certified robustness", alpha=alpha, audits=audits)
    else:
        data = ReportData(title or "Lipschitz audit", audits=tuple(audits))
    write_report(data, output, refresh)
    if as_json:
        emit_json({**as_document(data), "report": str(output)})
    else:
        tell(f"wrote {output}")
