"""What runs on another device asks nothing of it in a loop: the device `meta` has no numbers, so any question there fails."""

import pytest
import torch

from equipoise.core.precision import frobenius
from equipoise.norms.differentiable import conv_norm, gram_norm
from equipoise.norms.gram import gram_error, gram_iterate, rayleigh_lower
from equipoise.norms.symbol import Symbol, autocorrelation


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


F64 = torch.float64
BATCH, NUMBERS = empty(20, 30, 30), empty(20, dtype=F64)


def symbol():
    return Symbol.of(empty(1, 6, 5, 3, 3, dtype=F64), 1000)


FREQUENCIES = (torch.zeros(7, dtype=torch.long, device="meta"), empty(7, 2, dtype=F64))
#: what is computed for many matrices, chunks or frequencies at once
WORK = {
    "frobenius": lambda: frobenius(BATCH),
    "gram_iterate": lambda: gram_iterate(BATCH, 4),
    "gram_error": lambda: gram_error(BATCH),
    "rayleigh_lower": lambda: rayleigh_lower(BATCH, empty(20, 30)),
    "autocorrelation": lambda: autocorrelation(empty(1, 6, 5, 3, 3, dtype=F64)),
    "gram": lambda: symbol().gram(*FREQUENCIES, torch.float32),
    "gram_sizes": lambda: symbol().gram_sizes(*FREQUENCIES, torch.float32),
    "symbol.gram_error": lambda: symbol().gram_error(torch.float32),
    "at": lambda: symbol().at(*FREQUENCIES),
    "conv_norm": lambda: conv_norm(empty(6, 5, 3, 3), input_size=8),
    "gram_norm": lambda: gram_norm(empty(4, 6, 5)),
}


@pytest.mark.parametrize("name", WORK)
def test_nothing_waits_for_the_device(name):
    WORK[name]()


def test_a_question_would_be_noticed():
    with pytest.raises(RuntimeError, match="meta"):
        bool(NUMBERS.any())
