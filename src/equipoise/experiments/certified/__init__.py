"""Experiments on certificates."""
