"""`equipoise audit`: the Lipschitz bound of a saved network, as a table, JSON or an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from equipoise.cli import options
from equipoise.cli.consoles import complain, emit_json, progress, tell

if TYPE_CHECKING:
    from equipoise.lipschitz.report import Report


def audit(
    model: options.Model,
    weights: options.Weights = None,
    input_shape: options.InputShape = None,
    ball: Annotated[float | None, Option(help="bound only inputs of at most this ℓ2 norm")] = None,
    rtol: Annotated[
        float, Option(help="bring every operator norm to this relative gap; smaller is slower")
    ] = 1e-3,
    chain: Annotated[
        str,
        Option(
            help="closed: bound the last dense layers together; multipliers: the whole network, up to 3,000 neurons (auto: 500)"
        ),
    ] = "auto",
    html: Annotated[Path | None, Option(help="write an HTML report too")] = None,
    fail_above: options.FailAbove = None,
    json: options.Json = False,
) -> None:
    """Prove how much a network can stretch a distance, layer by layer.

    MODEL is a program saved by torch.export, an ONNX file, a checkpoint directory
    (safetensors and JSON), a Hugging Face directory, or package.module:factory.
    Nothing in a file is executed: what is not plain weights and tensor operations
    is refused, and so is an operation without a rule. Exit code 1: the bound is
    larger than --fail-above.

    Examples:

      equipoise audit model.pt2 --html report.html
      equipoise audit model.onnx --fail-above 10
      equipoise audit torchvision.models:resnet18 --input-shape 3,224,224
    """
    from equipoise.core.bounds import format_up
    from equipoise.report import collect, write_report

    shape = options.sizes(input_shape)
    with progress(f"bounding {model}, node by node") as update:
        report = audit_report(
            model, weights, shape, ball=ball, rtol=rtol, chain=chain, progress=update
        )
    if html is not None:
        title = f"Lipschitz audit of {model}"
        write_report(collect([], title=title, audits={model: report}), html)
    emit_json(report.to_dict()) if json else tell(str(report))
    if fail_above is not None and not report.upper <= fail_above:
        complain(f"the bound {format_up(report.upper)} is larger than {fail_above:g}")
        raise Exit(1)


def audit_report(
    source: str,
    weights: str | Path | None = None,
    shape: tuple[int, ...] | None = None,
    **settings: Any,
) -> Report:
    """The report of a model.

    Args:
        source: what `load_model` takes.
        weights: of a factory.
        shape: of one input, where the source does not say it.
        **settings: ball, rtol, chain and progress of `lipschitz_bound`.
    """
    import torch
    from torch.export import ExportedProgram

    from equipoise.checkpoints import load_model
    from equipoise.lipschitz.bound import lipschitz_bound

    loaded = load_model(source, weights)
    network = loaded.model
    if isinstance(network, ExportedProgram):
        if shape is not None:
            options.refuse(f"{source} has its own input shape: leave out --input-shape")
        return lipschitz_bound(network, **settings)
    example: Any = loaded.examples
    if example is None or shape is not None:
        shape = shape or loaded.input_shape
        if shape is None:
            options.refuse(
                f"the bound of {source} depends on the input's shape: add --input-shape, e.g. --input-shape 3,32,32"
            )
        parameter = next(network.parameters(), torch.zeros(()))
        example = torch.zeros(1, *shape, dtype=parameter.dtype)
    return lipschitz_bound(network, example, **settings)
