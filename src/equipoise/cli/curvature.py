"""`equipoise curvature`: how sharp is the minimum a saved network lies in?"""

from typing import Annotated, Any

from typer import Argument, Option

from equipoise.cli.consoles import emit_json, print_table
from equipoise.cli.options import Data, Json, Split, Weights, refuse


def curvature(
    model: Annotated[str, Argument(help="a checkpoint directory, or package.module:factory")],
    data: Data,
    weights: Weights = None,
    split: Split = None,
    limit: Annotated[int | None, Option(min=1, help="use only the first so many inputs")] = None,
    layer: Annotated[
        str | None, Option(help="use only parameters of this name, e.g. 'fc.*'")
    ] = None,
    what: Annotated[str, Option(help="measure any of top,trace,density,sharpness")] = "top,trace",
    seed: Annotated[int, Option(help="seed the random vectors", min=0)] = 0,
    json: Json = False,
) -> None:
    """Measure the Hessian of the loss: top eigenvalue, trace, density, sharpness.

    The Hessian is that of the mean loss over the data, in evaluation mode; it is
    never formed. The top eigenvalue comes with its residual: an eigenvalue lies
    within that distance, and the largest one is at least the value. Traces and
    densities are estimates; the sharpness, found by ascent, is a lower bound.

    Examples:

      equipoise curvature checkpoint/ --data digits --split test
      equipoise curvature checkpoint/ --data digits --what top,sharpness --json
    """
    from torch.export import ExportedProgram

    from equipoise.checkpoints import load_model
    from equipoise.core import guarded
    from equipoise.curvature import LossHessian, sharpness, spectral_density, top_eigenvalue, trace
    from equipoise.data import load_dataset

    measures: dict[str, Any] = {
        "top": top_eigenvalue,
        "trace": trace,
        "density": spectral_density,
        "sharpness": sharpness,
    }
    wanted = what.split(",")
    if not set(wanted) <= set(measures):
        refuse(f"--what takes any of {','.join(measures)}, got {what!r}")
    net = load_model(model, weights).model
    if isinstance(net, ExportedProgram):
        refuse(
            f"{model} is an exported program, whose loss is not differentiated twice: "
            "give a checkpoint directory, or package.module:factory with --weights"
        )
    dataset = load_dataset(data, split=split)
    indices = range(len(dataset))[:limit]
    batches = [dataset.batch(list(indices[i : i + 256])) for i in range(0, len(indices), 256)]
    hessian = LossHessian(net, "ce", batches, layer)
    shape = tuple(batches[0][0].shape[1:])
    loss = guarded(hessian.value, f"the loss on these data (inputs of shape {shape})")
    report = {"parameters": hessian.size, "samples": hessian.count, "loss": loss}
    for name in wanted:
        report[name] = measures[name](hessian, seed=seed).to_dict()
    if json:
        emit_json({"model": model, "data": data, **report})
        return
    rows = []
    for name, figures in report.items():
        for key, value in figures.items() if isinstance(figures, dict) else [("", figures)]:
            if not isinstance(value, list):
                text = f"{value:.6g}" if isinstance(value, float) else str(value)
                rows.append({"what": f"{name} {key}", "value": text})
    print_table(f"curvature of {model}", rows)
