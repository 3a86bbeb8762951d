"""Proved curvature: the layer-wise bound of the Gauss–Newton matrix, and the bound of a smoothed loss.

The thesis bounds `‖∇²L‖` by sensitivities of the penultimate activations times the curvature there. Two things need care:

* the loss also depends on the last layer's weights directly, which that factorisation leaves out (the bound fails by any factor);
* `∇²L = JᵀBJ + Σ_k (∂ℓ/∂z_k)·∇²z_k`: only the first term, the Gauss–Newton matrix, is bounded; they agree where the gradient in
  the logits is zero, which cross-entropy with hard labels never reaches.

So here J is the Jacobian of the *logits* with respect to *all* weights, and the bound is one of the Gauss–Newton matrix.

The bound of the smoothed curvature needs the gradient to be small *everywhere* the noise can reach, not only at the minimum:
for `L = ½H·θ²` the gradient vanishes at 0, yet smoothing leaves the curvature H as it is.
"""

from dataclasses import dataclass
from math import erf, inf, nextafter, pi, sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.core import (
    Bound,
    InputError,
    Kind,
    Refused,
    format_up,
    gamma,
    hooked,
    inflate,
    require_labels,
    require_number,
    require_one_of,
    require_tensor,
)
from equipoise.curvature.hessian import Data, LossHessian
from equipoise.maps.pointwise import read_activation
from equipoise.norms.spectral import spectral_norm

#: relative allowance for the rounding of float64 sums of squares and products
_ROUNDING = 1 + 1e-9
Chain = list[tuple[str, nn.Module]]


@dataclass(frozen=True)
class LayerRow:
    """One layer: its norm, the constant from its output to the logits, and its share of the squared Jacobian norm."""

    name: str
    norm: float
    downstream: float
    sensitivity: float
    share: float


@dataclass(frozen=True)
class HessianBoundReport:
    """`gauss_newton` is an upper bound of the norm of the Gauss–Newton matrix; it bounds the Hessian where `logit_gradient` is 0.

    `logit_gradient` is the largest ‖∂ℓ/∂z‖ over the data.
    """

    gauss_newton: float
    logit_gradient: float
    rows: tuple[LayerRow, ...]

    @property
    def bounds_hessian(self) -> bool:
        """Whether the bound speaks of the Hessian itself: the logits are stationary for every sample."""
        return self.logit_gradient == 0

    def __str__(self) -> str:
        lines = [
            f"{r.name}: norm ≤ {format_up(r.norm, 5)}, to the logits ≤ {format_up(r.downstream, 5)}, "
            f"sensitivity ≤ {format_up(r.sensitivity, 5)}, share {r.share:.1%}"
            for r in self.rows
        ]
        lines.append(f"Gauss–Newton matrix: norm at most {format_up(self.gauss_newton, 5)}")
        about = "is a bound" if self.bounds_hessian else "is not a bound"
        lines.append(
            f"the gradient in the logits reaches {self.logit_gradient:.3g}, so this {about} of the Hessian"
        )
        return "\n".join(lines)


