"""Random networks of ordinary building blocks: every node's facts are checked, and the bound is attacked."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import equipoise.nn as layers
from equipoise.testing.facts import check_facts
from equipoise.testing.layers import attack_bound
from equipoise.testing.runner import Batch

Make = Callable[[int], nn.Module]


_HOW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "maximum": torch.maximum,
}


class Combined(nn.Module):
    """Two branches: added, subtracted, multiplied, or their maximum."""

    def __init__(self, left: nn.Module, right: nn.Module, how: str) -> None:
        super().__init__()
        self.left, self.right, self.how = left, right, how

    def forward(self, x: Tensor) -> Tensor:
        """Both branches on the same input."""
        a, b = self.left(x), self.right(x)
        return _HOW[self.how](a, b)


#: keep the shape of an image or a vector
POINTWISE: tuple[nn.Module, ...] = (
    nn.ReLU(), nn.LeakyReLU(0.2), nn.ELU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.Hardswish(),
    nn.Mish(), nn.Softmax(1), nn.Softsign(), nn.Hardtanh(), nn.Identity(), nn.Dropout(),
)  # fmt: skip
#: from c channels of an image to c channels, of any size
IMAGE: tuple[Make, ...] = (
    lambda c: nn.Conv2d(c, c, 3, padding=1), lambda c: nn.Conv2d(c, c, 2, stride=2, padding=1), lambda c: nn.Conv2d(c, c, 1),
    lambda c: nn.Conv2d(c, c, 3, padding=1, groups=c), lambda c: nn.Conv2d(c, c, 3, padding=2, dilation=2),
    lambda c: nn.Conv2d(c, c, 3, padding=1, padding_mode="circular"), lambda c: nn.ConvTranspose2d(c, c, 2, stride=2),
    lambda c: nn.Conv2d(c, c, 3, padding=1, padding_mode="reflect"), lambda c: nn.BatchNorm2d(c), lambda c: nn.GroupNorm(1, c),
    lambda c: nn.AvgPool2d(2, padding=1), lambda c: nn.MaxPool2d(2, padding=1), lambda c: nn.MaxPool2d(3, 1, 1),
    lambda c: nn.AdaptiveAvgPool2d(3), lambda c: nn.ZeroPad2d(1), lambda c: nn.ReplicationPad2d(1),
    lambda c: nn.Upsample(scale_factor=2), lambda c: layers.SRConv2d(c, c, 3, padding=1), lambda c: layers.MaxMin(),
)  # fmt: skip
#: from n numbers to n numbers
VECTOR: tuple[Make, ...] = (
    lambda n: nn.Linear(n, n), lambda n: nn.Linear(n, n, bias=False), lambda n: nn.LayerNorm(n), lambda n: nn.BatchNorm1d(n),
    lambda n: layers.AOLLinear(n, n), lambda n: layers.SLLLinear(n, n), lambda n: nn.Sequential(nn.Linear(n, 3), nn.Linear(3, n)),
)  # fmt: skip


def random_networks(batch: Batch) -> None:
    """One random composition: facts of all its nodes, then its bound everywhere or on a ball."""
    torch.manual_seed(batch.integer(0, 2**31))
    image = batch.choose(True, False)
    size = 2 * batch.integer(1, 2)
    blocks = [_block(batch, IMAGE if image else VECTOR, size) for _ in range(batch.integer(1, 5))]
    network = nn.Sequential(*blocks, nn.Flatten(1)).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_var = torch.empty(size).uniform_(0.2, 3.0)
            module.running_mean = torch.randn(size)
    shape = (1, size, 4, 4) if image else (1, size)
    ball = batch.choose(None, 0.5, 3.0)
    what = f"{batch.label}, ball {ball}: {network}"

    for sentence in check_facts(network, torch.randn(shape), ball=ball or 1.0, seed=batch.integer(0, 2**31)):
        batch.tally.violations += 1
        batch.tally.examples.append(f"{what}: {sentence}")
    attack_bound(network, shape, batch, what, ball)


def _block(batch: Batch, kind: tuple[Make, ...], size: int) -> nn.Module:
    make = batch.choose(*kind, *POINTWISE)
    how = batch.choose(*["plain"] * 6, *_HOW)
    if how == "plain":
        return _made(make, size)
    keeping = (POINTWISE[0], kind[0], batch.choose(*POINTWISE))
    return Combined(_made(batch.choose(*keeping), size), _made(batch.choose(*keeping), size), how)


def _made(block: Make | nn.Module, size: int) -> nn.Module:
    """A module of its own: a copy of one without weights, or one built for the size."""
    return copy.deepcopy(block) if isinstance(block, nn.Module) else block(size)
