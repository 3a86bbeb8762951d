"""1-Lipschitz layers that are 1-Lipschitz: in float32 and float64, in training and evaluation, for every input size.

Layers are named `<Family><Plain layer>`, e.g. `SRConv2d`: a plain layer whose weight has a parametrization. The same for existing
layers: `utils.parametrizations`. Losses are in `losses`, networks in `models`.
"""

from equipoise.core import by_construction
from equipoise.nn import losses, models, utils
from equipoise.nn.activations import BetaAbs, GroupSort, HouseholderActivation, MaxMin
from equipoise.nn.attention import ConvexAttention, L2Attention
from equipoise.nn.losses import CertifiedAccuracy
from equipoise.nn.normalise import BatchCentering, LastLayerNormalised, LayerCentering
from equipoise.nn.orthogonal.cayley import (
    BROConv2d,
    BROLinear,
    CayleyConv2d,
    CayleyConvTranspose2d,
    CayleyLinear,
)
from equipoise.nn.orthogonal.polar import (
    BCOPConv1d,
    BCOPConv2d,
    BCOPConv3d,
    BCOPConvTranspose2d,
    BCOPLinear,
    BjorckConv2d,
    BjorckLinear,
    RKOConv1d,
    RKOConv2d,
    RKOConv3d,
    RKOConvTranspose2d,
    RKOLinear,
)
from equipoise.nn.orthogonal.soc import SOCConv2d, SOCConvTranspose2d, SOCLinear
from equipoise.nn.pooling import (
    DepthToSpace,
    L2NormPool2d,
    MaxPool2d,
    PadChannels,
    ScaledAvgPool2d,
    ScaledGlobalAvgPool2d,
    SpaceToDepth,
)
from equipoise.nn.rescaling import (
    AOLConv1d,
    AOLConv2d,
    AOLConv3d,
    AOLConvTranspose2d,
    AOLLinear,
    SNConv1d,
    SNConv2d,
    SNConv3d,
    SNConvTranspose2d,
    SNLinear,
    SRConv1d,
    SRConv2d,
    SRConv3d,
    SRConvTranspose2d,
    SRLinear,
)
from equipoise.nn.residual import CPLConv2d, CPLLinear, SLLConv2d, SLLLinear
from equipoise.nn.wrappers import ConvexResidual, Lipschitz, Mirrored, known_constant

__all__ = [
    "AOLConv1d",
    "AOLConv2d",
    "AOLConv3d",
    "AOLConvTranspose2d",
    "AOLLinear",
    "BCOPConv1d",
    "BCOPConv2d",
    "BCOPConv3d",
    "BCOPConvTranspose2d",
    "BCOPLinear",
    "BROConv2d",
    "BROLinear",
    "BatchCentering",
    "BetaAbs",
    "BjorckConv2d",
    "BjorckLinear",
    "CPLConv2d",
    "CPLLinear",
    "CayleyConv2d",
    "CayleyConvTranspose2d",
    "CayleyLinear",
    "CertifiedAccuracy",
    "ConvexAttention",
    "ConvexResidual",
    "DepthToSpace",
    "GroupSort",
    "HouseholderActivation",
    "L2Attention",
    "L2NormPool2d",
    "LastLayerNormalised",
    "LayerCentering",
    "Lipschitz",
    "MaxMin",
    "MaxPool2d",
    "Mirrored",
    "PadChannels",
    "RKOConv1d",
    "RKOConv2d",
    "RKOConv3d",
    "RKOConvTranspose2d",
    "RKOLinear",
    "SLLConv2d",
    "SLLLinear",
    "SNConv1d",
    "SNConv2d",
    "SNConv3d",
    "SNConvTranspose2d",
    "SNLinear",
    "SOCConv2d",
    "SOCConvTranspose2d",
    "SOCLinear",
    "SRConv1d",
    "SRConv2d",
    "SRConv3d",
    "SRConvTranspose2d",
    "SRLinear",
    "ScaledAvgPool2d",
    "ScaledGlobalAvgPool2d",
    "SpaceToDepth",
    "by_construction",
    "known_constant",
    "losses",
    "models",
    "utils",
]
