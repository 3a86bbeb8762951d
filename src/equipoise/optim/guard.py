"""`SpectralGuard`: the norms of chosen weights held at a radius while any optimizer trains them, proved at every step."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from equipoise.core import (
    POSITIVE,
    Bracket,
    InputError,
    Refused,
    deflate,
    format_up,
    full_precision,
    inflate,
    require_module,
    require_number,
    require_one_of,
    unit_roundoff,
)
from equipoise.maps.geometry import Geometry
from equipoise.maps.reading import geometry_of, module_kind
from equipoise.norms.sharded import TrackedShards, is_sharded
from equipoise.norms.tracking import TrackedConvolution, TrackedMatrix, TrackedNorm
from equipoise.regularizers.selection import (
    LINEAR_MAPS,
    Names,
    Types,
    name_matches,
    plain_weight,
    select_layers,
    spatial_sizes,
)

How = Literal["cap", "sphere", "clip", "hammer"]
Radius = float | Mapping[str, float]


@dataclass(frozen=True)
class Place:
    """Where a guarded weight lives: a parameter of a module, or some of its rows; `geometry` is that of a layer."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    rows: tuple[int, int] | None = None
    geometry: Geometry | None = None

    @property
    def weight(self) -> Tensor:
        """The numbers that are bounded: the parameter itself, a view of its rows, or this process's shard."""
        part = local_part(self.parameter)
        return part if self.rows is None else part.detach()[slice(*self.rows)]

    @property
    def is_convolution(self) -> bool:
        """True for the kernel of a convolution, False for a matrix."""
        return self.geometry is not None and bool(self.geometry.axes)


