"""What an audit costs and how tight it is, against forward passes and power iteration, side by side in one run.

Every function returns plain rows `{"name", "ours", "baseline", "ratio", "goal"}`.
"""

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise.checkpoints import load_weights
from equipoise.core.modules import fresh_strides
from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise_lab.bench import data_file
from equipoise_lab.bench.smoothing import Row, row
from equipoise_lab.models import build
from equipoise_lab.peers import PEERS
from equipoise_lab.timing import take_turns


def ryu_norm(
    apply: Callable[[Tensor], Tensor], shape: tuple[int, ...], iterations: int = 200
) -> float:
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


def product_with(
    net: nn.Module, x: Tensor, norm: Callable[[nn.Conv2d, tuple[int, ...]], float]
) -> float:
    """Logarithm of the layer-by-layer product of a network with another norm for every convolution.

    Args:
        net: the network, in evaluation mode.
        x: an input of batch 1.
        norm: from a convolution and the shape (channels, height, width) of its input to its norm.
    """
    report = lipschitz_bound(net, x)
    sizes: dict[str, tuple[int, ...]] = {}
    hooks = [
        m.register_forward_pre_hook(
            lambda m, a, name=name: sizes.__setitem__(name, tuple(a[0].shape[1:]))
        )
        for name, m in net.named_modules()
        if isinstance(m, nn.Conv2d)
    ]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    total = report.log_product
    for layer in report.layers:
        if layer.name in sizes and not math.isnan(layer.lower):
            conv = net.get_submodule(layer.name)
            assert isinstance(conv, nn.Conv2d)
            total += layer.weight * (
                math.log(norm(conv, sizes[layer.name])) - math.log(layer.upper)
            )
    return total


def ryu_product(net: nn.Module, x: Tensor, iterations: int = 200) -> float:
    """Logarithm of the layer-by-layer product with every convolution's norm estimated by power iteration."""

    def ryu(conv: nn.Conv2d, shape: tuple[int, ...]) -> float:
        def linear(v: Tensor) -> Tensor:
            return conv(v) if conv.bias is None else conv(v) - conv.bias[:, None, None]

        return ryu_norm(linear, shape, iterations)

    return product_with(net, x, ryu)


def polyphase(kernel: Tensor, stride: int) -> Tensor:
    """The kernel of the same convolution with stride 1 on the `stride²` phases of its input, as further channels.

    >>> polyphase(torch.zeros(4, 2, 3, 3), 2).shape
    torch.Size([4, 8, 2, 2])
    """
    missing = [-k % stride for k in kernel.shape[2:]]
    padded = nn.functional.pad(kernel, (0, missing[1], 0, missing[0]))
    phases = padded.unflatten(3, (-1, stride)).unflatten(2, (-1, stride))
    return phases.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


def peer_product(net: nn.Module, x: Tensor, name: str) -> float:
    """Logarithm of the product with the norms of another method, which takes every convolution as circular."""

    def by_peer(conv: nn.Conv2d, shape: tuple[int, ...]) -> float:
        stride = int(conv.stride[0])
        sizes = tuple(-(-n // stride) for n in shape[1:])
        return float(PEERS[name].run(polyphase(conv.weight, stride), sizes, "circular"))

    return product_with(net, x, by_peer)


def imagenet_resnet(depth: int = 18) -> nn.Module:
    """ResNet-18 or ResNet-50 for 3×224×224 with random weights, in evaluation mode."""
    return build(f"resnet{depth}", stem="imagenet", num_classes=1000, input_size=224).eval()


def trained_resnet(depth: int = 20) -> nn.Module:
    """A trained CIFAR ResNet from the data folder, in evaluation mode; its inputs are normalised beforehand."""
    net = build(f"cifar_resnet{depth}", mean=None, std=None)
    return load_weights(net, data_file(f"cifar10-resnet{depth}.safetensors")).requires_grad_(False)


def rows(repeats: int = 3) -> list[Row]:
    """All rows; minutes on one core."""
    audits = [
        audit_row(18, 10, repeats),
        audit_row(18, 10, 1, scattered=True),
        audit_row(50, 15, 1),
    ]
    return [*audits, *ryu_rows(), *local_rows()]


def audit_row(
    depth: int = 18, goal: float = 10, repeats: int = 3, rtol: float = 0.05, scattered: bool = False
) -> Row:
    """Audit of a ResNet at 3×224×224 against one forward pass of batch 8, interleaved; the ratio is the number of passes.

    With fresh batch norms one proof serves both totals; `scattered` draws their scales at random, where it often does not.
    """
    torch.manual_seed(0)
    net = imagenet_resnet(depth).requires_grad_(False)
    for module in net.modules():
        if scattered and isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    # what the exporter imports is not part of the audit
    lipschitz_bound(nn.Linear(2, 2), torch.zeros(1, 2))
    x = torch.randn(8, 3, 224, 224)
    with torch.no_grad():
        net(x)
        contest = take_turns(
            {"ours": lambda: lipschitz_bound(net, x[:1], rtol=rtol), "base": lambda: net(x)},
            repeats,
        )
    ratio = statistics.median(contest.ratios("ours", "base"))
    kind = ", scattered batch norms" if scattered else ""
    name = (
        f"audit of ResNet-{depth} at 3×224×224 (rtol {rtol:g}{kind}), in forward passes of batch 8"
    )
    return row(name, contest.seconds["ours"], contest.seconds["base"], ratio, goal)


def ryu_rows(depths: tuple[int, ...] = (20, 56)) -> list[Row]:
    """PUB on the trained CIFAR ResNets relative to the same product with Ryu's norms (first order in the logarithm)."""
    measured = []
    for depth in depths:
        net, x = trained_resnet(depth), torch.zeros(1, 3, 32, 32)
        report, ryu = lipschitz_bound(net, x), ryu_product(net, x)
        for name, ours in (("product", report.log_product), ("fused", report.log_upper)):
            title = f"log PUB of CIFAR ResNet-{depth}, {name}, relative to Ryu's"
            measured.append(row(title, ours, ryu, math.exp(ours - ryu), 1.05))
    return measured


def local_rows(radii: tuple[float, ...] = (0.05, 0.25), samples: int = 2) -> list[Row]:
    """Certified local upper end on the trained ResNet-20 against its global bound; the ratio is the median over test images."""
    import numpy as np

    net = trained_resnet(20)
    pixels = np.load(data_file("cifar10.npz"))["x_test"][:samples]
    x = fresh_strides(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
    x = (x - torch.tensor([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).reshape(1, 3, 1, 1)
    whole = lipschitz_bound(net, x[:1]).upper
    measured = []
    for radius in radii:
        bracket = local_lipschitz(net, x, radius, steps=10)
        upper = float(torch.as_tensor(bracket.upper).median())
        lower = float(torch.as_tensor(bracket.lower).median())
        name = f"local bound of ResNet-20 at radius {radius:g} (attack reaches {lower:.3g})"
        measured.append(row(name, upper, whole, upper / whole, 0.1))
    return measured
