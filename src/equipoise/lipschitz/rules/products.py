"""Products of two branches that both depend on the input: Lipschitz only where both are bounded.

`‖a∘b − a'∘b'‖ ≤ |b|_∞·‖a − a'‖ + (size of a)·‖b − b'‖`. The sizes come from the stated input ball, or from operations that are
bounded by nature (sigmoid, softmax, a normalisation). Squeeze-and-excite and attention are made of these.
"""

import math
from typing import Any, NoReturn

import torch
from torch import fx

from equipoise.core.precision import deflate, inflate
from equipoise.lipschitz.operations import Product
from equipoise.lipschitz.rules.registry import BALL, Call, Signal, Step, copies, rule
from equipoise.maps.pointwise import TABLE

_aten = torch.ops.aten


def _unbounded(call: Call, what: str) -> NoReturn:
    call.refuse(f"{what} is not Lipschitz on the whole space, and its factors are not bounded here", BALL)


def branch_product(call: Call, a: Signal, b: Signal) -> Step:
    """`a∘b` with broadcasting: gain of a is |b|_∞·√copies; that of b likewise, or the norm of a where b is the one repeated."""
    gains = []
    for x, other in ((a, b), (b, a)):
        grown = copies(x, call.shape)
        size = min(inflate(other.peak * grown), _whole(other, call))
        if not math.isfinite(size):
            _unbounded(call, "a product of two branches")
        gains.append((x, size))
    return Step(
        tuple(gains),
        "product of branches",
        offset=0.0,
        peak=inflate(a.peak * b.peak),
        norm=_least(call, a, b),
        low=0.0 if a is b or a.node is b.node or min(a.low, b.low) >= 0 else -math.inf,
        map=Product(),
    )


def _least(call: Call, a: Signal, b: Signal) -> float:
    sizes = [inflate(inflate(x.norm * copies(x, call.shape)) * y.peak) for x, y in ((a, b), (b, a))]
    return min((s for s in sizes if not math.isnan(s)), default=math.inf)


def branch_quotient(call: Call, a: Signal, b: Signal) -> Step:
    """softsign, `x/(1 + |x|)`: slopes in [0, 1]; `x/max(‖x‖, ε)` and `x/(‖x‖ + ε)`: 1/ε; else only where b stays away from 0."""
    top, bottom = a.node, b.node
    if bottom.target is _aten.add.Tensor and len(bottom.args) == 2 and not bottom.kwargs:
        inside, one = bottom.args
        if isinstance(inside, fx.Node) and inside.target is _aten.abs.default and inside.args[0] is top and one == 1:
            return Step(((a, 1.0),), "softsign", offset=0.0, peak=1.0, map=TABLE["softsign"])
    eps = _length_floor(bottom, a)
    if eps > 0:
        row = 1.0 if _by_rows(bottom, a) and a.shape[-1:] == call.shape[-1:] else math.inf
        return Step(((a, inflate(copies(a, call.shape) / eps)),), "normalised", offset=0.0, peak=1.0, row=row)
    if not b.low > 0:
        call.refuse("dividing one branch by another is not Lipschitz near 0", "use a normalisation layer with an ε")
    if not math.isfinite(a.peak):
        _unbounded(call, "a quotient of two branches")
    least = deflate(b.low)
    steep = inflate(inflate(1 / least) * inflate(1 / least))
    gains = (
        (a, inflate(copies(a, call.shape) / least)),
        (b, min(inflate(inflate(a.peak * copies(b, call.shape)) * steep), _whole(a, call) * steep)),
    )
    peak = inflate(a.peak / least)
    return Step(gains, "quotient", peak=peak, low=0.0 if a.low >= 0 else -math.inf, map=Product())


def _whole(a: Signal, call: Call) -> float:
    """‖a‖ where it is not repeated: `‖a∘(Δb repeated)‖ ≤ ‖a‖·|Δb|_∞`."""
    return a.norm if copies(a, call.shape) == 1 else math.inf


_LENGTHS = {_aten.linalg_vector_norm.default, _aten.norm.ScalarOpt_dim}


def _length(bottom: fx.Node) -> tuple[fx.Node, float] | None:
    """The node of ‖x‖ and the ε in `max(‖x‖, ε)` or `‖x‖ + ε`, repeated or not."""
    while bottom.target in (_aten.expand.default, _aten.expand_as.default, _aten.clone.default):
        bottom = bottom.args[0]  # type: ignore[assignment]
    kinds = (_aten.clamp_min.default, _aten.clamp.default, _aten.add.Tensor, _aten.add.Scalar)
    if bottom.target not in kinds or len(bottom.args) != 2 or bottom.kwargs:
        return None
    node, eps = bottom.args
    if not isinstance(node, fx.Node) or not isinstance(eps, int | float) or node.target not in _LENGTHS:
        return None
    return node, float(eps)


def _length_floor(bottom: fx.Node, a: Signal) -> float:
    """ε where the denominator is the ℓ2 length of the numerator itself, over some dimensions kept, at least or plus ε."""
    found = _length(bottom)
    if found is None or found[0].args[0] is not a.node:
        return 0.0
    node, eps = found
    order = node.args[1] if len(node.args) > 1 else 2
    dims = node.args[2] if len(node.args) > 2 else None
    kept = len(node.args) > 3 and node.args[3] is True
    plain = not node.kwargs and order in (2, 2.0, None) and isinstance(dims, list | tuple) and kept
    return eps if plain else 0.0


