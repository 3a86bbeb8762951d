"""What is attacked: a model and data, and the run they belong to; a run of another model or other data is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from equipoise.core import InputError, Refused
from equipoise.runs.inputs import Inputs, Selection
from equipoise.runs.job import count_logits, usable_device
from equipoise.runs.jobs import describe
from equipoise.runs.manifest import Manifest, differences, is_run, read_manifest
from equipoise.runs.models import Batched, Portable, portable
from equipoise.runs.parameters import Parameters
from equipoise.runs.store import NAME as STORE
from equipoise.smoothing import SimplexMap
from equipoise.smoothing.partitions import Ints


@dataclass(frozen=True, eq=False)
class Target:
    """A model, the positions of the inputs to attack, and the run to write into (none: nothing is kept)."""

    model: Portable
    inputs: Inputs
    positions: Ints
    manifest: Manifest | None
    folder: Path | None
    new: bool
    device: str

    @property
    def parameters(self) -> Parameters | None:
        """Those of the run: the smoothed classifier is its."""
        return None if self.manifest is None else self.manifest.parameters

    @property
    def map(self) -> SimplexMap | None:
        """The map that the run fixed beforehand."""
        return None if self.manifest is None else self.manifest.map

    def module(self) -> nn.Module:
        """The network, on its device, for batches of any size."""
        module = self.model.build(self.device)
        return module if self.model.batch is None else Batched(module, self.model.batch, exact=True)


def find_target(
    model: Any, dataset: Any, run_dir: str | Path | None, *, sigma: float | None, skip: int, limit: int | None, stride: int,
    device: str, name: str | None,
) -> Target:  # fmt: skip
    """Match a model and data with a run directory, an existing one or a new one; nothing is written."""
    ported, inputs, where = portable(model), Inputs.of(dataset, name), usable_device(device)
    positions, folder = (
        Selection(skip, limit, stride).positions(len(inputs)),
        None if run_dir is None else Path(run_dir),
    )
    if not inputs.labelled:
        raise InputError(f"{inputs.name} has no labels: an attack needs them")
    if folder is not None and is_run(folder):
        manifest = read_manifest(folder)
        own = _require_same(folder, manifest, ported, inputs, sigma)
        whole = Selection(skip, None, stride).positions(len(inputs))
        positions = whole[np.isin(whole, own)][:limit]
        if len(positions) == 0:
            raise InputError(f"none of the selected inputs belongs to {folder}: it certifies others of the data")
        inputs.check_labels(positions, manifest.parameters.num_classes)
        return Target(ported, inputs, positions, manifest, folder, False, where)
    if folder is not None and (folder / STORE).exists():
        raise Refused(f"{folder} holds a store but no run.json: restore it, or use another run directory")
    if sigma is None:
        if folder is not None:
            raise InputError(
                f"{folder} is not a run yet, and a run has a noise level: give --sigma, or --run of a certification run"
            )
        inputs.check_labels(positions, count_logits(ported, inputs, positions, where))
        return Target(ported, inputs, positions, None, None, False, where)
    job = describe(model, dataset, sigma=sigma, skip=skip, limit=limit, stride=stride, device=device, name=name)
    return Target(ported, inputs, positions, job.manifest, folder, folder is not None, where)


def _require_same(folder: Path, manifest: Manifest, model: Portable, inputs: Inputs, sigma: float | None) -> Ints:
    """Refuse another model, other data or another noise level than the run's; the positions that belong to the run."""
    count = manifest.data.get("inputs")
    if count is not None and count != len(inputs):
        raise Refused(
            f"{folder} holds a run on other data (inputs: {count} → {len(inputs)}): give another --run directory"
        )
    parts = [s.positions(len(inputs), inputs.labels) for s in manifest.selection]
    asked = replace(
        manifest, model={"hash": model.hash}, data={"fingerprint": inputs.fingerprint(parts[0])},
        parameters=replace(manifest.parameters, sigma=manifest.parameters.sigma if sigma is None else sigma),
    )  # fmt: skip
    found = differences(manifest, asked)
    if found:
        raise Refused(f"{folder} holds another run ({'; '.join(found)}): give another --run directory")
    own: Ints = np.unique(np.concatenate(parts))
    return own


def default_folder(model: Any, dataset: Any, **settings: Any) -> Path:
    """`runs/attack-<digest>`: the same command finds its run again."""
    digest = describe(model, dataset, **settings).manifest.digest(asked=True)
    return Path("runs") / f"attack-{digest[:12]}"
