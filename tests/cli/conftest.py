import pytest
import torch
from safetensors.torch import save_file


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
