"""The rescaling layers by name, with the signatures of `nn.Linear`, `nn.Conv1d`, `nn.Conv2d` and `nn.ConvTranspose2d`."""

from __future__ import annotations

from equipoise.nn.layers import Conv1dLayer, Conv2dLayer, ConvTranspose2dLayer, LinearLayer
from equipoise.nn.rescaling import AOL, RLB, SN, SR


class SNLinear(LinearLayer):
    """`nn.Linear` divided by an upper bound of its norm; options `iterations`, `estimator` of `SN`."""

    method_type = SN


class SNConv1d(Conv1dLayer):
    """`nn.Conv1d` divided by an upper bound of its norm; options `iterations`, `estimator` of `SN`."""

    method_type = SN


class SNConv2d(Conv2dLayer):
    """`nn.Conv2d` divided by an upper bound of its norm; options `iterations`, `estimator` of `SN`."""

    method_type = SN


class SNConvTranspose2d(ConvTranspose2dLayer):
    """`nn.ConvTranspose2d` divided by an upper bound of its norm; options `iterations`, `estimator` of `SN`."""

    method_type = SN


class AOLLinear(LinearLayer):
    """`nn.Linear` rescaled as almost-orthogonal layer (`AOL`)."""

    method_type = AOL


class AOLConv1d(Conv1dLayer):
    """`nn.Conv1d` rescaled as almost-orthogonal layer (`AOL`)."""

    method_type = AOL


class AOLConv2d(Conv2dLayer):
    """`nn.Conv2d` rescaled as almost-orthogonal layer (`AOL`)."""

    method_type = AOL


class AOLConvTranspose2d(ConvTranspose2dLayer):
    """`nn.ConvTranspose2d` rescaled as almost-orthogonal layer (`AOL`)."""

    method_type = AOL


class SRLinear(LinearLayer):
    """`nn.Linear` with spectral rescaling; options `t`, `learn_q` of `SR`.

    >>> import torch
    >>> layer = SRLinear(4, 3, t=2)
    >>> layer(torch.zeros(2, 4)).shape, bool(torch.linalg.matrix_norm(layer.weight, 2) <= 1)
    (torch.Size([2, 3]), True)
    """

    method_type = SR


class SRConv1d(Conv1dLayer):
    """`nn.Conv1d` with spectral rescaling; options `t`, `learn_q` of `SR`."""

    method_type = SR


class SRConv2d(Conv2dLayer):
    """`nn.Conv2d` with spectral rescaling; options `t`, `learn_q` of `SR`.

    >>> from equipoise import spectral_norm
    >>> layer = SRConv2d(3, 8, 3, stride=2, padding=1, t=2)
    >>> bool(spectral_norm(layer.export(), input_size=(32, 32)).lower <= 1)
    True
    """

    method_type = SR


class SRConvTranspose2d(ConvTranspose2dLayer):
    """`nn.ConvTranspose2d` with spectral rescaling; options `t`, `learn_q` of `SR`."""

    method_type = SR


class RLBLinear(LinearLayer):
    """`(I + Q)x/‖I + Q‖ + b`: LiResNet's linear residual, dense; options of `RLB`."""

    method_type = RLB


class RLBConv2d(Conv2dLayer):
    """`(I + Q)⋆x/‖I + Q‖ + b`: LiResNet's linear residual block as one convolution; options of `RLB`.

    >>> import torch
    >>> RLBConv2d(4, 4, 3, padding=1)(torch.zeros(2, 4, 6, 6)).shape
    torch.Size([2, 4, 6, 6])
    """

    method_type = RLB
