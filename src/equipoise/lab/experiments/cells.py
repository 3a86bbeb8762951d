"""Finished parts of a long experiment, kept beside its result, so that a run that was stopped goes on where it was.

A cell is one training, or whatever an experiment calls one: a key and its rows. The file belongs to one experiment
with its settings, scale and seed; with any other it is begun anew. It is deleted once the result is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equipoise.core.errors import InputError


@dataclass
class Cells:
    """Rows by key, and the wall and processor seconds they took, in a file of one JSON document per line."""

    path: Path | None = None
    owner: Mapping[str, Any] = field(default_factory=dict)
    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0
    processor: float = 0.0

    @classmethod
    def open(cls, path: Path, owner: Mapping[str, Any]) -> Cells:
        """The cells of a stopped run of the same owner, or none; a torn last line is dropped."""
        cells = cls(path, json.loads(json.dumps(owner)))
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines):
            try:
                stored = json.loads(line)
            except ValueError:
                path.write_text("".join(f"{whole}\n" for whole in lines[:number]), encoding="utf-8")
                break
            if number == 0 and stored != cells.owner:
                break
            if number > 0:
                cells.found[stored["key"]] = stored["rows"]
                cells.seconds += stored["seconds"]
                cells.processor += stored["processor"]
        return cells

    def rows(self, key: str, make: Callable[[], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The rows of a cell: those stored, else made now and stored."""
        if key not in self.found:
            wall, processor = time.perf_counter(), time.process_time()
            self.found[key] = list(make())
            self._append(key, time.perf_counter() - wall, time.process_time() - processor)
        return self.found[key]

    def _append(self, key: str, seconds: float, processor: float) -> None:
        if self.path is None:
            return
        stored = {"key": key, "rows": self.found[key], "seconds": seconds, "processor": processor}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if len(self.found) == 1:
                self.path.write_text(json.dumps(self.owner) + "\n", encoding="utf-8")
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(stored) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """The result is written: nothing is left to resume."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
