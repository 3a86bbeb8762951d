"""`equipoise train`: a recipe to a network with figures and proved bounds; a run that was stopped goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, messages, print_table, progress, say, tell
from equipoise.cli.options import Json, refuse

if TYPE_CHECKING:
    from equipoise.train import Progress, Recipe, Result


def train(
    recipe: Annotated[str | None, typer.Argument(help="a YAML file, or the name of a bundled recipe")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe: --set optimizer.lr=0.1")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run; the same command goes on where it stopped. [runs/NAME]")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Do not use a GPU.")] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let the recipe file name code of its own (module:factory); it is run.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the bundled recipes.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the whole recipe, defaults included; train nothing.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", help="Convert this checkpoint, or package.module:factory, to 1-Lipschitz layers and train it."
        ),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="With --from package.module:factory: safetensors.")] = None,
    method: Annotated[str, typer.Option(help="With --from: the layers, sr, aol, bcop, cayley, …")] = "sr",
    data: Annotated[str | None, typer.Option(help="With --from and no recipe: digits, a file or a folder.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after this time; the same command goes on.", min=0)
    ] = None,
    planned: Annotated[
        bool, typer.Option("--plan", help="Say what it costs (steps, hours on this machine); train nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a network by a recipe: data, model, loss, regularizers, noise, optimizer, schedule.

    Measures loss, accuracy, the proved Lipschitz bound, the accuracy certified by it and the
    norm of every layer. A run that was killed goes on with the same command, bit by bit.
    The folder of the run is a checkpoint for `equipoise audit` and `equipoise certify`.

    Examples:

      equipoise train --list
      equipoise train sll-sr-digits
      equipoise train sll-sr-small-cifar10 --plan
      equipoise train --from runs/mlp --method sr --data digits
      equipoise train --from my_nets:net --weights net.safetensors --data digits --minutes 30
      equipoise train recipe.yaml --set optimizer.lr=0.05 --set seed=1 --run-dir runs/seed1
      accelerate launch --num_processes 4 $(command -v equipoise) train recipe.yaml
    """
    from equipoise.train import read_recipe

    if listed:
        _list(json)
        return
    if source is not None:
        if planned or show:
            refuse("--plan and --show are about a recipe alone: leave out --from, or leave out --plan and --show")
        _robustify(source, weights, recipe, changes or [], run_dir, cpu, method, data, minutes, json)
        return
    if recipe is None:
        refuse("which recipe? give a YAML file or a bundled name; `equipoise train --list` shows them")
    checked = read_recipe(recipe, changes or [], allow_code=allow_code)
    if show:
        _show_recipe(checked, json)
    elif planned:
        _plan(checked, json)
    else:
        result, main = _run(checked, run_dir or Path("runs") / checked.name, cpu, minutes)
        if main:
            emit_json(result.to_dict()) if json else _show(result)


def _list(json: bool) -> None:
    from equipoise.train import bundled, read_recipe

    recipes = {name: read_recipe(name) for name in bundled()}
    if json:
        emit_json({name: {"description": r.description, "data": r.data.path} for name, r in recipes.items()})
    else:
        rows = [(name, recipe.data.path, recipe.description) for name, recipe in recipes.items()]
        print_table("bundled recipes", ("name", "data", "what"), rows)


def _robustify(
    source: str, weights: Path | None, recipe: str | None, changes: list[str], run_dir: Path | None, cpu: bool,
    method: str, data: str | None, minutes: float | None, json: bool,
) -> None:  # fmt: skip
    """Convert, train, and show what it was and what it became."""
    from equipoise.train.robustify import robustify

    def report(event: Progress) -> None:
        if event.row is not None and not json:
            say(_line(event))

    folder = run_dir or Path("runs") / f"{Path(source).resolve().name}-{method}".replace(":", "-")
    outcome = robustify(
        source, folder, weights=weights, method=method, data=data, recipe=recipe, changes=changes,
        minutes=minutes, cpu=cpu, progress=report,
    )  # fmt: skip
    if json:
        emit_json({**outcome.to_dict(), "folder": str(folder)})
        return
    columns = ("figure", "before", "after")
    print_table(f"{source} → {folder}", columns, outcome.comparison(), right=columns[1:])
    left = [r.name for r in outcome.conversion.left]
    if left:
        tell(f"not converted: {', '.join(left)}")
    tell(f"written: {folder / 'before-after.json'}")


