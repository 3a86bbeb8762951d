import json

import pytest

from equipoise.train import read_recipe

MLP = "equipoise.nn.models:mlp"


@pytest.fixture(scope="session")
def make_small():
    """A recipe of seconds: `make_small("optimizer.lr=0.1", noise={...})`."""

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
def small(make_small):
    """The same under a short name."""
    return make_small


def figures(folder):
    """The rows of metrics.jsonl without the clock and the checksum of it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "check")} for row in rows]


@pytest.fixture(name="figures")
def _figures():
    return figures
