"""Weights that are functions of raw parameters: `torch.nn.utils.parametrize` with a proof, and a cache for evaluation.

A `Parametrization` maps a raw tensor to a weight such that the layer with that weight is 1-Lipschitz for every input size.
`register` puts it on an existing layer; subclasses of `Parametrized` are layers that register their own when they are built.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from equipoise.core import (
    Bound,
    InputError,
    Kind,
    Refused,
    Shape,
    by_construction,
    did_you_mean,
    full_precision,
)
from equipoise.maps.geometry import Geometry
from equipoise.maps.reading import CONVOLUTIONS, geometry_of

Tensors = tuple[Tensor, ...]

#: the plain layers that a parametrization may be registered on
PLAIN: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS, nn.ConvTranspose2d)
#: for how many image sizes an evaluated module keeps its effective tensors
_CACHED_SIZES = 4


class Computed(nn.Module):
    """A module with effective tensors `e = g(θ, args)`: subclasses write `compute`, their forward reads `effective`.

    * Training mode: `g` is computed in every forward pass, with its graph.
    * Evaluation mode: `g` is computed once and cached with a copy of θ, which is compared bit for bit before each use, so
      that no way of changing θ (optimizer, `load_state_dict`, `.data`) leaves a stale value. Gradients still flow: the
      backward pass computes `g` again.
    * `torch.export`, `torch.onnx` and `torch.jit.trace` in evaluation mode: the values are constants of the program.
    * `torch.compile`, `torch.func` and forward differentiation: `g` is traced like any other code.

    `g` runs in the parameters' dtype, with full-precision products and without autocast.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[Any, _Cached] = {}
        self._sources: Tensors = ()

    def compute(self, *args: Any) -> Tensors:
        """The effective tensors as a differentiable, traceable function of the arguments and of this module's parameters."""
        raise NotImplementedError

    def effective(self, *args: Any) -> Tensors:
        """`compute(*args)` for the current parameters. Arguments are tensors, or keys such as an image size."""
        if torch.compiler.is_dynamo_compiling():
            return self.compute(*args)
        tensors = self._tensors(args)
        _check_dtypes(type(self).__name__, tensors)
        if self.training:
            return self._exact(args)
        if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
            return self._as_constants(args, tensors)
        if not all(map(is_plain_call, tensors)):
            return self._exact(args)

        values = self._evaluated(args, tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return _Recomputed.apply(self, args, values, *tensors)
        return values

    def train(self, mode: bool = True) -> Self:
        """Training or evaluation mode; remembers the real tensors, which an export replaces by fake ones."""
        self._sources = self._tensors(())
        return super().train(mode)

    def _tensors(self, args: tuple[Any, ...]) -> Tensors:
        return (*(a for a in args if isinstance(a, Tensor)), *self.parameters(), *self.buffers())

    def _exact(self, args: tuple[Any, ...]) -> Tensors:
        """`g` in full precision, with its graph; not cached."""
        device = next((t.device.type for t in self._tensors(args)), "cpu")
        autocast: Any = contextlib.nullcontext()
        if torch.is_autocast_enabled(device):  # else nothing, so that graphs stay plain
            autocast = torch.autocast(device, enabled=False)
        # backend switches cannot be traced; the compiled graph follows the global ones
        precise = contextlib.nullcontext() if torch.compiler.is_compiling() else full_precision()
        with autocast, precise:
            return self.compute(*args)

    def _evaluated(self, args: tuple[Any, ...], tensors: Tensors) -> Tensors:
        """The cached values for these tensors, computed if there are none."""
        key = tuple(a for a in args if not isinstance(a, Tensor))
        cached = self._cache.get(key)
        if cached is None or not cached.fits(tensors):
            with torch.inference_mode(False), torch.no_grad():
                copies = tuple(t.detach().clone() for t in tensors)
                values = tuple(v.detach() for v in _compute_with(self, copies, args))
            cached = _Cached(copies, values)
            while len(self._cache) >= _CACHED_SIZES:
                self._cache.pop(next(iter(self._cache)))
            self._cache[key] = cached
        if not any(t.is_inference() for t in tensors):
            self._sources = tensors
        return cached.values

    def _as_constants(self, args: tuple[Any, ...], tensors: Tensors) -> Tensors:
        """The values computed outside the trace; traced like other code if the real tensors are not known."""
        if torch.compiler.is_exporting():
            if not _same_storage(self._sources, tensors):
                return self._exact(args)
            tensors = self._sources
        args = _with_tensors(args, iter(tensors))

        def work() -> Tensors:
            with full_precision(), torch.no_grad():
                return self._evaluated(args, tensors)

        with ThreadPoolExecutor(1) as pool:  # tracing is local to a thread
            return pool.submit(work).result()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}  # a copy or a pickle computes its own