def _plan(recipe: Recipe, json: bool) -> None:
    from equipoise.train.loop import plan_recipe

    plan = plan_recipe(recipe)
    if json:
        emit_json(plan)
        return
    tell(f"{plan['steps']:,} steps of {plan['step_seconds']:.3g} s of processor time: {plan['hours']:.3g} h")


def _show_recipe(recipe: Recipe, json: bool) -> None:
    import yaml

    document = recipe.to_dict()
    if json:
        emit_json(document)
    else:
        typer.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), nl=False)


def _run(recipe: Recipe, folder: Path, cpu: bool, minutes: float | None) -> tuple[Result, bool]:
    """Train with a progress bar on a terminal and a line per epoch elsewhere; whether this is the process that reports."""
    from torch import distributed

    from equipoise.train import run_recipe

    console = messages()
    with progress() as bar:
        task = bar.add_task(recipe.name, total=None)

        def report(event: Progress) -> None:
            if event.row is not None:
                (bar.console if console.is_terminal else console).print(_line(event), markup=False, soft_wrap=True)
                return
            loss = "" if event.loss is None else f"  loss {event.loss:.4g}"
            description = f"{recipe.name}  epoch {event.epoch}/{event.epochs}{loss}"
            bar.update(task, total=event.steps, completed=event.step, description=description)

        try:
            result = run_recipe(recipe, folder, minutes=minutes, cpu=cpu, progress=report)
        except KeyboardInterrupt:
            say(f"interrupted: the same command goes on from the last checkpoint in {folder}")
            raise typer.Exit(130) from None
    if not (distributed.is_available() and distributed.is_initialized()):
        return result, True
    main = distributed.get_rank() == 0
    distributed.barrier()  # nobody closes a connection that another process still reads
    distributed.destroy_process_group()
    return result, main


def _figures(row: dict[str, Any]) -> dict[str, str]:
    """The figures of an epoch as texts; certified shares rounded down, bounds up."""
    from equipoise.core.accuracy import percent
    from equipoise.core.bounds import format_up

    split = row.get("split", "test")
    values = {"train loss": row.get("train_loss"), "train accuracy": row.get("train_accuracy")}
    values |= {f"{split} loss": row.get("loss"), f"{split} accuracy": row.get("accuracy")}
    values |= {f"test {name}": value for name, value in (row.get("test") or {}).items()}
    texts = {
        name: f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
        for name, value in values.items()
        if isinstance(value, float)
    }
    texts |= {f"certified at ε = {e}": f"{percent(a)}%" for e, a in row.get("certified_accuracy", {}).items()}
    if row.get("bound") is not None:
        texts["Lipschitz bound (ℓ2, proved)"] = format_up(row["bound"], 5)
    elif row.get("bound_reason"):
        texts["Lipschitz bound"] = f"refused: {row['bound_reason']}"
    return texts


def _line(event: Progress) -> str:
    row = dict(event.row or {})
    texts = [f"{name} {text}" for name, text in _figures(row).items()]
    return "  ".join([f"epoch {event.epoch}/{event.epochs}", *texts, f"{row['seconds']:.1f} s"])


def _show(result: Result) -> None:
    from equipoise.checkpoints import registered

    stopped = "" if result.finished else f" of {result.recipe.epochs}; the same command goes on"
    rows = [("epochs", f"{result.final['epoch']}{stopped}"), *_figures(result.final).items()]
    print_table(f"{result.recipe.name} → {result.folder}", ("figure", "value"), rows, right=("value",))
    factory = result.recipe.model.factory
    own = f"{factory} --weights {result.folder}/model.safetensors"
    tell(f"Next: equipoise audit {result.folder if registered(factory) else own}")
