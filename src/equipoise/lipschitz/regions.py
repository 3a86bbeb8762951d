"""Blocks that know a better bound than the product of their parts: `lipschitz_upper`, and when it is trusted.

A module class may define

    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound      # of the map of one sample, kind «upper»

recomputed from the weights its forward really uses. The nodes of one call of such a module are then one region of the
graph, with the smaller of this bound and the generic one. It is trusted only if nothing can have come between the
method and the map:

* the class that defines `forward` is the class that defines `lipschitz_upper`, nothing it has is defined anew by a subclass
  or patched on the instance;
* no forward hooks, on the module, its children, or all modules; evaluation mode;
* one tensor enters the region and one leaves it;
* a short attack does not exceed the bound of a class from outside this package (a check, not a proof). The report then
  names the bound as declared by that class.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as modules

from equipoise.core.bounds import Bound, Kind, as_upper
from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import is_unmodified
from equipoise.core.precision import frobenius, inflate
from equipoise.lipschitz.witness import attack
from equipoise.maps.algebra import spread
from equipoise.maps.linear import Adjoint, Convolution, Linear, Matrix, convolution
from equipoise.norms.spectral import Cache, bracket

_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Region:
    """Nodes between `source` and `output` whose map has a Lipschitz constant of at most `bound`.

    `whole`: the region is one layer, so the bound counts in the product as well, and is reported as one row.
    """

    source: fx.Node
    output: fx.Node
    bound: float
    name: str
    kind: str
    method: str
    members: frozenset[fx.Node] = field(default=frozenset(), repr=False)
    whole: bool = True
    declared: bool = False  # by a class that is not part of this package: attacked, not proved


def has_blocks(model: nn.Module) -> bool:
    """Whether any module of the model claims a bound of its own."""
    return any(callable(getattr(module, "lipschitz_upper", None)) for module in model.modules())


@contextlib.contextmanager
def counted_calls() -> Iterator[dict[int, int]]:
    """How often every module is called inside, by `id`."""
    counts: dict[int, int] = {}

    def count(module: nn.Module, args: Any) -> None:
        counts[id(module)] = counts.get(id(module), 0) + 1

    handle = modules.register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def is_trusted(module: nn.Module) -> bool:
    """Whether nothing can have come between `lipschitz_upper` and the map that a call performs, in evaluation mode."""
    return is_unmodified(module, "lipschitz_upper") and not any(
        part.training for part in module.modules()
    )


def find_regions(
    model: nn.Module,
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    counts: dict[int, int],
) -> tuple[Region, ...]:
    """One region per trusted call of a module that bounds itself.

    `inputs`, `nodes` and `outputs` are those of the program (all that depends on the input); `counts` are the calls that
    one forward pass really makes.
    """
    moving = {*inputs, *nodes}
    members: dict[str, list[fx.Node]] = {}
    paths: dict[str, str] = {}
    for node in nodes:
        for key, entry in (node.meta.get("nn_module_stack") or {}).items():
            members.setdefault(str(key), []).append(node)
            paths[str(key)] = str(entry[0]).split("@")[0]
    called = {key: _submodule(model, path) for key, path in paths.items()}
    calls = Counter(map(id, called.values()))
    regions = [
        _region(module, paths[key], members[key], moving, outputs)
        for key, module in called.items()
        # where the numbers differ a call left no nodes, or two were recorded as one
        if module is not None and counts.get(id(module)) == calls[id(module)] and is_trusted(module)
    ]
    return tuple(region for region in regions if region is not None)


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _region(
    module: nn.Module,
    path: str,
    members: list[fx.Node],
    moving: set[fx.Node],
    outputs: Sequence[fx.Node],
) -> Region | None:
    inside = set(members)
    entering = {i for n in members for i in n.all_input_nodes if i not in inside and i in moving}
    leaving = [
        n for n in members if n in outputs or any(u in moving and u not in inside for u in n.users)
    ]
    if len(entering) != 1 or len(leaving) != 1:
        return None
    (source,), (output,) = entering, leaving
    x, y = source.meta.get("val"), output.meta.get("val")
    if (
        not isinstance(x, Tensor)
        or not isinstance(y, Tensor)
        or {x.dtype, y.dtype} - set(_FLOATS)
        or x.dim() < 2
    ):
        return None
    bound = declared_bound(module, path, x)
    if bound is None:
        return None
    declared = is_foreign(module)
    method = "declared" if declared else bound.method or "own bound"
    kind = type(module).__name__
    return Region(
        source,
        output,
        as_upper(bound),
        path or kind,
        kind,
        method,
        frozenset(inside),
        declared=declared,
    )


def is_foreign(module: nn.Module) -> bool:
    """Whether the module's class is not part of this package."""
    return type(module).__module__.partition(".")[0] != "equipoise"


def declared_bound(module: nn.Module, path: str, value: Tensor) -> Bound | None:
    """The bound that a block declares on inputs like `value`; None if it declares none.

    Args:
        module: the block.
        path: of the block in its network, for messages.
        value: an input, or a tensor of its shape and dtype.

    Raises:
        Refused: if an attack on the block exceeds it.
    """
    name = f"module {path or 'the model'} ({type(module).__name__})"
    method: Any = getattr(module, "lipschitz_upper", None)
    if method is None:  # a constant by construction only
        return None
    try:
        with torch.no_grad():
            bound = method(tuple(value.shape[1:]))
    except Refused:
        return None
    if not isinstance(bound, Bound) or bound.kind is not Kind.UPPER:
        raise InputError(
            f"{name}: lipschitz_upper must return a Bound of kind upper, got {bound!r}"
        )
    limit = as_upper(bound)
    if not is_foreign(module) or not math.isfinite(limit):
        return bound
    try:
        witness = attack(
            limit * (1 + 1e-5) + 1e-9, module, torch.zeros(value.shape), starts=9, steps=12
        )
    except Exception:  # noqa: BLE001 – whatever keeps a block from being copied and run: its operations are bounded instead
        return None
    if witness is not None:
        raise Refused(
            f"{name}: lipschitz_upper says {limit:.6g}, but an attack reaches {witness.stretch:.6g}; mend the method, or "
            "remove it to get the bound of its operations"
        )
    return bound


