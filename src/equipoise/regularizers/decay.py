"""Activation decay: the loss smoothed over the weights of the last layer, as a penalty on what that layer reads."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.core import (
    InputError,
    Refused,
    describe,
    require_labels,
    require_module,
    require_number,
    require_one_of,
    require_tensor,
    safe_root,
)
from equipoise.regularizers.selection import Names, select_layers, weight_of

Form = Literal["jensen", "centred", "taylor"]


class SmoothedLoss(NamedTuple):
    """A Monte-Carlo mean and its standard error."""

    mean: Tensor
    standard_error: Tensor


def jensen_penalty(h: Tensor, sigma: float) -> Tensor:
    """`(σ²/2)·‖h‖²` per row: with logits `z = Wh + b` and `Δ ~ N(0, σ²)` on every entry of W,

    `E_Δ CE((W + Δ)h + b, y) ≤ CE(z, y) + (σ²/2)·‖h‖²`.

    Proof: `Δh ~ N(0, σ²‖h‖² I)`. The linear part `−y·Δh` has mean zero (also for soft labels that sum to one) and Jensen's
    inequality moves the mean of the log-sum-exp inside the logarithm, where `E exp((Δh)_j) = exp(σ²‖h‖²/2)`.

    Args:
        h: activations (N, d).
        sigma: standard deviation of the noise on the weights.

    >>> jensen_penalty(torch.tensor([[3.0, 4.0]]), 0.2).item()
    0.5
    """
    return require_number(sigma, "sigma", least=0) ** 2 / 2 * _square(h)


def centred_penalty(h: Tensor, sigma: float, classes: int) -> Tensor:
    """`(1 − 1/c)·(σ²/2)·‖h‖²` per row: the same bound, sharper.

    Cross-entropy does not see what is added to all logits alike, so Jensen's inequality may be applied to `Δh` minus its
    mean over the classes, whose entries have variance `(1 − 1/c)·σ²‖h‖²`.

    Args:
        h: activations (N, d).
        sigma: standard deviation of the noise on the weights.
        classes: number of classes.

    >>> round(centred_penalty(torch.tensor([[3.0, 4.0]]), 0.2, classes=2).item(), 4)
    0.25
    """
    return (1 - 1 / require_number(classes, "classes", least=1)) * jensen_penalty(h, sigma)


def taylor_penalty(h: Tensor, logits: Tensor, sigma: float) -> Tensor:
    """`(σ²/2)·‖h‖²·Σ_i ŷ_i(1 − ŷ_i)` per row with `ŷ = softmax(logits)`: second order in σ, and no bound.

    Args:
        h: activations (N, d).
        logits: (N, c).
        sigma: standard deviation of the noise on the weights.

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

    Args:
        h: activations (N, d).
        logits: (N, c).
        targets: class numbers (N,).
        sigma: standard deviation of the noise.
        samples: draws.
        generator: source of the draws.

    >>> h, z, y = torch.ones(1, 4), torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> smoothed_cross_entropy(h, z, y, 0.5, 1000).mean.item() < float(nn.functional.cross_entropy(z, y)) + 0.5**2 / 2 * 4
    True
    """
    require_number(samples, "samples (for the standard error)", least=2, whole=True)
    _require_rows(h, logits)
    require_number(sigma, "sigma", least=0)
    require_labels(
        targets.flatten() if isinstance(targets, Tensor) else targets,
        logits.shape[:-1].numel(),
        logits.shape[-1],
    )
    z = logits.to(_wide(logits))
    dtype = _wide(logits)
    g = torch.randn(samples, *z.shape, generator=generator, dtype=dtype, device=z.device)
    # the gradient of a length at zero is zero
    spread = sigma * safe_root(_square(h)).to(dtype)[..., None] * g
    losses = (_cross_entropy(z + spread, targets) + _cross_entropy(z - spread, targets)) / 2
    return SmoothedLoss(losses.mean(0), losses.detach().std(0) / math.sqrt(samples))


def _cross_entropy(z: Tensor, targets: Tensor) -> Tensor:
    """Per entry of the leading shape; targets are class numbers `(N,)`."""
    index = targets.expand(z.shape[:-1])[..., None]
    return z.logsumexp(-1) - z.gather(-1, index)[..., 0]


class _Watching:
    """Hooks on a model that put hooks on its linear layers for the time of a forward pass.

    `_calls` holds the name, the input and the output of every watched layer in the latest pass.
    """

    def __init__(self, model: nn.Module, names: Names = None) -> None:
        require_module(model)
        if not any(isinstance(module, nn.Linear) for module in model.modules()):
            raise InputError(
                f"this {type(model).__name__} has no nn.Linear, whose input activation decay looks at"
            )
        self._layers = select_layers(model, nn.Linear, names)
        self._calls: list[tuple[str, Tensor, Tensor]] = []
        self._inner: list[Any] = []
        self._differentiated = True
        self._outer = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start without a forward pass: the activations of this one are not theirs."""
        return {**self.__dict__, "_calls": [], "_inner": []}

    def remove(self) -> None:
        """Take all hooks off."""
        self._drop()
        for handle in self._outer:
            handle.remove()
        self._outer = []
        self._calls = []

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._drop()
        self._calls = []
        self._differentiated = torch.is_grad_enabled()
        self._inner = [
            layer.register_forward_hook(partial(self._pass, name), with_kwargs=True)
            for name, layer in self._layers.items()
            if layer is not model
        ]

    def _end(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self._drop()
        if model in self._layers.values():  # the model is itself the last layer
            self._record(next(iter(self._layers)), args, kwargs, output)

    def _pass(
        self, name: str, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if self._inner:  # a copy made during a pass has the hook, but is not in one
            self._record(name, args, kwargs, output)

    def _record(self, name: str, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        if self._differentiated and not torch.is_grad_enabled():
            # the penalty would be a number and not train anything
            raise Refused(
                f"{name!r} runs where gradients are switched off (a reentrant checkpoint?), so that its activations could not "
                "be decayed: call torch.utils.checkpoint.checkpoint(…, use_reentrant=False), or the whole model under no_grad"
            )
        self._calls.append((name, args[0] if args else kwargs["input"], output))

    def _latest(self) -> list[tuple[str, Tensor, Tensor]]:
        if not self._calls:
            raise InputError(
                "activation decay looks at the latest forward pass, and there is none: call the model first, and this once per "
                "pass"
            )
        return self._calls

    def _drop(self) -> None:
        for handle in self._inner:
            handle.remove()
        self._inner = []


class ActivationDecay(_Watching):
    """`L + (σ²/2)·mean‖h‖²`, h the input of the last linear layer: an upper bound of the loss smoothed over that layer's weights.

    Guarantee (`form="jensen"` and `"centred"`): for mean cross-entropy over the rows that are counted, `CE + ad()` is at
    least the mean of the loss when independent `N(0, σ²)` is added to every weight of the last layer (see
    `jensen_penalty`). It is a bound with a gap, not an identity. `"taylor"` is the second-order approximation: no bound.

    Args:
        model: the module that is trained (before it is wrapped for distributed training).
        sigma: standard deviation of the noise.
        layer: name of the layer; by default the last `nn.Linear` that the first forward pass calls.
        form: see above.

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
    ) -> None:
        require_one_of(Form, form=form)
        self.sigma = require_number(sigma, "sigma", least=0)
        self.form = form
        self.name = layer
        super().__init__(model)
        if layer is not None:
            if layer not in self._layers:
                names = ", ".join(map(repr, self._layers))
                raise InputError(f"there is no nn.Linear named {layer!r}; there are {names}")
            self._layers = {layer: self._layers[layer]}

    def __call__(self, mask: Tensor | None = None) -> Tensor:
        """The penalty of the latest forward pass, to be added to a mean cross-entropy.

        Args:
            mask: which rows count, of the shape of h without its last axis.
        """
        ((_, h, z),) = self._latest()
        self._calls = []
        if self.form == "jensen":
            rows = jensen_penalty(h, self.sigma)
        elif self.form == "centred":
            rows = centred_penalty(h, self.sigma, z.shape[-1])
        else:
            rows = taylor_penalty(h, z, self.sigma)
        if mask is not None:
            if mask.shape != rows.shape:
                raise InputError(
                    f"the mask has shape {tuple(mask.shape)}, the activations {tuple(rows.shape)}"
                )
            rows = rows[mask.to(torch.bool)]
        return rows.sum() / max(rows.numel(), 1)

    def smoothed_loss(
        self, targets: Tensor, samples: int = 1000, generator: torch.Generator | None = None
    ) -> SmoothedLoss:
        """The Monte-Carlo loss of the latest forward pass (kept), averaged over its labelled rows, with its error.

        Args:
            targets: class numbers; rows with a negative one are left out.
            samples: draws.
            generator: source of the draws.
        """
        ((_, h, z),) = self._latest()
        if targets.shape != z.shape[:-1]:
            raise InputError(
                f"expected class numbers of shape {tuple(z.shape[:-1])}, got {tuple(targets.shape)}"
            )
        rows = targets >= 0
        mean, error = smoothed_cross_entropy(
            h[rows], z[rows], targets[rows], self.sigma, samples, generator=generator
        )
        return SmoothedLoss(mean.mean(), error.square().sum().sqrt() / len(error))

    def __enter__(self) -> ActivationDecay:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _end(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        super()._end(model, args, kwargs, output)
        if output is None:  # the pass failed on its way to the last layer
            self._calls = []
        elif self._calls:
            self.name = self._calls[0][0]
            self._layers = {self.name: self._layers[self.name]}
        elif isinstance(output, Tensor):
            raise InputError(f"the forward pass did not call {self.name or 'any nn.Linear'}")

    def _record(self, name: str, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        self._calls = []  # only the last call counts
        super()._record(name, args, kwargs, output)


class LayerwiseDecay(_Watching):
    """`λ_h·Σ_l mean‖h_l‖² + λ_w·‖W_L‖_F²`: the layer-wise variant of Baek et al. 2024, with the coefficients of the thesis.

    h_l are the inputs of all chosen linear layers but the first, W_L is the weight of the last one called. Two coefficients to
    tune instead of one; no bound of a smoothed loss.

    Args:
        model: the module that is trained.
        activations: λ_h.
        last_weight: λ_w.
        names: glob or compiled pattern over module names, or several.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> decay = LayerwiseDecay(model)
    >>> loss = model(torch.randn(5, 4)).square().mean() + decay()
    """

    def __init__(
        self,
        model: nn.Module,
        activations: float = 1e-3,
        last_weight: float = 1e-2,
        names: Names = None,
    ) -> None:
        self.activations = require_number(activations, "activations", least=0)
        self.last_weight = require_number(last_weight, "last_weight", least=0)
        super().__init__(model, names)

    def __call__(self) -> Tensor:
        """The penalty of the latest forward pass."""
        calls = self._latest()
        self._calls = []
        total = self.last_weight * weight_of(self._layers[calls[-1][0]]).square().sum()
        for _, h, _ in calls[1:]:
            total = total + self.activations * _square(h).mean()
        return total


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _require_rows(h: Any, logits: Any) -> None:
    """Refuse activations and logits that are not of the same rows."""
    if require_tensor(h, "activations").shape[:-1] != require_tensor(logits, "logits").shape[:-1]:
        raise InputError(
            f"activations and logits must have the same rows, got {describe(h)} and {describe(logits)}"
        )


def _square(h: Tensor) -> Tensor:
    if not isinstance(h, Tensor):
        raise InputError(f"activations must be a tensor, got {describe(h)}")
    return h.to(_wide(h)).square().sum(-1)