def _by_rows(bottom: fx.Node, a: Signal) -> bool:
    found = _length(bottom)
    dims: Any = () if found is None else found[0].args[2]
    return [d % len(a.shape) for d in dims] == [len(a.shape) - 1]


def _softmax_source(call: Call, node: fx.Node) -> Signal | None:
    """The scores behind a softmax over the last dimension, seen through dropout and views that keep rows."""
    while node.target in (_aten.dropout.default, _aten.contiguous.default, _aten.clone.default):
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in (_aten.softmax.int, _aten._softmax.default, _aten._safe_softmax.default):
        return None
    scores = call.lookup(node.args[0])  # type: ignore[arg-type]
    dim = node.args[1]
    if not isinstance(scores, Signal) or not isinstance(dim, int):
        return None
    return scores if dim % len(scores.shape) == len(scores.shape) - 1 else None


def branch_matmul(call: Call, a: Signal, b: Signal) -> Step:
    """`A·B` of two branches: gains ‖B‖₂ and ‖A‖₂, bounded by norms on the domain; `softmax(S)·V` is bounded as attention."""
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[:-2] != b.shape[:-2]:
        call.refuse("a product of branches with broadcasting", "expand both to the same batch dimensions")
    scores = _softmax_source(call, a.node)
    if scores is not None:
        return attention_read(call, scores, b)
    size_a = min(a.norm, inflate(math.sqrt(a.shape[-2]) * a.row))  # one matrix of the batch at a time: ‖A‖₂ ≤ ‖A‖_F
    size_b = min(b.norm, inflate(math.sqrt(b.shape[-2]) * b.row), _turned(call, b))
    if not (math.isfinite(size_a) and math.isfinite(size_b)):
        _unbounded(call, "a matrix product of two branches")
    norm = min(inflate(a.norm * size_b), inflate(b.norm * size_a))
    return Step(((a, size_b), (b, size_a)), "matrix product", offset=0.0, norm=norm, map=Product())


def _turned(call: Call, b: Signal) -> float:
    """Frobenius norm per matrix of a transposed tensor, from the rows it had before."""
    node = b.node
    if node.target is _aten.transpose.int:
        dims = {d % len(b.shape) for d in node.args[1:] if isinstance(d, int)}
        source = call.lookup(node.args[0])  # type: ignore[arg-type]
        if dims == {len(b.shape) - 1, len(b.shape) - 2} and isinstance(source, Signal):
            return inflate(math.sqrt(source.shape[-2]) * source.row)
    return math.inf


def attention_read(call: Call, scores: Signal, v: Signal, temperature: float = 1.0) -> Step:
    """`softmax(S)·V`: gain of S is the row bound R_V of V, that of V is √n for n queries.

    Row by row `∂(Σ_j p_j v_j)/∂s = Σ_j p_j (v_j − v̄) e_jᵀ`, of norm at most √(Σ p_j |v_j − v̄|²) ≤ R_V; and a stochastic matrix
    with n rows has norm at most √n (Kim et al. 2021 show that without a bound on V there is no constant).
    """
    if not math.isfinite(v.row):
        _unbounded(call, "attention")
    queries = math.sqrt(scores.shape[-2])
    rows = math.prod(call.shape[:-1])
    return Step(
        ((scores, inflate(v.row * temperature)), (v, inflate(queries))), "attention", offset=math.inf, row=v.row, peak=v.peak,
        norm=inflate(math.sqrt(rows) * v.row), map=Product(),
    )  # fmt: skip


@rule("aten.glu.default")
def glu(call: Call) -> Step:
    """`a·σ(b)`: √(1 + (|a|_∞/4)²) on a bounded domain."""
    x = call.x
    if not math.isfinite(x.peak):
        _unbounded(call, "a gated linear unit")
    return Step(
        ((x, inflate(math.sqrt(1 + (x.peak / 4) ** 2))),), "gated linear unit", offset=0.0, peak=x.peak, map=Product()
    )


@rule("aten.prod.dim_int", "aten.prod.default")
def product(call: Call) -> Step:
    """`∏ x_i` over n entries: √n·m^(n−1) where every |x_i| ≤ m, or with m = R/√n where ‖x‖ ≤ R (Maclaurin's inequality)."""
    x, dim = call.x, call.get("dim")
    n = x.numel if dim is None else x.shape[dim]
    size = min(x.peak, inflate(x.norm / math.sqrt(max(1, n))))
    if n > 1 and not n * math.log(max(1.0, size)) < 600:
        _unbounded(call, "a product of entries")
    gain = 1.0 if n <= 1 else inflate(inflate(math.sqrt(n) * size ** (n - 1)) * (1 + 1e-12))
    peak = inflate(size**n * (1 + 1e-12)) if n > 1 else x.peak
    low = 0.0 if x.low >= 0 else -math.inf
    return Step(((x, gain),), "product of entries", offset=0.0 if n else math.inf, peak=peak, low=low, map=Product())
