"""`equipoise attack` and `equipoise predict`: a run from the other side, and its classifier as it is deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli import options
from equipoise.cli.consoles import emit_json, progress, results, say, table, tell
from equipoise.cli.loading import load_data, load_network
from equipoise.core.errors import InputError

if TYPE_CHECKING:
    from equipoise.runs import Run
    from equipoise.runs.settings import Recipe

Elsewhere = Annotated[str | None, typer.Option("--model", help="the model of the run, if it lies elsewhere now")]


def attack(
    run: options.RunArgument,
    epsilon: Annotated[str | None, typer.Option(help="further radii, for accuracy under attack: 0.25,0.5,1.0")] = None,
    steps: Annotated[int, typer.Option(help="gradient steps per start")] = 20,
    restarts: Annotated[int, typer.Option(help="random starts")] = 1,
    samples: Annotated[int, typer.Option(help="smoothed: noise draws per step")] = 16,
    votes: Annotated[int, typer.Option(help="smoothed: draws that judge an attack")] = 1000,
    seed: Annotated[int, typer.Option(help="of starts and noise")] = 0,
    limit: Annotated[int | None, typer.Option(help="the first inputs of the run only")] = None,
    device: options.Device = "cpu",
    model: Elsewhere = None,
    data: Annotated[str | None, typer.Option(help="the data of the run, if it lies elsewhere now")] = None,
    json: options.Json = False,
) -> None:
    """Attack the certified inputs of a run inside their radius, where none may break, and beyond it.

    Model, data and preprocessing are those of the run. Every certificate is attacked at 0.99 and
    at 1.5 times its radius: none may break at the first, the second shows the attack's power.
    Outcomes are stored in the run, so a report shows them; kill it whenever you like and run the
    same command again. Exit code 1: a certificate broke, or some inputs could not be attacked.

    Examples:

      equipoise attack runs/a
      equipoise attack runs/a --epsilon 0.25,0.5 --steps 50 --restarts 5
    """
    from equipoise.core.accuracy import percent
    from equipoise.core.bounds import format_down
    from equipoise.runs import attack_run, open_run

    levels = [] if epsilon is None else options.numbers(epsilon, "--epsilon takes numbers like 0.25,0.5,1.0")
    found = open_run(run)
    recipe = _recipe(found, model, data)
    try:
        with progress() as bar:
            task = bar.add_task("attacking", total=None)
            summary = attack_run(
                found,
                load_network(recipe, batch=1),
                load_data(recipe),
                epsilons=levels,
                steps=steps,
                restarts=restarts,
                samples=samples,
                votes=votes,
                seed=seed,
                limit=limit,
                device=device,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except KeyboardInterrupt:
        say(f"interrupted: what was attacked is stored in {run}; run the same command to continue")
        raise typer.Exit(130) from None

    if json:
        emit_json(summary.to_dict())
    else:
        if summary.accuracy:
            columns = ("radius ε", "certified", f"attacked, {summary.kind}")
            shown = table("Accuracy", *columns, right=columns)
            for e, share in summary.accuracy.items():
                shown.add_row(format_down(e, 4), f"{percent(summary.certified[e])} %", f"{100 * share:.2f} %")
            results().print(shown)
        tell(*summary.lines())
    if summary.broken or summary.failures:
        raise typer.Exit(1)


def _recipe(run: Run, model: str | None, data: str | None) -> Recipe:
    """How the run's model and data are loaded."""
    from equipoise.runs.settings import Recipe

    changes = {name: value for name, value in (("model", model), ("data", data)) if value is not None}
    recipe = run.manifest.recipe
    if recipe is not None:
        return recipe.model_copy(update=changes)
    if model is None or data is None:
        raise InputError(
            f"{run.folder} was made in Python and does not say where its model is: give --model and --data"
        )
    return Recipe(model=model, data=data)


def predict(
    run: options.RunArgument,
    data: Annotated[str, typer.Option(help="the inputs: a folder of pictures, a .npz or .parquet file, …")],
    n: Annotated[int, typer.Option(help="draws per input")] = 1000,
    alpha: Annotated[float, typer.Option(help="risk of a wrong majority, per input")] = 1e-3,
    split: options.Split = None,
    limit: Annotated[int | None, typer.Option(help="at most this many inputs, in their order")] = None,
    device: options.Device = "cpu",
    model: Elsewhere = None,
    json: options.Json = False,
) -> None:
    """Answer new inputs as the certified classifier of a run does.

    Model, noise and preprocessing are those of the run. A smoothed classifier answers with the
    majority under the noise, and gives another class with probability at most alpha per input;
    where the draws do not tell, there is no answer. Exit code 1: some inputs failed.

    Examples:

      equipoise predict runs/a --data photos/
      equipoise predict runs/a --data digits --limit 10 --json
    """
    from equipoise.runs import open_run, predict_run

    found = open_run(run)
    recipe = _recipe(found, model, data if found.manifest.recipe is None else None)
    dataset = load_data(recipe, data, split)
    answers = list(predict_run(found, load_network(recipe), dataset, n=n, alpha=alpha, limit=limit, device=device))
    names: Any = found.manifest.data.classes or dataset.classes
    labelled = any(a.label >= 0 for a in answers)

    def word(k: int) -> str | None:
        return None if k < 0 else str(names[k]) if names and k < len(names) else str(k)

    if json:
        rows = [
            {"id": a.id, "answer": None if a.answer < 0 else a.answer, "class": word(a.answer), "failure": a.failure}
            | ({"label": a.label} if labelled else {})
            for a in answers
        ]
        emit_json({"run": str(run), "data": data, "n": n, "alpha": alpha, "answers": rows})
    else:
        shown = table("Answers", "input", "answer", *(("label",) if labelled else ()))
        for a in answers:
            said = f"failed: {a.failure}" if a.failure else word(a.answer) or "no answer"
            shown.add_row(str(a.id), said, *((word(a.label) or "",) if labelled else ()))
        results().print(shown)
        silent = sum(a.answer < 0 and a.failure is None for a in answers)
        right = f", {sum(a.answer == a.label >= 0 for a in answers)} right" if labelled else ""
        tell(f"{len(answers)} inputs{right}, {silent} without an answer")
    if any(a.failure for a in answers):
        raise typer.Exit(1)
