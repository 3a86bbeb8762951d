"""Orthogonal layers (Cayley, SOC, BCOP, RKO, Björck, Householder) and the sandwich layer: 1-Lipschitz for every raw weight."""

from equipoise.nn.orthogonal.bcop import BCOP, BCOPConv1d, BCOPConv2d, BCOPConvTranspose2d, BCOPLinear
from equipoise.nn.orthogonal.cayley import Cayley, CayleyConv2d, CayleyLinear, SpectralConv2d
from equipoise.nn.orthogonal.householder import Householder, HouseholderLinear
from equipoise.nn.orthogonal.rko import (
    RKO,
    Bjorck,
    BjorckConv2d,
    BjorckLinear,
    RKOConv1d,
    RKOConv2d,
    RKOConvTranspose2d,
    RKOLinear,
)
from equipoise.nn.orthogonal.sandwich import Sandwich, SandwichConv2d, SandwichLinear, SpectralSandwich2d
from equipoise.nn.orthogonal.soc import SOC, SkewSeries, SOCConv2d, SOCLinear

__all__ = [
    "BCOP",
    "RKO",
    "SOC",
    "BCOPConv1d",
    "BCOPConv2d",
    "BCOPConvTranspose2d",
    "BCOPLinear",
    "Bjorck",
    "BjorckConv2d",
    "BjorckLinear",
    "Cayley",
    "CayleyConv2d",
    "CayleyLinear",
    "Householder",
    "HouseholderLinear",
    "RKOConv1d",
    "RKOConv2d",
    "RKOConvTranspose2d",
    "RKOLinear",
    "SOCConv2d",
    "SOCLinear",
    "Sandwich",
    "SandwichConv2d",
    "SandwichLinear",
    "SkewSeries",
    "SpectralConv2d",
    "SpectralSandwich2d",
]