class _Cached:
    """Effective tensors, and copies of the tensors they were computed from."""

    def __init__(self, copies: Tensors, values: Tensors) -> None:
        self.copies = copies
        self.values = values
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [v._version for v in self.values if not v.is_inference()]

    def fits(self, tensors: Tensors) -> bool:
        """Whether these tensors hold the same numbers, and the values were not written to."""
        if len(tensors) != len(self.copies) or self.versions != self._versions():
            return False
        return all(
            a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
            for a, b in zip(self.copies, tensors, strict=True)
        )


class _Recomputed(torch.autograd.Function):
    """Cached values forward, `g` computed again backward."""

    @staticmethod
    def forward(
        ctx: Any, module: Computed, args: tuple[Any, ...], values: Tensors, *tensors: Tensor
    ) -> Tensors:
        """The cached values.

        Args:
            ctx: autograd's context.
            module: the module that computes.
            args: those of `effective`.
            values: the cached ones.
        """

        ctx.module = module
        ctx.args = args
        ctx.save_for_backward(*tensors)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            values = _compute_with(ctx.module, tensors, ctx.args)
        present = [i for i, value in enumerate(values) if value.requires_grad]
        outputs = [values[i] for i in present]
        outer = [gradients[i] for i in present]
        return None, None, None, *differentiated(outputs, outer, *tensors, again=again)


def differentiated(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *inputs: Tensor | None,
    again: bool = True,
) -> tuple[Tensor | None, ...]:
    """Gradients for the inputs by autograd; None for those that need none.

    Args:
        values: computed from the inputs by differentiable operators.
        gradients: one for each value.
        inputs: tensors, or None.
        again: whether the gradients will be differentiated.
    """
    sources = [t for t in inputs if t is not None and t.requires_grad]
    parts = torch.autograd.grad(values, sources, gradients, create_graph=again, allow_unused=True)
    by_tensor = dict(zip(map(id, sources), parts, strict=True))
    return tuple(by_tensor.get(id(t)) for t in inputs)


class _Computing(nn.Module):
    """`g` as a forward pass, for `functional_call`."""

    def __init__(self, owner: Computed) -> None:
        super().__init__()
        self.owner = owner

    def forward(self, *args: Any) -> Tensors:
        """The effective tensors."""
        return self.owner._exact(args)


def _with_tensors(args: tuple[Any, ...], tensors: Iterator[Tensor]) -> tuple[Any, ...]:
    """The arguments with their tensors replaced."""
    return tuple(next(tensors) if isinstance(a, Tensor) else a for a in args)


def _compute_with(module: Computed, tensors: Tensors, args: tuple[Any, ...]) -> Tensors:
    """`g` of other tensors: arguments first, then parameters and buffers, as `effective` lists them."""
    rest = iter(tensors)
    args = _with_tensors(args, rest)
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    state = {f"owner.{name}": tensor for name, tensor in zip(names, rest, strict=True)}
    return torch.func.functional_call(_Computing(module), state, args, tie_weights=False)


def _same_storage(sources: Tensors, traced: Tensors) -> bool:
    """Whether an export made its fake tensors, one for each, of these real ones."""
    if len(sources) != len(traced):
        return False
    for real, fake in zip(sources, traced, strict=True):
        mode = getattr(fake, "fake_mode", None)
        if mode is None or real.is_meta or mode.from_tensor(real, static_shapes=True) is not fake:
            return False
    return True


