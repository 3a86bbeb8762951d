"""`certify` and `prove`: a model, a dataset and a directory in; a run out, to be killed and continued at will."""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.attacks import checked_logits
from equipoise.core import InputError, Ints, Refused, explained, require_counts
from equipoise.core.files import make_folder
from equipoise.runs.run import Run, open_run
from equipoise.runs.sources import Inputs, Item, check_label, portable
from equipoise.runs.store import NAME as STORE
from equipoise.runs.store import (
    Constant,
    DataRecord,
    Manifest,
    ModelRecord,
    Recipe,
    Row,
    Settings,
    Store,
    differences,
    is_run,
    locked,
    map_text,
    parse_map,
    read_manifest,
    require_same,
)
from equipoise.runs.workers import ProvedWorker, TaskSpec, run_on_ray
from equipoise.smoothing import Stream, choose_map
from equipoise.smoothing.noise import fresh_seed, is_image, power_of_two

#: inputs that the map of a soft run is calibrated on
CALIBRATION = 32
#: inputs that `preflight` looks at
PREFLIGHT = 200

#: called after every stored input with the row, the number of stored inputs and of all inputs
Progress = Callable[[Row, int, int], None]


@dataclass(frozen=True, eq=False)
class Job:
    """A run that is described but not started: everything is checked, nothing is written."""

    spec: TaskSpec
    inputs: Inputs
    positions: Ints

    @property
    def manifest(self) -> Manifest:
        """What the run is."""
        return self.spec.manifest

    @property
    def settings(self) -> Settings:
        """Those of the run."""
        return self.spec.settings

    def default_folder(self) -> Path:
        """`runs/certify-<digest>`: the same command finds its run again."""
        settings = self.settings
        seed = None if settings.seed_source == "system" else settings.seed
        digest = self.manifest.reseeded(seed).digest().removeprefix("sha256:")
        command = "certify" if settings.kind == "sampled" else "prove"
        return Path("runs") / f"{command}-{digest[:12]}"

    @cached_property
    def prover(self) -> ProvedWorker:
        """The worker of a proved run, built once: it bounds the whole network."""
        return ProvedWorker(self.spec)


