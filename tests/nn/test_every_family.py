"""Every family through everything that PyTorch does with a module: copies, compilers, transforms, files, processes."""

import copy
import pickle

import pytest
import torch
from layer_cases import CASES, LayerCase, inputs_for
from nn_parts import raw
from torch import nn
from torch.nn.utils.parametrize import remove_parametrizations

import equipoise as eq
import equipoise.nn as eqn
from equipoise.core import InputError, Refused

pytestmark = pytest.mark.medium

ROWS = [(case.name, kind) for case in CASES for kind in case.kinds if kind in ("linear", "conv2d")]
ROWS += [("soc", "transpose2d"), ("cayley", "transpose2d")]
BUILD = {case.name: case for case in CASES}
for attention in ({"heads": 2}, {"memory": True}, {"window": 3}):
    name = f"attention {next(iter(attention))}"
    ROWS.append((name, "tokens"))
    make = lambda kind, ins, out, **options: eqn.ConvexAttention(ins, **options)  # noqa: E731 - a table helper
    BUILD[name] = LayerCase(name, make, options=attention)
rows = pytest.mark.parametrize(("name", "kind"), ROWS, ids=["-".join(row) for row in ROWS])


def make(name, kind, **options):
    torch.manual_seed(0)
    return BUILD[name].make(kind, **options), inputs_for(kind)


