"""`certify` and `prove`: a model, a dataset and a directory in; a run out, to be killed and continued at will."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.attacks.pgd import checked_logits
from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line
from equipoise.core.files import make_folder
from equipoise.runs.engines import Execution
from equipoise.runs.inputs import Inputs, Item
from equipoise.runs.models import Portable, denoised, portable
from equipoise.runs.run import Run, open_run
from equipoise.runs.settings import (
    Constant,
    DataRecord,
    Manifest,
    ModelRecord,
    Recipe,
    Settings,
    as_path,
    differences,
    is_run,
    map_text,
    parse_map,
    read_manifest,
    require_same,
    versions,
)
from equipoise.runs.store import NAME as STORE
from equipoise.runs.store import Row, Session, Store, locked
from equipoise.runs.workers import ProvedWorker, TaskSpec
from equipoise.smoothing import Stream, choose_map
from equipoise.smoothing.noise import fresh_seed, is_image, power_of_two
from equipoise.smoothing.procedures import Ints

#: inputs that the map of a soft run is calibrated on
CALIBRATION = 32

#: called after every stored input with the row, the number of stored inputs and of all inputs
Progress = Callable[[Row, int, int], None]


@dataclass(frozen=True, eq=False)
class Job:
    """A run that is described but not started: everything is checked, nothing is written."""

    model: Portable
    inputs: Inputs
    positions: Ints
    manifest: Manifest
    batch_size: int | None
    device: str

    @property
    def settings(self) -> Settings:
        """Those of the run."""
        return self.manifest.settings

    def default_folder(self) -> Path:
        """`runs/certify-<digest>`: the same command finds its run again."""
        command = "certify" if self.settings.kind == "sampled" else "prove"
        digest = self.manifest.digest(any_seed=True).removeprefix("sha256:")
        return Path("runs") / f"{command}-{digest[:12]}"

    @cached_property
    def prover(self) -> ProvedWorker:
        """The worker of a proved run, built once: it bounds the whole network."""
        return ProvedWorker(self.spec())

    def spec(self, manifest: Manifest | None = None) -> TaskSpec:
        """What a worker needs."""
        manifest = manifest or self.manifest
        network = manifest.stretched(manifest.lipschitz)
        example = first_input(self.inputs, self.positions).x if self.settings.kind == "proved" else None
        return TaskSpec(
            self.model, manifest.settings, parse_map(manifest.map), network, self.batch_size, self.device, example
        )


def certify(
    model: Any,
    dataset: Any,
    *,
    run_dir: str | Path,
    engine: str = "local",
    workers: int = 1,
    address: str | None = None,
    batch_size: int | None = None,
    denoiser: Any = None,
    name: str | None = None,
    progress: Progress | None = None,
    retry_failed: bool = False,
    **settings: Any,
) -> Run:
    """Certify every input of a dataset by randomized smoothing; calling this again continues a killed run.

    Counts go to `run_dir`, one transaction per input; radii are derived from them, so `run.certificates(alpha, procedure)`
    costs no forward pass. The noise depends on (seed, input id, chunk) only. A changed model, dataset or setting is
    refused with the difference; an input whose logits are NaN is recorded as failed, and the run goes on.

    Args:
        model: an `nn.Module` in evaluation mode, an exported program, or what `load_model` returned.
        dataset: `equipoise.data.Dataset`, a map-style dataset of (input, label) or of dictionaries, a pair of tensors
            (x, y), or x alone (no labels: answers and radii, no accuracy).
        run_dir: made if need be.
        engine: "local" or "ray".
        workers: of the Ray engine.
        address: of an existing Ray cluster.
        batch_size: most draws in one forward pass (memory); no number depends on it.
        denoiser: a network from noisy image to image, put before the model.
        name: of the data, for the record.
        progress: called after every input with (row, done, total).
        retry_failed: try the failed inputs again.
        **settings: the fields of `Settings`: sigma (needed), n0 = 100, n = 10,000, alpha = 0.001, procedure = "rivals", seed,
            noise, map, lipschitz, target_radius, device, …; and skip, limit, stride, balanced, which choose the inputs.

    Returns:
        The finished run.

    Guarantee: every certificate is wrong with probability at most alpha over the noise, as `SmoothedClassifier.certify`.

    >>> import tempfile, torch
    >>> net = torch.nn.Linear(2, 2).eval()
    >>> x, y = torch.rand(3, 2), torch.tensor([0, 1, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = certify(net, (x, y), run_dir=folder, sigma=0.5, n=200)
    ...     len(run.certificates(alpha=0.01)), run.finished
    (3, True)
    """
    chosen = Settings.of("sampled", settings, inspect.signature(certify).parameters)
    if denoiser is not None:
        model = denoised(denoiser, model)
    job = prepare(model, dataset, chosen, device=str(settings.get("device", "cpu")), batch_size=batch_size, name=name)
    execution = Execution(engine, workers, address)
    return start(job, run_dir, execution=execution, progress=progress, retry_failed=retry_failed)


def prove(
    model: Any,
    dataset: Any,
    *,
    run_dir: str | Path,
    name: str | None = None,
    progress: Progress | None = None,
    retry_failed: bool = False,
    **settings: Any,
) -> Run:
    """The proved radius of every input of a dataset, with its limiting rival and its method.

    `f_y(x') > f_k(x')` for all k ≠ y and all `‖x' − x‖ < R`, y the label (the network's own answer where the data has none),
    with certainty, as `eq.certified_radius`. A killed run is continued by the same call.

    Args:
        model: an `nn.Module` in evaluation mode, an exported program, or what `load_model` returned.
        dataset: as for `certify`.
        run_dir: made if need be.
        name: of the data, for the record.
        progress: called after every input with (row, done, total).
        retry_failed: try the failed inputs again.
        **settings: `norm`, `effort`, `seconds`, `deployed` (see `Settings`), and skip, limit, stride, balanced.

    Returns:
        The finished run.

    Guarantee: for the real function of the stored weights, rounding included, without risk.

    >>> import tempfile, torch
    >>> net = torch.nn.Linear(2, 2, bias=False).eval()
    >>> _ = net.weight.data.copy_(torch.eye(2))
    >>> x, y = torch.tensor([[3.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     results = prove(net, (x, y), run_dir=folder).results()
    ...     results.radius.round(4).tolist(), results.status
    ([1.4142, 0.0], ('proved', 'wrong'))
    """
    chosen = Settings.of("proved", settings, inspect.signature(prove).parameters)
    job = prepare(model, dataset, chosen, name=name)
    return start(job, run_dir, progress=progress, retry_failed=retry_failed)


def prepare(
    model: Any,
    dataset: Any,
    settings: Settings,
    *,
    device: str = "cpu",
    batch_size: int | None = None,
    name: str | None = None,
    recipe: Recipe | None = None,
) -> Job:
    """Check everything a run needs, reading the data once for its fingerprint; nothing is written.

    Args:
        model: as for `certify`.
        dataset: as for `certify`.
        settings: of the run.
        device: where the passes run.
        batch_size: most draws in one forward pass.
        name: of the data.
        recipe: how a command loads model and data again.
    """
    if isinstance(dataset, str | Path):
        raise InputError(f"expected a dataset, got its name: use eq.data.load_dataset({str(dataset)!r})")
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise InputError(f"batch_size must be a positive whole number, got {batch_size!r}")
    network, inputs = portable(model), Inputs.of(dataset, name)
    device = usable_device(device)

    selections = tuple(
        s.model_copy(update={"balanced": s.balanced and s.limit is not None and inputs.labelled})
        for s in settings.inputs
    )
    if any(s.balanced for s in selections) and inputs.labels is None:
        raise InputError(
            f"balanced=True needs labels that are known without reading {inputs.name}: use eq.data.Dataset"
        )
    positions = np.concatenate([s.positions(len(inputs), inputs.labels) for s in selections])

    first = first_input(inputs, positions).x
    classes = settings.num_classes or count_logits(network, first, device)
    if inputs.num_classes is not None and inputs.num_classes > classes:
        raise InputError(f"the data has {inputs.num_classes} classes, the model returns {classes} logits")
    inputs.check_labels(positions, classes)

    resolved: dict[str, Any] = {
        "inputs": selections, "num_classes": classes, "device": torch.device(device).type, "dimension": first.numel(),
    }  # fmt: skip
    if settings.kind == "sampled":
        settings.levels.require_channels(first.shape)
        resolved |= _resolve_noise(settings, inputs, positions)
    manifest = Manifest(
        model=ModelRecord(source=network.source, hash=network.hash),
        data=DataRecord(
            source=inputs.name,
            fingerprint=inputs.fingerprint(positions),
            inputs=len(inputs),
            classes=inputs.classes,
        ),
        settings=settings.model_copy(update=resolved),
        total=len(positions),
        recipe=recipe,
    )
    manifest.settings.check()
    return Job(network, inputs, positions, manifest, batch_size, device)


def _resolve_noise(settings: Settings, inputs: Inputs, positions: Ints) -> dict[str, Any]:
    """The law of the noise, the seed, and the defaults of soft and adaptive runs.

    Noise is exact for 8-bit data unless a constant is used. Whether the data is 8-bit is judged by a few inputs; should
    another one lie beside the grid, it will be a failed row.
    """
    image = all(is_image(item.x.detach().cpu().double().numpy()) for item in inputs.some(positions, 8))
    noise = settings.noise or ("grid" if image and settings.lipschitz is None else "float")
    cells = (255.0 if image else power_of_two(settings.levels.sigma)) if noise == "grid" else None
    return {
        "noise": noise,
        "cells": cells,
        "map": settings.map or ("global" if settings.soft else None),
        "seed": fresh_seed() if settings.seed is None else settings.seed,
        "seed_source": "system" if settings.seed is None else "user",
    }


def start(
    job: Job,
    run_dir: str | Path,
    *,
    execution: Execution | None = None,
    progress: Progress | None = None,
    retry_failed: bool = False,
) -> Run:
    """Run a job in a directory, or continue it there; a finished one is only opened.

    Args:
        job: what `prepare` returned.
        run_dir: made if need be.
        execution: engine and workers.
        progress: called after every input with (row, done, total).
        retry_failed: try the failed inputs again.
    """
    execution, folder = execution or Execution(), make_folder(as_path(run_dir))
    with locked(folder):
        manifest = _open(job, folder)
        with Store(folder, manifest, writable=True) as store:
            if retry_failed:
                store.forget_failures()
            done = {row.id for row in store.rows()}
            waiting = [int(p) for p in job.positions if job.inputs.ids[p] not in done]
            if waiting:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                engine, device = execution.engine, job.device
                store.add_session(Session(started=now, engine=engine, device=device, versions=versions()))
                _work(job, manifest, store, waiting, len(done), execution, progress)
    return open_run(folder)


def _work(
    job: Job,
    manifest: Manifest,
    store: Store,
    waiting: list[int],
    done: int,
    execution: Execution,
    progress: Progress | None,
) -> None:
    """Store every row as it comes, one transaction each."""
    items = (job.inputs.attempt(position, manifest.settings.num_classes) for position in waiting)
    if execution.engine == "local" and manifest.settings.kind == "proved":
        rows: Iterator[Row] = map(job.prover, items)
    else:
        rows = execution.run(job.spec(manifest), items)
    try:
        for count, row in enumerate(rows, done + 1):
            store.put([row])
            if progress is not None:
                progress(row, count, manifest.total)
    finally:
        close = getattr(rows, "close", None)
        if close is not None:
            close()


def _open(job: Job, folder: Path) -> Manifest:
    """The manifest on disk if it is this run's, else a new one with the map and the constant fixed now."""
    if is_run(folder):
        manifest = read_manifest(folder)
        require_same(folder, manifest, job.manifest)
        return manifest
    if (folder / STORE).exists():
        raise Refused(f"{folder} holds a store but no run.json: restore it, or use another run directory")

    fixed: dict[str, Any] = {}
    if job.settings.kind == "proved":
        fixed["note"] = job.prover.certifier.note
    else:
        fixed["lipschitz"] = fixed_constant(job)
        fixed["map"] = fixed_map(job, job.manifest.stretched(fixed["lipschitz"]))
    manifest = job.manifest.model_copy(update=fixed)
    manifest.write(folder)
    return manifest


def fixed_constant(job: Job) -> Constant | None:
    """The Lipschitz constant of the network: none, the user's claim, or a computed bound."""
    wanted = job.settings.lipschitz
    if wanted is None:
        return None
    if wanted != "auto":
        return Constant(value=float(wanted), source="given")
    from equipoise.lipschitz import lipschitz_bound

    if isinstance(job.model.payload, bytes):
        upper = lipschitz_bound(job.model.program()).upper
    else:
        x = first_input(job.inputs, job.positions).x[None].to(job.device)
        upper = lipschitz_bound(job.model.payload, x).upper
    if not upper < float("inf"):
        raise Refused("the Lipschitz bound of this network exceeds the floats: leave --lipschitz out")
    return Constant(value=upper, source="computed")


def fixed_map(job: Job, network: float | None) -> str | None:
    """The map of a soft run: fixed by the user, chosen per input (None), or the best on a calibration sample.

    Calibration inputs are spread over the whole data, whatever part this run certifies, so that shards agree; their noise
    is a stream of its own, independent of every selection and estimation sample.

    Args:
        job: the run.
        network: the Lipschitz constant in the coordinates of the noise.
    """
    settings = job.settings
    if not settings.soft:
        return None
    if settings.map != "global":
        fixed = parse_map(settings.map)
        return None if fixed is None else map_text(fixed)

    classifier, samples = job.spec().classifier(), []
    for item in job.inputs.some(np.arange(len(job.inputs)), CALIBRATION):
        try:
            x = item.x.to(job.device)[None]
            samples.append(classifier.selection(x, settings.n0, [item.id], Stream.CALIBRATION)[0])
        except Refused:
            continue  # such an input will be a failed row of its own
    if not samples:
        raise InputError(
            "no input could be sampled to calibrate the map: the model returns NaN or the data is unreadable"
        )
    n, sigma, alpha = settings.n, settings.levels.sigma, settings.alpha
    maps = choose_map(np.stack(samples), n, sigma, alpha, procedure=settings.procedure, lipschitz=network)
    return map_text(maps[0])


def first_input(inputs: Inputs, positions: Ints) -> Item:
    """The first input that can be read.

    Args:
        inputs: of the data.
        positions: where to look.
    """
    problem: Exception | None = None
    for position in positions:
        try:
            return inputs.item(int(position))
        except (EquipoiseError, OSError) as error:
            problem = problem or error
    raise InputError(f"no input of the data can be read: {problem}") from problem


def count_logits(model: Portable, x: torch.Tensor, device: str) -> int:
    """The number of logits, from one forward pass.

    Args:
        model: the network.
        x: one input.
        device: where the pass runs.
    """
    with torch.inference_mode():
        count = checked_logits(model.network(device), x[None].to(device)).shape[1]
    if count < 2:
        raise InputError(f"a classifier has at least two classes, the model returned {count} logit")
    return count


def usable_device(name: str) -> str:
    """The name of a device, if there is such a device here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"the device {name!r} cannot be used here: {one_line(error)}") from error
    return name


def merge_runs(sources: Sequence[str | Path], target: str | Path) -> Run:
    """A new run directory with the inputs (and attacks) of all sources, made whole or not at all; the sources stay.

    Refused unless the runs agree on model, data, settings, map and constant, and share no input.

    Args:
        sources: at least two run directories.
        target: a directory that does not exist yet.
    """
    if not isinstance(sources, list | tuple) or len(sources) < 2:
        raise InputError(f"merging takes a list of at least two runs, got {type(sources).__name__}")
    runs, target = [open_run(source) for source in sources], as_path(target)
    if target.exists():
        raise InputError(f"{target} exists already: merge into a new directory")
    manifest = _joint_manifest(runs)

    draft = make_folder(target.parent) / f".{target.name}.{os.getpid()}"
    try:
        draft.mkdir()
        manifest.write(draft)
        with Store(draft, manifest, writable=True) as store:
            for run in runs:
                store.put(run.rows)
                store.put_attacks(run.attacks())
                for session in run.sessions():
                    store.add_session(session)
        draft.rename(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return open_run(target)


def _joint_manifest(runs: Sequence[Run]) -> Manifest:
    """The manifest of the union."""
    first = runs[0].manifest
    owner: dict[int | str, Path] = {}
    for run in runs:
        other = run.manifest
        found = differences(first, other, ignore=("inputs", "total"))
        for field in ("map", "lipschitz"):
            before, after = getattr(first, field), getattr(other, field)
            found += [f"{field}: {before} → {after}"] if before != after else []
        if found:
            raise Refused(f"{runs[0].folder} and {run.folder} are not shards of one run ({'; '.join(found)})")
        for name in run.ids:
            if name in owner:
                raise Refused(f"input {name!r} is in {owner[name]} and in {run.folder}: shards must not share inputs")
            owner[name] = run.folder

    inputs = tuple(s for run in runs for s in run.settings.inputs)
    settings = first.settings.model_copy(update={"inputs": inputs})
    return first.model_copy(update={"settings": settings, "total": sum(run.total for run in runs)})
