"""Train operators to break each bound. A ratio truth/bound above 1 fails the build; so does an attack without bite."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from equipoise import InputError, spectral_norm
from equipoise.norms import gram_norm_plain, norm2_toep, reference_norm
from equipoise.norms.search import Search, grid_cells
from equipoise.norms.symbol import Symbol
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


def test_the_factor_of_the_thesis_is_not_an_upper_bound() -> None:
    """Errata 1: α = 2^t⌊k/2⌋/n0 at t = 1, n0 = 3 would give (1/(1 − 2/3))^(1/2) ≈ 1.73, below what kernels reach."""
    torch.manual_seed(0)
    n0, t = 3, 1
    grid = torch.cartesian_prod(*(2 * math.pi * torch.arange(n0, dtype=torch.float64) / n0,) * 2)
    fine = torch.cartesian_prod(*(2 * math.pi * torch.arange(24, dtype=torch.float64) / 24,) * 2)
    alpha = 2**t * 1 / n0
    factor = (1 / (1 - alpha)) ** (2.0**-t)

    def ratio(K: Tensor) -> Tensor:
        sup, on_grid = (torch.linalg.matrix_norm(symbol(K, w), ord=2).amax() for w in (fine, grid))
        return sup / (on_grid * factor)

    assert train(ratio, torch.randn(1, 1, 3, 3, dtype=torch.float64), 200) > 1.1


@pytest.mark.parametrize("shape", [(2, 2, 3, 3), (1, 1, 5, 4), (3, 1, 2, 2), (2, 2, 7)])
def test_search_over_all_frequencies(shape: tuple[int, ...]) -> None:
    """Kernels trained so that the maximum sits between the first cells' centres, flat and peaked."""
    torch.manual_seed(0)
    coarse = torch.cartesian_prod(*(2 * math.pi * torch.arange(8, dtype=torch.float64) / 8,) * (len(shape) - 2))
    fine = torch.cartesian_prod(*(2 * math.pi * torch.arange(72, dtype=torch.float64) / 72,) * (len(shape) - 2))
    coarse, fine = (w.reshape(-1, len(shape) - 2) for w in (coarse, fine))

    def ratio(K: Tensor) -> Tensor:
        return (
            torch.linalg.matrix_norm(symbol(K, fine), ord=2).amax()
            / torch.linalg.matrix_norm(symbol(K, coarse), ord=2).amax()
        )

    K = torch.randn(shape, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([K], lr=0.05)
    for step in range(120):
        value = ratio(K)
        if step % 20 == 0:
            truth = float(torch.linalg.matrix_norm(symbol(K.detach(), fine), ord=2).amax())
            found = Search(Symbol.of(K.detach()[None], 1000), 1e-3, 100_000).over_all()
            assert found.proved
            assert found.upper >= truth * (1 - 1e-13)
            assert found.upper <= truth * 1.01
        optimizer.zero_grad()
        (-value).backward()
        optimizer.step()


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


@pytest.mark.parametrize("readout", ["inf", "fro"])
def test_norm2_toep_holds_on_the_kernels_that_broke_the_printed_one(readout: str) -> None:
    """Errata 2: with the initial kernel size k² the Frobenius read-out of a box filter falls to 0.84·σ₁."""
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    layer.weight.data.fill_(1 / 9)
    for n in (5, 30):
        truth = reference_norm(layer, (1, n, n))
        for t in (1, 2, 3, 4):
            assert float(norm2_toep(layer.weight, t, readout)) >= truth
    torch.manual_seed(0)
    for _ in range(10):
        layer.weight.data = torch.randn(1, 1, 3, 3).abs()
        assert float(norm2_toep(layer.weight, 3, readout)) >= reference_norm(layer, (1, 20, 20))


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


def test_zero_padding_can_exceed_the_grid_of_the_input() -> None:
    """The n-grid is not a bound for zero padding (errata 7 in another guise); ours is."""
    torch.manual_seed(0)
    worst = 0.0
    for seed in range(20):
        K = torch.randn(1, 1, 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        layer = nn.Conv2d(1, 1, 3, padding=1, bias=False, dtype=torch.float64)
        layer.weight.data = K
        truth = reference_norm(layer, (1, 3, 3))
        grid = torch.fft.fft2(K, s=(3, 3)).abs().max()
        worst = max(worst, truth / float(grid))
        assert spectral_norm(layer, input_size=3).upper >= truth
    assert worst > 1.01


def test_readouts_at_zero_iterations_are_bounds_too() -> None:
    """A row sum alone bounds Hermitian matrices only: one column of ones has row sums 1 and norm √2."""
    K = torch.zeros(2, 2, 1, 1)
    K[0, 0] = K[1, 0] = 1
    for readout in ("inf", "fro"):
        assert float(norm2_toep(K, 0, readout)) >= 2**0.5
    for readout in ("fro", "one", "inf"):
        for W in (K[:, :, 0, 0], K[:, :, 0, 0].mT):
            assert float(gram_norm_plain(W, 0, readout)) >= 2**0.5 - 1e-6


def test_complex_kernels_are_refused_where_only_real_ones_are_understood() -> None:
    K = torch.full((1, 1, 3, 3), 1j)
    with pytest.raises(InputError, match="real"):
        norm2_toep(K)
    for peer in PEERS.values():
        with pytest.raises(InputError, match="real"):
            peer.run(K, 5)
        assert float(peer.run(torch.zeros(1, 1, 3, 3), 5)) == 0


@pytest.mark.parametrize("sizes", [(5,), (1,), (4, 5), (6, 6), (1, 7), (3, 4, 2)])
def test_points_of_a_grid_stand_for_their_mirror_images_once(sizes: tuple[int, ...]) -> None:
    symbol = Symbol.of(torch.ones(1, 1, 1, *(1 for _ in sizes), dtype=torch.float64), 0)
    grid = [2 * math.pi / n for n in sizes]
    for points in (True, False):
        index = [
            tuple(round(float(w) / h) for w, h in zip(row, grid, strict=True))
            for row in grid_cells(symbol, sizes, points).omega
        ]
        mirrored = [tuple(-i % n for i, n in zip(row, sizes, strict=True)) for row in index]
        assert len({*index, *mirrored}) == math.prod(sizes)
        if points:
            assert len({frozenset(pair) for pair in zip(index, mirrored, strict=True)}) == len(index)
        else:  # children below such a plane are dropped because of their twins above it, beside the mirrored centre
            assert len(index) == (sizes[0] // 2 + 1) * math.prod(sizes[1:])
