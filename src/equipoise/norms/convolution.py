"""The norm of a convolution as it is really padded, strided, grouped and dilated: a proved bracket.

Upper end: the operator is a submatrix of a circulant one whose norm is the maximum of the symbol over a finite grid (input
size known), or is bounded by the supremum over all frequencies. Lower end: a Rayleigh quotient of the operator itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf, pi, prod, sqrt

import torch
from torch import Tensor

from equipoise.core.bounds import Bracket
from equipoise.core.precision import (
    deflate,
    frobenius,
    gamma,
    inflate,
    ldexp_down,
    ldexp_up,
    require_finite,
    rescaled,
)
from equipoise.maps.geometry import (
    Axis,
    Lattice,
    circular_lattice,
    is_whole_circle,
    padding_norm,
    polyphase,
    zero_lattice,
)
from equipoise.maps.linear import Convolution
from equipoise.norms.cholesky import (
    dense_bracket,
    lanczos,
    random_start,
    single_thread,
)
from equipoise.norms.gram import rayleigh_lower, wide
from equipoise.norms.search import Search, SymbolBound
from equipoise.norms.symbol import Symbol, correlation_error

#: an operator with at most this many entries may be materialised to close the gap that small images leave: where a larger
#: tolerance is asked for, and where a smaller one is, which is worth some seconds
DENSE_ENTRIES, FINE_ENTRIES = 1_500_000, 17_000_000
#: grids of at most this many points are gone through whole: along one axis, along several
GRID_POINTS = (900, 2600)
#: floating-point operations one Lanczos run on the operator itself may cost
LANCZOS_FLOPS = 2.5e9


def conv_bracket(conv: Convolution, rtol: float = 1e-3, enough: float = 0.0) -> Bracket:
    """Bracket of the norm of a convolution operator; with unknown input size, of the supremum over all sizes.

    Args:
        conv: the convolution with its geometry.
        rtol: relative gap to reach.
        enough: an upper end that suffices: where it is true, one proof shows it. If given, the gap is closed only by what the
            symbol shows, not by looking at the borders of the operator.
    """
    conv = conv.with_weight(require_finite(conv.weight.cpu())).real_form()  # proofs run on the CPU
    weight = conv.weight.double()
    if not bool(weight.any()):
        return Bracket(0.0, 0.0, rtol, "zero kernel")
    weight, e = rescaled(weight)
    with single_thread(min(conv.kernel.shape[1:3]) ** 3):
        bracket = _scaled_bracket(conv.with_weight(weight), rtol, ldexp_down(enough, -e))
    return replace(
        bracket, lower=ldexp_down(float(bracket.lower), e), upper=ldexp_up(float(bracket.upper), e)
    )


def _scaled_bracket(conv: Convolution, rtol: float, enough: float) -> Bracket:
    small = conv.known and _entries(conv) <= DENSE_ENTRIES / 32
    if small:
        return _materialised(conv, rtol)
    upper, lower, start, method = _by_symbol(conv, rtol, enough)
    if enough > 0:
        return Bracket(min(lower, upper), upper, rtol, method, "only the upper end was asked for")
    if conv.known and upper > (1 + rtol) * lower:
        lower = max(lower, _operator_lower(conv, start, rtol, upper / (1 + rtol)))
    limit = DENSE_ENTRIES if rtol >= 1e-3 else FINE_ENTRIES
    if upper > (1 + rtol) * lower and conv.known and _entries(conv) <= limit:
        dense = _materialised(conv, rtol)
        lower, upper = max(lower, float(dense.lower)), min(upper, float(dense.upper))
        method = f"{method}, materialised"
    note = (
        "" if upper <= (1 + rtol) * lower else _why(conv, upper / lower - 1 if lower > 0 else inf)
    )
    return Bracket(min(lower, upper), upper, rtol, method, note)


def _why(conv: Convolution, gap: float) -> str:
    reason = "the symbol is too flat, or the outputs repeat"
    if conv.padding in ("reflect", "replicate"):
        reason = f"{conv.padding} padding is bounded through the norm of its copies"
    elif conv.known:
        reason = "borders keep the operator below its circulant extension"
    return f"gap {gap:.2g}: {reason}"


def _by_symbol(
    conv: Convolution, rtol: float, enough: float
) -> tuple[float, float, Tensor | None, str]:
    """`(upper, lower, start, method)` from the symbol; `start` seeds a Lanczos run on the operator."""
    if conv.padding == "zeros":
        return *_zero_bound(conv, rtol, enough), "symbol"

    if conv.padding == "circular":
        exact = all(is_whole_circle(axis) for axis in conv.axes) or not conv.known
        method = "symbol on the circle"
        pairs = [circular_lattice(axis) for axis in conv.axes]
        factor = prod(pair[1] for pair in pairs if pair is not None)
        # the stride does not divide the size: outputs are a selection of those of stride 1
        if None in pairs and conv.known:
            factor = prod(_repeats(axis) for axis in conv.axes)
            conv = conv.on(
                [replace(a, stride=1, left=a.reach, right=0, out=a.size) for a in conv.axes]
            )
            pairs = [circular_lattice(axis) for axis in conv.axes]
            exact, method = False, "stride-1 symbol on the circle"
        lattices = [pair[0] for pair in pairs if pair is not None]
        if len(lattices) == len(pairs):
            upper, lower, start = _lattice_bound(
                conv, lattices, 0.9 * rtol, rtol, deflate(enough / factor)
            )
            return _times(upper, factor), lower if exact else 0.0, start, method

    factor = prod(padding_norm(axis, conv.padding) for axis in conv.axes)
    upper, lower, _ = _zero_bound(conv.unpadded(), rtol, deflate(enough / factor))
    return (
        _times(upper, factor),
        0.0 if conv.known else lower,
        None,
        f"symbol × {conv.padding} padding",
    )


def _repeats(axis: Axis) -> float:
    """√ of how often one position of the circle serves as an output position."""
    assert axis.size is not None
    assert axis.out is not None
    visits = Counter(axis.stride * j % axis.size for j in range(axis.out))
    return sqrt(max(visits.values())) * (1 + 2.0**-51)


def _times(upper: float, factor: float) -> float:
    """`upper·factor`, rounded up; exact for the factor 1."""
    return upper if factor == 1 else inflate(upper * factor)


def _zero_bound(
    conv: Convolution, rtol: float, enough: float
) -> tuple[float, float, Tensor | None]:
    lattices = [zero_lattice(axis) for axis in conv.axes]
    if any(lattice is None for lattice in lattices):
        return 0.0, 0.0, None
    tol = 0.5 * rtol if conv.known else 0.9 * rtol
    return _lattice_bound(conv, [x for x in lattices if x is not None], tol, rtol, enough)


def _lattice_bound(
    conv: Convolution, lattices: list[Lattice], tol: float, rtol: float, enough: float
) -> tuple[float, float, Tensor | None]:
    """Bound of the symbol over the lattices' grid (or all frequencies), a lower end, and a start vector."""
    kernel = polyphase(conv.kernel, lattices)
    windows = conv.padding == "zeros" and conv.known
    if all(n == 1 for n in kernel.shape[3:]):
        low, high, _ = dense_bracket(kernel.flatten(2), tol)
        reached = not windows or all(lattice.window >= 1 for lattice in lattices)
        return float(high.max()), float(low.max()) if reached else 0.0, None
    symbol, peak = _search(kernel, lattices, tol, enough, exact=conv.padding == "circular")
    group = torch.tensor([peak.group])
    G = symbol.gram(group, peak.omega[None], torch.float32)[0]
    v = lanczos(G.matmul, random_start(len(G), G), steps=64, converged=tol / 64)[0]
    if not windows:
        at_symbol = float(rayleigh_lower(symbol.at(group, peak.omega[None])[0], v)) - float(
            symbol.at_error()[peak.group]
        )
        return peak.upper, max(0.0, deflate(at_symbol)), None
    sides = [lattice.window_out if symbol.adjoint else lattice.window for lattice in lattices]
    lower = windowed_lower(symbol, peak.group, peak.omega, v, sides)
    tight = peak.upper <= max(enough, (1 + rtol) * lower)
    wave = None if tight else _plane_wave(conv, symbol.adjoint, peak.group, peak.omega, v)
    return peak.upper, lower, wave


