"""`nn.Linear` and convolutions whose weight goes through a `Method`: same signatures, norm at most 1; and their table.

A method has a row in the table: `layers_of(method)` makes the classes `<Method><Plain layer>` and enters them.
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.bounds import Bound, Kind
from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import by_construction, hooked
from equipoise.maps.geometry import Geometry
from equipoise.maps.reading import geometry_of
from equipoise.nn.effective import Effective, Tensors, as_weight, plainly_called, uncast
from equipoise.nn.method import FIXED, PLAIN, Method
from equipoise.norms.spectral import spectral_norm


class Settings(dict[str, Any]):
    """Hyper-parameters that cannot be written to: a weight made for stride 2 may have norm 2 at stride 1."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise InputError(FIXED.format(name))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise InputError(FIXED.format("a hyper-parameter"))

    def __reduce__(self) -> tuple[type[Settings], tuple[dict[str, Any]]]:
        return Settings, (dict(self),)


_NAMES = {plain: tuple(inspect.signature(plain).parameters) for plain in PLAIN}


def arguments(plain: type[nn.Module]) -> tuple[str, ...]:
    """The names of a plain layer's arguments, in order."""
    return _NAMES[plain]


def build_plain(kind: type[nn.Module], args: tuple[Any, ...], options: dict[str, Any]) -> nn.Module:
    """The plain layer from arguments as it takes them; what it does not know stays in `options`."""
    known = {name: options.pop(name) for name in list(options) if name in arguments(kind)}
    return kind(*args, **known)


