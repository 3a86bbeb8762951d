"""How fast the difference of two outputs can change: constants by pairs of classes, for networks that end in a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.core.precision import gamma, row_lengths, up
from equipoise.lipschitz.logs import exp_up, log_product, log_up
from equipoise.lipschitz.propagate import Propagation
from equipoise.maps.linear import Matrix


def pair_constants(run: Propagation) -> Tensor | None:
    """`L'·‖w_i − w_j‖`, rounded up, float64 (classes, classes): upper bounds of the constants of `f_i − f_j`.

    w are the rows of the linear run at the end of the network, in which neighbouring linear maps are composed, and L' is
    the proved bound of what comes before it. None where the network has several outputs or ends in another operation.

    Reference: Tsuzuku, Sato, Sugiyama (2018), section 4.1.
    """
    if len(run.program.outputs) != 1:
        return None
    output = run.program.outputs[0]
    facts = run.facts[output]
    shape = tuple(output.meta["val"].shape)
    if not isinstance(facts.form, Matrix) or facts.base is None or len(shape) != 2:
        return None
    weight = facts.form.matrix.detach().double()
    if weight.shape[0] != shape[1]:  # a batch of several samples in one matrix
        return None
    trunk = exp_up(log_product(run.facts[facts.base].fused, log_up(1.0)))
    apart = _distances(weight)
    rounding = 2.0**-52 * row_lengths(weight).max()
    return up((apart + rounding + 2 * facts.form.error) * trunk)


def _distances(weight: Tensor) -> Tensor:
    """`‖w_i − w_j‖`, rounded up: from the Gram matrix, and by differences where that would cancel.

    Computed inner products of length m are off by γ_m·‖w_i‖·‖w_j‖ at most, so `‖w_i‖² + ‖w_j‖² − 2⟨w_i, w_j⟩` by
    2γ·(‖w_i‖² + ‖w_j‖²): at most 16γ of itself where it exceeds an eighth of that sum.
    """
    gram = weight @ weight.mT
    size = gram.diagonal()
    both = size[:, None] + size[None]
    squared = both - 2 * gram
    safe = (squared > both / 8) & (both > 1e-200) & (both < 1e200)
    error = 16 * gamma(weight.shape[1] + 8, torch.float64)
    apart = up((squared.clamp_min(0) * (1 + 2 * error)).sqrt())
    for i in (~safe).any(1).nonzero().flatten().tolist():
        rest = ~safe[i]
        apart[i, rest] = row_lengths(weight[rest] - weight[i])
    return apart.fill_diagonal_(0.0)
