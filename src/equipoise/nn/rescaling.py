"""The rescaling family as methods: SN divides by a bound of the norm, AOL and SR rescale each input channel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.errors import InputError, Refused
from equipoise.maps.geometry import Axis, Geometry, polyphase, rejoined, zero_lattice
from equipoise.maps.linear import Convolution, Matrix
from equipoise.nn.diagonal import (
    Rescaled,
    check_steps,
    in_closed_form,
    normalised,
    rescaling,
    rounding,
    short_diagonal,
    short_factors,
    worth,
)
from equipoise.nn.effective import plainly_called
from equipoise.nn.factored import LinearGram
from equipoise.nn.layers import layers_of
from equipoise.nn.method import Method
from equipoise.norms.differentiable import gram_norm, symbol_norm
from equipoise.norms.power import power_norm

Estimator = Literal["gram", "power"]
Side = Literal["input", "output", "smaller"]
#: output pixels per axis of the image that the power iteration runs on
PIXELS = 8


class Phases:
    """The kernel of a layer as it acts on the phases of its input: `(g, co, ci, *k) ↔ (g, co, ci·phases, *lengths)`.

    Only zeros are added, and `join(split(K)) = K`. With zero padding the norms agree for every input size. With circular padding
    they do only where the stride divides the size; there the kernel is left alone: its symbol at stride 1 bounds every size.
    """

    def __init__(self, kernel: Geometry) -> None:
        axes = [Axis(a.kernel, a.stride if kernel.padding == "zeros" else 1, a.dilation) for a in kernel.axes]
        self.lattices = [lattice for lattice in map(zero_lattice, axes) if lattice is not None]
        self.channels = math.prod([kernel.shape[1], *(lattice.phases for lattice in self.lattices)])

    def split(self, K: Tensor) -> Tensor:
        """The kernel on the phases."""
        return polyphase(K, self.lattices)

    def join(self, K: Tensor) -> Tensor:
        """The kernel back from its phases."""
        return rejoined(K, self.lattices)


class SN(Method):
    """Spectral normalisation `W/σ` with σ ≥ ‖W‖ an upper bound by Gram iteration.

    Convolutions use the bound over all input sizes from `grid` frequencies per unit of (k − 1)/2 and axis: it exceeds the norm of
    3×3 kernels by 4 % at 16 (the default), by 1 % at 32, which costs four times as much. After `iterations` products a
    map whose n singular values are all equal is bounded with a factor n^(2^−(iterations + 1)), 1.008 for 64 and 8 (the default).
    `estimator="power"` divides by a power iteration instead: the usual baseline, a lower bound, hence **not certified**.

    >>> W = SN(Geometry((2, 2)))(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    >>> round(float(torch.linalg.matrix_norm(W, 2)), 5)
    1.0

    References: Miyato et al. 2018; Delattre et al. 2023.
    """

    name: ClassVar[str] = "sn"

    def setup(self, iterations: int = 8, estimator: Estimator = "gram", grid: int = 16) -> None:
        """How σ is found."""
        kernel = self.kernel
        if estimator not in get_args(Estimator):
            raise InputError(f"estimator must be one of {', '.join(get_args(Estimator))}, got {estimator!r}")
        most = 30 if estimator == "gram" else 1000
        if not isinstance(iterations, int) or not 1 <= iterations <= most:
            raise InputError(f"iterations must be a whole number from 1 to {most}, got {iterations}")
        if not isinstance(grid, int) or grid < 4:
            raise InputError(f"grid must be a whole number of at least 4, got {grid}")
        self.iterations, self._estimator, self.grid = iterations, estimator, grid
        self.phases = Phases(kernel)
        if estimator == "power":
            start = torch.randn(1, kernel.shape[0], *[PIXELS] * kernel.dims, generator=torch.Generator().manual_seed(0))
            self.register_buffer("start", start.to(**self.factory))

    @property
    def estimator(self) -> Estimator:
        """How σ is found; fixed, since a layer may keep weights that were computed with it."""
        return self._estimator

    @property
    def certified(self) -> bool:
        """Whether the norm is at most 1 by proof."""
        return self.estimator == "gram"

    def forward(self, raw: Tensor) -> Tensor:
        """`W/σ`."""
        return normalised(self.kernel.grouped(raw), *self.bound(raw)).reshape(raw.shape)

    def bound(self, raw: Tensor) -> tuple[Tensor, float]:
        """`(σ, δ)` with `‖W‖ ≤ σ·(1 + δ)`: float64, differentiable; for the power estimator a lower bound and 0."""
        kernel = self.kernel
        if self.estimator == "power":
            inner = kernel.unpadded()
            form = Convolution(raw, inner.giving(PIXELS, [0] * kernel.dims)) if kernel.dims else Matrix(raw)
            return power_norm(form, self.get_buffer("start").to(raw.dtype), self.iterations), 0.0
        if math.prod(kernel.shape[2:]) > 1:
            return symbol_norm(self.phases.split(kernel.grouped(raw)), self.iterations, self.grid)
        wide = (raw.cpu() if raw.device.type == "mps" else raw).double()
        blocks = wide.reshape(kernel.groups, -1, kernel.shape[1])
        delta = rounding(kernel.shape[0], kernel.shape[1], 1, 1)
        return gram_norm(blocks, self.iterations).amax(), delta


class Diagonal(Method):
    """A diagonal from the row sums of Gram matrices: of inputs, `W·R`, or of outputs, `R·W` with the norm of `Wᵀ·R`.

    `side="smaller"` (the default) takes the side with fewer channels, inputs where they are as many; with a stride every
    phase of an input channel is one. The guarantee is the same, the sums are shorter, and so is the work: 512² entries
    instead of 4096² for 4096 → 512. The side belongs to the architecture and is stored with the weights (`outputs`); files
    of releases that knew inputs only open as they were.
    """

    log_q: nn.Parameter | None
    outputs: Tensor | None

    def begin(self, side: Side, learn_q: bool) -> None:
        """Phases, what is rescaled, and the logarithm of q."""
        if side not in get_args(Side):
            raise InputError(f"side must be one of {', '.join(get_args(Side))}, got {side!r}")
        self.phases, out = Phases(self.kernel), self.kernel.shape[0] // self.kernel.groups
        self.learn_q = learn_q
        self._take(side == "output" or (side == "smaller" and out < self.phases.channels))

    def _take(self, outputs: bool) -> None:
        mark = torch.ones((), dtype=torch.uint8, device=self.factory["device"]) if outputs else None
        self.register_buffer("outputs", mark)
        channels = self.kernel.shape[0] // self.kernel.groups if outputs else self.phases.channels
        zeros = torch.zeros(self.kernel.groups, channels, **self.factory)
        self.register_parameter("log_q", nn.Parameter(zeros) if self.learn_q else None)

    def rescaled(self, raw: Tensor, t: int) -> Tensor:
        """`W·R`, or `R·W`."""
        K, turned = self.kernel.grouped(raw), self.outputs is not None  # Eᵀ has the norm of E
        if self.kernel.dims and plainly_called(raw) and in_closed_form(K, 1):
            return Rescaled.apply(K, self.log_q, t, turned, self.phases.lattices)[0].reshape(raw.shape)
        K = self.phases.split(K)
        K = rescaling(K.transpose(1, 2) if turned else K, t, self.log_q)
        return self.phases.join(K.transpose(1, 2) if turned else K).reshape(raw.shape)

    def on(self, x: Tensor, raw: Tensor, t: int) -> Tensor | None:
        """`x·rawᵀ` with R before or after, for a dense layer that is worth it."""
        turned = self.outputs is not None
        if self.kernel.dims or not worth(raw if turned else raw.mT, t):
            return None
        K = (raw.mT if turned else raw)[None]
        if not turned:
            R = short_factors(K, t, self.log_q)
            return None if R is None else functional.linear(x * R[0], raw)
        y, G = LinearGram.apply(x, raw, False)
        R = short_diagonal(G, K, t, self.log_q)
        return None if R is None else y * R[0]

    def opening(self, state: Mapping[str, Tensor], prefix: str) -> None:
        """A file of the first releases, which does not say what is rescaled, is of inputs."""
        if self.outputs is not None and f"{prefix}outputs" not in state:
            device = self.outputs.device
            self._take(False)
            self.to(device)


class AOL(Diagonal):
    """Almost-orthogonal layers: every input channel is divided by the root of its row sum of |WᵀW|.

        W·diag(Σ_j |WᵀW|_ij)^(−1/2)

    Where there are fewer outputs than inputs the outputs are divided by the row sums of |WWᵀ| (`side`, see `Diagonal`).

    >>> W = AOL(Geometry((2, 2)))(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    >>> float(torch.linalg.matrix_norm(W, 2)) <= 1
    True

    Reference: Prach & Lampert 2022, theorem 1.
    """

    name: ClassVar[str] = "aol"

    def setup(self, side: Side = "smaller") -> None:
        """What is rescaled."""
        self.begin(side, learn_q=False)

    def forward(self, raw: Tensor) -> Tensor:
        """`W·R`, or `R·W`."""
        return self.rescaled(raw, 1)

    def applied(self, x: Tensor, raw: Tensor) -> Tensor | None:
        """The layer without its bias."""
        return self.on(x, raw, 1)


class SR(Diagonal):
    """Spectral rescaling: one factor per input channel from the power `G_t = (WᵀW)^(2^(t−1))`, with learnable q > 0.

        W·R,   R_ii = (Σ_j |G_t|_ij q_j/q_i)^(−2^−t)

    `t = 1` with q = 1 is AOL, `t → ∞` is spectral normalisation. q = exp(log_q) starts at 1; every q keeps the guarantee.
    Where there are fewer outputs than inputs the outputs are rescaled (`side`, see `Diagonal`).

    >>> sr = SR(Geometry((3, 3)), t=3)
    >>> bool(torch.linalg.matrix_norm(sr(torch.randn(3, 3)), 2) <= 1)
    True

    Reference: Delattre et al. 2024, corollary for t ≥ 1.
    """

    name: ClassVar[str] = "sr"

    def setup(self, t: int = 2, learn_q: bool = True, side: Side = "smaller") -> None:
        """Steps, what is rescaled, and whether q is learned."""
        check_steps(t)
        self.t = t
        self.begin(side, learn_q)

    def forward(self, raw: Tensor) -> Tensor:
        """`W·R`, or `R·W`."""
        return self.rescaled(raw, self.t)

    def applied(self, x: Tensor, raw: Tensor) -> Tensor | None:
        """The layer without its bias."""
        return self.on(x, raw, self.t)


class RLB(SN):
    """LiResNet's linear residual block `(I + Q)/σ(I + Q)`: the norm of the whole map, not 1 + ‖Q‖.

    Q is the raw kernel; the identity is added at its central tap, so the result is one plain layer.

    >>> W = RLB(Geometry((2, 2)))(torch.zeros(2, 2))
    >>> [[round(x, 4) for x in row] for row in W.tolist()]
    [[0.9986, 0.0], [0.0, 0.9986]]

    Reference: Hu et al. 2023 (LiResNet).
    """

    name: ClassVar[str] = "rlb"
    plain = (nn.Linear, nn.Conv2d)
    replaces = False

    @classmethod
    def check(cls, kernel: Geometry) -> None:
        """As many outputs as inputs, stride 1, a central tap."""
        super().check(kernel)
        inputs = kernel.shape[1] * kernel.groups
        if kernel.shape[0] != inputs:
            raise Refused(f"I + Q needs as many outputs as inputs, got {kernel.shape[0]} and {inputs}")
        if any(s != 1 for s in kernel.stride) or any(k % 2 == 0 for k in kernel.shape[2:]):
            raise Refused(
                f"I + Q needs stride 1 and a central tap, got stride {kernel.stride}, kernel size {kernel.shape[2:]}"
            )

    def forward(self, raw: Tensor) -> Tensor:
        """`(I + Q)/σ`."""
        identity = torch.eye(self.kernel.shape[1], dtype=raw.dtype, device=raw.device).repeat(self.kernel.groups, 1)
        for k in self.kernel.shape[2:]:
            identity = torch.nn.functional.pad(identity[..., None], (k // 2, k // 2))
        return super().forward(raw + identity)


SNLinear, SNConv1d, SNConv2d, SNConv3d, SNConvTranspose2d = layers_of(SN)
AOLLinear, AOLConv1d, AOLConv2d, AOLConv3d, AOLConvTranspose2d = layers_of(AOL)
SRLinear, SRConv1d, SRConv2d, SRConv3d, SRConvTranspose2d = layers_of(SR)
RLBLinear, RLBConv2d = layers_of(RLB)
