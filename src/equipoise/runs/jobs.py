"""`certify`: a model, a dataset and a directory in, settled before the first input; a run out, to be killed and continued."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from equipoise.core import EquipoiseError, InputError, Refused
from equipoise.core.errors import one_line
from equipoise.core.files import make_folder
from equipoise.runs import store as store_file
from equipoise.runs.engines import Execution, find_engine
from equipoise.runs.inputs import Inputs
from equipoise.runs.manifest import Constant, Manifest, is_run, read_manifest, require_same, versions
from equipoise.runs.models import Batched, Portable, denoised, portable
from equipoise.runs.parameters import Keywords, Parameters, Settings, parse_map
from equipoise.runs.rows import Item, Row, failed
from equipoise.runs.run import Run, open_run
from equipoise.runs.store import Store, locked
from equipoise.runs.tasks import TaskSpec, classifier_of
from equipoise.smoothing import SimplexMap, Stream, choose_map
from equipoise.smoothing.grid import is_image, power_of_two
from equipoise.smoothing.moments import Ints
from equipoise.smoothing.noise import NoiseName


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


def fixed_constant(job: Job) -> Constant | None:
    """The Lipschitz constant of the network: none, the user's claim, or a computed bound."""
    asked = job.parameters.lipschitz
    if asked is None or asked != "auto":
        return None if asked is None else Constant(float(asked), "given")
    from equipoise.lipschitz import lipschitz_bound

    payload = job.model.payload
    if isinstance(payload, bytes):
        upper = lipschitz_bound(job.model.program()).upper
    else:
        upper = lipschitz_bound(payload, first_input(job.inputs, job.positions).x[None].to(job.device)).upper
    if not upper < float("inf"):
        raise Refused("the Lipschitz bound of this network exceeds the floats: leave --lipschitz out")
    return Constant(upper, "computed")


def fixed_map(job: Job, constant: Constant | None) -> SimplexMap | None:
    """The map of a soft run: fixed by the user, chosen per input (None), or the best on a calibration sample.

    Calibration inputs are spread over the whole data, whatever part this run certifies, so that shards agree; their noise
    is a stream of its own, independent of every selection and estimation sample.
    """
    p = job.parameters
    if not p.soft:
        return None
    if p.map != "global":
        return parse_map(p.map)
    classifier = classifier_of(job.model, p, job.batch_size, job.device)
    network = job.manifest.stretched(constant)
    samples = []
    for position in np.unique(np.linspace(0, len(job.inputs) - 1, p.calibration or 1).astype(int)):
        try:
            item = job.inputs.item(int(position))
            x = item.x.to(job.device)
            samples.append(classifier.selection(x[None], p.n0, [item.id], Stream.CALIBRATION)[0])
        except (Refused, OSError):
            continue  # such an input will be a failed row of its own
    if not samples:
        raise InputError(
            "no input could be sampled to calibrate the map: the model returns NaN or the data is unreadable"
        )
    return choose_map(np.stack(samples), p.n, p.sigma, p.alpha, procedure=p.procedure, lipschitz=network)[0]


def first_input(inputs: Inputs, positions: Ints) -> Item:
    """The first input that can be read."""
    problem: Exception | None = None
    for position in positions:
        try:
            return inputs.item(int(position))
        except (EquipoiseError, OSError) as error:
            problem = problem or error
    raise InputError(f"no input of the data can be read: {problem}") from problem


def count_logits(model: Portable, inputs: Inputs, positions: Ints, device: str) -> int:
    """The number of logits, from one forward pass."""
    item, module = first_input(inputs, positions), model.build(device)
    if model.batch is not None:
        module = Batched(module, model.batch, exact=True)
    try:
        with torch.inference_mode():
            out = module(item.x[None].to(device))
    except EquipoiseError:
        raise
    except Exception as error:  # whatever the user's own code, or the guards of an exported program, raise
        raise InputError(f"the model does not take inputs of shape {tuple(item.x.shape)}: {one_line(error)}") from error
    if not isinstance(out, torch.Tensor) or out.ndim != 2 or len(out) != 1:
        shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise InputError(f"the model must return logits (batch, classes), it returned {shape} for one input")
    return int(out.shape[1])


