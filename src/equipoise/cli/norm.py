"""`equipoise norm`: the spectral norm of every weight of a safetensors file."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.consoles import complain, emit_json, progress, results, table
from equipoise.cli.options import sizes

if TYPE_CHECKING:
    from equipoise.norms.files import Reading, WeightRow


class PaddingMode(StrEnum):
    """Padding modes a file can be read with."""

    zeros = "zeros"
    circular = "circular"


def norm(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A .safetensors file, or a folder of them; they may be larger than memory."
        ),
    ],
    input_size: Annotated[
        str | None, typer.Option(help="Spatial input size, e.g. 32,32 (one number: every axis). Default: any size.")
    ] = None,
    rtol: Annotated[float, typer.Option(help="Relative gap upper/lower − 1 to reach.")] = 1e-3,
    padding: Annotated[
        PaddingMode, typer.Option(help="Padding of the convolutions («same» amount when the size is given).")
    ] = PaddingMode.zeros,
    stride: Annotated[int, typer.Option(help="Stride of every convolution in the file.")] = 1,
    only: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only tensors of this name, e.g. 'layer1.*'.")
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="FILE is a folder: show every weight file in it, and new ones as they appear."),
    ] = False,
    seconds: Annotated[float, typer.Option(help="How long to watch; default until Ctrl-C.")] = math.inf,
    every: Annotated[float, typer.Option(help="Seconds between two looks at the folder.")] = 2.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else (with --watch one line per file).")
    ] = False,
) -> None:
    """Spectral norm of every weight of FILE, as brackets: lower ≤ norm ≤ upper.

    2-D weights are matrices, 3-D to 5-D weights convolution kernels (out, in, ...);
    vectors, scalars and integers are listed as skipped.

    A file does not say stride, dilation, groups or padding. Without --input-size the
    upper end holds for every stride, every zero padding, every dilation, every
    grouping and every input size of the same weight; the lower end belongs to
    stride 1 and groups 1. Reflect and replicate padding are not covered.

    Examples:

      equipoise norm model.safetensors
      equipoise norm model.safetensors --input-size 32,32 --rtol 1e-4
      equipoise norm model.safetensors --only 'layer1.*' --json
      equipoise norm checkpoints/ --watch --seconds 600
    """
    from equipoise.norms.files import Reading

    known = None if input_size is None else sizes(input_size, "--input-size takes positive numbers such as 32,32")
    reading = Reading(rtol, known, padding.value, stride)
    if watch:
        _watch(file, reading, only, seconds, every, as_json)
        return
    rows = _rows(file, reading, only)
    refused = [row for row in rows if row.status == "refused"]
    if as_json:
        emit_json(_document(file, reading, rows))
    else:
        _show(file, rows)
    if refused:
        first = refused[0]
        complain(f"{len(refused)} of {len(rows)} tensors refused, the first is {first.name}: {first.note}")
        raise typer.Exit(2)


def _watch(folder: Path, reading: Reading, only: str | None, seconds: float, every: float, as_json: bool) -> None:
    """Tables, or lines of JSON, of every file that appears; one that cannot be read is named, and the watch goes on."""
    from equipoise.core.errors import EquipoiseError, one_line
    from equipoise.norms.files import appearing

    try:
        for path in appearing(folder, seconds, every):
            try:
                rows = _rows(path, reading, only)
            except EquipoiseError as error:
                complain(one_line(error))
                continue
            if as_json:
                emit_json(_document(path, reading, rows), indent=None)
            else:
                _show(path, rows, str(path.relative_to(folder)))
    except KeyboardInterrupt:
        return


def _rows(file: Path, reading: Reading, only: str | None) -> list[WeightRow]:
    from equipoise.core.errors import InputError
    from equipoise.norms.files import weight_files, weight_names, weight_norms

    parts = weight_files(file)
    names = {part: weight_names(part, only, empty=len(parts) > 1) for part in parts}
    if not any(names.values()):
        raise InputError(f"no tensor of {file} matches {only!r}")
    rows = []
    with progress() as bar:
        task = bar.add_task(f"norms of {file.name}", total=sum(map(len, names.values())))
        for part, wanted in names.items():
            for row in weight_norms(part, reading, wanted) if wanted else ():
                rows.append(row)
                bar.advance(task)
    return rows


def _document(file: Path, reading: Reading, rows: list[WeightRow]) -> dict[str, object]:
    return {
        "file": str(file),
        "rtol": reading.rtol,
        "input_size": None if reading.input_size is None else list(reading.input_size),
        "padding": reading.padding,
        "stride": reading.stride,
        "weights": [row.to_dict() for row in rows],
        "refused": sum(row.status == "refused" for row in rows),
    }


def _show(file: Path, rows: list[WeightRow], title: str | None = None) -> None:
    from equipoise.core.bounds import format_down, format_up

    columns = ("weight", "shape", "dtype", "lower", "upper", "note")
    result = table(file.name if title is None else title, *columns, right=("lower", "upper"))
    for row in rows:
        shape = "×".join(map(str, row.shape))
        if row.bracket is not None:
            ends = format_down(float(row.bracket.lower)), format_up(float(row.bracket.upper))
            result.add_row(row.name, shape, row.dtype, *ends, row.note)
        else:
            style = "red" if row.status == "refused" else "dim"
            result.add_row(row.name, shape, row.dtype, "", "", f"{row.status}: {row.note}", style=style)
    results().print(result, markup=False)
