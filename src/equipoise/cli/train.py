"""`equipoise train`: a recipe to a network with figures and proved bounds; a run that was stopped goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from equipoise.cli.consoles import emit_json, print_table, progress, say, tell
from equipoise.cli.options import Json, interrupted, refuse

if TYPE_CHECKING:
    from equipoise.train import Progress, Result


def train(
    recipe: Annotated[
        str | None, Argument(help="a YAML file, or the name of a bundled recipe")
    ] = None,
    changes: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="change the recipe: --set optimizer.lr=0.1"),
    ] = None,
    run_dir: Annotated[Path | None, Option(help="store the run here; default: runs/NAME")] = None,
    cpu: Annotated[bool, Option("--cpu", help="do not use a GPU")] = False,
    allow_code: Annotated[
        bool,
        Option("--allow-code", help="let the recipe file name code (module:factory) and run it"),
    ] = False,
    listed: Annotated[bool, Option("--list", help="list the bundled recipes")] = False,
    source: Annotated[
        str | None,
        Option(
            "--from",
            help="convert a checkpoint, Hugging Face folder or package.module:factory to 1-Lipschitz layers and train it",
        ),
    ] = None,
    weights: Annotated[
        Path | None, Option(help="with --from package.module:factory: load these safetensors")
    ] = None,
    method: Annotated[
        str, Option(help="with --from: use these layers: sr, aol, bcop, cayley, …")
    ] = "sr",
    data: Annotated[
        str | None, Option(help="with --from and no recipe: train on digits, a file or a folder")
    ] = None,
    minutes: Annotated[
        float | None, Option(help="stop after this time; the same command continues", min=0)
    ] = None,
    planned: Annotated[
        bool, Option("--plan", help="print the cost (steps, hours on this machine) and stop")
    ] = False,
    json: Json = False,
) -> None:
    """Train a network from a recipe: data, model, loss, noise, optimizer, schedule.

    Measures loss, accuracy, the proved Lipschitz bound and the accuracy it
    certifies. After a stop the same command continues, bit for bit. The folder of
    the run is a checkpoint for `equipoise audit` and `equipoise certify`.

    Examples:

      equipoise train --list
      equipoise train sll-sr-digits
      equipoise train sll-sr-small-cifar10 --plan
      equipoise train --from runs/mlp --method sr --data digits
      equipoise train --from my_nets:net --weights w.safetensors --data digits
      equipoise train recipe.yaml --set optimizer.lr=0.05 --run-dir runs/lr
      torchrun --nproc-per-node 4 -m equipoise train recipe.yaml
    """
    from equipoise.train import read_recipe, run_recipe
    from equipoise.train.loop import plan_recipe
    from equipoise.train.robustify import plan_robustify, robustify

    if listed:
        return _list(json)
    if source is not None:
        if recipe is None and data is None:
            refuse("which data? --from takes --data, or a recipe")
        name = f"{Path(source).resolve().name}-{method}"
        folder = run_dir or Path("runs") / name.replace(":", "-")
        task = {
            "weights": weights,
            "method": method,
            "data": data,
            "recipe": recipe,
            "changes": changes or [],
        }
        if planned:
            return _show_plan(plan_robustify(source, **task), json)
        outcome = _trained(robustify, source, folder, minutes=minutes, cpu=cpu, **task)
        if json:
            emit_json({**outcome.to_dict(), "folder": str(folder)})
        else:
            before = _figures(outcome.before)
            rows = [
                {"figure": name, "before": before.get(name, "–"), "after": text}
                for name, text in _figures(outcome.after).items()
            ]
            print_table(f"{source} → {folder}", rows)
            left = ", ".join(f"{row.name} ({row.was})" for row in outcome.conversion.left)
            tell(f"not converted: {left or 'nothing'}", f"Next: equipoise audit {folder}/model.pt2")
        return
    if recipe is None:
        refuse(
            "which recipe? give a YAML file or a bundled name; `equipoise train --list` shows them"
        )
    checked = read_recipe(recipe, changes or [], allow_code=allow_code)
    if planned:
        return _show_plan(plan_recipe(checked), json)
    result = _trained(
        run_recipe, checked, run_dir or Path("runs") / checked.name, minutes=minutes, cpu=cpu
    )
    if _reports():
        emit_json(result.to_dict()) if json else _show(result)


def _show_plan(plan: dict[str, Any], json: bool) -> None:
    line = f"{plan['steps']:,} steps of {plan['step_seconds']:.3g} s of processor time: {plan['hours']:.3g} h"
    emit_json(plan) if json else tell(line)


def _list(json: bool) -> None:
    from equipoise.train import bundled, read_recipe

    recipes = [read_recipe(name) for name in bundled()]
    rows = [{"name": r.name, "data": r.data.path, "description": r.description} for r in recipes]
    if json:
        emit_json({row["name"]: row for row in rows})
    else:
        print_table("bundled recipes", rows)


def _trained(work: Callable[..., Any], what: Any, folder: Path, **settings: Any) -> Any:
    """Train with a progress bar on a terminal and a line per epoch."""
    with progress(folder.name) as update:

        def report(event: Progress) -> None:
            if event.row is not None:
                say(_line(event))
            loss = "" if event.loss is None else f"  loss {event.loss:.4g}"
            description = f"{folder.name}  epoch {event.epoch}/{event.epochs}{loss}"
            update(event.step, event.steps, description=description)

        try:
            return work(what, folder, progress=report, **settings)
        except KeyboardInterrupt:
            interrupted(folder)


def _reports() -> bool:
    """Whether this is the process that reports; processes that trained together part here."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    main = distributed.get_rank() == 0
    distributed.barrier()  # nobody closes a connection that another process still reads
    distributed.destroy_process_group()
    return main


def _figures(row: dict[str, Any]) -> dict[str, str]:
    """The figures of an epoch as texts; certified shares rounded down, bounds up."""
    from equipoise.core.accuracy import percent
    from equipoise.core.bounds import format_up

    split = row.get("split", "test")
    values = {
        "train loss": row.get("train_loss"),
        "train accuracy": row.get("train_accuracy"),
        f"{split} loss": row.get("loss"),
        f"{split} accuracy": row.get("accuracy"),
    }
    values |= {f"test {name}": value for name, value in row.get("test", {}).items()}
    texts = {
        name: f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
        for name, value in values.items()
        if isinstance(value, float)
    }
    texts |= {
        f"certified at ε = {e}": f"{percent(a)}%"
        for e, a in (row.get("certified_accuracy") or {}).items()
    }
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
    figures = {"epochs": f"{result.final['epoch']}{stopped}", **_figures(result.final)}
    rows = [{"figure": name, "value": text} for name, text in figures.items()]
    print_table(f"{result.recipe.name} → {result.folder}", rows)
    if registered(result.recipe.model.factory):
        tell(f"Next: equipoise audit {result.folder}")
