"""The methods the thesis compares with, behind one signature; each result says what it is.

`run(kernel (out, in, k1, k2), input_size, padding, iterations)` returns a `Bound` whose kind is

* `exact`: the norm up to the rounding of an SVD,
* `upper`: a proved upper bound,
* `lower`: a Rayleigh quotient of the operator (power iteration that has not converged yet stays below),
* `estimate`: neither; e.g. the circular symbol used for a zero-padded convolution.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.bounds import Bound, Kind
from equipoise.core.errors import InputError
from equipoise.core.precision import frobenius, full_precision, inflate, require_finite
from equipoise.maps.geometry import PaddingMode
from equipoise.maps.linear import Convolution, convolution
from equipoise.norms.cholesky import dense_bracket, random_start
from equipoise.norms.convolution import materialise
from equipoise.norms.symbol import Symbol

Run = Callable[[Tensor, tuple[int, ...], PaddingMode, int], Bound]


@dataclass(frozen=True)
class Peer:
    """One comparison method: where it comes from, and how to run it."""

    name: str
    reference: str
    call: Run

    def run(
        self,
        kernel: Tensor,
        input_size: int | tuple[int, ...],
        padding: PaddingMode = "circular",
        iterations: int = 100,
    ) -> Bound:
        """The norm of the stride-1 «same» convolution with this kernel on this input size, as this method sees it."""
        if kernel.dim() != 4:
            raise InputError(
                f"the comparison methods take a 2-D weight (out, in, k1, k2), got shape {tuple(kernel.shape)}"
            )
        if kernel.is_complex():
            raise InputError(
                "the comparison methods take a real kernel; spectral_norm takes complex ones"
            )
        if not bool(kernel.any()):
            return Bound(0.0, Kind.EXACT, self.name, "zero kernel")
        sizes = (input_size,) * 2 if isinstance(input_size, int) else tuple(input_size)
        with torch.no_grad(), full_precision():
            return self.call(require_finite(kernel.detach()), sizes, padding, iterations)


def _conv(kernel: Tensor, sizes: tuple[int, ...], padding: PaddingMode) -> Convolution:
    return convolution(kernel, padding, input_size=sizes)


def _symbol(kernel: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Symbol `(frequencies, out, in)` on half of the n×n grid, kernels larger than the input folded."""
    folded = kernel
    for i, n in enumerate(sizes):
        k = folded.shape[2 + i]
        if k > n:
            pieces = [folded.narrow(2 + i, s, min(n, k - s)) for s in range(0, k, n)]
            total = pieces[0].clone()
            for piece in pieces[1:]:
                total.narrow(2 + i, 0, piece.shape[2 + i]).add_(piece)
            folded = total
    return torch.fft.rfft2(folded, s=sizes).permute(2, 3, 0, 1).flatten(0, 1)


def _circular(padding: PaddingMode, kind: Kind) -> Kind:
    """What a statement about the circular operator is worth for the padding asked about."""
    return kind if padding == "circular" else Kind.ESTIMATE


def _svd(kernel: Tensor, sizes: tuple[int, ...], padding: PaddingMode, iterations: int) -> Bound:
    conv = _conv(kernel.double(), sizes, padding)
    if math.prod(conv.input_shape) > 20_000:
        raise InputError(
            f"exact SVD materialises the operator; {math.prod(conv.input_shape)} inputs are too many"
        )
    return Bound(float(torch.linalg.matrix_norm(materialise(conv), ord=2)), Kind.EXACT, "svd")


def power_iteration(
    apply: Callable[[Tensor], Tensor],
    back: Callable[[Tensor], Tensor],
    v: Tensor,
    steps: int,
    dims: tuple[int, ...] | None = None,
) -> Tensor:
    """`v ← A*A v/‖A*A v‖`, `steps` times, for operators on whole tensors (or, with `dims`, on those dimensions of a batch).

    >>> W = torch.diag(torch.tensor([2.0, 1.0]))
    >>> v = power_iteration(lambda x: W @ x, lambda y: W @ y, torch.ones(2), 30)
    >>> round(float(torch.linalg.vector_norm(W @ v)), 5)
    2.0
    """
    for _ in range(steps):
        v = unit(back(apply(v)), dims)
    return v


