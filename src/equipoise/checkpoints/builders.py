"""Which models a file may name: the registered builders, with plain JSON arguments, built within a budget of memory.

A checkpoint's `config.json` (or a recipe) is only ever data. The name in it is looked up in a table; it is never imported.
Third parties add rows through the entry point group `equipoise.models`: an entry is loaded only if its very name is asked for.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.core.errors import InputError, Refused
from equipoise.core.imports import guarded

Builder = Callable[..., nn.Module]

#: modules with a table `MODELS` of builders; `module:name` is a row of it
TABLES: tuple[str, ...] = ("equipoise.nn.models",)
#: builders outside those tables
BUILDERS: dict[str, str] = {
    "equipoise.conversion:converted": "equipoise.conversion",
    "equipoise.nn.models:lipschitz_gpt": "equipoise.nn.models",
}
GROUP = "equipoise.models"
_ADDED: dict[str, Builder] = {}
_NAME = re.compile(r"^[A-Za-z_][\w.-]{0,99}$", re.ASCII)
#: what an argument may be at most: an integer, a text, a list, the depth of lists and objects
_INTEGER, _TEXT, _LENGTH, _DEPTH = 2**31, 200, 4096, 4
#: operations that building a model may take per stored tensor, fifty times what it does take
_CALLS = 500


def register_model(name: str, builder: Builder) -> None:
    """Let checkpoints of this process name `builder` by `name`; an installed package uses the entry point group instead.

    >>> register_model("doctest-flatten", lambda: nn.Flatten())
    >>> registered("doctest-flatten")
    True
    """
    if not _NAME.match(name):
        raise InputError(f"a model's name is letters, digits, '_', '.' and '-', at most 100 of them, got {name!r}")
    _ADDED[name] = builder


def registered(name: str) -> bool:
    """Whether a file may name this builder."""
    return name in _ADDED or name in BUILDERS or _row(name) is not None or _entry(name) is not None


def _row(name: str) -> Builder | None:
    """The row of a table of models that `module:name` means; only the tables' own modules are imported."""
    home, _, key = name.partition(":")
    if home not in TABLES:
        return None
    table: Mapping[str, Builder] = importlib.import_module(home).MODELS
    return table.get(key)


def _entry(name: str) -> metadata.EntryPoint | None:
    if not _NAME.match(name):
        return None
    found = tuple(metadata.entry_points(group=GROUP, name=name))
    if len({entry.value for entry in found}) > 1:
        raise Refused(f"several installed packages call their model {name!r}: uninstall all but one")
    return found[0] if found else None


def find_builder(name: str, where: str) -> Builder:
    """The builder that a file names, from the tables, this process or an installed package; anything else is refused."""
    builder = _ADDED.get(name) or _row(name)
    if builder is not None:
        return builder
    if name in BUILDERS:
        made: Builder = getattr(importlib.import_module(BUILDERS[name]), name.partition(":")[2])
        return made
    entry = _entry(name)
    if entry is None:
        raise Refused(
            f"{where} asks for {name[:100]!r}, which is no registered model: a file names the builders of equipoise.nn.models "
            f"or of installed packages (entry points {GROUP}), never other code"
        )
    loaded = guarded(entry.load, f"the model {name!r} of {entry.value!r}")
    if not callable(loaded):
        raise InputError(f"the entry point {entry.value!r} of the model {name!r} is not callable")
    return loaded


def build_registered(
    name: str, arguments: Any, where: str, elements: int | None = None, tensors: int = 2000
) -> nn.Module:
    """The registered model, in evaluation mode, within what its weights file holds.

    Args:
        name: of the builder.
        arguments: plain JSON.
        where: what error messages call the file.
        elements: how many numbers the weights file holds; None: no limit.
        tensors: in how many tensors.
    """
    builder = find_builder(name, where)
    given = check_arguments(arguments, where)
    with Budget(elements, where, _CALLS * (tensors + 20)):
        made = guarded(lambda: builder(**given), f"{where}: {name!r} with these arguments")
    if not isinstance(made, nn.Module):
        raise InputError(f"{name!r} gave a {type(made).__name__}, not an nn.Module")
    return made.eval()


def check_arguments(arguments: Any, where: str, most: int = _INTEGER) -> dict[str, Any]:
    """The arguments if they are plain JSON of sensible size: texts, numbers, truth values, null, lists and objects of them.

    `most` bounds whole numbers: what a file says must not make Python count for minutes.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise InputError(f"{where}: arguments must be an object of names and values, got {type(arguments).__name__}")
    for key, value in arguments.items():
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("__"):
            raise InputError(f"{where}: {str(key)[:60]!r} is no name of an argument")
        _check_value(value, f"{where}: the argument {key!r}", _DEPTH, min(most, _INTEGER))
    return dict(arguments)


def _check_value(value: Any, what: str, depth: int, most: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if abs(value) > most:
            raise Refused(f"{what} holds a whole number beyond ±{most:,}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{what} is not a finite number")
    elif isinstance(value, str):
        if len(value) > _TEXT:
            raise Refused(f"{what} is a text of {len(value):,} letters, at most {_TEXT} are read")
    elif isinstance(value, list | tuple | dict):
        if depth == 0 or len(value) > _LENGTH:
            raise Refused(f"{what} is nested deeper than {_DEPTH} or longer than {_LENGTH:,}")
        for item in value.values() if isinstance(value, dict) else value:
            _check_value(item, what, depth - 1, most)
    else:
        raise InputError(f"{what} is a {type(value).__name__}, expected plain numbers, texts and lists")


class Budget(TorchDispatchMode):
    """Stops a builder that allocates far more than the weights it is built for: a few letters must not fill the memory.

    Room for 4 times the stored numbers and 2²⁴ more (initialisation works on copies), and for so many calls of operations.
    """

    def __init__(self, elements: int | None, where: str, calls: int) -> None:
        super().__init__()
        self.room = math.inf if elements is None else 4 * elements + 2**24
        self.calls = math.inf if elements is None else calls
        self.where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        size = _requested(func, args)
        self.room -= size
        self.calls -= 1
        if self.room < 0 or self.calls < 0:
            raise Refused(
                f"{self.where} asks for a network far larger than its weights file: its arguments do not belong to it"
            )
        return func(*args, **(kwargs or {}))


def _requested(func: Any, args: Any) -> int:
    """How many numbers a factory function is asked for, squares such as `eye(n)` included; 0 for operations on tensors."""
    if any(isinstance(a, torch.Tensor) for a in args):
        return 0
    sizes = args[0] if args and isinstance(args[0], list | tuple) else args
    whole = [abs(n) for n in sizes if isinstance(n, int) and not isinstance(n, bool)]
    if sizes is not args:
        return math.prod(whole)
    square = any(word in str(func) for word in ("eye", "tril_indices", "triu_indices"))
    return max(whole, default=0) ** (2 if square else 1)
