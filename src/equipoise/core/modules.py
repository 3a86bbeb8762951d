"""What a module's class promises, and whether the module at hand still is what that class describes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def changed(module: nn.Module, owner: type) -> bool:
    """Whether a subclass of `owner`, or the instance, has another version of something that `owner` works with.

    >>> changed(nn.ReLU(), nn.ReLU)
    False
    """
    kinds = type(module).__mro__
    names = {name for kind in kinds[: kinds.index(owner)] for name in vars(kind)}
    names |= {name for name, value in vars(module).items() if callable(value)}
    if names & {"__call__", "__getattribute__"}:
        return True
    return any(hasattr(owner, name) for name in names if not name.startswith("__") and name != "extra_repr")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode restored after.

    >>> layer = nn.Dropout()
    >>> with evaluating(layer):
    ...     layer.training
    False
    >>> layer.training
    True
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
