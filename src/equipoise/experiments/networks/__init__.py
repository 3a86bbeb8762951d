"""Experiments on Lipschitz networks."""
