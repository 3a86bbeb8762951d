"""What every layer of the table owes: no stale weight, gradients in eval, and all of PyTorch's machinery."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from layer_cases import CASES, LayerCase, inputs_for, marked_rows
from torch import nn
from torch.autograd import forward_ad

import equipoise as eq
import equipoise.nn as eqn
from equipoise.core.errors import Refused
from equipoise.maps import geometry_of
from equipoise.norms import spectral_norm

ROWS = pytest.mark.parametrize(("case", "kind"), marked_rows())
#: tracing takes seconds a row: a few rows always, the others in the slow run
FEW = (("sn", "linear"), ("aol", "conv2d"), ("sll", "linear"))
TRACED = pytest.mark.parametrize(("case", "kind"), marked_rows(FEW))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def shaken(case: LayerCase, kind: str, **options: object) -> nn.Module:
    """A layer whose parameters all have moved from their start."""
    layer = case.make(kind, **options)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return layer


def counted(layer):
    """A list that grows with every computation of the effective weights."""
    calls, own = [], layer.compute

    def compute():
        calls.append(None)
        return own()

    layer.compute = compute
    return calls


@ROWS
def test_forward_derivatives_are_the_backward_ones(case, kind):
    """`torch.func.jvp` in the parameters: a bound that is a constant to it would be a silent mistake."""
    layer, x = shaken(case, kind).double(), inputs_for(kind, dtype=torch.float64)
    given = {name: p.detach() for name, p in layer.named_parameters()}
    moved = {name: torch.randn_like(p) for name, p in given.items()}
    _, forward = torch.func.jvp(lambda p: torch.func.functional_call(layer, p, (x,)), (given,), (moved,))
    y = layer(x)
    outer = torch.randn_like(y)
    backward = torch.autograd.grad(y, list(layer.parameters()), outer, allow_unused=True)
    expected = sum((a * b).sum() for a, b in zip(moved.values(), backward, strict=True) if b is not None)
    torch.testing.assert_close((forward * outer).sum(), expected, rtol=1e-4, atol=1e-6)
    layer.eval()(x)  # kept weights have no tangent
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, moved[name]) for name, p in given.items()}
        evaluated = forward_ad.unpack_dual(torch.func.functional_call(layer, duals, (x,))).tangent
    torch.testing.assert_close(evaluated, forward, rtol=1e-4, atol=1e-6)


@ROWS
def test_train_and_eval_agree_and_eval_changes_nothing(case, kind):
    layer, x = shaken(case, kind), inputs_for(kind)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    trained = layer(x)
    layer.eval()
    for _ in range(2):
        torch.testing.assert_close(layer(x), trained, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


@ROWS
def test_eval_computes_once_and_never_stale(case, kind):
    layer, x = shaken(case, kind).eval(), inputs_for(kind)
    calls = counted(layer)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
    with torch.inference_mode():
        layer(x)
    assert len(calls) == 1
    other = shaken(case, kind).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.7)
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(layer(x), other(x), rtol=0, atol=0)  # the peers' failure: 4.6 after loading
    for p in layer.parameters():
        p.data = p.data * 0.5 + 0.1
    fresh = copy.deepcopy(layer)
    torch.testing.assert_close(layer(x), fresh(x), rtol=0, atol=0)


@ROWS
def test_inference_mode_keeps_what_it_computed(case, kind):
    layer, x = shaken(case, kind).eval(), inputs_for(kind)
    calls = counted(layer)
    with torch.inference_mode():
        layer(x)
        layer(x)
    assert len(calls) == 1
    layer(x).sum().backward()  # what was kept is no inference tensor


@ROWS
def test_gradients_flow_in_eval_and_equal_those_of_training(case, kind):
    layer = shaken(case, kind).double()
    x = inputs_for(kind, dtype=torch.float64)
    found = []
    for mode in (True, False):
        layer.train(mode).zero_grad()
        layer(x).square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
        assert all(g.isfinite().all() for g in found[-1])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert any(g.abs().max() > 1e-8 for g in found[0])


@ROWS
def test_export_is_plain_and_equal(case, kind):
    layer, x = shaken(case, kind).eval(), inputs_for(kind)
    plain = layer.export()
    torch.testing.assert_close(plain(x), layer(x), rtol=1e-6, atol=1e-6)
    assert not plain.training
    assert not any(isinstance(m, eqn.Effective) for m in plain.modules())


@ROWS
def test_copies_and_pickles_are_whole(case, kind):
    layer, x = shaken(case, kind).eval(), inputs_for(kind)
    expected = layer(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
        with torch.no_grad():
            for p in other.parameters():
                p.add_(0.1)
        assert torch.equal(layer(x), expected)


@ROWS
def test_functional_call_in_eval_gives_the_gradient_of_the_tensors_it_was_given(case, kind):
    """Regression: the backward pass computed the weight again from the layer's own parameters, put back by then."""
    layer, x = shaken(case, kind), inputs_for(kind)
    other = {name: torch.randn_like(p).requires_grad_() for name, p in layer.named_parameters()}

    def gradients():
        out = torch.func.functional_call(layer, other, (x,))
        return torch.autograd.grad(out.square().sum() + out.flatten()[0], list(other.values()))

    for a, b in zip(gradients(), (layer.eval(), gradients())[1], strict=True):
        torch.testing.assert_close(a, b)


