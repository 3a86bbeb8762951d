"""What is known of a module's Lipschitz constant by its construction, whatever its parameters are."""

import math
from typing import Any

from torch import nn

from equipoise.core.checks import require_module
from equipoise.core.modules import constructed, hooked
from equipoise.core.precision import inflate
from equipoise.nn.activations import slopes
from equipoise.nn.parametrize import PLAIN, proved_constant

_ISOMETRIES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_MEAN = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def known_constant(module: nn.Module) -> float | None:
    """An upper bound of the module's ℓ2 constant in evaluation mode that holds for all values of its parameters, or
    None.

    It is read off the construction: equipoise's layers have 1, compositions multiply, activations and pooling come
    from tables. A module of yours can state its own, `lipschitz_upper = by_construction(…)`; that is your claim. Plain
    weights, parametrizations of yours, batch norm, modules with hooks and other forwards give None:
    `equipoise.lipschitz_bound` bounds those, for the weights they have now.

    >>> known_constant(nn.Sequential(nn.Flatten(), nn.ReLU())), known_constant(nn.MaxPool2d(3, 2, 1))
    (1.0, 2.0)
    """
    if hooked(require_module(module, "module")):
        return None
    if isinstance(module, PLAIN):
        return proved_constant(module)
    stated = constructed(module)
    if stated is not None:
        return stated
    if type(module) is nn.Sequential:
        total = 1.0
        for part in module:
            constant = known_constant(part)
            if constant is None:
                return None
            total = total if constant == 1 else inflate(total * constant)
        return total
    return _plain(module)


def _plain(module: nn.Module) -> float | None:
    """PyTorch's own modules, by exact type: a subclass may have another forward."""
    kind = type(module)
    if kind in _ISOMETRIES or kind in _RANDOM:
        return 1.0
    if kind in _MAX:
        return overlap(module)
    if kind in _MEAN:
        plain = getattr(module, "count_include_pad", True) and not module.ceil_mode
        return 1.0 if plain and getattr(module, "divisor_override", None) is None else None
    if kind in _ADAPTIVE:
        size = module.output_size
        return 1.0 if size == 1 or (isinstance(size, tuple) and set(size) == {1}) else None
    interval = slopes(module)
    return None if interval is None else max(map(abs, interval))


def overlap(pool: Any) -> float:
    """`√Π ⌈k·gcd(s, d)/s⌉` of a max pooling: the number of windows that one pixel reaches, 1 without overlap.

    >>> overlap(nn.MaxPool2d(3, 2, 1)), overlap(nn.MaxPool2d(2))
    (2.0, 1.0)
    """
    dims = next(d for d, kind in enumerate(_MAX, 1) if isinstance(pool, kind))
    k, s, d = (
        (v,) * dims if isinstance(v, int) else tuple(v)
        for v in (pool.kernel_size, pool.stride if pool.stride is not None else pool.kernel_size, pool.dilation)
    )
    windows = math.prod(-(-a * math.gcd(b, c) // b) for a, b, c in zip(k, s, d, strict=True))
    whole = math.isqrt(windows)
    return float(whole) if whole * whole == windows else inflate(math.sqrt(windows))
