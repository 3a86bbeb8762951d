"""ℓ1 and ℓ∞: against the materialised operator, and networks against row and column sums of their Jacobians."""

from __future__ import annotations

import pytest
import torch
from lipschitz_nets import Op, networks
from torch import nn

from equipoise.core import InputError, Refused
from equipoise.lipschitz import induced_bound, induced_norm

LAYERS = {
    "linear": (nn.Linear(5, 3), (5,)),
    "conv": (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 5)),
    "strided": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 5, 6)),
    "larger than the image": (nn.Conv2d(2, 2, 5, padding=2), (2, 2, 2)),
    "grouped, dilated": (nn.Conv1d(4, 4, 3, groups=2, dilation=2), (4, 9)),
    "transposed": (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 4, 4)),
    "reflect": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "circular": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2)),
}


def matrix(layer, shape):
    basis = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        layer = layer.double()
        found = (layer(basis) - layer(torch.zeros(1, *shape, dtype=torch.float64))).flatten(1).mT
        layer.float()
    return found


@pytest.mark.parametrize("order", ["l1", "linf"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_against_their_matrix(name, order):
    layer, shape = LAYERS[name]
    truth = float(matrix(layer, shape).abs().sum(0 if order == "l1" else 1).max())
    size = shape[1:] if len(shape) > 1 else None
    found = induced_norm(layer, order, input_size=size)
    assert found.lower <= truth * (1 + 1e-12) <= found.upper * (1 + 1e-9)
    if name not in ("reflect", "circular"):
        assert found.upper <= truth * (1 + 1e-9)
    assert float(induced_norm(layer, order).upper) >= truth * (1 - 1e-12)


_FIVE = torch.ones(5, dtype=torch.float64)
#: name: (function, shape of a sample, ℓ1 constant, ℓ∞ constant)
COUNTED = {
    "broadcast sum": (lambda x: x[:, :1] + _FIVE, (3,), 5, 1),
    "broadcast product": (lambda x: x[:, :1] * (2 * _FIVE), (3,), 10, 2),
    "difference": (lambda x: x - 3 * x.flip(1), (3,), 4, 4),
    "broadcast branches": (lambda x: x[:, :1] - x, (3,), 4, 2),
    "repeat": (lambda x: x.repeat(1, 4), (3,), 4, 1),
    "index": (lambda x: x[:, torch.tensor([0, 0, 1, 0])], (3,), 3, 1),
    "replicate": (lambda x: nn.functional.pad(x, (2, 2), mode="replicate"), (1, 3), 3, 1),
    "fill": (lambda x: nn.functional.pad(x, (2, 2), value=7.0), (1, 3), 1, 1),
    "max pooling": (lambda x: nn.functional.max_pool1d(x, 3, 1), (1, 6), 3, 1),
    "maximum": (lambda x: torch.maximum(x[:, :1], x), (3,), 4, 1),
    "split": (lambda x: x.chunk(3, 1)[1], (3,), 1, 1),
    "sum": (lambda x: x.sum(1), (3,), 1, 3),
    "mean in a named type": (lambda x: x.mean(1, dtype=torch.float32), (7,), 1 / 7, 1),
}


@pytest.mark.parametrize("name", COUNTED)
def test_copies_count_in_l1_and_not_in_linf(name):
    function, shape, one, infinity = COUNTED[name]
    x = torch.zeros(1, *shape, dtype=torch.float64)
    for order, value in (("l1", one), ("linf", infinity)):
        assert float(induced_bound(Op(function).eval(), x, order)) == pytest.approx(value, rel=1e-9)


COVERED = ["mlp", "gelu mlp", "cnn", "vgg", "resnet identity", "resnet projection", "resnet option A", "densenet", "repvgg",
           "parametrised", "shared, tuple", "autoencoder", "normalised",
           "bottleneck linear"]  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("order", ["l1", "linf"])
@pytest.mark.parametrize("name", COVERED)
def test_networks_against_their_jacobians(name, order):
    net, shape, _ = networks()[name]
    bound = float(induced_bound(net, torch.zeros(1, *shape), order))
    net = net.double()

    def stacked(x):
        leaves, _ = torch.utils._pytree.tree_flatten(net(x[None]))
        return torch.cat([t.flatten() for t in leaves])

    torch.manual_seed(0)
    for scale in (0.1, 1.0, 5.0):
        J = torch.autograd.functional.jacobian(stacked, scale * torch.randn(shape, dtype=torch.float64))
        rows = J.flatten(1).abs()
        assert float(rows.sum(0 if order == "l1" else 1).max()) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("name", ["mixer", "vit weights"])
def test_what_has_no_rule_is_refused(name):
    net, shape, _ = networks()[name]
    with pytest.raises(Refused, match="in linf"):
        induced_bound(net, torch.zeros(1, *shape))


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.full((2, 2), float("nan"))])
def test_bad_input_is_refused(bad):
    with pytest.raises(InputError):
        induced_norm(bad, "l1")
    with pytest.raises(InputError, match="order"):
        induced_norm(torch.eye(2), "l3")
