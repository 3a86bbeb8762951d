"""Tools for existing layers."""

from equipoise.nn.utils import parametrizations

__all__ = ["parametrizations"]
