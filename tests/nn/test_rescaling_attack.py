"""Attack every layer: raw parameters trained to *maximise* the norm; then the operator is materialised in float64.

The stored weights (float32 or float64) are what is checked, not a recomputation.
"""

import pytest
import torch
from layer_cases import geometries, inputs_for, marked_rows, quick, rows
from nn_parts import exported, jacobian_norm, raw, upper
from torch import Tensor, nn

import equipoise as eq
from equipoise.norms import reference_norm, spectral_norm

pytestmark = pytest.mark.medium

TOLERANCE = 1e-5
STEPS, FEW_STEPS = 200, 25


def _all_geometries():
    """Slow: every row with all steps. Normal run: of each layer one convolution in float32 (the last geometry: strided,
    circular, grouped) and the dense one in float64, with fewer steps."""
    found = []
    for case, kind in rows():
        every = geometries(case, kind)
        dense = "conv2d" not in case.kinds
        for i, options in enumerate(every):
            for dtype in (torch.float32, torch.float64):
                name = "-".join([case.name, kind, *[str(v) for v in options.values()], str(dtype)[6:]])
                found.append(pytest.param(case, kind, options, dtype, STEPS, marks=pytest.mark.slow, id=name))
                last = kind == ("linear" if dense or dtype is torch.float64 else "conv2d") and i == len(every) - 1
                if quick(case, kind) and last:
                    found.append(pytest.param(case, kind, options, dtype, FEW_STEPS, id=f"{name}-few"))
    return found


def grown(layer: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """`J(x)v` by a central difference: exact for affine layers."""
    h = 1e-2
    return (layer(x + h * v) - layer(x - h * v)) / (2 * h)


def attack(layer: nn.Module, x: Tensor, steps: int) -> Tensor:
    """Adam on all parameters and on x, with v following by power iteration; returns the last x."""
    x = x.clone().requires_grad_()
    v = torch.randn_like(x)
    adam = torch.optim.Adam([*layer.parameters(), x], lr=0.05)
    for _ in range(steps):
        v = (v / v.norm()).detach().requires_grad_()
        size = grown(layer, x, v).norm()
        adam.zero_grad()
        (-size).backward()
        adam.step()
        v = v.grad.detach()
        if float(v.norm()) == 0:
            v = torch.randn_like(v)
    return x.detach()


@pytest.mark.parametrize(("case", "kind", "options", "dtype", "steps"), _all_geometries())
def test_norm_stays_below_one_under_attack(case, kind, options, dtype, steps):
    torch.manual_seed(1)
    layer = case.make(kind, 2, 2, dtype=dtype, **options)
    x = attack(layer, inputs_for(kind, 2, size=5, batch=1, dtype=dtype), steps)
    assert all(p.isfinite().all() for p in layer.parameters())
    shape = tuple(x.shape[1:])
    plain = exported(layer, shape)
    if case.affine:
        one_size = kind == "linear" or case.name in ("cayley", "bro")
        sizes = [shape] if one_size else [shape, (shape[0], *[n + 1 for n in shape[1:]])]
        norms = [reference_norm(plain, size) for size in sizes]
        assert max(norms) <= 1 + TOLERANCE
        if isinstance(plain, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):  # a series is no single weight
            bracket = spectral_norm(plain, input_size=None if kind == "linear" else shape[1:], rtol=1e-6)
            assert bracket.upper <= 1 + TOLERANCE
        if options.get("stride", 1) == 1:
            assert max(norms) > 0.5, "an attack that finds nothing tests nothing"
    else:
        for point in (x, x + torch.randn_like(x), -x):
            assert jacobian_norm(plain.double(), point[0].double()) <= 1 + TOLERANCE
    assert upper(layer, shape) <= 1 + TOLERANCE
    certified = eq.export(layer.eval(), x)
    assert jacobian_norm(certified.double(), x[0].double()) <= certified.certificate.upper * (1 + 1e-12)
    assert certified.certificate.upper <= 1 + TOLERANCE


FILLS = {
    "tiny": lambda p: 1e-30 * torch.randn_like(p),
    "huge": lambda p: 1e30 * torch.randn_like(p),
    "zero": torch.zeros_like,
    "ones": torch.ones_like,
    "one entry": lambda p: 3.0 * (torch.arange(p.numel()).reshape(p.shape) == 0),
}


@pytest.mark.parametrize(("case", "kind"), marked_rows())
@pytest.mark.parametrize("fill", FILLS)
def test_odd_weights(case, kind, fill):
    torch.manual_seed(0)
    layer, x = case.make(kind, bias=False), inputs_for(kind)
    with torch.no_grad():
        raw(layer).copy_(FILLS[fill](raw(layer)))
    out = layer(x)
    assert out.isfinite().all()
    out.sum().backward()
    assert raw(layer).grad.isfinite().all()
    assert upper(layer, tuple(x.shape[1:])) <= 1 + TOLERANCE
