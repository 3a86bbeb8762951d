"""Orthogonal transforms of raw matrices, dense and at every frequency of an image: Cayley and block reflectors.

Cayley: for `Z = X − X* + Y*Y` the matrix I + Z is invertible (its Hermitian part is at least I), and the block column

    C(X, Y) = [ 2(I + Z)⁻¹ − I ;  −2Y(I + Z)⁻¹ ]

has orthonormal columns. BRO: `W = I − 2V(V*V)⁻¹V*` is unitary and Hermitian for every V of full column rank: the reflection on
the complement of its range; rectangular layers take its first rows or columns. Nothing rests on the rank: `δI` is
added to V*V, which leaves a contraction.

References: Trockman & Kolter 2021; Helfrich et al. 2018; Wang & Manchester 2023, §4 (Cayley); Lai, Huang, Kung, Chen 2025,
Enhancing certified robustness via block reflector orthogonal layers and logit annealing loss (BRO).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import InputError, or_one
from equipoise.maps.geometry import Geometry
from equipoise.nn.orthogonal.frame import Size
from equipoise.nn.orthogonal.frequency import FrequencyConv2d, capped, contracted, symbol
from equipoise.nn.orthogonal.polar import project_to_contraction
from equipoise.nn.parametrize import Parametrization, Parametrized, Tensors

#: what is added to a Gram matrix, relative to the mean of its diagonal
_DELTA = 1e-9


def cayley(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """The two blocks of `C(X, Y)`, `X (..., n, n)` and `Y (..., m, n)`, real or complex: `A*A + B*B = I` up to rounding.

    Args:
        X: square block.
        Y: rest of the column.

    >>> A, B = cayley(torch.randn(3, 3), torch.randn(2, 3))
    >>> bool((A.mT @ A + B.mT @ B - torch.eye(3)).abs().max() < 1e-5)
    True
    """
    return blocks(torch.eye(X.shape[-1], dtype=X.dtype, device=X.device) + X - X.mH, Y)


def blocks(Z: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """`C(X, Y)` from `Z = I + X − X*`, which a convolution makes of its taps.

    Args:
        Z: `I + X − X*`.
        Y: rest of the column.
    """
    identity = torch.eye(Z.shape[-1], dtype=Z.dtype, device=Z.device)
    V = torch.linalg.inv_ex(Z + Y.mH @ Y if Y.shape[-2] else Z)[0]
    return torch.add(-identity, V, alpha=2), (-2 * Y) @ V


def skew_and_identity(X: Tensor) -> Tensor:
    """The kernel of `I + X − X*` for `X (g, n, n, *k)`: odd taps (a zero is added to an even axis), centred as `symbol` does."""
    for axis in (3, 4):
        if X.shape[axis] % 2 == 0:  # the centre of k taps is (k − 1)//2, so the zero comes last
            X = torch.cat([X, torch.zeros_like(X.narrow(axis, 0, 1))], axis)
    identity = torch.eye(X.shape[1], dtype=X.dtype, device=X.device)[..., None, None]
    pads = (X.shape[4] // 2,) * 2 + (X.shape[3] // 2,) * 2
    return X - X.transpose(1, 2).flip(3, 4) + torch.nn.functional.pad(identity, pads)


def reflector(V: Tensor, rows: int) -> Tensor:
    """The first rows of `I − 2V(V*V + δI)⁻¹V*`, V (…, n, r): eigenvalues in [−1, 1], about ±1 where V has full rank.

    Args:
        V: (…, n, r).
        rows: how many rows of the reflection.

    >>> W = reflector(torch.tensor([[1.0], [1.0]], dtype=torch.float64), 2)
    >>> W.round(decimals=6).tolist()
    [[0.0, -1.0], [-1.0, 0.0]]
    """
    V = _sized(V)
    solved = torch.linalg.solve_ex(_gram(V), V.mH)[0]
    identity = torch.eye(rows, V.shape[-2], dtype=V.dtype, device=V.device)
    return identity - 2 * (V[..., :rows, :] @ solved)


def _sized(V: Tensor) -> Tensor:
    """In double precision, scaled to entries of at most 1: squares neither overflow nor vanish."""
    V = V.to(torch.complex128 if V.is_complex() else torch.float64)
    return V / or_one(V.detach().abs().amax())


def _gram(V: Tensor) -> Tensor:
    G = V.mH @ V
    n = G.shape[-1]
    mean = torch.diagonal(G, dim1=-2, dim2=-1).real.detach().mean(-1)[..., None, None]
    return G + _DELTA * or_one(mean) * torch.eye(n, dtype=V.dtype, device=V.device)


def _rank(rank: int | None, out: int, ins: int) -> int:
    """The number of columns of V: half of the narrower side by default."""
    most = max(out, ins)
    columns = max(1, min(out, ins) // 2) if rank is None else rank
    if not 1 <= columns <= most:
        raise InputError(f"the rank of the reflector must lie in 1 … {most}, got {rank}")
    return columns


class Cayley(Parametrization):
    """`W = C(X, Y)`, X the square part of the raw matrix and Y the rest (transposed where it is wide).

    Guarantee: norm at most 1 for every raw weight; orthonormal rows or columns.

    >>> W = CayleyLinear(6, 4).weight
    >>> bool((W @ W.mT - torch.eye(4)).abs().max() < 1e-5)
    True
    """

    kinds = (nn.Linear,)
    instead = "use CayleyConv2d"

    def construct(self, raw: Tensor) -> Tensor:
        """The weight."""
        tall = raw if raw.shape[0] >= raw.shape[1] else raw.mT
        n = tall.shape[1]
        X, Y = capped(tall[:n], tall[n:], taps=1, channels=n)
        W = project_to_contraction(torch.cat(cayley(X, Y)).mT).to(raw.dtype)
        return W.mT if raw.shape[0] >= raw.shape[1] else W


class BRO(Parametrization):
    """`W = I − 2V(VᵀV)⁻¹Vᵀ` (its first rows or columns): orthogonal for every V of full rank, with `rank` columns.

    Guarantee: norm at most 1 for every raw weight; orthonormal rows or columns.

    Args:
        geometry: of the layer.
        rank: the number of columns of V, half of the narrower side by default.

    >>> W = BROLinear(6, 4).weight
    >>> bool((W @ W.mT - torch.eye(4)).abs().max() < 1e-5)
    True
    """

    kinds = (nn.Linear,)
    instead = "use BROConv2d"

    def __init__(self, geometry: Geometry, rank: int | None = None, **factory: Any) -> None:
        super().__init__(geometry, **factory)
        self.rank = _rank(rank, *geometry.shape[:2])

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Random V (max(out, in), rank); its scale does not change W, but the steps of an optimizer are relative to it."""
        side = max(weight.shape)
        return torch.randn(side, self.rank, dtype=weight.dtype, device=weight.device) / math.sqrt(
            side
        )

    def construct(self, raw: Tensor) -> Tensor:
        """The weight."""
        out, ins = self.geometry.shape[:2]
        W = project_to_contraction(reflector(raw, min(out, ins)), raw.dtype).to(raw.dtype)
        return W if out <= ins else W.mT


