"""Networks on tokens: how many of them may be exchanged, proved.

`nn.Sequential(nn.Embedding, *body)` is a function of rows of the embedding's table. Where its decision is proved in a ball around
the rows of a sequence, no exchange of tokens that moves the rows by less changes it (`smoothing.tokens`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import Refused, hooked
from equipoise.lipschitz.local import Radii, certified_radius
from equipoise.smoothing.tokens import substitutions_within


def proved_substitutions(
    model: nn.Module, tokens: Tensor, labels: Tensor | None = None, **options: Any
) -> tuple[Tensor, Radii]:
    """The largest k such that no k exchanged tokens change the decision, (N,), and the proved radii around the embedded rows.

    Guarantee: for the real function of the stored weights, rounding included, whatever tokens of the table replace whichever k
    of them; 0 also where nothing was proved.

    Args:
        model: a classifier of token sequences in evaluation mode, `nn.Sequential(nn.Embedding(…), …)`: tokens that are used
            beside the embedding, in a mask for instance, would not be covered.
        tokens: (N, T), whole numbers.
        labels: (N,), by default the network's own decisions.
        **options: of `certified_radius`, the norm apart: rows are compared in ℓ2.

    >>> model = nn.Sequential(nn.Embedding(2, 1), nn.Flatten(), nn.Linear(3, 2)).eval()
    >>> _ = model[0].weight.data.copy_(torch.tensor([[0.5], [-0.5]]))
    >>> _ = model[2].weight.data.copy_(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    >>> _ = model[2].bias.data.copy_(torch.tensor([1.0, 0.0]))
    >>> proved_substitutions(model, torch.zeros(1, 3, dtype=torch.long))[0].tolist()
    [2]
    """
    parts = list(model) if type(model) is nn.Sequential and len(model) > 1 else [model]
    first = parts[0]
    if type(first) is not nn.Embedding or first.max_norm is not None or hooked(model):
        raise Refused(
            "expected nn.Sequential(nn.Embedding(…), …) without hooks or max_norm, so that tokens enter as rows of one table "
            f"and nowhere else; got {type(model).__name__}: put the embedding and what follows it into one"
        )
    table = first.weight.detach()
    # row numbers that the table does not have are refused before they are looked up
    substitutions_within(torch.zeros(len(tokens)), tokens, table)
    radii = certified_radius(nn.Sequential(*parts[1:]), table[tokens.long()], labels, **options)
    return substitutions_within(radii.radius, tokens, table), radii
