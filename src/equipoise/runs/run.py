"""A run directory opened for reading: ids, labels, certificates at any α, a summary, attacks, exports."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import InputError
from equipoise.runs.derive import derive
from equipoise.runs.export import export
from equipoise.runs.manifest import Manifest, read_manifest
from equipoise.runs.reasons import Summary, explain, summarise
from equipoise.runs.rows import InputId, Row
from equipoise.runs.store import AttackRow, Store, locked
from equipoise.smoothing import Certificates
from equipoise.smoothing.moments import Ints


class Run:
    """A run as it is stored; reading never changes it and works while it is still being computed.

    `manifest` says what was run. Rows are read once and kept: open the directory again to see later inputs.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(folder)
        self._remarks: list[str] = []

    @cached_property
    def rows(self) -> list[Row]:
        """The stored inputs, in the order of the data."""
        with self._store() as store:
            self._remarks = store.remarks
            found = store.rows()
        fixed = self.manifest.map
        strange = [row.id for row in found if row.soft is not None and fixed is not None and row.soft.map != fixed]
        if strange:
            raise InputError(
                f"{self.folder}: input {strange[0]!r} was sampled under another map than {fixed} of run.json"
            )
        return found

    @property
    def ids(self) -> list[InputId]:
        """Ids of the stored inputs."""
        return [row.id for row in self.rows]

    @property
    def positions(self) -> Ints:
        """Their places in the data."""
        return np.array([row.position for row in self.rows], dtype=np.int64)

    @property
    def labels(self) -> Ints:
        """Their labels."""
        return np.array([row.label for row in self.rows], dtype=np.int64)

    @property
    def seconds(self) -> float:
        """Time spent sampling, over all workers."""
        return float(sum(row.seconds for row in self.rows))

    @property
    def failures(self) -> dict[InputId, str]:
        """Why inputs failed."""
        return {row.id: row.failure for row in self.rows if row.failure is not None}

    @property
    def finished(self) -> bool:
        """Whether every input was worked off, failed ones included."""
        return len(self.rows) >= self.manifest.total

    def certificates(
        self,
        alpha: float | None = None,
        procedure: str | None = None,
        *,
        lipschitz: Any = None,
        target_radius: float | None = None,
    ) -> Certificates:
        """Certificates of the stored inputs without a forward pass; see `derive` for what may change."""
        if not self.rows and self._remarks:
            raise InputError(f"{self.folder} has no finished inputs: {self._remarks[0]}")
        return derive(
            self.manifest, self.rows, alpha=alpha, procedure=procedure, lipschitz=lipschitz, target_radius=target_radius
        )

    def summary(self, epsilons: Sequence[float] | None = None, *, certificates: Certificates | None = None) -> Summary:
        """Certified accuracy at each ε and the rest, of these certificates or those of the run's own parameters."""
        found = self.certificates() if certificates is None else certificates
        target = self.manifest.parameters.target_radius
        if epsilons is None and target is not None:
            epsilons = sorted({target, *(float(r) for r in found.radius if r > 0)})
        draws = sum(row.n0 + row.draws for row in self.rows)
        made = summarise(
            found,
            self.labels,
            epsilons,
            total=self.manifest.total,
            draws=draws,
            seconds=self.seconds,
            notes=self.notes(found),
        )
        reasons = explain(self.manifest, self.rows, found, made.accuracy, made.labelled)
        return replace(made, reasons=tuple(reasons))

    def notes(self, certificates: Certificates) -> list[str]:
        """What a reader must know: assumptions, another derivation than the run's own, and mixed software."""
        notes, p = [] if self.rows is None else list(self._remarks), self.manifest.parameters
        if certificates.alpha != p.alpha or certificates.procedure not in (p.procedure, "adaptive"):
            own = "adaptive" if p.adaptive else p.procedure
            notes.append(
                f"Derived again (the run was made for {own} at alpha {p.alpha:g}): alpha covers one derivation fixed "
                "beforehand, not the best of several looked at."
            )
        if "lipschitz" in certificates.details:
            notes.append(f"Lipschitz constant of the network: {certificates.details['lipschitz']}.")
        used = sorted({s["versions"].get("torch", "") for s in self.sessions()})
        if len(used) > 1:
            notes.append(
                f"Inputs were computed with several versions of torch ({', '.join(used)}): their noise may differ."
            )
        return notes

    def export(self, path: str | Path, *, certificates: Certificates | None = None) -> Path:
        """Write `.tsv` (Cohen's log), `.csv` or `.parquet`, whole or not at all; radii rounded down."""
        return export(self.rows, self.certificates() if certificates is None else certificates, path)

    def attacks(self) -> list[AttackRow]:
        """Attack results stored with the run."""
        with self._store() as store:
            return store.attacks()

    def add_attacks(self, rows: Iterable[AttackRow]) -> None:
        """Store attack results, keyed by the ids of the data. Refused while another process works on the run."""
        with locked(self.folder), self._store(writable=True) as store:
            store.put_attacks(rows)

    def sessions(self) -> list[dict[str, Any]]:
        """When and with which software inputs were computed."""
        with self._store() as store:
            return store.sessions()

    def _store(self, writable: bool = False) -> Store:
        return Store(self.folder, identity=self.manifest.digest(), seal=self.manifest.seal(), writable=writable)


def open_run(folder: str | Path) -> Run:
    """Open a run directory for reading."""
    return Run(folder)
