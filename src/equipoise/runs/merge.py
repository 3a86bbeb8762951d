"""Several runs of one model over disjoint inputs become one."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from equipoise.core import InputError, Refused
from equipoise.runs.manifest import Manifest, differences
from equipoise.runs.run import Run, open_run
from equipoise.runs.store import Store


def merge_runs(sources: Sequence[str | Path], target: str | Path) -> Run:
    """A new run directory with the inputs (and attacks) of all sources, made whole or not at all.

    Refused unless the shards agree on model, data, parameters, map and constant, and share no input. The shards stay.
    """
    if len(sources) < 2:
        raise InputError(f"merging takes at least two runs, got {len(sources)}")
    runs, target = [open_run(s) for s in sources], Path(target)
    if target.exists():
        raise InputError(f"{target} exists already: merge into a new directory")
    manifest = _common(runs)
    _require_disjoint(runs)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.parent / f".{target.name}.{os.getpid()}"
        draft.mkdir()
    except OSError as error:
        raise InputError(f"cannot make {target}: {error.strerror}") from error
    try:
        manifest.write(draft)
        with Store.of(draft, manifest, writable=True) as store:
            for run in runs:
                store.put_all(run.rows)
                store.put_attacks(run.attacks())
                for s in run.sessions():
                    store.add_session(s["started"], s["engine"], s["device"], s["versions"])
        draft.rename(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return open_run(target)


def _common(runs: Sequence[Run]) -> Manifest:
    """The manifest of the union."""
    first = runs[0].manifest
    selection = tuple(s for run in runs for s in run.manifest.selection)
    for run in runs[1:]:
        m = run.manifest
        other = replace(m, selection=first.selection, total=first.total)
        found = differences(first, other)
        found += [f"map: {first.map} → {m.map}"] if m.map != first.map else []
        found += [f"lipschitz: {first.lipschitz} → {m.lipschitz}"] if m.lipschitz != first.lipschitz else []
        if found:
            raise Refused(f"{runs[0].folder} and {run.folder} are not shards of one run ({'; '.join(found)})")
    return replace(first, selection=selection, total=sum(run.manifest.total for run in runs))


def _require_disjoint(runs: Sequence[Run]) -> None:
    owner: dict[int | str, Path] = {}
    for run in runs:
        for name in run.ids:
            if name in owner:
                raise Refused(f"input {name!r} is in {owner[name]} and in {run.folder}: shards must not share inputs")
            owner[name] = run.folder
