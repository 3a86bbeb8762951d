"""Residual blocks with a proof: CPL and SLL, dense and convolutional.

    CPL   x − (2/σ²)·W·act(Wᵀx + b)           σ ≥ ‖W‖
    SLL   x − 2·W·R²·act(Wᵀx + b)             R diagonal over the hidden index, ‖WR‖ ≤ 1  (AOL or spectral rescaling)

Both are computed as `x − 2U·R·act(R⁻¹Uᵀx + b)` with `U = WR` (R = 1/σ for CPL). The Jacobian is `I − 2U·D·Uᵀ` with D the slopes
of act: for slopes in [0, 1] and ‖U‖ ≤ 1 its eigenvalues lie in [1 − 2‖U‖², 1], so the block is max(1, 2‖U‖² − 1)-Lipschitz.

References: Meunier et al. 2022 (CPL); Araujo et al. 2023, theorem 1 (SLL); Delattre et al. 2024 (SLL with spectral rescaling).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.bounds import Bound, Kind
from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import up
from equipoise.nn.diagonal import check_steps, normalised_pair, rescaling_pair
from equipoise.nn.effective import Effective, Tensors, as_weight, uncast
from equipoise.nn.layers import PaddingMode, upper_near_one
from equipoise.nn.method import Kernel, Method
from equipoise.nn.rescaling import SN
from equipoise.nn.slopes import homogeneous, require_unit_slopes

Rescaling = Literal["aol", "sr", "sn"]


class Residual(Effective):
    """`x − 2U·R·act(R⁻¹Uᵀx + b)` with `Uᵀ` the linear map of `plain` (its raw weight rescaled over its outputs).

    Guarantee: ‖U‖ ≤ 1 in floating point for any raw weight and input size, slopes of `act` in [0, 1]: 1-Lipschitz.
    """

    bias: nn.Parameter | None
    log_q: nn.Parameter | None

    def __init__(
        self,
        plain: nn.Linear | nn.Conv2d,
        activation: nn.Module | None,
        rescaling: Rescaling,
        t: int,
        learn_q: bool,
        iterations: int = 8,
        grid: int = 16,
    ) -> None:
        super().__init__()
        if rescaling not in get_args(Rescaling):
            raise InputError(f"rescaling must be one of {', '.join(get_args(Rescaling))}, got {rescaling!r}")
        check_steps(t)
        self.activation = nn.ReLU() if activation is None else activation
        require_unit_slopes(self.activation)
        self.rescaling, self.t = rescaling, t
        self.groups = plain.groups if isinstance(plain, nn.Conv2d) else 1
        weight = plain.weight.detach()
        if isinstance(plain, nn.Conv2d):
            _require_same(plain)
            self.padding, self.dilation = _same(plain), tuple(plain.dilation)
            self.padding_mode: str = plain.padding_mode
            kernel = Kernel(tuple(weight.shape), plain.groups, (1, 1), tuple(plain.dilation), plain.padding_mode)
        else:
            self.padding, self.dilation, self.padding_mode = (), (), "zeros"
            kernel = Kernel(tuple(weight.shape))
        Method.check(kernel)
        self.kernel = kernel
        self.norm = SN(kernel, iterations, grid=grid) if rescaling == "sn" else None
        self.raw = nn.Parameter(_nearly_orthogonal(weight.clone(), self.groups))
        self.register_parameter("bias", None if plain.bias is None else nn.Parameter(plain.bias.detach().clone()))
        zeros = weight.new_zeros(self.groups, weight.shape[0] // self.groups)
        self.register_parameter("log_q", nn.Parameter(zeros) if rescaling == "sr" and learn_q else None)

    def compute(self) -> Tensors:
        """`(Uᵀ, 2U, offset, scale)`: both maps in the layout of the plain layer, `R·b` and R (each empty where not used)."""
        K = self.kernel.grouped(self.raw).transpose(1, 2)  # the hidden index is the one that is rescaled
        if self.norm is not None:
            U, R = normalised_pair(K, *self.norm.bound(self.raw))
        else:
            U, R = rescaling_pair(K, self.t if self.rescaling == "sr" else 1, self.log_q)
        inner, outer = U.transpose(1, 2).reshape(self.raw.shape), 2 * U.flatten(0, 1)
        if self.kernel.dims:
            outer = outer.flip(list(range(2, 2 + self.kernel.dims)))
        R = R.expand(self.groups, U.shape[2]).reshape(-1)
        none = self.raw.new_empty(0)
        if homogeneous(self.activation):  # R·act(z/R + b) = act(z + R·b)
            return inner, outer, none if self.bias is None else R * self.bias, none
        offset = none if self.bias is None else self.bias
        # any positive scale keeps the bound: this range keeps z/R and its gradient finite
        return inner, outer, offset, torch.where(R > 0, R, torch.ones_like(R)).clamp(2.0**-60, 2.0**60)

    def forward(self, x: Tensor) -> Tensor:
        """The block on `x`."""
        require_unit_slopes(self.activation)
        inner, outer, offset, scale = self.effective()
        x = as_weight(x, inner)
        with uncast(x.device.type):
            fused = offset.numel() > 0 and scale.numel() == 0  # the offset is the bias of the inner map
            z = self._linear(x, inner, offset if fused else None)
            bent = _bent(self.activation, z, offset[:0] if fused else offset, scale, self.kernel.dims)
            return x - self._linear(bent, outer)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.kernel.dims == 0:
            return functional.linear(x, weight, bias)
        if self.padding_mode == "circular":
            x = functional.pad(x, [p for p in reversed(self.padding) for _ in range(2)], mode="circular")
            return functional.conv2d(x, weight, bias, 1, 0, self.dilation, self.groups)
        return functional.conv2d(x, weight, bias, 1, self.padding, self.dilation, self.groups)

    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """`max(1, 2‖U‖² − 1)` with ‖U‖ bounded for this input, from the weights the forward pass uses."""
        return self.export().lipschitz_upper(input_shape)

    def export(self) -> ExportedResidual:
        """The block on plain layers with the effective weights: nothing is recomputed."""
        require_unit_slopes(self.activation)
        with torch.no_grad():
            inner, outer, offset, scale = (value.detach().clone() for value in self.effective())
        block = ExportedResidual(self._plain(inner), self._plain(outer), self.activation, offset, scale)
        return block.train(self.training)

    def _plain(self, weight: Tensor) -> nn.Linear | nn.Conv2d:
        build: Any = nn.Linear if self.kernel.dims == 0 else nn.Conv2d
        plain: nn.Linear | nn.Conv2d
        if self.kernel.dims == 0:
            plain = build(weight.shape[1], weight.shape[0], bias=False, device="meta")
        else:
            inputs, taps = weight.shape[1] * self.groups, tuple(weight.shape[2:])
            plain = build(
                inputs, weight.shape[0], taps, 1, self.padding, self.dilation, self.groups, False, self.padding_mode, "meta"
            )  # fmt: skip
        plain.weight = nn.Parameter(weight)
        return plain

    def extra_repr(self) -> str:
        """Shape and rescaling."""
        hidden, features = self.raw.shape[0], self.raw.shape[1] * self.groups
        steps = f", t={self.t}" if self.rescaling == "sr" else ""
        return f"{features}, hidden={hidden}, rescaling={self.rescaling!r}{steps}"


class ExportedResidual(nn.Module):
    """`x − outer(R·act(R⁻¹·inner(x) + b))` on plain layers; `outer` is twice the adjoint of `inner`, else no bound is claimed."""

    def __init__(
        self, inner: nn.Module, outer: nn.Module, activation: nn.Module, offset: Tensor, scale: Tensor
    ) -> None:
        super().__init__()
        self.inner, self.outer, self.activation = inner, outer, activation
        self.register_buffer("offset", offset)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """The block on `x`."""
        z = self.inner(x)
        bent = _bent(
            self.activation,
            z,
            self.get_buffer("offset"),
            self.get_buffer("scale"),
            2 * isinstance(self.inner, nn.Conv2d),
        )
        return x - self.outer(bent)

    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """`max(1, 2‖U‖² − 1)`, as long as the two maps belong together and the activation has slopes in [0, 1]."""
        require_unit_slopes(self.activation)
        inner, outer = self.inner, self.outer
        if type(inner) is not type(outer) or not isinstance(inner, nn.Linear | nn.Conv2d):
            raise Refused("the maps of this block are no longer those it was exported with: no bound of its own")
        assert isinstance(outer, nn.Linear | nn.Conv2d)
        _require_adjoint(inner, outer)
        scale = self.get_buffer("scale")
        if not bool((scale > 0).all()):
            raise Refused("the scale of this block is not positive: no bound of its own")
        s = upper_near_one(inner, input_shape)
        value = 1.0 if s <= 1 else up(up(2 * s * s) - 1)
        return Bound(value, Kind.UPPER, "residual, max(1, 2‖U‖² − 1)")


def _nearly_orthogonal(weight: Tensor, groups: int) -> Tensor:
    """An orthogonal matrix (at the central tap, with a tenth of the default noise around): the block starts nearly isometric.

    With independent entries U has small singular values, each block contracts, and deep towers lose their signal.
    """
    taps = weight.dim() > 2
    Q = weight.new_empty(groups, weight.shape[0] // groups, weight.shape[1])
    for block in Q:
        nn.init.orthogonal_(block)
    if not taps:
        return Q.reshape(weight.shape)
    weight = 0.1 * weight
    weight[..., weight.shape[2] // 2, weight.shape[3] // 2] = Q.flatten(0, 1)
    return weight


def _bent(activation: nn.Module, z: Tensor, offset: Tensor, scale: Tensor, dims: int) -> Tensor:
    shape = (-1, *[1] * dims)
    if scale.numel():
        z = z / scale.reshape(shape)
    if offset.numel():
        z = z + offset.reshape(shape)
    z = activation(z)
    return z * scale.reshape(shape) if scale.numel() else z


def _require_adjoint(inner: nn.Linear | nn.Conv2d, outer: nn.Linear | nn.Conv2d) -> None:
    a, b = inner.weight.detach(), outer.weight.detach()
    same = inner.bias is None and outer.bias is None
    if isinstance(inner, nn.Conv2d) and isinstance(outer, nn.Conv2d):
        g = inner.groups
        a = a.reshape(g, -1, *a.shape[1:]).transpose(1, 2).flatten(0, 1).flip((2, 3))
        names = ("stride", "padding", "dilation", "groups", "padding_mode")
        same = same and all(getattr(inner, n) == getattr(outer, n) for n in names)
        same = same and inner.stride == (1, 1) and inner.padding == _same(inner)
    else:
        a = a.mT
    if not same or a.shape != b.shape or not torch.equal(2 * a, b):
        raise Refused("the outer map of this block is not twice the adjoint of the inner one: no bound of its own")


def _same(conv: nn.Conv2d) -> tuple[int, ...]:
    return tuple(d * (k - 1) // 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True))


def _require_same(conv: nn.Conv2d) -> None:
    if conv.stride != (1, 1):
        raise Refused(f"a residual block adds its input to its output, so its stride is 1, got {conv.stride}")
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    if any(r % 2 for r in reach):
        raise Refused(
            f"a residual block needs padding that is equal on both sides: kernel size {conv.kernel_size} is even"
        )
    if conv.padding not in ("same", _same(conv)):
        raise Refused(
            f"a residual block keeps the image size: padding must be {_same(conv)} or 'same', got {conv.padding}"
        )


def _block_width(first: int, second: int, what: str) -> None:
    if first != second:
        raise Refused(f"a residual block adds its input to its output: {what} must be equal, got {first} and {second}")


class _LinearBlock(Residual):
    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        hidden: int | None = None,
        **options: Any,
    ) -> None:
        _block_width(in_features, in_features if out_features is None else out_features, "in_features and out_features")
        super().__init__(nn.Linear(in_features, hidden or in_features, bias, device, dtype), **options)
        self.in_features = self.out_features = in_features


class _Conv2dBlock(Residual):
    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        kernel_size: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = "same",
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        hidden: int | None = None,
        **options: Any,
    ) -> None:
        _block_width(in_channels, in_channels if out_channels is None else out_channels, "in_channels and out_channels")
        if padding == "same" and stride not in (1, (1, 1)):
            raise Refused(f"a residual block adds its input to its output, so its stride is 1, got {stride}")
        plain = nn.Conv2d(
            in_channels, hidden or in_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype,
        )  # fmt: skip
        super().__init__(plain, **options)
        self.in_channels = self.out_channels = in_channels


class CPLLinear(_LinearBlock):
    """`x − (2/σ²)·W·act(Wᵀx + b)` with σ an upper bound of ‖W‖: 1-Lipschitz for slopes of act in [0, 1].

    >>> CPLLinear(8)(torch.zeros(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, *args: Any, activation: nn.Module | None = None, iterations: int = 8, **options: Any) -> None:
        super().__init__(
            *args, activation=activation, rescaling="sn", t=1, learn_q=False, iterations=iterations, **options
        )


class CPLConv2d(_Conv2dBlock):
    """`x − (2/σ²)·Kᵀ⋆act(K⋆x + b)` with σ an upper bound of the convolution's norm for every input size.

    >>> CPLConv2d(4, kernel_size=3)(torch.zeros(2, 4, 6, 6)).shape
    torch.Size([2, 4, 6, 6])
    """

    def __init__(self, *args: Any, activation: nn.Module | None = None, iterations: int = 8, **options: Any) -> None:
        super().__init__(
            *args, activation=activation, rescaling="sn", t=1, learn_q=False, iterations=iterations, **options
        )


class SLLLinear(_LinearBlock):
    """`x − 2·W·R²·act(Wᵀx + b)` with R by AOL or, `rescaling="sr"`, by spectral rescaling in t steps with learnable q.

    >>> block = SLLLinear(8, hidden=16, rescaling="sr", t=3)
    >>> block(torch.zeros(2, 8)).shape, block.lipschitz_upper((8,)).value
    (torch.Size([2, 8]), 1.0)
    """

    def __init__(
        self,
        *args: Any,
        activation: nn.Module | None = None,
        rescaling: Rescaling = "aol",
        t: int = 2,
        learn_q: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*args, activation=activation, rescaling=rescaling, t=t, learn_q=learn_q, **options)


class SLLConv2d(_Conv2dBlock):
    """The SLL block with a convolution W, zero or circular padding of equal size, stride 1.

    >>> block = SLLConv2d(4, kernel_size=3, rescaling="sr")
    >>> block(torch.zeros(2, 4, 6, 6)).shape, block.lipschitz_upper((4, 6, 6)).value
    (torch.Size([2, 4, 6, 6]), 1.0)
    """

    def __init__(
        self,
        *args: Any,
        activation: nn.Module | None = None,
        rescaling: Rescaling = "aol",
        t: int = 2,
        learn_q: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*args, activation=activation, rescaling=rescaling, t=t, learn_q=learn_q, **options)
