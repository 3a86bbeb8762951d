"""Curvature of the loss in the parameters: eigenvalues, traces, densities, sharpness, and the bounds of the thesis, corrected."""

from equipoise.curvature.bounds import (
    HessianBoundReport,
    LayerRow,
    hessian_bound_report,
    last_layer_constants,
    smoothed_loss_bound,
)
from equipoise.curvature.hessian import LossHessian
from equipoise.curvature.measures import (
    Eigenvalue,
    Sharpness,
    SpectralDensity,
    TraceEstimate,
    sharpness,
    spectral_density,
    top_eigenvalue,
    trace,
)

__all__ = [
    "Eigenvalue", "HessianBoundReport", "LayerRow", "LossHessian", "Sharpness", "SpectralDensity", "TraceEstimate",
    "hessian_bound_report", "last_layer_constants", "sharpness", "smoothed_loss_bound",
    "spectral_density", "top_eigenvalue", "trace",
]  # fmt: skip
