"""Lower ends of local Lipschitz constants: pairs of inputs trained by gradient ascent, and Jacobian norms, in float64."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import one_line
from equipoise.lipschitz.capture import Program, flat_outputs, run_program
from equipoise.lipschitz.values import EXACT

Function = Callable[[Tensor], Any]


def lower_ends(
    model: nn.Module, program: Program, x: Tensor, radius: float, steps: int, seed: int
) -> tuple[Tensor, str]:
    """Lower ends in float64: by gradients of the model, else of the captured program, else by random pairs; with a note.

    The program is attacked sample by sample. It is taken at once where samples have no batch dimension in the output, and
    where an operation of PyTorch is not the function it stands for (see `values`).
    """
    x = x.detach().double()
    real = any(n.target in EXACT for n in program.nodes)
    ways: list[tuple[str, Callable[[], Tensor]]] = []
    if not real and not program.notes:
        ways.append(("", lambda: climbed(_in_float64(model, program, x), x, radius, steps, seed)))
    ways.append(("", lambda: climbed(_of_program(program), x, radius, steps, seed)))
    ways.append(("the lower end is from random pairs", lambda: _drawn(_of_program(program), x, radius, steps, seed)))
    why = ""
    for note, attack in ways:
        try:
            found = attack()
        except Exception as error:  # noqa: BLE001 - the model's own code may raise anything; the upper end stands without an attack
            why = f"{type(error).__name__}: {one_line(error)}"
            continue
        return found, f"{note}: no gradient ({why})" if note else ""
    return torch.zeros(len(x), dtype=torch.float64), f"no lower end: the attack failed ({why})"


def attacked(model: nn.Module, x: Tensor, radius: float, steps: int, seed: int) -> Tensor:
    """Lower ends by gradients of the model itself, copied to float64."""
    return climbed(_copied(model), x.detach().double(), radius, steps, seed)


def _copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double().requires_grad_(False)


def _in_float64(model: nn.Module, program: Program, x: Tensor) -> Function:
    """A copy of the model in float64, which must compute there what was captured: code can branch on the dtype."""
    model = _copied(model)
    with torch.no_grad():
        there, here = _rows(model, x[:1]), _of_program(program)(x[:1])
    if not torch.allclose(there, here, rtol=1e-3, atol=1e-3 * float(here.abs().max())):
        raise ValueError("the model computes something else in float64")
    return model


def _rows(f: Function, x: Tensor) -> Tensor:
    """The outputs of every sample as one row; sample by sample where they have no batch dimension."""
    parts = flat_outputs(f(x.clone()))
    if all(t.dim() > 0 and len(t) == len(x) for t in parts):
        return torch.cat([t.reshape(len(t), -1) for t in parts], 1)
    return torch.stack([torch.cat([t.flatten() for t in flat_outputs(f(one[None].clone()))]) for one in x])


def _of_program(program: Program) -> Function:
    """The captured program in float64, sample by sample, as the real function it stands for."""

    def one(sample: Tensor) -> Tensor:
        return torch.cat([t.double().flatten() for t in run_program(program, [sample[None]], exact=True)])

    return lambda x: torch.stack([one(sample) for sample in x])


def climbed(f: Function, x: Tensor, radius: float, steps: int, seed: int) -> Tensor:
    """The best of finite pairs trained by projected gradient ascent and of Jacobian norms."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64)

    best, direction = _jacobian(f, x, noise(), steps)
    a = project(0.5 * radius * direction, radius)
    b = -a + project(0.1 * radius * unit(noise()), radius)
    for step in range(steps):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        with torch.enable_grad():
            ratio = stretch(f, x + a, x + b)
            grad_a, grad_b = torch.autograd.grad(ratio.sum(), (a, b))
        best = torch.maximum(best, _known(ratio))
        size = radius * 0.2 * (1 - step / steps)
        a, b = (project(d.detach() + size * unit(g), radius) for d, g in ((a, grad_a), (b, grad_b)))
    with torch.no_grad():
        best = torch.maximum(best, _known(stretch(f, x + a, x + b)))
    return best * (1 - 1e-6)


def _drawn(f: Function, x: Tensor, radius: float, steps: int, seed: int) -> Tensor:
    """The best of random pairs: needs no gradient."""
    generator = torch.Generator().manual_seed(seed)
    best = torch.zeros(len(x), dtype=torch.float64)
    with torch.no_grad():
        for _ in range(steps):
            a = project(0.5 * radius * unit(torch.randn(x.shape, generator=generator, dtype=torch.float64)), radius)
            best = torch.maximum(best, _known(stretch(f, x + a, x - a)))
    return best * (1 - 1e-6)


def _known(ratio: Tensor) -> Tensor:
    """Stretches that are numbers; 0 for the others."""
    return torch.where(torch.isfinite(ratio), ratio, torch.zeros_like(ratio)).detach()


def unit(v: Tensor) -> Tensor:
    """Every sample divided by its norm."""
    return v / torch.linalg.vector_norm(v.flatten(1), dim=1).clamp_min(1e-300).reshape(-1, *[1] * (v.dim() - 1))


def project(d: Tensor, radius: float) -> Tensor:
    """Every sample scaled into the ball."""
    norms = torch.linalg.vector_norm(d.flatten(1), dim=1).reshape(-1, *[1] * (d.dim() - 1))
    return d * (radius * (1 - 1e-9) / norms.clamp_min(radius))


def stretch(f: Function, a: Tensor, b: Tensor) -> Tensor:
    """`‖f(a) − f(b)‖/‖a − b‖` per sample, less what float64 rounding may have added; 0 for pairs too close to tell."""
    fa, fb = _rows(f, a), _rows(f, b)
    gap = torch.linalg.vector_norm((a - b).flatten(1), dim=1)
    noise = 1e-11 * (fa.detach().abs().amax(1) + fb.detach().abs().amax(1)) * math.sqrt(fa.shape[1])
    size = (torch.linalg.vector_norm(fa - fb, dim=1) - noise).clamp_min(0)
    return torch.where(gap > 1e-9, size / gap.clamp_min(1e-9), torch.zeros_like(gap))


def _jacobian(f: Function, x: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Power iteration on JᵀJ at every sample by vjp; `‖Jᵀu‖/‖u‖` is a lower bound of ‖J‖ for every u."""
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        out = _rows(f, leaf)
        u = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        size = torch.zeros(len(x), dtype=torch.float64)
        for _ in range(steps):
            (v,) = torch.autograd.grad(out, leaf, unit(u), retain_graph=True)
            size = torch.maximum(size, _known(torch.linalg.vector_norm(v.flatten(1), dim=1)))
            h = 1e-6
            with torch.no_grad():
                u = _rows(f, x + h * unit(v)) - _rows(f, x - h * unit(v))
    return size, unit(v)
