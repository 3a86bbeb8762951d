"""Experiments on spectral norms."""
