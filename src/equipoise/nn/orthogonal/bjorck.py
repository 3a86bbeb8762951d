"""The classical iteration of Björck & Bowie, a fixed number of steps, sound after each of them.

References: Björck & Bowie 1971; Anil et al. 2019.
"""

from __future__ import annotations

import torch

from equipoise.core.errors import InputError
from equipoise.nn.layers import Conv2dLayer, LinearLayer
from equipoise.nn.method import Kernel
from equipoise.nn.orthogonal.rko import RKO


class Bjorck(RKO):
    """RKO with a number of classical steps `W ← (3/2)W − (1/2)WWᵀW` instead of converged ones.

    Guarantee: norm at most 1 after any number of steps. Singular values start between 0 and 1, grow by 3/2 per step
    while small, and converge quadratically to 1.
    """

    name = "bjorck"

    def __init__(
        self, kernel: Kernel, *, steps: int = 15, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(kernel, device=device, dtype=dtype)
        if not isinstance(steps, int) or steps < 1:
            raise InputError(f"Björck needs at least one step, got {steps}")
        self.steps = steps


class BjorckLinear(LinearLayer):
    """`nn.Linear` through `steps` steps of Björck & Bowie: norm at most 1 after any number of them.

    >>> layer = BjorckLinear(6, 4, steps=3)
    >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 1)
    True
    """

    method_type = Bjorck


class BjorckConv2d(Conv2dLayer):
    """`nn.Conv2d` with `steps` steps of Björck & Bowie on the reshaped kernel, over √overlap."""

    method_type = Bjorck