def noise_of(
    asked: NoiseName | None, inputs: Inputs, positions: Ints, sigma: float, lipschitz: Any
) -> tuple[NoiseName, float | None]:
    """The law of the noise and the points per unit of its grid: exact for 8-bit data unless a constant is used.

    Whether the data is 8-bit is judged by a few inputs; should another one lie beside the grid, it will be a failed row.
    """
    if asked == "float":
        return asked, None
    image = all(is_image(item.x.detach().cpu().double().numpy()) for item in inputs.some(positions, 8))
    kind: NoiseName = asked or ("grid" if image and lipschitz is None else "float")
    if kind != "grid":
        return kind, None
    return kind, 255.0 if image else power_of_two(sigma)


def usable_device(name: str) -> str:
    """The name of a device, if there is such a device here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"the device {name!r} cannot be used here: {one_line(error)}") from error
    return name


#: called after every stored input with the row, the number of stored inputs and of all inputs
Progress = Callable[[Row, int, int], None]


def certify(
    model: Any,
    dataset: Any,
    *,
    run_dir: str | Path,
    engine: str = "local",
    workers: int = 1,
    address: str | None = None,
    progress: Progress | None = None,
    retry_failed: bool = False,
    **settings: Unpack[Keywords],
) -> Run:
    """Certify every input of a dataset; the run survives being killed, and calling this again continues it.

    Counts go to `run_dir`, one transaction per input; radii are derived from them, so `run.certificates(alpha, procedure)`
    costs no forward pass. Guarantee: every certificate is wrong with probability at most alpha over the noise, as
    `SmoothedClassifier.certify`; the noise depends on (seed, input id, chunk) only. A changed model, dataset or parameter is
    refused with the difference; an input whose logits are NaN is recorded as failed, and the run goes on.

    Args:
        model: an `nn.Module` in evaluation mode, an exported program, or what `load_model` returned.
        dataset: `equipoise.data.Dataset`, a map-style dataset of (input, label) or of dictionaries, a pair of tensors
            (x, y), or x alone (no labels: answers and radii, no accuracy).
        run_dir: made if need be.
        engine: "local" or "ray".
        workers: of the Ray engine.
        address: of an existing Ray cluster.
        progress: called after every input with (row, done, total).
        retry_failed: try the failed inputs again.
        **settings: the fields of `Settings`: sigma (needed), n0 = 100, n = 10,000, alpha = 0.001, procedure = "rivals", seed,
            noise, map, lipschitz, target_radius, limit, skip, stride, balanced, batch_size, device, …

    >>> import tempfile, torch
    >>> net = torch.nn.Linear(2, 2).eval()
    >>> x, y = torch.rand(3, 2), torch.tensor([0, 1, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = certify(net, (x, y), run_dir=folder, sigma=0.5, n=200)
    ...     len(run.certificates(alpha=0.01)), run.finished
    (3, True)
    """
    job = prepare(model, dataset, Settings.of(settings, inspect.signature(certify).parameters))
    execution = Execution(workers, address)
    return start(job, run_dir, engine=engine, execution=execution, progress=progress, retry_failed=retry_failed)


def describe(model: Any, dataset: Any, **settings: Unpack[Keywords]) -> Job:
    """The job that `certify` would start: everything is checked, nothing is written; keywords as there."""
    return prepare(model, dataset, Settings.of(settings))


def prepare(model: Any, dataset: Any, asked: Settings) -> Job:
    """Check everything a run needs, reading the data once for its fingerprint; nothing is written."""
    if isinstance(dataset, str | Path):
        raise InputError(f"expected a dataset, got its name: use eq.data.load_dataset({str(dataset)!r})")
    ported = portable(model if asked.denoiser is None else denoised(asked.denoiser, model))
    inputs = Inputs.of(dataset, asked.name)
    selection = asked.selection(inputs.labelled)
    if selection.balanced and inputs.labels is None:
        raise InputError(
            f"balanced=True needs labels that are known without reading {inputs.name}: use eq.data.Dataset"
        )
    positions = selection.positions(len(inputs), inputs.labels)
    where = usable_device(asked.device)
    classes = asked.num_classes or count_logits(ported, inputs, positions, where)
    if inputs.num_classes is not None and inputs.num_classes > classes:
        raise InputError(f"the data has {inputs.num_classes} classes, the model returns {classes} logits")
    inputs.check_labels(positions, classes)
    first = first_input(inputs, positions).x
    asked.levels.require_channels(first.shape)
    kind, cells = noise_of(asked.noise, inputs, positions, asked.levels.sigma, asked.lipschitz)
    parameters = asked.settled(classes, first.numel(), kind, cells)
    manifest = Manifest(
        {"source": ported.source, "hash": ported.hash},
        {"source": inputs.name, "fingerprint": inputs.fingerprint(positions), "inputs": len(inputs)}
        | ({} if inputs.classes is None else {"classes": list(inputs.classes)}),
        (selection,), len(positions), parameters,
    )  # fmt: skip
    return Job(ported, inputs, positions, manifest, asked.batch_size, where)


def start(
    job: Job,
    run_dir: str | Path,
    *,
    engine: str = "local",
    execution: Execution | None = None,
    progress: Progress | None = None,
    retry_failed: bool = False,
) -> Run:
    """Run a job in a directory, or continue it there; a finished one is only opened."""
    execution, folder = execution or Execution(), Path(run_dir)
    work = find_engine(engine, execution)
    make_folder(folder)
    with locked(folder):
        manifest = _settle(job, folder)
        with Store.of(folder, manifest, writable=True) as store:
            pending = store.pending(job.positions, job.inputs.ids, retry_failed=retry_failed)
            if pending:
                network = manifest.stretched(manifest.lipschitz)
                spec = TaskSpec(job.model, manifest.parameters, manifest.map, network, job.batch_size, job.device)
                started = datetime.now(UTC).isoformat(timespec="seconds")
                store.add_session(started, engine, job.device, versions())
                reader = _Reader(job, pending)
                rows = work(spec, reader, execution)
                _write_all(rows, reader, store, len(store.done()), job.manifest.total, progress)
    return open_run(folder)


def _write_all(
    rows: Iterator[Row], reader: _Reader, store: Store, done: int, total: int, progress: Progress | None
) -> None:
    """Store every row as it comes, one transaction each; unreadable inputs as failed rows."""

    def write(row: Row) -> None:
        nonlocal done
        store.put(row)
        done += 1
        if progress is not None:
            progress(row, done, total)

    try:
        for row in rows:
            write(row)
            while reader.broken:
                write(reader.broken.pop())
        while reader.broken:
            write(reader.broken.pop())
    finally:
        if isinstance(rows, Generator):
            rows.close()


class _Reader(Iterator[Item]):
    """Pending inputs, read one by one; those that cannot be read are set aside as failed rows."""

    def __init__(self, job: Job, pending: list[int]) -> None:
        self.job, self.pending, self.broken = job, iter(pending), list[Row]()

    def __next__(self) -> Item:
        for position in self.pending:
            item, problem = self.job.inputs.attempt(position, self.job.parameters.num_classes)
            if problem is None:
                return item
            self.broken.append(failed(item, problem))
        raise StopIteration


def _settle(job: Job, folder: Path) -> Manifest:
    """The manifest on disk if it is this run's, else a new one with the map and the constant fixed now."""
    if is_run(folder):
        old = read_manifest(folder)
        require_same(folder, old, job.manifest)
        _require_proved(folder, job, old)
        return old
    if (folder / store_file.NAME).exists():
        raise Refused(f"{folder} holds a store but no run.json: restore it, or use another run directory")
    constant = fixed_constant(job)
    manifest = replace(job.manifest, lipschitz=constant, map=fixed_map(job, constant))
    manifest.write(folder)
    return manifest


def _require_proved(folder: Path, job: Job, old: Manifest) -> None:
    """Compute the constant of the network again: a stored one that is smaller was not proved for this network."""
    if old.lipschitz is None or old.lipschitz.assumed:
        return
    now = fixed_constant(job)
    if now is not None and old.lipschitz.value < now.value * (1 - 1e-9):
        raise Refused(
            f"{folder} holds the Lipschitz constant {old.lipschitz.value:g}, but only {now.value:g} can be proved for this "
            "network here: run.json was changed, or another version proved more; start a new run"
        )
