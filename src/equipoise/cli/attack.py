"""`equipoise attack`: accuracy under attack at several radii, beside what a run certifies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, progress, results, say, table, tell
from equipoise.cli.options import Device, Json, Skip, Split, Stride, Weights, numbers

if TYPE_CHECKING:
    from equipoise.runs.attacks.run import AttackSummary


def attack(
    model: Annotated[str, typer.Argument(help="a .pt2 file, a checkpoint directory, or package.module:factory")],
    data: Annotated[str, typer.Option(help="the data: digits, a .npz or .parquet file, a folder, …")],
    epsilon: Annotated[str, typer.Option(help="radii to attack at, e.g. 0.25,0.5,1.0")],
    split: Split = None,
    run: Annotated[
        Path | None, typer.Option(help="certification run to write into; default with --sigma: runs/attack-<digest>")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="base, smoothed or both; default both if sigma is known")] = None,
    sigma: Annotated[float | None, typer.Option(help="noise level; default that of the run")] = None,
    steps: Annotated[int, typer.Option(help="gradient steps per start")] = 20,
    restarts: Annotated[int, typer.Option(help="random starts")] = 1,
    samples: Annotated[int, typer.Option(help="smoothed: noise draws per step")] = 16,
    votes: Annotated[int, typer.Option(help="smoothed: draws that judge an attack")] = 1000,
    limit: Annotated[int | None, typer.Option(help="at most this many inputs, of the run where there is one")] = None,
    skip: Skip = 0,
    stride: Stride = 1,
    seed: Annotated[int, typer.Option(help="of starts and noise")] = 0,
    device: Device = "cpu",
    batch_size: Annotated[int, typer.Option(help="inputs attacked at once (memory)")] = 64,
    weights: Weights = None,
    again: Annotated[
        bool, typer.Option("--again", help="repeat what is stored, e.g. after changing --samples")
    ] = False,
    json: Json = False,
) -> None:
    """Attack the inputs of a dataset in ℓ2 balls: accuracy under attack, above certified accuracy.

    Attacks the network itself (base) and its smoothed version by projected gradient ascent.
    Outcomes go into the store of the run, so that a report shows certified and attacked
    accuracy together; kill it whenever you like and run the same command again. A smoothed
    attack that succeeds inside a certified radius is tested again on fresh noise. Exit code 1:
    a certificate was broken (the inputs are named), or some inputs could not be attacked.

    Examples:

      equipoise attack model.pt2 --data digits --epsilon 0.25,0.5,1.0
      equipoise certify model.pt2 --data digits --sigma 0.25 --run runs/a
      equipoise attack model.pt2 --data digits --run runs/a --epsilon 0.25,0.5,1.0
      equipoise attack model.pt2 --data digits --run runs/a --kind smoothed --epsilon 0.5 --steps 50 --restarts 5
    """
    from equipoise.checkpoints import load_model
    from equipoise.data import load_dataset
    from equipoise.runs.attacks.run import attack_run

    levels = numbers(epsilon, "--epsilon takes numbers like 0.25,0.5,1.0")
    network, dataset = load_model(model, weights), load_dataset(data, split)
    chosen: dict[str, Any] = {
        "sigma": sigma, "skip": skip, "limit": limit, "stride": stride, "device": device,
        "name": data if split is None else f"{data}#{split}",
    }  # fmt: skip
    folder = run
    if run is None and sigma is not None:
        from equipoise.runs.attacks.search import default_folder

        folder = default_folder(network, dataset, **chosen)
    try:
        with progress() as bar:
            task = bar.add_task("attacking", total=None)
            summary = attack_run(
                network, dataset, run_dir=folder, epsilons=levels, kind=kind, steps=steps, restarts=restarts,
                samples=samples, votes=votes, seed=seed, batch_size=batch_size, again=again, **chosen,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )  # fmt: skip
    except KeyboardInterrupt:
        kept = "nothing was stored" if folder is None else f"what was attacked is stored in {folder}"
        say(f"interrupted: {kept}; run the same command to continue")
        raise typer.Exit(130) from None
    _show(summary, json)
    if summary.violations or summary.suspected or summary.failures:
        raise typer.Exit(1)


def _show(summary: AttackSummary, json: bool) -> None:
    if json:
        emit_json(summary.to_dict())
        return
    from equipoise.core.accuracy import percent

    proved = ["certified"] if summary.certified else []
    kinds = [f"attacked, {kind}" for kind in reversed(summary.accuracy)]
    shown = table("Accuracy", "radius ε", *proved, *kinds, right=("radius ε", *proved, *kinds))
    for e in next(iter(summary.accuracy.values())):
        cells = [f"{percent(summary.certified[e])} %"] if proved else []
        cells += [f"{100 * by[e]:.2f} %" for _, by in reversed(summary.accuracy.items())]
        shown.add_row(f"{e:g}", *cells)
    results().print(shown)
    tell(*summary.lines())
