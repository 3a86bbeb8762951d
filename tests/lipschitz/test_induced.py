"""ℓ1 and ℓ∞: against the materialised operator, and networks against row and column sums of their Jacobians."""

import pytest
import torch
from lipschitz_attacks import stacked
from lipschitz_nets import Op, networks
from torch import nn

from cases import OPERATORS, Operator
from equipoise.core import InputError, Refused
from equipoise.lipschitz import induced_bound, induced_norm
from equipoise.norms import operator_matrix

COMPLEX = [nn.Linear(5, 3, dtype=torch.complex64), nn.Conv1d(2, 3, 3, padding=1, dtype=torch.complex64)]


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("order", ["l1", "linf"])
@pytest.mark.parametrize(
    "operator", [nn.Linear(5, 3), *COMPLEX, *OPERATORS[::3]], ids=lambda o: getattr(o, "id", type(o).__name__)
)
def test_layers_against_their_matrix(operator, order):
    layer, shape, size = operator, (5,), None
    if isinstance(operator, nn.Conv1d):
        shape, size = (2, 5), (5,)
    if isinstance(operator, Operator):
        layer, shape, size = operator.layer, operator.input_shape, operator.size
    truth = float(operator_matrix(layer, shape).abs().sum(0 if order == "l1" else 1).max())
    found = induced_norm(layer, order, input_size=size)
    assert found.lower <= truth * (1 + 1e-12) <= found.upper * (1 + 1e-9)
    if getattr(layer, "padding_mode", "zeros") == "zeros":
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
    torch.manual_seed(0)
    for scale in (0.1, 1.0, 5.0):
        x = scale * torch.randn(shape, dtype=torch.float64)
        J = torch.autograd.functional.jacobian(lambda v: stacked(net(v[None]))[0], x)
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
