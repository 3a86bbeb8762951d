"""Attacks on a claimed Lipschitz bound, all in float64: Jacobian norms, random pairs, and pairs trained by gradient ascent."""

import copy

import torch
from torch import Tensor, nn


def stacked(output) -> Tensor:
    leaves, _ = torch.utils._pytree.tree_flatten(output)
    return torch.cat([x.reshape(len(x), -1) for x in leaves], 1)


def attack(model: nn.Module, shape: tuple[int, ...], ball: float | None = None, seed=0, steps: int = 40) -> float:
    """The largest stretch found (a lower bound of the Lipschitz constant on the ball)."""
    model = copy.deepcopy(model).double().eval().requires_grad_(False)
    g = torch.Generator().manual_seed(seed)

    def inside(x: Tensor) -> Tensor:
        if ball is None:
            return x
        norms = x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1))
        return x * (ball / norms.clamp_min(ball))

    scales = torch.tensor([1e-3, 0.03, 0.3, 1.0, 1.0, 3.0, 10.0, 30.0], dtype=torch.float64)
    x = torch.randn(len(scales), *shape, generator=g, dtype=torch.float64) * scales.reshape(-1, *[1] * len(shape))
    x = inside(x)
    best = max(jacobian_norm(model, x), 0.0)
    y = inside(x + 0.1 * scales.reshape(-1, *[1] * len(shape)) * torch.randn(x.shape, generator=g, dtype=torch.float64))
    best = max(best, float(stretch(model, x, y).max()))
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    optimizer = torch.optim.Adam([x, y], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        ratio = stretch(model, inside(x), inside(y))
        (-(ratio + 1e-300).log().sum()).backward()
        optimizer.step()
        best = max(best, float(ratio.detach().max()))
    return max(best, jacobian_norm(model, inside(x.detach())))


def stretch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    top = (stacked(model(x)) - stacked(model(y))).square().sum(1)
    bottom = (x - y).flatten(1).square().sum(1)
    return (top / bottom.clamp_min(1e-12)).clamp_min(0).sqrt() * (bottom > 1e-12)


def jacobian_norm(model: nn.Module, x: Tensor, iterations: int = 25, h: float = 1e-5) -> float:
    """Power iteration on JᵀJ at every sample, by vjp and central differences; `‖Jv‖/‖v‖` is a lower bound wherever it stops."""
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    size = torch.zeros(len(x), dtype=x.dtype)
    for _ in range(iterations):
        v = v / v.flatten(1).norm(dim=1).clamp_min(1e-300).reshape(-1, *[1] * (x.dim() - 1))
        with torch.no_grad():  # a finite pair: a lower bound of the constant in its own right
            Jv = (stacked(model(x + h * v)) - stacked(model(x - h * v))) / (2 * h)
        size = Jv.norm(dim=1)
        leaf = x.clone().requires_grad_()
        (v,) = torch.autograd.grad(stacked(model(leaf)), leaf, Jv)
    return float(size.max())
