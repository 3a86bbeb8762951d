"""Block reflectors (BRO) and Cholesky-orthogonalised residuals (CHORD): dense matrices, and convolutions at every frequency.

BRO: `W = I − 2V(V*V)⁻¹V*` is unitary and Hermitian for every V of full column rank: the reflection on the complement of its
range. CHORD: for `A = I + Q` with `A*A = LL*` the matrix `W = A·L⁻*` has orthonormal columns. Rectangular layers take the first
rows (or columns) of a reflector, and the wider side of A for its rows.

Nothing rests on the rank: `δI` is added to V*V and A*A, which leaves contractions; and as in the Cayley layer an upper bound of
the norm of what was computed is taken in float64, at every frequency, and W divided by it. A convolution is orthogonal on the
circle of the image at hand; zero padding embeds the image among zeros on a larger circle (see `cayley`).

References: Lai, Huang, Kung, Chen (2025), Enhancing certified robustness via block reflector orthogonal layers and logit
annealing loss; Hu, Leino, Wang, Fredrikson (2024), A recipe for improved certifiable robustness: capacity and data (CHORD, there
for dense layers).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.bounds import Bound
from equipoise.core.errors import InputError
from equipoise.core.modules import by_construction
from equipoise.nn.effective import Tensors
from equipoise.nn.layers import enter, layers_of
from equipoise.nn.method import Method
from equipoise.nn.orthogonal.cayley import capped, contracted, evaluated, exported, frequency_bound
from equipoise.nn.orthogonal.frame import Size, SizedConv2d, frame_of
from equipoise.nn.orthogonal.frequency import symbol
from equipoise.nn.orthogonal.polar import settled

#: what is added to the Gram matrix, relative to the mean of its diagonal
_DELTA = 1e-9


def reflector(V: Tensor, rows: int) -> Tensor:
    """The first rows of `I − 2V(V*V + δI)⁻¹V*`, V (…, n, r): eigenvalues in [−1, 1], about ±1 where V has full rank.

    >>> W = reflector(torch.tensor([[1.0], [1.0]], dtype=torch.float64), 2)
    >>> W.round(decimals=6).tolist()
    [[0.0, -1.0], [-1.0, 0.0]]
    """
    V = _sized(V)
    solved = torch.linalg.solve_ex(_gram(V), V.mH)[0]
    identity = torch.eye(rows, V.shape[-2], dtype=V.dtype, device=V.device)
    return identity - 2 * (V[..., :rows, :] @ solved)


def cholesky_columns(A: Tensor) -> Tensor:
    """`A·L⁻*` with `LL* = A*A + δI`, A (…, m ≥ n, n): columns that are orthonormal where A has full rank, else shorter.

    >>> W = cholesky_columns(torch.tensor([[3.0], [4.0]], dtype=torch.float64))
    >>> W.round(decimals=6).flatten().tolist()
    [0.6, 0.8]
    """
    A = _sized(A)
    L = torch.linalg.cholesky_ex(_gram(A))[0]
    return torch.linalg.solve_triangular(L, A.mH, upper=False).mH


def _sized(V: Tensor) -> Tensor:
    """In double precision, scaled to entries of at most 1: squares neither overflow nor vanish."""
    V = V.to(torch.complex128 if V.is_complex() else torch.float64)
    largest = V.detach().abs().amax()
    return V / torch.where(largest > 0, largest, torch.ones_like(largest))


def _gram(V: Tensor) -> Tensor:
    G = V.mH @ V
    n = G.shape[-1]
    mean = torch.diagonal(G, dim1=-2, dim2=-1).real.detach().mean(-1)[..., None, None]
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    return G + _DELTA * mean * torch.eye(n, dtype=V.dtype, device=V.device)


def _rank(rank: int | None, out: int, ins: int) -> int:
    most = max(out, ins)
    found = max(1, min(out, ins) // 2) if rank is None else rank
    if not 1 <= found <= most:
        raise InputError(f"the rank of the reflector must lie in 1 … {most}, got {rank}")
    return found


class BRO(Method):
    """`W = I − 2V(VᵀV)⁻¹Vᵀ` (its first rows or columns): orthogonal for every V of full rank, with `rank` columns.

    Guarantee: norm at most 1 for every raw weight; orthonormal rows or columns.

    >>> W = BROLinear(6, 4).weight
    >>> bool((W @ W.mT - torch.eye(4)).abs().max() < 1e-5)
    True
    """

    name = "bro"
    plain = (nn.Linear,)
    instead = "use BROConv2d"

    def setup(self, rank: int | None = None) -> None:
        """The number of columns of V: half of the narrower side by default."""
        out, ins = self.kernel.shape[:2]
        self.rank = _rank(rank, out, ins)

    def initial(self, raw: Tensor) -> Tensor:
        """Random V (max(out, in), rank); its scale does not change W, but the steps of an optimizer are relative to it."""
        side = max(raw.shape)
        return torch.randn(side, self.rank, dtype=raw.dtype, device=raw.device) / math.sqrt(side)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What `torch.nn.utils.parametrize` stores for a given weight: a random reflector, not the weight itself."""
        return self.initial(weight)

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight."""
        out, ins = self.kernel.shape[:2]
        W = settled(reflector(raw, min(out, ins)), raw.dtype).to(raw.dtype)
        return W if out <= ins else W.mT


class CHORD(Method):
    """`W = A·L⁻ᵀ` with `A = I + raw` and `LLᵀ = AᵀA` (of the transpose where it is wide): a residual layer made orthogonal.

    Guarantee: norm at most 1 for every raw weight; orthonormal rows or columns where A has full rank.

    >>> W = CHORDLinear(6, 4).weight
    >>> bool((W @ W.mT - torch.eye(4)).abs().max() < 1e-5)
    True
    """

    name = "chord"
    plain = (nn.Linear,)
    instead = "use CHORDConv2d"

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight."""
        (Q,) = capped(raw.double(), taps=1, channels=min(raw.shape))
        A = Q + torch.eye(*raw.shape, dtype=Q.dtype, device=raw.device)
        wide = A.shape[0] < A.shape[1]
        W = settled(cholesky_columns(A.mT if wide else A).mT, raw.dtype).to(raw.dtype)
        return W if wide else W.mT


