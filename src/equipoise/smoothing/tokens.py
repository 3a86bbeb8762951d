"""How many tokens of a sequence may be exchanged: by the margin of a Lipschitz network, and by randomized ablation.

**Lipschitz.** A network reads rows `e_{x_i}` of a table, and its logits are L-Lipschitz in all rows together. Exchanging
token i moves the rows by at most `d_i = max_v ‖e_v − e_{x_i}‖`, k tokens by at most the root of the k largest d_i² in sum.
With rows of norm at most ρ this is at most `2ρ√k`.

**Ablation.** A classifier votes on sequences of which `kept` tokens, chosen at random without replacement, are left. If r
of n tokens are exchanged, a vote is the same unless one of them is left: no share of votes changes by more than
`Δ_r = 1 − C(n−r, k)/C(n, k)`. The decision is the same while `p_lower − p_upper > 2Δ_r`.

Reference: Levine & Feizi 2020, Robustness certificates for sparse adversarial attacks by randomized ablation (theorem 1).
"""

import math
from bisect import bisect_left
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.checks import (
    CLASS_NUMBERS,
    describe,
    require_counts,
    require_labels,
    require_number,
    require_tensor,
    require_type,
)
from equipoise.core.errors import InputError
from equipoise.core.precision import gamma, inflate, row_lengths
from equipoise.smoothing.certificates import Certificates
from equipoise.smoothing.margins import margin_radius


def certified_substitutions(
    logits: Tensor, labels: Tensor, tokens: Tensor, table: Tensor, lipschitz: Any, error: Any = 0.0
) -> Tensor:
    """The largest k such that no k substitutions of tokens change the decision, (N,); 0 where the label does not win.

    Guarantee: for the real-number map from rows to logits, whatever tokens of the table replace whichever k of them, if
    `lipschitz` is an upper bound and every logit is within its error of its real value.

    Args:
        logits: (N, classes).
        labels: (N,), the predictions.
        tokens: (N, T), row numbers.
        table: (vocabulary, width), the rows as the network reads them.
        lipschitz: upper bound of the constant of the logits in all rows together, or what else `margin_radius` accepts.
        error: upper bound of the error of the logits.

    >>> z, y, tokens = torch.tensor([[9.0, 0.0]]), torch.tensor([0]), torch.tensor([[0, 1, 1]])
    >>> certified_substitutions(z, y, tokens, torch.tensor([[3.0], [-1.0]]), 1.0).tolist()
    [2]
    """
    rows = require_tensor(table, "table", dims=2).detach().double().cpu()
    require_type(tokens, Tensor, "tokens")
    if tokens.dim() != 2 or tokens.dtype not in CLASS_NUMBERS or len(tokens) != len(labels):
        raise InputError(f"tokens must be (N, T) row numbers of the table, got {describe(tokens)}")
    require_labels(tokens.flatten(), tokens.numel(), len(rows))
    used, places = tokens.cpu().unique(return_inverse=True)
    moves = torch.stack([row_lengths(rows - rows[token]).amax() for token in used])
    squares = inflate(moves).square()[places].sort(-1, descending=True).values.cumsum(-1)
    reached = inflate(squares.sqrt() * (1 + gamma(squares.shape[-1] + 8, torch.float64)))
    radius = margin_radius(logits, labels, lipschitz, error=error)
    return (reached < radius[:, None]).sum(-1)


def ablation_substitutions(certificates: Certificates, tokens: int, kept: int) -> NDArray[np.int64]:
    """The largest r such that no r substitutions change the class of most votes, `certificates.selected`; −1: none is shown.

    Guarantee: each is wrong with probability at most the certificates' alpha.

    Args:
        certificates: of votes on ablated sequences, by `certify_counts` with any sigma. Procedures that bound the margin itself
            ("rivals", "direct") show nothing where they did: use "randomized", the same without it, "cpm" or "cohen".
        tokens: of the sequence, n.
        kept: tokens left in each vote, k.

    Draw the tokens that are left without replacement, and hide the others behind one symbol, here 0:

    >>> from equipoise.smoothing import certify_counts
    >>> def votes(classify, sequence, kept, n, seed):
    ...     draws = torch.randint(2**62, (n, len(sequence)), generator=torch.Generator().manual_seed(seed))
    ...     left = draws.argsort(1)[:, :kept]
    ...     ablated = torch.zeros(n, len(sequence), dtype=torch.long).scatter(1, left, sequence[left])
    ...     return torch.bincount(classify(ablated), minlength=2).numpy()
    >>> positive = lambda sequences: (sequences.sum(1) > 0).long()
    >>> sequence = torch.ones(100, dtype=torch.long)
    >>> counts = (votes(positive, sequence, 5, n, seed) for seed, n in enumerate((100, 10_000)))
    >>> certificates = certify_counts(*counts, sigma=1.0, procedure="cohen")
    >>> int(certificates.selected), ablation_substitutions(certificates, tokens=100, kept=5).tolist()
    (1, 12)
    """
    require_type(certificates, Certificates, "certificates")
    require_counts(tokens=tokens)
    require_number(kept, "kept", least=1, most=tokens, whole=True)
    same = [
        Fraction(math.comb(tokens - r, kept), math.comb(tokens, kept)) for r in range(tokens + 1)
    ]
    changes = [2 * (1 - share) for share in same]
    gaps = np.where(certificates.direct, 0.0, certificates.p_lower - certificates.p_upper)
    # the difference of two shares is rounded by at most half a unit in the last place
    shown = [bisect_left(changes, Fraction(gap) - Fraction(1, 2**52)) - 1 for gap in gaps.flat]
    return np.array(shown, dtype=np.int64).reshape(gaps.shape)
