"""Spectral control while training: norms and attention logits held by any optimizer, proved after every step."""

from equipoise.optim.guard import SpectralGuard
from equipoise.optim.muon import Muon, add_lookahead
from equipoise.optim.norms import norms
from equipoise.optim.qk import Attention, Projection, QKGuard

__all__ = ["Attention", "Muon", "Projection", "QKGuard", "SpectralGuard", "add_lookahead", "norms"]
