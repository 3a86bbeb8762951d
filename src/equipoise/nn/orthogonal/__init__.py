"""Orthogonal layers (Cayley, BRO, SOC, BCOP, RKO, Björck): 1-Lipschitz throughout."""
