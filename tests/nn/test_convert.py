"""make_lipschitz: the bound is the constant, what is left is said, ties stay, and training goes on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from nn_parts import method, raw, worst_ratio
from torch import nn

from equipoise.conversion import export, make_lipschitz
from equipoise.core import InputError, Refused
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn import SRLinear
from equipoise.nn.convert import convert, methods
from equipoise_lab.models import build


class Skip(nn.Module):
    """A residual sum in a forward, a functional activation, a pooling that overlaps."""

    def __init__(self):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1)
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.pool(F.gelu(self.stem(x)))
        x = F.relu(x + self.bn(self.conv(x)))
        return self.fc(x.mean((2, 3)))


def dense():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3))


def small_cnn():
    return build("cnn", in_channels=1, input_size=8, channels=(4, 4), hidden=8, num_classes=3)


def resnet():
    return build("cifar_resnet", depth=8, width=4, input_size=8, num_classes=3)


NETS = {  # network, input shape, modules left
    "dense": (dense, (6,), []),
    "cnn": (small_cnn, (1, 8, 8), []),
    "skip": (Skip, (1, 8, 8), []),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, eps=0.1), nn.SiLU()), (6,), ["1"]),
    "resnet": (resnet, (3, 8, 8), ["normalise.0"]),
}


def make(name):
    torch.manual_seed(0)
    net = NETS[name][0]()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 3)
            nn.init.normal_(module.running_mean)
    return net


@pytest.mark.medium
@pytest.mark.parametrize("name", NETS)
def test_the_bound_of_the_result_is_the_constant(name):
    net = make(name)
    x = torch.randn(2, *NETS[name][1])
    before = copy.deepcopy(net.state_dict())
    found = make_lipschitz(net, 2.5, example_input=x)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())  # the original is not touched
    assert [row.name for row in found.conversion.left] == NETS[name][2]
    assert all(row.note for row in found.conversion.left)
    assert found.conversion.report.upper <= 2.5
    assert found.conversion.report.upper >= 2.5 * (1 - 1e-3)
    assert worst_ratio(found.eval(), NETS[name][1], torch.float32, pairs=20) <= 2.5 * (1 + 1e-4)
    assert "Lipschitz constant 2.5" in str(found.conversion)


@pytest.mark.medium
@pytest.mark.parametrize("method", ["sr", "aol", "sn", "rko", "bjorck", "bcop", "cayley", "soc"])
def test_methods(method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    x = torch.randn(1, 1, 6, 6)
    found = make_lipschitz(net, 1.0, method, example_input=x)
    assert [row.action for row in found.conversion.rows] == ["converted", "kept", "kept", "converted"]
    assert 1 - 1e-3 <= found.conversion.report.upper <= 1
    assert worst_ratio(found.eval(), (1, 6, 6), torch.float32, pairs=20) <= 1 + 1e-4


def test_dense_networks_need_no_example_and_unknown_ones_are_refused():
    assert isinstance(make_lipschitz(dense()), nn.Module)
    found = make_lipschitz(small_cnn(), 4.0)  # by construction, for all sizes
    assert found.conversion.report is None
    x = torch.zeros(1, 1, 8, 8)
    assert lipschitz_bound(export(found), x, rtol=1e-5).upper <= 4 * (1 + 1e-4)
    with pytest.raises(Refused, match="pass example_input"):
        make_lipschitz(Skip())


def test_training_goes_on_and_rescaling_is_due_afterwards():
    torch.manual_seed(0)
    net = make("skip").train()
    x = torch.randn(8, 1, 8, 8)
    found = make_lipschitz(net, 1.0, example_input=x)
    model = found
    assert model.training
    assert model.module.bn.training
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        (-model(x).square().sum()).backward()
        optimizer.step()
    report = model.rescale(x)
    assert 1 - 1e-3 <= report.upper <= 1
    assert model.training
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())  # the factor is part of the state
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_rows_say_what_became_of_everything():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1), nn.SiLU(),
        nn.MaxPool2d(3, 1, 1), nn.PReLU(), nn.Conv2d(4, 4, 3), nn.ConvTranspose3d(1, 1, 1), nn.MultiheadAttention(4, 2),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    )  # fmt: skip
    new, rows = convert(net, "sr", t=3)
    actions = [(row.now, row.action) for row in rows]
    assert actions == [
        ("Conv2d", "left"), ("BatchCentering", "replaced"), ("MaxPool2d", "replaced"), ("Contracted", "replaced"),
        ("MaxPool2d", "left"), ("PReLU", "left"), ("SRConv2d", "converted"), ("ConvTranspose3d", "left"),
        ("MultiheadAttention", "left"), ("Linear", "left"),
    ]  # fmt: skip
    assert "reflect" in rows[0].note
    assert "constant 2" in rows[2].note
    assert method(new[6]).t == 3


@pytest.mark.parametrize("size", [7, 8, 9, 10])
def test_disjoint_pooling_keeps_the_output_size(size):
    new, _ = convert(nn.Sequential(nn.MaxPool2d(3, 2, 1)))
    x = torch.randn(1, 1, size, size)
    assert new(x).shape == nn.MaxPool2d(3, 2, 1)(x).shape


def test_modules_and_weights_that_are_shared_stay_shared():
    layer = nn.Linear(4, 4)
    tied = nn.Linear(4, 4)
    tied.weight = layer.weight
    new, rows = convert(nn.Sequential(layer, nn.ReLU(), layer, tied))
    assert new[0] is new[2]
    assert raw(new[0]) is raw(new[3])
    assert torch.equal(new[0].weight, new[3].weight)
    assert new[0].bias is not new[3].bias
    assert rows[-1].note == "shares its weight"


def test_a_single_layer_and_frozen_weights():
    layer = nn.Linear(3, 3).requires_grad_(False)
    new, _ = convert(layer)
    assert isinstance(new, SRLinear)
    assert not any(p.requires_grad for p in new.parameters())
    assert make_lipschitz(nn.Linear(3, 3), example_input=torch.zeros(1, 3)).conversion.report.upper <= 1


def test_hooks_are_not_dropped():
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, args, output: 10 * output)
    net = nn.Sequential(layer, nn.Linear(3, 3))
    found = make_lipschitz(net, example_input=torch.zeros(1, 3))
    assert [row.name for row in found.conversion.left] == ["0"]
    assert found.conversion.report.upper <= 1
    x = torch.randn(2, 3)
    assert torch.allclose(found.module[0](x), net[0](x))


def test_batch_norm_becomes_centring_with_the_shift_in_units_of_the_input():
    norm = nn.BatchNorm2d(3).eval()
    nn.init.uniform_(norm.weight, 1, 2)
    nn.init.normal_(norm.bias)
    nn.init.normal_(norm.running_mean)
    new, _ = convert(norm)
    x = torch.randn(2, 3, 4, 4)
    scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).reshape(1, 3, 1, 1)
    assert torch.allclose(new(x) * scale, norm(x), atol=1e-5)


def test_refusals():
    for constant in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="positive"):
            make_lipschitz(dense(), constant)
    with pytest.raises(InputError, match="method must be one of"):
        make_lipschitz(dense(), method="spectral")
    with pytest.raises(InputError, match="options"):
        make_lipschitz(dense(), steps=3)
    with pytest.raises(InputError, match="must be a torch"):
        make_lipschitz("model.pt2")
    with pytest.raises(InputError, match="one tensor"):
        make_lipschitz(nn.LSTM(2, 2), example_input=torch.zeros(1, 3, 2))
    for example in (torch.zeros(1, 99), torch.zeros(()), torch.zeros(1, 2, dtype=torch.int64), {"x": 1}):
        with pytest.raises((InputError, Refused), match="example_input"):
            make_lipschitz(dense(), example_input=example)
    zero = nn.Linear(2, 2)
    nn.init.zeros_(zero.weight)
    with pytest.raises(Refused, match="no factor"):
        make_lipschitz(zero, example_input=torch.zeros(1, 2))
    assert "sll" not in methods()
