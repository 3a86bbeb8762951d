"""export: plain modules, the same outputs, and round trips through torch.export and ONNX."""

import copy
import pickle

import pytest
import torch
from torch import nn

import equipoise.nn as eqn
from equipoise.conversion import Rescaled, export, make_lipschitz
from equipoise.core import Refused
from equipoise.lipschitz import lipschitz_bound
from equipoise.models import proved
from equipoise.nn.models import build, input_shape
from equipoise.nn.parametrize import Computed, ComputedLayer

SLL = {"in_channels": 1, "input_size": 8, "channels": 4, "depth": 2, "dense_depth": 1, "hidden": 8, "num_classes": 3}
ORTHOGONAL = {**SLL, "channels": [2], "depths": [1], "head": "sr"}
del ORTHOGONAL["depth"], ORTHOGONAL["dense_depth"]


def parts():
    return nn.Sequential(
        eqn.SRConv2d(1, 4, 3, padding=1), eqn.MaxMin(), eqn.BatchCentering(4), eqn.SpaceToDepth(2),
        eqn.HouseholderActivation(16), eqn.ScaledAvgPool2d(2), nn.Flatten(), eqn.SRLinear(64, 6, t=3), eqn.MaxMin(),
        eqn.LastLayerNormalised(6, 3),
    )  # fmt: skip


NETS = {
    "parts": (parts, (1, 8, 8)),
    "sll": (lambda: build("sll", **SLL), input_shape("sll", **SLL)),
    "orthogonal": (lambda: build("lipschitz_cnn", **ORTHOGONAL), (1, 8, 8)),
    "converted": (lambda: make_lipschitz(build("mlp", widths=[8], num_classes=3)), (1, 8, 8)),
    "cayley": (lambda: build("lipschitz_cnn", **{**ORTHOGONAL, "family": "cayley", "constant": 2.0}), (1, 8, 8)),
}


def make(name):
    torch.manual_seed(0)
    build_net, shape = NETS[name]
    net, x = build_net(), torch.randn(3, *shape)
    net(x)  # batch statistics
    return net.eval(), x


@pytest.mark.medium
@pytest.mark.parametrize("name", NETS)
def test_outputs_are_equal_and_nothing_is_recomputed(name):
    net, x = make(name)
    plain = export(net, x)
    assert all(m.stored is not None for m in plain.modules() if isinstance(m, ComputedLayer))
    assert any(isinstance(m, Computed) for m in net.modules())  # the original stays
    with torch.no_grad():
        one, two = net(x), plain(x)
    torch.testing.assert_close(two, one, rtol=0, atol=1e-6 * float(one.abs().max()))
    assert plain.certificate.layers
    assert all(row.upper is not None and row.upper <= 3 for row in plain.certificate.layers)
    assert plain.certificate.upper <= lipschitz_bound(plain, x).upper * (1 + 1e-6)
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert other.certificate == plain.certificate
        assert torch.equal(other(x), plain(x))
    assert plain.certificate.to_dict()["norm"] == "l2"


def with_hook():
    layer = eqn.SRLinear(4, 4)
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


def subclass(kind, *args):
    return type("Other", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})(*args)


#: layers whose calls are not what `export()` makes of them, which would keep the norm of 1
OTHER_MAPS = {
    "a hook": with_hook,
    "a forward of a subclass": lambda: subclass(eqn.SRLinear, 4, 4),
    "a forward of a block": lambda: subclass(eqn.SLLLinear, 4),
}


@pytest.mark.parametrize("name", OTHER_MAPS)
def test_layers_whose_calls_are_another_map_are_refused(name):
    net, x = nn.Sequential(OTHER_MAPS[name]()).eval(), torch.zeros(1, 4)
    others = (lambda net: export(net, x), lambda net: proved(net, (4,)), lambda net: Rescaled(net, 1.0).rescale(x))
    for bound in (export, *others):
        with pytest.raises(Refused, match=r"hooks|overrides"):
            bound(net)


def test_modules_used_twice_stay_one_module():
    layer = eqn.SRLinear(4, 4)
    net = nn.Sequential(layer, nn.ReLU(), nn.ModuleDict({"again": layer})["again"])
    plain = export(net)
    assert plain[0] is plain[2]
    assert type(plain[0]) is nn.Linear
    assert len(plain.certificate.layers) == 1
    assert plain.certificate.upper >= 1
    assert isinstance(export(layer), nn.Linear)


def test_the_certificate_without_an_example_is_that_of_the_construction():
    net = nn.Sequential(eqn.SRLinear(4, 4), nn.ReLU(), eqn.SRLinear(4, 4))
    certificate = export(net).certificate
    assert certificate.source == "construction"
    assert 1 <= certificate.upper <= 1.0001
    assert export(nn.Sequential(eqn.SRLinear(4, 4), nn.Linear(4, 4))).certificate.upper is None
    x = torch.zeros(1, 4)
    assert export(net, x).certificate.upper == pytest.approx(lipschitz_bound(export(net), x).upper)


def test_a_layer_that_depends_on_the_size_is_exported_for_the_example_whatever_it_saw_before():
    layer = eqn.CayleyConv2d(1, 4, 3, padding=1)
    net = nn.Sequential(layer, eqn.ScaledAvgPool2d(8), nn.Flatten(), eqn.LastLayerNormalised(4, 3)).eval()
    x = torch.randn(1, 1, 8, 8)
    for size in (16, 12):
        layer(torch.zeros(1, 1, size, size))
    assert export(net, x).certificate.upper == proved(net, (1, 8, 8))[0]
    torch.testing.assert_close(export(net, x)(x), net(x))
    layer(torch.zeros(1, 1, 16, 16))
    with pytest.raises(Refused, match="evaluated at 2"):
        export(net)
