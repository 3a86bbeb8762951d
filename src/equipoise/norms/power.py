"""Estimates from below that follow a map: subspace iteration, warm-started. Never a certificate.

`σ = ‖Av‖ ≤ σ₁` for any unit v: tight once v has settled, and with v held fixed its gradient is that of σ₁ there.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.core.modules import fresh_strides
from equipoise.maps.linear import Adjoint, Diagonal, Linear, Matrix, Padding


def weight_of(form: Linear) -> Tensor:
    """The numbers a map is made of, for their dtype and device."""
    if isinstance(form, Adjoint):
        return weight_of(form.conv)
    if isinstance(form, Padding):
        return torch.zeros(())
    return form.matrix if isinstance(form, Matrix) else form.factor if isinstance(form, Diagonal) else form.weight


class SingularVectors:
    """Subspace iteration on `AᵀA`, warm-started: a few right singular vectors of a map that follow it while it trains.

    `form()` is the map as it is now, on one batch of inputs of `shape`. One call of `iterate` costs `steps` applications of
    the map and its adjoint to `vectors` inputs.
    """

    def __init__(self, form: Callable[[], Linear], shape: tuple[int, ...], vectors: int = 2, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.form, self.shape = form, shape
        V = torch.randn(min(vectors, max(1, math.prod(shape))), *shape, generator=generator, dtype=torch.float64)
        self.V = _orthonormal(V)

    @torch.no_grad()
    def iterate(self, steps: int) -> None:
        """`V ← orth(AᵀA V)`, `steps` times."""
        form = self.form()
        self.V = self.V.to(weight_of(form))
        turned = form.adjoint()
        for _ in range(steps):
            V = turned.apply(form.apply(self.V))
            if bool((torch.linalg.vector_norm(V.flatten(1), dim=1) > 0).all()) and bool(V.isfinite().all()):
                self.V = _orthonormal(V)

    def norm(self) -> Tensor:
        """`‖A v‖` for the best vector of the subspace, differentiable in the weights."""
        form = self.form()
        with torch.no_grad():
            AV = form.apply(self.V).flatten(1)
            _, vectors = torch.linalg.eigh(AV @ AV.mT)
            v = torch.tensordot(vectors[:, -1], self.V, 1)[None]
            v = v / torch.linalg.vector_norm(v)
        return torch.linalg.vector_norm(form.apply(v))


def _orthonormal(V: Tensor) -> Tensor:
    if len(V) == 1:
        return V / torch.linalg.vector_norm(V)
    Q, _ = torch.linalg.qr(V.flatten(1).mT)
    return fresh_strides(Q.mT.reshape(V.shape))
