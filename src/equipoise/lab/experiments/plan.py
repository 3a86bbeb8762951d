"""What a run of experiments would do, before anything runs: settings, data, what is stored, and how long it took before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.lab.experiments import results
from equipoise.lab.experiments.experiment import Experiment


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


def plan(experiments: Iterable[Experiment], scale: str, seed: int, data: Path | None, folder: Path) -> list[Planned]:
    """What `reproduce` would do with these experiments; nothing is run and nothing is written."""
    found = []
    for experiment in experiments:
        old = results.read(experiment, folder / experiment.id)
        same = old is not None and (old.scale, old.seed) == (scale, seed)
        missing = tuple(name for name in experiment.needs if data is None or not (data / name).exists())
        settings = dict(experiment.describe(scale)["settings"])
        seconds = None if old is None or old.scale != scale else old.seconds
        power = "" if old is None or experiment.power is None else str(experiment.power(old.rows))
        found.append(Planned(experiment.id, scale, same, () if same else missing, seconds, settings, power))
    return found