def hessian_bound_report(
    model: nn.Sequential, loss: Literal["ce", "mse"], data: Data
) -> HessianBoundReport:
    """Layer-wise upper bound of the Gauss–Newton matrix of a chain of linear layers and activations.

    `‖G‖ ≤ mean_i ‖∂²ℓ_i/∂z²‖·Σ_l S_l(x_i)²·D_l²`, where `S_l` bounds the derivative of layer l's output with respect to its own
    weights (`‖h‖`, or `√(‖h‖² + 1)` with a bias) and `D_l` is the product of norms and slopes from there to the logits.
    Computed in float64, with an allowance for its rounding. Squares are summed, as blocks of columns are; the thesis sums before
    squaring.

    Args:
        model: an `nn.Sequential` of `nn.Linear`, `nn.Flatten`, `nn.Dropout` and activations of known slope; others are refused.
        loss: `"ce"` or `"mse"`.
        data: a pair of tensors or batches of such pairs.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> r = hessian_bound_report(net, "ce", (torch.randn(10, 3), torch.randint(2, (10,))))
    >>> r.bounds_hessian, [row.name for row in r.rows]
    (False, ['0', '2'])

    Reference: thesis, theorem "Layerwise Hessian Norm Decomposition", corrected.
    """
    require_one_of(("ce", "mse"), loss=loss)
    hessian = LossHessian(model, loss, data, dtype=torch.float64)
    chain = _chain(model)
    linear = {name: module for name, module in chain if isinstance(module, nn.Linear)}
    norms = {name: float(spectral_norm(module).upper) for name, module in linear.items()}
    downstream = _downstream(chain, norms)

    gradient = 0.0
    parts = dict.fromkeys(linear, 0.0)
    sensitivities = dict.fromkeys(linear, 0.0)
    for x, y in hessian.batches:
        inputs, z, off = _activations(chain, x)
        bend, slope = _logit_curvature(z, y, loss)
        bend = bend if loss == "mse" else (bend + off.sum(1)).clamp_max(0.5)
        # what is left of a gradient by ordinary rounding is none
        slope = slope + 2 * (off - 1e-12 * (z.abs() + 1)).clamp_min(0).sum(1)
        gradient = max(gradient, float(slope.max()))
        for name, h in inputs.items():
            square = h.square().sum(1) + (linear[name].bias is not None)
            sensitivities[name] = max(sensitivities[name], sqrt(float(square.max())))
            parts[name] += float((bend * square).sum()) * downstream[name] ** 2 / hessian.count
    total = sum(parts.values())
    rows = tuple(
        LayerRow(
            name,
            norms[name],
            downstream[name],
            sensitivities[name] * _ROUNDING,
            part / total if total else 0.0,
        )
        for name, part in parts.items()
    )
    return HessianBoundReport(float(inflate(total * _ROUNDING)), gradient, rows)


def _chain(model: nn.Module) -> Chain:
    """The layers in order, refused where the bound does not cover them."""
    if type(model) is not nn.Sequential:  # a subclass may have another forward
        raise Refused(
            f"the layer-wise bound is one for nn.Sequential chains, not {type(model).__name__}"
        )
    if hooked(model):
        raise Refused(
            "the network has hooks or a patched forward, which the layer-wise bound does not see; remove them"
        )
    chain = [(name, module) for name, module in model._modules.items() if module is not None]
    for name, module in chain:
        if (
            type(module) not in (nn.Linear, nn.Flatten, nn.Dropout)
            and read_activation(module) is None
        ):
            raise Refused(
                f"{name!r} is {type(module).__name__}, whose slope the layer-wise bound does not know"
            )
    weights = [id(p) for _, module in chain for p in module.parameters()]
    if len(set(weights)) < len(weights) or not chain or not isinstance(chain[-1][1], nn.Linear):
        raise Refused(
            "the layer-wise bound needs a chain that ends in nn.Linear, of layers with weights of their own: a shared one "
            "counts in both at once"
        )
    return chain


