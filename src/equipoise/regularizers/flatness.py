"""Training for flat minima: noise on the weights, and anticorrelated noise.

SAM and ASAM are `pytorch_optimizer.SAM`; run its second pass under `frozen_statistics`, so that batch-norm statistics move
once per step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
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


class AnticorrelatedNoise:
    """Anti-PGD: `θ_{k+1} = θ_k − η∇L(θ_k) + (ξ_{k+1} − ξ_k)`, the noise of one step taken back in the next.

    Call `step()` after `optimizer.step()`; `finish()` takes the last noise back, so that what is kept is the plain iterate.
    Reference: Orvieto et al. 2022.

    >>> model = nn.Linear(2, 2)
    >>> before = model.weight.detach().clone()
    >>> noise = AnticorrelatedNoise(model.parameters(), sigma=0.1)
    >>> noise.step()
    >>> noise.finish()
    >>> torch.allclose(model.weight, before, atol=1e-6)
    True
    """

    def __init__(self, parameters: Iterable[Tensor], sigma: float, generator: torch.Generator | None = None) -> None:
        self.sigma = require_number(sigma, "sigma", least=0)
        self.parameters, self.generator = list(parameters), generator
        self.noise = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Draw the next noise, take the last one back."""
        for i, p in enumerate(self.parameters):
            fresh = self.sigma * _noise_like(p, self.generator)
            p.add_(fresh - self.noise[i])
            self.noise[i] = fresh

    @torch.no_grad()
    def finish(self) -> None:
        """Take the last noise back; a later `step()` starts anew."""
        for i, p in enumerate(self.parameters):
            p.sub_(self.noise[i])
            self.noise[i] = torch.zeros_like(self.noise[i])

    def state_dict(self) -> dict[str, Tensor]:
        """The noise that is in the parameters now."""
        return {str(i): noise.clone() for i, noise in enumerate(self.noise)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state_dict` was taken."""
        noise = [state[key].clone() for key in sorted(state, key=int)]
        if [n.shape for n in noise] != [n.shape for n in self.noise]:
            raise InputError("this state belongs to other parameters: the shapes differ")
        self.noise = noise


def _noise_like(p: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
