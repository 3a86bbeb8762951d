from types import SimpleNamespace

import numpy as np
import pytest

from equipoise.report import Attacks, Checked, ReportData, Series
from equipoise.runs import Results

HOSTILE = '</script><img src=x onerror="window.pwned=1"><b>\'&amp;"@@DATA@@ =1+1'


def series(n=40, model="net", run="run", procedure="cpm", seed=0, ids=None, **settings):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, n)
    prediction = np.where(rng.random(n) < 0.8, labels, rng.integers(-1, 10, n))
    radius = np.where(prediction >= 0, rng.gamma(2.0, 0.2, n), 0.0)
    names = tuple(str(i) for i in range(n)) if ids is None else ids
    own = {"sigma": settings.pop("sigma", 0.25), "alpha": settings.pop("alpha", 1e-3)}
    about = "Certifies the smoothed classifier. The rounding inside the network is not covered."
    results = Results(labels, prediction, prediction, radius, np.zeros(n, bool), about, procedure, **own)
    return Series(model, run, procedure, names, results, **settings)


def certified(radii, prediction=0, answer=0, procedure="cpm", run="r", **settings):
    """A curve of inputs of class 0 with these radii, predictions and answers."""
    radii = np.array(radii)
    labels = np.zeros(len(radii), int)
    failed, ids = labels.astype(bool), tuple(map(str, range(len(radii))))
    results = Results(labels, labels + answer, labels + prediction, radii, failed, "", procedure)
    return Series("m", run, procedure, ids, results, **settings)


def bound(name="conv1", layers=4):
    rows = [
        {
            "name": f"{name}.{i}", "node": f"n{i}", "kind": "convolution", "shape": "3×8×8→8×8×8", "lower": 1.23456789 + i,
            "upper": 1.23456799 + i, "method": "gram", "weight": 1.0, "share": 0.4 - 0.1 * i, "note": "",
        }
        for i in range(layers)
    ]  # fmt: skip
    rows.append({**rows[0], "name": "relu", "kind": "relu", "lower": None, "upper": 1.0, "share": 0.0})
    return {
        "upper": 20.0, "log_upper": np.log(20.0), "product": 30.0, "log_product": np.log(30.0), "fused": 25.0,
        "log_fused": np.log(25.0), "log_chain": None, "method": "fused", "ball": None, "notes": [], "fix_first": [name],
        "layers": rows,
    }  # fmt: skip


def whole(n=40, text="net"):
    """A report with everything in it, `text` wherever a file could put text."""
    ids = tuple(f"{text}{i}" for i in range(n))
    kinds = ("deterministic", "cohen", "cpm", "lvm", "lvm + Lipschitz")
    curves = [
        series(n, text, text, k, seed=i, ids=ids, **({"sigma": 0.0, "alpha": 0.0} if i == 0 else {}))
        for i, k in enumerate(kinds)
    ]
    rng = np.random.default_rng(1)
    attacks = [
        Attacks(text, text, kind, ids, np.where(rng.random(n) < 0.9, rng.gamma(3, 0.3, n), np.inf), "20 steps")
        for kind in ("base", "smoothed")
    ]
    return ReportData(
        text, tuple(curves), tuple(attacks), {text: bound(text)}, ({"run": text, "model": text, "seed": 7},),
        Checked(12), text, "2026-01-01", {"equipoise": "0"}, (text,),
    )  # fmt: skip


@pytest.fixture(scope="session")
def report_parts():
    """Builders of report data."""
    return SimpleNamespace(hostile=HOSTILE, series=series, whole=whole, bound=bound, certified=certified)
