"""`equipoise bench`: ratios against the alternatives, side by side in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, messages, print_table, results, tell
from equipoise.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from equipoise_lab.bench.norms import Section

bench = typer.Typer(
    help="Measure speed and tightness beside the alternatives.",
    no_args_is_help=True,
)


@bench.callback()
def _bench() -> None:
    """Measure speed and tightness beside the alternatives."""


@bench.command()
def norms(
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny subset, seconds instead of minutes.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds in which all contestants take turns.")
    ] = 3,
    device: Annotated[
        str, typer.Option(help="On cuda: the thesis' timings of GPUs as rows of its tables.")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Time spectral norms beside SVD, power iteration and ARPACK.

    Convolutions of a ResNet-18 (real kernels where EQUIPOISE_DATA holds them, and
    Gaussian ones), dense matrices, growing inputs, the memory of the gradient.

    Examples:

      equipoise bench norms
      equipoise bench norms --quick --json
      equipoise bench norms --device cuda
    """
    from equipoise_lab.bench.norms import sections

    if device != "cpu":
        from equipoise.runs.jobs import usable_device
        from equipoise_lab.experiments.page import speed_rows

        usable_device(device)
        rows = list(speed_rows(device))
        if as_json:
            emit_json(rows)
        else:
            tell("\n".join(rows))
        return
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
        emit_json(
            {"torch": torch.__version__, "threads": threads, "repeats": repeats, "sections": done}
        )


@bench.command()
def smoothing(
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which both sides take turns.")] = 5,
    as_json: Json = False,
) -> None:
    """Time certification by smoothing beside a plain loop.

    Example:

      equipoise bench smoothing --json
    """
    from equipoise_lab.bench.smoothing import rows

    _report("smoothing", rows(repeats=repeats), as_json)


@bench.command()
def lipschitz(as_json: Json = False) -> None:
    """Time audits, and compare bounds with power iteration.

    The rows on trained CIFAR ResNets need their weights (EQUIPOISE_DATA).

    Example:

      equipoise bench lipschitz --json
    """
    from equipoise_lab.bench.lipschitz import rows

    _report("network bounds", rows(), as_json)


@bench.command()
def verification(
    images: Annotated[int, typer.Option(min=1, max=200, help="Images of each network.")] = 50,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds of processor time for each image.")
    ] = 60.0,
    radii: Annotated[bool, typer.Option(help="Compare largest radii with α-CROWN.")] = False,
    as_json: Json = False,
) -> None:
    """Prove and attack the networks of the SDP-CROWN release.

    ℓ2 robustness at the radii of the release: proved, and not broken by attacks.

    With --radii, the largest radius beside that of α-CROWN, where `auto_LiRPA` is
    installed. Needs l2-verification in EQUIPOISE_DATA; --radii needs mnist-6x100.

    Examples:

      equipoise bench verification --images 10
      equipoise bench verification --radii --images 5
    """
    from equipoise_lab.bench import alpha_crown, verification

    if not radii:
        rows = verification.rows(images, seconds)
        return _plain_table("robust at the radius", rows, as_json)
    if not alpha_crown.is_available():
        from equipoise.core.errors import InputError

        raise InputError("--radii compares with auto_LiRPA, which cannot be imported: install it")
    _plain_table("largest radius", alpha_crown.rows(images), as_json)


@bench.command()
def bundles(
    images: Annotated[int, typer.Option(min=1, max=10000, help="Test images.")] = 1000,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training.")] = 60,
    as_json: Json = False,
) -> None:
    """Check dense bundles in exact integers, beside a Dafny rule.

    Trains two networks of its shapes. Needs fashion_mnist.npz in EQUIPOISE_DATA.

    Example:

      equipoise bench bundles --images 200 --epochs 5
    """
    from equipoise_lab.bench.bundles import rows

    _plain_table("right and robust within the radius", rows(images, epochs), as_json)


def _plain_table(title: str, rows: list[dict[str, object]], as_json: bool) -> None:
    """Print rows as a table or as JSON."""
    if as_json:
        emit_json(rows)
        return
    print_table(title, [{name: str(value) for name, value in row.items()} for row in rows])


@bench.command()
def layers(
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny subset, seconds instead of minutes.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds in which all contestants take turns.")
    ] = 5,
    as_json: Json = False,
) -> None:
    """Time 1-Lipschitz layers beside nn.Conv2d.

    64→64 channels, 3×3, on 32×32 pixels, batch 32; beside orthogonium and
    deel-torchlip where they are installed.

    Examples:

      equipoise bench layers
      equipoise bench layers --quick --json
    """
    from equipoise_lab.bench.layers import sections

    _sections(sections(quick, repeats), repeats, as_json)


