"""`equipoise audit`: the Lipschitz bound of a saved network, as a table, JSON or an HTML report."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, messages
from equipoise.cli.options import Json, Weights, sizes
from equipoise.core.bounds import format_down, format_up
from equipoise.core.errors import InputError
from equipoise.core.files import atomic_write

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
    rtol: Annotated[float, typer.Option(help="relative gap asked of every operator norm; smaller is slower")] = 1e-3,
    chain: Annotated[
        str,
        typer.Option(
            help="closed: the dense layers at the end together; multipliers: the whole network, up to 3,000 neurons"
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
        atomic_write(html, report.to_html(f"Lipschitz audit of {model}"))
    if at is None or radius is None:
        return typer.echo(report.to_json() if json else str(report))
    rows = local_rows(loaded, at, radius, limit, seconds, rtol)
    if json:
        return emit_json({**loads(report.to_json()), "radius": radius, "local": rows})
    typer.echo(f"{report}\n{local_table(rows, radius, report.upper)}")


def audit_report(
    model: str,
    weights: Path | None = None,
    input_shape: str | None = None,
    ball: float | None = None,
    rtol: float = 1e-3,
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
    return sizes(text, "--input-shape takes positive numbers like 3,32,32")


def local_rows(
    loaded: Loaded, data: str, radius: float, limit: int, seconds: float | None, rtol: float = 1e-3
) -> list[dict[str, Any]]:
    """Bracket of the local constant, certified radius, rival and method of the first inputs of the data."""
    import numpy as np
    import torch

    from equipoise.data.load import load_dataset
    from equipoise.lipschitz import certified_radius, local_lipschitz
    from equipoise.runs.models import portable

    if limit < 1:
        raise InputError(f"--limit must be at least 1, got {limit}")
    network = portable(loaded)
    if network.batch is not None and network.batch != 1:
        raise InputError(
            f"{loaded.source} was exported with a batch of {network.batch} inputs, and --at looks at one; export it with a "
            "batch of one or with a dynamic batch dimension"
        )
    net = network.build()
    dataset = load_dataset(data)
    x, labels = dataset.batch(np.arange(min(limit, len(dataset))))
    x = x.to(next(net.parameters(), torch.zeros(())).dtype)
    messages().print(f"bounds around {len(x)} inputs …", style="dim")
    bracket = local_lipschitz(net, x, radius, seconds=seconds, rtol=rtol)
    radii = certified_radius(net, x, labels, seconds=seconds, rtol=rtol)
    note = "; ".join(text for text in (bracket.note, radii.note) if text)
    columns = zip(
        dataset.ids[: len(x)], labels.tolist(), bracket.lower.tolist(), bracket.upper.tolist(), radii.radius.tolist(),  # type: ignore[union-attr]
        radii.rivals.tolist(), radii.methods, strict=True,
    )  # fmt: skip
    names = ("input", "label", "lower", "upper", "radius", "rival", "method")
    return [dict(zip(names, (int(row[0]), *row[1:]), strict=True), note=note) for row in columns]


def local_table(rows: list[dict[str, Any]], radius: float, upper: float) -> str:
    """The rows as text; `upper` is the bound of the whole network."""
    lines = [f"on balls of radius {format_down(radius)} (ℓ2), the whole network's bound being {format_up(upper, 5)}:"]
    lines.append(f"{'input':>7} {'label':>5} {'attack':>11} {'proved':>11} {'certified':>11} {'rival':>5}  method")
    for row in rows:
        low, high, safe = format_down(row["lower"], 5), format_up(row["upper"], 5), format_down(row["radius"], 5)
        lines.append(
            f"{row['input']:>7} {row['label']:>5} {low:>11} {high:>11} {safe:>11} {row['rival']:>5}  {row['method']}"
        )
    return "\n".join(lines)
