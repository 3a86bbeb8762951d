"""Long dense layers that do not form their weight: the map they apply, against the weight, its norm and float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import equipoise.nn as eqn
from equipoise.nn import factored
from equipoise.nn.diagonal import short_factors
from equipoise.nn.method import Method
from equipoise.nn.orthogonal import root

LAYERS = {
    "aol": (eqn.AOLLinear, {}),
    "sr": (eqn.SRLinear, {}),
    "sr-1": (eqn.SRLinear, {"t": 1}),
    "rko": (eqn.RKOLinear, {}),
    "bcop": (eqn.BCOPLinear, {}),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices take the way of large ones."""
    monkeypatch.setattr(factored, "LARGE", 1)
    monkeypatch.setattr(root, "FEW_ROWS", 1)
    torch.manual_seed(0)


def spectrum(shape: tuple[int, int], values: Tensor) -> Tensor:
    U, V = (torch.linalg.qr(torch.randn(n, min(shape), dtype=torch.float64))[0] for n in shape)
    return (U * values) @ V.mT


def weights(kind: str, shape: tuple[int, int]) -> Tensor:
    m = min(shape)
    ones, spread = torch.ones(m, dtype=torch.float64), torch.linspace(-1, 1, m, dtype=torch.float64)
    W = {
        "gaussian": lambda: torch.randn(shape, dtype=torch.float64),
        "orthonormal": lambda: spectrum(shape, ones),
        "near": lambda: spectrum(shape, 1 + 2e-5 * spread),
        "nearer": lambda: spectrum(shape, 1 + 2e-3 * spread),
        "twice": lambda: spectrum(shape, 1.5 + 0.5 * spread.sign()),
        "condition 3": lambda: spectrum(shape, 2 + spread),
        "condition 15": lambda: spectrum(shape, 8 + 7 * spread),
        "condition 1e3": lambda: spectrum(shape, 1 + 0.998 * spread),
        "deficient": lambda: spectrum(shape, (spread > 0).double()),
        "zero row": lambda: spectrum(shape, ones) * (torch.arange(shape[0]) != 2)[:, None],
        "zero": lambda: torch.zeros(shape, dtype=torch.float64),
        "unequal": lambda: spectrum(shape, ones) * torch.logspace(0, -9, shape[0], dtype=torch.float64)[:, None],
        "equal rows": lambda: torch.randn(1, shape[1], dtype=torch.float64).expand(shape),
        "positive": lambda: torch.rand(shape, dtype=torch.float64),
    }[kind]()
    return W


KINDS = (
    *("gaussian", "orthonormal", "near", "nearer", "twice", "condition 3", "condition 15", "condition 1e3"),
    *("deficient", "zero row", "zero", "unequal", "equal rows", "positive"),
)
SHAPES = [(12, 40), (40, 12), (9, 9)]


def layer_with(name: str, raw: Tensor, dtype: torch.dtype = torch.float32) -> nn.Module:
    kind, options = LAYERS[name]
    layer = kind(raw.shape[1], raw.shape[0], bias=False, dtype=dtype, **options)
    with torch.no_grad():
        layer.raw.copy_(raw.reshape(layer.raw.shape))
        if getattr(layer.method, "log_q", None) is not None:
            layer.method.log_q.copy_(0.3 * torch.sin(torch.arange(layer.method.log_q.numel())))
    return layer


def applied_map(layer: nn.Module) -> Tensor | None:
    """The matrix that a training step applies, in exact arithmetic up to float64's; None where the weight is formed."""
    raw = layer.raw.detach().reshape(layer.out_features, layer.in_features)
    W = raw.double()
    if isinstance(layer.method, eqn.BCOP | eqn.RKO):
        short = raw if raw.shape[0] <= raw.shape[1] else raw.mT
        found = root.inverse_root(factored.row_gram(short, True), short.shape[1])
        if found is None:
            return None
        exact = root.Root(
            *(v.double() if isinstance(v, Tensor) else v for v in (float(torch.tensor(found.alpha)), found.c)),
            *(t.double() for t in (found.X, found.A)), found.far, *(t.double() for t in (found.T, found.U, found.s)),
        )  # fmt: skip
        F = exact.times(torch.eye(len(short), dtype=torch.float64), True)
        return F @ W if short is raw else W @ F.mT
    turned = layer.method.outputs is not None
    t = getattr(layer.method, "t", 1)
    R = short_factors((raw.mT if turned else raw)[None], t, layer.method.log_q)
    if R is None:
        return None
    return R[0].detach().double()[:, None] * W if turned else W * R[0].detach().double()


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e5, 1e-25, 1e30])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYERS)
def test_the_map_that_is_applied_has_norm_at_most_one_and_is_that_of_the_weight(name, shape, scale):
    proved = 0
    for kind in KINDS:
        layer = layer_with(name, scale * weights(kind, shape))
        E, x = applied_map(layer), torch.randn(5, shape[1])
        weight = layer.weight.detach()
        if E is not None:
            proved += 1
            assert float(torch.linalg.matrix_norm(E, 2)) <= 1 + 1e-13, kind
            torch.testing.assert_close(E.float(), weight, rtol=0, atol=2e-5, msg=lambda text, k=kind: f"{k}: {text}")
        assert (layer._applied(x[:1]) is not None) == (E is not None), kind
        y = functional.linear(x, weight, layer.bias)
        torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-4 * float(1 + y.abs().max()), msg=kind)
        torch.testing.assert_close(layer(x[0]), y[0], rtol=0, atol=1e-4 * float(1 + y.abs().max()), msg=kind)
    assert proved >= (5 if 1e-6 < scale < 1e6 else 0)