def _search(
    kernel: Tensor, lattices: list[Lattice], tol: float, enough: float, exact: bool
) -> tuple[Symbol, SymbolBound]:
    """The cheapest proved maximum: over all frequencies where the grid is fine, over the grid where that is tighter.

    With `exact` the frequency named lies on the grid, where it is known: a circle has no others.
    """
    groups, columns = kernel.shape[0], min(kernel.shape[1:3])
    grid = tuple(lattice.size for lattice in lattices if lattice.size is not None)
    whole = len(grid) == len(lattices)
    points = prod(grid) if whole else 0
    budget = int(min(max(1e11 / columns**3, 3000), 200_000)) * groups
    coarse = whole and all(n <= 3 * k for n, k in zip(grid, kernel.shape[3:], strict=True))
    if whole and (
        points <= GRID_POINTS[len(grid) > 1] or (coarse and points * groups <= 16 * budget)
    ):
        symbol = Symbol.of(kernel, points)
        return symbol, Search(symbol, tol, budget, enough).over_grid(grid)
    symbol = Symbol.of(kernel, 1000)
    search = Search(symbol, tol, budget, enough)
    peak = search.over_all()
    if not whole or (peak.upper <= enough and not exact):
        return symbol, peak
    value, omega = search.near(grid)
    if points <= (1400 if peak.proved else 16 * budget) and value * (1 + 2 * tol) < peak.upper:
        other = Search(symbol, tol, budget, enough).over_grid(grid)
        if other.upper < peak.upper:
            return symbol, other
    return symbol, replace(peak, omega=omega) if exact else peak


