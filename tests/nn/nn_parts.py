"""Shared by the tests of layers, activations and models: Jacobians and attacks, slow and obviously right."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from equipoise.nn.convert import plain
from equipoise.nn.orthogonal.frequency import FrequencyConv2d
from equipoise.norms import spectral_norm


def jacobian_norm(module: nn.Module, x: Tensor) -> float:
    """Spectral norm of the Jacobian of one sample (without batch dimension) at x, by materialising it in the module's dtype."""
    jacobian = torch.autograd.functional.jacobian(lambda v: module(v[None])[0], x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()).double(), ord=2))


def worst_ratio(module: nn.Module, shape: tuple[int, ...], dtype=torch.float64, pairs=200, seed=0) -> float:
    """Largest ‖f(x) − f(x')‖/‖x − x'‖ over random pairs at several scales: a lower bound of the constant."""
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for scale in (1e-3, 0.1, 1.0, 10.0):
        x = torch.randn(pairs, *shape, generator=generator, dtype=dtype)
        d = torch.randn(pairs, *shape, generator=generator, dtype=dtype) * scale
        with torch.no_grad():
            grown = (module(x + d) - module(x)).flatten(1).norm(dim=1)
        worst = max(worst, float((grown / d.flatten(1).norm(dim=1)).max()))
    return worst


def raw(layer: nn.Module) -> Tensor:
    """The parameter that the weight of a layer is made of."""
    return layer.parametrizations.weight.original if is_parametrized(layer) else layer.raw


def method(layer: nn.Module) -> nn.Module:
    """The parametrization of the weight of a layer."""
    return layer.parametrizations.weight[0]


def upper(layer: nn.Module, shape: tuple[int, ...]) -> float:
    """A proved upper bound of the layer's constant on inputs of this shape, from the weight it uses."""
    if not is_parametrized(layer):
        return layer.lipschitz_upper(shape).value
    size = None if isinstance(layer, nn.Linear) else shape[1:]
    return float(spectral_norm(layer, input_size=size, rtol=1e-6).upper)


def exported(layer: nn.Module, shape: tuple[int, ...] | None = None) -> nn.Module:
    """The plain layer with the weight it uses, for inputs of this shape where that matters."""
    if shape is not None and isinstance(layer, FrequencyConv2d):
        return layer.export(shape[-2:])
    return plain(layer)[0]
