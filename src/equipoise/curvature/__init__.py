"""Curvature of the loss in the parameters: eigenvalues, traces, densities, sharpness, and the bounds of the thesis, corrected."""

from equipoise.curvature.hessian import LossHessian
from equipoise.curvature.layerwise import HessianBoundReport, LayerRow, hessian_bound_report
from equipoise.curvature.sharpness import (
    Sharpness,
    last_layer_constants,
    sharpness,
    sharpness_of,
    smoothed_curvature,
    smoothed_loss_bound,
)
from equipoise.curvature.spectrum import (
    Eigenvalue,
    SpectralDensity,
    density_of,
    spectral_density,
    top_eigenvalue,
    top_of,
)
from equipoise.curvature.traces import TraceEstimate, trace, trace_of

__all__ = [
    "Eigenvalue", "HessianBoundReport", "LayerRow", "LossHessian", "Sharpness", "SpectralDensity", "TraceEstimate",
    "density_of", "hessian_bound_report", "last_layer_constants", "sharpness", "sharpness_of", "smoothed_curvature",
    "smoothed_loss_bound", "spectral_density", "top_eigenvalue", "top_of", "trace", "trace_of",
]  # fmt: skip
