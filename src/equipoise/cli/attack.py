"""`equipoise attack` and `equipoise predict`: a run from the other side, and its classifier as it is deployed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from equipoise.cli import options
from equipoise.cli.consoles import emit_json, print_table, progress, tell
from equipoise.cli.options import Data, Device, Json, RunArgument, Split

if TYPE_CHECKING:
    from equipoise.runs import Run
    from equipoise.runs.store import Recipe

Elsewhere = Annotated[
    str | None, Option("--model", help="load the run's model from here, if it was moved")
]


def _open(run: Path, **changes: Any) -> tuple[Run, Recipe]:
    """A run and how its model and data are loaded, with some of it changed."""
    from equipoise.runs import open_run

    stored = open_run(run)
    if stored.manifest.recipe is None:
        options.refuse(
            f"{run} was made in Python and does not say where its model is: use equipoise.runs in Python"
        )
    given = {name: value for name, value in changes.items() if value is not None}
    return stored, stored.manifest.recipe.model_copy(update=given)


def attack(
    run: RunArgument,
    epsilon: Annotated[str | None, Option(help="also attack at these radii: 0.25,0.5,1.0")] = None,
    steps: Annotated[int, Option(help="take this many gradient steps")] = 20,
    limit: Annotated[
        int | None, Option(help="attack only the first inputs of the run", min=1)
    ] = None,
    device: Device = "cpu",
    model: Elsewhere = None,
    data: Annotated[
        str | None, Option(help="read the run's data from here, if it was moved")
    ] = None,
    json: Json = False,
) -> None:
    """Attack the certified inputs of a run, inside their radius and beyond it.

    Model, data and preprocessing are those of the run. Every certificate is
    attacked at 0.99 times its radius, where none may break, and at 1.5 times,
    which shows how strong the attack is. Outcomes are stored in the run and shown
    by `equipoise report`; kill it whenever you like, the same command continues.
    Exit code 1: a certificate broke, or some inputs could not be attacked.

    Examples:

      equipoise attack runs/a
      equipoise attack runs/a --epsilon 0.25,0.5 --steps 50
    """
    from equipoise.core.accuracy import percent
    from equipoise.runs import attack_run

    levels = options.epsilons(epsilon) or []
    stored, recipe = _open(run, model=model, data=data)
    network = options.load_network(recipe, batch=1)
    dataset = options.load_data(recipe)
    try:
        with progress("attacking") as update:
            summary = attack_run(
                stored,
                network,
                dataset,
                epsilons=levels,
                steps=steps,
                limit=limit,
                device=device,
                progress=update,
            )
    except KeyboardInterrupt:
        options.interrupted(run)

    if json:
        emit_json(asdict(summary))
    else:
        if summary.accuracy:
            rows = [
                {
                    "radius ε": str(row["epsilon"]),
                    "certified": f"{percent(row['certified'])} %",
                    f"attacked, {summary.kind}": f"{100 * row['attacked']:.2f} %",
                }
                for row in summary.accuracy
            ]
            print_table("Accuracy", rows)
        tell(*summary.lines())
    if summary.broken or summary.failures:
        raise Exit(1)


def predict(
    run: RunArgument,
    data: Data,
    n: Annotated[int, Option(help="draw this many noisy copies of every input")] = 1000,
    alpha: Annotated[float, Option(help="accept this risk of a wrong majority per input")] = 1e-3,
    split: Split = None,
    limit: Annotated[
        int | None, Option(help="take at most this many inputs, in their order", min=1)
    ] = None,
    device: Device = "cpu",
    model: Elsewhere = None,
    json: Json = False,
) -> None:
    """Answer new inputs as the certified classifier of a run does.

    Model, noise and preprocessing are those of the run. A smoothed classifier
    answers with the majority under the noise and gives another class with
    probability at most alpha per input; where the draws do not decide, it
    abstains. Exit code 1: some inputs failed.

    Examples:

      equipoise predict runs/a --data photos/
      equipoise predict runs/a --data digits --limit 10 --json
    """
    from equipoise.runs import predict_run

    stored, recipe = _open(run, model=model, data=data)
    recipe = recipe.model_copy(update={"split": split})
    dataset = options.load_data(recipe)
    network = options.load_network(recipe, batch=stored.settings.chunk_size)
    answers = predict_run(stored, network, dataset, n=n, alpha=alpha, limit=limit, device=device)
    names = dict(enumerate(stored.manifest.data.classes or ()))
    rows = [row | {"class": names.get(row["answer"])} if names else row for row in answers]
    if json:
        emit_json({"run": str(run), "data": data, "n": n, "alpha": alpha, "answers": rows})
    else:
        print_table("Answers", [_cells(row) for row in rows])
        given = [row for row in rows if row["answer"] is not None]
        right = sum(row["answer"] == row["label"] for row in given)
        tell(
            f"{len(rows)} inputs, {len(rows) - len(given)} without an answer"
            + f", {right} right" * dataset.labelled
        )
    if any(row["failure"] for row in rows):
        raise Exit(1)


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """The table's cells of one input: a failure is shown in place of an answer."""
    shown = row | {"answer": row["failure"] or "abstained"} if row["answer"] is None else row
    return {name: str(value) for name, value in shown.items() if name != "failure"}
