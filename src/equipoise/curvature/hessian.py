"""The Hessian of a loss over a whole data set as an operator: products, never the matrix.

`Hv = d/ds ∇L(θ + s·v)` at s = 0, forward over reverse, summed over the batches in a fixed order, so that two
calls agree to the bit. Losses are means over the data, whatever the batches: each knows how many terms a batch holds.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import evaluating, fresh_strides, tensor_slots

Loss = Literal["ce", "mse"] | Callable[[Tensor, Tensor], Tensor]

#: the label that cross-entropy leaves out
IGNORED = -100


@dataclass(frozen=True)
class MeanLoss:
    """`mean(output, y)` is the mean over the terms of a batch, `terms(y)` their number (its weight in the whole mean)."""

    mean: Callable[[Tensor, Tensor], Tensor]
    terms: Callable[[Tensor], float]


def mean_loss(loss: Loss) -> MeanLoss:
    """A loss by name, or a user's function, which is taken for a mean over the samples of the batch.

    >>> mean_loss("ce").terms(torch.tensor([0, 2, -100]))
    2.0
    """
    if isinstance(loss, str):
        if loss not in _LOSSES:
            raise InputError(f"loss must be one of {', '.join(_LOSSES)} or a function, got {loss!r}")
        return _LOSSES[loss]
    return MeanLoss(loss, lambda y: float(len(y)))


def _cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """The mean over the labels that are not ignored; 0 where all are."""
    _check_classes(z, y)
    y = y if y.is_floating_point() else y.long()
    total = nn.functional.cross_entropy(z, y, ignore_index=IGNORED, reduction="sum")
    return total / max(_labelled(y), 1.0)


def _check_classes(z: Tensor, y: Tensor) -> None:
    if z.dim() < 2:
        raise InputError(f"cross-entropy needs outputs (batch, classes, …), got shape {tuple(z.shape)}")
    wanted = (z.shape[0], *z.shape[2:])
    if y.is_floating_point() and y.shape == z.shape:
        return
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or tuple(y.shape) != wanted:
        raise InputError(
            f"cross-entropy of outputs {tuple(z.shape)} needs class numbers of shape {wanted}, or probabilities of the "
            f"outputs' shape; got {y.dtype} of shape {tuple(y.shape)}"
        )
    outside = y[(y != IGNORED) & ((y < 0) | (y >= z.shape[1]))]
    if len(outside):
        raise InputError(
            f"label {int(outside[0])} is none of the model's {z.shape[1]} classes, counted from 0 ({IGNORED} is left out)"
        )


def _labelled(y: Tensor) -> float:
    if y.is_floating_point():
        return y.numel() / (y.shape[1] if y.dim() > 1 else 1)
    return float((y != IGNORED).sum())


def _mean_square(z: Tensor, y: Tensor) -> Tensor:
    """Entry by entry; (N,) and (N, 1) are the same numbers, anything else of another shape is refused."""
    if y.shape != z.shape:
        if z.numel() != y.numel() or sorted((z.shape[1:], y.shape[1:]), key=len) != [(), (1,)]:
            raise InputError(f"expected targets of the outputs' shape {tuple(z.shape)}, got {tuple(y.shape)}")
        y = y.reshape(z.shape)
    return (z - y).square().mean()  # torch's own has no working forward derivative


_LOSSES = {
    "ce": MeanLoss(_cross_entropy, _labelled),
    "mse": MeanLoss(_mean_square, lambda y: float(y.numel())),
}


Data = tuple[Tensor, Tensor] | Iterable[tuple[Tensor, Tensor]]
Pattern = str | re.Pattern[str] | None
Vector = NDArray[np.float64]

#: what torch says where an operation has no forward derivative
_NO_FORWARD = ("forward AD", "forward mode", "forward-mode", "ZeroTensors")


class LossHessian:
    """The Hessian of `L(θ) = mean over the data of loss(model(x), y)` for all parameters, or those a pattern names.

    The model is used in evaluation mode (no dropout, running statistics), its parameters are not changed. `products` counts the
    Hessian-vector products.

    Args:
        model: the network.
        loss: `"ce"` (labels of −100 are left out), `"mse"`, or a function of outputs and labels that is a mean over the
            samples of the batch; a function that leaves some out is weighted wrongly where batches differ in them.
        data: a pair of tensors `(x, y)`, or batches of such pairs; batches are read once and kept.
        layer: glob over parameter names (`"fc.*"`; a layer's name alone means its parameters) or a compiled pattern.
        dtype: arithmetic, by default that of the parameters (at least float32).
        batch_size: of the batches a pair of tensors is cut into.
        noise: `(σ, samples, seed)`: value, gradient and Hessian of the loss smoothed by Gaussian noise on the chosen
            parameters, as a mean over that many draws, which are fixed.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> H = LossHessian(model, "mse", (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)))
    >>> H.matvec(np.ones(1)).tolist()  # L = mean (w·x)², so L″ = 2·mean x² = 10
    [10.0]
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Data,
        layer: Pattern = None,
        *,
        dtype: torch.dtype | None = None,
        batch_size: int = 256,
        noise: tuple[float, int, int] | None = None,
    ) -> None:
        self.model, self.loss = model, mean_loss(loss)
        chosen = {name: p for name, p in model.named_parameters() if _matches(name, layer)}
        if not chosen:
            wanted = "parameters" if layer is None else f"parameter with a name that matches {layer!r}"
            raise InputError(f"this model has no {wanted}; see model.named_parameters()")
        first = next(iter(chosen.values()))
        self.dtype = dtype or (first.dtype if first.dtype in (torch.float32, torch.float64) else torch.float32)
        if self.dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype must be float32 or float64, got {self.dtype}")
        self.device = first.device
        with torch.no_grad():
            self.parameters = {name: self._cast(p.detach()) for name, p in chosen.items()}
            rest = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            self.constants = {name: self._cast(t.detach()) for name, t in rest.items() if name not in chosen}
        self.slots = tensor_slots(model)
        self.batches = _batches(data, batch_size)
        self.count = sum(len(x) for x, _ in self.batches)
        self.weights = self._weights()
        self.size = sum(p.numel() for p in self.parameters.values())
        self.shifts = self._draw(noise)
        self.products = 0
        self._forward_mode = True

    def matvec(self, v: NDArray) -> Vector:
        """`Hv` in float64, accumulated over all batches."""
        return self._over_batches(lambda p, x, y: self._product(p, self._unflatten(v), x, y), count=True)

    def gradient(self) -> Vector:
        """`∇L(θ)`, flat, in the order of `parameters`."""
        return self._over_batches(lambda p, x, y: torch.func.grad(self._value)(p, x, y), count=False)

    def value(self, shift: Vector | None = None) -> float:
        """`L(θ + shift)`; with `noise`, the mean over its draws."""
        point, total = self._moved(shift), 0.0
        with evaluating(self.model), torch.no_grad():
            for noise in self.shifts:
                parameters = _plus(point, noise)
                for (x, y), weight in zip(self.batches, self.weights, strict=True):
                    total += weight / len(self.shifts) * float(self._value(parameters, *self._ready(x, y)))
        return total

    def gradient_at(self, shift: Vector) -> Vector:
        """`∇L(θ + shift)`."""
        kept, self.parameters = self.parameters, self._moved(shift)
        try:
            return self.gradient()
        finally:
            self.parameters = kept

    def linear_operator(self) -> LinearOperator:
        """The same as SciPy's `LinearOperator`."""
        return LinearOperator((self.size, self.size), matvec=lambda v: self.matvec(v.ravel()), dtype=np.float64)

    def dense(self) -> Vector:
        """The whole matrix, one product per column: for small networks."""
        if self.size > 5000:
            raise InputError(f"a dense Hessian of {self.size} parameters is too large; use the operator")
        return np.stack([self.matvec(e) for e in np.eye(self.size)], axis=1)

    def flat(self) -> Vector:
        """θ, flat, in the order of `parameters`."""
        return np.concatenate([p.double().cpu().numpy().ravel() for p in self.parameters.values()])

    def _over_batches(
        self, work: Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]], count: bool
    ) -> Vector:
        total = np.zeros(self.size)
        with evaluating(self.model), sdpa_kernel(SDPBackend.MATH):
            for shift in self.shifts:
                point = _plus(self.parameters, shift)
                for (x, y), weight in zip(self.batches, self.weights, strict=True):
                    part = work(point, *self._ready(x, y))
                    total += _flatten(part) * (weight / len(self.shifts))
        self.products += count
        if not np.isfinite(total).all():
            raise Refused(
                "the derivatives of the loss are not finite numbers at these parameters: nothing can be said of them"
            )
        return total

    def _value(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        tensors = {slot: t for name, t in {**self.constants, **parameters}.items() for slot in self.slots[name]}
        output = torch.func.functional_call(self.model, tensors, (x,), tie_weights=False)
        value = self.loss.mean(output, y)
        if value.dim() != 0:
            raise InputError(f"the loss must be one number, a mean over the batch; got shape {tuple(value.shape)}")
        return value

    def _product(self, parameters: dict[str, Tensor], v: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        gradient = torch.func.grad(self._value)
        if self._forward_mode:
            try:
                return torch.func.jvp(lambda p: gradient(p, x, y), (parameters,), (v,))[1]
            except (NotImplementedError, RuntimeError) as error:
                if not any(part in str(error) for part in _NO_FORWARD):
                    raise
                self._forward_mode = False  # an operation without forward derivative: reverse over reverse instead
        return torch.func.vjp(lambda p: gradient(p, x, y), parameters)[1](v)[0]

    def _weights(self) -> list[float]:
        """The share of each batch in the mean over the data; refused where the mean depends on how the data is cut."""
        terms = [self.loss.terms(y) for _, y in self.batches]
        if sum(terms) == 0:
            raise InputError("every label of the data is one that the loss leaves out: there is nothing to average")
        mixing = [n for n, m in self.model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is None]
        if mixing and len(self.batches) > 1:
            raise Refused(
                f"{mixing[0]!r} has no running statistics, so that the loss depends on how the data is cut into batches: "
                f"give all {self.count} samples as one batch (batch_size={self.count}), or keep running statistics"
            )
        return [t / sum(terms) for t in terms]

    def _ready(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return fresh_strides(self._cast(x)), self._cast(y)

    def _cast(self, t: Tensor) -> Tensor:
        return t.to(device=self.device, dtype=self.dtype if t.is_floating_point() else t.dtype)

    def _moved(self, shift: Vector | None) -> dict[str, Tensor]:
        if shift is None:
            return self.parameters
        moves = self._unflatten(shift)
        return _plus(self.parameters, moves)

    def _unflatten(self, v: NDArray) -> dict[str, Tensor]:
        flat = torch.as_tensor(np.ascontiguousarray(v), dtype=self.dtype, device=self.device)
        if flat.numel() != self.size:
            raise InputError(f"expected a vector of {self.size} numbers, one per parameter; got {flat.numel()}")
        pieces = flat.split([p.numel() for p in self.parameters.values()])
        return {n: piece.reshape(p.shape) for (n, p), piece in zip(self.parameters.items(), pieces, strict=True)}

    def _draw(self, noise: tuple[float, int, int] | None) -> list[dict[str, Tensor] | None]:
        if noise is None:
            return [None]
        sigma, samples, seed = noise
        if sigma < 0 or samples < 1:
            raise InputError(f"noise takes (sigma ≥ 0, samples ≥ 1, seed), got {noise}")
        generator = np.random.default_rng(seed)
        return [self._unflatten(sigma * generator.standard_normal(self.size)) for _ in range(samples)]


def _plus(point: dict[str, Tensor], shift: dict[str, Tensor] | None) -> dict[str, Tensor]:
    return point if shift is None else {name: p + shift[name] for name, p in point.items()}


def _flatten(part: dict[str, Tensor]) -> Vector:
    return np.concatenate([t.detach().double().cpu().numpy().ravel() for t in part.values()])


def _matches(name: str, layer: Pattern) -> bool:
    if layer is None:
        return True
    if isinstance(layer, str):
        return fnmatchcase(name, layer) or fnmatchcase(name, layer + ".*")
    return layer.search(name) is not None


def _batches(data: Data, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        if len(x) != len(y):
            raise InputError(f"there are {len(x)} inputs and {len(y)} labels")
        batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    else:
        batches = [(x, y) for x, y in data]
    if not batches or any(len(x) == 0 for x, _ in batches):
        raise InputError("the data is empty")
    return batches
