"""A layer from another package: found by name, converted to, exported and bounded, without a line in this one."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import nn

import equipoise as eq
import equipoise.nn as eqn
from equipoise.nn import layers

METHOD = '''
from torch import nn
from equipoise.nn import Method
from equipoise.nn.diagonal import normalised


class Frobenius(Method):
    """`K` over the sum of the Frobenius norms of its taps."""

    name, plain = "frobenius", (nn.Linear, nn.Conv2d)

    def __init__(self, kernel, *, share=1.0, device=None, dtype=None):
        super().__init__(kernel, device=device, dtype=dtype)
        self.share = share

    def forward(self, raw):
        K = self.kernel.grouped(raw)
        bound = K.double().flatten(3).square().sum((1, 2)).sqrt().sum(-1).amax() if K.dim() > 3 else K.double().norm()
        return self.share * normalised(K, bound, 1e-9).reshape(raw.shape)
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed distribution `frobenius` with one entry point; everything is forgotten afterwards."""
    (tmp_path / "frobenius_layers.py").write_text(METHOD)
    info = tmp_path / "frobenius-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: frobenius\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[equipoise.layers]\nfrobenius = frobenius_layers:Frobenius\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    layers._load_others.cache_clear()
    yield info
    layers._TABLE.pop("frobenius", None)
    layers._load_others.cache_clear()
    sys.modules.pop("frobenius_layers", None)


def test_a_layer_of_another_package_is_found_converted_to_and_bounded(package):
    torch.manual_seed(0)
    layer = eqn.FrobeniusConv2d(2, 3, 3, stride=2, padding=1, share=0.5)
    assert layer.stride == (2, 2)
    assert eq.spectral_norm(layer.export(), input_size=7).upper <= 0.5 * (1 + 1e-3)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    x = torch.randn(4, 1, 6, 6)
    found = eq.make_lipschitz(net, method="frobenius", example_input=x)
    assert [type(found.module[i]).__name__ for i in (0, 3)] == ["FrobeniusConv2d", "FrobeniusLinear"]
    assert eq.lipschitz_bound(found.eval(), x).upper <= 1
    plain = eq.export(found, x)
    assert type(plain.module[0]) is nn.Conv2d
    assert plain.certificate.upper <= 1


def test_what_is_no_method_is_refused_by_name(package):
    (package / "entry_points.txt").write_text("[equipoise.layers]\nfrobenius = frobenius_layers:nn\n")
    layers._load_others.cache_clear()
    with pytest.raises(eq.InputError, match="frobenius_layers:nn"):
        eqn.methods()
