"""Spectral norms with a guarantee: brackets for matrices and convolutions, differentiable bounds, and the alternatives."""

from equipoise.norms.gram import dominant_pair, gram_norm_plain
from equipoise.norms.reference import norm2_toep, operator_matrix, reference_norm
from equipoise.norms.spectral import spectral_norm

__all__ = [
    "dominant_pair", "gram_norm_plain", "norm2_toep", "operator_matrix", "reference_norm",
    "spectral_norm",
]  # fmt: skip
