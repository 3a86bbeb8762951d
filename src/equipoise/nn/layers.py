"""`nn.Linear` and convolutions whose weight goes through a `Method`: same signatures, norm at most 1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.bounds import Bound, Kind
from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import changed
from equipoise.nn.effective import Effective, Tensors, as_weight, uncast
from equipoise.nn.method import Kernel, Method
from equipoise.norms import spectral_norm

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


_FIXED = (
    "{} is fixed when the layer is built: the weight is made for it; build another layer (from_plain keeps the weight)"
)


class Settings(dict[str, Any]):
    """Hyper-parameters that cannot be written to: a weight made for stride 2 may have norm 2 at stride 1."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise InputError(_FIXED.format(name))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise InputError(_FIXED.format("a hyper-parameter"))

    def __reduce__(self) -> tuple[type[Settings], tuple[dict[str, Any]]]:
        return Settings, (dict(self),)


class Weighted(Effective):
    """A plain layer (`plain`, whose weight is not used) whose effective weight is `method(raw)`.

    The hyper-parameters (`in_features`, `stride`, `padding_mode`, …) are read off the plain layer, as attributes of this one.
    """

    method_type: ClassVar[type[Method]]
    method: Method
    plain_type: ClassVar[type[nn.Module]]
    raw: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, plain: nn.Module, **options: Any) -> None:
        super().__init__()
        weight = plain.weight
        assert isinstance(weight, Tensor)
        self.settings = Settings({name: getattr(plain, name) for name in _SETTINGS if hasattr(plain, name)})
        kernel = replace(kernel_of(plain), whole_circles=self.method_type.whole_circles)
        refuse_enlarging(kernel, self.settings)
        self.method = self.method_type(kernel, device=weight.device, dtype=weight.dtype, **options)
        with torch.no_grad():
            self.raw = nn.Parameter(self.method.initial(weight.detach().clone()))
        bias = plain.bias
        self.register_parameter("bias", nn.Parameter(bias.detach().clone()) if isinstance(bias, Tensor) else None)

    @classmethod
    def from_plain(cls, plain: nn.Module, **options: Any) -> Weighted:
        """This layer with the hyper-parameters of an `nn.Linear` or convolution, starting from its weight."""
        layer = cls.__new__(cls)
        Weighted.__init__(layer, plain, **options)
        return layer.train(plain.training)

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("settings")
        if settings is not None and name in settings:
            return settings[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("settings", ()):
            raise InputError(_FIXED.format(name))
        super().__setattr__(name, value)

    def compute(self) -> Tensors:
        """(weight,), in the layout of the plain layer."""
        return (self.method(self.raw),)

    @property
    def weight(self) -> Tensor:
        """The effective weight, differentiable; a copy, so that writing into it does not change the layer."""
        return self.effective()[0].clone()

    def forward(self, x: Tensor) -> Tensor:
        """The plain layer's map with the effective weight."""
        weight = self.effective()[0]
        x = as_weight(x, weight)
        with uncast(x.device.type):
            return self.apply_weight(x, weight)

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        """The plain layer's map with a given weight."""
        if self.method_type.whole_circles and self.settings.get("padding_mode") == "circular":
            refuse_uneven(self.settings, x.shape[-len(self.settings["stride"]) :])
        return _apply(self.plain_type, self.settings, x, weight, self.bias)

    def export(self) -> nn.Module:
        """The plain layer with the effective weight: no overhead, same outputs."""
        device, dtype = self.raw.device, self.raw.dtype
        names = _ARGUMENTS[self.plain_type]
        arguments = {name: self.settings[name] for name in names}
        plain = self.plain_type(**arguments, bias=self.bias is not None, device=device, dtype=dtype)
        with torch.no_grad():
            plain.get_parameter("weight").copy_(self.weight)
            if self.bias is not None:
                plain.get_parameter("bias").copy_(self.bias)
        return plain.train(self.training)

    @property
    def certified(self) -> bool:
        """Whether the method proves a norm of at most 1; `lipschitz_upper` measures it in any case."""
        kind, method = self.method_type, self._modules.get("method")
        return type(method) is kind and isinstance(method, Method) and not changed(method, kind) and method.certified

    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """Upper bound of the norm for inputs of this shape (without the batch), from the weight the forward pass uses."""
        return Bound(upper_near_one(self.export(), input_shape), Kind.UPPER, "norm of the effective weight")

    def extra_repr(self) -> str:
        """The plain layer's arguments."""
        return ", ".join(f"{name}={self.settings[name]}" for name in _ARGUMENTS[self.plain_type])


_CONV = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    nn.Conv1d: _CONV,
    nn.Conv2d: _CONV,
    nn.ConvTranspose2d: (*_CONV[:5], "output_padding", *_CONV[6:7], "dilation", "padding_mode"),
}
_SETTINGS = sorted({name for names in _ARGUMENTS.values() for name in names} | {"_reversed_padding_repeated_twice"})


