import json

import pytest

from equipoise.train import read_recipe

MLP = "equipoise.nn.models:mlp"


@pytest.fixture(scope="session")
def small():
    """A recipe of seconds: `small("optimizer.lr=0.1", noise={...})`."""

    def make(*overrides, **parts):
        base = {
            "model": {"factory": MLP, "arguments": {"widths": [12], "dropout": 0.2}},
            "data": {"path": "digits", "limit": 160, "test_limit": 60},
            "epochs": 3,
            "batch_size": 32,
            "metrics": {"bound_every": 2, "epsilons": [0.0, 0.1]},
        }
        return read_recipe({**base, **parts}, overrides)

    return make


@pytest.fixture
def figures():
    """The rows of metrics.jsonl in a folder without the clock and the checksum of it."""

    def read(folder):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k not in ("seconds", "check")} for row in rows]

    return read
