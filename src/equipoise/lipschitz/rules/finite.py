"""Numbers that are none: a NaN or infinite weight, statistic or constant has no bound, masks of −∞ before a softmax apart."""

import math
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.lipschitz.rules.registry import Call

_aten = torch.ops.aten
#: a constant −∞ may enter here …
_MASKING = {
    _aten.add.Tensor, _aten.add.Scalar, _aten.where.self, _aten.where.ScalarOther, _aten.where.ScalarSelf,
    _aten.masked_fill.Scalar, _aten.masked_fill.Tensor,
}  # fmt: skip
#: … be carried on by these …
_CARRYING = {
    _aten.view.default, _aten.reshape.default, _aten.transpose.int, _aten.permute.default, _aten.contiguous.default,
    _aten.clone.default, _aten.flatten.using_ints, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default,
}  # fmt: skip
#: … and must end in one of these, where it is a weight of 0
_ABSORBING = {_aten.softmax.int, _aten._softmax.default, _aten._safe_softmax.default, _aten.logsumexp.default}
#: limits that may be open on this side, and orders of norms
_OPEN = {"min": -1, "min_val": -1, "max": 1, "max_val": 1, "ord": 1, "p": 1}


def refuse_nonfinite(call: Call) -> None:
    """Refuse NaN and infinite constants among the arguments, naming the one."""
    for name, value in call.arguments.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            wrong = _wrong(one)
            if wrong is None or (math.isinf(wrong) and _OPEN.get(name) == math.copysign(1, wrong)):
                continue
            if wrong == -math.inf and call.node.target in _MASKING and _absorbed(call.node):
                continue
            call.refuse(
                f"its constant argument {name!r} holds a non-finite number ({wrong})",
                "check the weights and the checkpoint",
            )


def _wrong(value: Any) -> float | None:
    """NaN or +∞ if there is one among the numbers, else −∞ if there is one, else None."""
    if isinstance(value, Tensor) and value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    if isinstance(value, Tensor) and value.is_floating_point():
        if value.numel() == 0 or bool(torch.isfinite(value).all()):
            return None
        rest = value[~torch.isfinite(value)]
        return math.nan if bool(rest.isnan().any()) else float(rest.max())
    return value if isinstance(value, float) and not math.isfinite(value) else None


def _absorbed(node: fx.Node) -> bool:
    """Whether everything that reads this node turns −∞ into a weight of 0."""
    for user in node.users:
        target = user.target if user.op == "call_function" else None
        if target not in _ABSORBING and not (target in _MASKING | _CARRYING and _absorbed(user)):
            return False
    return bool(node.users)
