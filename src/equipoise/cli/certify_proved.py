"""`equipoise certify --deterministic`: proved radii of a dataset, one input after the other, stored and continued."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from equipoise.cli.consoles import emit_json, interrupted, progress, results, say, table, tell
from equipoise.core.accuracy import percent
from equipoise.core.bounds import format_down
from equipoise.core.errors import InputError

if TYPE_CHECKING:
    from equipoise.runs.proved import ProvedRow, ProvedRun

#: seconds between two lines of progress where there is no terminal
EVERY = 30.0


def certify_deterministic(
    target: str,
    data: str | None,
    split: str | None,
    weights: Path | None,
    run: Path | None,
    levels: list[float] | None,
    export: Path | None,
    json: bool,
    retry_failed: bool,
    **settings: Any,
) -> None:
    """Certify a model, or show a stored run of this kind."""
    from equipoise.runs.proved import describe_proved, is_proved, open_proved, start_proved
    from equipoise.runs.proved.run import check_export

    if export is not None:
        check_export(export)
    if data is None:
        if not is_proved(target):
            raise InputError(f"{target} is no deterministic run: give MODEL and --data to begin one")
        return _finish(open_proved(target), levels, export, json)
    from equipoise.checkpoints import load_model
    from equipoise.data import load_dataset

    shown = data if split is None else f"{data}#{split}"
    job = describe_proved(load_model(target, weights), load_dataset(data, split), name=shown, **settings)
    folder = run or job.default_folder()
    began = time.monotonic()
    last = began
    try:
        with progress() as bar:
            task = bar.add_task("certifying", total=job.manifest.total)

            def show(row: ProvedRow, done: int, total: int) -> None:
                nonlocal last
                text = f"input {row.id}: {row.failure or f'radius {format_down(row.radius, 4)}, {row.method}'}"
                bar.update(task, completed=done, description=text)
                now = time.monotonic()
                if bar.disable and (now - last >= EVERY or done == total):
                    last = now
                    say(f"{done} of {total} inputs; {text}")

            found = start_proved(job, folder, progress=show, retry_failed=retry_failed, tell=say)
    except KeyboardInterrupt:
        interrupted(len(open_proved(folder).rows) if is_proved(folder) else 0, job.manifest.total, folder)
    _finish(found, levels, export, json)


def _finish(run: ProvedRun, levels: list[float] | None, export: Path | None, json: bool) -> None:
    """Export, print the summary, and say by the exit code whether inputs failed or an attack broke a radius."""
    from rich.markup import escape

    found = run.summary(levels)
    if export is not None:
        run.export(export)
    if json:
        emit_json({"run": str(run.folder), **found, "manifest": run.manifest.to_dict()})
    else:
        columns = ("radius ε", "certified accuracy")
        shown = table(escape(f"Run {run.folder}"), *columns, right=columns)
        for level, accuracy in found["accuracy"].items():
            shown.add_row(f"{level:.4g}", f"{percent(accuracy)} %")
        results().print(shown)
        tell(*_lines(found), *(f"input {name} failed: {why}" for name, why in list(run.failures.items())[:5]))
    if found["failed"] or found["broken"]:
        raise typer.Exit(1)


def _lines(found: dict[str, Any]) -> list[str]:
    """The summary in words."""
    ball = {"l2": "ℓ2", "linf": "ℓ∞", "l1": "ℓ1"}[found["norm"]]
    by = ", ".join(f"{name} {count}" for name, count in found["methods"].items()) or "none"
    lines = [
        f"{found['inputs']} of {found['total']} inputs, {found['failed']} failed; proved for every point of the {ball} ball, "
        f"no risk; average radius {format_down(found['average_radius'], 4)}; {found['seconds']:.0f} s",
        f"proved by: {by}",
    ]
    if found["limiting"]:
        pairs = ", ".join(f"{p['answer']} by {p['rival']} ({p['inputs']})" for p in found["limiting"])
        lines.append(f"limiting rivals, most often: {pairs}")
    if found["attacked_inside"]:
        lines.append(
            f"{found['attacked_inside']} attacks within the radius, {len(found['broken'])} radii contradicted"
            + (f" (a bug of equipoise, please report it): {', '.join(found['broken'][:5])}" if found["broken"] else "")
        )
    return [*lines, found["note"]] if found["note"] else lines