class CayleyLinear(Parametrized, nn.Linear):
    """`nn.Linear` as a Cayley transform, see `Cayley`."""

    parametrization = Cayley


class BROLinear(Parametrized, nn.Linear):
    """`nn.Linear` as a block reflector, see `BRO`."""

    parametrization = BRO


class CayleyConv2d(FrequencyConv2d):
    """`nn.Conv2d` that is orthogonal on the circle of the image at hand: Cayley transform at every frequency.

    Guarantee: 1-Lipschitz on every input size, for every raw weight. With circular padding and stride 1 all singular
    values are 1; zero padding embeds the image in zeros on a larger circle (a part of an orthogonal operator); stride
    is space-to-depth before. The operator depends on the image size, so `export(input_size)` is for one size.

    >>> layer = CayleyConv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
    >>> x = torch.randn(1, 4, 6, 6)
    >>> bool((layer(x).norm() / x.norm() - 1).abs() < 1e-4)
    True
    """

    def build(self, plain: Any) -> None:
        """One raw kernel, as in `nn.Conv2d` (on the coarse grid of a stride)."""
        frame = self.frame
        raw = plain.weight
        if frame.stride != (1, 1) or isinstance(plain, nn.ConvTranspose2d):
            raw = nn.Conv2d(frame.ins, frame.groups * frame.out, frame.taps).weight
        self.raw = nn.Parameter(raw.detach().clone().to(plain.weight))

    def compute(self, size: Size) -> Tensors:
        """(weight,), the matrices of the half grid."""
        K = self.raw.reshape(self.frame.groups, self.frame.out, *self.raw.shape[1:])
        n = min(K.shape[1:3])
        (K,) = capped(K, taps=K.shape[3] * K.shape[4], channels=n)
        wide = K.shape[1] < K.shape[2]
        K = K.transpose(1, 2) if wide else K  # Wᵀ is as orthogonal as W
        Z = symbol(skew_and_identity(K[:, :n]), size, self.frame.dilation)
        column = blocks(Z, symbol(K[:, n:], size, self.frame.dilation))
        W = contracted(torch.cat(column, -2) if K.shape[1] > n else column[0])
        return (W.mT if wide else W,)


