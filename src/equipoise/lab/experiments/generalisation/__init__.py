"""Experiments on generalisation."""