def unit(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """`x/‖x‖`; 0 stays 0."""
    size = torch.linalg.vector_norm(x, dim=dims, keepdim=dims is not None)
    return x / size.clamp_min(torch.finfo(x.dtype).tiny)


def _power_iteration(conv: Convolution, iterations: int) -> float:
    """`‖Kv‖/‖v‖` after power iteration on K*K, with the exact adjoint."""
    shape = conv.input_shape
    x = random_start(math.prod(shape), conv.weight).reshape(1, *shape)
    x = power_iteration(conv.apply, conv.adjoint().apply, unit(x), iterations).double()
    wide = conv.with_weight(conv.weight.double())
    return float(torch.linalg.vector_norm(wide.apply(x)) / torch.linalg.vector_norm(x)) * (
        1 - 1e-12
    )


def power_iterates(W: Tensor, iterations: int, start: Tensor | None = None) -> list[float]:
    """`‖W v_t‖` for t = 1 … of power iteration on WᵀW: in real arithmetic lower bounds of σ₁ that increase.

    >>> power_iterates(torch.diag(torch.tensor([2.0, 1.0])), 30)[-1]
    2.0
    """
    v = unit(random_start(W.shape[-1], W) if start is None else start)
    values: list[float] = []
    for _ in range(iterations):
        u = W @ v
        values.append(float(torch.linalg.vector_norm(u)))
        v = unit(W.mH @ u)
    return values


def _power(kernel: Tensor, sizes: tuple[int, ...], padding: PaddingMode, iterations: int) -> Bound:
    return Bound(_power_iteration(_conv(kernel, sizes, padding), iterations), Kind.LOWER, "power")


def _ryu(kernel: Tensor, sizes: tuple[int, ...], padding: PaddingMode, iterations: int) -> Bound:
    kind = Kind.LOWER if padding == "zeros" else Kind.ESTIMATE
    return Bound(_power_iteration(_conv(kernel, sizes, "zeros"), iterations), kind, "ryu")


def _sedghi(kernel: Tensor, sizes: tuple[int, ...], padding: PaddingMode, iterations: int) -> Bound:
    value = float(torch.linalg.svdvals(_symbol(kernel, sizes)).amax())
    return Bound(value, _circular(padding, Kind.EXACT), "sedghi")


def reshapings(kernel: Tensor) -> tuple[Tensor, ...]:
    """Four matrices of a kernel (co, ci, k1, k2): the norm of each, times √(k1·k2), bounds the convolution (Singla, Feizi)."""
    co, ci, k1, k2 = kernel.shape
    return (
        kernel.permute(0, 2, 1, 3).reshape(co * k1, ci * k2),
        kernel.permute(0, 3, 1, 2).reshape(co * k2, ci * k1),
        kernel.reshape(co, ci * k1 * k2),
        kernel.permute(0, 2, 3, 1).reshape(co * k1 * k2, ci),
    )


def _singla(kernel: Tensor, sizes: tuple[int, ...], padding: PaddingMode, iterations: int) -> Bound:
    """√(k1·k2) times the least of four reshaped norms; proved for zero and circular padding."""
    least = min(float(dense_bracket(m.double(), 1e-4)[1]) for m in reshapings(kernel))
    kind = Kind.UPPER if padding in ("zeros", "circular") else Kind.ESTIMATE
    return Bound(inflate(inflate(least) * math.sqrt(math.prod(kernel.shape[2:]))), kind, "singla")


def _araujo(kernel: Tensor, sizes: tuple[int, ...], padding: PaddingMode, iterations: int) -> Bound:
    """Frobenius norm of the symbol on a grid of ten points per tap, with the cosine factor (1/(1 − α) in print is larger)."""
    symbol = Symbol.of(kernel[None], 1)
    grid = [10 * k for k in kernel.shape[2:]]
    factor = math.prod(
        1 / math.cos(math.pi * (k - 1) / (2 * n))
        for k, n in zip(kernel.shape[2:], grid, strict=True)
    )
    padded = torch.zeros(*kernel.shape[:2], *grid, dtype=torch.float64, device=kernel.device)
    padded[..., : kernel.shape[2], : kernel.shape[3]] = kernel
    squares = torch.fft.rfft2(padded).abs().square().sum((0, 1))
    value = float(squares.max().sqrt()) * factor * (1 + 1e-10) + float(symbol.at_error().max())
    kind = Kind.UPPER if padding in ("zeros", "circular") else Kind.ESTIMATE
    return Bound(min(value, float(symbol.size.max())), kind, "araujo")


def _yi(kernel: Tensor, sizes: tuple[int, ...], padding: PaddingMode, iterations: int) -> Bound:
    E = _symbol(kernel.double(), sizes)
    v = random_start(E.shape[-1], E).expand(len(E), -1)[..., None]
    v = power_iteration(E.matmul, E.mH.matmul, v, iterations, dims=(-2,))
    value = frobenius(E @ v) / frobenius(v).clamp_min(0.5)
    return Bound(float(value.max()) * (1 - 1e-11), _circular(padding, Kind.LOWER), "yi")


def complex_gram(K: Tensor, size: int | tuple[int, ...], iterations: int = 6) -> Tensor:
    """Gram iteration as published: complex products at every frequency of the n×n grid, rescaled, Frobenius read-out."""
    A = _symbol(K, (size,) * 2 if isinstance(size, int) else size)
    A = A.mH if A.shape[-2] < A.shape[-1] else A
    log = A.real.new_zeros(A.shape[0])
    for _ in range(iterations):
        scale = torch.linalg.matrix_norm(A)
        A = A / scale[:, None, None]
        log = 2 * (log + scale.log())
        A = torch.bmm(A.mH, A)
    return ((torch.linalg.matrix_norm(A).log() + log) / 2**iterations).amax().exp()


def _gram(kernel: Tensor, sizes: tuple[int, ...], padding: PaddingMode, iterations: int) -> Bound:
    """At most ten doublings. An upper bound for circular padding in real arithmetic; rounding is not covered: an estimate."""
    return Bound(float(complex_gram(kernel, sizes, min(iterations, 10))), Kind.ESTIMATE, "gram")


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("svd", "SVD of the materialised operator", _svd),
        Peer("power", "power iteration on the operator", _power),
        Peer("ryu", "Ryu et al. 2019, power iteration on the zero-padded convolution", _ryu),
        Peer("sedghi", "Sedghi, Gupta & Long 2019, SVD of every frequency", _sedghi),
        Peer("singla", "Singla & Feizi 2021, four reshaped matrices", _singla),
        Peer("araujo", "Araujo et al. 2021, Frobenius norm of the symbol", _araujo),
        Peer("gram", "Delattre et al. 2023, Gram iteration at every frequency", _gram),
        Peer("yi", "Yi 2020, power iteration per frequency", _yi),
    )
}
