"""The published methods that call themselves upper or lower bounds, against the norm of the materialised convolution."""

import math

import torch

from equipoise.core.bounds import Kind
from equipoise.maps.linear import convolution
from equipoise.norms.convolution import materialise
from equipoise.norms.reference import norm2_toep
from equipoise.testing.runner import Batch
from equipoise_lab.peers import PEERS


def other_bounds(batch: Batch) -> None:
    """`norm2_toep` and the comparison methods that call themselves upper or lower bounds, on one small kernel."""
    shape = (batch.integer(1, 3), batch.integer(1, 3), batch.integer(1, 3), batch.integer(1, 3))
    K = torch.randn(
        shape, generator=batch.generator, dtype=batch.choose(torch.float32, torch.float64)
    )
    n, padding = batch.integer(3, 7), batch.choose("zeros", "circular")
    conv = convolution(K.double(), padding, input_size=n)
    truth = torch.linalg.matrix_norm(materialise(conv), ord=2)
    estimates = [
        norm2_toep(K.to(batch.device), batch.integer(0, 3), readout) for readout in ("inf", "fro")
    ]
    estimates += [peer.run(K.to(batch.device), n, padding) for peer in PEERS.values()]
    for bound in estimates:
        what = f"{batch.label}: {bound.method}, kernel {shape}, {padding}, n = {n}"
        if bound.kind is Kind.UPPER:
            batch.tally.record(None, bound.value, truth, what)
        elif bound.kind is Kind.LOWER:
            batch.tally.record(bound.value, math.inf, truth, what)
