"""All experiments by chapter, what a run of them would do, and running them: results are kept, finished ones are not repeated.

A module has a constant `EXPERIMENT`, or `EXPERIMENTS` where several share their methods. A package adds one through the entry
point group `equipoise.experiments`, whose name is the identifier and whose object is an `Experiment`.
"""

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from equipoise.core.errors import EquipoiseError, InputError, did_you_mean
from equipoise_lab.experiments import results
from equipoise_lab.experiments.experiment import (
    CHAPTERS,
    Cells,
    Context,
    Experiment,
    Label,
    Row,
    Verdict,
)

#: the number of a table or figure: chapter or appendix, and number
_NUMBER = r"([0-9A-Z]+)\.([0-9]+)"
GROUP = "equipoise.experiments"


def catalogue() -> dict[str, Experiment | EntryPoint]:
    """Experiments by identifier in the order of the chapters; those of other packages come last, loaded when asked for.

    >>> "readouts" in catalogue()
    True
    """
    experiments: dict[str, Experiment | EntryPoint] = {}
    for chapter in CHAPTERS:
        for module in pkgutil.iter_modules([str(Path(__file__).parent / chapter)]):
            home = importlib.import_module(f"{__package__}.{chapter}.{module.name}")
            for experiment in getattr(home, "EXPERIMENTS", None) or (home.EXPERIMENT,):
                experiments[experiment.id] = experiment
    for entry in entry_points(group=GROUP):
        if entry.name in experiments:
            raise InputError(
                f"the experiment {entry.name!r} of {entry.value} has the name of another one; rename it"
            )
        experiments[entry.name] = entry
    return experiments


def find(identifier: str) -> Experiment:
    """The experiment of this identifier or of a place like "Table 5.1"; a misspelt one is answered with the nearest."""
    experiments = catalogue()
    if identifier not in experiments:
        matching = at_place(identifier)
        if matching:
            return matching[0]
        hint = did_you_mean(identifier, experiments) or "; `equipoise reproduce --list` shows all"
        raise InputError(f"there is no experiment {identifier!r}{hint}")
    experiment = experiments[identifier]
    if isinstance(experiment, EntryPoint):
        experiment = experiment.load()
    if not isinstance(experiment, Experiment) or experiment.id != identifier:
        raise InputError(
            f"the experiment {identifier!r} must be an Experiment with that id, got {experiment!r:.80}"
        )
    return experiment


def at_place(place: str) -> list[Experiment]:
    """All experiments of a table or figure."""
    return [e for e in catalogue().values() if isinstance(e, Experiment) and _is_at(e, place)]


def _is_at(experiment: Experiment, place: str) -> bool:
    """Whether the experiment reproduces this table or figure: `Figures 4.6 to 4.9` hold `Figure 4.7`.

    >>> [_is_at(find("training-stability"), place) for place in ("Figure 4.7", "figure 4.1", "Table 4.7")]
    [True, False, False]
    """
    wanted = re.fullmatch(rf"\s*(table|figure)\s+{_NUMBER}\s*", place, re.IGNORECASE)
    if wanted is None:
        return False
    kind, chapter, number = wanted[1].lower(), wanted[2].upper(), int(wanted[3])
    for part in re.finditer(r"(Table|Figure)s?([^TF]*)", experiment.place):
        if part[1].lower() != kind:
            continue
        for first in re.finditer(rf"{_NUMBER}(?:\s+to\s+{_NUMBER})?", part[2]):
            last = int(first[4] or first[2])
            if first[1] == chapter and int(first[2]) <= number <= last:
                return True
    return False


def every(identifiers: Iterable[str] = ()) -> list[Experiment]:
    """The experiments named, all of a place, or all there are, in the order of the chapters."""
    wanted = list(identifiers)
    if not wanted:
        return [find(name) for name in catalogue()]
    named = {e.id: e for name in wanted for e in (at_place(name) or [find(name)])}
    return list(named.values())


@dataclass(frozen=True)
class Outcome:
    """A result, freshly measured or stored, or the sentence on why there is none."""

    experiment: Experiment
    result: results.Result | None
    stored: bool = False
    failure: str = ""


def reproduce(
    experiment: Experiment, scale: str, context: Context, folder: Path, *, again: bool = False
) -> Outcome:
    """One experiment: its stored result if it has the same settings, scale and seed, else a run that writes one.

    A dry run goes through the same code with two turns of every loop, writes nothing and judges nothing. Parts that a
    stopped run had finished (`Context.cell`) are not run again, and their time counts.
    """
    settings = experiment.settings(scale)
    if not again and not context.dry:
        kept = results.read(experiment, folder)
        if kept is not None and (kept.scale, kept.seed) == (scale, context.seed):
            return Outcome(experiment, kept, stored=True)
    if not context.dry:
        owner = {**experiment.describe(scale), "seed": context.seed}
        context = replace(context, cells=Cells.open(folder / "cells.jsonl", owner))
    cells = context.cells
    before, spent = cells.seconds, cells.processor
    start, used, here = time.perf_counter(), time.process_time(), results.machine()
    rows: tuple[Row, ...] = tuple(experiment.run(settings, context))
    seconds = before + time.perf_counter() - start
    here["processor seconds"] = round(spent + time.process_time() - used, 1)
    if not rows:
        raise InputError(f"{experiment.id} gave no rows")
    if context.dry:
        verdict = Verdict(Label.DRY, f"{len(rows)} rows built and run", experiment.published)
        return Outcome(
            experiment, results.Result(experiment, scale, context.seed, rows, (verdict,), seconds)
        )
    result = results.Result(
        experiment, scale, context.seed, rows, experiment.verdicts(rows, scale), seconds, here
    )
    results.write(result, folder)
    cells.close()
    return Outcome(experiment, result)


def reproduce_all(
    experiments: Iterable[Experiment],
    scale: str,
    context: Context,
    folder: Path,
    *,
    again: bool = False,
    before: Callable[[Experiment], None] = lambda experiment: None,
) -> Iterator[Outcome]:
    """Many experiments, each in its own folder; what cannot run here (missing data or package) is an outcome too."""
    for experiment in experiments:
        before(experiment)
        try:
            yield reproduce(experiment, scale, context, folder / experiment.id, again=again)
        except EquipoiseError as error:
            yield Outcome(experiment, None, failure=str(error))


@dataclass(frozen=True)
class Planned:
    """One experiment: whether it would run, what it lacks, and the seconds of its stored result if there is one."""

    id: str
    scale: str
    stored: bool
    missing: tuple[str, ...]
    seconds: float | None
    settings: dict[str, Any]
    power: str = ""  # what the seeds of a stored result, at whatever scale, could detect

    @property
    def action(self) -> str:
        """What would happen."""
        if self.stored:
            return "keep the stored result"
        return f"cannot run: {', '.join(self.missing)} not found" if self.missing else "run"


def plan(
    experiments: Iterable[Experiment], scale: str, seed: int, data: Path | None, folder: Path
) -> list[Planned]:
    """What `reproduce` would do with these experiments; nothing is run and nothing is written."""
    plans = []
    for experiment in experiments:
        old = results.read(experiment, folder / experiment.id)
        same = old is not None and (old.scale, old.seed) == (scale, seed)
        missing = tuple(
            name for name in experiment.needs if data is None or not (data / name).exists()
        )
        settings = dict(experiment.describe(scale)["settings"])
        seconds = None if old is None or old.scale != scale else old.seconds
        power = "" if old is None or experiment.power is None else str(experiment.power(old.rows))
        plans.append(
            Planned(experiment.id, scale, same, () if same else missing, seconds, settings, power)
        )
    return plans
