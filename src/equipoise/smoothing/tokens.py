"""How many tokens or pixels may be exchanged: by the margin of a Lipschitz network, and by randomized ablation.

**Lipschitz.** A network reads rows `e_{x_i}` of a table, and its logits are L-Lipschitz in all rows together. Exchanging
token i moves the rows by at most `d_i = max_v ‖e_v − e_{x_i}‖`, k tokens by at most the root of the k largest d_i² in sum.
With rows of norm at most ρ this is at most `2ρ√k`.

**Ablation.** A classifier votes on inputs of which `kept` entries (tokens, or pixels), chosen at random without replacement, are
left. If r of n entries are exchanged, a vote is the same unless one of them is left: no share of votes changes by more than
`Δ_r = 1 − C(n−r, k)/C(n, k)`. The decision is the same while `p_lower − p_upper > 2Δ_r`. It does not matter what stands for a
hidden entry, whether others may have that value too: a vote is a function of the entries that are left and of their places.

Reference: Levine & Feizi 2020, Robustness certificates for sparse adversarial attacks by randomized ablation (theorem 1).
"""

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core import (
    CLASS_NUMBERS,
    InputError,
    Ints,
    describe,
    gamma,
    inflate,
    require_counts,
    require_labels,
    require_number,
    require_tensor,
    require_type,
    row_lengths,
)
from equipoise.smoothing.certificates import ABSTAIN, Certificates
from equipoise.smoothing.classifier import SmoothedClassifier
from equipoise.smoothing.derive import certify_counts
from equipoise.smoothing.margins import margin_radius
from equipoise.smoothing.noise import Stream, philox


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
    radius = margin_radius(logits, labels, lipschitz, error=error)
    return substitutions_within(radius, tokens, table)


def substitutions_within(radius: Tensor, tokens: Tensor, table: Tensor) -> Tensor:
    """The largest k such that exchanging any k tokens moves the rows of the table by less than the radius, (N,).

    Args:
        radius: (N,), of the open ball around the rows of each sequence.
        tokens: (N, T), row numbers.
        table: (vocabulary, width).

    >>> substitutions_within(torch.tensor([4.5]), torch.tensor([[0, 1]]), torch.tensor([[3.0], [-1.0]])).tolist()
    [1]
    """
    rows = require_tensor(table, "table", dims=2).detach().double().cpu()
    require_type(tokens, Tensor, "tokens")
    fits = tokens.dim() == 2 and tokens.dtype in CLASS_NUMBERS and tokens.numel() > 0
    if not fits or len(tokens) != len(radius):
        raise InputError(f"tokens must be (N, T) row numbers of the table, got {describe(tokens)}")
    require_labels(tokens.flatten(), tokens.numel(), len(rows))
    # a uint8 tensor would be taken for a mask
    used, places = tokens.long().cpu().unique(return_inverse=True)
    moves = torch.stack([row_lengths(rows - rows[token]).amax() for token in used])
    squares = inflate(moves).square()[places].sort(-1, descending=True).values.cumsum(-1)
    reached = inflate(squares.sqrt() * (1 + gamma(squares.shape[-1] + 8, torch.float64)))
    return (reached < radius.cpu()[:, None]).sum(-1)


def ablation_substitutions(certificates: Certificates, tokens: int, kept: int) -> Ints:
    """The largest r such that no r substitutions change the class of most votes, `certificates.selected`; −1: none is shown.

    Guarantee: each is wrong with probability at most the certificates' alpha.

    Args:
        certificates: of votes on ablated sequences, by `certify_counts` with any sigma. Procedures that bound the margin itself
            ("rivals", "direct") show nothing where they did: use "cpm" or "cohen".
        tokens: of the sequence, n.
        kept: tokens left in each vote, k.

    >>> from equipoise.smoothing import certify_counts
    >>> votes = certify_counts([0, 100], [0, 10_000], sigma=1.0, procedure="cohen")
    >>> int(votes.selected), ablation_substitutions(votes, tokens=100, kept=5).tolist()
    (1, 12)
    """
    require_type(certificates, Certificates, "certificates")
    require_counts(tokens=tokens)
    require_number(kept, "kept", least=1, most=tokens, whole=True)
    same = [Fraction(comb(tokens - r, kept), comb(tokens, kept)) for r in range(tokens + 1)]
    changes = [2 * (1 - share) for share in same]
    gaps = np.where(certificates.direct, 0.0, certificates.p_lower - certificates.p_upper)
    # the difference of two shares is rounded by at most half a unit in the last place
    shown = [bisect_left(changes, Fraction(gap) - Fraction(1, 2**52)) - 1 for gap in gaps.flat]
    return np.array(shown, dtype=np.int64).reshape(gaps.shape)