@dataclass
class Guarded:
    """One weight under guard, and the places that use it."""

    places: list[Place]
    radius: float
    tracked: TrackedNorm
    lower: float = 0.0
    upper: float = math.inf
    stamp: tuple[Any, ...] | None = None
    restored: int = 0

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.places[0].name

    @property
    def weight(self) -> Tensor:
        """The numbers that are bounded."""
        return self.places[0].weight

    def trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer writes to it."""
        parameter = self.places[0].parameter
        return any(p is parameter for group in optimizer.param_groups for p in group["params"])

    def current_stamp(self) -> tuple[Any, ...]:
        """What changes when the weight is written to; refused where a layer has another weight or geometry by now."""
        for place in self.places:
            if place.module._parameters.get(place.attribute) is not place.parameter:
                raise Refused(
                    f"the weight of {place.name!r} is another parameter than when the guard was made (assigned, or loaded "
                    "with assign=True), so its proof is about a weight that is not used: make a new guard"
                )
            if place.geometry is not None and geometry_of(place.module) != place.geometry:
                raise Refused(
                    f"{place.name!r} has another padding, stride, dilation or groups than when the guard was made, so its "
                    "proof is about another map: make a new guard"
                )
        part = local_part(self.places[0].parameter)
        return part._version, part.data_ptr(), part.dtype


def local_part(parameter: Tensor) -> Tensor:
    """The numbers of a parameter that this process holds."""
    sharded: Any = parameter.detach()
    return sharded.to_local() if is_sharded(sharded) else parameter


class SpectralGuard:
    """Holds `σ₁(W) ≤ R·(1 + tolerance)` for chosen layers after every optimizer step, with a proof each time.

        U_t = κU_s + ‖W_t − κW_s‖_F ,  or a new proof

    A proof made at step s is carried by Weyl's inequality; a new one is made only where the carried bound would exceed the
    radius. If the excess is real, the weight is brought back, and the bound of what is then stored is proved:

    | how | what is done to a weight with σ₁ > R |
    |---|---|
    | `cap` | `W ← cW`, so that `R(1 − headroom) ≤ σ₁ ≤ R` (of a convolution, and by default: the proved bound of σ₁) |
    | `sphere` | `W ← W·R/U` at every step, U the proved bound, also from below: `σ₁ = R` up to the tolerance |
    | `clip` | `W ← W − Σ (σ_i − r) u_i v_iᵀ` over the singular values above `r = R(1 − headroom)` (matrices only) |
    | `hammer` | `W ← W + (r − σ₁) u₁v₁ᵀ`, only the largest one (matrices only) |

    Guarded are the weights of linear and convolution layers, the query, key and value blocks of `nn.MultiheadAttention`, each on
    its own, and Hugging Face's `Conv1D`. Embeddings (lookup tables, whose rows are not mixed) and other parameters of two or more
    dimensions are not guarded unless `parameters=` names them; one warning lists them, and so does `repr(guard)`.

    A parameter of several modules (a tie) is one weight, held at the smallest of their radii; parameters that share memory in
    any other way are refused.

    Guarantee: after every `step()` of an attached optimizer, `bounds()` brackets the norm of the numbers stored in each weight,
    in floating point, for the padding, stride, groups and dilation of the layer, and every upper end is at most
    `R·(1 + tolerance)`. Weights written to by others are noticed by their version and bracketed anew; writes through `.data` or
    NumPy leave no trace there: `bounds(check=True)` compares the values. A layer with NaN or infinities is refused by name.

    Sharded matrices (`DTensor`) are proved on their shards, which every rank scales by the same number.

    Under `torch.distributed` every rank proves its other weights and takes those that rank 0 brought back, so that all ranks stay
    equal bit for bit.

    Args:
        model: the module that is trained (unwrapped, for distributed training).
        radius: R, for all layers or by glob pattern over their names: `{"blocks.*": 1.0, "head": 4.0}`, the first that matches;
            layers that match none are left alone.
        how: see above.
        only: module types.
        names: glob or compiled pattern over module names, or several.
        parameters: pattern over parameter names: further two-dimensional parameters to guard as matrices.
        tolerance: relative excess that is let pass without touching the weight.
        headroom: how far below R, relatively, a weight that has to be brought back may be put; by default 0.03, and 0.1 where
            proofs are dear: for convolutions, and matrices of which no few directions stand out. The room that it has then lets
            most steps pass on the carried proof: a weight that grew is scaled by it, without a new one; where proofs are dear, a
            weight close to R that needs a new one gets its room back.
            0 holds as close to R as the tolerance asks, with proofs in float64. Not for `sphere`, which has none.
        every: new proofs are made only every so many steps. Between them an excess that the carried proof cannot exclude
            counts as one, so norms are held a little below R: still proved, and cheaper where proofs are dear (convolutions with
            many channels). Not for `sphere`.
        input_size: spatial size of the model's input; the sizes that convolutions see are read off one forward pass of zeros.
            Without it, and without `example_input`, their norm is the supremum over all sizes.
        example_input: an input with batch, where zeros of that size would not do.
        optimizer: attached at once.

    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    >>> guard = SpectralGuard(net, radius=1.0, optimizer=optimizer)
    >>> net(torch.randn(32, 8)).square().sum().backward()
    >>> optimizer.step()
    >>> all(b.upper <= 1.001 for b in guard.bounds().values())
    True

    References: Weyl 1912; Newhouse et al. 2025 (`hammer`, `sphere`); Gouk et al. 2021 (projection after the step).
    """

    def __init__(
        self,
        model: nn.Module,
        radius: Radius = 1.0,
        how: How = "cap",
        only: Types = LINEAR_MAPS,
        names: Names = None,
        tolerance: float = 1e-3,
        input_size: int | tuple[int, ...] | None = None,
        *,
        parameters: Names = None,
        every: int = 1,
        headroom: float | None = None,
        example_input: Tensor | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        require_module(model)
        require_one_of(get_args(How), how=how)
        require_number(tolerance, "tolerance", least=1e-6, most=1)
        if headroom is not None:
            require_number(headroom, "headroom", least=0, most=1 - 2**-20)
        most = 1 if how == "sphere" else math.inf
        require_number(every, "every (1 for how='sphere')", least=1, most=most, whole=True)
        self.how, self.tolerance, self.every = how, tolerance, every
        self.headroom = 0.0 if how == "sphere" else headroom

        places = _places(model, only, names, parameters)
        radii = _radii(list(places), radius)
        places = {name: place for name, place in places.items() if name in radii}
        kernels = {name: place.module for name, place in places.items() if place.is_convolution}
        other = [*kernels, *(name for name, one in places.items() if is_sharded(one.parameter))]
        if how in ("clip", "hammer") and other:
            kind = "a convolution" if kernels else "sharded"
            raise InputError(
                f"how={how!r} changes single singular directions of whole matrices, and {other[0]!r} is {kind}; "
                "take how='cap', or leave it out"
            )
        sizes = spatial_sizes(model, kernels, input_size, example_input)
        self.layers = _weights(model, list(places.values()), radii, sizes)
        #: parameters of two or more dimensions that are not guarded, with the kind of module they belong to
        self.unguarded = _unguarded(model, self.layers)
        patterns = tuple(radius) if isinstance(radius, Mapping) else None
        missed = [
            f"{name} ({kind})"
            for name, kind in self.unguarded.items()
            if only is LINEAR_MAPS and name_matches(name, names) and name_matches(name, patterns)
        ]
        if missed:
            warnings.warn(
                f"SpectralGuard does not guard {len(missed)} parameter(s) of two or more dimensions: {', '.join(missed)}; "
                "name two-dimensional ones in parameters= to guard them as matrices",
                stacklevel=2,
            )
        self.steps = 0
        self._handles: list[Any] = []
        self._check(self.layers)
        if optimizer is not None:
            self.attach(optimizer)

    def __repr__(self) -> str:
        guarded = [
            f"  {', '.join(p.name for p in one.places)}: at most {format_up(one.upper)}, radius {one.radius:g}"
            for one in self.layers
        ]
        left = [f"  {name} ({kind})" for name, kind in self.unguarded.items()]
        lines = [f"SpectralGuard(how={self.how!r}, tolerance={self.tolerance:g})", *guarded]
        return "\n".join(lines + (["not guarded:", *left] if left else []))

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Check and bring back after every `step()` of these optimizers, until `detach()`."""
        for optimizer in optimizers:
            host = hooked_optimizer(optimizer)
            if not any(one.trained_by(host) for one in self.layers):
                raise InputError(
                    f"this {type(host).__name__} trains none of the guarded weights; attach the optimizer that does, and give "
                    "the guard the model itself, not a copy"
                )
            self._handles.append(host.register_step_post_hook(self._hook))

    def detach(self) -> None:
        """Let go of every optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step(self) -> None:
        """Check every layer and bring back those that are too large: what happens after each step of an attached optimizer."""
        self._check(self.layers)
        self.steps += 1

    def bounds(self, check: bool = False) -> dict[str, Bracket]:
        """Proved `lower ≤ σ₁ ≤ upper` of every guarded layer as it stands now, by name.

        Free where nothing was written to the weights since the last step; `check=True` compares all values with those that
        the proof is about, which also sees writes through `.data`. Nothing is brought back here.
        """
        stale = [one for one in self.layers if check or one.current_stamp() != one.stamp]
        if stale:
            with full_precision():
                for one in stale:
                    self._bracket(one)
        return {
            name: Bracket(one.lower, one.upper, method="carried", note=f"radius {one.radius:g}")
            for one in self.layers
            for name in (place.name for place in one.places)
        }

    def scalars(self) -> dict[str, float]:
        """Numbers to log: `lower`, `upper` and `headroom = 1 − upper/R` by layer, and the product of all upper ends."""
        self.bounds()
        scalars: dict[str, float] = {}
        product = 1.0
        for one in self.layers:
            for place in one.places:
                scalars[f"norm/{place.name}/lower"] = one.lower
                scalars[f"norm/{place.name}/upper"] = one.upper
                scalars[f"norm/{place.name}/headroom"] = 1 - one.upper / one.radius
                product = inflate(product * one.upper)
        return {
            **scalars,
            "norm/product": product,
            "norm/restored": float(sum(one.restored for one in self.layers)),
        }

    @property
    def used(self) -> Counter[str]:
        """How often each way of proving was taken, over all layers."""
        return sum((one.tracked.used for one in self.layers), Counter())

    def state_dict(self) -> dict[str, Any]:
        """What exact resuming needs: for every layer the last proof and the weight it is about (tensors only)."""
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for one in self.layers:
            state[f"{one.name}/restored"] = torch.tensor(one.restored)
            state |= {f"{one.name}/{key}": value for key, value in one.tracked.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, after the model's own state was loaded.

        The state holds no claims: every proof is made again, at the stored weight.
        """
        missing = [one.name for one in self.layers if f"{one.name}/restored" not in state]
        if "steps" not in state or missing:
            raise InputError(
                f"this state belongs to another guard: it does not speak of {', '.join(missing) or 'any step'}"
            )
        self.steps = int(state["steps"])
        for one in self.layers:
            prefix = f"{one.name}/"
            part = {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix)
            }
            one.restored = int(part.pop("restored"))
            one.tracked.load_state_dict({})
            with full_precision():
                self._bracket(
                    one, close=True
                )  # what is carried from the stored weight may be looser
            one.tracked.load_state_dict(
                {key: value.to(one.weight.device) for key, value in part.items()}
            )

    def _hook(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._check(
            [
                one
                for one in self.layers
                if one.trained_by(optimizer) or one.current_stamp() != one.stamp
            ]
        )
        self.steps += 1

    def _limit(self, one: Guarded) -> float:
        return deflate(one.radius * (1 + self.tolerance))

    def _dear(self, one: Guarded) -> bool:
        """Whether a weight that needs a new proof gets room for more steps: a matrix only where nothing else is asked for."""
        usual = self.headroom is None and self.how == "cap"
        return one.tracked.dear and (usual or one.places[0].is_convolution)

    def _room(self, one: Guarded) -> float:
        """How far below R, relatively, the weight may be put."""
        usual = 0.1 if self._dear(one) else 0.03
        return usual if self.headroom is None else self.headroom

    def _bracket(self, one: Guarded, close: bool = False) -> None:
        """Prove where the norm of this weight lies."""
        enough = 0.0 if self.how == "sphere" else self._limit(one)
        renew = self.steps % self.every == 0
        what = f"weight of {one.name!r}"
        # a weight that has to be brought back may be put that much lower
        rtol = max(self.tolerance / 2, 0 if close else self._room(one))
        one.lower, one.upper = one.tracked.bracket(one.weight, enough, rtol, what, renew)
        one.stamp = one.current_stamp()

    def _exceeds(self, one: Guarded) -> bool:
        """Whether the weight has to be brought back."""
        # half precision cannot hit a sphere any closer
        slack = max(self.tolerance, 4 * unit_roundoff(one.weight.dtype))
        low = self.how == "sphere" and one.lower < one.radius * (1 - slack)
        room = self._room(one)
        crowded = self._dear(one) and one.tracked.renewed and room > 0
        return low or one.upper > (one.radius * (1 - room / 2) if crowded else self._limit(one))

    @torch.no_grad()
    def _check(self, layers: list[Guarded]) -> None:
        """Bracket these layers, and bring back all that are too large."""
        with full_precision():
            for one in layers:
                self._bracket(one)
            for attempt in range(60):
                flags = _agreed(
                    [self._exceeds(one) for one in self.layers], self.layers[0].weight.device
                )
                pending = [one for one, exceeds in zip(self.layers, flags, strict=True) if exceeds]
                if not pending:
                    return
                for one in pending:
                    self._bring_back(one, attempt)
        worst = pending[0]
        raise Refused(
            f"could not bring the norm of {worst.name!r} to {worst.radius} in {worst.weight.dtype}: "
            f"its bound stays at {worst.upper}"
        )

    def _bring_back(self, one: Guarded, attempt: int) -> None:
        one.restored += attempt == 0
        # every process scales its shard by the same number
        if isinstance(one.tracked, TrackedShards):
            self._scale(one, attempt)
            return
        if _is_leader():
            if attempt == 0 and self.how in ("clip", "hammer"):
                radius = one.radius * (1 - self._room(one))
                one.weight.copy_(_clipped(one.weight, radius, only_first=self.how == "hammer"))
                self._bracket(one)
            if attempt > 0 or self._exceeds(one):
                self._scale(one, attempt)
        if _distributed():
            weight = one.weight.detach().contiguous()
            torch.distributed.broadcast(weight, 0)
            if not _is_leader():
                one.weight.copy_(weight)
                self._bracket(one)

    def _scale(self, one: Guarded, attempt: int) -> None:
        """`W ← cW` with `c = R/U`, or less where the norm is known to reach `R(1 − headroom)` still; the proof is carried."""
        if not one.upper > 0:
            raise Refused(
                f"the weight of {one.name!r} is zero: it cannot be scaled to norm {one.radius}"
            )
        W, u = one.weight.detach(), unit_roundoff(one.weight.dtype)
        # the lower end of a convolution may lie far below its norm, and room is counted from the upper end; a new one is close
        reached = one.upper if self._dear(one) and one.tracked.direct else one.lower
        room = self._room(one)
        least = one.radius * (1 - room) / reached if reached and room else math.inf
        aim = min(one.radius / one.upper, least) * max(0.0, 1 - (2.0**attempt - 1) * 2 * u)
        if attempt and self.how != "sphere":
            aim = min(aim, 1.0)
        one.lower, one.upper = one.tracked.scale(W, aim)
        one.stamp = one.current_stamp()
        if self._exceeds(one):  # the roundings may have been smaller than they could
            self._bracket(one)


def hooked_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose step hooks really run: the one given, or the one inside a wrapper that has none."""
    host = optimizer
    while host is not None:
        if getattr(getattr(type(host), "step", None), "hooked", False) and hasattr(
            host, "_optimizer_step_post_hooks"
        ):
            return host
        host = getattr(host, "optimizer", None)
    raise InputError(
        f"{type(optimizer).__name__} runs no step hooks; call guard.step() after each of its steps instead"
    )


def _places(model: nn.Module, only: Types, names: Names, parameters: Names) -> dict[str, Place]:
    """What is to be guarded, by name."""
    kinds = only if isinstance(only, tuple) else (only,)
    places = []
    for name, module in model.named_modules():
        if not name_matches(name, names):
            continue
        if isinstance(module, kinds):
            module_kind(module)  # refuses hooks and own forwards
            places.append(_place(name, module, geometry=geometry_of(module)))
        elif only is LINEAR_MAPS and isinstance(module, nn.MultiheadAttention):
            places += _projections(f"{name}." if name else "", module)
        elif only is LINEAR_MAPS and type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            places.append(_place(name, module))  # Hugging Face's, a matrix (in, out)
    covered = {id(place.parameter) for place in places}
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() == 2 and id(parameter) not in covered
        if parameters is not None and matrix and name_matches(name, parameters):
            owner, _, attribute = name.rpartition(".")
            places.append(_place(name, model.get_submodule(owner), attribute))
    if not places:
        select_layers(model, only, names)  # says why
    return {place.name: place for place in places}


def _place(name: str, module: nn.Module, attribute: str = "weight", **options: Any) -> Place:
    """A place, refused where its parameter is computed, or sharded and not one matrix."""
    parameter = plain_weight(name, module, attribute)
    if is_sharded(parameter) and (parameter.dim() != 2 or "rows" in options):
        raise Refused(
            f"{name!r} is sharded (DTensor) and not one matrix, whose norm could be proved on its shards"
        )
    return Place(name, module, attribute, parameter, **options)


def _projections(prefix: str, module: nn.MultiheadAttention) -> list[Place]:
    """The maps to queries, keys and values: three blocks of one parameter, or three parameters."""
    width, packed = module.embed_dim, "in_proj_weight"
    if module._parameters.get(packed) is None:
        return [_place(f"{prefix}{x}_proj_weight", module, f"{x}_proj_weight") for x in "qkv"]
    return [
        _place(f"{prefix}{packed}[{x}]", module, packed, rows=(i * width, (i + 1) * width))
        for i, x in enumerate("qkv")
    ]


def _radii(names: list[str], radius: Radius) -> dict[str, float]:
    """The radius of every weight that has one."""
    if not isinstance(radius, Mapping):
        radius = {"*": radius}
    radii: dict[str, float] = {}
    for pattern, value in radius.items():
        require_number(value, f"the radius of {pattern!r}", least=POSITIVE)
        matching = [name for name in names if name_matches(name, pattern)]
        if not matching:
            raise InputError(
                f"no layer has a name that matches {pattern!r}; there are {', '.join(names[:8])}"
            )
        for name in matching:
            radii.setdefault(name, float(value))
    return radii


def _weights(
    model: nn.Module,
    places: list[Place],
    radii: dict[str, float],
    sizes: dict[str, tuple[int, ...] | None],
) -> list[Guarded]:
    """One entry per weight: places of one parameter, or of the same rows of it, are one entry."""
    groups: dict[object, list[Place]] = {}
    for place in places:
        groups.setdefault((id(place.parameter), place.rows), []).append(place)
    guarded: list[Guarded] = []
    for users in groups.values():
        first = users[0]
        if len(users) > 1 and any(place.is_convolution for place in users):
            names = " and ".join(repr(place.name) for place in users)
            raise Refused(
                f"{names} share one kernel: their norms may differ; leave all but one out"
            )
        start, end = _memory(first.parameter)
        for name, other in model.named_parameters():
            low, high = _memory(other)
            if other is not first.parameter and start < high and low < end:
                raise Refused(
                    f"the weights of {first.name!r} and {name!r} overlap in memory, so that one cannot be scaled without "
                    "changing the other; give them memory of their own, or tie them by one parameter in both modules"
                )
        tracked: TrackedNorm
        if first.is_convolution:
            tracked = TrackedConvolution(first.module, sizes[first.name])
        elif is_sharded(first.parameter):
            tracked = TrackedShards(first.parameter, owner=len(guarded))
        else:
            tracked = TrackedMatrix()
        guarded.append(Guarded(users, min(radii[place.name] for place in users), tracked))
    return guarded


def _memory(parameter: Tensor) -> tuple[int, int]:
    """The addresses between which its numbers lie."""
    part = local_part(parameter)
    span = sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True)) + 1
    return part.data_ptr(), part.data_ptr() + span * part.element_size() * bool(part.numel())


def _unguarded(model: nn.Module, guarded: list[Guarded]) -> dict[str, str]:
    """Names of the parameters with two or more dimensions that are not guarded, with the kind of their module."""
    covered = {id(place.parameter) for one in guarded for place in one.places}
    return {
        name: type(model.get_submodule(name.rpartition(".")[0])).__name__
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and id(parameter) not in covered
    }


def _clipped(W: Tensor, radius: float, only_first: bool) -> Tensor:
    """`W − Σ (σ_i − R) u_i v_iᵀ` over the leading singular values above R, or the first alone; estimates, proved afterwards."""
    scale = float(W.abs().amax()) or 1.0  # products of large or small weights would leave the range
    A = W.double() / scale
    with torch.random.fork_rng([A.device] if A.is_cuda else []):
        torch.manual_seed(0)
        U, s, V = torch.svd_lowrank(A, min(8, *A.shape), niter=8)
    excess = (s - radius / scale).clamp_min(0)
    if only_first:
        excess[1:] = 0
    return (A - (U * excess) @ V.mT) * scale


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_leader() -> bool:
    """Whether this process is the one that changes weights."""
    return not _distributed() or torch.distributed.get_rank() == 0


def _agreed(flags: list[bool], device: torch.device) -> list[bool]:
    """True where any rank says so."""
    if not _distributed():
        return flags
    votes = torch.tensor(flags, dtype=torch.int32, device=device)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
    return [bool(vote) for vote in votes.tolist()]
