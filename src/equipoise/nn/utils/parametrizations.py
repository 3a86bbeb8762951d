"""1-Lipschitz parametrizations for existing layers, on `torch.nn.utils.parametrize`.

    import equipoise as eq
    layer = eq.nn.utils.parametrizations.sr(nn.Conv2d(3, 8, 3))

Each registers a parametrization on the weight and returns the layer. Guarantee: the layer has constant at most 1 for every value
of its parameters and every input size, rounding of the weight included. `torch.nn.utils.parametrize.remove_parametrizations`
leaves the plain layer with the weight it has then. Layers that are built so from the start are `SRConv2d`, `AOLLinear`, ….
"""

from torch import nn

from equipoise.nn.orthogonal.cayley import Cayley
from equipoise.nn.orthogonal.polar import BCOP, RKO, Bjorck
from equipoise.nn.orthogonal.soc import SOC
from equipoise.nn.parametrize import register
from equipoise.nn.rescaling import AOL, SN, SR, Side

__all__ = ["aol", "bcop", "bjorck", "cayley", "rko", "sn", "soc", "sr"]


def sn(
    module: nn.Module, name: str = "weight", *, iterations: int = 8, grid: int = 16
) -> nn.Module:
    """Spectral normalisation: the weight over a proved upper bound of its norm.

    Args:
        module: `nn.Linear`, `nn.Conv1d/2d/3d` or `nn.ConvTranspose2d`.
        name: of the parameter.
        iterations: of the bound of the norm.
        grid: frequencies of the bound, for convolutions.

    >>> sn(nn.Linear(4, 3)).weight.shape
    torch.Size([3, 4])
    """
    return register(module, SN, name, iterations=iterations, grid=grid)


def sr(
    module: nn.Module,
    name: str = "weight",
    *,
    t: int = 2,
    learn_q: bool = True,
    side: Side = "smaller",
) -> nn.Module:
    """Spectral rescaling: one factor per channel, from a power of the Gram matrix.

    Args:
        module: `nn.Linear`, `nn.Conv1d/2d/3d` or `nn.ConvTranspose2d`.
        name: of the parameter.
        t: steps.
        learn_q: whether the weights q are learned.
        side: what is rescaled, inputs or outputs.

    >>> sr(nn.Linear(4, 3)).weight.shape
    torch.Size([3, 4])
    """
    return register(module, SR, name, t=t, learn_q=learn_q, side=side)


def aol(module: nn.Module, name: str = "weight", *, side: Side = "smaller") -> nn.Module:
    """Almost-orthogonal layers: one factor per channel, from the row sums of the Gram matrix.

    Args:
        module: `nn.Linear`, `nn.Conv1d/2d/3d` or `nn.ConvTranspose2d`.
        name: of the parameter.
        side: what is rescaled, inputs or outputs.

    >>> aol(nn.Linear(4, 3)).weight.shape
    torch.Size([3, 4])
    """
    return register(module, AOL, name, side=side)


def bcop(module: nn.Module, name: str = "weight") -> nn.Module:
    """Block convolution orthogonal parametrization: orthogonal at every frequency.

    Args:
        module: `nn.Linear`, `nn.Conv1d/2d/3d` or `nn.ConvTranspose2d`.
        name: of the parameter.

    >>> bcop(nn.Linear(4, 3)).weight.shape
    torch.Size([3, 4])
    """
    return register(module, BCOP, name)


def cayley(module: nn.Module, name: str = "weight") -> nn.Module:
    """Cayley transform of a dense layer: orthonormal rows or columns.

    Args:
        module: `nn.Linear`.
        name: of the parameter.

    >>> cayley(nn.Linear(4, 3)).weight.shape
    torch.Size([3, 4])
    """
    return register(module, Cayley, name)


def soc(module: nn.Module, name: str = "weight") -> nn.Module:
    """Exponential of a skew-symmetric matrix, for a dense layer: orthonormal rows or columns.

    Args:
        module: `nn.Linear`.
        name: of the parameter.

    >>> soc(nn.Linear(4, 3)).weight.shape
    torch.Size([3, 4])
    """
    return register(module, SOC, name)


def rko(module: nn.Module, name: str = "weight") -> nn.Module:
    """The kernel as a matrix made orthogonal, over the root of the number of overlapping patches.

    Args:
        module: `nn.Linear`, `nn.Conv1d/2d/3d` or `nn.ConvTranspose2d`.
        name: of the parameter.

    >>> rko(nn.Linear(4, 3)).weight.shape
    torch.Size([3, 4])
    """
    return register(module, RKO, name)


def bjorck(module: nn.Module, name: str = "weight", *, steps: int = 15) -> nn.Module:
    """The kernel as a matrix, made nearly orthogonal by a number of steps.

    Args:
        module: `nn.Linear` or `nn.Conv2d`.
        name: of the parameter.
        steps: classical steps of Björck & Bowie.

    >>> bjorck(nn.Linear(4, 3)).weight.shape
    torch.Size([3, 4])
    """
    return register(module, Bjorck, name, steps=steps)
