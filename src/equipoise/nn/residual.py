"""Residual blocks with a proof: CPL and SLL, dense and convolutional.

    CPL   x − (2/σ²)·W·act(Wᵀx + b)           σ ≥ ‖W‖
    SLL   x − 2·W·R²·act(Wᵀx + b)             R diagonal over the hidden index, ‖WR‖ ≤ 1, with learnable q

Both are computed as `x − 2U·R·act(R⁻¹Uᵀx + b)` with `U = WR` (R = 1/σ for CPL). The Jacobian is `I − 2U·D·Uᵀ` with D the slopes
of act: for slopes in [0, 1] and ‖U‖ ≤ 1 its eigenvalues lie in [1 − 2‖U‖², 1], so the block is max(1, 2‖U‖² − 1)-Lipschitz.

References: Meunier et al. 2022 (CPL); Araujo et al. 2023, theorem 1 (SLL); Delattre et al. 2024 (SLL with spectral rescaling).
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import Bound, Kind, Refused, Shape, inflate, or_one, require_one_of
from equipoise.maps.geometry import Geometry
from equipoise.nn.activations import homogeneous, unit_slopes
from equipoise.nn.parametrize import ComputedLayer, Tensors, check_padding, plain_geometry
from equipoise.nn.rescaling import SN, check_steps, normalised_pair, rescaling_pair
from equipoise.norms.spectral import spectral_norm

Size = int | tuple[int, int]


def _linear(
    in_features: int,
    out_features: int | None = None,
    bias: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    hidden: int | None = None,
) -> nn.Linear:
    """The inner map of a dense block."""
    _require_equal(in_features, out_features)
    return nn.Linear(in_features, hidden or in_features, bias, device, dtype)


def _conv2d(
    in_channels: int,
    out_channels: int | None = None,
    kernel_size: Size = 3,
    stride: Size = 1,
    padding: Size | str = "same",
    dilation: Size = 1,
    groups: int = 1,
    bias: bool = True,
    padding_mode: str = "zeros",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    hidden: int | None = None,
) -> nn.Conv2d:
    """The inner map of a convolutional block."""
    _require_equal(in_channels, out_channels)
    if stride not in (1, (1, 1)):
        raise Refused(
            f"a residual block adds its input to its output, so its stride must be 1, got {stride}"
        )
    sizes: Any = (kernel_size, 1, padding, dilation, groups, bias, padding_mode, device, dtype)
    return nn.Conv2d(in_channels, hidden or in_channels, *sizes)


def _require_equal(ins: int, out: int | None) -> None:
    if out is not None and ins != out:
        raise Refused(
            f"a residual block adds its input to its output: as many outputs as inputs, got {ins} and {out}"
        )


class Residual(ComputedLayer):
    """`x − 2U·R·act(R⁻¹Uᵀx + b)` with `Uᵀ` the linear map of a plain layer, its raw weight rescaled over its outputs.

    Guarantee: ‖U‖ ≤ 1 in floating point for any raw weight and input size, slopes of `act` in [0, 1]: 1-Lipschitz.

    >>> block = SLLConv2d(4, kernel_size=3, rescaling="sr")
    >>> block(torch.zeros(2, 4, 6, 6)).shape, block.lipschitz_upper((4, 6, 6)).value
    (torch.Size([2, 4, 6, 6]), 1.0)
    """

    reads_bias = False

    def build(self, plain: Any, *, activation: nn.Module | None = None) -> None:
        """The raw weight of the inner map, from inputs to hidden units.

        Args:
            plain: the plain layer that the arguments describe.
            activation: slopes in [0, 1]; ReLU by default.
        """
        self.activation = unit_slopes(nn.ReLU() if activation is None else activation)
        self.kernel = plain_geometry(plain)
        _require_same_size(self.kernel)
        check_padding(self.kernel)
        self.hidden = len(plain.weight)
        if self.kernel.dims:
            self.out_channels = self.kernel.channels
        else:
            self.out_features = self.kernel.channels
        self.raw = nn.Parameter(
            _nearly_orthogonal(plain.weight.detach().clone(), self.kernel.groups)
        )

    def rescaled(self, K: Tensor) -> tuple[Tensor, Tensor]:
        """`(U, R)` of the raw weight `K (groups, features, hidden, …)`."""
        raise NotImplementedError

    def compute(self, *args: Any) -> Tensors:
        """`(Uᵀ, offset, scale)`: the inner weight, `R·b` or b, and R where it does not go through the activation."""
        U, R = self.rescaled(self.kernel.grouped(self.raw).transpose(1, 2))
        inner = U.transpose(1, 2).reshape(self.raw.shape)
        R = R.expand(self.kernel.groups, U.shape[2]).reshape(-1)
        empty = self.raw.new_empty(0)
        offset = empty if self.bias is None else self.bias
        if homogeneous(self.activation):  # R·act(z/R + b) = act(z + R·b)
            return inner, R * offset if len(offset) else offset, empty
        # any positive scale keeps the bound: this range keeps z/R and its gradient finite
        return inner, offset, or_one(R).clamp(2.0**-60, 2.0**60)

    def evaluate(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The block on `x`."""
        inner, offset, scale = tensors
        activation = unit_slopes(self.activation)
        if len(scale):
            shape = (-1, *[1] * self.kernel.dims)
            scale = scale.reshape(shape)
            z = self._linear(x, inner) / scale
            z = activation(z + offset.reshape(shape) if len(offset) else z) * scale
        else:
            z = self._linear(x, inner, offset if len(offset) else None)
            z = activation(z)
        outer = -2 * self.kernel.grouped(inner).transpose(1, 2).flatten(0, 1)
        if self.kernel.dims:
            outer = outer.flip((2, 3))
        # the sign is in the weight: nothing of x's size is negated
        return self._linear(z, outer).add_(x)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        kernel = self.kernel
        if not kernel.dims:
            return functional.linear(x, weight, bias)
        padding: Any = [axis.left for axis in kernel.axes]
        if kernel.padding == "circular":
            x = functional.pad(x, [p for p in reversed(padding) for _ in range(2)], mode="circular")
            padding = 0
        return functional.conv2d(x, weight, bias, 1, padding, kernel.dilation, kernel.groups)

    def bound(self, tensors: Tensors, input_shape: Shape) -> Bound:
        """`max(1, 2‖U‖² − 1)` with ‖U‖ bounded for this input.

        Args:
            tensors: the effective tensors.
            input_shape: of one sample.
        """
        unit_slopes(self.activation)
        size = tuple(input_shape[1:]) if self.kernel.dims else None
        s = upper_near_one(self.inner(tensors[0]), size)
        value = 1.0 if s <= 1 else inflate(inflate(2 * s * s) - 1)
        return Bound(value, Kind.UPPER, "residual, max(1, 2‖U‖² − 1)")

    def inner(self, weight: Tensor) -> nn.Linear | nn.Conv2d:
        """The inner map with this weight, as a plain layer."""
        kernel = self.kernel
        if not kernel.dims:
            plain: nn.Linear | nn.Conv2d = nn.Linear(
                weight.shape[1], weight.shape[0], bias=False, device="meta"
            )
        else:
            sizes: Any = (weight.shape[2:], 1, [axis.left for axis in kernel.axes])
            rest: Any = (kernel.dilation, kernel.groups, False, kernel.padding, "meta")
            plain = nn.Conv2d(kernel.channels, weight.shape[0], *sizes, *rest)
        plain.weight = nn.Parameter(weight.detach())
        return plain


