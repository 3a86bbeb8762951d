import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from equipoise.cli.app import build


class Ran:
    """Result of a command: exit code, stdout, stderr."""

    def __init__(self, result):
        self.code, self.out, self.err, self.error = result.exit_code, result.stdout, result.stderr, result.exception

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def equipoise():
    """Run the application: `equipoise("norm", path)`."""
    app = build()

    def run(*args):
        return Ran(CliRunner().invoke(app, [str(arg) for arg in args], prog_name="equipoise"))

    return run


@pytest.fixture
def weights(tmp_path):
    """A file with one weight of each kind."""
    torch.manual_seed(0)
    tensors = {
        "fc.weight": torch.randn(6, 9),
        "fc.bias": torch.randn(6),
        "conv.weight": torch.randn(4, 2, 3, 3),
        "line.weight": torch.randn(3, 2, 5, dtype=torch.float64),
        "volume.weight": torch.randn(2, 2, 3, 3, 3).to(torch.bfloat16),
        "half.weight": torch.randn(5, 5).half(),
        "scale": torch.tensor(2.0),
        "steps": torch.tensor([3]),
        "zero[0]": torch.zeros(3, 3),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return path, tensors
