"""The guard: no weight above its radius after any step, whatever the optimizer or an adversary does, against float64 SVD."""

import copy
import math

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.core import InputError, Refused
from equipoise.optim import SpectralGuard

pytestmark = pytest.mark.medium

TOLERANCE = 1e-3


def true_norm(module):
    return float(torch.linalg.svdvals(module.weight.detach().double())[0])


def net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 5)).to(dtype)


def muons(model):
    import pytorch_optimizer

    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "use_muon": True, "lr": 0.3}, {"params": vectors, "use_muon": False, "lr": 0.01}]
    return pytorch_optimizer.Muon(groups)


#: a row adds an optimizer, at a large learning rate, to every check below
OPTIMIZERS = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.3),
    "muon of pytorch-optimizer": muons,
}


def train(model, optimizer, steps, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 12, generator=generator).to(dtype)
    y = torch.randint(5, (64,), generator=generator)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(5 * model(x).float(), y).backward()
        optimizer.step()
        yield


def assert_held(guard, model, limit):
    for name, bracket in guard.bounds().items():
        sigma = true_norm(model.get_submodule(name))
        assert bracket.lower <= sigma * (1 + 1e-12)
        assert sigma <= bracket.upper * (1 + 1e-12)
        assert bracket.upper <= limit


LONG = pytest.param(2000, marks=pytest.mark.slow)


