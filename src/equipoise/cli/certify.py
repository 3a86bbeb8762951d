"""`equipoise certify` (randomized smoothing) and `equipoise prove` (deterministic radii)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli import options
from equipoise.cli.consoles import emit_json, interrupted, progress, results, say, table, tell
from equipoise.cli.loading import load_data, load_network, make_recipe
from equipoise.core.errors import InputError

if TYPE_CHECKING:
    from equipoise.runs import Execution, Job, Results, Row, Run, Settings
    from equipoise.runs.settings import Recipe

_READING: dict[str, type] = {"layout": str, "columns": str}
_RUNNING: dict[str, type] = {"batch_size": int, "address": str, "gpus": float, "retry_failed": bool}
_SAMPLING: dict[str, type] = {
    "n0": int, "seed": int, "device": str, "map": str, "lipschitz": str, "noise": str, "nonfinite": str,
}  # fmt: skip
_PROVING: dict[str, type] = {"retry_failed": bool}


def certify(
    model: options.Model,
    data: options.Data,
    sigma: Annotated[str, typer.Option(help="noise level in the units of the data; or one per channel: 0.2,0.2,0.5")],
    run: options.RunFolder = None,
    n: Annotated[int, typer.Option(help="estimation draws per input")] = 10_000,
    alpha: Annotated[float, typer.Option(help="risk per input")] = 1e-3,
    procedure: Annotated[str, typer.Option(help="rivals, cohen, bonferroni, cpm, direct, lvm, …")] = "rivals",
    adaptive: Annotated[
        str | None, typer.Option(help="stop each input early: at a radius to decide at (0.5), or a share (10%)")
    ] = None,
    limit: options.Limit = None,
    shard: options.Shard = None,
    split: options.Split = None,
    size: options.Size = None,
    classes: options.Classes = None,
    mean: options.Mean = None,
    std: options.Std = None,
    denoiser: Annotated[str | None, typer.Option(help="a model from noisy image to image, put before MODEL")] = None,
    weights: options.Weights = None,
    workers: Annotated[int | None, typer.Option(help="on a Ray cluster; default: this process")] = None,
    epsilon: options.Epsilon = None,
    set_: options.Set = None,
    json: options.Json = False,
) -> None:
    """Certify the inputs of a dataset by randomized smoothing; each certificate holds with probability 1 − alpha.

    Counts are stored in a run directory, one input at a time: kill it whenever you like, the same
    command continues. Before sampling, a few inputs show the accuracy and the time it will take.
    Keys of --set: n0, seed, map, lipschitz (a bound or auto), noise (grid or float), nonfinite,
    batch_size, device, address (of a Ray cluster), gpus, retry_failed, layout, columns.
    Exit code 1: some inputs failed.

    Examples:

      equipoise certify model.pt2 --data digits --sigma 0.25 --run runs/a
      equipoise certify model.onnx --data photos/ --size 32 --classes names.txt --sigma 0.12
      equipoise certify model.pt2 --data digits --sigma 0.25 --set seed=1 --set lipschitz=auto --procedure lvm
    """
    from equipoise.runs import Execution, Settings

    rarer = options.pairs(set_, _READING | _RUNNING | _SAMPLING)
    reading = {name: rarer.pop(name, None) for name in _READING}
    running = {name: rarer.pop(name, None) for name in _RUNNING}
    if "lipschitz" in rarer and rarer["lipschitz"] != "auto":
        rarer["lipschitz"] = options.numbers(rarer["lipschitz"], "lipschitz takes a number or auto")[0]
    levels = options.numbers(sigma, "--sigma takes a number, or one per channel like 0.25,0.25,0.5")
    chosen = {
        "sigma": levels[0] if len(levels) == 1 else levels, "n": n, "alpha": alpha, "procedure": procedure,
        "limit": limit, "balanced": limit is not None, **_adaptive(adaptive), **options.shard(shard), **rarer,
    }  # fmt: skip
    settings = Settings.of("sampled", chosen)
    address, gpus = running["address"], running["gpus"]
    engine = "local" if workers is None and address is None else "ray"
    execution = Execution(engine, workers or 1, address, 1.0 if gpus is None else gpus)
    recipe = make_recipe(
        model, data, weights=weights, split=split, size=size, classes=classes, mean=mean, std=std, denoiser=denoiser,
        **reading,
    )  # fmt: skip
    job = _job(recipe, settings, running["batch_size"])
    _run(job, run, execution, bool(running["retry_failed"]), options.epsilons(epsilon), json)


def prove(
    model: options.Model,
    data: options.Data,
    run: options.RunFolder = None,
    norm: Annotated[str, typer.Option(help="of the ball: l2, linf or l1")] = "l2",
    effort: Annotated[str, typer.Option(help="auto, fast, relaxation or integral")] = "auto",
    seconds: Annotated[float | None, typer.Option(help="processor time per input")] = None,
    deployed: Annotated[str | None, typer.Option(help="float32: also radii of the forward pass in float32")] = None,
    limit: options.Limit = None,
    shard: options.Shard = None,
    split: options.Split = None,
    size: options.Size = None,
    classes: options.Classes = None,
    mean: options.Mean = None,
    std: options.Std = None,
    weights: options.Weights = None,
    epsilon: options.Epsilon = None,
    bundle: Annotated[Path | None, typer.Option(help="write a certificate that `equipoise check` accepts")] = None,
    set_: options.Set = None,
    json: options.Json = False,
) -> None:
    """Prove a radius around every input within which the network keeps its answer: no noise, no risk.

    The radii are about the real function of the stored weights, evaluated in float64 with its
    rounding covered. Stored, killed and continued as by `certify`. Keys of --set: retry_failed,
    layout, columns. Exit code 1: some inputs failed.

    Examples:

      equipoise prove model.pt2 --data digits --run runs/p
      equipoise prove model.onnx --data images.npz --norm linf --seconds 10 --epsilon 0.004,0.008
    """
    from equipoise.runs import Execution, Settings

    rarer = options.pairs(set_, _READING | _PROVING)
    reading = {name: rarer.pop(name, None) for name in _READING}
    retry = bool(rarer.pop("retry_failed", False))
    chosen = {"norm": norm, "effort": effort, "seconds": seconds, "deployed": deployed, "limit": limit}
    settings = Settings.of("proved", chosen | {"balanced": limit is not None} | options.shard(shard) | rarer)
    recipe = make_recipe(
        model, data, weights=weights, split=split, size=size, classes=classes, mean=mean, std=std, **reading
    )
    if bundle is not None and norm != "l2":
        raise InputError(f"a bundle holds radii in the l2 norm; --norm is {norm}")
    job = _job(recipe, settings, None)
    _run(job, run, Execution(), retry, options.epsilons(epsilon), json, bundle)


def _adaptive(text: str | None) -> dict[str, float]:
    """`0.5` is a target radius, `10%` a share of the radius that all draws could give."""
    if text is None:
        return {}
    takes = "--adaptive takes a radius such as 0.5 or a share such as 10%"
    if text.endswith("%"):
        return {"relative": options.numbers(text[:-1], takes)[0] / 100}
    return {"target_radius": options.numbers(text, takes)[0]}


def _job(recipe: Recipe, settings: Settings, batch_size: int | None) -> Job:
    from equipoise.runs import prepare

    network = load_network(recipe) if settings.kind == "sampled" else load_network(recipe, batch=1)
    name = recipe.data if recipe.split is None else f"{recipe.data}#{recipe.split}"
    dataset = load_data(recipe)
    return prepare(network, dataset, settings, batch_size=batch_size, name=name, recipe=recipe)


def _run(
    job: Job,
    run: Path | None,
    execution: Execution,
    retry: bool,
    levels: list[float] | None,
    json: bool,
    bundle: Path | None = None,
) -> None:
    """Look at a few inputs, sample or prove the rest, write the bundle, show the summary."""
    from equipoise.runs import is_run, open_run, preflight, start
    from equipoise.runs.settings import read_manifest, require_same

    folder = run or job.default_folder()
    finished = False
    if is_run(folder):
        require_same(folder, read_manifest(folder), job.manifest)
        finished = open_run(folder).finished
    report = None if finished else preflight(job)
    for line in [] if report is None else report.lines():
        say(line)

    try:
        with progress() as bar:
            task = bar.add_task("certifying", total=job.manifest.total)

            def show(row: Row, done: int, total: int) -> None:
                bar.update(task, completed=done)

            found = start(job, folder, execution=execution, progress=show, retry_failed=retry)
    except KeyboardInterrupt:
        interrupted(len(open_run(folder).rows) if is_run(folder) else 0, job.manifest.total, folder)
    if bundle is not None:
        _write_bundle(job, found, levels, bundle)
    show_run(found, found.results(), levels, json, {} if report is None else {"preflight": report.to_dict()})


def _write_bundle(job: Job, run: Run, levels: list[float] | None, folder: Path) -> None:
    """The proved radii of a run as a bundle; radii that the checker proves smaller are lowered to what it proves."""
    import torch

    from equipoise import certificates
    from equipoise.runs.models import Batched

    network = job.model.network()
    network = network.model if isinstance(network, Batched) else network
    results = run.results()
    x = torch.stack([item.x for item in job.inputs.read(run.positions)])
    y = torch.as_tensor(results.labels if results.labelled else results.answer)
    radii = torch.as_tensor(results.radius)
    epsilons = levels or certificates.EPSILONS
    claims = certificates.write(network, x, y, folder, radii=radii, epsilons=[e for e in epsilons if e > 0])
    lowered = claims["radii"]["lowered"]
    note = f", {lowered} radii lowered to what the checker proves" if lowered else ""
    say(f"wrote {folder}{note}; `equipoise check {folder}` checks it")


def show_run(
    run: Run, found: Results, levels: list[float] | None, json: bool, more: dict[str, Any] | None = None
) -> None:
    """Print the summary of a run, and say by the exit code whether inputs failed.

    Args:
        run: the run.
        found: its results.
        levels: radii for certified accuracy.
        json: whether to print a document instead.
        more: further parts of the document.
    """
    from rich.markup import escape

    from equipoise.core.accuracy import percent
    from equipoise.core.bounds import format_down

    summary = run.summary(levels, results=found)
    if json:
        emit_json({"run": str(run.folder), **summary.to_dict(), **(more or {}), "manifest": run.manifest.to_dict()})
    else:
        share = "certified accuracy" if summary.labelled else "certified (no labels: any answer)"
        columns = ["radius ε", share, *(["deployed"] if summary.deployed else [])]
        shown = table(escape(f"Run {run.folder}"), *columns, right=tuple(columns))
        for level, accuracy in summary.accuracy.items():
            # what is certified at ε is certified below it: ε is never shown larger than it is
            cells = [f"{percent(summary.deployed[level])} %"] if summary.deployed else []
            shown.add_row(format_down(level, 4), f"{percent(accuracy)} %", *cells)
        results().print(shown)
        tell(*summary.lines())
    if summary.failed:
        raise typer.Exit(1)


def derive(
    run: options.RunArgument,
    alpha: Annotated[float | None, typer.Option(help="risk per input; default that of the run")] = None,
    procedure: Annotated[str | None, typer.Option(help="cohen, rivals, …; default that of the run")] = None,
    lipschitz: Annotated[float | None, typer.Option(help="another bound of the network (an assumption)")] = None,
    target_radius: Annotated[float | None, typer.Option(help="another target of an adaptive run")] = None,
    epsilon: options.Epsilon = None,
    json: options.Json = False,
) -> None:
    """Show a stored run, with radii derived from its counts at another risk or by another procedure.

    No forward pass is made. Each derivation keeps its own alpha; the best of many looked at does not.

    Examples:

      equipoise derive runs/a
      equipoise derive runs/a --alpha 0.01 --procedure cohen --epsilon 0.25,0.5
    """
    from equipoise.runs import open_run

    found = open_run(run)
    changes = found.results(alpha, procedure, lipschitz=lipschitz, target_radius=target_radius)
    show_run(found, changes, options.epsilons(epsilon), json)


def merge(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="run directories")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the new run directory")],
    json: options.Json = False,
) -> None:
    """Join runs of one model over disjoint inputs (see --shard of `certify` and `prove`) into a new one.

    Examples:

      equipoise merge runs/1 runs/2 -o runs/whole
    """
    from equipoise.runs import merge_runs

    found = merge_runs(runs, output)
    show_run(found, found.results(), None, json)


def export(
    run: options.RunArgument,
    file: Annotated[Path, typer.Argument(help="to write: .csv, .json or .tsv (Cohen's log)")],
    alpha: Annotated[float | None, typer.Option(help="risk per input; default that of the run")] = None,
    procedure: Annotated[str | None, typer.Option(help="default that of the run")] = None,
    json: options.Json = False,
) -> None:
    """Write a run as a table, one line per input; radii are rounded down.

    Examples:

      equipoise export runs/a certified.csv
      equipoise export runs/a cohen.tsv --alpha 0.001 --procedure cohen
    """
    from equipoise.runs import open_run

    found = open_run(run)
    if not found.rows:
        raise InputError(f"{run} has no finished inputs yet")
    path = found.export(file, results=found.results(alpha, procedure))
    emit_json({"run": str(run), "file": str(path), "inputs": len(found.rows)}) if json else tell(f"wrote {path}")
