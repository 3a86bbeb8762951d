"""Spectral control while training: norms held at a radius by any optimizer, proved after every step."""

from equipoise.optim.guard import SpectralGuard
from equipoise.optim.muon import Muon, add_lookahead

__all__ = ["Muon", "SpectralGuard", "add_lookahead"]
