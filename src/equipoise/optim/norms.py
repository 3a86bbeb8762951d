"""Proved norms of what an optimizer does: of every update and of the weight it makes, per matrix and per head."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import Bracket, require_number, unit_roundoff
from equipoise.norms.gram import wide
from equipoise.norms.spectral import spectral_norm
from equipoise.optim.guard import hooked_optimizer
from equipoise.regularizers.selection import name_matches


@dataclass(frozen=True)
class UpdateNorms:
    """Brackets of one matrix: numbers, or tensors with one entry per head."""

    weight: Bracket
    update: Bracket


class NormLog:
    """Proved norms of updates and weights at every `every`-th step of an optimizer, one matrix at a time.

    Muon's update has singular values near the learning rate only if its orthogonalisation saw the whole matrix; Adam's may have
    one that is far larger than the others. The log shows which.

    Guarantee: `lower ≤ σ₁ ≤ upper`, rounding included, for the weight after the step and for its difference from the one before.

    Args:
        optimizer: any optimizer with torch's step hooks, or a wrapper of one.
        model: gives the parameters their names; without it they are called `0.3`: the fourth of the first group.
        heads: number of blocks of rows by pattern over names, `{"*.q_proj.weight": 8}`: one norm per block.
        every: steps between two measurements. Only these keep a copy of the weights during the step.
        rtol: relative gap of the brackets.

    >>> net = nn.Linear(8, 4)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> log = NormLog(optimizer, net, heads={"weight": 2})
    >>> net(torch.ones(1, 8)).sum().backward()
    >>> optimizer.step()
    >>> log()["weight"].update.upper.shape
    torch.Size([2])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None = None,
        *,
        heads: Mapping[str, int] | None = None,
        every: int = 1,
        rtol: float = 1e-2,
    ) -> None:
        self.every = int(require_number(every, "every", least=1, whole=True))
        self.rtol = require_number(rtol, "rtol", least=1e-9, most=1)
        self.heads = dict(heads or {})
        self.steps = 0
        host = hooked_optimizer(optimizer)
        names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        self._matrices: dict[str, Tensor] = {
            names.get(id(p), f"{i}.{j}"): p
            for i, group in enumerate(host.param_groups)
            for j, p in enumerate(group["params"])
            if p.dim() == 2
        }
        self._before: dict[str, Tensor] = {}
        self._last: dict[str, UpdateNorms] = {}
        self._handles = [
            host.register_step_pre_hook(self._keep),
            host.register_step_post_hook(self._measure),
        ]

    def __call__(self) -> dict[str, UpdateNorms]:
        """The last measurement, by name of the parameter."""
        return dict(self._last)

    def scalars(self) -> dict[str, float]:
        """Numbers to log: `update/NAME/upper`, `weight/NAME/upper` and the lower ends; `NAME[h]` for heads."""
        scalars = {}
        for name, pair in self._last.items():
            for kind, bracket in (("update", pair.update), ("weight", pair.weight)):
                for end, values in (("lower", bracket.lower), ("upper", bracket.upper)):
                    if isinstance(values, Tensor):
                        for h, value in enumerate(values.tolist()):
                            scalars[f"{kind}/{name}[{h}]/{end}"] = value
                    else:
                        scalars[f"{kind}/{name}/{end}"] = float(values)
        return scalars

    def detach(self) -> None:
        """Stop measuring."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keep(self, *_: Any) -> None:
        if self.steps % self.every == 0:
            self._before = {
                name: p.detach().clone() for name, p in self._matrices.items() if p.grad is not None
            }

    @torch.no_grad()
    def _measure(self, *_: Any) -> None:
        self.steps += 1
        for name in list(self._before):
            before = self._before.pop(name)  # freed before the next matrix is looked at
            after = self._matrices[name].detach()
            counts = [n for pattern, n in self.heads.items() if name_matches(name, pattern)]
            blocks = counts[0] if counts else None
            change = wide(after) - wide(before)
            self._last[name] = UpdateNorms(
                self._bracket(after, blocks), _widened(self._bracket(change, blocks), change)
            )

    def _bracket(self, W: Tensor, blocks: int | None) -> Bracket:
        W = W if blocks is None else W.unflatten(0, (blocks, -1))
        return spectral_norm(W, rtol=self.rtol)


def _widened(bracket: Bracket, change: Tensor) -> Bracket:
    """Every entry of the difference was rounded once, in float64, and `‖·‖_F ≤ √n·σ₁` for n entries."""
    share = 4 * unit_roundoff(torch.float64) * change.numel()
    return replace(bracket, lower=bracket.lower * (1 - share), upper=bracket.upper * (1 + share))


#: `eq.optim.norms(optimizer)`
norms = NormLog