def agree(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@rows
def test_copies_and_averages(name, kind):
    layer, x = make(name, kind)
    expected = layer.eval()(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            raw(other).add_(0.3)
        changed = other(x)
        with torch.nn.utils.parametrize.cached():
            assert torch.equal(layer(x), expected)  # a copy has a weight of its own
            assert torch.equal(other(x), changed)
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)
    agree(average(x), expected)


@rows
def test_the_kept_weight_is_never_stale(name, kind):
    layer, x = make(name, kind)
    before = layer.eval()(x)
    for change in (
        lambda: raw(layer).data.mul_(-1.3),
        lambda: layer.load_state_dict(make(name, kind)[0].state_dict()),
        lambda: torch.optim.SGD(layer.parameters(), lr=0.1).step(lambda: layer(x).sum().backward()),
    ):
        change()
        with torch.no_grad():
            evaluated = layer.eval()(x)
            agree(evaluated, layer.train()(x))
    assert before.shape == evaluated.shape
    one, two = (torch.autograd.grad(layer.train(mode)(x).pow(3).sum(), raw(layer))[0] for mode in (True, False))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@rows
def test_transforms(name, kind):
    layer, x = make(name, kind)
    state = {n: p.detach() for n, p in layer.named_parameters()}
    agree(torch.func.functional_call(layer, state, (x,)), layer(x))
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    agree(tangent, torch.autograd.functional.jvp(layer, x, torch.ones_like(x))[1], atol=1e-4)
    networks = [layer, make(name, kind)[0], copy.deepcopy(layer)]
    parameters, buffers = torch.func.stack_module_state(networks)
    together = torch.func.vmap(lambda p, b: torch.func.functional_call(layer, (p, b), (x,)))(parameters, buffers)
    for network, output in zip(networks, together, strict=True):
        agree(output, network(x))


@rows
def test_autocast(name, kind):
    layer, x = make(name, kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    agree(y.float(), layer(x), atol=0.1)
    assert y.dtype is torch.bfloat16
    for dtype, reason in ((torch.float16, "float16"), (torch.complex64, "real weights")):
        with pytest.raises(Refused, match=reason):
            make(name, kind)[0].to(dtype)(x.to(dtype))


@rows
def test_programs(name, kind, tmp_path):
    layer, x = make(name, kind)
    layer = layer.eval()
    program = torch.export.export(layer, (x,))
    expected = layer(x)
    agree(program.module()(x), expected)
    torch.export.save(program, tmp_path / "layer.pt2")
    agree(torch.export.load(tmp_path / "layer.pt2").module()(x), expected)
    agree(torch.jit.trace(layer, (x,))(x), expected)
    assert eq.lipschitz_bound(layer, x).upper <= 1 + 1e-5


@rows
def test_onnx(name, kind, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layer, x = make(name, kind)
    torch.onnx.export(layer.eval(), (x,), str(tmp_path / "layer.onnx"), verbose=False)
    session = runtime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    agree(torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]), layer(x))


@rows
def test_the_meta_device_and_layouts(name, kind):
    layer, x = make(name, kind)
    with torch.device("meta"):
        empty = make(name, kind)[0]
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    agree(empty(x), layer(x))
    if x.dim() == 4:
        agree(layer(x.to(memory_format=torch.channels_last)), layer(x))


_FEW = {("sr2", "conv2d"), ("bcop", "conv2d"), ("cayley", "linear"), ("sll", "linear")}
COMPILED = [row for row in ROWS if row in _FEW]


@pytest.mark.parametrize(("name", "kind"), COMPILED)
def test_compile(name, kind):
    layer, x = make(name, kind)
    agree(torch.compile(layer, backend="aot_eager")(x), layer(x))


def _process(rank, file, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(eqn.SRLinear(4, 4), eqn.MaxMin(), eqn.CayleyLinear(4, 4), eqn.BCOPLinear(4, 2))
    wrapped = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        wrapped(x).square().sum().backward()
        optimizer.step()
    torch.save(net.state_dict(), f"{results}{rank}")
    torch.distributed.destroy_process_group()


def test_two_processes_stay_together(tmp_path):
    torch.multiprocessing.spawn(_process, (str(tmp_path / "file"), str(tmp_path / "state")), nprocs=2)
    one, two = (torch.load(f"{tmp_path}/state{rank}") for rank in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


PARAMETRIZATIONS = ["aol", "bcop", "bjorck", "cayley", "rko", "sn", "soc", "sr"]


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.parametrize(
    "make_plain", [lambda: nn.Linear(4, 6), lambda: nn.Conv2d(4, 6, 3, padding=1)], ids=["linear", "conv2d"]
)
def test_parametrizations_of_existing_layers(name, make_plain):
    plain = make_plain()
    register = getattr(eqn.utils.parametrizations, name)
    if name in ("cayley", "soc") and not isinstance(plain, nn.Linear):
        with pytest.raises(Refused, match="use "):
            register(plain)
        return
    assert register(plain) is plain
    x = torch.randn(2, 4) if isinstance(plain, nn.Linear) else torch.randn(2, 4, 5, 5)
    y = plain.eval()(x)
    assert eqn.known_constant(plain) == 1
    assert eq.spectral_norm(plain, rtol=1e-6).upper <= 1 + 1e-6
    with pytest.raises(InputError, match="has a parametrization"):
        register(plain)
    remove_parametrizations(plain, "weight", leave_parametrized=True)
    assert type(plain) in (nn.Linear, nn.Conv2d)
    assert torch.equal(plain(x), y)
    assert eqn.known_constant(plain) is None


def test_removing_the_parametrization_of_one_layer_leaves_the_others():
    layers = [eqn.SRLinear(4, 4).eval() for _ in range(2)] + [copy.deepcopy(eqn.SRLinear(4, 4)).eval()]
    x = torch.randn(2, 4)
    outputs = [layer(x) for layer in layers]
    remove_parametrizations(layers[0], "weight")
    assert eqn.known_constant(layers[0]) is None
    for layer, output in zip(layers, outputs, strict=True):
        assert torch.equal(layer(x), output)
    assert all(eqn.known_constant(layer) == 1 for layer in layers[1:])


def test_an_export_after_new_parameters_has_the_new_weight():
    layer, x = make("sr2", "linear")
    old = layer.eval()(x)
    fresh = {n: torch.randn_like(p) for n, p in layer.state_dict().items()}
    layer.load_state_dict(fresh, assign=True)
    y = torch.export.export(layer, (x,)).module()(x)
    agree(y, layer(x))
    assert not torch.allclose(y, old)


def test_long_dense_layers_of_soc_work_on_their_small_side():
    layer = eqn.SOCLinear(1024, 64)
    assert raw(layer).shape == (64, 1024)
    identity = layer.weight @ layer.weight.mT
    agree(identity, torch.eye(64), atol=1e-5)
