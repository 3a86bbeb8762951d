"""`equipoise curvature`: how sharp is the minimum a saved network lies in?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.options import Json, Weights
from equipoise.core.errors import EquipoiseError, InputError, one_line

if TYPE_CHECKING:
    from equipoise.curvature import LossHessian

WHAT = ("top", "trace", "density", "sharpness")


def curvature(
    model: Annotated[str, typer.Argument(help="a checkpoint directory, or package.module:factory")],
    data: Annotated[str, typer.Option(help="the data: a folder, file or name, as for `equipoise certify`")],
    weights: Weights = None,
    split: Annotated[str | None, typer.Option(help="part of the data, e.g. train or test")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="use the first so many samples")] = None,
    layer: Annotated[str | None, typer.Option(help="only parameters whose name matches, e.g. 'fc.*'")] = None,
    what: Annotated[str, typer.Option(help="any of top,trace,density,sharpness")] = "top,trace",
    radius: Annotated[float, typer.Option(help="radius of the ball of the sharpness")] = 0.05,
    double: Annotated[bool, typer.Option("--double", help="compute in float64")] = False,
    seed: Annotated[int, typer.Option(help="of all random vectors")] = 0,
    json: Json = False,
) -> None:
    """How curved is the loss at these parameters? Hessian eigenvalue, trace, density and sharpness.

    The Hessian is that of the mean loss over the data, in evaluation mode, never formed.
    The top eigenvalue comes with its residual: within that distance there is an eigenvalue,
    and the largest one is at least the value. Traces and densities are estimates with a
    standard error; the sharpness is what an ascent found, a lower bound.

    Examples:

      equipoise curvature checkpoint/ --data digits --split test
      equipoise curvature checkpoint/ --data digits --layer 'fc.*' --what top,trace,density --json
    """
    from equipoise.cli.consoles import emit_json, results, table

    wanted = tuple(part.strip() for part in what.split(",") if part.strip())
    if not wanted or not set(wanted) <= set(WHAT):
        raise InputError(f"--what takes any of {','.join(WHAT)}, got {what!r}")
    report = measure(_hessian(model, weights, data, split, limit, layer, double), wanted, radius=radius, seed=seed)
    if json:
        emit_json({"model": model, "data": data, "split": split, "layer": layer, **report})
        return
    shown = table(
        f"curvature of {model}, {report['parameters']} parameters, {report['samples']} samples, loss {report['loss']:.6g}",
        "what",
        "value",
        "±",
        "meaning",
        right=("value", "±"),
    )
    for row in _rows(report):
        shown.add_row(*row)
    results().print(shown, markup=False)


def measure(hessian: LossHessian, what: tuple[str, ...], *, radius: float = 0.05, seed: int = 0) -> dict[str, Any]:
    """The numbers asked for, as plain values.

    Args:
        hessian: of the mean loss.
        what: any of `WHAT`.
        radius: of the ball of the sharpness.
        seed: of all random vectors.
    """
    from equipoise.curvature import sharpness, spectral_density, top_eigenvalue, trace

    report: dict[str, Any] = {"parameters": hessian.size, "samples": hessian.count, "loss": hessian.value()}
    if "top" in what:
        report["top"] = top_eigenvalue(hessian, seed=seed).to_dict()
    if "trace" in what:
        report["trace"] = trace(hessian, seed=seed).to_dict()
    if "density" in what:
        report["density"] = spectral_density(hessian, seed=seed).to_dict()
    if "sharpness" in what:
        report["sharpness"] = sharpness(hessian, radius=radius, seed=seed).to_dict()
    return report


def _hessian(
    model: str, weights: Path | None, data: str, split: str | None, limit: int | None, layer: str | None, double: bool
) -> LossHessian:
    import torch
    from torch.export import ExportedProgram

    from equipoise.checkpoints import load_model
    from equipoise.curvature import LossHessian
    from equipoise.data import load_dataset

    net = load_model(model, weights).model
    if isinstance(net, ExportedProgram):
        raise InputError(
            f"{model} is an exported program, whose loss is not differentiated twice: "
            "give a checkpoint directory, or package.module:factory with --weights"
        )
    dataset = load_dataset(data, split=split)
    indices = range(len(dataset))[:limit]
    batches = [dataset.batch(list(indices[i : i + 256])) for i in range(0, len(indices), 256)]
    try:
        hessian = LossHessian(net, "ce", batches, layer, dtype=torch.float64 if double else None)
        hessian.value()
    except EquipoiseError:
        raise
    except Exception as error:  # whatever the user's own code raises
        shape = tuple(batches[0][0].shape[1:]) if batches else ()
        raise InputError(f"the model does not fit the data (inputs of shape {shape}): {one_line(error)}") from error
    return hessian


def _rows(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, value, ±, meaning) of everything that was measured."""
    rows = []
    if top := report.get("top"):
        meaning = "lower bound of the largest; ± residual"
        rows.append(("top eigenvalue", f"{top['value']:.6g}", f"{top['residual']:.2g}", meaning))
    if trace := report.get("trace"):
        meaning = "Hutch++; ± standard error"
        rows.append(("trace", f"{trace['value']:.6g}", f"{trace['standard_error']:.2g}", meaning))
    if density := report.get("density"):
        nodes = density["nodes"]
        negative = sum(weight for x, weight in zip(nodes, density["weights"], strict=True) if x < 0)
        meaning = f"estimate; nodes from {nodes[0]:.4g} to {nodes[-1]:.4g}"
        rows.append(("share below zero", f"{negative:.3g}", "", meaning))
    if sharp := report.get("sharpness"):
        rows.append(("sharpness", f"{sharp['value']:.6g}", "", f"lower bound, radius {sharp['radius']:g}"))
    return rows