def kernel_of(plain: nn.Module) -> Kernel:
    """What a method has to know of a plain layer."""
    weight = plain.weight
    assert isinstance(weight, Tensor)
    if isinstance(plain, nn.Linear):
        return Kernel(tuple(weight.shape))
    if isinstance(plain, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):
        return Kernel(tuple(weight.shape), plain.groups, plain.stride, plain.dilation, plain.padding_mode)
    raise Refused(
        f"{type(plain).__name__} has no 1-Lipschitz form here; Linear, Conv1d, Conv2d and ConvTranspose2d have"
    )


def upper_near_one(plain: nn.Module, input_shape: tuple[int, ...]) -> float:
    """Upper end of the norm's bracket, sharp where it matters: refined until it is at most 1, or within 1e-6 of the norm."""
    size = None if isinstance(plain, nn.Linear) else tuple(input_shape[1:])
    upper = math.inf
    for rtol in (1e-2, 1e-3, 1e-4, 1e-6):
        found = spectral_norm(plain, input_size=size, rtol=rtol)
        upper = min(upper, float(found.upper))
        if upper <= 1 or float(found.lower) > 1 + rtol:
            break
    return upper


def refuse_enlarging(kernel: Kernel, settings: dict[str, Any]) -> None:
    """Circular padding wider than the kernel's reach writes pixels twice: norm above 1 for any kernel."""
    if kernel.padding_mode != "circular" or isinstance(settings["padding"], str):
        return
    for amount, taps, dilation in zip(settings["padding"], kernel.shape[2:], kernel.dilation, strict=True):
        if 2 * amount > dilation * (taps - 1):
            raise Refused(
                f"circular padding of {amount} on both sides of a kernel that reaches {dilation * (taps - 1)} pixels "
                f"repeats outputs, so that no kernel has norm 1; use padding ≤ {dilation * (taps - 1) // 2}"
            )


def refuse_uneven(settings: dict[str, Any], size: tuple[int, ...]) -> None:
    """On a circle that the stride does not divide patches meet that are apart elsewhere; without padding nothing is a circle."""
    twice = settings["_reversed_padding_repeated_twice"]
    for axis, (n, stride) in enumerate(zip(size, settings["stride"], strict=True)):
        if n % stride and twice[-2 * axis - 1] + twice[-2 * axis - 2]:
            raise Refused(
                f"a stride of {stride} does not divide the circle of {n} pixels, on which this layer would not be "
                f"1-Lipschitz; use a size that is a multiple of {stride}, or padding_mode='zeros'"
            )


def _apply(plain: type[nn.Module], settings: dict[str, Any], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if plain is nn.Linear:
        return functional.linear(x, weight, bias)
    stride, dilation, groups, padding = (settings[n] for n in ("stride", "dilation", "groups", "padding"))
    if plain is nn.ConvTranspose2d:
        extra = settings["output_padding"]
        return functional.conv_transpose2d(x, weight, bias, stride, padding, extra, groups, dilation)
    if settings["padding_mode"] == "circular":
        x = functional.pad(x, settings["_reversed_padding_repeated_twice"], mode="circular")
        padding = 0
    convolve = functional.conv1d if plain is nn.Conv1d else functional.conv2d
    return convolve(x, weight, bias, stride, padding, dilation, groups)


class LinearLayer(Weighted):
    """`nn.Linear` through a method; subclasses name the method."""

    plain_type = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(nn.Linear(in_features, out_features, bias, device, dtype), **options)


class Conv1dLayer(Weighted):
    """`nn.Conv1d` through a method; subclasses name the method."""

    plain_type = nn.Conv1d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: str | int | tuple[int] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        plain = nn.Conv1d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )  # fmt: skip
        super().__init__(plain, **options)


class Conv2dLayer(Weighted):
    """`nn.Conv2d` through a method; subclasses name the method."""

    plain_type = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        plain = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )  # fmt: skip
        super().__init__(plain, **options)


class ConvTranspose2dLayer(Weighted):
    """`nn.ConvTranspose2d` through a method; subclasses name the method."""

    plain_type = nn.ConvTranspose2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int] = 1,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        plain = nn.ConvTranspose2d(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode,
            device, dtype,
        )  # fmt: skip
        super().__init__(plain, **options)
