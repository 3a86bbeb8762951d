"""What each ONNX operator computes, in torch: one function per operator, in one table.

A function takes the node's record, its inputs (None where one is left out) and its attributes by name, and returns a tensor or a
tuple. Definitions follow ONNX's operator documents for the file's opset; an attribute that is not understood is refused,
never ignored.
"""

import functools
import inspect
import operator as python_operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.onnx.reading import DTYPES, LARGEST_VALUE, Spec

Operator = Callable[..., Tensor | tuple[Tensor, ...]]
Fixed = np.ndarray | None
_TABLE: dict[str, Operator] = {}
_FIXED: dict[str, frozenset[int]] = {}
#: attributes that change no number: hints, sizes that the inputs have too, settings of results that are not given
_WITHOUT_EFFECT = {
    "extrapolation_value", "hidden_size", "momentum", "num_outputs", "qk_matmul_output_mode", "ratio",
    "saturate", "seed", "softmax_precision", "sorted", "stash_type", "storage_order",
}  # fmt: skip
#: the attributes that `**window` stands for in a function's signature
_WINDOW = {"auto_pad", "dilations", "pads", "strides"}


def operator(*kinds: str, fixed: tuple[int, ...] = ()) -> Callable[[Operator], Operator]:
    """Decorator: this function computes these operators; inputs in `fixed` places must be known beforehand and come as arrays."""

    def keep(function: Operator) -> Operator:
        _TABLE.update(dict.fromkeys(kinds, function))
        _FIXED.update(dict.fromkeys(kinds, frozenset(fixed)))
        return function

    return keep


def fixed_inputs(spec: Spec) -> frozenset[int]:
    """Places of the inputs that must not depend on the data."""
    return _FIXED.get(spec.kind, frozenset())


def find_operator(spec: Spec) -> Operator:
    """The function of a node's operator; refused by name where there is none."""
    if spec.kind not in _TABLE:
        raise spec.refuse(
            "this operator is not read (equipoise.onnx.known_operators() lists those that are); "
            "export the network with others, or as a .pt2"
        )
    return _TABLE[spec.kind]


def keywords(spec: Spec) -> dict[str, Any]:
    """A node's attributes as keyword arguments of its function; one that it does not take is refused, never ignored."""
    parameters = inspect.signature(find_operator(spec)).parameters.values()
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names |= _WINDOW
    given = {name: value for name, value in spec.attributes.items() if name not in _WITHOUT_EFFECT}
    odd = sorted(set(given) - names)
    if odd:
        raise spec.refuse(f"attribute {odd[0]!r} is not supported")
    return given


def known_operators() -> tuple[str, ...]:
    """Names of every ONNX operator that is read."""
    return tuple(sorted(_TABLE))


def integers(spec: Spec, value: Fixed, what: str) -> list[int] | None:
    """An input that holds whole numbers (axes, shapes, amounts)."""
    if value is None:
        return None
    if value.dtype.kind not in "iu" or value.ndim > 1:
        raise spec.refuse(f"{what} must be a list of whole numbers")
    return [int(v) for v in value.reshape(-1)]


def number(spec: Spec, value: Fixed, what: str) -> float | None:
    """An input that holds one number."""
    if value is None:
        return None
    if value.size != 1:
        raise spec.refuse(f"{what} must be one number, its shape is {value.shape}")
    return float(value.reshape(()))


def bounded(spec: Spec, shape: list[int]) -> list[int]:
    """A shape that is about to be made, refused where it is out of proportion."""
    total = 1
    for n in shape:
        total *= n
    if total > LARGEST_VALUE or any(n < 0 for n in shape):
        raise spec.refuse(f"its result has the shape {shape}; at most {LARGEST_VALUE} entries are allowed")
    return shape


def _plain(function: Callable[..., Tensor], count: int) -> Operator:
    """An operator without attributes, of so many inputs."""

    def run(spec: Spec, *inputs: Any) -> Tensor:
        if len(inputs) != count:
            raise spec.refuse(f"it has {len(inputs)} inputs, expected {count}")
        return function(*inputs)

    return run


def _divide(a: Any, b: Any) -> Tensor:
    numbers = not isinstance(a, Tensor) or not isinstance(b, Tensor)
    return a / b if numbers or a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


