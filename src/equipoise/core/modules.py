"""What a module claims of itself, and whether the module at hand still is what its class describes.

A module states a Lipschitz constant in ℓ2 by one attribute, next to its `forward`, in the same class:

    def lipschitz_upper(self, input_shape: Shape) -> Bound     # for this input shape and the weights it has now

and where its construction proves a constant for all shapes and all weights it says so there: `@by_construction(1.0)` above
the method, or `lipschitz_upper = by_construction(1.0)` without one. `is_unmodified` says whether such a claim is about the map
that a call performs.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from equipoise.core.bounds import Bound, Shape, as_upper
from equipoise.core.errors import Refused, explained

Measured = Callable[[Any, Shape], Bound]


class by_construction:
    """What the construction of a module proves whatever its weights and input shape are: a number, or a function of the module.

    A claim of whoever writes it. A function may return None where the module is no longer what was constructed. Without a
    method below it, the module has a constant by construction and no bound of its own for the weights it has now; None
    above a method: that bound only.

    >>> class Half(nn.Module):
    ...     lipschitz_upper = by_construction(0.5)
    ...     def forward(self, x):
    ...         return x / 2
    >>> constructed(Half()), hasattr(Half(), "lipschitz_upper")
    (0.5, False)
    """

    def __init__(self, constant: float | Callable[[Any], float | None] | None) -> None:
        self.constant = constant
        self.measured: Measured | None = None

    def __call__(self, measured: Measured) -> Self:
        """As a decorator: the method that bounds the module for the weights it has now."""
        self.measured = measured
        functools.update_wrapper(self, measured)
        return self

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        if self.measured is None:
            raise AttributeError(
                f"{owner.__name__} has a constant by construction only: use equipoise.lipschitz_bound"
            )
        return functools.partial(self._measure, module)

    def _measure(self, module: nn.Module, input_shape: Shape) -> Bound:
        assert self.measured is not None
        if not is_unmodified(module, "lipschitz_upper"):
            raise Refused(
                f"lipschitz_upper of {type(module).__name__} does not describe its calls: hooks, a subclass or a patch change "
                "them; equipoise.lipschitz_bound bounds what is called"
            )
        return self.measured(module, input_shape)


def constructed(module: nn.Module) -> float | None:
    """The constant that the module's class states by construction; None without one, or where it is not about its calls."""
    claim = inspect.getattr_static(type(module), "lipschitz_upper", None)
    if not isinstance(claim, by_construction) or not is_unmodified(module, "lipschitz_upper"):
        return None
    constant = claim.constant(module) if callable(claim.constant) else claim.constant
    return None if constant is None else as_upper(constant)


def _defining(kind: type, name: str) -> type | None:
    """The class that defines an attribute."""
    return next((c for c in kind.__mro__ if name in vars(c)), None)


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module or of a part of it does more than its class says: hooks, or a patched forward.

    >>> hooked(nn.ReLU())
    False
    """
    everywhere = _modules._global_forward_hooks or _modules._global_forward_pre_hooks
    return bool(everywhere) or any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in module.modules()
    )


def is_unmodified(module: nn.Module, method: str) -> bool:
    """True if no subclass, hook or patch can have changed what `method` describes: the map of `forward`.

    The class that defines `forward` is the class that defines the method, or one of `torch.nn`, and no subclass of it outside
    `equipoise.nn` and no instance attribute replaces anything that it has.

    Args:
        module: the module.
        method: name of the method.
    """
    maker = _defining(type(module), "forward")
    claimer = _defining(type(module), method)
    if maker is None or claimer is None or maker is nn.Module or hooked(module):
        return False
    if maker is not claimer and not maker.__module__.startswith("torch.nn."):
        return False
    kinds = type(module).__mro__
    base = next(
        kind for kind in kinds if kind is maker or kind.__module__.startswith("equipoise.nn.")
    )
    names = {name for kind in kinds[: kinds.index(base)] for name in vars(kind)}
    names |= {name for name, value in vars(module).items() if callable(value)}
    names.discard("extra_repr")
    if names & {"__call__", "__getattribute__"}:
        return False
    return not any(hasattr(base, name) for name in names if not name.startswith("__"))


def tensor_slots(model: nn.Module) -> dict[str, list[str]]:
    """For every distinct parameter and buffer, by its first name, all places that hold it, every module counted once.

    `functional_call` with its own tying leaves a module that is used twice with the replaced parameters (torch 2.13); so places
    are listed here and its tying is switched off.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> tensor_slots(nn.Sequential(layer, nn.ReLU(), layer))
    {'0.weight': ['0.weight']}
    """
    first: dict[int, str] = {}
    slots: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        for local, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                full = f"{name}.{local}" if name else local
                slots.setdefault(first.setdefault(id(tensor), full), []).append(full)
    return slots


def run_on(model: nn.Module, examples: Sequence[Tensor]) -> Any:
    """What the model returns on the example; where it does not run, that is said in one sentence.

    Args:
        model: the network.
        examples: its inputs.
    """
    with explained("the model does not run on example_input"), torch.no_grad():
        return model(*examples)


def flat_tensors(value: Any) -> list[Tensor]:
    """The tensors in a nested value."""
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


def flat_outputs(output: Any) -> list[Tensor]:
    """The floating tensors of a nested output, in order."""
    return [x for x in flat_tensors(output) if x.is_floating_point()]


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
    if any(modes.values()):  # exported programs have one mode, and refuse to be switched
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def along(values: Tensor, like: Tensor, dim: int = 0) -> Tensor:
    """One value for each entry of a dimension, shaped to broadcast against a tensor.

    Args:
        values: (N,).
        like: the tensor.
        dim: its dimension of length N.

    >>> along(torch.ones(3), torch.zeros(2, 3, 4), 1).shape
    torch.Size([1, 3, 1])
    """
    shape = [1] * like.dim()
    shape[dim] = -1
    return values.reshape(shape)


def fresh_strides(x: Tensor) -> Tensor:
    """The same numbers with the strides of a freshly allocated tensor: x itself if it has them, else a copy.

    Differentiable. Every part of the package that differentiates a network gives it what comes out of here. One channel
    leaves a tensor's layout open: a grey image (N, 1, H, W) read from (N, H, W, 1) has the strides of channels-last,
    `is_contiguous()` is true of it and `contiguous()` hands it back unchanged; but torch chooses the kernels of a
    convolution by the strides, and every layer after it follows. In torch 2.13 the oneDNN kernels for channels-last write
    past their buffers in the backward pass of a convolution with few channels on processors with AVX2 and one thread.

    >>> grey = torch.rand(4, 8, 8, 1).permute(0, 3, 1, 2)
    >>> grey.is_contiguous(), grey.contiguous().stride(), fresh_strides(grey).stride()
    (True, (64, 1, 8, 1), (64, 64, 8, 1))
    """
    if x.stride() == torch.empty(x.shape, device="meta").stride():
        return x
    return x.clone(memory_format=torch.contiguous_format)
