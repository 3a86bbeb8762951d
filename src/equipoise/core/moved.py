"""Names that moved keep working from their old module for one release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def moved(old: str, new: str, names: tuple[str, ...]) -> Callable[[str], Any]:
    """A module's `__getattr__` that looks these names up in the module they moved to.

    >>> get = moved("equipoise.somewhere", "equipoise.core.errors", ("InputError",))
    >>> get("InputError").__name__
    'InputError'
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warnings.warn(f"{old}.{name} is now {new}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(new), name)

    return get