@pytest.mark.parametrize("kind", ["near", "nearer", "twice", "condition 3", "gaussian"])
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_float64(name, shape, kind):
    if "near" in kind and name not in ("rko", "bcop"):
        kind = "positive"  # sums of absolute values have corners where rows are orthogonal
    raw = weights(kind, shape).float()
    found, exact = layer_with(name, raw), layer_with(name, raw.double(), torch.float64)
    x, g = torch.randn(2, 3, shape[1]), torch.randn(2, 3, shape[0])
    results = []
    for layer, a, b in ((found, x, g), (exact, x.double(), g.double())):
        a.requires_grad_()
        wanted = [a, *layer.parameters()]
        y = layer(a)
        first = torch.autograd.grad(y, wanted, b, create_graph=True)
        second = torch.autograd.grad(sum(v.square().sum() for v in first[:2]), wanted[:2], allow_unused=True)
        results.append([y, *torch.autograd.grad(layer(a), wanted, b), *second])
    assert found._applied(x.detach()[:, :1]) is not None
    for one, other in zip(*results, strict=True):
        # the allowance for float32 is part of the sums, and its derivative of the derivative
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=float(3e-4 * other.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_single_input_without_a_gradient_of_its_own(name, shape):
    layer = layer_with(name, weights("positive" if name in ("aol", "sr", "sr-1") else "condition 3", shape))
    x, g = torch.randn(shape[1]), torch.randn(shape[0])
    assert layer._applied(x) is not None
    found, expected = layer(x), functional.linear(x, layer.weight)
    for twice in (False, True):
        one, other = (
            torch.autograd.grad(y, layer.raw, g, create_graph=twice, retain_graph=True)[0] for y in (found, expected)
        )
        torch.testing.assert_close(one, other, rtol=1e-3, atol=float(1e-4 * other.abs().max()))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_no_number_is_not_applied(name, value):
    layer = layer_with(name, weights("orthonormal", (12, 40)))
    with torch.no_grad():
        layer.raw.view(-1)[3] = value
    assert layer._applied(torch.randn(2, 40)) is None
    assert not bool(torch.isfinite(layer(torch.randn(2, 40))).all())


@pytest.mark.parametrize("error", [1e-6, 1e-4, 1e-2, 1.0])
def test_the_proof_does_not_rest_on_the_eigenvectors(error, monkeypatch):
    eigh = torch.linalg.eigh

    def wrong(G):
        squares, U = eigh(G)
        return squares * (1 + error * torch.rand_like(squares)), U + error * torch.randn_like(U) / 4

    monkeypatch.setattr(torch.linalg, "eigh", wrong)
    E = applied_map(layer_with("bcop", weights("condition 3", (12, 40))))
    assert E is None or float(torch.linalg.matrix_norm(E, 2)) <= 1 + 1e-13
    assert (E is None) == (error > 1e-3)


def test_singular_values_are_one():
    for kind in ("orthonormal", "near", "nearer", "twice", "condition 3"):
        E = applied_map(layer_with("bcop", weights(kind, (12, 40))))
        assert E is not None
        assert float(torch.linalg.svdvals(E)[-1]) > 1 - 1e-5, kind


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("size", [1e-5, 1.0, 1e5])
def test_sums_in_float32_are_at_least_the_exact_ones_and_close(t, size):
    W = size * (nn.init.orthogonal_(torch.empty(24, 700)) + 0.01 * torch.randn(24, 700))
    log_q = torch.linspace(-2, 2, 24)
    G = W.double() @ W.double().mT
    q = log_q.exp().double()
    exact = ((G if t == 1 else G @ G).abs() @ q) / q
    found = factored.row_sums(factored.row_gram(W, False), 700, t, log_q)
    assert found is not None
    assert bool((exact <= found).all())
    assert bool((found < 1.02 * exact).all())


def test_differentiable_products():
    W, x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True), torch.randn(3, 7, dtype=torch.float64)
    x.requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda W: factored.Square.apply(factored.Gram.apply(W, False)), W)
        assert check(lambda x, W: factored.LinearGram.apply(x, W, False), (x, W))
        assert check(lambda W: root.by_iteration(W @ W.mT), W, atol=1e-4)


class Halved(eqn.AOL):
    """A weight of its own, and what AOL would apply instead of it."""

    def forward(self, raw: Tensor) -> Tensor:
        return super().forward(raw) / 2


def test_a_weight_that_is_changed_is_the_one_that_is_applied():
    raw, x = weights("gaussian", (12, 40)).float(), torch.randn(3, 40)
    plain = layer_with("aol", raw)
    assert plain._applied(x) is not None

    class Layer(eqn.AOLLinear):
        method_type = Halved

    halved = Layer(40, 12, bias=False)
    hooked = layer_with("aol", raw)
    hooked.method.register_forward_hook(lambda _, __, weight: weight / 2)
    for layer in (halved, hooked):
        with torch.no_grad():
            layer.raw.copy_(raw)
        assert layer._applied(x) is None
        torch.testing.assert_close(layer(x), plain(x) / 2)
    assert Method.applied(plain.method, x, raw) is None
    assert plain._applied(torch.randn(200, 40)) is None  # more inputs than the weight is long
    assert plain.eval()._applied(x) is None
