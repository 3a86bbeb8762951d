"""`equipoise audit`: the Lipschitz bound of a saved network, as a table, JSON or an HTML report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli import options
from equipoise.cli.consoles import complain, emit_json, messages, print_table, tell

if TYPE_CHECKING:
    from equipoise.checkpoints.sources import Loaded
    from equipoise.lipschitz.report import Report


def audit(
    model: options.Model,
    weights: options.Weights = None,
    input_shape: options.InputShape = None,
    ball: Annotated[float | None, typer.Option(help="bound only on inputs of at most this ℓ2 norm")] = None,
    rtol: Annotated[float, typer.Option(help="relative gap of every operator norm; smaller is slower")] = 1e-3,
    chain: Annotated[
        str,
        typer.Option(
            help="closed: the dense layers at the end together; multipliers: the whole network, up to 3,000 neurons"
        ),
    ] = "closed",
    at: Annotated[str | None, typer.Option(help="also around the first inputs of this data: digits, a .npz, …")] = None,
    radius: Annotated[float | None, typer.Option(help="--at: of the ball around each input, in ℓ2")] = None,
    limit: Annotated[int, typer.Option(min=1, help="--at: how many inputs")] = 5,
    html: Annotated[Path | None, typer.Option(help="write the report to this file")] = None,
    fail_above: options.FailAbove = None,
    json: options.Json = False,
) -> None:
    """How much can this network stretch a distance between inputs? A proved upper bound, layer by layer.

    MODEL is a program saved by torch.export, an ONNX file, a checkpoint directory (safetensors
    and JSON), or package.module:factory. Nothing in a file is executed: what is not plain weights and
    tensor operations is refused, and so is a network with an operation that has no rule.
    Exit code 1: the bound is larger than --fail-above.

    Examples:

      equipoise audit model.pt2 --html report.html
      equipoise audit model.onnx --fail-above 10
      equipoise audit package.module:factory --weights weights.safetensors --input-shape 3,32,32
      equipoise audit checkpoint/ --at digits --radius 0.1
    """
    from equipoise.checkpoints import load_model
    from equipoise.core.bounds import format_down, format_up
    from equipoise.core.files import atomic_write

    if (at is None) != (radius is None):
        options.refuse("--at and --radius go together: the data, and the size of the ball around each of its inputs")
    local: list[dict[str, Any]] = []
    with messages().status(f"bounding {model} …"):  # only on a terminal
        loaded = load_model(model, weights)  # once: a factory may draw its weights
        report = audit_report(loaded, shape=options.sizes(input_shape), ball=ball, rtol=rtol, chain=chain)
        if at is not None and radius is not None:
            local = local_rows(loaded, at, radius, limit, rtol)
    if html is not None:
        atomic_write(html, report.to_html(f"Lipschitz audit of {model}"))
    if json:
        emit_json(report.to_dict() | ({"radius": radius, "local": local} if local else {}))
    else:
        tell(str(report))
    if local and not json:
        forms = {"lower": format_down, "upper": format_up, "radius": format_down}
        rows = [{name: forms.get(name, str)(value) for name, value in row.items()} for row in local]
        print_table(f"on balls of radius {format_down(radius or 0.0)} (ℓ2)", rows)
    if fail_above is not None and not report.upper <= fail_above:
        complain(f"the bound {format_up(report.upper)} is larger than {fail_above:g}")
        raise typer.Exit(1)


def audit_report(
    source: str | Loaded, weights: Path | None = None, shape: tuple[int, ...] | None = None, **settings: Any
) -> Report:
    """The report of a model.

    Args:
        source: what `load_model` takes, or what it returned.
        weights: of a factory.
        shape: of one input, where the source does not say it.
        **settings: ball, rtol and chain of `lipschitz_bound`.
    """
    from equipoise.checkpoints import load_model
    from equipoise.lipschitz.bound import lipschitz_bound
    from equipoise.report.audits import example_of

    loaded = load_model(source, weights) if isinstance(source, str) else source
    return lipschitz_bound(loaded.model, example_of(loaded, shape), **settings)


def local_rows(loaded: Loaded, data: str, radius: float, limit: int, rtol: float) -> list[dict[str, Any]]:
    """Bracket of the local constant, certified radius, rival and method of the first inputs of the data.

    Args:
        loaded: the model.
        data: as for `load_dataset`.
        radius: of the balls.
        limit: how many inputs.
        rtol: relative gap of every operator norm.
    """
    import torch

    from equipoise.data.load import load_dataset
    from equipoise.lipschitz import certified_radius, local_lipschitz
    from equipoise.runs.models import portable

    network = portable(loaded)
    if network.batch not in (None, 1):
        options.refuse(
            f"{loaded.source} was exported with a batch of {network.batch} inputs, and --at looks at one; export it with a "
            "batch of one or with a dynamic batch dimension"
        )
    net = network.build()
    dataset = load_dataset(data)
    x, labels = dataset.batch(range(min(limit, len(dataset))))
    x = x.to(next(net.parameters(), torch.zeros(())).dtype)
    bracket = local_lipschitz(net, x, radius, rtol=rtol)
    radii = certified_radius(net, x, labels, rtol=rtol)
    lower, upper = torch.as_tensor(bracket.lower), torch.as_tensor(bracket.upper)
    note = "; ".join(filter(None, (bracket.note, radii.note)))
    return [
        {
            "input": int(dataset.ids[i]),
            "label": int(labels[i]),
            "lower": float(lower[i]),
            "upper": float(upper[i]),
            "radius": float(radii.radius[i]),
            "rival": int(radii.rivals[i]),
            "method": radii.methods[i],
            "note": note,
        }
        for i in range(len(x))
    ]
