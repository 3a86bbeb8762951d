"""Norms of other authors as penalties: what the thesis trains its rivals with. Values are the authors', gradients
autograd's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.norms.peers import reshapings

if TYPE_CHECKING:
    from equipoise.train.terms import Context as Terms
    from equipoise.train.terms import Penalty


def singla(kernel: Tensor) -> Tensor:
    """`√(k₁k₂)` times the least of the norms of four reshapings (Singla and Feizi 2021)."""
    norms = [torch.linalg.matrix_norm(m, ord=2) for m in reshapings(kernel)]
    return math.sqrt(math.prod(kernel.shape[2:])) * torch.stack(norms).min()


def araujo(kernel: Tensor, samples: int = 10) -> Tensor:
    """The largest Frobenius norm of the symbol on a grid of `samples` points each way (Araujo et al. 2021)."""
    size = [max(samples, k) for k in kernel.shape[2:]]
    return torch.fft.rfft2(kernel, s=size).abs().square().sum((0, 1)).max().sqrt()


NORMS: dict[str, Callable[[Tensor], Tensor]] = {"singla": singla, "araujo": araujo}
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "squares": lambda s: s.square().sum(),
    "hinge": lambda s: s.clamp_min(1.0).sum(),
}


def _penalty(
    norm: Callable[[Tensor], Tensor], context: Terms, weight: float = 1.0, penalty: str = "squares"
) -> Penalty:
    """`weight · penalty(σ)` over the convolutions, σ as the norm has it."""
    from equipoise.train.terms import Penalty

    layers = [m for m in context.model.modules() if isinstance(m, nn.Conv2d)]

    def term() -> Tensor:
        return weight * FORMULAS[penalty](torch.stack([norm(m.weight) for m in layers]))

    return Penalty(lambda x, y: term(), term)


@contextlib.contextmanager
def rivals() -> Iterator[None]:
    """Recipes may name `singla` and `araujo` as regularizers inside this block."""
    from equipoise.train.terms import REGULARIZERS

    rows = {name: partial(_penalty, norm) for name, norm in NORMS.items()}
    REGULARIZERS.update(rows)
    try:
        yield
    finally:
        for name in rows:
            del REGULARIZERS[name]
