"""Norms of weights while they train: a proof made at one step is carried to the next ones, or made again.

Bounds are tried from cheap to tight, the first that suffices is taken. With S the weight at the last proof, κ the factor by which
it was scaled since, and W the weight of today,

    ‖W‖ ≤ κ·upper(S) + ‖W − κS‖,        ‖W‖ ≥ κ·lower(S) − ‖W − κS‖                              (Weyl)

where the distance is bounded by the Frobenius norm for a matrix, and by `sup_ω ‖E_{W−κS}(ω)‖_F` times the norm of the padding
map for a convolution. For a matrix the same distance is then charged only to what lies outside its few largest directions
(`norms.deflation`). Otherwise the norm of W is proved directly: that it lies below the number that suffices, by one Cholesky
factorisation (per frequency), or a tight bracket if it does not. `SingularVectors` follows a map from below: an estimate, never a
certificate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.core import InputError, fresh_strides
from equipoise.core.precision import (
    deflate,
    frobenius,
    full_precision,
    inflate,
    require_finite,
    unit_roundoff,
    working_dtype,
)
from equipoise.maps.geometry import circular_lattice, padding_norm
from equipoise.maps.linear import Adjoint, Convolution, Linear, Matrix
from equipoise.maps.reading import read
from equipoise.norms.cholesky import bracket_of_gram, cholesky_bracket, syrk, syrk_error
from equipoise.norms.convolution import conv_bracket
from equipoise.norms.deflation import deflated_bracket, first_directions, improved, prove_rest
from equipoise.norms.gram import small_side
from equipoise.norms.symbol import symbol_energy

#: `W − κS` as computed, and a bound of its Frobenius norm, rounding included
Change = tuple[Tensor, float]


class Proof(NamedTuple):
    """`lower ≤ ‖S‖ ≤ upper`, proved at the weight S, whose Frobenius norm is at most `size`, with these settings."""

    S: Tensor
    lower: float
    upper: float
    size: float
    enough: float
    rtol: float


class TrackedNorm:
    """What a matrix and a convolution have in common: the ladder of bounds, and storing the proof."""

    #: whether direct proofs cost so much that room for the next steps is worth more than closeness
    dear: bool = False

    def __init__(self) -> None:
        self.proof: Proof | None = None
        self.kappa = 1.0
        self.used: Counter[str] = Counter()
        #: whether the last weight was proved directly, and the carried proof before was of no use
        self.direct = self.renewed = False
        #: of the last weight: both ends, and a bound of its Frobenius norm
        self.last = (0.0, math.inf, math.inf)

    @torch.no_grad()
    def bracket(
        self,
        W: Tensor,
        enough: float = 0.0,
        rtol: float = 1e-3,
        what: str = "weight",
        renew: bool = True,
    ) -> tuple[float, float]:
        """`(lower, upper)` of the norm, with `upper ≤ enough` or, where that is not true, `upper ≤ (1 + rtol)·lower`.

        To be called under `full_precision()`, which is slow to enter for every weight.

        Args:
            W: the weight as it is now.
            enough: an upper end that suffices.
            rtol: relative gap to reach otherwise (a convolution's borders may keep its norm below any such gap).
            what: how to call the weight in an error.
            renew: False allows only the carried proof, where there is one: cheap, true, and looser.
        """
        A = self._prepared(W, what)
        S = None if self.proof is None else self.proof.S
        lower, upper, size = 0.0, math.inf, math.inf
        carried = S is not None and (S.shape, S.dtype, S.device) == (A.shape, A.dtype, A.device)
        if carried:
            lower, upper, size, change = self._carried(A)
            self.used["weyl"] += 1
            if not math.isfinite(upper):
                self._require_finite(A, what)
            if upper > enough:
                low, high = self._followed(A, size, change)
                lower, upper = max(lower, low), min(upper, high)
        self.direct = upper > enough and upper > (1 + rtol) * lower and (renew or not carried)
        self.renewed = self.direct and carried
        if self.direct:
            self._require_finite(A, what)
            self.used["direct"] += 1
            _, lower, upper, size, _, _ = self._renew(A, enough, rtol)
        self.last = (min(lower, upper), upper, size)
        return self.last[:2]

    def scale(self, W: Tensor, factor: float) -> tuple[float, float]:
        """`W ← factor·W` in place, and both ends of its norm: every entry is rounded once.

        Args:
            W: the weight of the last bracket.
            factor: is rounded to single precision.
        """
        factor = _single(factor)
        W.mul_(factor)
        self.direct = self.renewed = False
        self.kappa = _single(self.kappa * factor)
        lower, upper, size = (inflate(factor * x) for x in self.last)
        u, tiny = unit_roundoff(W.dtype), torch.finfo(W.dtype).tiny
        rounding = inflate(u * size + math.sqrt(self._count(W)) * tiny)
        lost = self._spread(rounding)
        lower = max(0.0, deflate(deflate(deflate(lower) - lost)))
        self.last = (lower, inflate(upper + lost), inflate(size + rounding))
        return self.last[:2]

    def state_dict(self) -> dict[str, Tensor]:
        """What exact resuming needs, as tensors: the weight of the last proof, and what it was made with."""
        if self.proof is None:
            return {}
        numbers = [self.kappa, self.proof.enough, self.proof.rtol]
        return {
            "S": self.proof.S.clone(),
            "numbers": torch.tensor(numbers, dtype=torch.float64),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`: it holds no claims, the proof is made again."""
        self.proof, self.kappa = None, 1.0
        if "S" not in state:
            return
        numbers = state["numbers"].tolist()
        if len(numbers) != 3 or not all(0 <= x < math.inf for x in numbers) or numbers[2] == 0:
            raise InputError(
                f"a stored norm has the settings {numbers}: no proof is made with them"
            )
        kappa, enough, rtol = numbers
        with full_precision():
            S = self._prepared(require_finite(state["S"], "stored weight"), "stored weight")
            self._renew(S, enough, rtol)
        self.kappa = _single(kappa)

    def _renew(self, A: Tensor, enough: float, rtol: float) -> Proof:
        lower, upper = self._direct(A, enough, rtol)
        self.proof = Proof(A.clone(), lower, upper, self._size(A), enough, rtol)
        self.kappa = 1.0
        return self.proof

    def _carried(self, A: Tensor) -> tuple[float, float, float, Change]:
        """What the last proof says of A, by Weyl's inequality, a bound of `‖A‖_F`, and `A − κS`.

        Every entry of `A − κS` is rounded twice: by u times that of κS, and by u times that of the result.
        """
        assert self.proof is not None
        kappa, proof = self.kappa, self.proof
        difference = torch.sub(A, proof.S, alpha=kappa)
        d = self._size(difference)
        s = inflate(kappa * proof.size)
        u, tiny = unit_roundoff(A.dtype), torch.finfo(A.dtype).tiny
        rounding = inflate(2 * u * (s + d) + 4 * math.sqrt(self._count(A)) * tiny)
        distance = inflate(self._distance(difference, d) + self._spread(rounding))
        lower = max(0.0, deflate(kappa * proof.lower) - distance)
        upper = inflate(inflate(kappa * proof.upper) + distance)
        return lower, upper, inflate(s + d + rounding), (difference, inflate(d + rounding))

    def _require_finite(self, A: Tensor, what: str) -> None:
        require_finite(A, what)

    def _size(self, A: Tensor) -> float:
        """`‖A‖_F`, rounded up."""
        return frobenius_norm(A)

    def _count(self, A: Tensor) -> int:
        """The number of entries."""
        return A.numel()

    def _prepared(self, W: Tensor, what: str) -> Tensor:
        """The numbers that are computed with."""
        if W.is_complex():
            raise InputError(f"expected real numbers, got {what} in {W.dtype}")
        return W.detach().to(working_dtype(W.dtype))

    def _distance(self, difference: Tensor, size: float) -> float:
        """An upper bound of the norm of a difference of weights, whose Frobenius norm is at most `size`."""
        return size

    def _spread(self, size: float) -> float:
        """The largest norm of the map of a weight whose Frobenius norm is at most `size`."""
        return size

    def _followed(self, A: Tensor, size: float, change: Change) -> tuple[float, float]:
        """A tighter bracket of the norm of A, from directions that are followed."""
        return 0.0, math.inf

    def _direct(self, A: Tensor, enough: float, rtol: float) -> tuple[float, float]:
        """Both ends, proved at A."""
        raise NotImplementedError


def _single(x: float) -> float:
    """The nearest number of single precision: products with it are rounded once."""
    return float(torch.tensor(x, dtype=torch.float32))


def frobenius_norm(A: Tensor) -> float:
    """`‖A‖_F`, rounded up; summed along memory, which is several times faster."""
    along = A.mT if A.dim() == 2 and A.mT.is_contiguous() else A.reshape(len(A), -1)
    return float(frobenius(along))


class TrackedMatrix(TrackedNorm):
    """The norm of one real matrix while it trains: `bracket(W)` is proved at every call, and cheap where little changed.

    >>> W = torch.diag(torch.tensor([3.0, 1.0, 0.5]))
    >>> tracked = TrackedMatrix()
    >>> lower, upper = tracked.bracket(W)
    >>> lower <= 3 <= upper <= 3.003
    True
    >>> tracked.bracket(W + 1e-3, enough=3.1)[1] >= 3
    True
    """

    def __init__(self) -> None:
        super().__init__()
        #: directions that are followed, as rows: now, and those that the last proof started from
        self.Q = self.start = torch.empty(0, 0)
        #: `SᵀS ⪯ rest²·I + TᵀT` (`norms.deflation`)
        self.T, self.rest = self.Q, math.inf

    @property
    def dear(self) -> bool:  # type: ignore[override]
        """True where no few directions stand out, so that a proof lasts for a step or two only."""
        return self.proof is not None and not len(self.T)

    def _prepared(self, W: Tensor, what: str) -> Tensor:
        if W.dim() != 2:
            raise InputError(f"expected a matrix, got {what} of shape {tuple(W.shape)}")
        A = super()._prepared(W, what)
        return small_side(A) if A.numel() else require_finite(A, what)

    def _followed(self, A: Tensor, size: float, change: Change) -> tuple[float, float]:
        if not len(self.T):
            return 0.0, math.inf
        T, rest = self.kappa * self.T, inflate(self.kappa * self.rest)
        lower, upper, self.Q = deflated_bracket(A, size, self.Q, T, rest, change)
        return lower, upper

    def _direct(self, A: Tensor, enough: float, rtol: float) -> tuple[float, float]:
        if self.Q.shape[1] != A.shape[1] or self.Q.dtype != A.dtype:
            self.Q = first_directions(A)
        self.start = self.Q
        self.T = self.Q[:0].double()
        cpu = A.cpu()
        G = syrk(cpu, torch.float32)
        error, size = syrk_error(cpu, G)
        result = None
        # squares of larger or smaller products would leave single precision
        if math.isfinite(error) and 1e-16 < size < 1e16:
            Q, values = improved(G, self.Q.cpu())
            self.Q = Q.to(A)
            proved = prove_rest(G, error, size, Q, values)
            if proved is not None:
                T, self.rest = proved
                self.T = T.to(A.device)
                lower, upper, self.Q = deflated_bracket(
                    A, frobenius_norm(A), self.Q, self.T, self.rest
                )
                if upper <= max(enough, (1 + rtol) * lower):
                    return lower, upper
                self.T = self.T[:0]
            result = bracket_of_gram(G, error, size, rtol / 2, cpu, Q[-1], enough)
        lower, upper, _ = result or cholesky_bracket(cpu, rtol / 2)
        return lower, upper

    def state_dict(self) -> dict[str, Tensor]:
        """What exact resuming needs, the directions that are followed included."""
        state = super().state_dict()
        return {**state, "Q": self.Q.clone(), "start": self.start.clone()} if state else state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`; directions are not trusted, bounds only get looser by wrong ones."""
        if "S" in state:
            like = first_directions(self._prepared(state["S"], "stored weight"))
            Q, self.Q = (state.get(key, like[:0]).to(like) for key in ("Q", "start"))
            if not Q.shape == self.Q.shape == like.shape:
                raise InputError("the stored directions do not fit the stored weight")
            require_finite(Q + self.Q, "stored directions")
        super().load_state_dict(state)
        self.Q = Q if "S" in state else self.Q


class TrackedConvolution(TrackedNorm):
    """The norm of one convolution while it trains, on the input size it sees or over all sizes.

    Args:
        layer: the layer; padding, stride, groups and dilation are read off it.
        input_size: spatial size of its input; None: the supremum over all sizes.
    """

    dear = True

    def __init__(self, layer: nn.Module, input_size: tuple[int, ...] | None = None) -> None:
        super().__init__()
        form = read(layer, input_size)
        conv = form if isinstance(form, Convolution) else form.adjoint()
        if not isinstance(conv, Convolution):
            raise InputError(f"expected a convolution, got {type(layer).__name__}")
        self.conv = conv
        self.factor = _padding_factor(conv)

    def _prepared(self, W: Tensor, what: str) -> Tensor:
        if W.shape != self.conv.weight.shape:
            raise InputError(
                f"expected {tuple(self.conv.weight.shape)}, got {what} of shape {tuple(W.shape)}"
            )
        return super()._prepared(W, what)

    def _distance(self, difference: Tensor, size: float) -> float:
        return inflate(
            self.factor * float(symbol_energy(self.conv.geometry.grouped(difference)).max())
        )

    def _spread(self, size: float) -> float:
        taps = math.prod(self.conv.weight.shape[2:])
        return inflate(self.factor * math.sqrt(taps) * size)  # ‖E(ω)‖_F ≤ √taps·‖K‖_F

    def _direct(self, A: Tensor, enough: float, rtol: float) -> tuple[float, float]:
        # a tight upper end lasts for more steps than one that is only small enough, and costs about the same
        result = conv_bracket(self.conv.with_weight(A), min(rtol, 0.01), 1e-30)
        return float(result.lower), float(result.upper)


def _padding_factor(conv: Convolution) -> float:
    """How much larger than its symbol the operator can be because of padding, rounded up; 1 for zeros."""
    if conv.padding == "circular":
        lattices = [circular_lattice(axis) for axis in conv.axes]
        if all(pair is not None for pair in lattices):
            return inflate(math.prod(pair[1] for pair in lattices if pair is not None))
    return inflate(math.prod(padding_norm(axis, conv.padding) for axis in conv.axes))


class SingularVectors:
    """Subspace iteration on `AᵀA`, warm-started: a few right singular vectors of a map that follow it while it trains.

    `‖Av‖ ≤ σ₁` for any unit v: tight once v has converged, and with v held fixed its gradient is that of σ₁ there. One call of
    `iterate` costs `steps` applications of the map and its adjoint to `vectors` inputs.

    Args:
        form: returns the map as it is now.
        shape: of one input.
        vectors: how many are followed.
        seed: of the first vectors.
    """

    def __init__(
        self, form: Callable[[], Linear], shape: tuple[int, ...], vectors: int = 2, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.form, self.shape = form, shape
        V = torch.randn(
            min(vectors, max(1, math.prod(shape))), *shape, generator=generator, dtype=torch.float64
        )
        self.V = _orthonormal(V)

    @torch.no_grad()
    def iterate(self, steps: int) -> None:
        """`V ← orth(AᵀA V)`, `steps` times."""
        form = self.form()
        turned = form.adjoint()
        layer = turned if isinstance(form, Adjoint) else form
        assert isinstance(layer, Matrix | Convolution)
        self.V = self.V.to(layer.matrix if isinstance(layer, Matrix) else layer.weight)
        for _ in range(steps):
            V = turned.apply(form.apply(self.V))
            if bool((torch.linalg.vector_norm(V.flatten(1), dim=1) > 0).all()) and bool(
                V.isfinite().all()
            ):
                self.V = _orthonormal(V)

    def norm(self) -> Tensor:
        """`‖A v‖` for the best vector of the subspace, differentiable in the weights."""
        form = self.form()
        with torch.no_grad():
            AV = form.apply(self.V).flatten(1)
            _, vectors = torch.linalg.eigh(AV @ AV.mT)
            v = torch.tensordot(vectors[:, -1], self.V, 1)[None]
            v = v / torch.linalg.vector_norm(v)
        return torch.linalg.vector_norm(form.apply(v))


def _orthonormal(V: Tensor) -> Tensor:
    Q, _ = torch.linalg.qr(V.flatten(1).mT)
    return fresh_strides(Q.mT.reshape(V.shape))
