"""`equipoise certify` and `prove` make runs; `derive`, `merge`, `export` and `check` work on what is stored."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from equipoise.cli import options
from equipoise.cli.consoles import emit_json, print_table, progress, say, tell
from equipoise.cli.options import (
    Alpha,
    Data,
    Epsilon,
    Json,
    Limit,
    Mean,
    Model,
    Procedure,
    RunArgument,
    RunFolder,
    Set,
    Shard,
    Split,
    Std,
    Weights,
)

if TYPE_CHECKING:
    from equipoise.runs import Job, Results, Run

#: keys of --set that say how a run is executed, beside those of its settings and of the recipe for model and data
_RUNNING = ("workers", "address", "batch_size")
Bundle = Annotated[Path | None, Option(help="write a certificate that `equipoise check` accepts")]


def certify(
    model: Model,
    data: Data,
    sigma: Annotated[
        str,
        Option(
            help="add noise of this level, in the units of the data; or one level per channel: 0.2,0.2,0.5"
        ),
    ],
    run: RunFolder = None,
    weights: Weights = None,
    n: Annotated[int, Option(help="draw this many noisy copies of every input")] = 10_000,
    alpha: Annotated[float, Option(help="accept this risk per input")] = 1e-3,
    procedure: Annotated[
        str, Option(help="use rivals, cohen, bonferroni, cpm, direct, lvm, …")
    ] = "rivals",
    limit: Limit = None,
    shard: Shard = None,
    split: Split = None,
    mean: Mean = None,
    std: Std = None,
    epsilon: Epsilon = None,
    bundle: Bundle = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Certify the inputs of a dataset by randomized smoothing.

    Each certificate holds with probability 1 − alpha. Counts are stored in a run
    directory, one input at a time: kill it whenever you like, the same command
    continues. Before sampling, a few inputs show the accuracy and the time it
    will take. Exit code 1: some inputs failed.

    Keys of --set, with values as JSON or text. Sampling: n0, seed, map, lipschitz
    (a bound or auto), noise (grid or float), device, target_radius (stop an input
    once this radius is decided). Model and data: size ([32,32]), layout, columns
    (["x","y"]). Execution: workers (on Ray), address, batch_size.

    Examples:

      equipoise certify model.pt2 --data digits --sigma 0.25 --run runs/a
      equipoise certify model.onnx --data photos/ --sigma 0.1 --set size=[32,32]
      equipoise certify model.pt2 --data digits --sigma 0.1 --set lipschitz=auto
    """
    given = dict(locals())
    levels = options.numbers(sigma, "--sigma takes a number, or one per channel like 0.25,0.25,0.5")
    _perform("sampled", **(given | {"sigma": levels[0] if len(levels) == 1 else levels}))