def certify(
    model: Any,
    dataset: Any,
    *,
    run_dir: str | Path,
    workers: int | None = None,
    address: str | None = None,
    batch_size: int | None = None,
    name: str | None = None,
    progress: Progress | None = None,
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
        workers: processes of a Ray cluster; None: this process.
        address: of an existing Ray cluster; None: one on this machine, started and stopped here.
        batch_size: most draws in one forward pass (memory); no number depends on it.
        name: of the data, for the record.
        progress: called after every input with (row, done, total).
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
    checked = Settings.of("sampled", settings)
    job = prepare(model, dataset, checked, batch_size=batch_size, name=name)
    return start(job, run_dir, workers=workers, address=address, progress=progress)


def prove(
    model: Any,
    dataset: Any,
    *,
    run_dir: str | Path,
    name: str | None = None,
    progress: Progress | None = None,
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
        **settings: `norm`, `effort`, `epsilon`, `seconds`, `deployed` (see `Settings`), and skip, limit, stride, balanced.

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
    ([1.4142, 0.0], ('certified', 'wrong'))
    """
    job = prepare(model, dataset, Settings.of("proved", settings), name=name)
    return start(job, run_dir, progress=progress)


def prepare(
    model: Any,
    dataset: Any,
    settings: Settings,
    *,
    batch_size: int | None = None,
    name: str | None = None,
    recipe: Recipe | None = None,
) -> Job:
    """Check everything a run needs, reading the data once for its fingerprint; nothing is written.

    Args:
        model: as for `certify`.
        dataset: as for `certify`.
        settings: of the run.
        batch_size: most draws in one forward pass.
        name: of the data.
        recipe: how a command loads model and data again.
    """
    if isinstance(dataset, str | Path):
        raise InputError(
            f"expected a dataset, got its name: use eq.data.load_dataset({str(dataset)!r})"
        )
    if batch_size is not None:
        require_counts(batch_size=batch_size)
    network = portable(model)
    inputs = Inputs.of(dataset, name)
    device = usable_device(settings.device)

    positions = np.concatenate([s.positions(len(inputs), inputs.labels) for s in settings.inputs])

    first = _first_input(inputs, positions).x
    classes = settings.num_classes
    if classes is None:
        with torch.inference_mode():
            classes = checked_logits(network.network(device), first[None].to(device)).shape[1]
    if classes < max(2, inputs.num_classes or 0):
        raise InputError(
            f"the data has {inputs.num_classes} classes, the model returns {classes} logits; a classifier has two or more"
        )
    if inputs.labelled and inputs.labels is not None:
        for position in positions:
            check_label(inputs.ids[position], inputs.labels[position], classes)

    resolved = {
        "num_classes": classes,
        "device": torch.device(device).type,
        "dimension": first.numel(),
    }
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
    return Job(TaskSpec(network, manifest, device, first, batch_size), inputs, positions)


def _resolve_noise(settings: Settings, inputs: Inputs, positions: Ints) -> dict[str, Any]:
    """The law of the noise, the seed, and the defaults of soft and adaptive runs.

    Noise is exact for 8-bit data unless a constant is used. Whether the data is 8-bit is judged by a few inputs; should
    another one lie beside the grid, it will be a failed row.
    """
    image = all(
        is_image(item.x.detach().cpu().double().numpy()) for item in inputs.some(positions, 8)
    )
    noise = settings.noise or ("grid" if image and settings.lipschitz is None else "float")
    cells = 255.0 if image else power_of_two(settings.levels.sigma)
    unseeded = settings.seed is None
    return {
        "noise": noise,
        "cells": cells if noise == "grid" else None,
        "map": settings.map or ("global" if settings.soft else None),
        "seed": fresh_seed() if unseeded else settings.seed,
        "seed_source": "system" if unseeded else "user",
    }


def start(
    job: Job,
    run_dir: str | Path,
    *,
    workers: int | None = None,
    address: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Run a job in a directory, or continue it there: inputs without a result, and those that failed, are worked off.

    Args:
        job: what `prepare` returned.
        run_dir: made if need be.
        workers: processes of a Ray cluster; None: this process.
        address: of an existing Ray cluster.
        progress: called after every input with (row, done, total).
    """
    folder = make_folder(Path(run_dir))
    with locked(folder), Store(folder, _open(job, folder), writable=True) as store:
        manifest = store.manifest
        classes = manifest.settings.num_classes
        done = {row.id for row in store.rows() if row.failure is None}
        waiting = [int(p) for p in job.positions if job.inputs.ids[p] not in done]
        if not waiting:
            return open_run(folder)
        items = (job.inputs.attempt(position, classes) for position in waiting)
        with contextlib.closing(_rows(job, manifest, items, workers, address)) as rows:
            for count, row in enumerate(rows, len(done) + 1):
                store.put([row])  # one transaction each
                if progress is not None:
                    progress(row, count, manifest.total)
    return open_run(folder)


def _rows(
    job: Job, manifest: Manifest, items: Iterator[Item], workers: int | None, address: str | None
) -> Generator[Row]:
    spec = replace(job.spec, manifest=manifest)
    if workers is not None or address is not None:
        yield from run_on_ray(spec, items, workers or 1, address)
    else:
        yield from map(job.prover if manifest.settings.kind == "proved" else spec.worker(), items)


def _open(job: Job, folder: Path) -> Manifest:
    """The manifest on disk if it is this run's, else a new one with the map and the constant fixed now."""
    if is_run(folder):
        manifest = read_manifest(folder)
        require_same(folder, manifest, job.manifest)
        return manifest
    if (folder / STORE).exists():
        raise Refused(
            f"{folder} holds a store but no run.json: restore it, or use another run directory"
        )

    fixed: dict[str, Any] = {}
    if job.settings.kind == "proved":
        fixed["note"] = job.prover.certifier.note
    else:
        fixed["lipschitz"] = _fixed_constant(job)
        fixed["map"] = _fixed_map(job, job.manifest.stretched(fixed["lipschitz"]))
    manifest = job.manifest.model_copy(update=fixed)
    manifest.write(folder)
    return manifest


def _fixed_constant(job: Job) -> Constant | None:
    """The Lipschitz constant of the network: none, the user's claim, or a computed bound."""
    claim = job.settings.lipschitz
    if claim is None:
        return None
    if claim != "auto":
        return Constant(value=float(claim), source="given")
    from equipoise.lipschitz import lipschitz_bound

    model = job.spec.model
    device = job.spec.device
    x = job.spec.example.to(device)
    upper = lipschitz_bound(model.build(device), x.expand(model.batch or 1, *x.shape)).upper
    if upper == math.inf:
        raise Refused(
            "the Lipschitz bound of this network exceeds the floats: leave --lipschitz out"
        )
    return Constant(value=upper, source="computed")


def _fixed_map(job: Job, network: float | None) -> str | None:
    """The map of a soft run: fixed by the user, or the best on a calibration sample.

    Calibration inputs are spread over the whole data, whatever part this run certifies, so that shards agree; their noise
    is a stream of its own, independent of every selection and estimation sample.

    Args:
        job: the run.
        network: the Lipschitz constant in the coordinates of the noise.
    """
    settings = job.settings
    if not settings.soft:
        return None
    fixed = parse_map(settings.map)
    if fixed is not None:
        return map_text(fixed)

    classifier = job.spec.classifier()
    samples = []
    for item in job.inputs.some(np.arange(len(job.inputs)), CALIBRATION):
        with contextlib.suppress(Refused):  # such an input will be a failed row of its own
            x = item.x.to(job.spec.device)[None]
            samples.append(classifier.selection(x, settings.n0, [item.id], Stream.CALIBRATION)[0])
    if not samples:
        raise InputError(
            "no input could be sampled to calibrate the map: the model returns NaN or the data is unreadable"
        )
    maps = choose_map(
        np.stack(samples),
        settings.n,
        settings.levels.sigma,
        settings.alpha,
        procedure=settings.procedure,
        lipschitz=network,
    )
    return map_text(maps[0])


def _first_input(inputs: Inputs, positions: Ints) -> Item:
    """The first input that can be read."""
    for position in positions:
        item = inputs.attempt(int(position), None)
        if item.problem is None:
            return item
    raise InputError(f"no input of the data is usable, the last one: {item.problem}")


def usable_device(name: str) -> str:
    """The name of a device, if there is such a device here."""
    with explained(f"the device {name!r} cannot be used here"):
        torch.empty(0, device=name)
    return name


def preflight(job: Job) -> dict[str, float]:
    """Classify up to 200 inputs of a job before a long run: does the network answer, does it under the noise, how fast?

    Args:
        job: what `prepare` returned.

    Returns:
        Estimates, on noise that no certificate uses: `seconds` of one pass of one input, and where there are labels the
        `clean` accuracy and, for sampled runs, that under one draw of the noise (`noisy`).
    """
    spec = job.spec
    model = spec.model.network(spec.device)
    sigma = job.settings.sigma
    items = [
        item
        for item in job.inputs.some(job.positions, PREFLIGHT)
        if item.x.shape == spec.example.shape
    ]
    x = torch.stack([item.x for item in items])
    labels = torch.tensor([item.label for item in items])

    batches = {"clean": x}
    if sigma:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
        batches["noisy"] = x + sigma * noise
    report = {}
    for name, batch in batches.items():
        began = time.perf_counter()
        with torch.inference_mode():
            answers = [model(part.to(spec.device)).argmax(dim=1).cpu() for part in batch.split(50)]
        report["seconds"] = (time.perf_counter() - began) / len(x)
        if job.inputs.labelled:
            report[name] = float((torch.cat(answers) == labels).double().mean())
    return report


def merge_runs(sources: Sequence[str | Path], target: str | Path) -> Run:
    """A new run directory with the inputs (and attacks) of all sources, made whole or not at all; the sources stay.

    Refused unless the runs agree on model, data, settings, map and constant, and share no input.

    Args:
        sources: at least two run directories.
        target: a directory that does not exist yet.
    """
    if len(sources) < 2:
        raise InputError(f"merging takes at least two runs, got {len(sources)}")
    runs = [open_run(source) for source in sources]
    target = Path(target)
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
        draft.rename(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return open_run(target)


def _joint_manifest(runs: Sequence[Run]) -> Manifest:
    """The manifest of the union."""
    first = runs[0].manifest
    ids = set[int | str]()
    for run in runs:
        changes = differences(first, run.manifest, ("inputs", "total"))
        if changes:
            raise Refused(
                f"{runs[0].folder} and {run.folder} are not shards of one run ({'; '.join(changes)})"
            )
        if not ids.isdisjoint(run.ids):
            raise Refused(
                f"inputs of {run.folder} are in an earlier run of the list: shards must not share inputs"
            )
        ids.update(run.ids)

    inputs = tuple(s for run in runs for s in run.settings.inputs)
    settings = first.settings.model_copy(update={"inputs": inputs})
    return first.model_copy(update={"settings": settings, "total": sum(run.total for run in runs)})
