"""Every method of the table on every kind of padding: what is labelled upper is above, lower below, exact equal."""

import pytest
import torch

from cases import METHODS, Method, as_layer
from equipoise import Kind
from equipoise.norms import reference_norm

KERNELS = {
    "gaussian": lambda: torch.randn(4, 3, 3, 3),
    "wide": lambda: torch.randn(2, 5, 3, 3),
    "box": lambda: torch.ones(1, 1, 3, 3) / 9,
    "positive": lambda: torch.rand(3, 3, 5, 3),
    "delta": lambda: torch.eye(3)[:, :, None, None] * torch.nn.functional.pad(torch.ones(1, 1), (1, 1, 1, 1)),
    "even": lambda: torch.randn(2, 2, 4, 2),
}


@pytest.mark.parametrize("padding", ["circular", "zeros"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.id)
def test_labels_are_true(method: Method, kernel: str, padding: str) -> None:
    torch.manual_seed(1)
    K = KERNELS[kernel]()
    size = (7, 6)
    truth = reference_norm(as_layer(K, padding), (K.shape[1], *size))
    bound = method.run(K, size, padding)
    value = float(bound)
    if bound.kind is Kind.UPPER:
        assert value >= truth * (1 - 1e-6 if method.id == "conv_norm" else 1 - 1e-12)
    elif bound.kind is Kind.LOWER:
        assert value <= truth * (1 + 1e-9)
    elif bound.kind is Kind.EXACT:
        assert value == pytest.approx(truth, rel=1e-5)
