"""Older place of the rescaling layers, for one more release: they are in `equipoise.nn`."""

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    from equipoise.nn import rescaling

    if name.startswith("_") or not hasattr(rescaling, name):
        raise AttributeError(f"module 'equipoise.nn.named' has no attribute {name!r}")
    warnings.warn(f"equipoise.nn.named.{name} is now equipoise.nn.{name}", DeprecationWarning, stacklevel=2)
    return getattr(rescaling, name)
