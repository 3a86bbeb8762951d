"""1-Lipschitz layers that are 1-Lipschitz: in float32 and float64, in training and evaluation, for every input size.

Layers are named `<Method><Plain layer>`, e.g. `SRConv2d`; `methods()` is the table of them, with those that other packages
add through the entry points `equipoise.layers`.
"""

import warnings
from typing import Any

from equipoise.core.modules import by_construction
from equipoise.nn import models
from equipoise.nn.activations import BetaAbs, Contracted, GroupSort, HouseholderActivation, MaxMin
from equipoise.nn.attention import L2Attention
from equipoise.nn.constants import known_constant
from equipoise.nn.effective import Effective
from equipoise.nn.layers import Weighted as _Weighted
from equipoise.nn.layers import layer_named, layers_of, methods
from equipoise.nn.losses import (
    OffsetCrossEntropy,
    emma,
    gloro,
    gloro_logits,
    gloro_trades,
    lipschitz_margin,
    logit_annealing,
    margin_hinge,
    offset_cross_entropy,
)
from equipoise.nn.method import PLAIN as _PLAIN
from equipoise.nn.method import Method
from equipoise.nn.metrics import CertifiedAccuracy, certified_accuracy, certified_radius
from equipoise.nn.normalise import BatchCentering, LastLayerNormalised, LayerCentering
from equipoise.nn.orthogonal import *  # noqa: F403
from equipoise.nn.orthogonal import __all__ as _orthogonal
from equipoise.nn.pooling import (
    DepthToSpace,
    FirstFeatures,
    L2NormPool2d,
    MaxPool2d,
    PadChannels,
    ScaledAvgPool2d,
    ScaledGlobalAvgPool2d,
    SpaceToDepth,
    SpatialShift,
)
from equipoise.nn.rescaling import (
    AOL,
    RLB,
    SN,
    SR,
    AOLConv1d,
    AOLConv2d,
    AOLConv3d,
    AOLConvTranspose2d,
    AOLLinear,
    RLBConv2d,
    RLBLinear,
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
from equipoise.nn.transport import hinge, hkr, kr, soft_hkr, tau_bce
from equipoise.nn.wrappers import ConvexResidual, Lipschitz, Mirrored

#: names of earlier releases that were never meant for users, with where they are now
_EARLIER = {
    "ExportedResidual": ("equipoise.nn.residual", "ExportedResidual"),
    "Kernel": ("equipoise.nn.method", "kernel"),
    "Residual": ("equipoise.nn.residual", "Residual"),
    "Weighted": ("equipoise.nn.layers", "Weighted"),
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _EARLIER:
        module, attribute = _EARLIER[name]
        warnings.warn(f"equipoise.nn.{name} is now {module}.{attribute}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), attribute)
    plain = {f"{kind.__name__}Layer": kind for kind in _PLAIN}.get(name)
    if plain is not None:
        warnings.warn(f"equipoise.nn.{name} is no longer needed: see layers_of", DeprecationWarning, stacklevel=2)
        return type(name, (_Weighted,), {"plain_type": plain})
    layer = None if name.startswith("_") else layer_named(name)
    if layer is None:
        raise AttributeError(f"module 'equipoise.nn' has no attribute {name!r}")
    return layer


__all__ = [
    *_orthogonal, "AOL", "AOLConv1d", "AOLConv2d", "AOLConv3d", "AOLConvTranspose2d", "AOLLinear", "BatchCentering",
    "CPLConv2d", "CPLLinear", "CertifiedAccuracy", "Contracted", "ConvexResidual", "DepthToSpace", "Effective",
    "FirstFeatures", "GroupSort", "HouseholderActivation", "L2Attention", "L2NormPool2d", "LastLayerNormalised",
    "LayerCentering", "Lipschitz", "MaxMin", "MaxPool2d", "Method", "OffsetCrossEntropy", "PadChannels", "RLB",
    "RLBConv2d", "RLBLinear", "SLLConv2d", "SLLLinear", "SN", "SNConv1d", "SNConv2d", "SNConv3d",
    "SNConvTranspose2d", "SNLinear", "SR", "SRConv1d", "SRConv2d", "SRConv3d", "SRConvTranspose2d", "SRLinear",
    "ScaledAvgPool2d", "ScaledGlobalAvgPool2d", "SpaceToDepth", "SpatialShift", "BetaAbs", "Mirrored",
    "by_construction", "certified_accuracy", "certified_radius", "emma", "gloro", "gloro_logits", "gloro_trades",
    "hinge", "hkr", "known_constant", "kr", "layers_of", "lipschitz_margin", "logit_annealing", "margin_hinge",
    "methods", "models", "offset_cross_entropy", "soft_hkr", "tau_bce",
]  # fmt: skip
