"""`equipoise predict`: the answers that a deployed smoothed classifier gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli import options
from equipoise.cli.certify import CHUNK, channels, noise_levels
from equipoise.cli.consoles import emit_json, progress, results, table, tell
from equipoise.cli.datasets import read_data
from equipoise.core.errors import InputError

if TYPE_CHECKING:
    from equipoise.runs.predictions import Answer


def predict(
    model: Annotated[
        str, typer.Argument(help="a .pt2 or .onnx file, a checkpoint directory, or package.module:factory")
    ],
    data: Annotated[str, typer.Option(help="the inputs: a folder of pictures, a .npz or .parquet file, …")],
    sigma: Annotated[str | None, typer.Option(help="noise level, or one per channel; default that of --run")] = None,
    run: Annotated[Path | None, typer.Option(help="certification run of the same model: its noise is used")] = None,
    n: Annotated[int, typer.Option(help="draws per input")] = 1000,
    alpha: Annotated[float, typer.Option(help="risk of a wrong majority, per input")] = 1e-3,
    split: options.Split = None,
    limit: Annotated[int | None, typer.Option(help="at most this many inputs, as they lie")] = None,
    classes: options.Classes = None,
    layout: options.Layout = None,
    size: options.Size = None,
    columns: options.Columns = None,
    mean: options.Mean = None,
    std: options.Std = None,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    json: options.Json = False,
) -> None:
    """Answer the inputs as the smoothed classifier does: the majority under the noise, or no answer.

    An answer is not the majority class with probability at most alpha per input; where the
    draws do not tell, there is none. With --run the model must be the one that was certified.
    Exit code 1: some inputs could not be read or gave NaN.

    Examples:

      equipoise predict model.pt2 --data photos/ --size 32 --sigma 0.25
      equipoise predict model.pt2 --data photos/ --run runs/a --json
    """
    from equipoise.checkpoints import load_model
    from equipoise.runs.jobs import prepare
    from equipoise.runs.manifest import read_manifest
    from equipoise.runs.models import normalised
    from equipoise.runs.parameters import Settings
    from equipoise.runs.predictions import predict as answers
    from equipoise.smoothing.noise import Levels

    manifest = None if run is None else read_manifest(run)
    if manifest is not None:
        p = manifest.parameters
        if sigma is not None and Levels.of(noise_levels(sigma)) != p.levels:
            raise InputError(f"{run} was certified with {p.levels}, got --sigma {sigma}: leave it out")
        own: Any = p.sigma if p.channels is None else list(p.channels)
        asked = Settings(own, noise=p.noise, noise_dtype=p.noise_dtype, chunk_size=p.chunk_size)
    elif sigma is None:
        raise InputError("say --sigma, or --run of a certification run whose noise is to be used")
    else:
        asked = Settings(noise_levels(sigma))
    asked = replace(asked, limit=limit, device=device, n=max(n, 1), name=data)
    loaded = load_model(model, weights, batch=CHUNK)
    scaling = channels(mean, std)
    loaded = loaded if scaling is None else normalised(loaded, *scaling)
    dataset = read_data(data, split, layout=layout, size=size, columns=columns, classes=classes, labelled=False)
    job = prepare(loaded, dataset, asked)
    if manifest is not None and manifest.model.get("hash") != job.manifest.model["hash"]:
        raise InputError(f"{run} certifies another model than {model}: nothing of it holds for these answers")
    if manifest is not None and manifest.parameters.cells != job.parameters.cells:
        raise InputError(
            f"{run} certifies a classifier on the grid of {'8-bit images' if manifest.parameters.cells == 255 else 'its data'}, "
            f"and {data} does not lie on it: round the inputs as those of the run were"
        )
    with progress() as bar:
        found = list(bar.track(answers(job, n, alpha), total=len(job.positions), description="answering"))
    names = dataset.classes or (manifest.data.get("classes") if manifest is not None else None)
    _show(found, names, json, {"model": model, "data": data, "sigma": asked.sigma, "n": n, "alpha": alpha})
    if any(a.failure for a in found):
        raise typer.Exit(1)


def _show(found: list[Answer], names: Any, json: bool, about: dict[str, Any]) -> None:
    def word(k: int) -> str:
        if k < 0:
            return ""
        return str(names[k]) if isinstance(names, list | tuple) and k < len(names) else str(k)

    labelled = any(a.label >= 0 for a in found)
    if json:
        rows = [
            {
                "id": a.id,
                "answer": None if a.answer < 0 else a.answer,
                "class": word(a.answer) or None,
                "failure": a.failure,
            }
            | ({"label": a.label} if labelled else {})
            for a in found
        ]
        return emit_json({**about, "answers": rows})
    columns = ("input", "answer", *(("label",) if labelled else ()))
    shown = table("Answers of the smoothed classifier", *columns)
    for a in found:
        said = f"failed: {a.failure}" if a.failure else word(a.answer) or "no answer"
        shown.add_row(str(a.id), said, *((word(a.label),) if labelled else ()))
    results().print(shown)
    silent = sum(a.answer < 0 and a.failure is None for a in found)
    right = f", {sum(a.answer == a.label >= 0 for a in found)} right" if labelled else ""
    tell(
        f"{len(found)} inputs{right}, {silent} without an answer; an answer is not the majority with probability at most "
        f"{about['alpha']:g} each"
    )
