"""What an audit costs and how tight it is, against forward passes and power iteration, side by side in one run.

Every function returns plain rows `{"name", "ours", "baseline", "ratio", "goal"}`.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.bench.timing import seconds
from equipoise.core.errors import InputError
from equipoise.lipschitz import lipschitz_bound, local_lipschitz

Row = dict[str, Any]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions; the shortcut is the identity, a projection, or option A (subsample, pad channels)."""

    expansion = 1

    def __init__(self, i: int, o: int, stride: int = 1, projection: bool = True) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.stride, self.extra = stride, o - i
        changed = stride != 1 or i != o
        down = (
            nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if changed and projection else None
        )
        self.downsample = down

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.stride != 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return F.relu(x + y)


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions with a projection where the shape changes."""

    expansion = 4

    def __init__(self, i: int, width: int, stride: int = 1) -> None:
        super().__init__()
        o = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(i, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, o, 1, bias=False), nn.BatchNorm2d(o)
        changed = stride != 1 or i != o
        self.downsample = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if changed else None

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        y = self.bn3(self.conv3(y))
        return F.relu((x if self.downsample is None else self.downsample(x)) + y)


def imagenet_resnet(depth: int = 18, classes: int = 1000) -> nn.Module:
    """ResNet-18 or ResNet-50 for 3×224×224 with random weights, in evaluation mode."""
    block: type[BasicBlock] | type[Bottleneck] = {18: BasicBlock, 50: Bottleneck}[depth]
    counts = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for stage, count in enumerate(counts):
        width = 64 * 2**stage
        for index in range(count):
            layers.append(block(channels, width, 2 if stage and not index else 1))
            channels = width * block.expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)).eval()


class CifarResNet(nn.Module):
    """The CIFAR ResNet of depth 6n + 2 with option-A shortcuts."""

    def __init__(self, depth: int = 20) -> None:
        super().__init__()
        n = (depth - 2) // 6
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*[BasicBlock(16, 16, 1, False) for _ in range(n)])
        self.layer2 = nn.Sequential(*[BasicBlock(16 if not i else 32, 32, 1 if i else 2, False) for i in range(n)])
        self.layer3 = nn.Sequential(*[BasicBlock(32 if not i else 64, 64, 1 if i else 2, False) for i in range(n)])
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.layer3(self.layer2(self.layer1(y)))
        return self.linear(y.mean((2, 3)))


def data_folder() -> Path:
    """Where the shared data lies: `EQUIPOISE_DATA`, or `../shared/data` next to the working directory."""
    folder = Path(os.environ.get("EQUIPOISE_DATA", "../shared/data"))
    if not (folder / "cifar10-resnet20.safetensors").exists():
        raise InputError(f"no trained CIFAR ResNets in {folder}; set EQUIPOISE_DATA to the folder that holds them")
    return folder


def trained_resnet(depth: int = 20) -> nn.Module:
    """A trained CIFAR ResNet from the data folder, in evaluation mode."""
    from safetensors.torch import load_file

    net = CifarResNet(depth)
    net.load_state_dict(load_file(data_folder() / f"cifar10-resnet{depth}.safetensors"), strict=False)
    return net.eval().requires_grad_(False)


def rows(repeats: int = 3) -> list[Row]:
    """All rows; minutes on one core."""
    audits = [audit_row(18, 10, repeats), audit_row(18, 10, 1, scattered=True), audit_row(50, 15, 1)]
    return [*audits, *ryu_rows(), *local_rows()]


def audit_row(depth: int = 18, goal: float = 10, repeats: int = 3, rtol: float = 0.05, scattered: bool = False) -> Row:
    """Audit of a ResNet at 3×224×224 against one forward pass of batch 8, interleaved; the ratio is the number of passes.

    With fresh batch norms one proof serves both totals; `scattered` draws their scales at random, where it often does not.
    """
    torch.manual_seed(0)
    net = imagenet_resnet(depth).requires_grad_(False)
    for module in net.modules():
        if scattered and isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    lipschitz_bound(nn.Linear(2, 2), torch.zeros(1, 2))  # what the exporter imports is not part of the audit
    x = torch.randn(8, 3, 224, 224)
    with torch.no_grad():
        net(x)
    ours, base = [], []
    for _ in range(repeats):
        ours.append(seconds(lambda: lipschitz_bound(net, x[:1], rtol=rtol)))
        with torch.no_grad():
            base.append(seconds(lambda: net(x)))
    ratio = statistics.median(a / b for a, b in zip(ours, base, strict=True))
    kind = ", scattered batch norms" if scattered else ""
    name = f"audit of ResNet-{depth} at 3×224×224 (rtol {rtol:g}{kind}), in forward passes of batch 8"
    return {
        "name": name,
        "ours": statistics.median(ours),
        "baseline": statistics.median(base),
        "ratio": ratio,
        "goal": goal,
    }


def ryu_norm(apply: Callable[[Tensor], Tensor], shape: tuple[int, ...], iterations: int = 200) -> float:
    """Power iteration on the real operator (Ryu et al. 2019): an estimate from below, not a bound."""
    v = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    size = 0.0
    for _ in range(iterations):
        v = (v / v.norm()).requires_grad_()
        out = apply(v)
        size = float(out.detach().norm())
        (v,) = torch.autograd.grad(out, v, out.detach())
    return size


def ryu_product(net: nn.Module, x: Tensor) -> float:
    """Logarithm of the layer-by-layer product with every convolution's norm estimated by power iteration."""
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
        if row.name in sizes and row.kind == "convolution":
            conv = net.get_submodule(row.name)
            total += row.weight * (math.log(ryu_norm(conv, sizes[row.name])) - math.log(row.upper))
    return total


def ryu_rows(depths: tuple[int, ...] = (20, 56)) -> list[Row]:
    """PUB on the trained CIFAR ResNets relative to the same product with Ryu's norms (first order in the logarithm)."""
    found = []
    for depth in depths:
        net, x = trained_resnet(depth), torch.zeros(1, 3, 32, 32)
        report, ryu = lipschitz_bound(net, x), ryu_product(net, x)
        for name, ours in (("product", report.log_product), ("fused", report.log_upper)):
            title = f"log PUB of CIFAR ResNet-{depth}, {name}, relative to Ryu's"
            found.append({"name": title, "ours": ours, "baseline": ryu, "ratio": math.exp(ours - ryu), "goal": 1.05})
    return found


def local_rows(radii: tuple[float, ...] = (0.05, 0.25), samples: int = 2) -> list[Row]:
    """Certified local upper end on the trained ResNet-20 against its global bound; the ratio is the median over test images."""
    import numpy as np

    net = trained_resnet(20)
    pixels = np.load(data_folder() / "cifar10.npz")["x_test"][:samples]
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    x = (x - torch.tensor([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).reshape(
        1, 3, 1, 1
    )
    whole = lipschitz_bound(net, x[:1]).upper
    found = []
    for radius in radii:
        bracket = local_lipschitz(net, x, radius, steps=10)
        upper = float(torch.as_tensor(bracket.upper).median())
        lower = float(torch.as_tensor(bracket.lower).median())
        name = f"local bound of ResNet-20 at radius {radius:g} (attack reaches {lower:.3g})"
        found.append({"name": name, "ours": upper, "baseline": whole, "ratio": upper / whole, "goal": 0.1})
    return found