class CayleyConvTranspose2d(CayleyConv2d):
    """`nn.ConvTranspose2d` as the adjoint of a `CayleyConv2d` from its outputs to its inputs: Cayley at every frequency.

    Guarantee: 1-Lipschitz on every input size, for every raw weight: torch pads transposed convolutions with zeros, so the
    layer is a part of an orthogonal operator on a larger circle; stride is depth-to-space after. Where k ≤ s nothing
    is cut off: with in ≤ out·s² lengths are kept.

    >>> layer = CayleyConvTranspose2d(4, 2, 2, stride=2, bias=False)
    >>> x = torch.randn(1, 4, 3, 3)
    >>> y = layer(x)
    >>> tuple(y.shape), bool((y.norm() / x.norm() - 1).abs() < 1e-4)
    ((1, 2, 6, 6), True)
    """

    plain_type = nn.ConvTranspose2d


class BROConv2d(FrequencyConv2d):
    """`nn.Conv2d` that is a block reflector at every frequency of the image at hand, `V` a kernel with `rank` columns.

    Guarantee: 1-Lipschitz on every input size, for every raw weight. With circular padding and stride 1 all singular values
    are 1; zero padding and stride are as in `CayleyConv2d`, and so is `export(input_size)`.

    >>> layer = BROConv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
    >>> x = torch.randn(1, 4, 6, 6)
    >>> bool((layer(x).norm() / x.norm() - 1).abs() < 1e-4)
    True
    """

    def build(self, plain: nn.Conv2d, rank: int | None = None) -> None:
        """The kernel of V.

        Args:
            plain: the plain layer that the arguments describe.
            rank: the number of columns of V, half of the narrower side by default.
        """
        frame = self.frame
        side = max(frame.ins, frame.out)
        columns = _rank(rank, frame.out, frame.ins)
        start = torch.randn(frame.groups, side, columns, *frame.taps) / math.sqrt(
            side * math.prod(frame.taps)
        )
        self.raw = nn.Parameter(start.to(plain.weight))

    def compute(self, size: Size) -> Tensors:
        """(weight,), the matrices of the half grid."""
        frame = self.frame
        W = reflector(symbol(_sized(self.raw), size, frame.dilation), min(frame.out, frame.ins))
        W = contracted(W.to(torch.promote_types(self.raw.dtype, torch.complex64)))
        return (W if frame.out <= frame.ins else W.mH.resolve_conj(),)
