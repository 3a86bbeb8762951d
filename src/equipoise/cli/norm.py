"""`equipoise norm`: the spectral norm of every weight of a safetensors file.

From a file alone, stride, dilation, groups and padding of a convolution are unknown. With unknown input size the bracket is that
of the ungrouped stride-1 convolution over all input sizes, `sup_ω ‖E(ω)‖₂`, and its **upper** end also holds for

* every stride s ≥ 1: a strided convolution computes a subset of the stride-1 outputs;
* every amount of zero padding and every input size: a compression of the infinite convolution;
* every dilation: the symbol is evaluated at `d·ω`, the supremum is the same;
* every grouping of the same weight: the groups are blocks of rows, and the largest block norm is at most that of the stack;
* the transposed convolution with the same weight, whose matrix is the adjoint.

The **lower** end belongs to stride 1 and groups 1. Reflect and replicate padding copy pixels and are not covered.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from equipoise.cli import options
from equipoise.cli.consoles import complain, emit_json, messages, print_table

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.core.bounds import Bracket


def norm(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE",
            help="a .safetensors file, the index (.json) of a sharded checkpoint, or a folder; may be larger than memory",
        ),
    ],
    input_size: Annotated[
        str | None, Option(help="assume this spatial input size, e.g. 32,32; default: any size")
    ] = None,
    rtol: Annotated[float, Option(help="bring upper/lower − 1 below this")] = 1e-3,
    only: Annotated[
        str | None,
        Option(metavar="PATTERN", help="read only tensors of this name, e.g. 'layer1.*'"),
    ] = None,
    heads: Annotated[
        int | None,
        Option(
            help="also bound this many blocks of rows of every matrix, one per attention head",
            min=2,
        ),
    ] = None,
    fail_above: options.FailAbove = None,
    json: options.Json = False,
) -> None:
    """Prove the spectral norm of every weight of FILE: lower ≤ norm ≤ upper.

    2-D weights are matrices, 3-D to 5-D weights are convolution kernels; vectors,
    scalars and integers are listed as skipped.

    A file does not say stride, dilation, groups or padding. Without --input-size
    the upper end holds for every stride, zero padding, dilation, grouping and
    input size of the same weight; the lower end belongs to stride 1 and groups 1.
    Reflect and replicate padding are not covered. Exit code 1: an upper end is
    larger than --fail-above; 2: a tensor was refused.

    Examples:

      equipoise norm model.safetensors
      equipoise norm model.safetensors --input-size 32,32 --rtol 1e-4
      equipoise norm model.safetensors --only 'layer1.*' --fail-above 1 --json
      equipoise norm model.safetensors.index.json --only '*.q_proj.*' --heads 32
    """
    from equipoise.core.bounds import format_down, format_up
    from equipoise.core.checks import require_positive

    require_positive(rtol=rtol)
    size = options.sizes(input_size, "--input-size takes positive numbers such as 32,32")
    with messages().status(f"norms of {file.name} …"):  # only on a terminal
        rows = list(weight_rows(file, only, rtol, size, heads))

    refused = [row for row in rows if row["status"] == "refused"]
    if json:
        document = {"file": str(file), "rtol": rtol, "input_size": size, "weights": rows}
        emit_json(document | {"refused": len(refused)})
    else:
        cells = [
            {
                "weight": row["name"],
                "shape": "×".join(map(str, row["shape"])),
                "dtype": row["dtype"],
                "lower": format_down(row["lower"]) if "lower" in row else "",
                "upper": format_up(row["upper"]) if "upper" in row else "",
                "note": row["note"] if "upper" in row else f"{row['status']}: {row['note']}",
            }
            for row in rows
        ]
        print_table(file.name, cells)
    if refused:
        first = refused[0]
        complain(
            f"{len(refused)} of {len(rows)} tensors refused, the first is {first['name']}: {first['note']}"
        )
        raise Exit(2)
    if fail_above is not None:
        large = [row["name"] for row in rows if not row.get("upper", 0.0) <= fail_above]
        for name in large[:1]:
            complain(
                f"{len(large)} of {len(rows)} norms may be larger than {fail_above:g}, the first is that of {name}"
            )
            raise Exit(1)


def weight_rows(
    path: Path,
    only: str | None = None,
    rtol: float = 1e-3,
    input_size: tuple[int, ...] | None = None,
    heads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """One row per tensor of a file or of a folder of files, read and bounded one after the other.

    Args:
        path: a safetensors file, the index file of a sharded checkpoint, or a folder that holds the parts of a model.
        only: a pattern for the names of the tensors.
        rtol: relative gap to reach.
        input_size: spatial size of the input of every convolution; None: any size.
        heads: blocks of rows that get rows of their own, `NAME[0]` and so on, where the number of rows is a multiple.

    Returns:
        Rows with plain values; the status is `bracket`, `skipped` (nothing to bound, for example a bias) or `refused` (broken, or
        the options do not fit it), and `note` says why.
    """
    from equipoise.core.errors import EquipoiseError, InputError
    from equipoise.core.files import open_weights

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.suffix == ".json":
        files = _indexed_files(path)
    count = 0
    for part in files:
        with open_weights(part) as weights:
            for name in sorted(fnmatch.filter(weights.keys(), only or "*")):
                count += 1
                header = weights.get_slice(name)
                shape = tuple(header.get_shape())
                dtype = str(header.get_dtype())
                row = {"name": name, "shape": list(shape), "dtype": dtype}
                row |= {"status": "bracket", "note": ""}
                if not dtype.startswith(("F", "BF", "C")):
                    row |= {"status": "skipped", "note": f"{dtype} is not floating point"}
                elif not 2 <= len(shape) <= 5:
                    note = f"{len(shape)} dimensions: neither a matrix nor a convolution kernel"
                    row |= {"status": "skipped", "note": note}
                else:
                    try:
                        weight = weights.get_tensor(name)
                        row |= _columns(weight_bracket(weight, rtol, input_size))
                    except EquipoiseError as error:
                        row |= {"status": "refused", "note": str(error)}
                yield row
                if (
                    heads
                    and row["status"] == "bracket"
                    and len(shape) == 2
                    and shape[0] % heads == 0
                ):
                    for h, block in enumerate(weight.unflatten(0, (heads, -1))):
                        head = {"name": f"{name}[{h}]", "shape": list(block.shape)}
                        yield row | head | _columns(weight_bracket(block, rtol))
    if not count:
        raise InputError(f"{path} holds no tensor whose name matches {only or '*'!r}")


def _columns(b: Bracket) -> dict[str, Any]:
    names = ("lower", "upper", "gap", "reached", "method", "note")
    return {name: getattr(b, name) for name in names}


def _indexed_files(index: Path) -> list[Path]:
    """The files that the index of a sharded checkpoint names, in its own folder."""
    from equipoise.core.errors import InputError
    from equipoise.core.files import read_json

    document = read_json(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if (
        not isinstance(places, dict)
        or not places
        or not all(isinstance(x, str) for x in places.values())
    ):
        raise InputError(
            f"{index} is not the index of a sharded checkpoint: expected a weight_map of file names"
        )
    names = sorted(set(places.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise InputError(f"{index} names {outside[0]!r}, a file outside its own folder")
    return [index.parent / name for name in names]


def weight_bracket(
    weight: Tensor, rtol: float, input_size: tuple[int, ...] | None = None
) -> Bracket:
    """Bracket of one weight: 2-D as a matrix, 3-D to 5-D as the kernel `(out, in, *k)` of a convolution.

    Args:
        weight: the weight.
        rtol: relative gap to reach.
        input_size: spatial size of the input (zero padding of the «same» amount), one number serves every axis; None: any size.
    """

    from equipoise.core.precision import proving, require_finite, working_dtype
    from equipoise.maps.linear import convolution
    from equipoise.norms.convolution import conv_bracket
    from equipoise.norms.spectral import spectral_norm

    weight = require_finite(weight.to(working_dtype(weight.dtype)))
    if weight.dim() == 2:
        return spectral_norm(weight, rtol=rtol)
    size = input_size[0] if input_size is not None and len(input_size) == 1 else input_size
    with proving():
        return conv_bracket(convolution(weight, input_size=size), rtol)
