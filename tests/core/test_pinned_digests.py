"""Digests and fingerprints that stand in stored runs, checkpoints and data: a run of last year must find itself again."""

import numpy as np
import pytest
import torch

from equipoise.core.digests import Digest, digest_bytes, digest_document
from equipoise.data import Dataset
from equipoise.runs.inputs import Inputs, Selection
from equipoise.runs.manifest import Manifest
from equipoise.runs.parameters import Parameters
from equipoise.runs.proved.run import Asked, ProvedManifest

X, Y = np.arange(12, dtype=np.float32).reshape(3, 4) / 16, np.array([0, 1, 1])
MODEL, DATA = {"source": "s", "hash": "sha256:a"}, {"source": "d", "fingerprint": "sha256:b", "inputs": 3}
DETERMINISTIC = ProvedManifest(MODEL, DATA, Selection(), 3, Asked(3), versions={}, created="2025")
FULL = Parameters(
    0.25, 3, n0=10, n=20, alpha=0.01, procedure="lvm", seed=7, map="softmax:0.5", device="cuda", noise="grid", cells=64.0,
    dimension=4, seed_source="system", channels=(0.5, 0.25),
)  # fmt: skip


def run(parameters, *selection):
    return Manifest(MODEL, DATA, selection or (Selection(),), 3, parameters, versions={}, created="2025")


#: what is digested, and the beginning of the digest that stands in stored files
PINNED = {
    "a run": (lambda: run(Parameters(0.25, 3)).digest(), "a5921b172ab561e8"),
    "a run with everything set": (
        lambda: run(FULL, Selection(1, 2, 3, True), Selection(4)).digest(),
        "9387a0441a88ccd1",
    ),
    "a run whose seed nobody asked for": (lambda: run(FULL).digest(asked=True), "7809a08c39e102bd"),
    "its seal": (lambda: run(FULL).seal(), "a44db72cf0a71211"),
    "a deterministic run": (lambda: DETERMINISTIC.digest(), "622258ae18b3b823"),
    "inputs": (lambda: Inputs.of((torch.tensor(X), torch.tensor(Y))).fingerprint(np.arange(3)), "c88e41d351075697"),
    "data": (lambda: Dataset.from_arrays(X, Y).fingerprint(), "0bb886556e4a41fd"),
    "weights": (lambda: digest_bytes(b"weights"), "9a129038d9a00aed"),
    "a document": (lambda: digest_document({"b": [1, 0.5], "a": "ü"}), "c00e2228c42c5160"),
    "named values": (
        lambda: str(Digest("kind").add("x", X).add("t", torch.tensor(X)).add("b", b"b").add("n", 1)),
        "d9f5ecaa19b216fc",
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_what_is_stored_is_found_again(name):
    make, expected = PINNED[name]
    assert make().removeprefix("sha256:").startswith(expected)
