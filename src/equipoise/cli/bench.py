"""`equipoise bench`: ratios against the alternatives, side by side in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, messages, results, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from equipoise.lab.bench.norms import Section

bench = typer.Typer(help="Speed and tightness against the alternatives, side by side in one run.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@bench.callback()
def _bench() -> None:
    """Speed and tightness against the alternatives, side by side in one run."""


@bench.command()
def norms(
    quick: Annotated[bool, typer.Option("--quick", help="A tiny subset, seconds instead of minutes.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which all contestants take turns.")] = 3,
    as_json: Json = False,
) -> None:
    """Spectral norms: SVD of all frequencies, plain Gram iteration, Ryu, matrix_norm, ARPACK.

    Convolutions of a ResNet-18 (real kernels where EQUIPOISE_DATA holds them, and
    Gaussian ones), dense matrices, growing inputs, and the memory of the gradient.

    Examples:

      equipoise bench norms
      equipoise bench norms --quick --json
    """
    from equipoise.lab.bench.norms import sections

    _sections(sections(quick, repeats), repeats, as_json)


def _sections(sections: Iterable[Section], repeats: int, as_json: bool) -> None:
    """Show sections as they are done, or all of them as one document."""
    import torch

    threads = torch.get_num_threads()
    done: list[dict[str, Any]] = []
    console = results()
    if not as_json:
        console.print(f"torch {torch.__version__}, {threads} thread(s), {repeats} round(s)")
    for section in sections:
        done.append(section.to_dict())
        if as_json:
            messages().print(f"done: {section.title}")
        else:
            _show(section, console)
    if as_json:
        emit_json({"torch": torch.__version__, "threads": threads, "repeats": repeats, "sections": done})


@bench.command()
def smoothing(
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which both sides take turns.")] = 5,
    as_json: Json = False,
) -> None:
    """Randomized smoothing: certification against a plain loop, radii against Φ⁻¹.

    Example:

      equipoise bench smoothing --json
    """
    from equipoise.lab.bench.smoothing import rows

    _report("smoothing", rows(repeats=repeats), as_json)


@bench.command()
def lipschitz(as_json: Json = False) -> None:
    """Network bounds: an audit against forward passes, the product bound against power iteration.

    The rows on trained CIFAR ResNets need their weights (EQUIPOISE_DATA).

    Example:

      equipoise bench lipschitz --json
    """
    from equipoise.lab.bench.lipschitz import rows

    _report("network bounds", rows(), as_json)


@bench.command()
def layers(
    quick: Annotated[bool, typer.Option("--quick", help="A tiny subset, seconds instead of minutes.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which all contestants take turns.")] = 5,
    as_json: Json = False,
) -> None:
    """1-Lipschitz layers: training step and exported evaluation against nn.Conv2d, and conditioning.

    64→64 3×3 on 32×32, batch 32; beside orthogonium and deel-torchlip where they are installed.

    Examples:

      equipoise bench layers
      equipoise bench layers --quick --json
    """
    from equipoise.lab.bench.layers import sections

    _sections(sections(quick, repeats), repeats, as_json)


@bench.command()
def training(
    quick: Annotated[bool, typer.Option("--quick", help="A tiny network, seconds instead of minutes.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which all contestants take turns.")] = 3,
    as_json: Json = False,
) -> None:
    """Training: a step with spectral regularisation or activation decay against the plain step, and memory.

    Example:

      equipoise bench training
    """
    from equipoise.lab.bench.training import sections

    _sections(sections(quick, repeats), repeats, as_json)


@bench.command()
def runs(
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which both sides take turns.")] = 3,
    as_json: Json = False,
) -> None:
    """Certification runs: the engine against the bare classifier, reading 10,000 stored inputs, Ray workers.

    Example:

      equipoise bench runs
    """
    from equipoise.lab.bench.runs import rows

    _report("certification runs", rows(repeats), as_json)


def _report(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    import torch

    from equipoise.lab.bench.norms import Section

    threads = torch.get_num_threads()
    if as_json:
        emit_json({"torch": torch.__version__, "threads": threads, "rows": rows})
    else:
        _show(Section(f"{title}, {threads} thread(s)", rows), results())


def _show(section: Section, console: Console) -> None:
    if section.rows:
        columns = list(section.rows[0])
        shown = table(section.title, *columns, right=tuple(columns[1:]))
        for row in section.rows:
            shown.add_row(*(_cell(column, row.get(column, "")) for column in columns))
        console.print(shown, markup=False)
    else:
        console.print(section.title, style="bold")
    if section.note:
        console.print(section.note, style="dim", markup=False)
    for goal in section.goals:
        mark, style = ("reached", "green") if goal.reached else ("missed", "red")
        console.print(f"  {goal.what}: {goal.ratio:.3f}× (goal ≤ {goal.limit}×, {mark})", style=style, markup=False)
    console.print()


def _cell(column: str, value: Any) -> str:
    from equipoise.core.bounds import round_down, round_up

    if not isinstance(value, float):
        return str(value)
    if column == "upper":
        return round_up(value, 5)
    if column == "lower":
        return round_down(value, 5)
    return f"{value:.2g}" if column == "gap" else f"{value:.4g}"