def prove(
    model: Model,
    data: Annotated[str | None, Option(help="read inputs from here, as for certify")] = None,
    run: RunFolder = None,
    weights: Weights = None,
    norm: Annotated[str, Option(help="measure distances in l2, linf or l1")] = "l2",
    effort: Annotated[str, Option(help="use auto, fast, relaxation or integral")] = "auto",
    seconds: Annotated[
        float, Option(help="spend at most this processor time per input; 0: no limit", min=0)
    ] = 60,
    limit: Limit = None,
    shard: Shard = None,
    split: Split = None,
    mean: Mean = None,
    std: Std = None,
    epsilon: Epsilon = None,
    complete: Annotated[
        bool, Option("--complete", help="branch until the one --epsilon is proved or broken")
    ] = False,
    vnnlib: Annotated[
        Path | None, Option(help="decide a VNN-LIB property, instead of --data")
    ] = None,
    ball: Annotated[
        float | None, Option(help="with --vnnlib: use the l2 ball instead of the box")
    ] = None,
    tokens: Annotated[
        Path | None, Option(help="bound token exchanges in these sequences (.npy)")
    ] = None,
    bundle: Bundle = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Prove a radius around every input within which the answer cannot change.

    No noise, no risk: radii hold for the real function of the stored weights.
    Runs are stored and continued as by `certify`. Keys of --set: deployed
    (float32: also radii of the float32 forward pass); model and data as there.
    A single --epsilon is the only radius tried; with --complete it is proved,
    broken or undecided. --tokens: for networks that begin with an embedding.
    Exit code 1: some inputs failed, or the property does not hold.

    Examples:

      equipoise prove model.pt2 --data digits --run runs/p
      equipoise prove model.pt2 --data digits --epsilon 0.5 --complete
      equipoise prove model.onnx --data images.npz --norm linf --seconds 10
      equipoise prove model.onnx --vnnlib property.vnnlib --seconds 60
    """
    if tokens is not None:
        return _substitutions(model, weights, tokens, json)
    if vnnlib is not None:
        return _verify(model, vnnlib, ball, seconds or None, json)
    if data is None:
        options.refuse("give --data, or a property with --vnnlib")
    if bundle is not None and norm != "l2":
        options.refuse(f"a bundle holds radii in the l2 norm; --norm is {norm}")
    given = {
        name: value for name, value in locals().items() if name not in ("vnnlib", "ball", "tokens")
    }
    levels = options.epsilons(epsilon)
    asked = levels[0] if levels is not None and len(levels) == 1 else 0.0
    values = [f"epsilon={asked}"] if asked > 0 else []
    _perform("proved", **(given | {"seconds": seconds or None, "set_": [*values, *(set_ or [])]}))


def _verify(
    model: str, vnnlib: Path, ball: float | None, seconds: float | None, json: bool
) -> None:
    """Whether a property in VNN-LIB holds for a network."""
    import torch

    from equipoise.checkpoints import load_model
    from equipoise.lipschitz.vnnlib import read_vnnlib, verify_property

    loaded = load_model(model)
    boxes = read_vnnlib(vnnlib)
    shape = loaded.input_shape or tuple(boxes[0].low.shape)
    (example,) = loaded.examples or (torch.zeros(1, *shape),)
    answer = verify_property(loaded.model, example, boxes, ball=ball, seconds=seconds or math.inf)
    tensors = {"input": answer.input, "output": answer.output}
    values = {name: None if t is None else t.tolist() for name, t in tensors.items()}
    if json:
        emit_json({"verdict": answer.verdict, "seconds": answer.seconds, **values})
    else:
        tell(answer.verdict, *(f"{name}: {v}" for name, v in values.items() if v is not None))
    if answer.verdict != "holds":
        raise Exit(1)


def _substitutions(model: str, weights: str | None, tokens: Path, json: bool) -> None:
    """How many tokens of each sequence may be exchanged, proved."""
    import numpy as np
    import torch

    from equipoise.checkpoints import load_model
    from equipoise.core import guarded
    from equipoise.core.files import open_regular
    from equipoise.lipschitz import proved_substitutions

    sequences = guarded(
        lambda: torch.as_tensor(np.load(open_regular(tokens), allow_pickle=False)),
        f"reading {tokens}",
    )
    network: Any = load_model(model, weights).model
    harmless = proved_substitutions(network, sequences)[0].tolist()
    if json:
        emit_json({"substitutions": harmless})
        return
    for k in range(1, max(harmless) + 2):
        count = sum(number >= k for number in harmless)
        tell(f"any {k} tokens may be exchanged in {count} of {len(harmless)} sequences")


def _perform(
    kind: Any,
    run: Path | None,
    shard: str | None,
    epsilon: str | None,
    bundle: Path | None,
    set_: list[str] | None,
    json: bool,
    **given: Any,
) -> None:
    """Make a run and show it: every option and every key of --set belongs to the recipe, the execution or the settings."""
    from equipoise.runs import Settings, prepare
    from equipoise.runs.store import Recipe

    values = {name: value for name, value in given.items() if value is not None} | options.shard(
        shard
    )
    values |= options.pairs(set_) | {"balanced": given["limit"] is not None}
    recipe = options.make_recipe(
        **{name: values.pop(name) for name in Recipe.model_fields if name in values}
    )
    workers, address, batch_size = (values.pop(name, None) for name in _RUNNING)
    levels = options.epsilons(epsilon)
    try:
        settings = Settings.of(kind, values)
    except TypeError as error:
        options.refuse(f"--set: {error}")
    network = options.load_network(recipe, settings.chunk_size if kind == "sampled" else 1)
    name = recipe.data if recipe.split is None else f"{recipe.data}#{recipe.split}"
    job = prepare(
        network,
        options.load_data(recipe),
        settings,
        batch_size=batch_size,
        name=name,
        recipe=recipe,
    )
    if bundle is not None:
        _require_bundle(job)
    stored = _run(job, run, workers=workers, address=address)
    if bundle is not None and kind == "sampled":
        _write_votes(stored, bundle)
    elif bundle is not None:
        _write_bundle(job, stored, levels, bundle)
    show_run(stored, stored.results(), levels, json)


def _run(job: Job, run: Path | None, **execution: Any) -> Run:
    """Look at a few inputs, then sample or prove the rest."""
    from equipoise.runs import is_run, open_run, preflight, start
    from equipoise.runs.store import read_manifest, require_same

    folder = run or job.default_folder()
    left = len(job.positions)
    if is_run(folder):
        require_same(folder, read_manifest(folder), job.manifest)
        left -= len(open_run(folder).rows)
    if left:
        report = preflight(job)
        settings = job.settings
        each = settings.seconds
        if settings.kind == "sampled":
            each = (settings.n0 + settings.n) * report["seconds"]
        shares = [
            f"{name} accuracy {report[name]:.1%}" for name in ("clean", "noisy") if name in report
        ]
        say(", ".join([*shares, f"{report['seconds']:.2g} s a pass (estimates)"]))
        if each is not None:
            most = timedelta(seconds=math.ceil(left * each))
            say(f"{left} inputs take up to {most} (hours:minutes:seconds) on one core")
    try:
        with progress("certifying") as update:
            return start(
                job, folder, progress=lambda row, done, total: update(done, total), **execution
            )
    except KeyboardInterrupt:
        options.interrupted(folder)


def _require_bundle(job: Job) -> None:
    """Refuse what no bundle can hold before the work is done."""
    from equipoise import certificates

    settings = job.settings
    if settings.kind == "proved":
        certificates.describe(job.spec.model.build(), job.spec.example[None])
    elif settings.soft or settings.adaptive or settings.channels:
        options.refuse(
            "a bundle holds votes at one noise level, drawn to the end: use --procedure rivals or cohen"
        )


def _write_votes(run: Run, folder: Path) -> None:
    """The votes of a run as a bundle, with the radii that follow from them."""
    import numpy as np

    from equipoise import certificates

    settings = run.settings
    selection, estimation, draws = (
        np.array([getattr(row, name) for row in run.rows if row.failure is None])
        for name in ("selection", "estimation", "draws")
    )
    setting = settings.model_dump(include={"sigma", "alpha", "procedure"})
    certificates.write_smoothing(selection, estimation, draws, folder, **setting)
    say(f"wrote {folder}; `equipoise check {folder}` checks it")


def _write_bundle(job: Job, run: Run, levels: list[float] | None, folder: Path) -> None:
    """The proved radii of a run as a bundle; radii that the checker proves smaller are lowered to what it proves."""
    import torch

    from equipoise import certificates

    results = run.results()
    x = torch.stack([item.x for item in job.inputs.read(run.positions)])
    y = torch.as_tensor(results.labels if results.labelled else results.answer)
    radii = torch.as_tensor(results.radius)
    epsilons = [e for e in levels or certificates.EPSILONS if e > 0]
    network = job.spec.model.build()
    claims = certificates.write(network, x, y, folder, radii=radii, epsilons=epsilons)
    lowered = claims["radii"]["lowered"]
    say(
        f"wrote {folder} ({lowered} radii lowered to what the checker proves); `equipoise check {folder}` checks it"
    )


def show_run(run: Run, results: Results, levels: list[float] | None, json: bool) -> None:
    """Print what a run certifies; exit code 1 if inputs failed.

    Args:
        run: the run.
        results: its certificates.
        levels: radii for certified accuracy.
        json: whether to print a document instead.
    """
    from equipoise.core.accuracy import percent

    summary = run.summary(levels, results=results)
    if json:
        emit_json({"run": str(run.folder), **summary.to_dict(), "manifest": run.manifest.to_dict()})
    else:
        shares = {
            "certified accuracy"
            if results.labelled
            else "certified (no labels: any answer)": summary.accuracy
        }
        if summary.deployed:
            shares["deployed"] = summary.deployed
        # in full: rounded down, 0.3 would read 0.2999
        rows = [
            {"radius ε": str(level)}
            | {name: f"{percent(share[level])} %" for name, share in shares.items()}
            for level in summary.accuracy
        ]
        print_table(f"Run {run.folder}", rows)
        tell(*summary.lines())
    if run.failures:
        raise Exit(1)


def derive(
    run: RunArgument,
    alpha: Alpha = None,
    procedure: Procedure = None,
    epsilon: Epsilon = None,
    json: Json = False,
) -> None:
    """Show a stored run at another risk or procedure, derived from its counts.

    No forward pass is made. Each derivation keeps its own alpha; the best of
    several, chosen after looking, does not.

    Examples:

      equipoise derive runs/a
      equipoise derive runs/a --alpha 0.01 --procedure cohen --epsilon 0.25,0.5
    """
    from equipoise.runs import open_run

    stored = open_run(run)
    show_run(stored, stored.results(alpha, procedure), options.epsilons(epsilon), json)


def merge(
    runs: Annotated[list[str], Argument(metavar="RUN...", help="run directories")],
    output: Annotated[Path, Option("--output", "-o", help="store the joined run here")],
    json: Json = False,
) -> None:
    """Join runs of one model over disjoint inputs into a new run.

    The parts are made by --shard of `certify` and `prove`.

    Examples:

      equipoise merge runs/1 runs/2 -o runs/whole
    """
    from equipoise.runs import merge_runs

    merged = merge_runs(runs, output)
    show_run(merged, merged.results(), None, json)


def export(
    run: RunArgument,
    file: Annotated[Path, Argument(help="the table to write, a .csv")],
    alpha: Alpha = None,
    procedure: Procedure = None,
    json: Json = False,
) -> None:
    """Write a run as a table, one line per input; radii are rounded down.

    Examples:

      equipoise export runs/a certified.csv
      equipoise export runs/a cohen.csv --alpha 0.001 --procedure cohen
    """
    from equipoise.runs import open_run

    stored = open_run(run)
    path = stored.export(file, results=stored.results(alpha, procedure))
    emit_json({"run": str(run), "file": str(path), "inputs": len(stored.rows)}) if json else tell(
        f"wrote {path}"
    )


def check(
    folder: Annotated[
        Path, Argument(help="the folder of the bundle, or the name of a packaged network")
    ],
    exact: Annotated[bool, Option(help="use exact integers; for dense ReLU networks")] = False,
    json: Json = False,
) -> None:
    """Check every claim of a certificate bundle with the lone checker.

    The checker needs Python and NumPy alone and shares no code with the rest of
    the library: copy the files of equipoise/checker anywhere and run
    `python check.py DIR`.

    Examples:

      equipoise check bundle/
      equipoise check cifar10
    """
    from tempfile import TemporaryDirectory

    import torch

    from equipoise import certificates, models

    with TemporaryDirectory() as bundle:
        if str(folder) in models.bundled() and not folder.exists():
            network = models.load(folder)
            example = torch.zeros(1, *(network.input_shape or ()))
            certificates.write(network.model, example, None, bundle)
            folder = Path(bundle)
        proved = certificates.check(folder, exact=exact)
    emit_json({"accepted": True, "proved": proved}) if json else tell(
        "ACCEPTED", *(f"  {line}" for line in proved)
    )
