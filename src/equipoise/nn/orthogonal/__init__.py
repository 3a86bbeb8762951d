"""Orthogonal layers (Cayley, BRO, CHORD, SOC, BCOP, RKO, Björck, Householder) and sandwich layers: 1-Lipschitz throughout."""

from equipoise.nn.orthogonal.bcop import (
    BCOP,
    RKO,
    AOCConv1d,
    AOCConv2d,
    AOCConvTranspose2d,
    BCOPConv1d,
    BCOPConv2d,
    BCOPConv3d,
    BCOPConvTranspose2d,
    BCOPLinear,
    Bjorck,
    BjorckConv2d,
    BjorckLinear,
    RKOConv1d,
    RKOConv2d,
    RKOConv3d,
    RKOConvTranspose2d,
    RKOLinear,
)
from equipoise.nn.orthogonal.cayley import Cayley, CayleyConv2d, CayleyConvTranspose2d, CayleyLinear, SpectralConv2d
from equipoise.nn.orthogonal.polar import Householder, HouseholderLinear
from equipoise.nn.orthogonal.reflect import BRO, CHORD, BROConv2d, BROLinear, CHORDConv2d, CHORDLinear
from equipoise.nn.orthogonal.sandwich import Sandwich, SandwichConv2d, SandwichLinear, SpectralSandwich2d
from equipoise.nn.orthogonal.soc import SOC, SkewSeries, SOCConv2d, SOCConvTranspose2d, SOCLinear

__all__ = [
    "BCOP", "BRO", "CHORD", "RKO", "SOC", "AOCConv1d", "AOCConv2d", "AOCConvTranspose2d", "BCOPConv1d",
    "BCOPConv2d", "BCOPConv3d", "BCOPConvTranspose2d", "BCOPLinear", "BROConv2d", "BROLinear", "Bjorck",
    "BjorckConv2d", "BjorckLinear", "CHORDConv2d", "CHORDLinear", "Cayley", "CayleyConv2d", "CayleyConvTranspose2d",
    "CayleyLinear", "Householder", "HouseholderLinear", "RKOConv1d", "RKOConv2d", "RKOConv3d", "RKOConvTranspose2d",
    "RKOLinear", "SOCConv2d", "SOCConvTranspose2d", "SOCLinear", "Sandwich", "SandwichConv2d", "SandwichLinear",
    "SkewSeries", "SpectralConv2d", "SpectralSandwich2d",
]  # fmt: skip
