"""The layer-wise Hessian bound as a report: what is proved, of which matrix, and what was measured beside it.

The thesis bounds `‖∇²L‖` by sensitivities of the penultimate activations times the curvature there. Two things need care:

* the loss also depends on the last layer's weights directly, which that factorisation leaves out (the bound fails by any factor);
* `∇²L = JᵀBJ + Σ_k (∂ℓ/∂z_k)·∇²z_k`: only the first term, the Gauss–Newton matrix, is bounded; they agree where the gradient in
  the logits is zero, which cross-entropy with hard labels never reaches.

So here J is the Jacobian of the *logits* with respect to *all* weights, and the bound is one of the Gauss–Newton matrix.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.core.bounds import format_up
from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import hooked
from equipoise.core.precision import inflate
from equipoise.curvature.hessian import Data, LossHessian
from equipoise.curvature.spectrum import top_eigenvalue
from equipoise.maps.pointwise import read_activation
from equipoise.norms.spectral import spectral_norm

#: modules that keep every number, or drop some
_KEEPING = (nn.Flatten, nn.Dropout)
#: relative room for the rounding of float64 sums of squares and products
_ROOM = 1 + 1e-9


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

    `logit_gradient` is the largest ‖∂ℓ/∂z‖ over the data. `measured` is the largest |eigenvalue| of the Hessian that was
    found (a lower bound of its norm), None where it was not asked for. `curvature` is the mean bound of ‖∂²ℓ/∂z²‖.
    """

    gauss_newton: float
    logit_gradient: float
    curvature: float
    rows: tuple[LayerRow, ...]
    measured: float | None = None

    @property
    def bounds_hessian(self) -> bool:
        """Whether the bound speaks of the Hessian itself: the logits are stationary for every sample."""
        return self.logit_gradient == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "gauss_newton_upper": self.gauss_newton,
            "bounds_hessian": self.bounds_hessian,
            "largest_logit_gradient": self.logit_gradient,
            "logit_curvature": self.curvature,
            "measured_hessian_norm_lower": self.measured,
            "layers": [vars(row) for row in self.rows],
        }

    def __str__(self) -> str:
        lines = [f"{'layer':<12}{'norm ≤':>12}{'to logits ≤':>14}{'sensitivity ≤':>15}{'share':>8}"]
        lines += [
            f"{r.name:<12}{format_up(r.norm, 5):>12}{format_up(r.downstream, 5):>14}"
            f"{format_up(r.sensitivity, 5):>15}{r.share:>8.1%}"
            for r in self.rows
        ]
        lines.append(f"Gauss–Newton matrix: norm at most {format_up(self.gauss_newton, 5)}")
        if self.measured is not None:
            lines.append(f"Hessian: norm at least {self.measured:.5g} (measured)")
        holds = "is zero, so" if self.bounds_hessian else f"reaches {self.logit_gradient:.3g}, so"
        lines.append(
            f"the gradient in the logits {holds} this {'is' if self.bounds_hessian else 'is not'} a bound of the Hessian"
        )
        return "\n".join(lines)


