"""What each ONNX operator computes, in torch: one function per operator, in one table.

A function takes the node's record, its inputs by position (None where one is left out) and its attributes by name, and returns a
tensor or a tuple. Definitions follow ONNX's operator documents for the file's opset; an attribute that is not understood is
refused, never ignored.

An input whose parameter is annotated as a number, a list of numbers or an array must be known before the network runs. Where an
earlier opset has it as an attribute instead, the attribute of that name takes its place.
"""

import functools
import inspect
import math
import operator as python_operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.onnx.reading import DTYPES, LARGEST_VALUE, Spec

Operator = Callable[..., Any]


def _integers(value: np.ndarray) -> list[int]:
    if value.dtype.kind not in "iu" or value.ndim > 1:
        raise ValueError(
            f"expected a list of whole numbers, got {value.dtype} of shape {value.shape}"
        )
    return [int(v) for v in value.reshape(-1)]


#: how an input that must be known beforehand is read, by the annotation of its parameter
_READERS: Mapping[Any, Callable[[np.ndarray], Any]] = {
    float: lambda value: float(value.item()),
    list[int]: _integers,
    list[float]: lambda value: [float(v) for v in value.reshape(-1)],
    np.ndarray: np.asarray,
}
_READERS = {**_READERS, **{kind | None: reader for kind, reader in _READERS.items()}}
_TABLE: dict[str, Operator] = {}
#: attributes that change no number: hints, sizes that the inputs have too, settings of results that are not computed
_WITHOUT_EFFECT = {
    "extrapolation_value", "momentum", "num_outputs", "ratio", "saturate", "seed",
    "stash_type", "storage_order",
}  # fmt: skip
#: the attributes that `**window` stands for in a function's signature
_WINDOW = {"auto_pad", "dilations", "kernel_shape", "pads", "strides"}


def operator(*kinds: str) -> Callable[[Operator], Operator]:
    """Decorator: this function computes these operators."""

    def register(function: Operator) -> Operator:
        _TABLE.update(dict.fromkeys(kinds, function))
        return function

    return register


def find_operator(spec: Spec) -> Operator:
    """The function of a node's operator; refused by name where there is none."""
    if spec.kind not in _TABLE:
        raise spec.refuse(
            "this operator is not read (equipoise.onnx.known_operators() lists those that are); "
            "export the network with others, or as a .pt2"
        )
    return _TABLE[spec.kind]


@functools.cache
def _parameters(function: Operator) -> tuple[inspect.Parameter, ...]:
    """The parameters of an operator after the node's record."""
    return tuple(inspect.signature(function).parameters.values())[1:]


def input_readers(spec: Spec) -> list[Callable[[np.ndarray], Any] | None]:
    """For each input of a node how it is read beforehand, None for a tensor."""
    readers = [_READERS.get(parameter.annotation) for parameter in _parameters(find_operator(spec))]
    return (readers + [None] * len(spec.inputs))[: len(spec.inputs)]


def require_attributes(spec: Spec) -> dict[str, Any]:
    """A node's attributes as keyword arguments of its function; one that it does not take is refused, never ignored."""
    taken = set()
    for parameter in _parameters(find_operator(spec)):
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.annotation in _READERS:
            taken.add(parameter.name)
        elif parameter.kind is parameter.VAR_KEYWORD:
            taken |= _WINDOW
    attributes = {
        name: value for name, value in spec.attributes.items() if name not in _WITHOUT_EFFECT
    }
    unknown = [name for name in attributes if name not in taken]
    if unknown:
        raise spec.refuse(f"attribute {unknown[0]!r} is not supported")
    return attributes


def known_operators() -> tuple[str, ...]:
    """Names of every ONNX operator that is read."""
    return tuple(sorted(_TABLE))


def bounded(spec: Spec, shape: list[int]) -> list[int]:
    """A shape that is about to be made, refused where it is out of proportion.

    Args:
        spec: the node.
        shape: of its result.
    """
    if math.prod(shape) > LARGEST_VALUE or min([0, *shape]) < 0:
        raise spec.refuse(
            f"its result has the shape {shape}; at most {LARGEST_VALUE} entries are allowed"
        )
    return shape


# ---- elementwise --------------------------------------------------------------------------------------------------------


def _plain(function: Callable[..., Tensor], count: int) -> Operator:
    """An operator without attributes, of so many inputs."""

    def run(spec: Spec, *inputs: Any) -> Tensor:
        if len(inputs) != count:
            raise spec.refuse(f"it has {len(inputs)} inputs, expected {count}")
        return function(*inputs)

    return run


