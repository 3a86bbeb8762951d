"""Orthogonal layers (Cayley, BRO, CHORD, SOC, BCOP, RKO, Björck, Householder) and sandwich layers: 1-Lipschitz throughout."""
