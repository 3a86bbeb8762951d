"""A run before it is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from equipoise.runs.inputs import Inputs
from equipoise.runs.manifest import Manifest
from equipoise.runs.models import Portable
from equipoise.runs.parameters import Parameters
from equipoise.smoothing.partitions import Ints


@dataclass(frozen=True, eq=False)
class Job:
    """A run that is described but not started: what `--plan` estimates and `start` executes."""

    model: Portable
    inputs: Inputs
    positions: Ints
    manifest: Manifest
    batch_size: int | None
    device: str

    @property
    def parameters(self) -> Parameters:
        """What was asked for."""
        return self.manifest.parameters

    def default_folder(self) -> Path:
        """`runs/certify-<digest>`: the same command finds its run again."""
        return Path("runs") / f"certify-{self.manifest.digest(asked=True)[:12]}"