# --- residual blocks, recognised by their operations -----------------------------------------------------------------------

_U = 2.0**-53


def adjoint(form: Linear | None) -> Matrix | Convolution | None:
    """The adjoint of a matrix, of a transposed convolution, or of a zero-padded convolution of stride 1."""
    if isinstance(form, Matrix):
        return Matrix(form.matrix.mT, form.error)
    if isinstance(form, Adjoint):
        return form.conv if isinstance(form.conv, Convolution) else None
    if (
        not isinstance(form, Convolution)
        or form.groups != 1
        or form.padding != "zeros"
        or any(s != 1 for s in form.stride)
    ):
        return None
    amount = [(axis.reach - axis.left, axis.reach - axis.right) for axis in form.axes]
    if any(p < 0 for pair in amount for p in pair):
        return None
    weight = form.weight.transpose(0, 1).flip(tuple(range(2, form.weight.dim()))).contiguous()
    turned = convolution(weight, "zeros", 1, form.dilation, 1, amount, form.geometry.out)
    return replace(turned, error=form.error)


def residual_bound(
    B: Linear | None, A: Linear | None, sign: float, slopes: tuple[float, float], cache: Cache
) -> float | None:
    """Bound of `x ↦ x + sign·A·φ(B·x + b)`; None where A has no adjoint of the geometry of B.

    Where the branch is the negative of a gradient the bound is far below `1 + ‖A‖‖B‖`.

    Let the slopes of φ lie in [α, β] with α ≤ 0 ≤ β, T ≥ 0 be diagonal, `E = A + BᵀT` and `M = T^{1/2}B`. For every pair of
    inputs there is a diagonal D with entries in [α, β] (the secant slopes) such that

        f(x) − f(y) = (I + A D B)(x − y) = (I − Mᵀ D M + E D B)(x − y),

    because the diagonal matrices T and D commute. `Mᵀ D M` is symmetric with eigenvalues in [α‖M‖², β‖M‖²], hence

        L ≤ max(1 − α‖M‖², β‖M‖² − 1) + max(β, −α)·‖E‖‖B‖.

    For slopes in [0, 1] (ReLU, tanh, sigmoid) and `‖M‖² ≤ 2` that is 1: the convex potential layer and SLL. For abs (α = −1)
    it is `1 + ‖M‖²`, no better than the sum of the branches, and for GELU it lies between. T is read off the weights
    (`t_j = −⟨A_j, B_j⟩/‖B_j‖²`, negative ones set to 0) and E is whatever is left, so nothing about the weights is assumed:
    matrices, or a convolution and its adjoint.

    References: Meunier et al. 2022 (convex potential layers); Araujo et al. 2023 (SLL); errata 6.

    Args:
        B: the first linear map of the branch.
        A: the last one.
        sign: of the branch in the sum.
        slopes: interval of the slopes of φ.
        cache: of operator norms.
    """
    turned = adjoint(A)
    if isinstance(B, Matrix) and isinstance(turned, Matrix):
        ours, theirs = B.matrix, turned.matrix
    elif (
        isinstance(B, Convolution)
        and isinstance(turned, Convolution)
        and B.geometry == turned.geometry
    ):
        ours, theirs = B.weight, turned.weight
    else:
        return None
    if ours.shape != theirs.shape:
        return None
    low, high = min(0.0, slopes[0]), max(0.0, slopes[1])
    K, R = ours.double(), sign * theirs.double()  # R holds the adjoint of sign·A
    t = _multipliers(K, R)
    E = R + t * K
    if float(torch.linalg.vector_norm(E)) > 0.5 * float(torch.linalg.vector_norm(R)):
        return None  # not such a block: the sum of the branches is as good
    M = t.sqrt() * K
    lost = 8 * _U
    error = inflate(_size(E, B) + lost * (_size(R, B) + _size(t * K, B)) + turned.error)
    wide = _rebuilt(B, M, inflate(lost * _size(M, B)))
    m, b = float(bracket(wide, cache).upper), float(bracket(B, cache).upper)
    a = float(bracket(turned, cache).upper)
    curved = max(inflate(1 - low * inflate(m * m)), inflate(high * inflate(m * m)) - 1, 1.0)
    # B is known up to B.error: A D (B + ΔB) adds ‖A‖‖ΔB‖, and E D B reads the true B (b covers it)
    return inflate(curved + inflate(max(high, -low) * inflate(error * b + a * B.error)))


def _multipliers(K: Tensor, R: Tensor) -> Tensor:
    """`t_j ≥ 0` per row of B that makes `R_j + t_j·K_j` smallest, shaped to multiply K."""
    rows = K.flatten(1)
    squares = rows.square().sum(1)
    t = -(rows * R.flatten(1)).sum(1) / torch.where(squares > 0, squares, torch.ones_like(squares))
    return t.clamp_min(0).reshape(-1, *[1] * (K.dim() - 1))


def _size(K: Tensor, like: Matrix | Convolution) -> float:
    """Upper bound of the operator norm of a weight, without an iteration."""
    return float(frobenius(K)) if isinstance(like, Matrix) else spread(K, like)


def _rebuilt(like: Matrix | Convolution, weight: Tensor, error: float) -> Matrix | Convolution:
    return Matrix(weight, error) if isinstance(like, Matrix) else like.with_weight(weight, error)
