"""Which blocks of a network its bound is due to, and what it would be if they stretched nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from equipoise.core.precision import up
from equipoise.lipschitz.logs import log_product, log_root, log_up
from equipoise.lipschitz.operations import Scaled, Weighted
from equipoise.lipschitz.places import module_path
from equipoise.lipschitz.propagate import Propagation, combined
from equipoise.lipschitz.report import Block, Row


def block_of(name: str) -> str:
    """The block that a layer belongs to: the module that holds it, or itself where it stands alone.

    >>> block_of("layer1.0.conv1"), block_of("fc")
    ('layer1.0', 'fc')
    """
    return name.rpartition(".")[0] or name


def blocks(run: Propagation, layers: Sequence[Row]) -> tuple[Block, ...]:
    """The blocks by their share of the log-bound, largest first, with the product bound if it and those before it are capped.

    Capped: every layer of the block with weights or factors, and a norm above 1, is scaled to norm 1. Sums, pooling and
    activations stay what they are: `x + f(x)` with f capped is at most 2.
    """
    shares: dict[str, float] = {}
    for row in layers:
        shares[block_of(row.name)] = shares.get(block_of(row.name), 0.0) + row.share
    worst = sorted((name for name, share in shares.items() if share > 0), key=lambda name: -shares[name])
    found, capped = [], set[str]()
    for name in worst[:5]:
        capped.add(name)
        found.append(Block(name, shares[name], _capped(run, lambda node: block_of(_named(node)) in capped)))
    return tuple(found)


def _named(node: fx.Node) -> str:
    return module_path(node) or node.name


def _capped(run: Propagation, chosen: Callable[[fx.Node], bool]) -> float:
    """The logarithm of the product bound with the operations of these nodes scaled to a constant of at most 1."""
    logs = dict.fromkeys(run.program.inputs, 0.0)
    for node in run.program.nodes:
        step = run.steps[node]
        top = max((gain for _, gain in step.gains), default=0.0)
        if chosen(node) and isinstance(step.map, Weighted | Scaled) and 1 < top < math.inf:
            step = replace(step, gains=tuple((s, min(1.0, up(gain / top))) for s, gain in step.gains))
        logs[node] = combined(step, logs)
        for region in run.regions.get(node, ()):
            if region.whole:
                bound = min(1.0, region.bound) if chosen(node) else region.bound
                logs[node] = min(logs[node], log_product(log_up(bound), logs[region.source]))
    return log_root(logs[o] for o in run.program.outputs)
