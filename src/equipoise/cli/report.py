"""`equipoise report`: several runs on one self-contained page."""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.consoles import emit_json, say, tell
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
    watch: Annotated[
        bool, typer.Option("--watch", help="follow running certifications in the browser, on this machine only")
    ] = False,
    port: Annotated[int, typer.Option(help="of --watch; default: a free one")] = 0,
    minutes: Annotated[float, typer.Option(help="--watch ends after this long, or when the runs are finished")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="print the numbers as one JSON document as well")] = False,
) -> None:
    """Compare runs on one page: curves, radii, attacks, bounds, and what is not guaranteed.

    RUN is a directory made by `equipoise certify` or `equipoise demo`, or a certification log in
    Cohen's format; certificates are derived from stored counts, nothing is sampled. The page
    works offline, in light and dark, on a phone and on paper; every number on it can be saved
    as JSON or CSV. With --watch it is served on the loopback interface while runs go on, and
    written to the file at the end.

    Examples:

      equipoise report runs/a runs/b -o compare.html
      equipoise report runs/a --audit model.pt2 -o a.html
      equipoise report runs/a --alpha 0.01 --json > numbers.json
      equipoise report runs/a --watch
      equipoise report --audit package.module:factory --input-shape 3,32,32 -o audit.html
    """
    from equipoise.cli.audit import parse_shape
    from equipoise.report.audits import audit_source
    from equipoise.report.collect import as_document, audits_only, collect
    from equipoise.report.page import plotly_source, write_report

    if not runs and not audit:
        raise InputError("name at least one run directory, or a network with --audit: see equipoise report --help")
    if alpha is not None and not 0 < alpha < 1:
        raise InputError(f"the risk alpha must lie strictly between 0 and 1, got {alpha}")
    plotly_source()
    if watch:
        if not runs or audit or as_json:
            raise InputError("--watch follows run directories; leave --audit and --json out")
        return _follow(runs, output, title or "Certified robustness", alpha, port, minutes)
    shape = parse_shape(input_shape) if input_shape is not None else None
    found = [audit_source(name, weights, shape) for name in audit or []]
    if runs:
        data = collect(runs, title=title or "Certified robustness", alpha=alpha, audits=found)
    else:
        data = audits_only(found, title or "Lipschitz audit")
    write_report(data, output)
    if as_json:
        emit_json({**as_document(data), "report": str(output)})
    else:
        tell(f"wrote {output}")


def _follow(runs: list[Path], output: Path, title: str, alpha: float | None, port: int, minutes: float) -> None:
    from equipoise.report.watch import follow

    if not 0 <= port < 65536:
        raise InputError(f"a port lies between 0 and 65535, got {port}")
    if not 0 < minutes <= 7 * 24 * 60:
        raise InputError(f"--minutes must be positive and at most a week, got {minutes}")
    why = follow(
        runs, output, title=title, alpha=alpha, port=port, seconds=60 * minutes,
        announce=lambda address: say(f"following at {address} (Ctrl-C ends it)"),
    )  # fmt: skip
    tell(f"{why}; wrote {output}")
