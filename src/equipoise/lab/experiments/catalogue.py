"""All experiments by chapter: those of every module of a chapter's folder, and those that installed packages add.

A module has a constant `EXPERIMENT`, or `EXPERIMENTS` where several share their methods. A package adds one through the entry
point group `equipoise.experiments`, whose name is the identifier and whose object is an `Experiment`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from equipoise.core.errors import InputError
from equipoise.lab.experiments.experiment import CHAPTERS, Experiment

GROUP = "equipoise.experiments"


def catalogue() -> dict[str, Experiment | EntryPoint]:
    """Experiments by identifier in the order of the chapters; those of other packages come last, loaded when asked for.

    >>> "readouts" in catalogue()
    True
    """
    found: dict[str, Experiment | EntryPoint] = {}
    for chapter in CHAPTERS:
        for module in pkgutil.iter_modules([str(Path(__file__).parent / chapter)]):
            home = importlib.import_module(f"{__package__}.{chapter}.{module.name}")
            for experiment in getattr(home, "EXPERIMENTS", None) or (home.EXPERIMENT,):
                found[experiment.id] = experiment
    for entry in entry_points(group=GROUP):
        if entry.name in found:
            raise InputError(f"the experiment {entry.name!r} of {entry.value} has the name of another one; rename it")
        found[entry.name] = entry
    return found


def find(identifier: str) -> Experiment:
    """The experiment of this identifier; a misspelt one is answered with the nearest."""
    known = catalogue()
    if identifier not in known:
        near = difflib.get_close_matches(identifier, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`equipoise reproduce --list` shows all"
        raise InputError(f"there is no experiment {identifier!r}; {hint}")
    found = known[identifier]
    if isinstance(found, EntryPoint):
        found = found.load()
    if not isinstance(found, Experiment) or found.id != identifier:
        raise InputError(f"the experiment {identifier!r} must be an Experiment with that id, got {found!r:.80}")
    return found


def every(identifiers: Iterable[str] = ()) -> list[Experiment]:
    """The experiments named, or all of them, in the order of the chapters."""
    wanted = list(identifiers)
    return [find(name) for name in (wanted or catalogue())]
