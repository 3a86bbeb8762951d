"""Certify a dataset without noise: one proved radius per input, stored as it comes, continued by the same command."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from equipoise.attacks import pgd
from equipoise.core.errors import EquipoiseError, InputError, Refused
from equipoise.core.files import make_folder
from equipoise.lipschitz.local.backward import ENTRIES, Norm
from equipoise.lipschitz.local.radius import LARGEST, Certifier, Effort
from equipoise.runs import store as store_file
from equipoise.runs.inputs import Inputs, Selection
from equipoise.runs.jobs import count_logits, first_input
from equipoise.runs.manifest import is_run, versions
from equipoise.runs.models import Portable, portable
from equipoise.runs.proved import run as stored
from equipoise.runs.rows import Item
from equipoise.runs.store import Attacked, AttackRow, locked
from equipoise.smoothing.moments import Ints

#: called after every stored input with the row, the number of stored inputs and of all inputs
Progress = Callable[[stored.ProvedRow, int, int], None]
#: radii that are attacked, as multiples of the proved one: the first lies inside, where nothing may be found
OUTSIDE = (0.99, 2.0, 4.0, 8.0, 16.0)
RTOL = 1e-3


@dataclass(frozen=True, eq=False)
class ProvedJob:
    """A deterministic run that is described but not started."""

    model: Portable
    inputs: Inputs
    positions: Ints
    manifest: stored.ProvedManifest

    def default_folder(self) -> Path:
        """`runs/proved-<digest>`: the same command finds its run again."""
        return Path("runs") / f"proved-{self.manifest.digest()[:12]}"


class AskedKeywords(TypedDict, total=False):
    """The fields of `Asked` that a caller can set, for the type checker."""

    norm: Norm
    effort: Effort
    seconds: float | None
    attack_steps: int


class ProvedKeywords(AskedKeywords, total=False):
    """With those of `Selection` and the name of the data."""

    skip: int
    limit: int | None
    stride: int
    name: str | None


def certify_proved(
    model: Any,
    dataset: Any,
    *,
    run_dir: str | Path,
    progress: Progress | None = None,
    retry_failed: bool = False,
    **settings: Unpack[ProvedKeywords],
) -> stored.ProvedRun:
    """The proved radius of every input of a dataset, with its limiting rival, its method and attacks beside it.

    `f_y(x') > f_k(x')` for all k ≠ y and all `‖x' − x‖ < R`, y the label (the network's own answer where the data has none),
    with certainty, as `eq.certified_radius`. Rows go to
    `run_dir`, one transaction per input; a killed run is continued by the same call. Inputs that cannot be
    read, and those whose evaluation cannot be bounded, are failed rows with the reason.

    Args:
        model: an `nn.Module` in evaluation mode, an exported program, or what `load_model` returned.
        dataset: `equipoise.data.Dataset`, a map-style dataset of (input, label), or a pair of tensors (x, y).
        run_dir: made if need be.
        progress: called after every input with (row, done, total).
        retry_failed: try the failed inputs again.
        **settings: `norm`, `effort`, `seconds`, `attack_steps` (see `Asked`), `skip`, `limit`, `stride` (see `Selection`), and
            `name` of the data, for the record.

    >>> import tempfile
    >>> net = nn.Linear(2, 2, bias=False).eval()
    >>> _ = net.weight.data.copy_(torch.eye(2))
    >>> x, y = torch.tensor([[3.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = certify_proved(net, (x, y), run_dir=folder)
    ...     run.radius.round(4).tolist(), run.rows[0].rival, run.broken()
    ([1.4142, 0.0], 1, [])
    """
    return start_proved(
        describe_proved(model, dataset, **settings), run_dir, progress=progress, retry_failed=retry_failed
    )


def describe_proved(
    model: Any, dataset: Any, *, skip: int = 0, limit: int | None = None, stride: int = 1, name: str | None = None,
    **settings: Unpack[AskedKeywords],
) -> ProvedJob:  # fmt: skip
    """Check everything a run needs; nothing is written."""
    if isinstance(dataset, str | Path):
        raise InputError(f"expected a dataset, got its name: use eq.data.load_dataset({str(dataset)!r})")
    ported, inputs, selection = portable(model), Inputs.of(dataset, name), Selection(skip, limit, stride)
    positions = selection.positions(len(inputs), inputs.labels)
    classes = count_logits(ported, inputs, positions, "cpu")
    inputs.check_labels(positions, classes)
    asked = stored.Asked(classes, **settings)
    manifest = stored.ProvedManifest(
        {"source": ported.source, "hash": ported.hash},
        {"source": inputs.name, "fingerprint": inputs.fingerprint(positions), "inputs": len(inputs)},
        selection, len(positions), asked,
    )  # fmt: skip
    return ProvedJob(ported, inputs, positions, manifest)


def start_proved(
    job: ProvedJob,
    run_dir: str | Path,
    *,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
    retry_failed: bool = False,
) -> stored.ProvedRun:
    """Run a job in a directory, or continue it there; `tell` is given what the run will need before it begins."""
    folder = Path(run_dir)
    if is_run(folder):
        raise Refused(f"{folder} holds a run of randomized smoothing: give another --run directory")
    make_folder(folder)
    with locked(folder):
        prover = Prover.of(job)
        manifest = _settle(replace(job.manifest, note=prover.note), folder)
        with stored.ProvedStore.of(folder, manifest, writable=True) as store:
            pending = store.pending(job.positions, job.inputs.ids, retry_failed=retry_failed)
            done = len(store.done())
            if pending:
                store.add_session(datetime.now(UTC).isoformat(timespec="seconds"), "local", "cpu", versions())
                if tell is not None:
                    tell(prover.needs(len(pending)))
            for count, position in enumerate(pending, done + 1):
                row, attacks = _one(job, prover, position)
                store.put(row)
                if attacks:
                    store.put_attacks(attacks)
                if progress is not None:
                    progress(row, count, manifest.total)
    return stored.open_proved(folder)


def _settle(manifest: stored.ProvedManifest, folder: Path) -> stored.ProvedManifest:
    """The manifest on disk if it is this run's, else a new one."""
    if stored.is_proved(folder):
        old = stored.read_proved(folder)
        stored.require_same(folder, old, manifest)
        return old
    if (folder / store_file.NAME).exists():
        raise Refused(f"{folder} holds a store but no proved.json: restore it, or use another run directory")
    manifest.write(folder)
    return manifest


def _one(job: ProvedJob, prover: Prover, position: int) -> tuple[stored.ProvedRow, list[AttackRow]]:
    """The row of one input and the attacks on it."""
    began = time.perf_counter()
    item, problem = job.inputs.attempt(position, job.manifest.asked.classes)
    if problem is not None:
        return stored.failed_row(item, problem), []
    try:
        row = prover.prove(item)
    except Refused as error:
        return stored.failed_row(item, str(error), time.perf_counter() - began), []
    return replace(row, seconds=time.perf_counter() - began), prover.attack(item, row)


@dataclass
class Prover:
    """The network once captured and bounded; turns inputs into rows."""

    module: nn.Module
    certifier: Certifier
    asked: stored.Asked
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, job: ProvedJob) -> Prover:
        """Capture the network on the first input and bound it as a whole."""
        module = job.model.build("cpu")
        tensors = [*module.parameters(), *module.buffers()]
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        x = first_input(job.inputs, job.positions).x.to(dtype)
        asked = job.manifest.asked
        certifier = Certifier.of(module, x[None], norm=asked.norm, effort=asked.effort, rtol=RTOL)
        return cls(module, certifier, job.manifest.asked, tuple(x.shape), dtype)

    @property
    def note(self) -> str:
        """What was left out, and why."""
        return self.certifier.note

    def needs(self, inputs: int) -> str:
        """Time and memory of what is to come, in a sentence."""
        network = self.certifier.network
        budget = "" if self.asked.seconds is None else f", at most {self.asked.seconds:g} s each"
        if network is None:
            return f"{inputs} inputs by global bounds: one forward pass each{budget}"
        rows = min(network.neurons, max(1, ENTRIES // network.widest))
        memory = 3 * 8 * rows * network.widest / 1e9
        return (
            f"{inputs} inputs, {network.neurons:,} neurons: some ten sweeps of backward passes each, about {memory:.1g} GB at "
            f"once{budget}; the time of the first input tells the rest"
        )

    def prove(self, item: Item) -> stored.ProvedRow:
        """The radius of one input."""
        if tuple(item.x.shape) != self.shape:
            raise Refused(f"the input has shape {tuple(item.x.shape)}, the inputs of this run have {self.shape}")
        label = torch.tensor([item.label]) if item.label >= 0 else None
        found = self.certifier.radii(item.x.to(self.dtype)[None], label, seconds=self.asked.seconds)
        return stored.ProvedRow(
            item.id, item.position, item.label, int(found.predictions), float(found.radius), int(found.rivals),
            float(found.margins), found.methods[0],
        )  # fmt: skip

    def attack(self, item: Item, row: stored.ProvedRow) -> list[AttackRow]:
        """ℓ2 attacks at growing multiples of the radius, until one succeeds; none where the answer is wrong as it is."""
        steps, seed, rows = self.asked.attack_steps, self.asked.attack_seed, list[AttackRow]()
        if not steps or not 0 < row.radius < LARGEST:
            return rows
        x, y = item.x.to(self.dtype)[None], torch.tensor([row.prediction])
        for factor in OUTSIDE:
            epsilon = row.radius * factor
            try:
                found = pgd(self.module, x, y, epsilon, steps=steps, seed=seed)
            except (EquipoiseError, RuntimeError, NotImplementedError):
                return rows  # a network that cannot be differentiated has no attacks beside its proofs
            success = bool(found.success[0])
            distance = float(found.distance[0]) if success else None
            rows.append(AttackRow(item.id, Attacked.BASE, epsilon, success, distance, steps, 1, seed))
            if success:
                break
        return rows
