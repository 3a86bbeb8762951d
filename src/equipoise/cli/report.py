"""`equipoise report`: several runs on one self-contained page."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from equipoise.cli import options
from equipoise.cli.consoles import complain, emit_json, tell


def report(
    runs: Annotated[
        list[Path] | None,
        Argument(metavar="RUN...", help="run directories, or certification logs (.tsv)"),
    ] = None,
    output: Annotated[Path, Option("--output", "-o", help="write the page here")] = Path(
        "report.html"
    ),
    audit: Annotated[
        list[str] | None, Option(metavar="MODEL", help="bound this network too; may be repeated")
    ] = None,
    weights: options.Weights = None,
    input_shape: options.InputShape = None,
    refresh: Annotated[
        int | None, Option(help="make the page reload itself after so many seconds", min=1)
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare runs on one page: curves, radii, attacks, bounds and their limits.

    RUN is a directory made by `equipoise certify`, `prove` or `demo`, or a
    certification log in Cohen's format. Certificates are derived from stored
    counts; nothing is sampled. The page works offline, in light and dark, on a
    phone and on paper; its numbers can be saved as JSON or CSV.

    Examples:

      equipoise report runs/a runs/b -o compare.html
      equipoise report runs/a --audit model.pt2 -o a.html
      equipoise report runs/a --json > numbers.json
      equipoise report --audit model.onnx -o audit.html
    """
    from equipoise.cli.audit import audit_report
    from equipoise.core.errors import Refused
    from equipoise.report import as_document, collect, write_report

    if not runs and not audit:
        options.refuse(
            "name at least one run directory, or a network with --audit: see equipoise report --help"
        )
    shape = options.sizes(input_shape)
    audits, notes = {}, []
    for name in audit or []:
        try:
            audits[name] = audit_report(name, weights, shape)
        except Refused as reason:
            if not runs:
                raise
            notes.append(f"{name} has no Lipschitz bound: {reason}")
            complain(notes[-1])
    data = collect(runs or [], title="Certified robustness", audits=audits, notes=notes)
    write_report(data, output, refresh)
    emit_json({**as_document(data), "report": str(output)}) if json else tell(f"wrote {output}")
