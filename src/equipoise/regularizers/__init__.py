"""Training for stability: penalties, projections, noise and flatness, each usable in three lines of a user's own loop."""

from equipoise.regularizers.decay import (
    ActivationDecay,
    LayerwiseDecay,
    SmoothedLoss,
    centred_penalty,
    jensen_penalty,
    smoothed_cross_entropy,
    taylor_penalty,
)
from equipoise.regularizers.noise import (
    add_noise,
    consistency_loss,
    frozen_statistics,
    input_gradient_penalty,
    noisy_copies,
)
from equipoise.regularizers.projections import (
    FrobeniusPenalty,
    OrthogonalityPenalty,
    clip_weights_,
    operator_norm,
    project_,
)
from equipoise.regularizers.selection import select_layers
from equipoise.regularizers.spectral import SpectralPenalty, layer_bound

__all__ = [
    "ActivationDecay", "FrobeniusPenalty", "LayerwiseDecay", "OrthogonalityPenalty",
    "SmoothedLoss", "SpectralPenalty", "add_noise", "centred_penalty",
    "clip_weights_", "consistency_loss", "frozen_statistics", "input_gradient_penalty",
    "jensen_penalty", "layer_bound", "noisy_copies", "operator_norm", "project_", "select_layers",
    "smoothed_cross_entropy", "taylor_penalty",
]  # fmt: skip