@pytest.mark.parametrize("steps", [15, LONG])
@pytest.mark.parametrize(("how", "every"), [("cap", 1), ("sphere", 1), ("clip", 1), ("hammer", 1), ("cap", 5)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_step_leaves_a_norm_above_the_radius(optimizer, how, every, steps):
    """Also with `every=5`: few proofs hold as well."""
    model = net()
    chosen = OPTIMIZERS[optimizer](model)
    guard = SpectralGuard(model, radius=1.5, how=how, tolerance=TOLERANCE, every=every, optimizer=chosen)
    assert_held(guard, model, 1.5 * (1 + TOLERANCE))
    for _ in train(model, chosen, steps):
        assert_held(guard, model, 1.5 * (1 + TOLERANCE))
        if how == "sphere":
            assert all(b.lower >= 1.5 * (1 - TOLERANCE) for b in guard.bounds().values())
    assert guard.steps == steps
    assert sum(one.restored for one in guard.layers) > 0
    if every == 5 and steps == 15:
        assert guard.used["direct"] <= 3 * 4 * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["cap", "sphere", "clip"])
def test_the_rounded_weight_is_what_is_bounded(dtype, how):
    model = net(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    guard = SpectralGuard(model, radius=1.0, how=how, optimizer=optimizer)
    for _ in train(model, optimizer, 8, dtype=dtype):
        assert_held(guard, model, 1.0 * (1 + TOLERANCE))


def singular(W, k):
    """The k-th singular direction as a matrix of rank one."""
    U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    return torch.outer(U[:, k], Vh[k])


def kick(W, i):
    u, v = torch.randn(W.shape[0]), torch.randn(W.shape[1])
    W.add_(3 * torch.outer(u / u.norm(), v / v.norm()).to(W.dtype))


#: what an adversary may do to the weights instead of an optimizer's step
ATTACKS = {
    "rank-one kick": kick,
    "tiny drift that adds up": lambda W, i: W.add_(1e-4 * torch.ones_like(W)),
    "along the top direction": lambda W, i: W.add_(1e-3 * singular(W, 0)),
    "a direction not followed": lambda W, i: W.add_(0.2 * singular(W, -1)),
    "sign flip": lambda W, i: W.neg_(),
    "huge": lambda W, i: W.mul_(1e6),
    "replaced": lambda W, i: W.copy_(torch.randn(W.shape)),
    "shuffled": lambda W, i: W.copy_(W.flip(0, 1)),
    "all one": lambda W, i: W.fill_(1.0),
    "orthogonal": lambda W, i: nn.init.orthogonal_(W, 1.4),
}


@pytest.mark.parametrize("how", ["cap", "clip"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_on_the_tracked_proof(attack, how):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Linear(30, 60, bias=False))
    guard = SpectralGuard(model, radius=1.2, how=how)
    for i in range(12):
        with torch.no_grad():
            for W in model.parameters():
                ATTACKS[attack](W, i)
        assert_held(guard, model, math.inf)  # before anything is brought back: true all the same
        guard.step()
        assert_held(guard, model, 1.2 * (1 + TOLERANCE))


def test_writes_that_leave_no_trace_are_seen_when_asked():
    model = net()
    guard = SpectralGuard(model, radius=1.0)
    model[0].weight.data.mul_(7.0)
    assert guard.bounds(check=True)["0"].upper >= true_norm(model[0])
    guard.step()
    assert_held(guard, model, 1 + TOLERANCE)
    model[2].weight.data = 3 * model[2].weight.data  # another storage is noticed at once
    assert guard.bounds()["2"].upper >= true_norm(model[2])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(value):
    model = net()
    guard = SpectralGuard(model, radius=1.0)
    with torch.no_grad():
        model[2].weight[3, 4] = value
    with pytest.raises(InputError, match="weight of '2'"):
        guard.bounds()
    with pytest.raises(InputError, match="weight of '2'"):
        guard.step()


@pytest.mark.parametrize(("how", "headroom", "every"), [("cap", 0.03, 1), ("clip", 0.03, 1), ("clip", 0.0, 3)])
def test_resuming_is_exact(how, headroom, every):
    options = {"radius": 1.5, "how": how, "headroom": headroom, "every": every}
    first = net()
    optimizer = OPTIMIZERS["adam"](first)
    guard = SpectralGuard(first, **options, optimizer=optimizer)
    for _ in train(first, optimizer, 7):
        pass
    second = net(seed=5)
    other = OPTIMIZERS["adam"](second)
    resumed = SpectralGuard(second, **options, optimizer=other)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(guard.state_dict())
    assert_held(resumed, second, 1.5 * (1 + TOLERANCE))
    for _, _ in zip(train(first, optimizer, 12, seed=1), train(second, other, 12, seed=1), strict=True):
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(a, b)
    assert guard.bounds() == resumed.bounds()
    assert guard.steps == resumed.steps


@pytest.mark.parametrize("lie", ["S", "numbers", "Q", "start"])
def test_nothing_stored_is_trusted(lie):
    model = nn.Sequential(nn.Linear(40, 30))
    guard = SpectralGuard(model, radius=1.0)
    state = guard.state_dict()
    state[f"0/{lie}"] = state[f"0/{lie}"] * 0.5
    guard.load_state_dict(state)
    with torch.no_grad():
        model[0].weight.mul_(1.7)
    bracket = guard.bounds()["0"]
    assert bracket.lower <= true_norm(model[0]) <= bracket.upper
    state[f"0/{lie}"] = state[f"0/{lie}"][:1]
    with pytest.raises(InputError, match="stored"):
        guard.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.load_state_dict({k: 50 * v for k, v in net.state_dict().items()}, assign=True),
        lambda net: setattr(net[0], "weight", nn.Parameter(50 * net[0].weight.detach())),
        lambda net: setattr(net[0], "stride", (2, 2)),
        lambda net: setattr(net[0], "padding_mode", "circular"),
    ],
    ids=["loaded", "assigned", "stride", "padding"],
)
def test_a_weight_or_layer_that_became_another_is_not_spoken_of(change):
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1))
    guard = SpectralGuard(net, input_size=8)
    guard.step()
    change(net)
    for ask in (guard.bounds, guard.step, guard.scalars):
        with pytest.raises(Refused, match="make a new guard"):
            ask()


def test_radii_by_name_and_ties():
    model = net()
    model.tied = nn.Linear(40, 24)
    model.tied.weight = model[2].weight
    found = SpectralGuard(model, radius={"0": 0.5, "2": 2.0, "tied": 1.0}).bounds()
    assert set(found) == {"0", "2", "tied"}
    assert found["0"].upper <= 0.5 * (1 + TOLERANCE)
    assert found["2"].upper == found["tied"].upper <= 1 + TOLERANCE


def parametrized():
    model = net()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    return model


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (net, {"radius": -1.0}, "positive number"),
        (net, {"radius": {"nothing": 1.0}}, "matches 'nothing'"),
        (net, {"how": "crop"}, "must be one of cap"),
        (net, {"tolerance": 0.0}, "tolerance must be"),
        (net, {"headroom": 1.0}, "headroom"),
        (net, {"headroom": float("nan")}, "headroom"),
        (net, {"optimizer": torch.optim.SGD(net().parameters(), lr=0.1)}, "none of the guarded weights"),
        (net, {"how": "sphere", "every": 3}, "1 for how='sphere'"),
        (parametrized, {}, "parametrisation"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3)), {"how": "clip"}, "is a convolution"),
    ],
)
def test_what_cannot_be_guarded_is_refused(make, options, said):
    with pytest.raises(InputError, match=said):
        SpectralGuard(make(), **options)


