"""What a run costs on top of the certification itself, and how fast stored runs are read.

Rows `{"name", "ours", "baseline", "ratio", "goal"}` as in `bench.smoothing`; both sides take turns in one run.
"""

import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.runs import Row as StoredRow
from equipoise.runs import Settings, open_run, prepare, start
from equipoise.runs.store import DataRecord, Manifest, ModelRecord, Store
from equipoise.smoothing import SimplexMap, SmoothedClassifier
from equipoise.smoothing.procedures import DEFAULT
from equipoise_lab.bench.smoothing import Row, interleaved, resnet, row, small_cnn
from equipoise_lab.timing import seconds


def rows(repeats: int = 3, inputs: int = 10_000) -> list[Row]:
    """All rows; a few minutes on one core."""
    return [
        *(overhead_row(name, model, shape, repeats) for name, model, shape in _networks()),
        overhead_row("small CNN, LVM-RS", small_cnn, (1, 28, 28), repeats, procedure="lvm"),
        reading_row(inputs),
    ]


def _networks() -> list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    return [("small CNN", small_cnn, (1, 28, 28)), ("CIFAR ResNet", resnet, (3, 32, 32))]


def overhead_row(
    name: str,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    repeats: int = 3,
    *,
    inputs: int = 20,
    n: int = 1900,
    procedure: str = DEFAULT,
) -> Row:
    """Seconds of a run (store, bookkeeping, derivation) over seconds of `SmoothedClassifier.certify` on the same draws."""
    model = make()
    x = torch.rand(inputs, *shape, generator=torch.Generator().manual_seed(0))
    y, selected = (
        torch.zeros(inputs, dtype=torch.int64),
        SimplexMap("softmax", 0.5) if procedure == "lvm" else None,
    )
    smooth = SmoothedClassifier(model, 0.25, 10, map=selected, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        job = prepare(
            model,
            (x, y),
            Settings.of(
                "sampled", {"sigma": 0.25, "n": n, "procedure": procedure, "map": selected}
            ),
        )
        fresh = count()

        def ours() -> Any:
            return start(job, Path(folder) / str(next(fresh))).certificates()

        def baseline() -> Any:
            return smooth.certify(x, n=n, procedure=procedure)

        a, b, ratio = interleaved(ours, baseline, repeats)
    return row(
        f"run of {inputs} inputs, {name}, n = {n} / SmoothedClassifier.certify, seconds",
        a,
        b,
        ratio,
        "≤ 1.05",
    )


def reading_row(inputs: int = 10_000, classes: int = 10, procedure: str = DEFAULT) -> Row:
    """Seconds to open a stored run, derive another α and procedure, and summarise it, against 20 s for 10⁵ inputs."""
    allowed = 20.0 * inputs / 100_000
    with tempfile.TemporaryDirectory() as folder:
        write_votes(Path(folder), inputs, classes)

        def read() -> None:
            run = open_run(folder)
            run.summary([0.0, 0.25, 0.5], results=run.results(alpha=0.01, procedure=procedure))

        spent = seconds(read)
    name = f"open, re-derive ({procedure}) and summarise {inputs:,} inputs, seconds / {allowed:g} s"
    return row(name, spent, allowed, spent / allowed, "≤ 1")


def write_votes(folder: Path, inputs: int, classes: int, n: int = 100_000) -> None:
    """A finished run with made-up votes, as large as asked."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(classes, 0.3), size=inputs)
    keywords = {
        "sigma": 0.25,
        "n": n,
        "seed": 0,
        "num_classes": classes,
        "noise": "float",
        "dimension": 1,
    }
    manifest = Manifest(
        model=ModelRecord(source="none", hash="none"),
        data=DataRecord(source="none", fingerprint="none", inputs=inputs),
        settings=Settings.of("sampled", keywords),
        total=inputs,
    )
    manifest.write(folder)
    first, second = (rng.multinomial(k, shares).tolist() for k in (100, n))
    with Store(folder, manifest, writable=True) as store:
        store.put(
            StoredRow(
                id=i, position=i, label=0, n0=100, draws=n, selection=tuple(first[i]), estimation=tuple(second[i]), seconds=1.0
            )
            for i in range(inputs)
        )  # fmt: skip
