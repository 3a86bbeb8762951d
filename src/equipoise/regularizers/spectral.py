"""Spectral-norm regularisation: a penalty on the norms of chosen layers, or on their product."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equipoise.core import (
    Bracket,
    InputError,
    Kind,
    Shape,
    full_precision,
    require_number,
    require_one_of,
)
from equipoise.maps.linear import Convolution, Linear
from equipoise.maps.reading import geometry_of, linear_part, module_kind
from equipoise.norms.differentiable import gram_norm, map_norm
from equipoise.norms.spectral import spectral_norm
from equipoise.norms.tracking import SingularVectors, TrackedConvolution, TrackedMatrix, TrackedNorm
from equipoise.regularizers import selection

PenaltyKind = Literal["sum", "squares", "log", "hinge", "target"]
BoundName = Literal["tracked", "gram", "proved"]

#: what each kind makes of the norms σ (a vector) and the target γ
_FORMULAS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sum": lambda s, _: s.sum(),
    "squares": lambda s, _: s.square().sum(),
    "log": lambda s, _: s.clamp_min(torch.finfo(s.dtype).tiny).log().sum(),
    "hinge": lambda s, gamma: s.clamp_min(gamma).sum(),
    "target": lambda s, gamma: (s - gamma).square().sum(),
}


class SpectralPenalty:
    """`weight · penalty(σ)` of the spectral norms σ_l of chosen layers, for padding, stride and size as they are used.

    | kind | penalty |
    |---|---|
    | `sum` | `Σ σ_l` |
    | `squares` | `Σ σ_l²` |
    | `log` | `log Π σ_l` |
    | `hinge` | `Σ max(σ_l, γ)`: no pull below the target |
    | `target` | `Σ (σ_l − γ)²`: pulls every norm to the target, from both sides |

    Which number stands for σ_l, `bound=`:

    - `"tracked"` (default): `‖A v‖` for singular vectors that follow the layer by one step of subspace iteration per call. It
      is a **lower** bound that is tight once converged, its gradient is that of σ₁, and it costs a few hundredths of a step.
    - `"gram"`: `gram_norm` and `conv_norm`, an upper bound in exact arithmetic, at the cost of Gram products. Its rounding is
      not covered (float32 may lie some 1e-6 below the norm), so it is labelled an **estimate**.
    - `"proved"`: a **proved** upper bound of every layer at every call, with the gradient of the tracked σ₁. The proof is carried
      from call to call (`norms.tracking`) and made anew only where it has grown looser than `rtol`, so that it costs little more
      than tracking; for `hinge` a bound below the target is good enough as it is.

    The first two feed no certificate; `brackets()` gives proved ones in any case.

    Args:
        model: the module that is trained (unwrapped, for distributed training).
        kind: see above.
        target: γ of `hinge` and `target`.
        only: module types.
        names: glob or compiled pattern over module names, or several.
        weight: factor of the penalty.
        input_size: spatial size of the model's input; the sizes the layers see are read off one forward pass of zeros.
        example_input: an input with batch, where zeros of that size would not do. Neither is needed for linear layers; with
            convolutions and `bound="gram"` and neither given, the norm is the supremum over all input sizes.
        bound: see above.
        iterations: Gram products of `"gram"`.
        grid: frequencies per axis of `"gram"`.
        rtol: relative gap of `"proved"`.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 2))
    >>> penalty = SpectralPenalty(net, kind="hinge", target=1.0, only=nn.Conv2d, weight=1e-2, input_size=(8, 8))
    >>> loss = net(torch.zeros(2, 1, 8, 8)).sum() + penalty()
    >>> loss.backward()

    References: Yoshida and Miyato 2017; Ryu et al. 2019; Delattre et al. 2023, §5.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: PenaltyKind = "sum",
        target: float = 1.0,
        only: selection.Types = selection.LINEAR_MAPS,
        names: selection.Names = None,
        weight: float = 1.0,
        input_size: int | Shape | None = None,
        *,
        example_input: Tensor | None = None,
        bound: BoundName = "tracked",
        iterations: int = 5,
        grid: int = 16,
        rtol: float = 0.02,
    ) -> None:
        require_one_of(PenaltyKind, kind=kind)
        require_one_of(BoundName, bound=bound)
        self.weight = require_number(weight, "weight", least=0)
        self.target = require_number(target, "target", least=0)
        self.rtol = require_number(rtol, "rtol", least=1e-12, most=0.99)
        self.kind = kind
        self.bound = bound
        self.iterations = iterations
        self.grid = grid
        self.layers = selection.select_layers(model, only, names)
        for module in self.layers.values():
            # refuses overridden forwards and hooks: their weight says nothing about their norm
            module_kind(module)
        kernels = {
            name: module
            for name, module in self.layers.items()
            if not isinstance(module, nn.Linear)
        }
        if bound != "gram" and kernels and example_input is None and input_size is None:
            raise InputError(
                "the norm of a convolution depends on the size of its input: give input_size=(32, 32), the size of the model's "
                'input, or example_input=; or take bound="gram", which bounds all sizes at once'
            )
        #: spatial size of what every convolution reads
        self.sizes = selection.spatial_sizes(model, kernels, input_size, example_input)
        self._vectors: dict[str, SingularVectors] = {}
        self._tracked: dict[str, TrackedNorm] = {}
        layer: Any
        for i, (name, layer) in enumerate(self.layers.items()):
            size = self.sizes.get(name)
            if bound != "gram":
                shape = (layer.in_features,) if size is None else (layer.in_channels, *size)
                self._vectors[name] = SingularVectors(
                    partial(_linear_map, layer, size), shape, 2, i
                )
                self._vectors[name].iterate(10)
            if bound == "proved":
                self._tracked[name] = (
                    TrackedMatrix() if size is None else TrackedConvolution(layer, size)
                )

    @property
    def side(self) -> Kind:
        """What the penalised norms are: a lower bound, an estimate (an upper bound but for its rounding), or an upper bound."""
        return {"tracked": Kind.LOWER, "gram": Kind.ESTIMATE, "proved": Kind.UPPER}[self.bound]

    def __call__(self) -> Tensor:
        """The penalty, to be added to the loss; moves the tracked vectors by one step."""
        # a computed weight is computed once per call, here and with its graph
        with parametrize.cached():
            for module in self.layers.values():
                selection.weight_of(module)
            for tracked in self._vectors.values():
                tracked.iterate(1)
            norms = [self._norm(name) for name in self.layers]
        s = torch.stack([norm.to(norms[0].dtype) for norm in norms])
        return self.weight * _FORMULAS[self.kind](s, self.target)

    def norms(self) -> dict[str, float]:
        """The number penalised for every layer, without a gradient and without moving on; `side` says what it is."""
        with torch.no_grad():
            return {name: float(self._norm(name)) for name in self.layers}

    def brackets(self, rtol: float = 1e-2) -> dict[str, Bracket]:
        """A proved bracket of every layer's norm on the size it sees, by `equipoise.spectral_norm`."""
        return {
            name: spectral_norm(module, rtol=rtol, input_size=self.sizes.get(name))
            for name, module in self.layers.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """What exact resuming needs: the tracked vectors and proofs."""
        vectors = {f"vectors.{name}": tracked.V.clone() for name, tracked in self._vectors.items()}
        proofs = {
            f"proofs.{name}/{key}": value
            for name, tracked in self._tracked.items()
            for key, value in tracked.state_dict().items()
        }
        return {**vectors, **proofs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        for name, tracked in self._vectors.items():
            V = state.get(f"vectors.{name}")
            if V is None or V.shape != tracked.V.shape:
                raise InputError(f"this state belongs to another penalty: it does not fit {name!r}")
            tracked.V = V.clone()
        for name, norm in self._tracked.items():
            prefix = f"proofs.{name}/"
            norm.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )

    def _norm(self, name: str) -> Tensor:
        module = self.layers[name]
        if self.bound == "gram":
            return layer_bound(module, self.sizes.get(name), self.iterations, self.grid)
        sigma = self._vectors[name].norm()
        if self.bound == "tracked":
            return sigma
        enough = self.target if self.kind == "hinge" else 0.0
        W = selection.weight_of(module).detach()
        with full_precision():
            upper = self._tracked[name].bracket(W, enough, self.rtol, f"weight of {name!r}")[1]
        return (sigma - sigma.detach()) + rounded_up(upper, sigma.dtype).to(sigma.device)


def _linear_map(module: nn.Module, size: Shape | None) -> Linear:
    """The linear part of a layer as it is now, differentiable in its weights."""
    return linear_part(module, selection.weight_of(module), size)


def rounded_up(value: float, dtype: torch.dtype) -> Tensor:
    """The smallest number of the dtype that is not below `value`.

    Args:
        value: a number.
        dtype: of the result.

    >>> rounded_up(0.1, torch.float32).item() >= 0.1
    True
    """
    x = torch.tensor(value, dtype=dtype)
    return x if float(x) >= value else torch.nextafter(x, torch.full_like(x, math.inf))


def layer_bound(
    module: nn.Module, size: Shape | None, iterations: int = 5, grid: int = 16
) -> Tensor:
    """Differentiable upper bound of the norm of a layer, by `gram_norm` or `conv_norm`.

    Args:
        module: the layer.
        size: spatial size of its input; None: the supremum over all sizes.
        iterations: Gram products.
        grid: frequencies per axis.

    >>> layer_bound(nn.Linear(2, 2, bias=False).requires_grad_(False), None).shape
    torch.Size([])
    """
    W = selection.weight_of(module)
    if isinstance(module, nn.Linear):
        return gram_norm(W, iterations)
    return map_norm(Convolution(W, geometry_of(module, size)), iterations, grid)
