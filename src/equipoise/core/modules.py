"""What a module claims of itself, and whether the module at hand still is what its class describes.

A module states a Lipschitz constant in ℓ2 in one of two forms, next to its `forward`, in the same class:

    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound     # for this input shape and the weights it has now
    lipschitz_constant: float                                            # the short form: for all shapes and all weights

`stands` says whether such a claim is about the map that a call performs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules import module as _modules


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


#: what a call of a module goes through
_CALL = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward")


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module or of a part of it does more than its class says: hooks, or a patched forward.

    >>> hooked(nn.ReLU())
    False
    """
    if _modules._global_forward_hooks or _modules._global_forward_pre_hooks:
        return True
    return any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in module.modules())


def stands(module: nn.Module, claim: str) -> bool:
    """Whether the claim (the name of a method or attribute of the class) speaks of the map that a call performs.

    The class that defines `forward` is the class that makes the claim, nothing it has is defined anew by a subclass or the
    instance, and nothing stands between a call and that forward.
    """
    maker, claimer = (next((c for c in type(module).__mro__ if name in vars(c)), None) for name in ("forward", claim))
    if maker is None or maker is not claimer or maker is nn.Module or changed(module, maker):
        return False
    if any(name in vars(module) for name in (*_CALL, claim)) or hooked(module):
        return False
    return all(getattr(type(module), name, None) is getattr(nn.Module, name, None) for name in _CALL[1:])


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