(BROLinear,) = layers_of(BRO)
(CHORDLinear,) = layers_of(CHORD)


class BROConv2d(SizedConv2d):
    """`nn.Conv2d` that is a block reflector at every frequency of the image at hand, `V` a kernel with `rank` columns.

    Guarantee: 1-Lipschitz on every input size, for every raw weight. With circular padding and stride 1 all singular values
    are 1; zero padding and stride are as in `CayleyConv2d`, and so is `export(input_size)`.

    >>> layer = BROConv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
    >>> x = torch.randn(1, 4, 6, 6)
    >>> bool((layer(x).norm() / x.norm() - 1).abs() < 1e-4)
    True
    """

    def build(self, plain: nn.Conv2d, rank: int | None = None, **options: Any) -> None:
        """The kernel of V."""
        self.frame = frame_of(plain, embed=True)
        frame = self.frame
        side = max(frame.ins, frame.out)
        columns = _rank(rank, frame.out, frame.ins)
        start = torch.randn(frame.groups, side, columns, *frame.taps) / math.sqrt(side * math.prod(frame.taps))
        self.raw = nn.Parameter(start.to(plain.weight))

    def compute_at(self, size: Size) -> Tensors:
        """(weight,), the matrices of the half grid: (groups, frequencies, out, in)."""
        frame = self.frame
        W = reflector(symbol(_sized(self.raw), size, frame.dilation), min(frame.out, frame.ins))
        (W,) = contracted(W.to(torch.promote_types(self.raw.dtype, torch.complex64)))
        return (W if frame.out <= frame.ins else W.mH.resolve_conj(),)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution, through Fourier space."""
        return evaluated(self, x)

    @by_construction(1.0)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """The largest norm over the frequencies of this image size, from the effective weights."""
        return frequency_bound(self, input_shape)

    def export(self, input_size: int | Size | None = None) -> nn.Module:
        """The plain module for one image size (by default the one this layer was evaluated at)."""
        return exported(self, input_size)


class CHORDConv2d(SizedConv2d):
    """`nn.Conv2d` that is a residual `I + Q`, made orthogonal by Cholesky at every frequency of the image at hand.

    Guarantee: 1-Lipschitz on every input size, for every raw weight. With circular padding and stride 1 all singular values
    are 1 where I + Q has full rank; zero padding and stride are as in `CayleyConv2d`, and so is `export(input_size)`.

    >>> layer = CHORDConv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
    >>> x = torch.randn(1, 4, 6, 6)
    >>> bool((layer(x).norm() / x.norm() - 1).abs() < 1e-4)
    True
    """

    def build(self, plain: nn.Conv2d, **options: Any) -> None:
        """The kernel of Q, as in `nn.Conv2d` (on the coarse grid of a stride)."""
        self.frame = frame_of(plain, embed=True)
        frame = self.frame
        coarse = nn.Conv2d(frame.ins, frame.groups * frame.out, frame.taps)
        self.raw = nn.Parameter(coarse.weight.detach().to(plain.weight))

    def compute_at(self, size: Size) -> Tensors:
        """(weight,), the matrices of the half grid: (groups, frequencies, out, in)."""
        frame = self.frame
        (K,) = capped(self.raw.double(), taps=frame.taps[0] * frame.taps[1], channels=min(frame.out, frame.ins))
        Q = symbol(K.reshape(frame.groups, frame.out, *K.shape[1:]), size, frame.dilation)
        A = Q + torch.eye(frame.out, frame.ins, dtype=Q.dtype, device=Q.device)
        wide = frame.out < frame.ins
        W = cholesky_columns(A.mH if wide else A)
        (W,) = contracted((W.mH if wide else W).resolve_conj().to(torch.promote_types(self.raw.dtype, torch.complex64)))
        return (W,)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution, through Fourier space."""
        return evaluated(self, x)

    @by_construction(1.0)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """The largest norm over the frequencies of this image size, from the effective weights."""
        return frequency_bound(self, input_shape)

    def export(self, input_size: int | Size | None = None) -> nn.Module:
        """The plain module for one image size (by default the one this layer was evaluated at)."""
        return exported(self, input_size)


enter("bro", nn.Conv2d, BROConv2d)
enter("chord", nn.Conv2d, CHORDConv2d)
