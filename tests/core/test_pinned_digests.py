"""Digests and fingerprints that stand in stored runs, checkpoints and data: a run of last year must find itself again."""

import numpy as np
import pytest
import torch

from equipoise.core.files import Digest, digest_bytes, digest_document
from equipoise.data import Dataset
from equipoise.runs.sources import Inputs

X, Y = np.arange(12, dtype=np.float32).reshape(3, 4) / 16, np.array([0, 1, 1])


#: what is digested, and the beginning of the digest that stands in stored files
PINNED = {
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