def _plane_wave(
    conv: Convolution, adjoint: bool, group: int, omega: Tensor, v: Tensor
) -> Tensor | None:
    """`Re w(i)·e^{-iω·i}·v` on the whole input (through the adjoint, if v belongs to the outputs): where Lanczos starts."""
    if any(axis.stride > 1 and (axis.dilation > 1 or not adjoint) for axis in conv.axes):
        return None  # the wave would have to be spread over the phases
    groups, co, ci = conv.kernel.shape[:3]
    sizes = [(axis.out if adjoint else axis.size) or 1 for axis in conv.axes]
    wave = v
    for axis, w, n in zip(conv.axes, omega, sizes, strict=True):
        i = torch.arange(n, dtype=torch.float64)
        wave = wave[..., None] * (
            torch.sin(pi * (i + 1) / (n + 1)) * torch.exp(-1j * w / axis.dilation * i)
        )
    channels = co if adjoint else ci
    x = torch.zeros(groups, channels, *sizes, dtype=wave.dtype)
    x[group] = wave
    x = x.flatten(0, 1)[None]
    x = x.real.contiguous()
    return conv.adjoint().apply(x) if adjoint else x


def windowed_lower(
    symbol: Symbol, group: int, omega: Tensor, v: Tensor, windows: Sequence[int]
) -> float:
    """Rayleigh quotient of `w(i)·e^{iω·i}·v`, a plane wave under a sine window that meets no border.

    `‖K x‖² = Σ_b r(b)·v*C_b v·e^{-ib·ω}` with r the autocorrelation of the window: no convolution is run, whatever the
    size.

    Args:
        symbol: the symbol.
        group: the group of channels.
        omega: the frequency `(dims,)`.
        v: the vector of channels.
        windows: lengths of the window, one per axis.
    """
    if symbol.correlations is None or any(w < 1 for w in windows):
        return 0.0
    correlation = symbol.offsets.new_ones(len(symbol.offsets))
    for j, n in enumerate(windows):
        n = min(n, 4096)
        window = torch.sin(pi * torch.arange(1, n + 1, dtype=torch.float64) / (n + 1))
        r = [
            float(window[: n - b] @ window[b:]) if b < n else 0.0 for b in range(symbol.lengths[j])
        ]
        correlation *= correlation.new_tensor([r[abs(int(b))] / r[0] for b in symbol.offsets[:, j]])
    v = wide(v)
    v = v / torch.linalg.vector_norm(v)
    C = symbol.correlations[group]
    p, q = C @ v.real, C @ v.imag
    real, imag = p @ v.real + q @ v.imag, q @ v.real - p @ v.imag
    angle = symbol.offsets @ omega
    terms = (real * angle.cos() + imag * angle.sin()) * correlation
    terms[1:] *= 2  # each offset stands for ±b
    slack = gamma(
        2 * sum(symbol.kernel.shape[1:3]) + 2 * symbol.kernel[0].numel() + 16384, torch.float64
    )
    error = (8 * (slack + symbol.phase_error()) + 2 * correlation_error(symbol.kernel)) * float(
        symbol.size[group]
    ) ** 2
    return deflate(max(0.0, float(terms.sum()) - error) ** 0.5)