def hessian_bound_report(
    model: nn.Sequential, loss: Literal["ce", "mse"], data: Data, *, measure: bool = True, seed: int = 0
) -> HessianBoundReport:
    """Layer-wise upper bound of the Gauss–Newton matrix of a chain of linear layers and activations, beside the measured Hessian.

    `‖G‖ ≤ mean_i ‖∂²ℓ_i/∂z²‖·Σ_l S_l(x_i)²·D_l²`, where `S_l` bounds the derivative of layer l's output with respect to its own
    weights (`√(‖h‖² + 1)` with a bias; for a convolution the norm of all patches it reads) and `D_l` is the product of norms and
    slopes from there to the logits. Computed in float64, with room for its rounding. Squares are summed, as blocks of
    columns are; the thesis sums before squaring.

    `model` is an `nn.Sequential` of `nn.Linear`, `nn.Conv1d/2d/3d` (zero padding) and activations of known slope; others are
    refused.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> r = hessian_bound_report(net, "ce", (torch.randn(10, 3), torch.randint(2, (10,))))
    >>> r.bounds_hessian, r.measured < r.gauss_newton
    (False, True)

    Reference: thesis, theorem "Layerwise Hessian Norm Decomposition", corrected.
    """
    if loss not in ("ce", "mse"):
        raise InputError(f"the curvature in the logits is known for ce and mse, got {loss!r}")
    hessian = LossHessian(model, loss, data, dtype=torch.float64)
    chain = _chain(model)
    total, curvature, largest = 0.0, 0.0, 0.0
    linear = {name: module for name, module in chain if _is_linear(module)}
    shares, most, norms = (dict.fromkeys(linear, 0.0) for _ in range(3))
    sizes: set[tuple[Any, ...]] = set()
    inputs = [(*_activations(chain, x), y) for x, y in hessian.batches]
    for seen, _, _ in inputs:  # batches may differ in size, and the norm of a convolution with it
        if (size := tuple(h.shape[1:] for h in seen.values())) not in sizes:
            sizes.add(size)
            norms = {name: max(norms[name], _norm(module, seen[name])) for name, module in linear.items()}
    downstream = _downstream(chain, norms)
    for seen, z, y in inputs:
        bound, gradient = _logit_curvature(z, y, loss)
        curvature += float(bound.sum()) / hessian.count
        largest = max(largest, float(gradient.max()))
        for name, module in linear.items():
            S2 = _sensitivity(module, seen[name])
            most[name] = max(most[name], math.sqrt(float(S2.max())))
            part = float((bound * S2).sum()) * downstream[name] ** 2 / hessian.count
            shares[name] += part
            total += part
    rows = tuple(
        LayerRow(name, norms[name], downstream[name], most[name] * _ROOM, shares[name] / total if total else 0.0)
        for name in shares
    )
    measured = abs(top_eigenvalue(hessian, which="LM", seed=seed).value) if measure else None
    return HessianBoundReport(float(inflate(total * _ROOM)), largest, curvature, rows, measured)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _chain(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if type(model) is not nn.Sequential:  # a subclass may have another forward
        raise Refused(f"the layer-wise bound is one for nn.Sequential chains, not {type(model).__name__}")
    if hooked(model):
        raise Refused(
            "the network has hooks or a patched forward, which the layer-wise bound does not see; remove them"
        )
    found = _links(model)
    weights = [id(p) for _, m in found for p in m.parameters()]
    if len(set(weights)) < len(weights):
        raise Refused(
            "the layer-wise bound needs layers with weights of their own: a shared one counts in both at once"
        )
    shared = [id(m) for _, m in found if _is_linear(m)]
    if len(set(shared)) < len(shared) or not shared or not _is_linear(found[-1][1]):
        raise Refused("the layer-wise bound needs a chain of distinct layers that ends in a linear one")
    return found


def _links(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for inner, module in model._modules.items():  # named_children would leave out a second use of a layer
        name = prefix + inner
        assert module is not None
        if type(module) is nn.Sequential:
            found += _links(module, f"{name}.")
            continue
        kept = type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_KEEPING)
        if not kept and read_activation(module) is None:
            raise Refused(f"{name!r} is {type(module).__name__}, whose slope the layer-wise bound does not know")
        if getattr(module, "padding_mode", "zeros") != "zeros":
            raise Refused(f"{name!r} does not pad with zeros")
        found.append((name, module))
    return found


@torch.no_grad()
def _activations(chain: list[tuple[str, nn.Module]], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The input of every linear layer, in float64, and the logits."""
    seen: dict[str, Tensor] = {}
    h = x.double()
    for name, module in chain:
        if _is_linear(module):
            seen[name] = h
        if isinstance(module, nn.Dropout):
            continue
        parameters = {key: value.double() for key, value in module.named_parameters()}
        h = torch.func.functional_call(module, parameters, (h,))
    if h.dim() != 2:
        raise InputError(f"the network must give one row of logits per sample, got shape {tuple(h.shape)}")
    return seen, h


def _norm(module: nn.Module, h: Tensor) -> float:
    size = tuple(h.shape[2:]) if not isinstance(module, nn.Linear) else None
    return float(spectral_norm(module, input_size=size).upper)


def _downstream(chain: list[tuple[str, nn.Module]], norms: dict[str, float]) -> dict[str, float]:
    factor, found = 1.0, {}
    for name, module in reversed(chain):
        if _is_linear(module):
            found[name] = factor
            factor = math.nextafter(factor * norms[name], math.inf)
        elif (curve := read_activation(module)) is not None:
            factor = math.nextafter(factor * curve.gain, math.inf)
    return dict(reversed(list(found.items())))


def _sensitivity(module: Any, h: Tensor) -> Tensor:
    """Upper bound per sample of `‖∂(W∗h + b)/∂(W, b)‖²`."""
    if isinstance(module, nn.Linear):
        if h.dim() != 2:
            raise Refused("a linear layer on more than one row per sample is not covered by the layer-wise bound")
        return h.square().sum(1) + (module.bias is not None)
    ones = torch.ones_like(module.weight, dtype=torch.float64)[:1]
    groups = module.groups
    squares = h.square()
    if groups > 1:  # every group reads its own channels: the largest one counts, their sum bounds it
        squares = squares.reshape(len(h), groups, -1, *h.shape[2:]).sum(1)
    function = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[module.weight.dim()]
    patches = function(squares, ones, None, module.stride, module.padding, module.dilation)
    return patches.flatten(1).sum(1) + (patches[0].numel() if module.bias is not None else 0)


def _logit_curvature(z: Tensor, y: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Per sample, an upper bound of ‖∂²ℓ/∂z²‖ and the length of ∂ℓ/∂z."""
    if loss == "mse":
        if y.shape != z.shape:
            raise InputError(f"expected targets of the outputs' shape {tuple(z.shape)}, got {tuple(y.shape)}")
        c = z.shape[1]
        return torch.full((len(z),), 2 / c, dtype=torch.float64), 2 / c * torch.linalg.vector_norm(
            z - y.double(), dim=1
        )
    if y.is_floating_point() or y.shape != z.shape[:1] or not bool(((y >= 0) & (y < z.shape[1])).all()):
        raise InputError(
            f"expected one class number from 0 to {z.shape[1] - 1} per sample, got {tuple(y.shape)} {y.dtype}"
        )
    p = z.softmax(1)
    gershgorin = (2 * p * (1 - p)).amax(1).clamp_max(0.5)  # row sums of |diag(p) − ppᵀ|
    hot = nn.functional.one_hot(y.long(), z.shape[1])
    return gershgorin * _ROOM + 1e-14, torch.linalg.vector_norm(p - hot, dim=1)
