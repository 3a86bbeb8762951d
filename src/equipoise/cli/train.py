"""`equipoise train`: a recipe to a network with figures and proved bounds; a run that was stopped goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.consoles import emit_json, messages, progress, results, say, table, tell
from equipoise.cli.options import Json
from equipoise.core.errors import InputError

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
    distill: Annotated[float, typer.Option(help="With --from: weight of the original's answers in the loss.")] = 0.0,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after this time; the same command goes on.", min=0)
    ] = None,
    planned: Annotated[
        bool, typer.Option("--plan", help="Say what it costs (steps, hours on this machine); train nothing.")
    ] = False,
    as_json: Json = False,
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
        _list(as_json)
        return
    if source is not None:
        if planned or show:
            raise InputError(
                "--plan and --show are about a recipe alone: leave out --from, or leave out --plan and --show"
            )
        _robustify(source, weights, recipe, changes or [], run_dir, cpu, method, data, distill, minutes, as_json)
        return
    if recipe is None:
        raise InputError("which recipe? give a YAML file or a bundled name; `equipoise train --list` shows them")
    chosen = read_recipe(recipe, changes or [], allow_code=allow_code)
    if show:
        _show_recipe(chosen, as_json)
        return
    if planned:
        _plan(chosen, as_json)
        return
    folder = run_dir if run_dir is not None else Path("runs") / chosen.name
    result, main = _run(chosen, folder, cpu, minutes)
    if not main:
        return
    if as_json:
        emit_json(result.to_dict())
    else:
        _show(result)


def _list(as_json: bool) -> None:
    from equipoise.train import bundled, read_recipe

    found = {name: read_recipe(name) for name in bundled()}
    if as_json:
        emit_json({name: {"description": r.description, "data": r.data.path} for name, r in found.items()})
        return
    shown = table("bundled recipes", "name", "data", "what")
    for name, item in found.items():
        shown.add_row(name, item.data.path, item.description)
    results().print(shown, markup=False)


def _robustify(
    source: str, weights: Path | None, recipe: str | None, changes: list[str], run_dir: Path | None, cpu: bool,
    method: str, data: str | None, distill: float, minutes: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Convert, train, and show what it was and what it became."""
    from equipoise.train.robustify import robustify

    folder = (
        run_dir if run_dir is not None else Path("runs") / f"{Path(source).resolve().name}-{method}".replace(":", "-")
    )
    found = robustify(
        source, folder, weights=weights, method=method, data=data, recipe=recipe, changes=changes, distill=distill,
        minutes=minutes, cpu=cpu, progress=None if as_json else _epochs,
    )  # fmt: skip
    if as_json:
        emit_json({**found.to_dict(), "folder": str(folder)})
        return
    shown = table(f"{source} → {folder}", "figure", "before", "after", right=("before", "after"))
    for row in found.comparison():
        shown.add_row(*row)
    results().print(shown, markup=False)
    left = [r.name for r in found.conversion.left]
    if left:
        tell(f"not converted: {', '.join(left)}")
    results().print(f"written: {folder / 'before-after.md'}", markup=False)


def _epochs(event: Progress) -> None:
    if event.row is not None:
        say(_line(event))


def _plan(recipe: Recipe, as_json: bool) -> None:
    from equipoise.train.loop import plan_recipe

    plan = plan_recipe(recipe)
    if as_json:
        emit_json(plan)
        return
    shown = table(f"{recipe.name}: what it costs", "figure", "value", right=("value",))
    shown.add_row("training examples", f"{plan['examples']:,}")
    shown.add_row("steps", f"{plan['steps']:,}")
    shown.add_row("a step, processor time of this machine", f"{plan['step_seconds']:.3g} s")
    shown.add_row("all steps", f"{plan['hours']:.3g} h")
    results().print(shown, markup=False)
    tell(f"number of examples from {plan['where']}; a step of a few examples was timed, its time extrapolated")
    if plan["published"]:
        tell(f"published: {plan['published']}")