class Weighted(Effective):
    """A plain layer (whose weight is not used) whose effective weight is `method(raw)`.

    The hyper-parameters (`in_features`, `stride`, `padding_mode`, …) are read off the plain layer, as attributes of this one.
    """

    method_type: ClassVar[type[Method]]
    method: Method
    plain_type: ClassVar[type[nn.Module]]
    raw: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, *args: Any, **options: Any) -> None:
        self._start(build_plain(self.plain_type, args, options), options)

    @classmethod
    def from_plain(cls, plain: nn.Module, **options: Any) -> Weighted:
        """This layer with the hyper-parameters of an `nn.Linear` or convolution, starting from its weight."""
        layer = cls.__new__(cls)
        layer._start(plain, options)
        return layer.train(plain.training)

    def _start(self, plain: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.geometry = kernel_of(plain)
        if not isinstance(plain, self.plain_type):
            raise InputError(
                f"{type(self).__name__} stands for nn.{self.plain_type.__name__}, got {type(plain).__name__}"
            )
        weight = plain.weight
        assert isinstance(weight, Tensor)
        names = [name for name in arguments(self.plain_type) if name not in ("bias", "device", "dtype")]
        self.settings = Settings({name: getattr(plain, name) for name in names})
        whole = {"whole": True} if self.method_type.whole_circles else {}
        self.method = self.method_type(self.geometry, device=weight.device, dtype=weight.dtype, **whole, **options)
        with torch.no_grad():
            self.raw = nn.Parameter(self.method.initial(weight.detach().clone()))
        bias = plain.bias
        self.register_parameter("bias", nn.Parameter(bias.detach().clone()) if isinstance(bias, Tensor) else None)

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("settings")
        if settings is not None and name in settings:
            return settings[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("settings", ()):
            raise InputError(FIXED.format(name))
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}raw" in state_dict:
            self.method.opening(state_dict, f"{prefix}method.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def compute(self) -> Tensors:
        """(weight,), in the layout of the plain layer."""
        return (self.method(self.raw),)

    @property
    def weight(self) -> Tensor:
        """The effective weight, differentiable; a copy, so that writing into it does not change the layer."""
        return self.effective()[0]

    def forward(self, x: Tensor) -> Tensor:
        """The plain layer's map with the effective weight."""
        y = self._applied(x)
        if y is not None:
            return y
        weight = self._current()[0]
        x = as_weight(x, weight)
        with uncast(x.device.type):
            return self.apply_weight(x, weight)

    def _applied(self, x: Tensor) -> Tensor | None:
        """The output in a training step that is cheaper without the weight: a long dense layer on few inputs."""
        raw, kind = self.raw, type(self)
        if not self.training or self.geometry.dims or x.numel() >= raw.numel() or not plainly_called(raw):
            return None
        if (
            kind.compute is not Weighted.compute
            or kind.apply_weight is not Weighted.apply_weight
            or hooked(self.method)
        ):
            return None
        maker, offering = (
            next(c for c in type(self.method).__mro__ if name in vars(c)) for name in ("forward", "applied")
        )
        if not issubclass(offering, maker) or any(p.dtype is not raw.dtype for p in self.parameters()):
            return None
        with self._exactly():
            y = self.method.applied(as_weight(x, raw), raw)
            return y if y is None or self.bias is None else y + self.bias

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        """The plain layer's map with a given weight."""
        kernel, bias = self.geometry, self.bias
        if not kernel.dims:
            return functional.linear(x, weight, bias)
        if self.plain_type is nn.ConvTranspose2d:
            padding, extra = (self.settings[name] for name in ("padding", "output_padding"))
            return functional.conv_transpose2d(
                x, weight, bias, kernel.stride, padding, extra, kernel.groups, kernel.dilation
            )
        padding = self.settings["padding"]
        if kernel.padding == "circular":
            if self.method_type.whole_circles:
                refuse_uneven(kernel, x.shape[-kernel.dims :])
            x = functional.pad(x, [p for pair in reversed(kernel.amount) for p in pair], mode="circular")
            padding = 0
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[kernel.dims - 1]
        return convolve(x, weight, bias, kernel.stride, padding, kernel.dilation, kernel.groups)

    def export(self) -> nn.Module:
        """The plain layer with the effective weight: no overhead, same outputs."""
        device, dtype = self.raw.device, self.raw.dtype
        plain = self.plain_type(**self.settings, bias=self.bias is not None, device=device, dtype=dtype)
        with torch.no_grad():
            plain.get_parameter("weight").copy_(self.weight)
            if self.bias is not None:
                plain.get_parameter("bias").copy_(self.bias)
        return plain.train(self.training)

    @property
    def certified(self) -> bool:
        """Whether the method proves a norm of at most 1; `lipschitz_upper` measures it in any case."""
        method = self._modules.get("method")
        return isinstance(method, Method) and method.proves(self.method_type, self.geometry)

    def _constant(self) -> float | None:
        """1, where the method proves it."""
        return 1.0 if self.certified else None

    @by_construction(_constant)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """Upper bound of the norm for inputs of this shape (without the batch), from the weight the forward pass uses."""
        return Bound(upper_near_one(self.export(), input_shape), Kind.UPPER, "norm of the effective weight")

    def extra_repr(self) -> str:
        """The plain layer's arguments."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


def kernel_of(plain: nn.Module) -> Geometry:
    """What a method has to know of a plain layer."""
    if not isinstance(plain, PLAIN):
        raise Refused(
            f"{type(plain).__name__} has no 1-Lipschitz form here; Linear, Conv1d, Conv2d, Conv3d and ConvTranspose2d have"
        )
    return geometry_of(plain)


def refuse_uneven(kernel: Geometry, size: tuple[int, ...]) -> None:
    """On a circle that the stride does not divide patches meet that are apart elsewhere; without padding nothing is a circle."""
    for axis, n in zip(kernel.axes, size, strict=True):
        if n % axis.stride and axis.left + axis.right:
            raise Refused(
                f"a stride of {axis.stride} does not divide the circle of {n} pixels, on which this layer would not be "
                f"1-Lipschitz; use a size that is a multiple of {axis.stride}, or padding_mode='zeros'"
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


#: the table: layers by method and plain layer
_TABLE: dict[str, dict[type[nn.Module], type[Any]]] = {}


def layers_of(method: type[Method]) -> Any:
    """The classes `<Method><Plain layer>` of a method, one for each of `method.plain`, entered in the table.

    They take the arguments of the plain layer, and the options of the method by name.

    >>> class Half(Method):
    ...     name, plain = "half", (nn.Linear,)
    ...     def forward(self, raw):
    ...         return raw / (2 * torch.linalg.matrix_norm(raw))
    >>> (HalfLinear,) = layers_of(Half)
    >>> HalfLinear(4, 3)(torch.zeros(1, 4)).shape
    torch.Size([1, 3])
    >>> _ = _TABLE.pop("half")
    """
    if not method.name:
        raise InputError(f"{method.__name__} needs a name, as it is written in make_lipschitz(method=…)")
    first = (method.__doc__ or "").strip().splitlines()[0] if method.__doc__ else ""
    classes = []
    made_by = method.setup if method.__init__ is Method.__init__ else method.__init__
    own = list(inspect.signature(made_by).parameters.values())[1:]
    for plain in method.plain:
        taken = list(inspect.signature(plain).parameters.values())
        names = {p.name for p in taken} | {"whole", "kernel"}
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        options = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name not in names and p.kind in kinds
        ]
        name = f"{method.__name__}{plain.__name__}"
        body = {
            "method_type": method,
            "plain_type": plain,
            "__module__": method.__module__,
            "__doc__": f"`nn.{plain.__name__}` through `{method.__name__}`: {first}",
            "__signature__": inspect.Signature([*taken, *options]),
        }
        classes.append(enter(method.name, plain, type(name, (Weighted,), body)))
    return tuple(classes)


def enter(method: str, plain: type[nn.Module], layer: type[Any]) -> type[Any]:
    """Put a layer into the table that is made otherwise, such as a convolution whose weight depends on the image size."""
    known = _TABLE.setdefault(method, {}).setdefault(plain, layer)
    if known is not layer and (known.__module__, known.__name__) != (layer.__module__, layer.__name__):
        raise InputError(f"the method {method!r} has a layer for nn.{plain.__name__} already: {known.__name__}")
    _TABLE[method][plain] = layer
    return layer


def methods() -> dict[str, dict[type[nn.Module], Any]]:
    """The layers by method and plain layer: `methods()["sr"][nn.Linear]` is `SRLinear`; those of other packages included.

    Only layers that stand for a plain one: residual blocks (CPL, SLL, RLB) and sandwich layers, which hold an activation, do not.

    >>> methods()["sr"][nn.Linear].__name__
    'SRLinear'
    """
    import equipoise.nn  # noqa: F401  (its modules enter their layers)

    _load_others()
    return {name: dict(row) for name, row in _TABLE.items() if _drop_in(row)}


def _drop_in(row: dict[type[nn.Module], Any]) -> bool:
    return all(getattr(getattr(layer, "method_type", Method), "replaces", True) for layer in row.values())


def layer_named(name: str) -> type[Any] | None:
    """The layer of the table with this class name, those of other packages included."""
    for attempt in range(2):
        for row in _TABLE.values():
            for layer in row.values():
                if layer.__name__ == name:
                    return layer
        if attempt == 0:
            _load_others()
    return None


@cache
def _load_others() -> None:
    """Methods of other packages, from the entry points `equipoise.layers`: a `Method` each."""
    for point in entry_points(group="equipoise.layers"):
        try:
            found = point.load()
        except ImportError as error:
            raise InputError(f"the layers of {point.value!r} (entry point of equipoise.layers): {error}") from error
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise InputError(f"the entry point {point.value!r} of equipoise.layers must be a Method, got {found!r}")
        if found.name not in _TABLE:
            layers_of(found)
