"""Softmax, normalisations, and products of branches that both depend on the input: Lipschitz where their factors are bounded.

`‖a∘b − a'∘b'‖ ≤ |b|_∞·‖a − a'‖ + (size of a)·‖b − b'‖`. The sizes come from the stated input ball, or from operations that are
bounded by nature (sigmoid, softmax, a normalisation). Squeeze-and-excite and attention are made of these.
"""

from math import inf, isfinite, isnan, log, prod, sqrt
from typing import Any, NoReturn

import torch

from equipoise.core import deflate, inflate, root
from equipoise.lipschitz.operations import Normalised, Opaque, Product, Term
from equipoise.lipschitz.rules.registry import (
    BALL,
    Call,
    Signal,
    Step,
    copies,
    largest,
    norm_of,
    rule,
)
from equipoise.lipschitz.rules.shapes import COPIES, RESHAPES, SOFTMAX, named
from equipoise.lipschitz.values import aten_name
from equipoise.maps.pointwise import TABLE

# --- softmax and normalisations ---------------------------------------------------------------------------------------------


@rule(*named(SOFTMAX))
def softmax(call: Call) -> Step:
    """1/2, attained at (½, ½, 0, …); rows have norm at most 1 (Jacobian diag(p) − ppᵀ)."""
    x = call.x
    last = call["dim"] % max(1, len(x.shape)) == len(x.shape) - 1
    size = root(x.numel // max(1, x.shape[call["dim"]]))
    row = 1.0 if last else inf
    return Step(
        ((x, 0.5),),
        "softmax",
        map=Product(),
        norm=size,
        row=row,
        peak=1.0,
        low=0.0,
        offset=size,
        by_row=last,
    )


@rule("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(call: Call) -> Step:
    """√n over n entries: the Jacobian I − 1pᵀ at a vertex."""
    x = call.x
    n = x.shape[call["dim"]]
    gain = root(n) if n > 1 else 0.0
    offset = inflate(log(n + 1) * sqrt(x.numel))
    by_row = call["dim"] in (-1, len(x.shape) - 1)
    return Step(((x, gain),), "log-softmax", offset=offset, by_row=by_row)


@rule("aten.logsumexp.default")
def logsumexp(call: Call) -> Step:
    """1: the gradient is a probability vector."""
    x = call.x
    return Step(
        ((x, 1.0),),
        "logsumexp",
        offset=inflate(log(x.numel + 1) * sqrt(prod(call.shape))),
    )


def _normalised(
    call: Call, size: int, repeat: int, label: str, centred: bool | None = None
) -> Step:
    """Groups of `size` entries divided by √(var + ε) (or the root mean square), scaled by γ and shifted by β.

    The Jacobian of `x ↦ (x − mean)/√(var + ε)` has norm at most 1/√(var + ε); a normalised group has norm at most √size.

    Args:
        call: with γ as `weight` and β as `bias`, where they are.
        size: of a group.
        repeat: how often an entry of β appears in one group.
        label: for the report.
        centred: whether the mean is taken off, where groups may be the rows of the last dimension; None where they are not.
    """
    x, weight, bias = call.x, call.constant("weight"), call.constant("bias")
    eps = float(call["eps"])
    if not eps > 0:
        call.refuse(
            "a normalisation with ε = 0 is not Lipschitz near constant inputs", "set eps > 0"
        )
    if x.dtype == torch.float32:
        eps = min(eps, float(torch.tensor(eps, dtype=torch.float32)))
    top = 1.0 if weight is None else largest(weight)
    length = inflate(top * sqrt(size))
    shift = inflate(norm_of(bias) * sqrt(repeat))  # norm of β as it appears in one group
    by_rows = centred is not None and size == x.shape[-1]
    groups = sqrt(x.numel // size)
    return Step(
        ((x, inflate(top / sqrt(eps))),),
        label,
        offset=inflate(groups * shift),
        norm=inflate(groups * inflate(length + shift)),
        row=inflate(length + shift) if by_rows else inf,
        peak=inflate(length + (0.0 if bias is None else largest(bias))),
        map=Normalised(top, eps, bool(centred)) if by_rows else Opaque(),
        note="max|γ|/√ε, over the whole space",
        by_row=by_rows,
    )


@rule("aten.layer_norm.default", "aten.native_layer_norm.default", "aten.rms_norm.default")
def layer_norm(call: Call) -> Step:
    """`max|γ|/√ε` over the whole space; rows of the output are bounded, which is what attention needs.

    An RMS norm without ε takes the machine epsilon of the type, as PyTorch does.
    """
    centred = aten_name(call.node) != "rms_norm.default"
    label = "layer norm" if centred else "RMS norm"
    return _normalised(call, prod(call["normalized_shape"]), 1, label, centred)


@rule("aten.group_norm.default")
def group_norm(call: Call) -> Step:
    """`max|γ|/√ε` over the whole space."""
    shape = call.x.shape
    return _normalised(
        call, prod(shape[1:]) // int(call["num_groups"]), prod(shape[2:]), "group norm"
    )


def instance_norm(call: Call) -> Step:
    """`max|γ|/√ε` over the whole space, with the statistics of the input."""
    if call["running_mean"] is not None:
        call.refuse("instance norm updates its running statistics", "call model.eval() first")
    size = prod(call.x.shape[2:])
    return _normalised(call, size, size, "instance norm")


# --- products of branches ---------------------------------------------------------------------------------------------------


def _unbounded(call: Call, what: str) -> NoReturn:
    call.refuse(
        f"{what} is not Lipschitz on the whole space, and its factors are not bounded here", BALL
    )


def _whole(a: Signal, call: Call) -> float:
    """‖a‖ where it is not repeated: `‖a∘(Δb repeated)‖ ≤ ‖a‖·|Δb|_∞`."""
    return a.norm if copies(a, call.shape) == 1 else inf


def branch_product(call: Call, a: Signal, b: Signal) -> Step:
    """`a∘b` with broadcasting: gain of a is |b|_∞·√copies; that of b likewise, or the norm of a where b is the one repeated.

    Args:
        call: the multiplication.
        a: one factor.
        b: the other.
    """
    gains = []
    norms = []
    rows: list[Term] = []
    for x, other in ((a, b), (b, a)):
        grown = copies(x, call.shape)
        size = min(inflate(other.peak * grown), _whole(other, call))
        if not isfinite(size):
            _unbounded(call, "a product of two branches")
        gains.append((x, size))
        if x.shape[-1:] == call.shape[-1:]:
            rows.append((x, other.peak, "row"))
        else:  # an entry of x multiplies a row of the other
            rows.append((x, other.row, "peak"))
        norms.append(inflate(inflate(x.norm * grown) * other.peak))
    norm = min((n for n in norms if not isnan(n)), default=inf)  # ∞·0
    low = 0.0 if a.node is b.node or min(a.low, b.low) >= 0 else -inf
    peak = inflate(a.peak * b.peak)
    return Step(
        tuple(gains),
        "product of branches",
        offset=0.0,
        peak=peak,
        norm=norm,
        low=low,
        map=Product(tuple(rows), ((a, b.peak, "peak"), (b, a.peak, "peak"))),
    )


def branch_quotient(call: Call, a: Signal, b: Signal) -> Step:
    """softsign, `x/(1 + |x|)`: slopes in [0, 1]; `x/max(‖x‖, ε)` and `x/(‖x‖ + ε)`: 1/ε; else only where b stays away from 0.

    Args:
        call: the division.
        a: the numerator.
        b: the denominator.
    """
    size, floor = _floored(b.node)
    added = floor == 1 and aten_name(b.node) == "add.Tensor"
    if added and aten_name(size) == "abs.default" and size.args[0] is a.node:
        return Step(((a, 1.0),), "softsign", offset=0.0, peak=1.0, map=TABLE["softsign"])
    dims = _own_length(size, a)
    if floor > 0 and dims is not None:
        row = 1.0 if dims == [len(a.shape) - 1] and a.shape[-1:] == call.shape[-1:] else inf
        gain = inflate(copies(a, call.shape) / floor)
        return Step(((a, gain),), "normalised", offset=0.0, peak=1.0, row=row)
    if not b.low > 0:
        call.refuse(
            "dividing one branch by another is not Lipschitz near 0",
            "use a normalisation layer with an ε",
        )
    if not isfinite(a.peak):
        _unbounded(call, "a quotient of two branches")
    least = deflate(b.low)
    steep = inflate(inflate(1 / least) * inflate(1 / least))
    gains = (
        (a, inflate(copies(a, call.shape) / least)),
        (b, min(inflate(inflate(a.peak * copies(b, call.shape)) * steep), _whole(a, call) * steep)),
    )
    low = 0.0 if a.low >= 0 else -inf
    return Step(gains, "quotient", peak=inflate(a.peak / least), low=low, map=Product())


def _floored(bottom: Any) -> tuple[Any, float]:
    """`(v, ε)` where the denominator is `max(v, ε)` or `v + ε`, possibly repeated; ε is 0 where it is neither."""
    while aten_name(bottom) in ("expand.default", "clone.default"):
        bottom = bottom.args[0]
    floors = ("clamp_min.default", "clamp.default", "add.Tensor", "add.Scalar")
    if aten_name(bottom) in floors and len(bottom.args) == 2 and not bottom.kwargs:
        size, floor = bottom.args
        if isinstance(floor, int | float):
            return size, float(floor)
    return None, 0.0


def _own_length(norm: Any, a: Signal) -> list[int] | None:
    """The dimensions over which this is the ℓ2 length of a, where they are kept."""
    lengths = ("linalg_vector_norm.default", "norm.ScalarOpt_dim")
    if aten_name(norm) not in lengths or norm.kwargs or len(norm.args) != 4:
        return None
    source, order, dims, kept = norm.args
    if source is not a.node or order not in (2, None) or not dims or not kept:
        return None
    return [d % len(a.shape) for d in dims]


#: operations that may only copy a batch of matrices, or number it anew
_REGROUPING = (*RESHAPES, *COPIES, "dropout.default", "expand.default")


def _ungrouped(call: Call, a: Signal) -> Signal:
    """The signal behind copies of a batch of matrices: as many matrices of the same shape, each with the same entries."""
    while aten_name(a.node) in _REGROUPING:
        source = call.lookup(a.node.args[0])  # type: ignore[arg-type]
        same = isinstance(source, Signal) and source.numel == a.numel
        if not same or source.shape[-2:] != a.shape[-2:]:
            break
        a = source
    return a


def _softmax_source(call: Call, a: Signal) -> Signal | None:
    """The scores behind a softmax over the last dimension."""
    node: Any = _ungrouped(call, a).node
    if aten_name(node) not in SOFTMAX:
        return None
    scores, dim = call.lookup(node.args[0]), node.args[1]
    last = isinstance(scores, Signal) and dim in (-1, len(scores.shape) - 1)
    return scores if last else None


def branch_matmul(call: Call, a: Signal, b: Signal) -> Step:
    """`A·B` of two branches: gains ‖B‖₂ and ‖A‖₂, bounded by norms on the domain; `softmax(S)·V` is bounded as attention.

    Args:
        call: the product.
        a: the matrices on the left.
        b: those on the right.
    """
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[:-2] != b.shape[:-2]:
        call.refuse(
            "a product of branches with broadcasting", "expand both to the same batch dimensions"
        )
    scores = _softmax_source(call, a)
    if scores is not None:
        return _attention(call, scores, b)
    # one matrix of the batch at a time: ‖A‖₂ ≤ ‖A‖_F
    size_a = min(a.norm, inflate(sqrt(a.shape[-2]) * a.row))
    size_b = min(b.norm, inflate(sqrt(b.shape[-2]) * b.row))
    columns = _columns(call, b)
    peaks: tuple[Term, ...] = ()
    if columns is not None:  # entry ij is the product of two rows
        size_b = min(size_b, inflate(sqrt(b.shape[-1]) * columns.row))
        peaks = ((a, columns.row, "row"), (columns, a.row, "row"))
    if not (isfinite(size_a) and isfinite(size_b)):
        _unbounded(call, "a matrix product of two branches")
    norm = min(inflate(a.norm * size_b), inflate(b.norm * size_a))
    # row i of A·B is Σ_j a_ij·(row j of B), and Σ_j |a_ij| ≤ √n·‖a_i‖
    rows = ((a, size_b, "row"), (b, inflate(sqrt(a.shape[-1]) * a.row), "row"))
    map = Product(rows, peaks)
    return Step(((a, size_b), (b, size_a)), "matrix product", offset=0.0, norm=norm, map=map)


def _columns(call: Call, b: Signal) -> Signal | None:
    """The signal whose rows are the columns of b, where its last dimension became the last but one of b."""
    b = _ungrouped(call, b)
    node: Any = b.node
    order = list(range(len(b.shape)))
    if aten_name(node) == "transpose.int":
        i, j = node.args[1:]
        order[i], order[j] = order[j], order[i]
    elif aten_name(node) == "permute.default":
        order = [d % len(order) for d in node.args[1]]
    if order[-2:-1] != [len(order) - 1]:
        return None
    return call.lookup(node.args[0])


def _attention(call: Call, scores: Signal, v: Signal) -> Step:
    """`softmax(S)·V`: gain of S is the row bound R_V of V, or half of its norm; that of V is √n for n queries.

    Softmax has the constant ½. Row by row
    `∂(Σ_j p_j v_j)/∂s = Σ_j p_j (v_j − v̄) e_jᵀ`, of norm at most √(Σ p_j |v_j − v̄|²) ≤ R_V; and a stochastic matrix
    with n rows has norm at most √n (Kim et al. 2021 show that without a bound on V there is no constant).
    Where every score changes by at most 1, a row does by `Σ_j p_j |v_j − v̄| ≤ R_V`, and V adds at most its largest row.
    """
    if not isfinite(v.row):
        _unbounded(call, "attention")
    queries = root(scores.shape[-2])
    norm = inflate(sqrt(prod(call.shape[:-1])) * v.row)
    gains = ((scores, inflate(min(v.row, v.norm / 2))), (v, queries))
    map = Product(((scores, v.row, "peak"), (v, 1.0, "row")))
    return Step(gains, "attention", row=v.row, peak=v.peak, norm=norm, map=map)


@rule("aten.glu.default")
def glu(call: Call) -> Step:
    """`a·σ(b)`: √(1 + (|a|_∞/4)²) on a bounded domain."""
    x = call.x
    if not isfinite(x.peak):
        _unbounded(call, "a gated linear unit")
    gain = inflate(sqrt(1 + (x.peak / 4) ** 2))
    return Step(((x, gain),), "gated linear unit", offset=0.0, peak=x.peak, map=Product())
