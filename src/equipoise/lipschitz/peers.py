"""The network bound that others report: the same product, with norms estimated by power iteration. Not a bound."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise.lipschitz.bound import lipschitz_bound


def ryu_norm(apply: Callable[[Tensor], Tensor], shape: tuple[int, ...], iterations: int = 200) -> float:
    """Power iteration on the real operator (Ryu et al. 2019): an estimate from below.

    >>> _ = torch.manual_seed(0)
    >>> round(ryu_norm(nn.Linear(3, 3, bias=False).requires_grad_(False).eval(), (3,)), 2) > 0
    True
    """
    v = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    size = 0.0
    for _ in range(iterations):
        v = (v / v.norm()).requires_grad_()
        out = apply(v)
        size = float(out.detach().norm())
        (v,) = torch.autograd.grad(out, v, out.detach())
    return size


def ryu_product(net: nn.Module, x: Tensor, iterations: int = 200) -> float:
    """Logarithm of the layer-by-layer product with every convolution's norm estimated by power iteration (bias-free ones)."""
    report = lipschitz_bound(net, x)
    sizes: dict[str, tuple[int, ...]] = {}
    hooks = [
        m.register_forward_pre_hook(lambda m, a, name=name: sizes.__setitem__(name, tuple(a[0].shape[1:])))
        for name, m in net.named_modules()
        if isinstance(m, nn.Conv2d)
    ]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    total = report.log_product
    for row in report.layers:
        if row.name in sizes and not math.isnan(row.lower):
            conv = net.get_submodule(row.name)
            assert isinstance(conv, nn.Conv2d)

            def linear(v: Tensor, conv: nn.Conv2d = conv) -> Tensor:
                return conv(v) if conv.bias is None else conv(v) - conv.bias[:, None, None]

            estimate = ryu_norm(linear, sizes[row.name], iterations)
            total += row.weight * (math.log(estimate) - math.log(row.upper))
    return total