@ROWS
def test_functional_transforms(case, kind):
    layer, x = shaken(case, kind), inputs_for(kind)
    parameters = dict(layer.named_parameters())
    for mode in (True, False):
        layer.train(mode)

        def loss(parameters, x):
            return torch.func.functional_call(layer, parameters, (x,)).square().sum()

        gradient = torch.func.grad(loss)(parameters, x)
        layer.zero_grad()
        loss(parameters, x).backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(gradient[name], p.grad, rtol=1e-4, atol=1e-5)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
        total = {name: value.sum(0) for name, value in each.items()}
        for name, value in total.items():
            torch.testing.assert_close(value, gradient[name], rtol=1e-3, atol=1e-4)
        torch.func.jacrev(lambda v: torch.func.functional_call(layer, parameters, (v,)))(x[:1])


@TRACED
def test_torch_export(case, kind):
    layer, x = shaken(case, kind).eval(), inputs_for(kind)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-5)


@TRACED
def test_fullgraph_compile(case, kind):
    layer, x = shaken(case, kind), inputs_for(kind)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


@ROWS
def test_autocast_stays_in_full_precision(case, kind):
    layer, x = shaken(case, kind), inputs_for(kind)
    for mode in (True, False):
        layer.train(mode)
        expected = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x)
            half = layer(x.bfloat16())
        assert out.dtype is torch.float32
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        assert half.dtype is torch.float32


@ROWS
def test_half_precision_parameters_are_refused(case, kind):
    layer = case.make(kind).bfloat16()
    with pytest.raises(Refused, match="bfloat16"):
        layer(inputs_for(kind).bfloat16())


@ROWS
def test_signature_takes_device_dtype_bias(case, kind):
    layer = case.make(kind, bias=False, dtype=torch.float64, device="cpu")
    assert all(p.dtype is torch.float64 for p in layer.parameters())
    assert layer.bias is None
    assert layer(inputs_for(kind, dtype=torch.float64)).dtype is torch.float64
    with pytest.raises(RuntimeError):
        layer(inputs_for(kind))  # as in nn.Linear: another dtype is an error


def test_parametrize_keeps_the_guarantee():
    conv = nn.Conv2d(3, 5, 3, padding=1, groups=1)
    kernel = geometry_of(conv)
    nn.utils.parametrize.register_parametrization(conv, "weight", eqn.SR(kernel, t=2))
    assert spectral_norm(conv, input_size=(8, 8)).upper <= 1.001
    conv(torch.randn(1, 3, 8, 8)).sum().backward()
    assert conv.parametrizations.weight.original.grad is not None


