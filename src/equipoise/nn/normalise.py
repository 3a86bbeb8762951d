"""What may stand where batch norm stood: centring, which does not stretch; and the last layer with rows of norm 1."""

import torch
from torch import Tensor, nn

from equipoise.core import (
    POSITIVE,
    InputError,
    along,
    by_construction,
    or_one,
    require_counts,
    require_number,
    root,
    unit_roundoff,
)
from equipoise.nn.activations import Described
from equipoise.nn.parametrize import Parametrization, Parametrized


class BatchCentering(Described):
    """`x − mean + bias` per channel: batch norm without the division.

    * Evaluation: the running mean is a constant, so the layer is a shift: an isometry of every sample. Certificates
      speak of this mode.
    * Training: the batch's own mean is subtracted. On the whole batch, per channel, that is `(I − 11ᵀ/n)x + b`, n the
      number of samples times pixels: an orthogonal projection and a shift, norm 1 (0 for n = 1) on the *batch*
      tensor. It mixes samples: a change of one sample moves the outputs of the others too, by at most its own norm in
      total.

    The running mean follows `m ← (1 − momentum)·m + momentum·batch mean`. With several processes every one centres by
    its own part.

    Reference: the batch norm without variance of 1-Lipschitz libraries; the projection is elementary.

    >>> layer = BatchCentering(2)
    >>> layer(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).tolist()
    [[-1.0, -2.0], [1.0, 2.0]]
    >>> layer.running_mean
    tensor([0.2000, 0.4000])
    """

    __constants__ = ("num_features", "momentum")
    lipschitz_upper = by_construction(1.0)

    running_mean: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_counts(num_features=num_features)
        self.num_features = num_features
        self.momentum = require_number(momentum, "momentum", least=POSITIVE, most=1)
        zeros = torch.zeros(num_features, device=device, dtype=dtype)
        self.register_buffer("running_mean", zeros)
        self.register_parameter("bias", nn.Parameter(zeros.clone()) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """The centred batch."""
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise InputError(f"expected (batch, {self.num_features}, …), got {tuple(x.shape)}")
        mean = self.running_mean
        if self.training:
            mean = x.mean([d for d in range(x.dim()) if d != 1])
            with torch.no_grad():
                self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), self.momentum)
        shift = -mean if self.bias is None else self.bias - mean
        return x + along(shift, x, 1)


class LayerCentering(nn.Module):
    """`x − mean(x)` of a sample: layer norm without the division, an orthogonal projection in both modes.

    The mean is over all entries, or with `num_features` over those of each channel, with a learned shift per channel.

    >>> LayerCentering()(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.,  1.]])
    >>> LayerCentering(2)(torch.tensor([[[1.0, 3.0], [0.0, 4.0]]])).tolist()
    [[[-1.0, 1.0], [-2.0, 2.0]]]
    """

    lipschitz_upper = by_construction(1.0)

    bias: nn.Parameter | None

    def __init__(self, num_features: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.num_features = num_features
        shifted = num_features is not None and bias
        shift = nn.Parameter(torch.zeros(num_features or 0)) if shifted else None
        self.register_parameter("bias", shift)

    def forward(self, x: Tensor) -> Tensor:
        """The centred samples."""
        if x.dim() < 2:
            raise InputError(
                f"expected (batch, …), got {tuple(x.shape)}: without a batch dimension there are no samples"
            )
        if self.num_features is None:
            return x - x.mean(list(range(1, x.dim())), keepdim=True)
        if x.dim() < 3 or x.shape[1] != self.num_features:
            raise InputError(
                f"expected (batch, {self.num_features}, pixels…), got {tuple(x.shape)}"
            )
        centred = x - x.mean(list(range(2, x.dim())), keepdim=True)
        if self.bias is None:
            return centred
        return centred + along(self.bias, x, 1)


class UnitRows(Parametrization):
    """Rows `ŵ_i = w_i/‖w_i‖`; a row of zeros stays one. The norm is at most the root of the number of rows.

    >>> from equipoise.maps.geometry import Geometry
    >>> UnitRows(Geometry((2, 2)))(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).double().round(decimals=5).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """

    kinds = (nn.Linear,)

    def constant(self) -> float:
        """`√rows`, for every value of the weights."""
        return root(self.geometry.shape[0])

    def construct(self, raw: Tensor) -> Tensor:
        """The weight: in float64, and shrunk by what rounding may add to the length of a row."""
        wide = raw.double()
        largest = wide.detach().abs().amax(1, keepdim=True)
        # squares neither overflow nor vanish
        w = wide / or_one(largest)
        squares = w.square().sum(1, keepdim=True)
        margin = 1.5 * unit_roundoff(raw.dtype) + (raw.shape[1] + 8) * unit_roundoff(torch.float64)
        length = or_one(squares).sqrt()
        return (w / length * (1 - margin)).to(raw.dtype)


class LastLayerNormalised(Parametrized, nn.Linear):
    """`z = Ŵx + b` with rows `ŵ_i = w_i/‖w_i‖`: logits of equal steepness, with the margin bound `‖ŵ_i − ŵ_j‖ ≤ 2`
    per pair.

    Every logit is 1-Lipschitz; the vector of logits need not be (its constant is ‖Ŵ‖ ≤ √classes). Certificates use
    the pairs: `z_i − z_j` is exactly `‖ŵ_i − ŵ_j‖`-Lipschitz in x, see `smoothing.margin_radius(weight=…)`.

    Reference: Singla, Singla, Feizi (2022), §5 (last layer normalisation).

    >>> layer = LastLayerNormalised(5, 3)
    >>> layer.weight.norm(dim=1).round(decimals=5).tolist()
    [1.0, 1.0, 1.0]
    """

    parametrization = UnitRows
