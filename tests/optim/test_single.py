"""The proof in float32 against float64 SVD: never proved where it is false, and what the guard makes of it."""

import pytest
import torch
from torch import nn

from equipoise.core import InputError
from equipoise.norms.carried import CarriedMatrix
from equipoise.norms.carried_single import Single, single_bracket, single_loss
from equipoise.norms.half import PIECE
from equipoise.optim import SpectralGuard


def orthogonal(m, n):
    return torch.linalg.qr(torch.randn(m, n, dtype=torch.float64))[0].float()


#: matrices with no more columns than rows
MATRICES = {
    "random": lambda: torch.randn(90, 70),
    "pieces": lambda: torch.randn(2 * PIECE + 37, 64),
    "transposed": lambda: torch.randn(65, PIECE + 20).mT,
    "flat": lambda: orthogonal(120, 100),
    "rank one": lambda: torch.outer(torch.randn(80), torch.randn(30)),
    "all one": lambda: torch.ones(300, 200),
    "one column": lambda: torch.randn(20, 1),
    "columns of zeros": lambda: torch.randn(50, 40) * (torch.arange(40) < 3),
    "large and small": lambda: torch.randn(60, 60) * torch.logspace(-12, 3, 60),
    "tiny": lambda: 1e-6 * torch.randn(40, 40),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MATRICES)
def test_brackets_hold_and_nothing_false_is_proved(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        A = MATRICES[name]()
        sigma = float(torch.linalg.svdvals(A.double())[0])
        start = None
        for enough in (0.0, 0.5 * sigma, sigma * (1 - 1e-9), sigma * (1 + 1e-9), 1.1 * sigma, 1e12):
            lower, upper, start = single_bracket(A, start, enough)
            assert lower <= sigma <= upper
            assert upper <= max(enough, sigma * 1.02)
            assert upper != enough or enough >= sigma
        assert single_bracket(A, start, 1.1 * sigma)[1] == 1.1 * sigma
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "A", [torch.zeros(4, 3), torch.full((4, 3), torch.inf), torch.full((4, 3), torch.nan), torch.full((9, 9), 1e19)]
)
def test_what_leaves_the_range_is_left_to_others(A):
    assert single_bracket(A, None, 1.0) is None


@pytest.mark.parametrize("size", [1e-44, 1e-43, 1e-41, 1e-38, 1e-30, 1e18])
@pytest.mark.parametrize(
    "module", [nn.Linear(30, 40, bias=False), nn.Conv2d(3, 4, 1, bias=False)], ids=["dense", "conv"]
)
def test_brackets_of_weights_at_the_ends_of_the_range_hold(module, size):
    """Scaling a weight rounds what underflows by more than its last digit."""

    def norm():
        return float(torch.linalg.svdvals(module.weight.detach().double().flatten(1) / size)[0]) * size

    torch.manual_seed(1)
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape).double() * size)
    guard = SpectralGuard(module, radius=0.7 * norm())
    for change in (0.0, 1e-2, 1e-5):
        with torch.no_grad():
            module.weight.add_(torch.randn(module.weight.shape).double().mul(change * size).float())
        guard.step()
        (bracket,) = guard.bounds().values()
        assert bracket.lower <= norm() * (1 + 1e-12)
        assert norm() <= bracket.upper * (1 + 1e-12)


def test_a_start_that_is_no_help_is_replaced():
    A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    for start in (torch.zeros(3), torch.tensor([0.0, 1.0, 0.0]), torch.full((3,), torch.nan)):
        lower, upper, _ = single_bracket(A, start, 2.5)
        assert lower <= 3 <= upper


def test_the_shift_keeps_its_promise():
    torch.manual_seed(0)
    for n in (1, 5, 60, 200):
        g = Single.of(torch.randn(n + 30, n))
        for tau in (1e-3, 0.5 * g.trace, g.trace, 30 * g.trace):
            s = g.shift(tau)
            assert s == 0 or s < g.bound(s) <= tau
    assert single_loss(256) < 0.01 < single_loss(700)


def test_a_loose_proof_is_taken_only_where_it_is_allowed():
    torch.manual_seed(0)
    W = torch.randn(90, 70)
    tight, loose = CarriedMatrix(), CarriedMatrix()
    assert tight.bracket(W)[1] <= 1.001 * tight.bracket(W)[0]
    loose.bracket(W, loose=0.01)
    assert set(tight.used) == {"direct"}
    assert set(loose.used) == {"single"}
    assert loose.bracket(W.double(), loose=0.01)[1] > 0
    assert loose.used["direct"] == 1


@pytest.mark.parametrize("headroom", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("how", ["cap", "clip", "hammer"])
def test_headroom_says_how_far_below_the_radius_a_weight_is_put(how, headroom):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Linear(30, 90, bias=False))
    guard = SpectralGuard(model, radius=0.3, how=how, headroom=headroom)
    for _ in range(4):
        for layer in model:
            sigma = float(torch.linalg.svdvals(layer.weight.detach().double())[0])
            assert 0.3 * (1 - headroom) * (1 - 2e-3) <= sigma <= 0.3 * (1 + 1e-3)
        with torch.no_grad():
            for layer in model:
                layer.weight.mul_(1.3)
        guard.step()


def test_a_state_from_before_the_pace_was_kept_is_read():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30))
    guard = SpectralGuard(model, radius=0.5)
    state = {key: value for key, value in guard.state_dict().items() if not key.endswith("/pace")}
    guard.load_state_dict(state)
    assert guard.layers[0].carried.reference is not None
    state["0/pace"] = torch.tensor([torch.nan, -3.0], dtype=torch.float64)
    guard.load_state_dict(state)
    assert guard.layers[0].carried.moved == 0
    assert guard.bounds()["0"].upper <= 0.5005


@pytest.mark.parametrize("headroom", [-0.1, 1.0, float("nan")])
def test_a_headroom_that_is_no_share_is_refused(headroom):
    with pytest.raises(InputError, match="headroom"):
        SpectralGuard(nn.Sequential(nn.Linear(3, 3)), headroom=headroom)
