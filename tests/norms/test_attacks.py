"""Train operators to break each bound. A ratio truth/bound above 1 fails the build; so does an attack without bite."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equipoise import InputError, spectral_norm
from equipoise.norms import norm2_toep
from equipoise_lab.peers import PEERS

pytestmark = pytest.mark.medium


def symbol(K: Tensor, omega: Tensor) -> Tensor:
    """`E(ω)` by its definition: slow, obviously right."""
    taps = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in K.shape[2:])).reshape(-1, K.dim() - 2)
    phases = torch.exp(-1j * (omega @ taps.mT))
    return torch.einsum("oit,ft->foi", K.flatten(2).to(torch.complex128), phases)


def train(ratio: Callable[[Tensor], Tensor], K: Tensor, steps: int = 200) -> float:
    """Gradient ascent on truth/bound; returns the largest ratio met on the way."""
    K = K.clone().requires_grad_()
    optimizer = torch.optim.Adam([K], lr=0.05)
    best = 0.0
    for _ in range(steps):
        value = ratio(K)
        best = max(best, float(value.detach()))
        optimizer.zero_grad()
        (-value).backward()
        optimizer.step()
    return best


@pytest.mark.parametrize(("k", "n0"), [(3, 4), (3, 6), (5, 8), (2, 3)])
def test_grid_factor_is_an_upper_bound_and_nearly_attained(k: int, n0: int) -> None:
    """sup ‖E‖ ≤ max_grid ‖E‖·Π 1/cos(π(k−1)/(2·n0)); the thesis' factor is beaten by the same attack (errata 1)."""
    torch.manual_seed(k * n0)
    grid = torch.cartesian_prod(*(2 * math.pi * torch.arange(n0, dtype=torch.float64) / n0,) * 2)
    fine = torch.cartesian_prod(*(2 * math.pi * torch.arange(8 * n0, dtype=torch.float64) / (8 * n0),) * 2)
    factor = math.cos(math.pi * (k - 1) / (2 * n0)) ** -2

    def ratio(K: Tensor) -> Tensor:
        sup, on_grid = (torch.linalg.matrix_norm(symbol(K, w), ord=2).amax() for w in (fine, grid))
        return sup / (on_grid * factor)

    best = train(ratio, torch.randn(2, 2, k, k, dtype=torch.float64), 100)
    assert best <= 1 + 1e-12
    assert best > 0.65  # the attack has bite


@pytest.mark.parametrize("padding", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("stride", [1, 2])
def test_layers_trained_against_their_bracket(padding: str, stride: int) -> None:
    torch.manual_seed(stride)
    layer = nn.Conv2d(2, 2, 3, stride=stride, padding=1, padding_mode=padding, bias=False, dtype=torch.float64)
    basis = torch.eye(2 * 36, dtype=torch.float64).reshape(-1, 2, 6, 6)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    for step in range(100):
        truth = torch.linalg.matrix_norm(layer(basis).flatten(1), ord=2)
        if step % 10 == 0:
            for size in ((6, 6), None):
                bracket = spectral_norm(layer, input_size=size, rtol=1e-2)
                assert bracket.upper >= float(truth.detach()) * (1 - 1e-12), (step, size)
                if size:
                    assert bracket.lower <= float(truth.detach()) * (1 + 1e-12)
        optimizer.zero_grad()
        (-truth / layer.weight.flatten(1).norm()).backward()
        optimizer.step()


def test_orthogonal_convolution_is_recognised_at_any_size() -> None:
    """A flat symbol: the variation bound settles what the cosine rule would need a million frequencies for."""
    torch.manual_seed(0)
    Q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]
    K = torch.zeros(6, 6, 3, 3, dtype=torch.float64)
    for i in range(6):  # each input channel is shifted its own way, then mixed
        K[:, i, i % 3, i // 2] = Q[:, i]
    layer = nn.Conv2d(6, 6, 3, padding=1, dtype=torch.float64)
    layer.weight.data = K
    bracket = spectral_norm(layer, rtol=1e-5)
    assert 1.0 in bracket
    assert bracket.upper <= 1 + 1e-5


def test_complex_kernels_are_refused_where_only_real_ones_are_understood() -> None:
    K = torch.full((1, 1, 3, 3), 1j)
    with pytest.raises(InputError, match="floating-point"):
        norm2_toep(K)
    for peer in PEERS.values():
        with pytest.raises(InputError, match="real"):
            peer.run(K, 5)
        assert float(peer.run(torch.zeros(1, 1, 3, 3), 5)) == 0
