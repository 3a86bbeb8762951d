"""`SpectralGuard`: the spectral norms of chosen layers held at a radius while any optimizer trains them, proved at every step."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.bounds import Bracket
from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import deflate, frobenius, inflate, unit_roundoff, working_dtype
from equipoise.maps.reading import module_kind
from equipoise.norms.carried import Asked, CarriedMatrix, bracket_all
from equipoise.optim.guarded import Guarded, Radius, guarded, radii_of, sizes_of
from equipoise.optim.restoring import RESTORES, How, agreed, check_how, leads, shared, write
from equipoise.regularizers.selection import (
    LINEAR_MAPS,
    Names,
    Types,
    select_layers,
)


class SpectralGuard:
    """Holds `σ₁(W) ≤ R·(1 + tolerance)` for chosen layers after every optimizer step, with a proof each time.

        U_t = min( κU_s + ‖W_t − κW_s‖_F ,  the Schur bound on the followed top space ,  a new proof )

    A proof made at step s is carried by Weyl's inequality; a new one is made only where the carried bound would exceed the
    radius. If the excess is real, the weight is brought back, and the bound of what is then stored is proved:

    | how | what is done to a weight with σ₁ > R |
    |---|---|
    | `cap` | `W ← cW`, so that `R(1 − headroom) ≤ σ₁ ≤ R` |
    | `sphere` | `W ← W·R/U` at every step, U the proved bound, also from below: `σ₁ = R` up to the tolerance |
    | `clip` | `W ← W − Σ (σ_i − r) u_i v_iᵀ` over the singular values above `r = R(1 − headroom)` (matrices only) |
    | `hammer` | `W ← W + (r − σ₁) u₁v₁ᵀ`, only the largest one (matrices only) |

    Guarantee: after every `step()` of an attached optimizer, `bounds()` brackets the norm of the numbers stored in each weight,
    in floating point, for the padding, stride, groups and dilation of the layer, and every upper end is at most
    `R·(1 + tolerance)`. Weights written to by others are noticed by their version and bracketed anew; writes through `.data` or
    NumPy leave no trace there: `bounds(check=True)` compares the values. A layer with NaN or infinities is refused by name.

    Under `torch.distributed` every rank proves its own weights and takes the weights that rank 0 brought back, so all ranks stay
    equal bit for bit.

    Args:
        model: the module that is trained (unwrapped, for distributed training).
        radius: R, for all layers or by glob pattern over their names: `{"blocks.*": 1.0, "head": 4.0}`, the first that matches;
            layers that match none are left alone.
        how: see above.
        only: module types.
        names: glob or compiled pattern over module names, or several.
        tolerance: relative excess that is let pass without touching the weight.
        headroom: how far below R, relatively, a weight that has to be brought back may be put. The room that it has then lets
            most steps pass on one proof in float32, which gives away up to half a per cent for 256 columns. 0 holds as close
            to R as the tolerance asks, with proofs in float64. Not for `sphere`, which has none.
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
        every: int = 1,
        headroom: float = 0.01,
        example_input: Tensor | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if not 1e-6 <= tolerance <= 1:
            raise InputError(f"tolerance must lie between 1e-6 and 1, got {tolerance}")
        if every < 1 or (every > 1 and how == "sphere"):
            raise InputError(f"every must be at least 1, and 1 for how='sphere'; got {every}")
        if not 0 <= headroom < 1:
            raise InputError(f"headroom is a share of the radius, at least 0 and below 1; got {headroom}")
        self.how, self.tolerance, self.every = how, tolerance, every
        self.headroom = 0.0 if how == "sphere" else headroom
        radii = radii_of(select_layers(model, only, names), radius)
        layers = {name: module for name, module in select_layers(model, only, names).items() if name in radii}
        spatial = {name: module for name, module in layers.items() if module_kind(module) is not nn.Linear}
        check_how(how, list(spatial))
        sizes = sizes_of(model, spatial, input_size, example_input)
        self.layers = guarded(layers, radii, sizes)
        self.steps = 0
        self._handles: list[Any] = []
        self._check(self.layers)
        if optimizer is not None:
            self.attach(optimizer)

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Check and bring back after every `step()` of these optimizers, until `detach()`."""
        for optimizer in optimizers:
            host = hooked(optimizer)
            mine = {id(p) for group in host.param_groups for p in group["params"]}
            if not any(id(one.weight) in mine for one in self.layers):
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
        for one in self.layers:
            if check or one.mark() != one.seen:
                self._bracket(one)
        return {
            name: Bracket(one.lower, one.upper, method="carried", note=f"radius {one.radius:g}")
            for one in self.layers
            for name in one.names
        }

    def scalars(self) -> dict[str, float]:
        """Numbers to log: `lower`, `upper` and `headroom = 1 − upper/R` by layer, and the product of all upper ends."""
        found: dict[str, float] = {}
        product = 1.0
        for name, bracket in self.bounds().items():
            radius = next(one.radius for one in self.layers if name in one.names)
            found[f"norm/{name}/lower"] = float(bracket.lower)
            found[f"norm/{name}/upper"] = float(bracket.upper)
            found[f"norm/{name}/headroom"] = 1 - float(bracket.upper) / radius
            product = inflate(product * float(bracket.upper))
        return {**found, "norm/product": product, "norm/restored": float(sum(one.restored for one in self.layers))}

    @property
    def used(self) -> Counter[str]:
        """How often each way of proving was taken, over all layers."""
        return sum((one.carried.used for one in self.layers), Counter())

    def state_dict(self) -> dict[str, Any]:
        """What exact resuming needs: for every layer the last proof and the weight it is about (tensors only)."""
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for one in self.layers:
            state[f"{one.name}/restored"] = torch.tensor(one.restored)
            state |= {f"{one.name}/{key}": value for key, value in one.carried.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, after the model's own state was loaded.

        Nothing in the state is believed: what it claims is proved again, and proofs that do not hold are made anew.
        """
        missing = [one.name for one in self.layers if f"{one.name}/restored" not in state]
        if "steps" not in state or missing:
            raise InputError(
                f"this state belongs to another guard: it does not speak of {', '.join(missing) or 'any step'}"
            )
        self.steps = int(state["steps"])
        for one in self.layers:
            prefix = f"{one.name}/"
            part = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            one.restored = int(part.pop("restored"))
            one.carried.load_state_dict({key: value.to(one.weight.device) for key, value in part.items()})
            kept = copy.deepcopy(
                one.carried
            )  # looking must not move the proof: later decisions stay what they would have been
            self._bracket(one)
            one.carried = kept

    def _hook(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._check([one for one in self.layers if id(one.weight) in mine or one.mark() != one.seen])
        self.steps += 1

    def _limit(self, one: Guarded) -> float:
        return deflate(one.radius * (1 + self.tolerance))

    def _bracket(self, *layers: Guarded) -> None:
        """Prove where the norms of these weights lie; matrices together."""
        renew = self.steps % self.every == 0
        questions = []
        for one in layers:
            enough = 0.0 if self.how == "sphere" else self._limit(one)
            asked = (one.weight, enough, self.tolerance / 2, f"weight of {one.name!r}", renew, self.headroom)
            if isinstance(one.carried, CarriedMatrix):
                questions.append((one, Asked(one.carried, *asked)))
            else:
                one.lower, one.upper = one.carried.bracket(*asked)
        for (one, _), found in zip(questions, bracket_all([asked for _, asked in questions]), strict=True):
            one.lower, one.upper = found
        for one in layers:
            one.seen = one.mark()

    def _far(self, one: Guarded) -> bool:
        """Whether the weight has to be brought back."""
        slack = max(
            self.tolerance, 4 * unit_roundoff(one.weight.dtype)
        )  # half precision cannot hit a sphere any closer
        low = self.how == "sphere" and one.lower < one.radius * (1 - slack)
        return low or one.upper > self._limit(one)

    @torch.no_grad()
    def _check(self, layers: list[Guarded]) -> None:
        self._bracket(*layers)
        for attempt in range(60):
            flags = agreed([self._far(one) for one in self.layers], self.layers[0].weight.device)
            pending = [one for one, far in zip(self.layers, flags, strict=True) if far]
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
        if leads():
            if attempt == 0 and self.how in RESTORES:
                assert isinstance(one.carried, CarriedMatrix)
                write(one.weight, RESTORES[self.how](one.weight, one.carried, one.radius * (1 - self.headroom)))
                self._bracket(one)
            if attempt > 0 or self._far(one):
                self._scale(one, attempt)
        if shared(one.weight) and not leads():
            self._bracket(one)
        one.seen = one.mark()

    def _scale(self, one: Guarded, attempt: int) -> None:
        """`W ← cW` with `c = R/U`, or less where a lower end shows that `cσ₁ ≥ R(1 − headroom)` still.

        `σ₁(fl(cW)) ≤ cU + u·c‖W‖_F`, and only where that is too much is it proved again.
        """
        if not one.upper > 0:
            raise Refused(f"the weight of {one.name!r} is zero: it cannot be scaled to norm {one.radius}")
        W, u = one.weight, unit_roundoff(one.weight.dtype)
        least = one.radius * (1 - self.headroom) / one.lower if one.lower > 0 and self.headroom else math.inf
        aim = min(one.radius / one.upper, least) * (1 - (2.0**attempt - 1) * 2 * u)
        c = float(torch.tensor(min(aim, 1.0) if self.how != "sphere" and attempt else aim, dtype=torch.float32))
        lost = (
            2 * u * c * float(frobenius(W.detach().to(working_dtype(W.dtype)).reshape(len(W), -1)))
            + math.sqrt(W.numel()) * torch.finfo(W.dtype).tiny
        )
        W.mul_(c)
        one.carried.scaled(c)
        one.lower, one.upper = max(0.0, deflate(c * one.lower) - inflate(lost)), inflate(inflate(c * one.upper) + lost)
        if self._far(one):
            self._bracket(one)


def hooked(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose step hooks really run: the one given, or the one inside a wrapper that has none."""
    host = optimizer
    while True:
        if getattr(getattr(type(host), "step", None), "hooked", False) and hasattr(host, "_optimizer_step_post_hooks"):
            return host
        host = getattr(host, "optimizer", None)
        if host is None:
            raise InputError(
                f"{type(optimizer).__name__} runs no step hooks; call guard.step() after each of its steps instead"
            )