def _entries(conv: Convolution) -> float:
    return float(prod(conv.output_shape)) * prod(conv.input_shape)


def materialise(conv: Convolution) -> Tensor:
    """The dense matrix of the operator in float64 (small cases only), from unit vectors of one channel.

    Every pair of channels is a convolution of one channel with the same geometry, so a pixel is put through all of them at
    once: the work of one image per pixel, not per number of the input.
    """
    (out, ins), groups, size = conv.weight.shape[:2], conv.groups, conv.size
    pairs = conv.weight.reshape(out * ins, 1, *conv.weight.shape[2:])
    one = Convolution(pairs, replace(conv.geometry, shape=tuple(pairs.shape), groups=1))
    pixels = torch.eye(prod(size), dtype=conv.weight.dtype).reshape(-1, 1, *size)
    # (pixel, group, out, in, place)
    y = one.apply(pixels).reshape(len(pixels), groups, out // groups, ins, -1)
    blocks = y.permute(1, 2, 4, 3, 0).reshape(groups, -1, ins * len(pixels))
    return torch.block_diag(*blocks) if groups > 1 else blocks[0]


def _materialised(conv: Convolution, rtol: float) -> Bracket:
    """Bracket of the dense matrix; overlapping copies (wrapped or reflected taps) are sums, whose rounding is added."""
    W = materialise(conv)
    low, high, _ = dense_bracket(W, rtol)
    size = float(frobenius(materialise(conv.magnitude())))
    error = inflate(gamma(conv.kernel[0, 0].numel() + 4, torch.float64) * size) * 2
    lower, upper = max(0.0, deflate(float(low) - error)), inflate(float(high) + error)
    return Bracket(lower, upper, rtol, "materialised")


def _operator_lower(conv: Convolution, start: Tensor | None, rtol: float, enough: float) -> float:
    """Lanczos on the operator itself, then a Rayleigh quotient in float64; 0 where that would cost too much.

    It goes on while it pays, until `enough` is reached: from the plane wave two or three steps nearly always do.
    """
    rows, columns = prod(conv.output_shape), prod(conv.input_shape)
    flops = 4.0 * rows * conv.kernel[0, 0].numel()
    shape = conv.input_shape
    steps = int(min(25, LANCZOS_FLOPS / flops, 2e8 / columns))
    if steps < 3:
        return 0.0
    quick = conv.with_weight(conv.weight.float())

    def multiply(x: Tensor) -> Tensor:
        return quick.adjoint().apply(quick.apply(x.reshape(1, *shape))).flatten()

    target = enough**2 * (1 + 1e-5)
    first, every = quick.weight.new_zeros(1) if start is None else start.to(quick.weight), 2
    if not bool(first.any()):  # no start, or all of it vanished
        first, every = random_start(columns, quick.weight), 6
    v = lanczos(multiply, first.flatten(), steps, rtol / 10, target, every)[0]
    x = v.double().reshape(1, *shape)
    x = x / torch.linalg.vector_norm(x)
    y = conv.apply(x)
    pad = prod(padding_norm(axis, conv.padding) for axis in conv.axes)
    size = float(frobenius(conv.kernel.abs().flatten(3).sum(-1)).max()) * (1 + 1e-10)
    error = gamma(2 * conv.kernel[0, 0].numel() + 8, torch.float64) * size * pad * 2
    dims = tuple(range(y.dim()))
    norm = float(frobenius(y, dims)) * (1 - 2 * gamma(2 * y.numel() + 16, torch.float64))
    return max(0.0, deflate(norm / float(frobenius(x, dims))) - error)
