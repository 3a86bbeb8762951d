"""`equipoise certify`: certify a dataset, continue, re-derive, merge and export runs, or plan one."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from equipoise.cli import options
from equipoise.cli.consoles import emit_json, interrupted, messages, results, say, table, tell
from equipoise.cli.datasets import read_data
from equipoise.core.errors import InputError

if TYPE_CHECKING:
    from equipoise.runs import Execution, Job, Run
    from equipoise.runs.glance import Glance
    from equipoise.runs.parameters import Settings
    from equipoise.runs.plan import Estimate
    from equipoise.smoothing import Certificates

#: draws of one forward pass, at which a dynamic batch dimension is fixed
CHUNK = 100

Targets = Annotated[list[str] | None, typer.Argument(metavar="MODEL|RUN...", help="a model, or run directories")]


def certify(
    targets: Targets = None,
    data: Annotated[str | None, typer.Option(help="the data: digits, a .npz or .parquet file, a folder, …")] = None,
    split: options.Split = None,
    sigma: Annotated[
        str | None,
        typer.Option(help="noise level, in the units of the model's input; or one per channel: 0.25,0.25,0.5"),
    ] = None,
    n0: Annotated[int, typer.Option(help="selection draws per input")] = 100,
    n: Annotated[int, typer.Option(help="estimation draws per input")] = 10_000,
    alpha: Annotated[float | None, typer.Option(help="risk per input; default 0.001")] = None,
    procedure: Annotated[
        str | None, typer.Option(help="rivals (default), cohen, bonferroni, cpm, direct, lvm, …")
    ] = None,
    map: Annotated[str | None, typer.Option(help="of soft scores: global, per-input, softmax:T, sparsemax:T")] = None,
    lipschitz: Annotated[
        str | None, typer.Option(help="of the network: auto, or your own bound (an assumption)")
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="stop each input as soon as its answer is known")
    ] = False,
    target_radius: Annotated[float | None, typer.Option(help="adaptive: the radius to decide at")] = None,
    limit: Annotated[
        int | None, typer.Option(help="at most this many inputs, the first of every class in turn")
    ] = None,
    skip: options.Skip = 0,
    stride: options.Stride = 1,
    first: Annotated[
        bool, typer.Option("--first", help="with --limit: the first as they lie, not as many of each class")
    ] = False,
    classes: options.Classes = None,
    layout: options.Layout = None,
    size: options.Size = None,
    columns: options.Columns = None,
    mean: options.Mean = None,
    std: options.Std = None,
    seed: Annotated[int | None, typer.Option(help="of the noise; default: drawn from the operating system")] = None,
    denoiser: Annotated[
        str | None, typer.Option(help="a model from noisy image to image, put before MODEL (denoised smoothing)")
    ] = None,
    noise: Annotated[str | None, typer.Option(help="grid (exact; default for 8-bit data) or float")] = None,
    nonfinite: Annotated[str, typer.Option(help="NaN logits: refuse (the input fails) or miss (no vote)")] = "refuse",
    engine: Annotated[str, typer.Option(help="local or ray")] = "local",
    workers: Annotated[int | None, typer.Option(help="of the ray engine")] = None,
    address: Annotated[str | None, typer.Option(help="of an existing Ray cluster")] = None,
    gpus_per_worker: Annotated[
        float, typer.Option(help="ray with --device cuda: GPUs of each worker; 0.5: two share one")
    ] = 1.0,
    device: options.Device = "cpu",
    batch_size: Annotated[int | None, typer.Option(help="most draws in one forward pass (memory); at most 100")] = None,
    run: Annotated[Path | None, typer.Option(help="run directory; default: runs/certify-<digest>")] = None,
    weights: options.Weights = None,
    epsilon: Annotated[str | None, typer.Option(help="radii for certified accuracy, e.g. 0,0.25,0.5")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="estimate time and memory, run nothing")] = False,
    re_derive: Annotated[bool, typer.Option("--re-derive", help="other alpha or procedure, no forward pass")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="join run directories into --output")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="of --merge")] = None,
    export: Annotated[Path | None, typer.Option(help="write the table: .tsv (Cohen's log), .csv or .parquet")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="try failed inputs again")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="prove a radius of the network itself, without noise")
    ] = False,
    norm: Annotated[str | None, typer.Option(help="deterministic: of the ball, l2 (default), linf or l1")] = None,
    effort: Annotated[
        str | None, typer.Option(help="deterministic: auto (default), fast, relaxation or integral")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="deterministic: budget per input")] = None,
    attack_steps: Annotated[int | None, typer.Option(help="deterministic: of the attack beside; 0: none")] = None,
    json: options.Json = False,
) -> None:
    """Certify the inputs of a dataset by randomized smoothing; every certificate holds with probability 1 − alpha.

    MODEL is a .pt2 or .onnx file, a checkpoint directory, or package.module:factory (installed
    or in this folder). Before sampling, a few inputs show whether the network answers at all,
    and under the noise. Counts are stored in a run directory, one input at a time; kill it
    whenever you like and run the same command again to continue. Radii are derived from the
    counts, so alpha and the procedure can be changed later. Data without labels gets answers
    and radii. Exit code 1: some inputs failed (NaN logits, unreadable).

    Examples:

      equipoise certify model.pt2 --data digits --sigma 0.25 --n 10000 --run runs/a
      equipoise certify model.onnx --data photos/ --size 32 --classes names.txt --sigma 0.12
      equipoise certify model.pt2 --data digits --sigma 0.25 --n 100000 --plan --workers 8
      equipoise certify runs/a --re-derive --alpha 0.01 --procedure cohen --epsilon 0.25,0.5
      equipoise certify runs/a --export certified.tsv
      equipoise certify --merge runs/a runs/b -o runs/ab
      equipoise certify model.pt2 --data digits --deterministic --run runs/d
    """
    from equipoise.cli.certify_proved import certify_deterministic
    from equipoise.runs import Execution, open_run
    from equipoise.runs.engines import find_engine
    from equipoise.runs.export import check_path
    from equipoise.runs.manifest import is_run, read_manifest, require_same
    from equipoise.runs.parameters import Settings
    from equipoise.runs.proved import is_proved

    names, levels = list(targets or []), _epsilons(epsilon)
    own = {"norm": norm, "effort": effort, "seconds": seconds, "attack_steps": attack_steps}
    if deterministic or (len(names) == 1 and data is None and is_proved(names[0])):
        _refuse_given(
            "", " belongs to randomized smoothing: leave it out with --deterministic",
            sigma=sigma, plan=plan, merge=merge, re_derive=re_derive, adaptive=adaptive, alpha=alpha,
        )  # fmt: skip
        if len(names) != 1:
            raise InputError(f"expected one MODEL or one run directory, got {len(names)}: see equipoise certify --help")
        return certify_deterministic(
            names[0], data, split, weights, run, levels, export, json, retry_failed, limit=limit, skip=skip, stride=stride,
            **{k: v for k, v in own.items() if v is not None},
        )  # fmt: skip
    _refuse_given("", " goes with --deterministic", **own)
    if export is not None:
        check_path(export)
    if merge:
        from equipoise.runs.merge import merge_runs

        if output is None:
            raise InputError("--merge needs --output: where the joined run goes")
        return _finish(merge_runs(names, output), None, levels, export, json)
    if not names and run is not None and data is None:
        names = [str(run)]
    if len(names) != 1:
        raise InputError(f"expected one MODEL or one run directory, got {len(names)}: see equipoise certify --help")
    if data is None and (is_run(names[0]) or not targets):
        _refuse_given(
            f"{names[0]} is a run directory, and ", " needs the network: give MODEL and --data too",
            sigma=sigma, map=map, limit=limit, weights=weights, adaptive=adaptive, plan=plan,
            retry_failed=retry_failed,
        )  # fmt: skip
        return _existing(names[0], re_derive, alpha, procedure, lipschitz, target_radius, levels, export, json)
    if re_derive:
        raise InputError(f"{names[0]} is not a run directory: --re-derive works on stored counts")
    if data is None or sigma is None:
        if not _may_be_model(names[0]):
            raise InputError(f"{names[0]} is neither a run directory nor a model")
        raise InputError("--data and --sigma are needed to certify a model")
    relative = 0.1 if adaptive and target_radius is None else None
    if target_radius is not None and not adaptive:
        raise InputError("--target-radius goes with --adaptive")
    given: dict[str, Any] = {"alpha": alpha, "procedure": procedure}
    asked = Settings(
        noise_levels(sigma), n0=n0, n=n, map=map, lipschitz=_constant(lipschitz), target_radius=target_radius,
        relative=relative, limit=limit, skip=skip, stride=stride, balanced=not first, seed=seed, noise=cast(Any, noise),
        denoiser=denoiser, device=device, batch_size=batch_size, nonfinite=cast(Any, nonfinite),
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    reading = _Reading(layout, size, columns, classes)
    job = _job(names[0], weights, data, split, reading, channels(mean, std), asked)
    if plan:
        return _plan(job, workers, json)
    folder = run or job.default_folder()
    execution = Execution(1 if workers is None else workers, address, gpus_per_worker)
    find_engine(engine, execution)
    if is_run(folder):
        require_same(folder, read_manifest(folder), job.manifest)
    done = is_run(folder) and open_run(folder).finished
    seen = None if done else _look(job, names[0], weights, data)
    _finish(_sample(job, folder, engine, execution, retry_failed, levels), None, levels, export, json, seen)


def _refuse_given(before: str, after: str, **asked: Any) -> None:
    """Refuse options that mean nothing here; the sentence names the first that was given."""
    for name, value in asked.items():
        if value is not None and value is not False:
            raise InputError(f"{before}--{name.replace('_', '-')}{after}")


def _may_be_model(name: str) -> bool:
    """Whether there is something of that name to load: a file, a checkpoint directory, or a factory to import."""
    path = Path(name)
    return (path / "config.json").is_file() if path.is_dir() else path.exists() or ":" in name


_Scaling = tuple[list[float], list[float]]


class _Reading(NamedTuple):
    """How the data is read."""

    layout: str | None
    size: str | None
    columns: str | None
    classes: Path | None


def _job(
    model: str, weights: Path | None, data: str, split: str | None, reading: _Reading, scaling: _Scaling | None, asked: Settings
) -> Job:  # fmt: skip
    from equipoise.checkpoints import load_model
    from equipoise.runs.jobs import prepare
    from equipoise.runs.models import normalised

    asked = replace(asked, name=data if split is None else f"{data}#{split}")
    if asked.denoiser is not None:
        asked = replace(asked, denoiser=load_model(asked.denoiser, batch=CHUNK))
    loaded = load_model(model, weights, batch=CHUNK)
    if scaling is not None:
        loaded = normalised(loaded, *scaling)
    return prepare(loaded, read_data(data, split, **reading._asdict(), labelled=False), asked)


def channels(mean: str | None, std: str | None) -> _Scaling | None:
    """Mean and deviation per channel; a single number serves every channel."""
    if mean is None and std is None:
        return None
    try:
        centre, spread = ([float(v) for v in text.split(",")] for text in (mean or "0", std or "1"))
    except ValueError as error:
        raise InputError(f"--mean and --std take numbers like 0.485,0.456,0.406, got {mean!r} and {std!r}") from error
    longest = max(len(centre), len(spread))
    centre, spread = (v * longest if len(v) == 1 else v for v in (centre, spread))
    if len(centre) != len(spread) or not all(map(math.isfinite, centre)) or not all(0 < s < math.inf for s in spread):
        raise InputError(f"--mean and --std take one finite number per channel, std > 0, got {mean!r} and {std!r}")
    return centre, spread


def _look(job: Job, model: str, weights: Path | None, data: str) -> Glance:
    """What a few inputs say before the sampling starts, on stderr."""
    from equipoise.checkpoints.sources import draws_weights
    from equipoise.runs.glance import glance

    payload = job.model.payload
    if weights is None and not isinstance(payload, bytes) and draws_weights(model, payload):
        say(
            f"warning: {model} gives other weights every time it is called: they are drawn at random, not trained; give "
            "--weights FILE.safetensors"
        )
    found = glance(job)
    lines = found.lines()
    if found.disturbed and ":" in model:  # a network of the user's own, which can be trained further
        start = "" if weights is None else f", weights: {weights}"
        lines.append(
            f'to train it further under this noise: equipoise train noise-cnn-cifar --set "model={{factory: {model}{start}}}" '
            f"--set noise.sigma={job.parameters.sigma:g} --set data.path={data}"
        )
    for line in lines:
        say(line)
    return found


def _sample(job: Job, folder: Path, engine: str, execution: Execution, retry: bool, levels: list[float] | None) -> Run:
    from equipoise.runs import open_run, start
    from equipoise.runs.manifest import is_run
    from equipoise.runs.progress import Reporter

    shown = job.parameters.target_radius or (levels or [0.0])[0]
    try:
        with Reporter(folder, messages(), shown) as report:
            return start(job, folder, engine=engine, execution=execution, progress=report, retry_failed=retry)
    except KeyboardInterrupt:
        interrupted(len(open_run(folder).rows) if is_run(folder) else 0, job.manifest.total, folder)


def _existing(
    folder: str, re_derive: bool, alpha: float | None, procedure: str | None, lipschitz: str | None,
    target_radius: float | None, levels: list[float] | None, export: Path | None, json: bool,
) -> None:  # fmt: skip
    from equipoise.runs import open_run

    found, constant = open_run(folder), _constant(lipschitz)
    if constant == "auto":
        raise InputError("--lipschitz auto needs the model: give the bound itself (equipoise audit computes one)")
    changed = {"alpha": alpha, "procedure": procedure, "lipschitz": constant, "target_radius": target_radius}
    if any(v is not None for v in changed.values()) and not re_derive:
        raise InputError(f"{folder} is a run directory: add --re-derive to change what is derived from its counts")
    certificates = found.certificates(**changed) if re_derive else None
    _finish(found, certificates, levels, export, json)


def _finish(
    run: Run, certificates: Certificates | None, levels: list[float] | None, export: Path | None, json: bool,
    seen: Glance | None = None,
) -> None:  # fmt: skip
    """Export, print the summary, and say by the exit code whether inputs failed."""
    found = run.certificates() if certificates is None else certificates
    summary = run.summary(levels, certificates=found)
    if export is not None:
        run.export(export, certificates=found)
    if json:
        looked = {} if seen is None else {"glance": {**asdict(seen), "warnings": seen.warnings()}}
        emit_json({"run": str(run.folder), **summary.to_dict(), **looked, "manifest": run.manifest.to_dict()})
    else:
        from rich.markup import escape

        from equipoise.core.accuracy import percent

        share = "certified accuracy" if summary.labelled else "certified (no labels: any answer)"
        shown = table(escape(f"Run {run.folder}"), "radius ε", share, right=("radius ε", share))
        for level, accuracy in summary.accuracy.items():
            shown.add_row(f"{level:g}", f"{percent(accuracy)} %")
        results().print(shown)
        tell(*summary.lines())
    if summary.failed:
        raise typer.Exit(1)


def _plan(job: Job, workers: int | None, json: bool) -> None:
    from equipoise.runs.plan import estimate

    counts = sorted({1, workers} if workers else {1, 2, 4, 8})
    found = estimate(job, workers=counts)
    if json:
        emit_json(found.to_dict())
    else:
        _show_plan(found)


def _show_plan(e: Estimate) -> None:
    from equipoise.runs.progress import clock

    shown = table(f"Plan for {e.inputs} inputs (estimates)", "", "all draws", f"adaptive at ε = {e.target_radius:g}")
    shown.add_row("draws per input", f"{e.draws_per_input:,}", f"{e.draws_per_input_adaptive:,.0f}")
    shown.add_row(f"forward passes of {e.batch}", f"{e.forward_passes:,}", f"{e.adaptive_forward_passes:,}")
    for k, seconds in e.seconds.items():
        shown.add_row(f"time, {k} worker{'s' if k > 1 else ''}", clock(seconds), clock(e.adaptive_seconds[k]))
    results().print(shown)
    tell(*e.lines())


def _epsilons(text: str | None) -> list[float] | None:
    return None if text is None else options.numbers(text, "--epsilon takes numbers like 0,0.25,0.5", least=0)


def _constant(text: str | None) -> Any:
    if text is None or text == "auto":
        return text
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"--lipschitz takes a number or auto, got {text!r}") from error


def noise_levels(text: str) -> float | list[float]:
    """`0.25`, or `0.25,0.25,0.5` with one level per channel.

    >>> noise_levels("0.25"), noise_levels("0.25,0.5")
    (0.25, [0.25, 0.5])
    """
    values = options.numbers(text, "--sigma takes a number, or one per channel like 0.25,0.25,0.5")
    return values[0] if len(values) == 1 else values