@ROWS
def test_writing_into_the_weight_does_not_change_the_layer(case, kind):
    layer, x = shaken(case, kind).eval(), inputs_for(kind)
    if not hasattr(type(layer), "weight"):
        pytest.skip("this layer shows no weight")
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(3)
    layer.weight.data.mul_(3)
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0)


@ROWS
def test_writing_into_the_effective_tensors_does_not_change_the_layer(case, kind):
    layer, x = shaken(case, kind).eval(), inputs_for(kind)
    before = layer(x)
    for values in (layer.effective(), layer.requires_grad_(False).effective()):
        for value in values:
            value.detach().mul_(3)
            value.data.mul_(3)  # which no version counter sees
            value.detach().numpy()[...] = 3
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layer", "part", "name", "value"),
    [
        (eqn.RKOLinear(4, 4), "method", "scale", 9.0),
        (eqn.SNConv2d(4, 4, 3), "method", "grid", 0),
        (eqn.SNConv2d(4, 4, 3), "method", "kernel", None),
        (eqn.SNConv2d(4, 4, 3), "", "stride", (2, 2)),
        (eqn.SRConv2d(4, 4, 3), "", "geometry", None),
        (eqn.SOCConv2d(4, 4, 3), "", "angle", -5.0),
        (eqn.SOCConv2d(4, 4, 3), "", "coefficients", (9.0,)),
        (eqn.CayleyConv2d(4, 4, 3), "", "frame", None),
        (eqn.SLLLinear(4), "", "rescaling", "sn"),
        (eqn.LastLayerNormalised(4, 9), "", "out_features", 1),
    ],
)
def test_hyper_parameters_are_set_once(layer, part, name, value):
    with pytest.raises(eq.InputError, match="fixed when the layer is built"):
        setattr(layer.get_submodule(part), name, value)


def test_a_method_made_for_another_layer_proves_nothing():
    layer, other = eqn.SRConv2d(4, 4, 3, padding=1), eqn.SRConv2d(4, 4, 3, stride=2, padding=1)
    layer.method = other.method
    assert eqn.known_constant(layer) is None
    block = eqn.CPLConv2d(4)
    block.norm = eqn.CPLConv2d(4, kernel_size=5).norm
    assert eqn.known_constant(block) is None


def patched(layer):
    forward = layer.forward
    layer.forward = lambda x: 3 * forward(x)


def subclassed(layer):
    kind = type(layer)
    layer.__class__ = type("Louder", (kind,), {"forward": lambda self, x: 3 * kind.forward(self, x)})


def hooked(layer):
    layer.register_forward_hook(lambda module, args, out: 3 * out)


@ROWS
@pytest.mark.parametrize("change", [patched, subclassed, hooked], ids=lambda change: change.__name__)
def test_a_layer_that_does_something_else_states_no_bound(case, kind, change):
    layer, x = shaken(case, kind).eval(), inputs_for(kind)
    assert float(layer.lipschitz_upper(tuple(x.shape[1:]))) <= 1.00001
    change(layer)
    with pytest.raises(Refused, match="does not speak of its calls"):
        layer.lipschitz_upper(tuple(x.shape[1:]))
    assert eqn.known_constant(layer) is None


def test_kept_weight_follows_the_device_and_dtype():
    layer = eqn.SRLinear(4, 4).eval()
    layer(torch.zeros(1, 4))
    layer.double()
    assert layer(torch.zeros(1, 4, dtype=torch.float64)).dtype is torch.float64


def test_second_derivative_in_eval():
    layer = eqn.SRLinear(3, 3).double().eval()
    x = torch.randn(2, 3, dtype=torch.float64)
    (g,) = torch.autograd.grad(layer(x).square().sum(), layer.raw, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), layer.raw)
    layer.train()
    (g2,) = torch.autograd.grad(layer(x).square().sum(), layer.raw, create_graph=True)
    (h2,) = torch.autograd.grad(g2.square().sum(), layer.raw)
    torch.testing.assert_close(h, h2)


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)