#: what torch calls as ONNX does
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
    "Xor": torch.logical_xor,
}
#: operators whose definition is one expression; what follows the star are attributes with ONNX's defaults
_FORMULAS: dict[str, Operator] = {
    "Where": _plain(torch.where, 3),
    "LeakyRelu": lambda spec, x, *, alpha=0.01: F.leaky_relu(x, alpha),
    "ThresholdedRelu": lambda spec, x, *, alpha=1.0: torch.where(x > alpha, x, torch.zeros_like(x)),
    "Elu": lambda spec, x, *, alpha=1.0: F.elu(x, alpha),
    "Celu": lambda spec, x, *, alpha=1.0: F.celu(x, alpha),
    "Selu": lambda spec, x, *, alpha=1.6732631921768188, gamma=1.0507010221481323: gamma * F.elu(x, alpha),
    "HardSigmoid": lambda spec, x, *, alpha=0.2, beta=0.5: torch.clamp(x * alpha + beta, 0.0, 1.0),
    "Gelu": lambda spec, x, *, approximate="none": F.gelu(x, approximate=approximate),
    "Swish": lambda spec, x, *, alpha=1.0: F.silu(x) if alpha == 1 else F.silu(alpha * x) / alpha,
    "Min": lambda spec, *inputs: functools.reduce(torch.minimum, inputs),
    "Max": lambda spec, *inputs: functools.reduce(torch.maximum, inputs),
    "Sum": lambda spec, *inputs: functools.reduce(torch.add, inputs),
    "Mean": lambda spec, *inputs: functools.reduce(torch.add, inputs) / len(inputs),
    "Mod": lambda spec, a, b, *, fmod=0: torch.fmod(a, b) if fmod else torch.remainder(a, b),
    "Einsum": lambda spec, *inputs, equation="": torch.einsum(equation, *inputs),
    "Concat": lambda spec, *inputs, axis=0: torch.cat(inputs, axis),
    "Shape": lambda spec, x, *, start=0, end=None: torch.tensor(
        [int(n) for n in x.shape][start:end], dtype=torch.int64
    ),
    "Size": lambda spec, x: torch.tensor(x.numel(), dtype=torch.int64),
    "GlobalAveragePool": lambda spec, x: x.mean(list(range(2, x.dim())), True),
    "GlobalMaxPool": lambda spec, x: x.amax(list(range(2, x.dim())), True),
    "GlobalLpPool": lambda spec, x, *, p=2: torch.linalg.vector_norm(x, p, list(range(2, x.dim())), True),
    "LpNormalization": lambda spec, x, *, p=2, axis=-1: x / torch.linalg.vector_norm(x, p, [axis], True),
    "InstanceNormalization": lambda spec, x, scale, shift, *, epsilon=1e-5: F.instance_norm(
        x, None, None, scale, shift, True, 0.0, epsilon
    ),
}
_TABLE.update(_FORMULAS)
_TABLE.update({name: _plain(function, 1) for name, function in _UNARY.items()})
_TABLE.update({name: _plain(function, 2) for name, function in _BINARY.items()})


#: operators for which a constant of one entry is a plain number, as it is in a network written in torch
PLAIN_NUMBERS = frozenset({"Add", "Sub", "Mul", "Div", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})


@operator("Pow", fixed=(1,))
def _power(spec: Spec, x: Tensor, exponent: np.ndarray) -> Tensor:
    if exponent.size == 1 and exponent.ndim <= x.dim():
        return torch.pow(x, exponent.item())
    return torch.pow(x, torch.from_numpy(exponent.copy()))


@operator("Clip", fixed=(1, 2))
def _clip(spec: Spec, x: Tensor, low: Fixed = None, high: Fixed = None, *, min: Any = None, max: Any = None) -> Tensor:
    least = min if low is None else number(spec, low, "the least value")
    most = max if high is None else number(spec, high, "the largest value")
    return x if least is None and most is None else torch.clamp(x, least, most)


@operator("PRelu")
def _prelu(spec: Spec, x: Tensor, slope: Tensor) -> Tensor:
    if slope.numel() == 1:
        return F.prelu(x, slope.reshape(1))
    if x.dim() > 1 and slope.numel() == x.shape[1] and slope.dim() == x.dim() - 1 and slope.shape[0] == x.shape[1]:
        return F.prelu(x, slope.reshape(-1))
    return torch.clamp(x, min=0) + slope * torch.clamp(x, max=0)


@operator("Shrink")
def _shrink(spec: Spec, x: Tensor, *, lambd: float = 0.5, bias: float = 0.0) -> Tensor:
    if bias == lambd >= 0:
        return F.softshrink(x, lambd)
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


@operator("Softmax", "LogSoftmax")
def _softmax(spec: Spec, x: Tensor, *, axis: Any = None) -> Tensor:
    function = F.softmax if spec.kind == "Softmax" else F.log_softmax
    if spec.opset >= 13:
        return function(x, -1 if axis is None else axis)
    axis = (1 if axis is None else axis) % max(1, x.dim())
    if axis == x.dim() - 1:
        return function(x, -1)
    return function(x.flatten(axis), -1).reshape(x.shape)  # all dimensions from `axis` on count as one


@operator("Cast", "CastLike")
def _cast(spec: Spec, x: Tensor, like: Tensor | None = None, *, to: int = 0) -> Tensor:
    target = like.dtype if like is not None else DTYPES.get(to)
    if target is None:
        raise spec.refuse(f"it casts to element type {to}, which rounds or is not a number")
    if target.is_floating_point and x.is_floating_point():
        return x  # the network runs in one floating-point format
    return x.to(target)


@operator("If", fixed=(0,))
def _chosen(spec: Spec, condition: np.ndarray, *results: Tensor) -> tuple[Tensor, ...]:
    """What the branch that was taken gave: the results of both stand one after the other."""
    if condition.size != 1:
        raise spec.refuse(f"its condition must be one value, its shape is {condition.shape}")
    half = len(results) // 2
    return results[:half] if condition.item() else results[half:]


def _reduced(function: Callable[[Tensor, list[int], bool], Tensor]) -> Operator:
    def run(
        spec: Spec,
        x: Tensor,
        given: Fixed = None,
        *,
        axes: Any = None,
        noop_with_empty_axes: int = 0,
        keepdims: int = 1,
    ) -> Tensor:
        chosen = axes if given is None else integers(spec, given, "axes")
        if not chosen:
            if noop_with_empty_axes:
                return x
            chosen = list(range(x.dim()))
        return function(x, [a % max(1, x.dim()) for a in chosen], bool(keepdims))

    return run


def _products(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keep)
    return x


_REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceSum": torch.sum,
    "ReduceMean": torch.mean,
    "ReduceProd": _products,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep),
    "ReduceSumSquare": lambda x, axes, keep: (x * x).sum(axes, keep),
    "ReduceLogSum": lambda x, axes, keep: torch.log(x.sum(axes, keep)),
    "ReduceLogSumExp": torch.logsumexp,
}
for _name, _function in _REDUCE.items():
    operator(_name, fixed=(1,))(_reduced(_function))