@bench.command()
def training(
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny network, seconds instead of minutes.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds in which all contestants take turns.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Time regularized training steps beside the plain step.

    Example:

      equipoise bench training
    """
    from equipoise_lab.bench.training import sections

    _sections(sections(quick, repeats), repeats, as_json)


@bench.command()
def runs(
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which both sides take turns.")] = 3,
    as_json: Json = False,
) -> None:
    """Time runs, stored inputs and Ray workers.

    Example:

      equipoise bench runs
    """
    from equipoise_lab.bench.runs import rows

    _report("certification runs", rows(repeats), as_json)


@bench.command("all")
def everything(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Store the measurements in this file.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which both sides take turns.")] = 5,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, …")] = "cpu",
    only: Annotated[
        list[str] | None, typer.Option(help="Part of a measurement's name; may be given often.")
    ] = None,
    cpu_time: Annotated[
        bool,
        typer.Option(
            "--cpu-time",
            help="Processor seconds instead of wall time: for a busy machine and one thread.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes, to see that everything runs.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of the documentation.")
    ] = False,
) -> None:
    """Measure every ratio, with quartiles over the rounds.

    Examples:

      equipoise bench all --json before.json
      equipoise bench all --only dense --rounds 9 --device cuda
    """
    from equipoise.core.files import atomic_write
    from equipoise_lab.bench.pairs import document, markdown, measure, read

    measured = []
    for one in measure(rounds, device, only or (), quick, cpu_time):
        measured.append(one)
        messages().print(
            f"{one.name}: {one.ratio:.3g} ({one.low:.3g} – {one.high:.3g})", markup=False
        )
    stored = document(measured, rounds, device, cpu_time)
    if json_file is not None:
        atomic_write(json_file, json.dumps(stored, indent=2, ensure_ascii=False) + "\n")
    if as_markdown or json_file is None:
        tell(markdown(*read(stored, "this run")))


@bench.command()
def merge(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Documents of `equipoise bench all --json`, of one machine."),
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Store the joined document in this file.")
    ] = None,
) -> None:
    """Join stored runs of parts (`--only`); later ones count.

    Example:

      equipoise bench merge dense.json smoothing.json --json all.json
    """
    from equipoise.core.files import atomic_write, read_json
    from equipoise_lab.bench.pairs import markdown, merged, read

    stored = merged({str(path): read_json(path) for path in runs})
    if json_file is not None:
        atomic_write(json_file, json.dumps(stored, indent=2, ensure_ascii=False) + "\n")
    tell(markdown(*read(stored, "the joined runs")))


@bench.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A document of `equipoise bench all --json`.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: Json = False,
) -> None:
    """Compare two stored runs.

    A difference is reported where the quartiles of the ratios do not overlap.

    Example:

      equipoise bench compare before.json after.json
    """
    from equipoise.core.files import read_json
    from equipoise_lab.bench import pairs
    from equipoise_lab.bench.norms import Section

    (a, old), (b, new) = (pairs.read(read_json(path), str(path)) for path in (before, after))
    rows = pairs.compare(old, new)
    if as_json:
        emit_json({"A": a, "B": b, "rows": rows})
    else:
        _show(
            Section(
                "ratios of ours over the baseline: median (quartiles)", rows, note=f"A: {a}\nB: {b}"
            ),
            results(),
        )


@bench.command()
def states(
    other: Annotated[
        Path, typer.Argument(help="A checkout of the other state: the folder with `src`.")
    ],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which both states take turns.")] = 5,
    only: Annotated[str, typer.Option(help="Part of a case's name.")] = "",
    as_json: Json = False,
) -> None:
    """Compare this checkout with another one, in processor time.

    Example:

      equipoise bench states ../before
    """
    import equipoise
    from equipoise.core import InputError
    from equipoise_lab.bench.norms import Section
    from equipoise_lab.bench.states import compare as in_turns

    if not (
        other / "src" / "equipoise"
    ).is_dir():  # the installed state would be compared with itself
        raise InputError(f"{other} has no src/equipoise: name the folder of a checkout")

    rows = in_turns(other, Path(equipoise.__file__).parents[2], rounds, only)
    if as_json:
        emit_json({"rows": rows})
    else:
        _show(Section("processor time, new over old: median of the rounds", rows), results())


@bench.command()
def growth(
    what: Annotated[str, typer.Argument(help="channels, kernel, input, depth or batch.")],
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which all sizes take turns.")] = 3,
    most: Annotated[int | None, typer.Option(help="Leave larger values out.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the figure into this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two tiny values.")] = False,
    as_json: Json = False,
) -> None:
    """Measure how the cost grows with one size.

    Examples:

      equipoise bench growth channels --figure channels.png
      equipoise bench growth input --most 256
    """
    from equipoise_lab.bench.growth import draw, grow

    section = grow(what, repeats, most, quick)
    if figure is not None:
        draw(section, figure)
    _sections([section], repeats, as_json)


def _report(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    import torch

    from equipoise_lab.bench.norms import Section

    threads = torch.get_num_threads()
    if as_json:
        emit_json({"torch": torch.__version__, "threads": threads, "rows": rows})
    else:
        _show(Section(f"{title}, {threads} thread(s)", rows), results())


def _show(section: Section, console: Console) -> None:
    if section.rows:
        columns = list(section.rows[0])
        cells = [
            {column: _cell(column, row.get(column, "")) for column in columns}
            for row in section.rows
        ]
        print_table(section.title, cells)
    else:
        console.print(section.title, style="bold")
    if section.note:
        console.print(section.note, style="dim", markup=False)
    for goal in section.goals:
        mark, style = ("reached", "green") if goal.reached else ("missed", "red")
        console.print(
            f"  {goal.what}: {goal.ratio:.3f}× (goal ≤ {goal.limit}×, {mark})",
            style=style,
            markup=False,
        )
    console.print()


def _cell(column: str, value: Any) -> str:
    from equipoise.core.bounds import format_down, format_up

    if not isinstance(value, float):
        return str(value)
    if column == "upper":
        return format_up(value, 5)
    if column == "lower":
        return format_down(value, 5)
    return f"{value:.2g}" if column == "gap" else f"{value:.4g}"
