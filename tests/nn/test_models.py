"""Builders: shapes, checkpoints that rebuild them, trained weights on real images, and constants that are what they say."""

import json

import pytest
import torch
from nn_parts import raw, worst_ratio

from equipoise.checkpoints import load_checkpoint, save_checkpoint
from equipoise.conversion import export
from equipoise.core import InputError
from equipoise.data.load import load_digits
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn import known_constant, losses
from equipoise.nn.models import LIPSCHITZ, MODELS, PLAIN, build, factory, input_shape

pytestmark = pytest.mark.medium

GREY = {"in_channels": 1, "input_size": 8}
#: small arguments for every builder: (name → arguments)
SMALL = {
    "mlp": {"widths": [16], "activation": "gelu", "dropout": 0.1},
    "cnn": {**GREY, "channels": [4, 8], "hidden": 8, "mean": [0.5], "std": [0.25]},
    "sll": {**GREY, "channels": 8, "depth": 3, "dense_depth": 1, "hidden": 16, "constant": 2.0},
    "sll_tiny": GREY,
    "lipschitz_cnn": {**GREY, "channels": [4, 8], "depths": [1, 2], "hidden": 12, "dense": "bcop", "head": "sr"},
    "liresnet": {**GREY, "channels": 8, "depth": 2, "dense_depth": 1, "hidden": 16, "head": "sr"},
}
SMALL["lipschitz_cnn"] |= {"mean": [0.5], "mirrored": True}
SMALL["bronet"] = {**SMALL["liresnet"], "rank": 0.25}
LARGE = {"sll_small", "sll_medium", "sll_large", "sll_xlarge"}  # checked by their number of blocks only


def example(name, batch=2):
    torch.manual_seed(0)
    return torch.rand(batch, *input_shape(name, **SMALL[name]))


def bound(net, x):
    """Proved bound of the exported network, which knows nothing of how its weights came about."""
    with torch.no_grad():
        net(x)  # layers whose weights depend on the image size are exported for the last one
    return lipschitz_bound(export(net), x, rtol=1e-5).upper


def test_every_builder_has_a_case():
    assert set(MODELS) == set(SMALL) | LARGE


@pytest.mark.parametrize("name", SMALL)
def test_a_checkpoint_rebuilds_the_model(name, tmp_path):
    torch.manual_seed(1)
    arguments = json.loads(json.dumps({**SMALL[name], "num_classes": 7}))
    net = build(name, **arguments).train()
    x = example(name)
    net(x).sum().backward()  # batch statistics and parameters that are not the initial ones
    assert all(p.grad is not None for p in net.parameters())
    net.eval()
    shape = input_shape(name, **arguments)
    save_checkpoint(tmp_path / name, net, factory(name), arguments, shape)
    back, found = load_checkpoint(tmp_path / name)
    assert found == shape
    with torch.no_grad():
        assert torch.equal(back(x), net(x))
        assert back(x).shape == (2, 7)


@pytest.mark.parametrize("name", [n for n in SMALL if n in LIPSCHITZ])
def test_the_constant_is_what_it_says(name):
    torch.manual_seed(2)
    net = build(name, **SMALL[name]).eval()
    constant = SMALL[name].get("constant", 1.0)
    x = example(name, 1)
    assert known_constant(net) == pytest.approx(constant, rel=1e-9)
    assert bound(net, x) <= constant * (1 + 1e-4)
    assert worst_ratio(net, tuple(x.shape[1:]), torch.float32, pairs=20) <= constant * (1 + 1e-5)


def test_head_lln_is_certified_by_pairs():
    net = build("sll", **{**SMALL["sll"], "constant": 1.0, "head": "lln"}).eval()
    assert known_constant(net) == pytest.approx(10**0.5)
    assert bound(net[:-1], example("sll", 1)) <= 1 + 1e-4


@pytest.mark.slow
def test_two_hundred_blocks_train_without_normalisation():
    torch.manual_seed(0)
    train, test = load_digits(split="train"), load_digits(split="test")
    arguments = {"in_channels": 1, "input_size": 8, "channels": 1, "pool": 1, "head": "sr"}
    net = build("sll", **arguments, depth=0, dense_depth=200, hidden=16, rescaling="aol", threshold=1.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(12):
        x, y = train.batch(torch.randint(0, len(train), (128,)))
        optimizer.zero_grad()
        losses.offset_cross_entropy(net(x), y).backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in net.parameters())
        optimizer.step()
    x, y = test.batch(range(len(test)))
    with torch.no_grad():
        assert float((net.eval()(x).argmax(1) == y).float().mean()) > 0.45  # 0.1 by chance


def test_sizes_of_the_published_sll_networks():
    published = {"small": (20, 7, 45), "medium": (30, 10, 60), "large": (50, 10, 90), "xlarge": (70, 15, 120)}
    for size, (conv, dense, channels) in published.items():
        with torch.device("meta"):
            net = build(f"sll_{size}", input_size=8)
        names = [type(m).__name__ for m in net]
        assert (names.count("SLLConv2d"), names.count("SLLLinear")) == (conv, dense)
        assert raw(net[1]).shape[-4] == channels or channels in raw(net[1]).shape


def test_refusals():
    for name, arguments, message in [
        ("resnet19", {}, "no model 'resnet19'"),
        ("sll_small", {"depth": 3}, "takes no argument 'depth'"),
        ("sll", {"input_size": 2}, "does not fit"),
        ("liresnet", {"input_size": 6}, "divisible"),
        ("sll", {"head": "softmax"}, "head must be one of"),
        ("cnn", {"mean": [0.5]}, "both"),
        ("cnn", {"mean": [0.5], "std": [0.0]}, "std > 0"),
        ("mlp", {"activation": "x"}, "activation must be one of"),
    ]:
        with pytest.raises(InputError, match=message):
            build(name, **arguments)
    assert set(PLAIN).isdisjoint(LIPSCHITZ)
