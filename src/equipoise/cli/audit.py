"""`equipoise audit`: the Lipschitz bound of a saved network, as a table, JSON or an HTML report."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json
from equipoise.cli.options import Json, Weights
from equipoise.core.errors import InputError
from equipoise.core.files import write_whole

if TYPE_CHECKING:
    from equipoise.checkpoints.sources import Loaded
    from equipoise.lipschitz.report import Report


def audit(
    model: Annotated[
        str, typer.Argument(help="a .pt2 or .onnx file, a checkpoint directory, or package.module:factory")
    ],
    weights: Weights = None,
    input_shape: Annotated[str | None, typer.Option(help="shape of one input without the batch, e.g. 3,32,32")] = None,
    ball: Annotated[float | None, typer.Option(help="bound only on inputs of at most this ℓ2 norm")] = None,
    rtol: Annotated[float, typer.Option(help="relative gap asked of every operator norm; smaller is slower")] = 0.05,
    chain: Annotated[
        str,
        typer.Option(
            help="dense layers at the end: closed, or with cvxpy sdp (= lipsdp), lipsdp, eclipse; the whole network: multipliers"
        ),
    ] = "closed",
    at: Annotated[str | None, typer.Option(help="also around the first inputs of this data: digits, a .npz, …")] = None,
    radius: Annotated[float | None, typer.Option(help="--at: of the ball around each input, in ℓ2")] = None,
    limit: Annotated[int, typer.Option(help="--at: how many inputs")] = 5,
    seconds: Annotated[float | None, typer.Option(help="--at: budget per input and bound")] = None,
    html: Annotated[Path | None, typer.Option(help="write the report to this file")] = None,
    json: Json = False,
) -> None:
    """How much can this network stretch a distance between inputs? A proved upper bound, layer by layer.

    MODEL is a program saved by torch.export, an ONNX file, a checkpoint directory (safetensors
    and JSON), or package.module:factory. Nothing in a file is executed: what is not plain weights and
    tensor operations is refused, and so is a network with an operation that has no rule.

    Examples:

      equipoise audit model.pt2 --html report.html
      equipoise audit package.module:factory --weights weights.safetensors --input-shape 3,32,32
      equipoise audit package.module:factory --input-shape 3,32,32 --ball 10 --json
      equipoise audit checkpoint/ --at digits --radius 0.1
    """
    if (at is None) != (radius is None):
        raise InputError("--at and --radius go together: the data, and the size of the ball around each of its inputs")
    from equipoise.checkpoints import load_model

    loaded = load_model(model, weights)  # once: a factory may draw its weights
    report = audit_report(model, weights, input_shape, ball, rtol, chain, loaded)
    if html is not None:
        write_whole(html, report.to_html(f"Lipschitz audit of {model}"))
    if at is None or radius is None:
        return typer.echo(report.to_json() if json else str(report))
    from equipoise.cli.audit_local import local_rows, local_table

    rows = local_rows(loaded, at, radius, limit, seconds)
    if json:
        return emit_json({**loads(report.to_json()), "radius": radius, "local": rows})
    typer.echo(f"{report}\n{local_table(rows, radius, report.upper)}")


def audit_report(
    model: str,
    weights: Path | None = None,
    input_shape: str | None = None,
    ball: float | None = None,
    rtol: float = 0.05,
    chain: Any = "closed",
    loaded: Loaded | None = None,
) -> Report:
    """The report of what `model` names, or was `loaded` from there; every failure is an `EquipoiseError` with one sentence."""
    import torch
    from torch.export import ExportedProgram

    from equipoise.checkpoints import load_model
    from equipoise.lipschitz.bound import lipschitz_bound

    shape = parse_shape(input_shape) if input_shape is not None else None
    loaded = load_model(model, weights) if loaded is None else loaded
    if isinstance(loaded.model, ExportedProgram):
        if shape is not None:
            raise InputError(f"{model} has its own input shape: leave out --input-shape")
        return lipschitz_bound(loaded.model, ball=ball, rtol=rtol, chain=chain)
    if loaded.examples is not None and shape is None:
        return lipschitz_bound(loaded.model, loaded.examples, ball=ball, rtol=rtol, chain=chain)
    net, shape = loaded.model, shape or loaded.input_shape
    if shape is None:
        raise InputError("the bound depends on the input's shape: add --input-shape, e.g. --input-shape 3,32,32")
    parameter = next(net.parameters(), torch.zeros(()))
    return lipschitz_bound(net, torch.zeros(1, *shape, dtype=parameter.dtype), ball=ball, rtol=rtol, chain=chain)


def parse_shape(text: str) -> tuple[int, ...]:
    """`3,32,32` → (3, 32, 32).

    >>> parse_shape("3,32,32")
    (3, 32, 32)
    """
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or any(n < 1 for n in shape):
        raise InputError(f"--input-shape takes positive numbers like 3,32,32, got {text!r}")
    return shape
