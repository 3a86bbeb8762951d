"""Blocks that know a better bound than the product of their parts: `lipschitz_upper`, and when it is trusted.

A module class may define

    def lipschitz_upper(self, input_shape: Shape) -> Bound      # of the map of one sample, kind «upper»

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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.core import (
    Bound,
    EquipoiseError,
    InputError,
    Kind,
    Refused,
    along,
    as_upper,
    frobenius,
    inflate,
    is_unmodified,
    or_one,
)
from equipoise.lipschitz.attack import attack
from equipoise.maps.algebra import spread
from equipoise.maps.linear import Adjoint, Convolution, Linear, Matrix, convolution
from equipoise.norms.spectral import Cache, bracket


@dataclass(frozen=True)
class Region:
    """Nodes between `source` and `output` whose map has a Lipschitz constant of at most `bound`.

    `whole`: the region is one layer, so the bound counts in the product as well, and is reported as one row. `by_row` is a
    constant in `max over rows of ℓ2`, rows being those of the last dimension; blocks of this package have it from a method
    `token_upper`.
    """

    source: fx.Node
    output: fx.Node
    bound: float
    name: str
    kind: str
    method: str
    members: frozenset[fx.Node] = frozenset()
    whole: bool = True
    declared: bool = False  # by a class that is not part of this package: attacked, not proved
    by_row: float = math.inf


def find_regions(model: nn.Module, program: Any) -> tuple[Region, ...]:
    """One region per trusted call of a module that bounds itself.

    Args:
        model: the network.
        program: as captured.
    """
    moving = {*program.inputs, *program.nodes}
    members: dict[str, list[fx.Node]] = {}
    paths: dict[str, str] = {}
    for node in program.nodes:
        for key, entry in (node.meta.get("nn_module_stack") or {}).items():
            members.setdefault(str(key), []).append(node)
            paths[str(key)] = str(entry[0]).split("@")[0]
    blocks = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "lipschitz_upper") and is_unmodified(module, "lipschitz_upper")
    }
    regions = [
        _region(blocks[path], path, members[key], moving, program.outputs)
        for key, path in paths.items()
        if path in blocks
    ]
    return tuple(filter(None, regions))


def _region(
    module: nn.Module,
    path: str,
    members: list[fx.Node],
    moving: set[fx.Node],
    outputs: Sequence[fx.Node],
) -> Region | None:
    inside = frozenset(members)
    entering = {i for n in members for i in n.all_input_nodes if i not in inside and i in moving}
    leaving = [
        n for n in members if n in outputs or any(u in moving and u not in inside for u in n.users)
    ]
    if len(entering) != 1 or len(leaving) != 1:
        return None
    (source,), (output,) = entering, leaving
    x, y = source.meta["val"], output.meta["val"]
    floats = all(isinstance(t, Tensor) and t.is_floating_point() for t in (x, y))
    bound = _declared_bound(module, path, x) if floats and x.dim() >= 2 else None
    if bound is None:
        return None
    kind = type(module).__name__
    method = bound.method or "own bound"
    declared = method == _DECLARED
    region = Region(
        source, output, as_upper(bound), path or kind, kind, method, inside, declared=declared
    )
    token_upper = getattr(module, "token_upper", None)
    if declared or token_upper is None:
        return region
    return replace(region, by_row=as_upper(token_upper(tuple(x.shape[1:]))))


#: method of a bound that is declared by a class that is not part of this package
_DECLARED = "declared"


def _declared_bound(module: Any, path: str, value: Tensor) -> Bound | None:
    """The bound that a block declares on inputs like `value`; None where it refuses. Refused if an attack exceeds it."""
    name = f"module {path or 'the model'} ({type(module).__name__})"
    try:
        with torch.no_grad():
            bound = module.lipschitz_upper(tuple(value.shape[1:]))
    except EquipoiseError:
        return None
    if not isinstance(bound, Bound) or bound.kind is not Kind.UPPER:
        raise InputError(
            f"{name}: lipschitz_upper must return a Bound of kind upper, got {bound!r}"
        )
    if type(module).__module__.partition(".")[0] == "equipoise":
        return bound
    limit = as_upper(bound)
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
    return replace(bound, method=_DECLARED)


# --- residual blocks, recognised by their operations -----------------------------------------------------------------------

_U = 2.0**-53


def _adjoint(form: Linear | None) -> Linear | None:
    """The adjoint of a matrix, of a transposed convolution, or of a zero-padded convolution of stride 1."""
    if isinstance(form, Matrix | Adjoint):
        return form.adjoint()
    if not isinstance(form, Convolution) or (form.groups, form.padding) != (1, "zeros"):
        return None
    amount = [(axis.reach - axis.left, axis.reach - axis.right) for axis in form.axes]
    if any(s != 1 for s in form.stride) or any(p < 0 for pair in amount for p in pair):
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
    turned = _adjoint(A)
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
    # t_j ≥ 0 per row of B that makes R_j + t_j·K_j smallest
    rows = K.flatten(1)
    squares = rows.square().sum(1)
    t = -(rows * R.flatten(1)).sum(1) / or_one(squares)
    t = along(t.clamp_min(0), K)
    E = R + t * K
    if float(torch.linalg.vector_norm(E)) > 0.5 * float(torch.linalg.vector_norm(R)):
        return None  # not such a block: the sum of the branches is as good
    M = t.sqrt() * K

    def size(weight: Tensor) -> float:
        return float(frobenius(weight)) if isinstance(B, Matrix) else spread(weight, B)

    lost = 8 * _U
    error = inflate(size(E) + lost * (size(R) + size(t * K)) + turned.error)
    rounding = inflate(lost * size(M))
    wide = Matrix(M, rounding) if isinstance(B, Matrix) else B.with_weight(M, rounding)
    m, b = float(bracket(wide, cache).upper), float(bracket(B, cache).upper)
    a = float(bracket(turned, cache).upper)
    curved = max(inflate(1 - low * inflate(m * m)), inflate(high * inflate(m * m)) - 1, 1.0)
    # B is known up to B.error: A D (B + ΔB) adds ‖A‖‖ΔB‖, and E D B reads the true B (b covers it)
    return inflate(curved + inflate(max(high, -low) * inflate(error * b + a * B.error)))
