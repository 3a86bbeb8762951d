"""How far a network, evaluated in floating point, is from the real function it stands for.

Running error analysis through the captured graph (Higham 2002, §3). Let `v` be a node as a real function and `v̂` what a
forward pass in some dtype with unit roundoff u computes. If its inputs are within `slip` of the real ones, then

    |v̂ − v| ≤ |W|·slip + γ_m·(|W|·|v̂_in| + |b|)       for a layer that sums m products, in any order, fused or not,
    |v̂ − v| ≤ gain·slip + 32u·(|φ| + |v̂_in|)           for an activation that rounds,

entry by entry (products, softmax and normalisations: see `nonlinear`), and `‖v̂ − v‖₂ ≤ ‖W‖·‖slip‖₂ + ‖rounding‖₂` beside it:
the smaller of both is kept, and blocks that bound themselves (residual layers of 1-Lipschitz networks) carry the error they are
given by their own constant. Magnitudes are those of the given input, from a float64 pass, plus `L·r` for every input within r
of it, L being the proved constant up to that node.

Model of arithmetic: IEEE operations in the dtype of each node, sums of products in any order. Not meant by it: TF32 and other
reduced products, Winograd or FFT convolutions, elementary functions that are off by more than 32 units in the last place.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from equipoise.core import InputError, Refused, float64, proving
from equipoise.lipschitz.capture import Program, as_batch, as_function, capture, mapped
from equipoise.lipschitz.logs import exp_up
from equipoise.lipschitz.nonlinear import known, near
from equipoise.lipschitz.operations import Largest, Scaled, Sorted, Sum
from equipoise.lipschitz.propagate import Propagation, propagate
from equipoise.lipschitz.regions import Region
from equipoise.lipschitz.rules import Call, Step
from equipoise.lipschitz.tangent import carried, local_rounding, supported, value
from equipoise.lipschitz.values import where
from equipoise.maps.linear import Convolution, Matrix
from equipoise.maps.pointwise import Pointwise
from equipoise.norms.spectral import Cache, bracket

#: samples evaluated together
_CHUNK = 16


@dataclass(frozen=True)
class Evaluation:
    """Outputs of a batch (N, c) in float64 and two bounds, entry by entry, rounded up.

    `error`: the real outputs at the inputs themselves lie within it of `values`. `deployed`: a forward pass in the network's
    own dtype, at any input within `radius` of these, lies within it of the real outputs at that input; infinite where
    the dtype may overflow.
    """

    values: Tensor
    error: Tensor
    deployed: Tensor
    radius: Tensor


def forward_error(
    model: nn.Module, x: Tensor, *, radius: float | Tensor = 0.0, rtol: float = 1e-3
) -> Evaluation:
    """Bound the rounding of the whole forward pass, layer by layer, for the given inputs and all inputs near them.

    Guarantee: see `Evaluation`, in the model of arithmetic of this module, for a network evaluated with the weights and
    constants it was captured with. An operation whose rounding is not known is refused by name.

    Args:
        model: in evaluation mode, with one output (batch, …).
        x: a batch, in the dtype the network is deployed in.
        radius: ℓ2, a number or one per sample.
        rtol: relative gap asked of every operator norm.

    >>> net = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 3))
    >>> result = forward_error(net.eval(), torch.randn(4, 100))
    >>> bool((result.deployed < 1e-3).all() and (result.error < 1e-11).all() and (result.deployed > 1e-8).all())
    True

    Reference: Higham (2002), Accuracy and Stability of Numerical Algorithms, §3.3.
    """
    x = as_batch(x)
    program = capture(model, x[:1])
    with proving():
        cache = Cache(rtol)
        return Rounding(propagate(program, None, rtol, cache), cache)(x, radius)


def _linear_run(run: Propagation, node: fx.Node, cache: Cache) -> Region | None:
    """The linear run that ends in this node: its norm is below the product of norms, by orders of magnitude in deep networks."""
    facts = run.facts[node]
    if not isinstance(facts.form, Matrix | Convolution) or facts.base is None:
        return None
    if any(user in run.facts and run.facts[user].base is facts.base for user in node.users):
        return None  # it goes on
    bound = float(bracket(facts.form, cache).upper)
    return Region(facts.base, node, bound, node.name, "linear run", "fused", whole=False)


@dataclass(frozen=True)
class _Slip:
    """Entry by entry and in ℓ2."""

    entry: Tensor
    norm: Tensor

    def least(self, entry: Tensor, norm: Tensor) -> _Slip:
        norm = torch.minimum(self.norm, norm)
        return _Slip(torch.minimum(torch.minimum(self.entry, entry), norm), norm)


Slips = dict[fx.Node, _Slip]
#: what blocks add of their own
Fresh = dict[Region, _Slip]


class Rounding:
    """The rounding of one captured network, of all operations that are not `unknown`.

    Args:
        run: of a network with one input; its constants hold everywhere, if a pass in its own dtype is asked about.
        cache: of operator norms.
    """

    def __init__(self, run: Propagation, cache: Cache) -> None:
        self.run = run
        self.calls = {node: run.call(node, cache) for node in run.program.nodes}
        self.reach = {node: exp_up(facts.fused) for node, facts in run.facts.items()}
        # what only `nonlinear` evaluates, in float64 alone
        self.nonlinear = [
            n for n, call in self.calls.items() if not _is_bounded(call, run.steps[n])
        ]
        # blocks by the node in which they end, each with the nodes inside
        self.blocks: dict[fx.Node, dict[Region, list[fx.Node]]] = {}
        for node in self.calls:
            for block in (*run.regions.get(node, ()), _linear_run(run, node, cache)):
                inner = None if block is None else _between(block, run.program)
                if block is not None and inner is not None:
                    self.blocks.setdefault(node, {})[block] = inner
        kinds = {facts.signal.dtype for facts in run.facts.values()}
        self.dtype = torch.float32 if torch.float32 in kinds else torch.float64

    @functools.cached_property
    def unknown(self) -> str:
        """The first operation whose rounding is not bounded even in float64; empty where there is none."""
        unknown = (_unbounded(n) for n in self.nonlinear if not known(self.calls[n]))
        return next(unknown, "")

    def __call__(self, x: Tensor, radius: float | Tensor = 0.0) -> Evaluation:
        """Values and bounds of a batch."""
        near = float64(radius).expand(len(x)).clone()
        if not ((near >= 0) & torch.isfinite(near)).all():
            raise InputError("the radius must be a non-negative number, or one per sample")
        self.require(self.dtype)
        values, error = self.evaluate(x)
        return Evaluation(values, error, self.deployed(x, near), near)

    def require(self, dtype: torch.dtype) -> None:
        """Refuse a network whose pass in `dtype` cannot be bounded."""
        if self.dtype != dtype:
            raise Refused(
                f"the network computes in {self.dtype}, not in {dtype}: convert it first, e.g. model.float()"
            )
        if self.nonlinear:
            raise Refused(_unbounded(self.nonlinear[0]))
        native = self.run.program.native.values()
        if any(isinstance(c, Tensor) and c.is_floating_point() for c in native):
            raise Refused(
                "the rounding of constants that an operation computes on its way is not bounded; compute them first"
            )

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first two tensors of `Evaluation` alone: values in float64, and how far the real ones may be from them.

        That is infinite where an operation is `unknown`.
        """
        if self.unknown:
            values = as_function(self.run.program)(x.double())
            return values, torch.full_like(values, math.inf)
        return self._batch(x, torch.zeros(len(x), dtype=torch.float64), None)

    def deployed(self, x: Tensor, radius: Tensor) -> Tensor:
        """The last bound of `Evaluation` alone, for a radius per sample.

        Args:
            x: a batch of inputs.
            radius: in ℓ2, one per sample.
        """
        return self._batch(x, radius, self.dtype)[1]

    def _batch(self, x: Tensor, near: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        parts = []
        for some, r in zip(x.double().split(_CHUNK), near.split(_CHUNK), strict=True):
            with proving():
                parts.append(mapped(lambda s, r: self.walk(s, r, dtype), some, r))
        values, slip = torch.cat(parts).unbind(1)
        return values, torch.where(slip.isnan(), math.inf, slip)

    def walk(self, x: Tensor, r: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The outputs at one sample (without its batch dimension) in float64, and how far a pass in `dtype` may be off.

        None: that float64 pass itself, whose activations are the real functions up to rounding.

        Args:
            x: the sample.
            r: radius of the ball around it, in ℓ2.
            dtype: of the pass that is bounded.
        """
        start = self.run.program.inputs[0]
        values = {start: x[None]}
        slips = {start: _Slip(torch.zeros_like(x[None]), torch.zeros_like(r))}
        local: dict[fx.Node, Tensor] = {}
        fresh: Fresh = {}
        for node in self.run.program.nodes:
            call, step = self.calls[node], self.run.steps[node]
            if node in self.nonlinear:
                values[node], _ = near(call, values, {n: t.entry for n, t in slips.items()})
            else:
                # computed operands: real ones at x in float64, moved by at most reach·r, and off by slip both times
                moved = {
                    s.node: 0.0 if dtype is None else self.reach[s.node] * r for s, _ in step.gains
                }
                sizes = {
                    n: values[n].abs() + (2 * slips[n].entry + reach) for n, reach in moved.items()
                }
                values[node] = value(call, step, values)
                local[node] = local_rounding(call, step, sizes, values[node], dtype)
            slips[node] = self._advance(node, values, slips, local, fresh)
            for block, inner in self.blocks.get(node, {}).items():
                # what the block adds of its own, given inputs that are off by nothing
                zero = slips[block.source]
                own = {
                    block.source: _Slip(torch.zeros_like(zero.entry), torch.zeros_like(zero.norm))
                }
                for part in inner:
                    own[part] = self._advance(part, values, own, local, fresh)
                fresh[block] = own[node]
                slips[node] = _through(block, slips, fresh, slips[node])
        outputs = [
            torch.stack([values[o].flatten(), slips[o].entry.flatten()])
            for o in self.run.program.outputs
        ]
        return torch.cat(outputs, 1)

    def _advance(
        self,
        node: fx.Node,
        values: dict[fx.Node, Tensor],
        slips: Slips,
        local: dict[fx.Node, Tensor],
        fresh: Fresh,
    ) -> _Slip:
        call, step = self.calls[node], self.run.steps[node]
        entries = {n: slip.entry for n, slip in slips.items()}
        if node in self.nonlinear:
            entry = near(call, values, entries)[1]
            slip = _Slip(entry, _length(entry))
        else:
            entry = _grown(
                carried(call, step, {s.node: entries[s.node] for s, _ in step.gains}) + local[node]
            )
            norm = torch.stack([gain * slips[s.node].norm for s, gain in step.gains])
            norm = torch.linalg.vector_norm(norm) if step.combine == "root" else norm.sum()
            slip = _Slip(entry, _grown(norm + _length(local[node])))
            slip = slip.least(entry, _length(entry))
        for block in self.blocks.get(node, ()):
            if block in fresh and block.source in slips:
                slip = _through(block, slips, fresh, slip)
        return slip


def _through(region: Region, slips: Slips, fresh: Fresh, slip: _Slip) -> _Slip:
    """The error that enters a block leaves it at most `bound` times as large; what the block adds comes on top."""
    entering = slips[region.source].norm * region.bound
    own = fresh[region]
    return slip.least(_grown(own.entry + entering), _grown(own.norm + entering))


def _between(region: Region, program: Program) -> list[fx.Node] | None:
    """The nodes from the source to the output of a region, in order; None where another way leads in."""
    between = {region.output}
    for node in reversed(program.nodes):
        if node in between and node is not region.source:
            between.update(node.all_input_nodes)
    if not between.isdisjoint({*program.inputs} - {region.source}):
        return None
    return [n for n in program.nodes if n in between and n is not region.source]


def _unbounded(node: fx.Node) -> str:
    return f"{where(node)}: the rounding of {node.target} is not bounded; evaluate it apart, or in another form"


def _is_bounded(call: Call, step: Step) -> bool:
    match step.map:
        # rounding may leave the domain of the slopes
        case Pointwise(function=function, everywhere=everywhere):
            return function is not None and everywhere and len(step.gains) == 1
        case Largest() | Sorted():
            return bool(step.gains)
        case Sum(weights=weights):
            return len(weights) <= 12
        case Scaled(shift=shift, size=size):
            return shift is None or size is not None
        case _:
            return bool(step.gains) and supported(call, step)


def _grown(x: Tensor) -> Tensor:
    """Enlarged by more than sums of non-negative numbers round in float64."""
    return x * (1 + 1e-9)


def _length(x: Tensor) -> Tensor:
    """ℓ2, rounded up; squares that vanish are covered."""
    return torch.linalg.vector_norm(x) * (1 + 1e-9) + math.sqrt(x.numel()) * 1e-150
