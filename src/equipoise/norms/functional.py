"""Differentiable norms under the name that users type, `equipoise.functional`: see `norms.differentiable`."""

from equipoise.norms.differentiable import conv_norm, explicit_gradient, gram_norm

__all__ = ["conv_norm", "explicit_gradient", "gram_norm"]