def _show_recipe(recipe: Recipe, as_json: bool) -> None:
    import yaml

    document = recipe.to_dict()
    if as_json:
        emit_json(document)
    else:
        typer.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), nl=False)


def _run(recipe: Recipe, folder: Path, cpu: bool, minutes: float | None) -> tuple[Result, bool]:
    """Train with a progress bar on a terminal and a line per epoch elsewhere; whether this is the process that reports."""
    from equipoise.train import run_recipe

    with progress() as bar:
        try:
            result = run_recipe(recipe, folder, minutes=minutes, cpu=cpu, progress=_reporter(bar, recipe))
        except KeyboardInterrupt:
            said = f"interrupted: the same command goes on from the last checkpoint in {folder}"
            say(said)
            raise typer.Exit(130) from None
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return result, True
    main = distributed.get_rank() == 0
    distributed.barrier()  # nobody closes a connection that another process still reads
    distributed.destroy_process_group()
    return result, main


def _reporter(bar: Any, recipe: Recipe) -> Callable[[Progress], None]:
    console = messages()
    task = bar.add_task(recipe.name, total=None)

    def report(event: Progress) -> None:
        if event.row is not None:
            (bar.console if console.is_terminal else console).print(_line(event), markup=False, soft_wrap=True)
        elif console.is_terminal:
            said = "" if event.loss is None else f"  loss {event.loss:.4g}"
            bar.update(
                task, total=event.steps, completed=event.step,
                description=f"{recipe.name}  epoch {event.epoch}/{event.epochs}{said}",
            )  # fmt: skip

    return report


def _line(event: Progress) -> str:
    from equipoise.core.accuracy import percent
    from equipoise.core.bounds import format_up

    row = dict(event.row or {})
    parts = [f"epoch {event.epoch}/{event.epochs}", f"train loss {row['train_loss']:.4f}"]
    if row.get("accuracy") is not None:
        parts.append(f"{row.get('split', 'test')} accuracy {row['accuracy']:.2%}")
    parts += [f"certified at {e}: {percent(a)}%" for e, a in row.get("certified_accuracy", {}).items()]
    if row.get("bound") is not None:
        parts.append(f"bound {format_up(row['bound'], 4)}")
    return "  ".join([*parts, f"{row['seconds']:.1f} s"])


def _show(result: Result) -> None:
    from equipoise.checkpoints import registered
    from equipoise.core.accuracy import percent
    from equipoise.core.bounds import format_up

    final = result.final
    split = final.get("split", "test")
    shown = table(f"{result.recipe.name} → {result.folder}", "figure", "value", right=("value",))
    epochs = f"{final['epoch']} of {result.recipe.epochs}"
    shown.add_row("epochs", epochs if result.finished else f"{epochs}, stopped: the same command goes on")
    figures = {"train loss": final.get("train_loss"), "train accuracy": final.get("train_accuracy")}
    figures |= {f"{split} loss": final.get("loss"), f"{split} accuracy": final.get("accuracy")}
    figures |= {f"test {name}": value for name, value in (final.get("test") or {}).items()}
    for name, value in figures.items():
        if isinstance(value, float):
            shown.add_row(name, f"{value:.2%}" if "accuracy" in name else f"{value:.4f}")
    for epsilon, value in final.get("certified_accuracy", {}).items():
        shown.add_row(f"certified accuracy at ε = {epsilon}", f"{percent(value)}%")
    if final.get("bound") is not None:
        shown.add_row("Lipschitz bound (ℓ2, proved)", format_up(final["bound"], 5))
    elif final.get("bound_reason"):
        shown.add_row("Lipschitz bound", f"refused: {final['bound_reason']}")
    results().print(shown, markup=False)
    factory = result.recipe.model.factory
    own = f"{factory} --weights {result.folder}/model.safetensors"
    results().print(f"Next: equipoise audit {result.folder if registered(factory) else own}", markup=False)