def test_a_zero_weight_has_no_place_on_a_sphere():
    model = nn.Sequential(nn.Linear(3, 3))
    nn.init.zeros_(model[0].weight)
    with pytest.raises(Refused, match="is zero"):
        SpectralGuard(model, how="sphere")
    assert SpectralGuard(model, how="cap").bounds()["0"].upper == 0


class Raw(nn.Module):
    """Everything with two or more dimensions that is not a layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.matrix = nn.Parameter(torch.randn(4, 6))
        self.stack = nn.Parameter(torch.randn(2, 3, 3))
        self.attention = nn.MultiheadAttention(4, 2)
        self.other = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
        self.rnn = nn.GRU(4, 5)
        self.head = nn.Linear(4, 2)


def test_every_parameter_of_two_dimensions_is_guarded_or_named_in_one_warning():
    model = Raw()
    with pytest.warns(UserWarning, match="table.weight .Embedding") as caught:
        guard = SpectralGuard(model, radius=0.5)
    assert len(caught) == 1
    covered = {id(place.parameter) for one in guard.layers for place in one.places}
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            named = f"{name} (" in str(caught[0].message)
            assert (id(parameter) in covered) != named, name
            assert name.removesuffix(".weight") in repr(guard)
    assert {"attention.in_proj_weight[q]", "other.k_proj_weight", "head"} <= set(guard.bounds())


def test_packed_projections_and_named_matrices_are_held():
    torch.manual_seed(0)
    model = Raw()
    with pytest.warns(UserWarning, match="stack"):
        guard = SpectralGuard(model, radius=0.5, parameters=("matrix", "rnn.*"))
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        guard.step()
        bounds = guard.bounds()
        blocks = dict(zip("qkv", model.attention.in_proj_weight.detach().chunk(3), strict=True))
        truths = {f"attention.in_proj_weight[{key}]": block for key, block in blocks.items()}
        truths |= {"matrix": model.matrix, "rnn.weight_hh_l0": model.rnn.weight_hh_l0, "head": model.head.weight}
        for name, W in truths.items():
            sigma = float(torch.linalg.svdvals(W.detach().double())[0])
            assert bounds[name].lower <= sigma * (1 + 1e-12)
            assert sigma <= bounds[name].upper * (1 + 1e-12) <= 0.5 * (1 + 2e-3)


@pytest.mark.parametrize("options", [{"names": "head"}, {"only": nn.Linear}, {"radius": {"head": 1.0}}])
def test_what_was_left_out_on_purpose_is_not_warned_of(options, recwarn):
    guard = SpectralGuard(Raw(), **options)
    assert not recwarn.list
    assert "table.weight" in repr(guard)


def test_hugging_faces_conv1d_is_guarded():
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(pytorch_utils.Conv1D(6, 4))  # weight (in, out)
    nn.init.normal_(model[0].weight)
    assert SpectralGuard(model, radius=0.5).bounds()["0"].upper <= 0.5 * (1 + TOLERANCE)
    assert float(torch.linalg.svdvals(model[0].weight.detach().double())[0]) <= 0.5 * (1 + TOLERANCE)


def transposed():
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.t())
    return model


def overlapping():
    memory = torch.randn(10, 4)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False))
    model[0].weight, model[1].weight = nn.Parameter(memory[:6]), nn.Parameter(memory[4:])
    return model


@pytest.mark.parametrize("make", [overlapping, transposed])
def test_weights_that_overlap_otherwise_are_refused(make):
    with pytest.raises(Refused, match="overlap in memory"):
        SpectralGuard(make())


def test_public_name_and_wrapped_optimizers():
    accelerate = pytest.importorskip("accelerate")
    model = net()
    optimizer = accelerate.Accelerator(cpu=True).prepare_optimizer(OPTIMIZERS["sgd"](model))
    guard = eq.optim.SpectralGuard(model, radius=1.0, optimizer=optimizer)
    for _ in train(model, optimizer, 3):
        assert_held(guard, model, 1 + TOLERANCE)
    assert guard.steps == 3
    guard.detach()
    for _ in train(model, optimizer, 1):
        pass
    assert guard.steps == 3