def _divide(a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and not a.is_floating_point():
        return torch.div(a, b, rounding_mode="trunc")
    return a / b


#: functions that torch has under the same name
_SAME_NAME = (
    "Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh",
    "Asin", "Acos", "Atanh", "Acosh", "Asinh", "Erf", "Floor", "Ceil", "Round", "Sign",
)  # fmt: skip
_UNARY: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in _SAME_NAME},
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "HardSwish": F.hardswish,
    "Mish": F.mish,
    "Not": torch.logical_not,
    "Identity": lambda x: x,
    "Size": lambda x: torch.tensor(x.numel(), dtype=torch.int64),
    "GlobalAveragePool": lambda x: x.mean(list(range(2, x.dim())), True),
    "GlobalMaxPool": lambda x: x.amax(list(range(2, x.dim())), True),
}
_BINARY: dict[str, Callable[..., Tensor]] = {
    "Add": python_operator.add,
    "Sub": python_operator.sub,
    "Mul": python_operator.mul,
    "Div": _divide,
    "MatMul": torch.matmul,
    "Equal": torch.eq,
    "Greater": python_operator.gt,
    "GreaterOrEqual": python_operator.ge,
    "Less": python_operator.lt,
    "LessOrEqual": python_operator.le,
    "And": torch.logical_and,
    "Or": torch.logical_or,
}
#: operators whose definition is one expression; what follows the star are attributes with ONNX's defaults
_FORMULAS: dict[str, Operator] = {
    "Where": _plain(torch.where, 3),
    "LeakyRelu": lambda spec, x, *, alpha=0.01: F.leaky_relu(x, alpha),
    "Elu": lambda spec, x, *, alpha=1.0: F.elu(x, alpha),
    "Selu": lambda spec, x, *, alpha=1.6732631921768188, gamma=1.0507010221481323: (
        gamma * F.elu(x, alpha)
    ),
    "HardSigmoid": lambda spec, x, *, alpha=0.2, beta=0.5: torch.clamp(x * alpha + beta, 0.0, 1.0),
    "Gelu": lambda spec, x, *, approximate="none": F.gelu(x, approximate=approximate),
    "Min": lambda spec, *inputs: functools.reduce(torch.minimum, inputs),
    "Max": lambda spec, *inputs: functools.reduce(torch.maximum, inputs),
    "Sum": lambda spec, *inputs: functools.reduce(torch.add, inputs),
    "Mod": lambda spec, a, b, *, fmod=0: (torch.fmod if fmod else torch.remainder)(a, b),
    "Einsum": lambda spec, *inputs, equation="": torch.einsum(equation, *inputs),
    "Concat": lambda spec, *inputs, axis=0: torch.cat(inputs, axis),
    "Shape": lambda spec, x, *, start=0, end=None: torch.tensor(
        list(x.shape)[start:end], dtype=torch.int64
    ),
    "InstanceNormalization": lambda spec, x, scale, shift, *, epsilon=1e-5: F.instance_norm(
        x, None, None, scale, shift, True, 0.0, epsilon
    ),
}
_TABLE.update(_FORMULAS)
_TABLE.update({name: _plain(function, 1) for name, function in _UNARY.items()})
_TABLE.update({name: _plain(function, 2) for name, function in _BINARY.items()})

#: operators for which a constant of one entry is a plain number, as it is in a network written in torch
PLAIN_NUMBERS = frozenset(
    {"Add", "Sub", "Mul", "Div", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
)


@operator("Pow")
def _power(spec: Spec, x: Tensor, exponent: np.ndarray) -> Tensor:
    if exponent.size == 1 and exponent.ndim <= x.dim():
        return torch.pow(x, exponent.item())
    return torch.pow(x, torch.from_numpy(exponent.copy()))


@operator("Clip")
def _clip(spec: Spec, x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return x if min is None and max is None else torch.clamp(x, min, max)


@operator("PRelu")
def _prelu(spec: Spec, x: Tensor, slope: Tensor) -> Tensor:
    if slope.numel() == 1:
        return F.prelu(x, slope.reshape(1))
    if slope.dim() == x.dim() - 1 and slope.numel() == slope.shape[0] == x.shape[1]:
        return F.prelu(x, slope.reshape(-1))
    return torch.clamp(x, min=0) + slope * torch.clamp(x, max=0)


@operator("Softmax", "LogSoftmax")
def _softmax(spec: Spec, x: Tensor, *, axis: int | None = None) -> Tensor:
    function = F.softmax if spec.kind == "Softmax" else F.log_softmax
    if spec.opset >= 13:
        return function(x, -1 if axis is None else axis)
    axis = (1 if axis is None else axis) % max(1, x.dim())
    if axis == x.dim() - 1:
        return function(x, -1)
    # all dimensions from `axis` on count as one
    return function(x.flatten(axis), -1).reshape(x.shape)


@operator("Cast")
def _cast(spec: Spec, x: Tensor, *, to: int = 0) -> Tensor:
    target = DTYPES.get(to)
    if target is None:
        raise spec.refuse(f"it casts to element type {to}, which rounds or is not a number")
    if target.is_floating_point and x.is_floating_point():
        return x  # the network runs in one floating-point format
    return x.to(target)


# ---- reductions ---------------------------------------------------------------------------------------------------------


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Operator:
    def run(
        spec: Spec,
        x: Tensor,
        axes: list[int] | None = None,
        *,
        noop_with_empty_axes: int = 0,
        keepdims: int = 1,
    ) -> Tensor:
        if not axes and noop_with_empty_axes:
            return x
        reduced = [axis % max(1, x.dim()) for axis in axes or range(x.dim())]
        return function(x, reduced, bool(keepdims))

    return run


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keep)
    return x


_REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceSum": torch.sum,
    "ReduceMean": torch.mean,
    "ReduceProd": _product,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep),
    "ReduceSumSquare": lambda x, axes, keep: (x * x).sum(axes, keep),
    "ReduceLogSumExp": torch.logsumexp,
}
_TABLE.update({name: _reduction(function) for name, function in _REDUCE.items()})
