"""Which models a file may name: the registered builders, with plain JSON arguments, built within a budget of memory.

A checkpoint's `config.json` (or a recipe) is only ever data. The name in it is looked up in a table; it is never imported.
Third parties add rows through the entry point group `equipoise.models`: an entry is loaded only if a file names it.
"""

import importlib
import math
from collections.abc import Callable
from importlib import metadata
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.core import InputError, Refused, flat_tensors, guarded

Builder = Callable[..., nn.Module]

#: the module whose table `MODELS` lists builders; `module:name` is a row of it
_HOME = "equipoise.nn.models"
#: builders of the library outside of that table
_OTHERS = ("equipoise.conversion:converted",)
GROUP = "equipoise.models"
_ADDED: dict[str, Builder] = {}
#: what an argument may be at most: a number, a text, a list
_INTEGER = 2**31
_TEXT = 200
_LENGTH = 4096
#: operations that building a model may take per stored tensor, fifty times what it does take
_CALLS = 500


def register_model(name: str, builder: Builder) -> None:
    """Let checkpoints of this process name `builder` by `name`; an installed package uses the entry point group instead.

    Args:
        name: for `factory` in `config.json`.
        builder: called with the checkpoint's arguments; returns a module.

    >>> register_model("doctest-flatten", lambda: nn.Flatten())
    >>> registered("doctest-flatten")
    True
    """
    _ADDED[name] = builder


def registered(name: str) -> bool:
    """Whether a file may name this builder."""
    return _find(name) is not None


def _find(name: str) -> Builder | None:
    """A builder of this process, of the library, or of an installed package; no other module is imported."""
    home, _, key = name.partition(":")
    if name in _ADDED:
        return _ADDED[name]
    if name in _OTHERS:
        return getattr(importlib.import_module(home), key)
    if home == _HOME:
        return importlib.import_module(home).MODELS.get(key)
    for entry in metadata.entry_points(group=GROUP, name=name):
        return guarded(entry.load, f"the model {name!r} of {entry.value!r}")
    return None


def build_registered(
    name: str, arguments: Any, where: str, elements: float = math.inf, tensors: float = math.inf
) -> nn.Module:
    """The registered model, in evaluation mode, within what its weights file holds.

    Args:
        name: of the builder.
        arguments: plain JSON.
        where: what error messages call the file.
        elements: how many numbers the weights file holds.
        tensors: in how many tensors.
    """
    builder = _find(name)
    if builder is None:
        raise Refused(
            f"{where} asks for {name[:100]!r}, which is no registered model: a file names the builders of {_HOME} "
            f"or of installed packages (entry points {GROUP}), never other code"
        )
    checked = check_arguments(arguments, where)
    with Budget(elements, where, tensors):
        model = guarded(lambda: builder(**checked), f"{where}: {name!r} with these arguments")
    if not isinstance(model, nn.Module):
        raise InputError(f"{name!r} gave a {type(model).__name__}, not an nn.Module")
    return model.eval()


def check_arguments(arguments: Any, where: str, most: int = _INTEGER) -> dict[str, Any]:
    """The arguments if they are plain JSON of sensible size: texts, numbers, truth values, null, lists and objects of them.

    Args:
        arguments: an object of names and values, or None for none.
        where: what error messages call the file.
        most: bounds whole numbers, so that nothing in a file makes Python count for minutes.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise InputError(
            f"{where}: arguments must be an object of names and values, got {type(arguments).__name__}"
        )
    for key, value in arguments.items():
        if not key.isidentifier() or key.startswith("__"):
            raise InputError(f"{where}: {key[:60]!r} is no name of an argument")
        leaves = pytree.tree_leaves(value)
        plain = [  # NaN is not
            len(leaf) <= _TEXT if isinstance(leaf, str) else abs(leaf or 0) <= min(most, _INTEGER)
            for leaf in leaves
        ]
        if not all(plain) or len(leaves) > _LENGTH:
            raise Refused(
                f"{where}: the argument {key!r} must be a number within ±{most:,}, a text of at most {_TEXT} letters, or lists "
                f"and objects of at most {_LENGTH:,} of them"
            )
    return dict(arguments)


class Budget(TorchDispatchMode):
    """Stops a builder that allocates far more than the weights it is built for: a few letters must not fill the memory.

    Allowed are 4 times the stored numbers and 2²⁴ more (initialization works on copies), and `_CALLS` operations per tensor.
    """

    def __init__(self, elements: float, where: str, tensors: float) -> None:
        super().__init__()
        self.elements = 4 * elements + 2**24
        self.calls = _CALLS * (tensors + 20)
        self.where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls -= 1
        new = not flat_tensors(args) and any(
            argument.name == "device" for argument in func._schema.arguments
        )
        if new:  # made without memory first, to know its size
            self.elements -= func(*args, **{**kwargs, "device": "meta"}).numel()
        if self.elements < 0 or self.calls < 0:
            raise Refused(
                f"{self.where} asks for a network far larger than its weights file: its arguments do not belong to it"
            )
        return func(*args, **kwargs)
