"""Spectral-norm regularisation: a penalty on the norms of chosen layers, or on their product."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equipoise.core.bounds import Bracket, Kind
from equipoise.core.checks import require_number, require_one_of
from equipoise.core.errors import InputError
from equipoise.maps.linear import Convolution
from equipoise.maps.reading import geometry_of, module_kind
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

    With `scope="network"` the one number `Π σ_l` takes the place of the σ_l.

    Which number stands for σ_l, `bound=`:

    - `"tracked"` (default): `‖A v‖` for singular vectors that follow the layer by one step of subspace iteration per call. It
      is a **lower** bound that is tight once settled, its gradient is that of σ₁, and it costs a few hundredths of a step.
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
        input_size: int | tuple[int, ...] | None = None,
        *,
        example_input: Tensor | None = None,
        scope: Literal["layer", "network"] = "layer",
        bound: BoundName = "tracked",
        steps: int = 1,
        vectors: int = 2,
        iterations: int = 5,
        grid: int = 16,
        rtol: float = 0.02,
        seed: int = 0,
    ) -> None:
        require_one_of(get_args(PenaltyKind), kind=kind)
        require_one_of(get_args(BoundName), bound=bound)
        require_one_of(("layer", "network"), scope=scope)
        self.weight = require_number(weight, "weight", least=0)
        self.target = require_number(target, "target", least=0)
        self.steps = int(require_number(steps, "steps", least=0, whole=True))
        require_number(vectors, "vectors", least=1, whole=True)
        self.rtol = require_number(rtol, "rtol", least=1e-12, most=0.99)
        self.kind, self.scope, self.bound = kind, scope, bound
        self.iterations, self.grid = iterations, grid
        self.layers = selection.select_layers(model, only, names)
        for module in self.layers.values():
            module_kind(module)  # refuses overridden forwards and hooks: their weight says nothing about their norm
        self.shapes = self._shapes(model, input_size, example_input)
        self._vectors: dict[str, SingularVectors] = {}
        self._carried: dict[str, TrackedNorm] = {}
        if bound == "proved":
            self._carried = {
                name: TrackedMatrix()
                if isinstance(module, nn.Linear)
                else TrackedConvolution(module, self.shapes[name][1:])
                for name, module in self.layers.items()
            }
        if bound != "gram":
            self._vectors = {
                name: SingularVectors(
                    partial(selection.linear_map, module, self.shapes[name]), self.shapes[name], vectors, seed + i
                )
                for i, (name, module) in enumerate(self.layers.items())
            }
            for tracked in self._vectors.values():
                tracked.iterate(10)

    @property
    def side(self) -> Kind:
        """What the penalised norms are: a lower bound, an estimate (an upper bound but for its rounding), or an upper bound."""
        return {"tracked": Kind.LOWER, "gram": Kind.ESTIMATE, "proved": Kind.UPPER}[self.bound]

    def __call__(self) -> Tensor:
        """The penalty, to be added to the loss; moves the tracked vectors by one step."""
        with parametrize.cached():  # a computed weight is computed once per call, here and with its graph
            for module in self.layers.values():
                selection.weight_of(module)
            s = self._norms()
        if self.scope == "network":
            s = s.log().sum().exp()[None] if bool((s > 0).all()) else s.prod()[None]
        return self.weight * _FORMULAS[self.kind](s, self.target)

    def norms(self) -> dict[str, float]:
        """The number penalised for every layer, without a gradient and without moving on; `side` says what it is."""
        with torch.no_grad():
            return {name: float(self._norm(name)) for name in self.layers}

    def brackets(self, rtol: float = 1e-2) -> dict[str, Bracket]:
        """A proved bracket of every layer's norm on the size it sees, by `equipoise.spectral_norm`."""
        return {
            name: spectral_norm(module, rtol=rtol, input_size=self._size(name)) for name, module in self.layers.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """What exact resuming needs: the tracked vectors and proofs."""
        vectors = {f"vectors.{name}": tracked.V.clone() for name, tracked in self._vectors.items()}
        carried = {
            f"carried.{name}/{key}": value for name, c in self._carried.items() for key, value in c.state_dict().items()
        }
        return {**vectors, **carried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        for name, tracked in self._vectors.items():
            V = state.get(f"vectors.{name}")
            if V is None or V.shape != tracked.V.shape:
                raise InputError(f"this state belongs to another penalty: it does not fit {name!r}")
            tracked.V = V.clone()
        for name, carried in self._carried.items():
            prefix = f"carried.{name}/"
            carried.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})

    def _norms(self) -> Tensor:
        for tracked in self._vectors.values():
            tracked.iterate(self.steps)
        norms = [self._norm(name) for name in self.layers]
        return torch.stack([s.to(norms[0].dtype) for s in norms])

    def _norm(self, name: str) -> Tensor:
        if self.bound == "tracked":
            return self._vectors[name].norm()
        if self.bound == "proved":
            sigma = self._vectors[name].norm()
            enough = self.target if self.kind == "hinge" and self.scope == "layer" else 0.0
            W = selection.weight_of(self.layers[name]).detach()
            what = f"weight of {name!r}"
            upper = self._carried[name].bracket(W, enough, self.rtol, what)[1]
            return (sigma - sigma.detach()) + rounded_up(upper, sigma.dtype).to(sigma.device)
        return layer_bound(self.layers[name], self._size(name), self.iterations, self.grid)

    def _size(self, name: str) -> tuple[int, ...] | None:
        shape = self.shapes.get(name)
        return shape[1:] if shape is not None and len(shape) > 1 else None

    def _shapes(
        self, model: nn.Module, input_size: int | tuple[int, ...] | None, example: Tensor | None
    ) -> dict[str, tuple[int, ...]]:
        spatial = [name for name, module in self.layers.items() if not isinstance(module, nn.Linear)]
        linear: dict[str, tuple[int, ...]] = {
            name: (int(module.in_features),) for name, module in self.layers.items() if isinstance(module, nn.Linear)
        }
        if not spatial:
            return linear
        if example is None and input_size is None:
            if self.bound == "gram":
                return linear
            raise InputError(
                "the norm of a convolution depends on the size of its input: give input_size=(32, 32), the size of the model's "
                'input, or example_input=; or take bound="gram", which bounds all sizes at once'
            )
        if example is None:
            assert input_size is not None
            example = selection.zero_image(model, input_size)
        found = selection.input_shapes(model, {name: self.layers[name] for name in spatial}, example)
        return {**linear, **found}


def rounded_up(value: float, dtype: torch.dtype) -> Tensor:
    """The smallest number of the dtype that is not below `value`.

    >>> rounded_up(0.1, torch.float32).item() >= 0.1
    True
    """
    x = torch.tensor(value, dtype=dtype)
    return x if float(x) >= value else torch.nextafter(x, torch.full_like(x, math.inf))


def layer_bound(module: nn.Module, size: tuple[int, ...] | None, iterations: int = 5, grid: int = 16) -> Tensor:
    """Differentiable upper bound of the norm of a layer, by `gram_norm` or `conv_norm`.

    >>> layer_bound(nn.Linear(2, 2, bias=False).requires_grad_(False), None).shape
    torch.Size([])
    """
    W = selection.weight_of(module)
    if isinstance(module, nn.Linear):
        return gram_norm(W, iterations)
    return map_norm(Convolution(W, geometry_of(module, size)), iterations, grid)
