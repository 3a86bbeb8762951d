"""Training for flat minima: noise on the weights.

SAM and ASAM are `pytorch_optimizer.SAM`; run its second pass under `frozen_statistics`, so that batch-norm statistics move
once per step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.checks import require_module, require_number
from equipoise.core.errors import InputError
from equipoise.core.modules import tensor_slots
from equipoise.regularizers.selection import Names, name_matches


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """While inside, batch normalisation normalises by the batch but does not move its running statistics.

    >>> model = nn.BatchNorm1d(2)
    >>> with frozen_statistics(model):
    ...     _ = model(torch.randn(8, 2))
    >>> int(model.num_batches_tracked)
    0
    """
    tracked: list[Any] = [m for m in model.modules() if m.training and getattr(m, "track_running_stats", False) is True]
    for module in tracked:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracked:
            module.track_running_stats = True


def smoothed_loss(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    inputs: Any,
    sigma: float,
    *,
    samples: int = 1,
    names: Names = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`(1/m)·Σ_i L(θ + Δ_i)` with `Δ_i ~ N(0, σ²I)` on the chosen parameters: an unbiased estimate of the smoothed loss.

    The gradient reaches θ. Running statistics move once, with the first sample.

    Args:
        model: the network.
        loss: a function of the model's output.
        inputs: what the model is called with.
        sigma: standard deviation of the noise.
        samples: draws.
        names: of parameters, in full (`"fc.weight"`); glob, compiled pattern, or several.
        generator: source of the draws.

    >>> model = nn.Linear(4, 3)
    >>> y = torch.tensor([0, 1, 2, 0, 1])
    >>> smoothed_loss(model, lambda z: nn.functional.cross_entropy(z, y), torch.randn(5, 4), sigma=0.1).backward()
    """
    require_number(sigma, "sigma", least=0)
    require_number(samples, "samples", least=1, whole=True)
    require_module(model)
    chosen = {name: p for name, p in model.named_parameters() if name_matches(name, names)}
    if not chosen:
        raise InputError(f"no parameter of this model has a name that matches {names!r}; see model.named_parameters()")
    slots, total = tensor_slots(model, buffers=False), torch.zeros(())
    for i in range(samples):
        moved = {name: p + sigma * _noise_like(p, generator) for name, p in chosen.items()}
        tensors = {slot: p for name, p in moved.items() for slot in slots[name]}
        with nullcontext() if i == 0 else frozen_statistics(model):
            value = loss(torch.func.functional_call(model, tensors, (inputs,), tie_weights=False))
        total = value if i == 0 else total + value
    return total / samples


def _noise_like(p: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