def _check_dtypes(name: str, tensors: Tensors) -> None:
    for tensor in tensors:
        if tensor.is_complex():
            raise Refused(
                f"{name} is proved for real weights, got {tensor.dtype}; split them into real and imaginary parts"
            )
        if tensor.dtype in (torch.float16, torch.bfloat16):
            raise Refused(
                f"{name} holds {tensor.dtype} parameters: a rounded weight has no guarantee; keep it in float32 (under "
                "autocast it stays there), or convert the result of equipoise.export"
            )


def is_plain_call(tensor: Tensor) -> bool:
    """Neither compiled nor inside `torch.func` or forward differentiation: those need operators that they know."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return forward_ad.unpack_dual(tensor).tangent is None


class ComputedLayer(Computed):
    """A layer that is not one plain layer with another weight: `y = evaluate(x, *effective)`.

    Subclasses write `build` (the parameters, from a plain layer), `compute` (the effective tensors), `evaluate` and `bound`;
    `key` where the effective tensors depend on the image size. The arguments are those of `plain_type`, then those of `build`.
    """

    #: makes the plain layer whose arguments this one has
    plain_type: ClassVar[Any]
    #: whether the effective tensors depend on the image size
    sized: ClassVar[bool] = False
    #: whether `evaluate` reads the bias, besides the effective tensors
    reads_bias: ClassVar[bool] = True
    bias: nn.Parameter | None
    #: of an exported layer: its key, and which of the stored tensors are complex
    stored: tuple[tuple[Any, ...], tuple[bool, ...]] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "plain_type"):
            cls.__signature__ = _joined_signature(cls.plain_type, cls.build)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        options, own = _split_options(type(self), self.build, options)
        self._start(self.plain_type(*args, **options), own)

    def _start(self, plain: Any, options: dict[str, Any]) -> None:
        _check_dtypes(type(self).__name__, (plain.weight,))
        for name in inspect.signature(type(plain)).parameters:
            if name not in ("bias", "device", "dtype"):
                setattr(self, name, getattr(plain, name))
        self.register_parameter("bias", copy.deepcopy(plain.bias))
        self.build(plain, **options)

    def build(self, plain: Any) -> None:
        """Make the parameters."""
        raise NotImplementedError

    def evaluate(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The layer with these effective tensors."""
        raise NotImplementedError

    def bound(self, tensors: Tensors, input_shape: Shape) -> Bound:
        """Upper bound of the constant of `evaluate` with these effective tensors.

        Args:
            tensors: the effective tensors.
            input_shape: of one sample.
        """
        raise NotImplementedError

    def key(self, shape: Shape) -> tuple[Any, ...]:
        """The arguments of `compute` for an input of this shape."""
        return ()

    def effective(self, *args: Any) -> Tensors:
        """The effective tensors: those stored in an exported layer, else computed."""
        if self.stored is None:
            return super().effective(*args)
        key, kinds = self.stored
        if args != key:
            raise InputError(
                f"this layer was exported for images of {key[0]} (padding included), got {args[0]}"
            )
        values = [self.get_parameter(f"effective_{i}") for i in range(len(kinds))]
        return tuple(
            torch.view_as_complex(v) if c else v for v, c in zip(values, kinds, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer on `x`; under autocast in full precision, with the result in autocast's dtype."""
        device = x.device.type
        tensors = self.effective(*self.key(x.shape))
        if not torch.is_autocast_enabled(device):
            return self.evaluate(x, *tensors)
        with torch.autocast(device, enabled=False):
            y = self.evaluate(x.to(tensors[0].real.dtype), *tensors)
        return y.to(torch.get_autocast_dtype(device))

    def constant(self) -> float | None:
        """1 for the classes of this package; None for an exported layer and for a subclass elsewhere."""
        return 1.0 if self.stored is None and _ours(self) else None

    @by_construction(constant)
    def lipschitz_upper(self, input_shape: Shape) -> Bound:
        """Bound of the layer on inputs of this shape, from the effective tensors."""
        with torch.no_grad():
            return self.bound(self.effective(*self.key(input_shape)), input_shape)

    def export(self, input_size: int | tuple[int, int] | None = None) -> Self:
        """A copy that stores its effective tensors as parameters: nothing is computed again, and bounds are measured.

        Args:
            input_size: of the images, for layers whose weights depend on it; by default the one size it was evaluated at.
        """
        key: tuple[Any, ...] = ()
        if self.sized and input_size is not None:
            key = self.key((input_size, input_size) if isinstance(input_size, int) else input_size)
        elif self.sized:
            if len(self._cache) != 1:
                raise Refused(
                    f"the effective weight of {type(self).__name__} depends on the image size, and it was evaluated at "
                    f"{len(self._cache)} sizes; call export(input_size=(h, w)), or evaluate it at one size first"
                )
            (key,) = self._cache
        with torch.no_grad():
            tensors = self.effective(*key)
        new = copy.deepcopy(self)
        for name in list(new._parameters):
            if name != "bias" or not self.reads_bias:
                new.register_parameter(name, None)
        new.stored = key, tuple(t.is_complex() for t in tensors)
        for i, tensor in enumerate(tensors):
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            new.register_parameter(f"effective_{i}", nn.Parameter(real.detach().clone()))
        return new

    def extra_repr(self) -> str:
        """The arguments."""
        names = inspect.signature(type(self)).parameters
        hidden = ("bias", "device", "dtype", "activation")
        return ", ".join(
            f"{n}={getattr(self, n)}" for n in names if n not in hidden and hasattr(self, n)
        )


def _ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("equipoise.nn.")


class Parametrization(Computed):
    """A map `raw → weight` such that the layer with that weight is 1-Lipschitz for every input size.

    Guarantee, for the classes of this package: `sup_ω ‖E(ω)‖₂ ≤ 1` for the symbol E of every group, rounding included,
    which bounds the operator with zero padding of any amount and with circular padding that does not enlarge the image;
    stride and dilation do not enlarge it. A class of yours is never trusted: `lipschitz_bound` measures its weight.

    Args:
        geometry: of the layer.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
    """

    #: the layers it is for
    kinds: ClassVar[tuple[type[nn.Module], ...]] = PLAIN
    #: for dense layers only: what to use for convolutions
    instead: ClassVar[str] = "use RKO or BCOP"

    def __init__(
        self,
        geometry: Geometry,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_padding(geometry)
        self.geometry = geometry
        self.factory: dict[str, Any] = {
            "device": device,
            "dtype": dtype or torch.get_default_dtype(),
        }
        #: hyper-parameters of the layer that it was made for
        self.made_for: list[Any] = []

    def constant(self) -> float | None:
        """The proved bound of the norm for all raw tensors, or None."""
        return 1.0

    def construct(self, raw: Tensor) -> Tensor:
        """The weight of a raw tensor."""
        raise NotImplementedError

    def compute(self, *args: Any) -> Tensors:
        """(weight,)."""
        return (self.construct(*args),)

    def train(self, mode: bool = True) -> Self:
        """Training or evaluation mode."""
        return nn.Module.train(self, mode)

    def forward(self, raw: Tensor) -> Tensor:
        """The weight of a raw tensor; cached in evaluation mode, see `Computed`."""
        return self.effective(raw)[0]

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The raw tensor to start from for a weight; by default the weight itself."""
        return weight


def check_padding(geometry: Geometry) -> None:
    """Refuse padding that enlarges the norm of every kernel: copied border pixels, or a circle that is written twice."""
    if geometry.padding not in ("zeros", "circular"):
        raise Refused(
            f"padding_mode {geometry.padding!r} copies border pixels, so that a kernel of norm 1 can reach 2; "
            "use 'zeros' or 'circular'"
        )
    for axis in geometry.axes:
        if geometry.padding == "circular" and axis.left + axis.right > axis.reach:
            raise Refused(
                f"circular padding of {axis.left} on both sides of a kernel that reaches {axis.reach} pixels repeats "
                f"outputs, so that no kernel has norm 1; use padding ≤ {axis.reach // 2}"
            )


def plain_geometry(module: nn.Module) -> Geometry:
    """The geometry of a plain layer, refused where there is no 1-Lipschitz form of it."""
    if not isinstance(module, PLAIN):
        raise Refused(
            f"{type(module).__name__} has no 1-Lipschitz form here; Linear, Conv1d, Conv2d, Conv3d and ConvTranspose2d have"
        )
    return geometry_of(module)


def register(
    module: nn.Module, kind: type[Parametrization], name: str = "weight", **options: Any
) -> nn.Module:
    """Put a parametrization on a tensor of a layer and return the layer.

    Args:
        module: `nn.Linear`, `nn.Conv1d/2d/3d` or `nn.ConvTranspose2d`; with another name any module with such a matrix.
        kind: the class of the parametrization.
        name: of the tensor.
        options: of the parametrization.
    """
    tensor = getattr(module, name, None)
    if not isinstance(tensor, Tensor) or nn.parameter.is_lazy(tensor):
        raise InputError(
            f"{type(module).__name__} has no tensor {name!r}; run a forward pass first if it is lazy"
        )
    _check_dtypes(kind.__name__, (tensor,))
    if parametrize.is_parametrized(module, name):
        raise InputError(
            f"{name!r} of {type(module).__name__} has a parametrization; remove it with "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if name != "weight" and tensor.dim() == 2:
        geometry = Geometry(tuple(tensor.shape))
    elif isinstance(module, kind.kinds) or not isinstance(module, PLAIN):
        geometry = plain_geometry(module)
    else:
        names = ", ".join(f"nn.{k.__name__}" for k in kind.kinds)
        raise Refused(
            f"{kind.__name__} is for {names}, got {type(module).__name__}: {kind.instead}"
        )
    parametrization = kind(geometry, device=tensor.device, dtype=tensor.dtype, **options)
    parametrization.made_for = _hyperparameters(module)
    # unsafe: shape and dtype are known to be right, and a forward pass would not work on the meta device
    parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    if isinstance(module, Parametrized):
        module.__class__ = _with_property(parametrize.type_before_parametrizations(module))
    stored = module.parametrizations[name].original  # type: ignore[union-attr, index]
    parametrization._sources = parametrization._tensors((stored,))
    return module


def _hyperparameters(module: nn.Module) -> list[Any]:
    """What the forward pass of a plain layer depends on besides its tensors."""
    return [getattr(module, name) for name in getattr(module, "__constants__", ())]


def sole_parametrization(module: nn.Module) -> Parametrization | None:
    """The parametrization of the layer's weight, if that is the only one and the layer is still the one it was made for."""
    if not parametrize.is_parametrized(module, "weight"):
        return None
    parametrizations = module.parametrizations["weight"]  # type: ignore[index]
    first = parametrizations[0]
    if len(parametrizations) != 1 or not isinstance(first, Parametrization):
        return None
    return first if first.made_for == _hyperparameters(module) else None


def proved_constant(module: nn.Module) -> float | None:
    """What the parametrization of a linear layer proves: those of this package only, on a layer that is otherwise plain."""
    parametrization = sole_parametrization(module)
    if parametrization is None or not _ours(parametrization):
        return None
    kind = type(module)
    plain = next(base for base in PLAIN if isinstance(module, base))
    methods = ("__call__", "forward", "_conv_forward")
    changed = any(getattr(kind, name, None) is not getattr(plain, name, None) for name in methods)
    patched = any(
        callable(value) for part in (module, parametrization) for value in vars(part).values()
    )
    return None if changed or patched else parametrization.constant()


class Parametrized(nn.Module):
    """A plain layer that registers the parametrization of its class on its weight: subclass this and `nn.Linear` or so.

    The arguments are those of the plain layer; options of the parametrization come by name.
    """

    parametrization: ClassVar[type[Parametrization]]

    #: the plain layer
    plain_type: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "parametrization" in vars(cls):
            cls.plain_type = next(kind for kind in cls.__mro__ if kind in PLAIN)
            signature = _joined_signature(cls.plain_type, cls.parametrization.__init__)
            cls.__signature__ = signature  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **options: Any) -> None:
        options, own = _split_options(type(self), self.parametrization.__init__, options)
        super().__init__(*args, **options)
        register(self, self.parametrization, **own)

    @classmethod
    def from_plain(cls, plain: nn.Module, **options: Any) -> Self:
        """This layer with the hyper-parameters of a plain one, starting from its weight.

        Args:
            plain: a layer of the plain class; it is not changed.
            options: of the parametrization.
        """
        check_plain(cls, plain)
        layer = cls.__new__(cls)
        layer.__dict__.update(copy.deepcopy(plain.__dict__))
        register(layer, cls.parametrization, **options)
        return layer

    def lipschitz_upper(self, input_shape: Shape) -> Bound:
        """1, for every input shape, where the parametrization proves it; else the layer has no bound of its own."""
        if proved_constant(self) != 1 or not torch.isfinite(cast(Any, self).weight).all():
            raise Refused(
                f"the norm of {type(self).__name__} is measured: use equipoise.lipschitz_bound"
            )
        return Bound(1.0, Kind.UPPER, "construction")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies, which torch's class for parametrized modules refuses."""
        kind = parametrize.type_before_parametrizations(self)
        return _restored, (kind, parametrize.is_parametrized(self, "weight")), self.__dict__


def _restored(kind: type[nn.Module], parametrized: bool) -> Any:
    """An empty layer of a class, with or without the property for its weight."""
    made = _with_property(kind) if parametrized else kind  # type: ignore[arg-type]
    return made.__new__(made)


class _Lasting(type):
    """Classes that keep their property when torch removes the parametrization of one instance."""

    def __delattr__(cls, name: str) -> None:
        pass


@functools.cache
def _with_property(kind: type[nn.Module]) -> Any:
    """One class for all parametrized layers of a kind: torch makes one for each, which cannot be stacked or pickled."""
    if isinstance(kind, _Lasting):
        return kind
    sample = nn.Linear(1, 1, device="meta")
    parametrize.register_parametrization(sample, "weight", nn.Identity(), unsafe=True)
    own = vars(type(sample))["weight"]

    def get(layer: Any) -> Any:
        if "weight" not in layer.parametrizations:  # torch looks while it removes the last one
            raise AttributeError("weight")
        if not parametrize._cache_enabled:
            return layer.parametrizations["weight"]()
        # within `cached()`; torch's own property would know every layer as `sample`
        key = (id(layer), "weight")
        if key not in parametrize._cache:
            parametrize._cache[key] = layer.parametrizations["weight"]()
        return parametrize._cache[key]

    body = {
        "weight": property(get, own.fset),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return _Lasting(kind.__name__, (kind,), body)


def check_plain(layer: Any, plain: nn.Module) -> None:
    """Refuse a plain layer of another class than the one that this layer replaces.

    Args:
        layer: the class of the 1-Lipschitz layer.
        plain: the plain layer.
    """
    if not isinstance(plain, layer.plain_type):
        raise InputError(
            f"{layer.__name__} replaces nn.{layer.plain_type.__name__}, got {type(plain).__name__}"
        )


def _option_names(function: Any) -> dict[str, inspect.Parameter]:
    """The keyword arguments of a constructor that are options: neither the layer's geometry nor where its tensors live."""
    fixed = ("self", "geometry", "plain", "device", "dtype", "factory")
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if name not in fixed}


def _joined_signature(plain: Any, function: Any) -> inspect.Signature:
    """The arguments of a plain layer, then the options of a constructor by name."""
    options = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in _option_names(function).values()
    ]
    return inspect.Signature([*inspect.signature(plain).parameters.values(), *options])


def _split_options(
    kind: type, function: Any, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the plain layer, and the options of a constructor."""
    names = inspect.signature(kind).parameters
    for name in options:
        if name not in names:
            raise TypeError(f"{kind.__name__} has no argument {name!r}{did_you_mean(name, names)}")
    own = {name: options.pop(name) for name in _option_names(function) if name in options}
    return options, own
