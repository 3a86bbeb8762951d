"""Checks of arguments at the public border: what was expected, what came, what to do. Inside the library they are trusted."""

import sys
from math import inf, isfinite
from typing import Any, get_args

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError, Refused

#: the least positive number allowed where 0 is not
POSITIVE = sys.float_info.min
#: types of class numbers
CLASS_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def describe(value: object) -> str:
    """A value in a few words, for messages.

    >>> describe(None), describe(torch.zeros(2, 3)), describe("abc")
    ('None', 'a torch.float32 tensor of shape (2, 3)', "'abc'")
    """
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    return f"an object of type {type(value).__name__}"


def require_type(value: Any, kind: type | tuple[type, ...], name: str) -> None:
    """Refuse a value that is not of one of these types.

    Args:
        value: what the caller gave.
        kind: the type, or several.
        name: of the argument, for the message.
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise InputError(
            f"{name} must be of type {' or '.join(k.__name__ for k in kinds)}, got {describe(value)}"
        )


def require_one_of(choices: Any, **arguments: object) -> None:
    """Refuse an argument that is not one of the choices.

    Args:
        choices: the allowed values, or a `Literal` of them.
        **arguments: the argument by its name.

    >>> require_one_of(("l1", "linf"), order="l1")
    """
    names = get_args(choices) or tuple(choices)
    for name, value in arguments.items():
        if value not in names:
            raise InputError(f"{name} must be one of {', '.join(names)}, got {value!r}")


def require_positive(**arguments: object) -> None:
    """Refuse what is not a positive finite number, by the name of the argument.

    >>> require_positive(rtol=1e-3)
    """
    for name, value in arguments.items():
        require_number(value, name, least=POSITIVE)


def require_counts(**arguments: object) -> None:
    """Refuse what is not a whole number of at least 1, by the name of the argument.

    >>> require_counts(steps=20)
    """
    for name, value in arguments.items():
        require_number(value, name, least=1, whole=True)


def require_module(model: Any, name: str = "model") -> nn.Module:
    """The model, if it is a PyTorch module.

    Args:
        model: what the caller gave.
        name: of the argument, for the message.
    """
    if not isinstance(model, nn.Module):
        hint = "; give an instance, not the class" if isinstance(model, type) else ""
        raise InputError(f"{name} must be a torch.nn.Module, got {describe(model)}{hint}")
    return model


def require_eval(model: nn.Module) -> None:
    """Refuse a model that is in training mode, or a part of which is."""
    for name, module in model.named_modules():
        if module.training:
            raise Refused(
                f"the model is in training mode ({name or 'the model itself'}): call model.eval() before certifying it"
            )


def require_tensor(x: Any, name: str = "x", *, dims: int | None = None) -> Tensor:
    """The tensor, if it holds finite real floating-point numbers and at least one of them.

    Args:
        x: what the caller gave.
        name: of the argument, for the message.
        dims: the number of dimensions it must have.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_meta:
        raise InputError(f"{name} must be a dense tensor with values, got {describe(x)}")
    if not x.is_floating_point():
        raise InputError(
            f"{name} must hold floating-point numbers, got {describe(x)}; scale it first, e.g. x.float() / 255"
        )
    if x.numel() == 0 or (dims is not None and x.dim() != dims):
        shape = "" if dims is None else f" of {dims} dimension(s)"
        raise InputError(f"{name} must be a tensor{shape}, not empty, got {describe(x)}")
    if not torch.isfinite(x).all():
        raise InputError(f"{name} holds NaN or infinity")
    return x


def require_images(x: Any) -> Tensor:
    """The batch, if it is one: finite floating-point inputs of shape (N, ...), N ≥ 1."""
    if require_tensor(x).dim() < 2:
        raise InputError(
            f"x must be a batch of inputs (N, ...), got {describe(x)}; one input: x[None]"
        )
    return x


def require_labels(labels: Any, count: int, classes: int | None = None) -> Tensor:
    """The labels as int64 (N,), if they are whole numbers from 0 to classes − 1, one per input.

    Args:
        labels: what the caller gave.
        count: how many inputs there are.
        classes: how many classes there are; None: any.
    """
    if not isinstance(labels, Tensor) or labels.dtype not in CLASS_NUMBERS:
        raise InputError(f"labels must be a tensor of class numbers, got {describe(labels)}")
    if tuple(labels.shape) != (count,):
        raise InputError(f"expected {count} labels, one per input, got {describe(labels)}")
    numbers = labels.detach().long()
    if (numbers < 0).any():
        raise InputError("labels must not be negative")
    if classes is not None and (numbers >= classes).any():
        raise InputError(f"labels must lie in 0 … {classes - 1}")
    return numbers


def require_number(
    value: Any, name: str, *, least: float = -inf, most: float = inf, whole: bool = False
) -> float:
    """The number, if it is finite, within its limits and, where asked for, whole.

    Args:
        value: what the caller gave: a Python or NumPy number.
        name: of the argument, for the message.
        least: the smallest value allowed; `POSITIVE` for any positive number.
        most: the largest value allowed.
        whole: whether only integers are allowed.

    >>> require_number(3, "n", least=1, whole=True)
    3
    >>> require_number(0, "radius", least=POSITIVE)
    Traceback (most recent call last):
    ...
    equipoise.core.errors.InputError: radius must be a positive number, got 0
    """
    number = value.item() if getattr(value, "ndim", 1) == 0 else value
    kinds = int if whole else (int, float)
    if (
        isinstance(number, kinds)
        and not isinstance(number, bool)
        and least <= number <= most
        and isfinite(number)
    ):
        return number
    expected = "a whole number" if whole else "a finite number"
    if least == POSITIVE:
        expected = "a positive number"
    elif least > -inf:
        expected += f", at least {least:g}"
    if most < inf:
        expected += f", at most {most:g}"
    raise InputError(f"{name} must be {expected}, got {describe(value)}")
