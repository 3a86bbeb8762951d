"""Activation decay: the loss smoothed over the weights of the last layer, as a penalty on what that layer reads."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from equipoise.core.checks import (
    describe,
    require_labels,
    require_module,
    require_number,
    require_one_of,
    require_tensor,
)
from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import safe_root
from equipoise.regularizers.selection import Names, select_layers, weight_of

Form = Literal["jensen", "centred", "taylor", "montecarlo"]


class SmoothedLoss(NamedTuple):
    """A Monte-Carlo mean and its standard error."""

    mean: Tensor
    standard_error: Tensor


def jensen_penalty(h: Tensor, sigma: float) -> Tensor:
    """`(σ²/2)·‖h‖²` per row: with logits `z = Wh + b` and `Δ ~ N(0, σ²)` on every entry of W,

    `E_Δ CE((W + Δ)h + b, y) ≤ CE(z, y) + (σ²/2)·‖h‖²`.

    Proof: `Δh ~ N(0, σ²‖h‖² I)`. The linear part `−y·Δh` has mean zero (also for soft labels that sum to one) and Jensen's
    inequality moves the mean of the log-sum-exp inside the logarithm, where `E exp((Δh)_j) = exp(σ²‖h‖²/2)`.

    >>> jensen_penalty(torch.tensor([[3.0, 4.0]]), 0.2).item()
    0.5
    """
    return require_number(sigma, "sigma", least=0) ** 2 / 2 * _square(h)


def centred_penalty(h: Tensor, sigma: float, classes: int) -> Tensor:
    """`(1 − 1/c)·(σ²/2)·‖h‖²` per row: the same bound, sharper.

    Cross-entropy does not see what is added to all logits alike, so Jensen's inequality may be applied to `Δh` minus its
    mean over the classes, whose entries have variance `(1 − 1/c)·σ²‖h‖²`.

    >>> round(centred_penalty(torch.tensor([[3.0, 4.0]]), 0.2, classes=2).item(), 4)
    0.25
    """
    return (1 - 1 / require_number(classes, "classes", least=1)) * jensen_penalty(h, sigma)


def taylor_penalty(h: Tensor, logits: Tensor, sigma: float) -> Tensor:
    """`(σ²/2)·‖h‖²·Σ_i ŷ_i(1 − ŷ_i)` per row with `ŷ = softmax(logits)`: second order in σ, and no bound.

    >>> round(taylor_penalty(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), 0.2).item(), 4)
    0.25
    """
    _require_rows(h, logits)
    p = logits.softmax(-1, dtype=_wide(logits))
    return jensen_penalty(h, sigma) * (p * (1 - p)).sum(-1)


def smoothed_cross_entropy(
    h: Tensor,
    logits: Tensor,
    targets: Tensor,
    sigma: float,
    samples: int = 16,
    *,
    generator: torch.Generator | None = None,
) -> SmoothedLoss:
    """`E_Δ CE((W + Δ)h + b, y)` per row `(N, d)` by Monte-Carlo: the loss that activation decay bounds.

    `(W + Δ)h + b` has the law of `z + σ‖h‖·g` with standard Gaussian g, so only logits are drawn (antithetic pairs ±g, whose mean
    counts as one draw); the error is that of the mean over the draws.

    >>> h, z, y = torch.ones(1, 4), torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> smoothed_cross_entropy(h, z, y, 0.5, 1000).mean.item() < float(nn.functional.cross_entropy(z, y)) + 0.5**2 / 2 * 4
    True
    """
    require_number(samples, "samples (for the standard error)", least=2, whole=True)
    _require_rows(h, logits)
    require_number(sigma, "sigma", least=0)
    require_labels(
        targets.flatten() if isinstance(targets, Tensor) else targets, logits.shape[:-1].numel(), logits.shape[-1]
    )
    z, dtype = logits.to(_wide(logits)), _wide(logits)
    g = torch.randn(samples, *z.shape, generator=generator, dtype=dtype, device=z.device)
    spread = sigma * _length(h).to(dtype)[..., None] * g
    losses = (_cross_entropy(z + spread, targets) + _cross_entropy(z - spread, targets)) / 2
    return SmoothedLoss(losses.mean(0), losses.detach().std(0) / math.sqrt(samples))


def _cross_entropy(z: Tensor, targets: Tensor) -> Tensor:
    """Per entry of the leading shape; targets are class numbers `(N,)`."""
    index = targets.expand(z.shape[:-1])[..., None]
    return z.logsumexp(-1) - z.gather(-1, index)[..., 0]


class _Watching:
    """Hooks on a model that put hooks on its layers for the time of a forward pass; `_seen` is what they saw of the latest."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: Any = None
        self._inner: list[Any] = []
        self._differentiated = True
        self._outer = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start without a forward pass: the activations of this one are not theirs."""
        return {**self.__dict__, "_seen": None, "_inner": []}

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in [*self._outer, *self._inner]:
            handle.remove()
        self._outer, self._inner, self._seen = [], [], None

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._drop()
        self._seen, self._differentiated = None, torch.is_grad_enabled()

    def _end(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self._drop()

    def _drop(self) -> None:
        for handle in self._inner:
            handle.remove()
        self._inner = []


class ActivationDecay(_Watching):
    """`L + (σ²/2)·mean‖h‖²`, h the input of the last linear layer: an upper bound of the loss smoothed over that layer's weights.

    Guarantee (`form="jensen"` and `"centred"`): for mean cross-entropy over the rows that are counted, `CE + ad()` is at
    least the mean of the loss when independent `N(0, σ²)` is added to every weight of the last layer (see
    `jensen_penalty`). It is a bound with a gap, not an identity. `"taylor"` is the second-order approximation and
    `"montecarlo"` draws the noise: no bounds.

    Args:
        model: the module that is trained (before it is wrapped for distributed training).
        sigma: standard deviation of the noise.
        layer: name of the layer; by default the last `nn.Linear` that the first forward pass calls.
        form: see above; `"montecarlo"` needs the labels, `ad(targets)`.
        samples: draws of `"montecarlo"`.
        generator: source of those draws; must be on the model's device.

    Call the model, then add `ad()` to its loss. It looks at the latest forward pass and lets go of it. Token models give
    `mask=` the positions that count. `remove()` takes the hooks off (and so does leaving a `with` block); between forward
    passes only the model itself carries hooks, not its layers.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> ad = ActivationDecay(model, sigma=0.1)
    >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> loss = nn.functional.cross_entropy(model(x), y) + ad()
    >>> loss.backward()
    >>> ad.name
    '2'
    """

    def __init__(
        self,
        model: nn.Module,
        sigma: float = 0.1,
        layer: str | None = None,
        *,
        form: Form = "jensen",
        samples: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        require_one_of(get_args(Form), form=form)
        self.sigma = require_number(sigma, "sigma", least=0)
        self.form, self.samples, self.generator = form, samples, generator
        self.name = layer
        self._layers = _linear_layers(model)
        if layer is not None and layer not in self._layers:
            raise InputError(f"there is no nn.Linear named {layer!r}; there are {', '.join(map(repr, self._layers))}")
        super().__init__(model)
        self._seen: tuple[str, Tensor, Tensor] | None = None

    def __call__(self, targets: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The penalty of the latest forward pass, to be added to a mean cross-entropy.

        Args:
            targets: class numbers of all rows, for `form="montecarlo"`.
            mask: which rows count, of the shape of h without its last axis.
        """
        rows = self._rows(targets)
        if mask is not None:
            if mask.shape != rows.shape:
                raise InputError(f"the mask has shape {tuple(mask.shape)}, the activations {tuple(rows.shape)}")
            rows = rows[mask.to(torch.bool)]
        return rows.sum() / max(rows.numel(), 1)

    def smoothed_loss(self, targets: Tensor, samples: int = 1000) -> SmoothedLoss:
        """The Monte-Carlo loss of the latest forward pass (kept), averaged over its labelled rows, with its error."""
        _, h, z = self._latest(keep=True)
        if targets.shape != z.shape[:-1]:
            raise InputError(f"expected class numbers of shape {tuple(z.shape[:-1])}, got {tuple(targets.shape)}")
        rows = targets >= 0  # ignored labels are negative
        mean, error = smoothed_cross_entropy(
            h[rows], z[rows], targets[rows], self.sigma, samples, generator=self.generator
        )
        return SmoothedLoss(mean.mean(), error.square().sum().sqrt() / len(error))

    def __enter__(self) -> ActivationDecay:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _rows(self, targets: Tensor | None) -> Tensor:
        _, h, z = self._latest(keep=False)
        if self.form == "jensen":
            return jensen_penalty(h, self.sigma)
        if self.form == "centred":
            return centred_penalty(h, self.sigma, z.shape[-1])
        if self.form == "taylor":
            return taylor_penalty(h, z, self.sigma)
        if targets is None or targets.shape != z.shape[:-1]:
            raise InputError('form="montecarlo" needs the class numbers of all rows: ad(targets)')
        known = targets.clamp_min(0)  # rows with an ignored label are left out by the mask
        mean, _ = smoothed_cross_entropy(h, z, known, self.sigma, self.samples, generator=self.generator)
        return mean - _cross_entropy(z.to(_wide(z)), known)

    def _latest(self, keep: bool) -> tuple[str, Tensor, Tensor]:
        if self._seen is None:
            raise InputError(
                "activation decay looks at the latest forward pass, and there is none: call the model first, and ad() once "
                "per pass"
            )
        seen = self._seen
        if not keep:
            self._seen = None
        return seen

    def _begin(self, model: nn.Module, args: Any) -> None:
        super()._begin(model, args)
        watched = self._layers if self.name is None else {self.name: self._layers[self.name]}
        self._inner = [
            layer.register_forward_hook(partial(self._pass, name), with_kwargs=True)
            for name, layer in watched.items()
            if layer is not model
        ]

    def _end(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        super()._end(model, args, kwargs, output)
        if model in self._layers.values():  # the model is itself the last layer
            self._note(next(iter(self._layers)), args, kwargs, output)
        if self._seen is None and isinstance(output, Tensor):
            raise InputError(f"the forward pass did not call {self.name!r}" if self.name else "no nn.Linear was called")
        if self._seen is not None:
            self.name = self._seen[0]

    def _pass(self, name: str, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        if self._inner:  # a copy made during a pass has the hook, but is not in one
            self._note(name, args, kwargs, output)

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        refuse_without_gradient(name, self._differentiated)
        self._seen = (name, _input(args, kwargs), output)


class LayerwiseDecay(_Watching):
    """`(σ_h²/2)·Σ_l mean‖h_l‖² + (σ_w²/2)·‖W_L‖_F²`: the layer-wise variant of Baek et al. 2024.

    h_l are the inputs of all chosen linear layers but the first, W_L is the weight of the last one called. Two coefficients to
    tune instead of one; no bound of a smoothed loss.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> decay = LayerwiseDecay(model, sigma_activations=1e-2, sigma_weight=1e-1)
    >>> loss = model(torch.randn(5, 4)).square().mean() + decay()
    """

    def __init__(
        self, model: nn.Module, sigma_activations: float = 1e-3, sigma_weight: float = 1e-2, names: Names = None
    ) -> None:
        self.sigma_activations = require_number(sigma_activations, "sigma_activations", least=0)
        self.sigma_weight = require_number(sigma_weight, "sigma_weight", least=0)
        self._layers = _linear_layers(model, names)
        super().__init__(model)
        self._seen: list[tuple[str, Tensor]] | None = None

    def __call__(self) -> Tensor:
        """The penalty of the latest forward pass."""
        if not self._seen:
            raise InputError(
                "layer-wise decay looks at the latest forward pass, and there is none: call the model first"
            )
        seen, self._seen = self._seen, None
        last = weight_of(self._layers[seen[-1][0]])
        total = self.sigma_weight**2 / 2 * last.square().sum()
        for _, h in seen[1:]:
            total = total + jensen_penalty(h, self.sigma_activations).mean()
        return total

    def _begin(self, model: nn.Module, args: Any) -> None:
        super()._begin(model, args)
        self._inner = [
            layer.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
            for name, layer in self._layers.items()
        ]

    def _note(self, name: str, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._inner:
            refuse_without_gradient(name, self._differentiated)
            self._seen = [*(self._seen or ()), (name, _input(args, kwargs))]


def refuse_without_gradient(name: str, wanted: bool) -> None:
    """A reentrant checkpoint runs its part without gradients first: the penalty would be a number and not train anything."""
    if wanted and not torch.is_grad_enabled():
        raise Refused(
            f"{name!r} runs where gradients are switched off (a reentrant checkpoint?), so that its activations could not be "
            "decayed: call torch.utils.checkpoint.checkpoint(…, use_reentrant=False), or the whole model under no_grad"
        )


def _input(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """What an `nn.Linear` was given, by place or by name."""
    found: Tensor = args[0] if args else kwargs["input"]
    return found


def _linear_layers(model: nn.Module, names: Names = None) -> dict[str, nn.Module]:
    require_module(model)
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise InputError(f"this {type(model).__name__} has no nn.Linear, whose input activation decay looks at")
    return select_layers(model, nn.Linear, names)


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def _require_rows(h: Any, logits: Any) -> None:
    """Refuse activations and logits that are not of the same rows."""
    if require_tensor(h, "activations").shape[:-1] != require_tensor(logits, "logits").shape[:-1]:
        raise InputError(f"activations and logits must have the same rows, got {describe(h)} and {describe(logits)}")


def _square(h: Tensor) -> Tensor:
    if not isinstance(h, Tensor):
        raise InputError(f"activations must be a tensor, got {describe(h)}")
    return h.to(_wide(h)).square().sum(-1)


def _length(h: Tensor) -> Tensor:
    """‖h‖ per row; its gradient at zero is zero."""
    return safe_root(_square(h))
