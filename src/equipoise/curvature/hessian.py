"""The Hessian of a loss over a whole data set as an operator: products, never the matrix.

`Hv` is the gradient of `⟨∇L(θ), v⟩`, reverse over reverse, summed over the batches in a fixed order, so that two calls agree
to the bit. Losses are means over the data, however it is cut into batches.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.core import (
    InputError,
    Refused,
    describe,
    evaluating,
    fresh_strides,
    require_counts,
    require_module,
    require_one_of,
    tensor_slots,
)

Loss = Literal["ce", "mse"] | Callable[[Tensor, Tensor], Tensor]
Data = tuple[Tensor, Tensor] | Iterable[tuple[Tensor, Tensor]]
Vector = NDArray[np.float64]


class LossHessian(LinearOperator):
    """The Hessian of `L(θ) = mean over the data of loss(model(x), y)` for all parameters, or those a pattern names.

    A SciPy `LinearOperator` in float64: `matvec`, `matmat` and `@` work. The model is used in evaluation mode (no dropout,
    running statistics), its parameters are not changed.

    Args:
        model: the network.
        loss: `"ce"`, `"mse"`, or a function of outputs and labels that is a mean over the samples of the batch.
        data: a pair of tensors `(x, y)`, or batches of such pairs; batches are read once and kept.
        layer: glob over parameter names (`"fc.*"`; a layer's name alone means its parameters).
        dtype: arithmetic, by default that of the parameters (at least float32).
        batch_size: of the batches a pair of tensors is cut into.

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
        layer: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        batch_size: int = 256,
    ) -> None:
        self.model = require_module(model)
        if not callable(loss):
            require_one_of(_LOSSES, loss=loss)
        self.loss = loss if callable(loss) else _LOSSES[loss]
        self.batches = _batches(data, batch_size)
        self.count = sum(len(x) for x, _ in self.batches)
        self._require_separable()

        patterns = ["*"] if layer is None else [layer, f"{layer}.*"]
        selected = {
            name: p
            for name, p in model.named_parameters()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        if not selected:
            raise InputError(
                f"this model has no parameter with a name that matches {patterns[0]!r}; see model.named_parameters()"
            )
        first = next(iter(selected.values()))
        self.arithmetic = dtype or torch.promote_types(first.dtype, torch.float32)
        self.device = first.device

        everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.shapes = {name: p.shape for name, p in selected.items()}
        self.constants = {
            name: self._cast(t.detach()) for name, t in everything.items() if name not in selected
        }
        self.slots = tensor_slots(model)
        self.theta = torch.cat([self._cast(p.detach()).flatten() for p in selected.values()])
        self.size = self.theta.numel()
        super().__init__(np.float64, (self.size, self.size))

    def _matvec(self, v: NDArray) -> Vector:
        direction = self._vector(v)

        def product(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
            gradient = torch.func.grad(self._value)
            return torch.func.vjp(lambda t: gradient(t, x, y), theta)[1](direction)[0]

        return self._sum(product)

    def gradient(self, shift: Vector | None = None) -> Vector:
        """`∇L(θ + shift)`, flat, in the order of `shapes`."""
        return self._sum(torch.func.grad(self._value), shift)

    def value(self, shift: Vector | None = None) -> float:
        """`L(θ + shift)`."""
        with torch.no_grad():
            return float(self._sum(self._value, shift, finite=False)[0])

    def _sum(
        self,
        work: Callable[[Tensor, Tensor, Tensor], Tensor],
        shift: Vector | None = None,
        finite: bool = True,
    ) -> Vector:
        """The mean over the data of what a batch gives."""
        start = self.theta if shift is None else self.theta + self._vector(shift)
        total: Any = 0.0
        with evaluating(self.model), sdpa_kernel(SDPBackend.MATH):
            for x, y in self.batches:
                part = work(start, fresh_strides(self._cast(x)), self._cast(y))
                total = total + part.detach().double().cpu().numpy().ravel() * (len(x) / self.count)
        if finite and not np.isfinite(total).all():
            raise Refused(
                "the derivatives of the loss are not finite numbers at these parameters: nothing can be said of them"
            )
        return total

    def _value(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        pieces = theta.split([shape.numel() for shape in self.shapes.values()])
        parameters = {
            n: t.reshape(shape) for (n, shape), t in zip(self.shapes.items(), pieces, strict=True)
        }
        named = {**self.constants, **parameters}
        # every place of a shared tensor: torch's own tying leaves a module that is used twice changed
        tensors = {slot: t for name, t in named.items() for slot in self.slots[name]}
        output = torch.func.functional_call(self.model, tensors, (x,), tie_weights=False)
        value = self.loss(output, y)
        if value.dim() != 0:
            raise InputError(
                f"the loss must be one number, a mean over the batch; got shape {tuple(value.shape)}"
            )
        return value

    def _require_separable(self) -> None:
        """Refuse a network whose mean loss depends on how the data is cut into batches."""
        mixing = [
            n
            for n, m in self.model.named_modules()
            if isinstance(m, _BatchNorm) and m.running_mean is None
        ]
        if mixing and len(self.batches) > 1:
            raise Refused(
                f"{mixing[0]!r} has no running statistics, so that the loss depends on how the data is cut into batches: "
                f"give all {self.count} samples as one batch (batch_size={self.count}), or keep running statistics"
            )

    def _cast(self, t: Tensor) -> Tensor:
        return t.to(device=self.device, dtype=self.arithmetic if t.is_floating_point() else t.dtype)

    def _vector(self, v: NDArray) -> Tensor:
        return torch.as_tensor(v.ravel(), dtype=self.arithmetic, device=self.device)


def _cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return nn.functional.cross_entropy(z, y)
    if (y < 0).any():
        raise InputError(
            "labels must not be negative: leave out the samples that are to be ignored"
        )
    return nn.functional.cross_entropy(z, y.long())


def _mean_square(z: Tensor, y: Tensor) -> Tensor:
    z = z.reshape(len(z), -1)
    y = y.reshape(len(y), -1)
    if z.shape != y.shape:  # would be broadcast
        raise InputError(
            f"expected targets of the outputs' shape {tuple(z.shape)}, got {tuple(y.shape)}"
        )
    return nn.functional.mse_loss(z, y)


_LOSSES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {"ce": _cross_entropy, "mse": _mean_square}


def _batches(data: Any, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    require_counts(batch_size=batch_size)
    if (
        isinstance(data, tuple)
        and len(data) == 2
        and all(isinstance(part, Tensor) and part.dim() for part in data)
    ):
        x, y = data
        if len(x) != len(y):
            raise InputError(f"there are {len(x)} inputs and {len(y)} labels")
        data = zip(x.split(batch_size), y.split(batch_size), strict=True)
    try:
        batches = [(x, y) for x, y in data]
    except (TypeError, ValueError):
        batches = []
    if not batches or not all(
        isinstance(part, Tensor) and part.numel() for pair in batches for part in pair
    ):
        raise InputError(
            f"data must be a pair of tensors (x, y) or batches of such pairs, none of them empty; got {describe(data)}"
        )
    return batches