@dataclass(frozen=True)
class AblationCertificates:
    """Certificates of N inputs by randomized ablation.

    With probability ≥ 1 − alpha for each input: where `substitutions ≥ 0`, the ablated classifier answers `prediction` at every
    input that differs in at most so many entries. −1 is an abstention in both.
    """

    prediction: Ints
    substitutions: Ints
    votes: Certificates


class _Ablated(SmoothedClassifier):
    """Votes on inputs with all but `kept` entries hidden, in the place of noise: for `AblatedClassifier` alone."""

    kept: int
    hidden: float

    def _law(self, x: Tensor) -> Any:
        return self

    def fill(self, buffer: Tensor, x: Tensor, key: int) -> Tensor:
        """Copies of one input, each with other entries hidden."""
        places = np.tile(np.arange(_entries(x)), (len(buffer), 1))
        # permutations by bounded integers: there are no ties that would favour some of them
        order = np.random.Generator(philox(key)).permuted(places, axis=1)[:, self.kept :]
        mask = torch.zeros(places.shape, dtype=torch.bool).scatter(1, torch.from_numpy(order), True)
        shape = (1, *x.shape[1:]) if x.dim() == 3 else x.shape
        return x.masked_fill(mask.reshape(-1, *shape).to(x.device), self.hidden)


def _entries(x: Tensor) -> int:
    return x[0].numel() if x.dim() == 3 else x.numel()


class AblatedClassifier:
    """The class that most votes have, each on the input with all but `kept` of its entries hidden: randomized ablation.

    The entries are the tokens of sequences (N, T), the features of vectors (N, F), or the pixels of images (N, C, H, W), all
    channels of one together. Which are left is drawn exactly uniformly, and depends on (seed, input id, stream, chunk) only.

    Args:
        model: maps a batch to logits (batch, num_classes), every row by itself; in evaluation mode.
        kept: entries left in each vote. The fewer, the more substitutions can be certified and the less the model sees.
        num_classes: number of logits.
        hidden: what stands for a hidden entry: a mask token, or the value of a grey pixel.
        **sampling: `seed` of the draws (default: from the operating system) and `chunk_size`, as for `SmoothedClassifier`.

    Guarantee: each certificate is wrong with probability at most alpha over the draws, for any change of the values of at most
    `substitutions` entries.

    >>> class Positive(torch.nn.Module):
    ...     def forward(self, tokens):
    ...         positive = tokens.sum(1) > 0
    ...         return torch.stack([~positive, positive], 1).double()
    >>> classifier = AblatedClassifier(Positive().eval(), kept=5, num_classes=2, seed=0)
    >>> certificates = classifier.certify(torch.ones(1, 100, dtype=torch.long))
    >>> certificates.prediction.tolist(), certificates.substitutions.tolist()
    ([1], [12])
    """

    def __init__(
        self, model: nn.Module, kept: int, num_classes: int, *, hidden: float = 0, **sampling: Any
    ) -> None:
        self.sampler = _Ablated(model, 1.0, num_classes, **sampling)
        self.sampler.kept = kept
        self.sampler.hidden = require_number(hidden, "hidden")

    def certify(
        self, x: Tensor, n0: int = 100, n: int = 10_000, alpha: float = 1e-3, procedure: str = "cpm"
    ) -> AblationCertificates:
        """How many entries of each input may be exchanged for anything, each wrong with probability at most alpha.

        Args:
            x: a batch: sequences (N, T), vectors (N, F) or images (N, C, H, W).
            n0: selection draws.
            n: estimation draws, independent of the former.
            alpha: risk per input.
            procedure: a row of `PROCEDURES` that takes votes; see `ablation_substitutions` for those that show nothing.
        """
        sampler = self.sampler
        if not isinstance(x, Tensor) or x.dim() not in (2, 4) or len(x) == 0:
            raise InputError(f"expected sequences (N, T) or images (N, C, H, W), got {describe(x)}")
        entries = _entries(x[0])
        require_number(sampler.kept, "kept", least=1, most=entries, whole=True)
        first, second = (
            [sampler.counts(row, draws, input_id=i, stream=stream) for i, row in enumerate(x)]
            for draws, stream in ((n0, Stream.SELECTION), (n, Stream.ESTIMATION))
        )
        votes = certify_counts(first, second, 1.0, alpha, procedure)
        harmless = ablation_substitutions(votes, entries, sampler.kept)
        prediction = np.where(harmless >= 0, votes.selected, ABSTAIN)
        return AblationCertificates(prediction, harmless, votes)
