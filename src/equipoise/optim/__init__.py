"""Spectral control while training: norms held at a radius by any optimizer, proved after every step."""

from equipoise.optim.guard import SpectralGuard

__all__ = ["SpectralGuard"]