@torch.no_grad()
def _activations(chain: Chain, x: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Bounds of the size of the input of every linear layer, entry by entry; the logits in float64, and what they are off by."""
    inputs: dict[str, Tensor] = {}
    h = x.double()
    off = torch.zeros_like(h)
    for name, module in chain:
        if isinstance(module, nn.Linear):
            if h.dim() != 2:
                raise Refused(
                    "a linear layer on more than one row per sample is not covered by the layer-wise bound"
                )
            inputs[name] = h.abs() + off
            g = gamma(h.shape[1] + 8, torch.float64)
            off = (off * _ROUNDING + g * h.abs()) @ module.weight.double().abs().mT
            if module.bias is not None:
                off = off + g * module.bias.double().abs()
        elif isinstance(module, nn.Flatten):
            off = module(off)
        activation = read_activation(module)
        if activation is not None:
            off = activation.gain * off + 1e-14 * (h.abs() + 1)
        if not isinstance(module, nn.Dropout):
            parameters = {key: value.double() for key, value in module.named_parameters()}
            h = torch.func.functional_call(module, parameters, (h,))
    return inputs, h, off


def _downstream(chain: Chain, norms: dict[str, float]) -> dict[str, float]:
    """From the output of every linear layer to the logits: the product of norms and slopes, rounded up."""
    factor = 1.0
    downstream: dict[str, float] = {}
    for name, module in reversed(chain):
        if name in norms:
            downstream[name] = factor
            factor = nextafter(factor * norms[name], inf)
            continue
        activation = read_activation(module)
        if activation is not None:
            factor = nextafter(factor * activation.gain, inf)
    return downstream


def _logit_curvature(z: Tensor, y: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Per sample, an upper bound of ‖∂²ℓ/∂z²‖ and the length of ∂ℓ/∂z."""
    classes = z.shape[1]
    if loss == "mse":
        if y.shape != z.shape:
            raise InputError(
                f"expected targets of the outputs' shape {tuple(z.shape)}, got {tuple(y.shape)}"
            )
        gradient = 2 / classes * (z - y.double())
        bend = torch.full((len(z),), 2 / classes, dtype=torch.float64)
        return bend, torch.linalg.vector_norm(gradient, dim=1)
    y = require_labels(y, *z.shape)
    p = z.softmax(1)
    gershgorin = (2 * p * (1 - p)).amax(1).clamp_max(0.5)  # row sums of |diag(p) − ppᵀ|
    hot = nn.functional.one_hot(y.long(), classes)
    return gershgorin * _ROUNDING + 1e-14, torch.linalg.vector_norm(p - hot, dim=1)


def smoothed_loss_bound(
    curvature: float, gradient: float, sigma: float, *, everywhere: bool
) -> Bound:
    """`‖∇²L^σ(θ)‖₂ ≤ H·erf(ε/(√2·H·σ))` for `L^σ(θ) = E L(θ + N(0, σ²I))`.

    Guarantee: an upper bound if `‖∇²L‖ ≤ H = curvature` and `‖∇L‖ ≤ ε = gradient` hold for **all** parameters
    (`everywhere=True`). With values measured at one point it is an estimate only, and labelled so: it can then be wrong by
    any factor.

    Args:
        curvature: H.
        gradient: ε.
        sigma: standard deviation of the noise on the parameters.
        everywhere: whether H and ε hold for all parameters.

    Proof: `u·∇L` takes values in an interval of length 2ε and is H-Lipschitz; its Gaussian smoothing has Lipschitz
    constant `H·erf(2ε/(2√2·Hσ))`. Reference: thesis, corollary on the smoothed loss, with its assumption made explicit.

    >>> smoothed_loss_bound(2.0, 0.5, 1.0, everywhere=True)
    Bound(0.394826, upper, method='erf')
    """
    for what, value in (("curvature", curvature), ("gradient", gradient), ("sigma", sigma)):
        require_number(value, what, least=0)
    if sigma == 0 or curvature == 0:
        value = curvature
    else:
        # erf(x) ≤ 2x/√π, equal to all digits below 1e-9
        flat = sqrt(2 / pi) * (gradient / sigma) * (1 + 1e-14)
        x = gradient / sigma / curvature / sqrt(2)
        value = min(curvature, flat if x < 1e-9 else curvature * erf(x) * (1 + 1e-14))
    everywhere = everywhere is True  # anything else is labeled an estimate
    note = "" if everywhere else "the constants were measured at one point: no bound"
    return Bound(float(inflate(value)), Kind.UPPER if everywhere else Kind.ESTIMATE, "erf", note)


def last_layer_constants(features: Tensor, bias: bool = False) -> tuple[Bound, Bound]:
    """`(H, ε)` that hold for all weights W of softmax regression on fixed features h: `L(W) = mean CE(Wh, y)`.

    `‖∇²L‖ ≤ ½·λ_max(mean hhᵀ)`, since `‖diag(p) − ppᵀ‖ ≤ ½`; `‖∇L‖_F ≤ √2·mean‖h‖`, since `‖p − y‖ ≤ √2`. With a bias h gains
    a one.

    Args:
        features: h, (N, d).
        bias: whether the layer has a bias.

    >>> H, e = last_layer_constants(torch.eye(2))
    >>> round(float(H), 3), round(float(e), 3)
    (0.25, 1.414)
    """
    h = require_tensor(features, "features", dims=2).detach().double()
    if bias:
        h = torch.cat([h, torch.ones_like(h[:, :1])], dim=1)
    norm = float(spectral_norm(h, rtol=1e-4).upper)
    lengths = torch.linalg.vector_norm(h, dim=1).mean()
    return (
        Bound(float(inflate(norm * norm / len(h) / 2 * (1 + 1e-14))), Kind.UPPER, "spectral_norm"),
        Bound(float(inflate(sqrt(2) * float(lengths) * (1 + 1e-12))), Kind.UPPER, "lengths"),
    )
