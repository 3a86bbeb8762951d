"""Shared by the tests of layers, activations and models: Jacobians and attacks, slow and obviously right."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def jacobian_norm(module: nn.Module, x: Tensor) -> float:
    """Spectral norm of the Jacobian of one sample (without batch dimension) at x, by materialising it in the module's dtype."""
    jacobian = torch.autograd.functional.jacobian(lambda v: module(v[None])[0], x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()).double(), ord=2))


def worst_ratio(
    module: nn.Module, shape: tuple[int, ...], dtype=torch.float64, pairs: int = 200, seed: int = 0
) -> float:
    """Largest ‖f(x) − f(x')‖/‖x − x'‖ over random pairs at several scales: a lower bound of the constant."""
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for scale in (1e-3, 0.1, 1.0, 10.0):
        x = torch.randn(pairs, *shape, generator=generator, dtype=dtype)
        d = torch.randn(pairs, *shape, generator=generator, dtype=dtype) * scale
        with torch.no_grad():
            grown = (module(x + d) - module(x)).flatten(1).norm(dim=1)
        worst = max(worst, float((grown / d.flatten(1).norm(dim=1)).max()))
    return worst