def _nearly_orthogonal(weight: Tensor, groups: int) -> Tensor:
    """An orthogonal matrix (at the central tap, with a tenth of the default noise around): the block starts nearly isometric.

    With independent entries U has small singular values, each block contracts, and deep towers lose their signal.
    """
    Q = weight.new_empty(groups, weight.shape[0] // groups, weight.shape[1])
    for block in Q:
        nn.init.orthogonal_(block)
    if weight.dim() == 2:
        return Q.reshape(weight.shape)
    weight = 0.1 * weight
    weight[..., weight.shape[2] // 2, weight.shape[3] // 2] = Q.flatten(0, 1)
    return weight


def _require_same_size(kernel: Geometry) -> None:
    if any(axis.reach % 2 for axis in kernel.axes):
        raise Refused(
            f"a residual block needs padding that is equal on both sides: kernel size {kernel.shape[2:]} is even"
        )
    expected = tuple(axis.reach // 2 for axis in kernel.axes)
    if kernel.amount != tuple((p, p) for p in expected):
        raise Refused(
            f"a residual block keeps the image size: padding must be {expected} or 'same', got {kernel.amount}"
        )


def upper_near_one(plain: nn.Module, input_size: Shape | None) -> float:
    """Upper bound of the norm, refined until it is at most 1, or within 1e-6 of the norm.

    Args:
        plain: a linear layer.
        input_size: of the images, None for a dense layer.
    """
    upper = float("inf")
    for rtol in (1e-2, 1e-3, 1e-4, 1e-6):
        bracket = spectral_norm(plain, input_size=input_size, rtol=rtol)
        upper = min(upper, float(bracket.upper))
        if upper <= 1 or float(bracket.lower) > 1 + rtol:
            break
    return upper


class CPL(Residual):
    """`x − (2/σ²)·W·act(Wᵀx + b)` with σ an upper bound of ‖W‖: 1-Lipschitz for slopes of act in [0, 1]."""

    def build(self, plain: Any, *, activation: nn.Module | None = None) -> None:
        """The raw weight, and the bound of its norm.

        Args:
            plain: the plain layer that the arguments describe.
            activation: slopes in [0, 1]; ReLU by default.
        """
        super().build(plain, activation=activation)
        self.norm = SN(self.kernel)

    def rescaled(self, K: Tensor) -> tuple[Tensor, Tensor]:
        """`(K/σ, 1/σ)`."""
        return normalised_pair(K, *self.norm.bound(self.raw))


class SLL(Residual):
    """`x − 2·W·R²·act(Wᵀx + b)`, `R_ii² = (Σ_j |(WᵀW)^(2^(t−1))|_ij q_j/q_i)^(−2^(1−t))`: 1-Lipschitz for slopes in [0, 1].

    `rescaling="aol"` is t = 1, the published SLL: `R_ii² = 1/Σ_j |WᵀW|_ij q_j/q_i`. q > 0 is learned in both.
    """

    log_q: nn.Parameter | None

    def build(
        self,
        plain: Any,
        *,
        activation: nn.Module | None = None,
        rescaling: Literal["aol", "sr"] = "aol",
        t: int = 2,
        learn_q: bool = True,
    ) -> None:
        """The raw weight and log q.

        Args:
            plain: the plain layer that the arguments describe.
            activation: slopes in [0, 1]; ReLU by default.
            rescaling: "aol", or "sr" for spectral rescaling by t steps.
            t: steps of spectral rescaling.
            learn_q: whether q is a parameter.
        """
        super().build(plain, activation=activation)
        require_one_of(("aol", "sr"), rescaling=rescaling)
        check_steps(t)
        self.rescaling = rescaling
        self.t = t if rescaling == "sr" else 1
        start = self.raw.new_zeros(self.kernel.groups, self.hidden // self.kernel.groups)
        self.register_parameter("log_q", nn.Parameter(start) if learn_q else None)

    def rescaled(self, K: Tensor) -> tuple[Tensor, Tensor]:
        """`(K·R, R)`."""
        return rescaling_pair(K, self.t, self.log_q)


class CPLLinear(CPL):
    """A dense block `x − (2/σ²)·W·act(Wᵀx + b)`, see `CPL`.

    Args:
        in_features: size of input and output.
        out_features: the same, or None.
        bias: whether b is learned.
        device: of the parameters.
        dtype: of the parameters.
        hidden: number of hidden units, as many as inputs by default.
        activation: slopes in [0, 1]; ReLU by default.
    """

    plain_type = staticmethod(_linear)


class CPLConv2d(CPL):
    """A convolutional block `x − (2/σ²)·W·act(Wᵀx + b)`, see `CPL`.

    Args:
        in_channels: channels of input and output.
        out_channels: the same, or None.
        kernel_size: odd.
        stride: 1.
        padding: "same", or what keeps the image size.
        dilation: of the kernel.
        groups: of the channels.
        bias: whether b is learned.
        padding_mode: "zeros" or "circular".
        device: of the parameters.
        dtype: of the parameters.
        hidden: number of hidden units, as many as inputs by default.
        activation: slopes in [0, 1]; ReLU by default.
    """

    plain_type = staticmethod(_conv2d)


class SLLLinear(SLL):
    """A dense block `x − 2·W·R²·act(Wᵀx + b)`, see `SLL`.

    Args:
        in_features: size of input and output.
        out_features: the same, or None.
        bias: whether b is learned.
        device: of the parameters.
        dtype: of the parameters.
        hidden: number of hidden units, as many as inputs by default.
        activation: slopes in [0, 1]; ReLU by default.
        rescaling: "aol", or "sr" for spectral rescaling by t steps.
        t: steps of spectral rescaling.
        learn_q: whether q is a parameter.
    """

    plain_type = staticmethod(_linear)


class SLLConv2d(SLL):
    """A convolutional block `x − 2·W·R²·act(Wᵀx + b)`, see `SLL`.

    Args:
        in_channels: channels of input and output.
        out_channels: the same, or None.
        kernel_size: odd.
        stride: 1.
        padding: "same", or what keeps the image size.
        dilation: of the kernel.
        groups: of the channels.
        bias: whether b is learned.
        padding_mode: "zeros" or "circular".
        device: of the parameters.
        dtype: of the parameters.
        hidden: number of hidden units, as many as inputs by default.
        activation: slopes in [0, 1]; ReLU by default.
        rescaling: "aol", or "sr" for spectral rescaling by t steps.
        t: steps of spectral rescaling.
        learn_q: whether q is a parameter.
    """

    plain_type = staticmethod(_conv2d)
