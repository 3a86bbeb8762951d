"""Optional packages, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from equipoise.core import InputError


def optional(module: str, package: str, purpose: str) -> Any:
    """An optional package, imported when it is needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{purpose} needs {package}: pip install 'equipoise[data]'") from error
