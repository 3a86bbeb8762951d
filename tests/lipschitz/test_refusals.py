"""What has no guarantee is refused, with the node, the module, the source line and what to do."""

import sys

import pytest
import torch
import torch.nn.functional as F
from lipschitz_nets import Op
from torch import nn

from equipoise.core import InputError, Refused, full_precision
from equipoise.lipschitz import lipschitz_bound

REFUSED = {
    "unknown operation": (lambda x: torch.special.bessel_j0(x), "register_rule"),
    "hard shrinkage": (F.hardshrink, "discontinuous"),
    "threshold": (lambda x: F.threshold(x, 1.0, 0.0), "discontinuous"),
    "remainder": (lambda x: x % 1.0, "discontinuous"),
    "floor of a quotient": (lambda x: x // 2.0, "discontinuous"),
    "decision": (lambda x: torch.where(x > 1, x, 0 * x), "relu, clamp, maximum"),
    "gated unit": (lambda x: F.glu(x, 1), "ball"),
    "square": (lambda x: x * x, "ball"),
    "attention": (lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]), "ball"),
    "division": (lambda x: 1 / x, "near 0"),
    "square root": (torch.sqrt, "near 0"),
    "logarithm": (lambda x: torch.log(x.abs()), "near 0"),
    "negative power": (lambda x: F.relu(x) ** -0.5, "near 0"),
    "gather by positions of the input": (lambda x: x.gather(1, x.argmax(1, True)), "no Lipschitz rule|jump"),
    "complex numbers": (lambda x: torch.fft.fft(x), "complex"),
    "angle": (lambda x: torch.fft.fft(x).angle(), "complex numbers"),
    "mode": (lambda x: x.mode(1)[0], "no Lipschitz rule"),
    "argmax index": (lambda x: x.max(1)[1].to(x.dtype), "jumps"),
    "gather by the input": (lambda x: x[:, (x[0] > 0).to(torch.long)], "decision"),
    "active dropout": (lambda x: F.dropout(x, 0.5, True), "eval"),
    "batch statistics": (lambda x: F.batch_norm(x, None, None, training=True), "eval|does not run"),
    "rounding": (lambda x: x.to(torch.int64).to(x.dtype), "narrow"),
    "layer norm without ε": (lambda x: F.layer_norm(x, (4,), eps=0.0), "eps"),
    "statistics of a norm": (lambda x: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)[2], "first result"),
    "an error of its own": (lambda x: {}[x.dim()], "does not run"),
    "integer sum": (lambda x: x.sum(1, dtype=torch.int64).to(x.dtype), "rounds|narrow"),
    "unbounded einsum": (lambda x: torch.einsum("bi,bi->b", x, x), "ball"),
    "average with another divisor": (lambda x: F.avg_pool2d(x[:, None, None], 1, divisor_override=2), "divisor"),
    "sum of absolute values as a norm": (lambda x: x.norm(p=1, dim=1), "use the ℓ2 norm"),
    "limits that copy": (lambda x: torch.clamp(x[:, :1], min=torch.full((1, 9), -9.0)), "larger shape"),
    "cumsum": (lambda x: x.cumsum(1), "rule for aten.cumsum"),
    "cumprod": (lambda x: x.cumprod(1), "rule for aten.cumprod"),
    "topk": (lambda x: x.topk(3, 1)[0], "rule for aten.topk"),
    "index_put": (lambda x: x.index_put((torch.tensor([0]),), x[:1]), "rule for aten.index_put"),
    "scatter_add": (
        lambda x: x.scatter_add(1, torch.zeros(1, 4, dtype=torch.int64), x),
        "rule for aten.scatter_add",
    ),
    "index_copy": (lambda x: x.index_copy(1, torch.tensor([0, 0]), x[:, :2]), "rule for aten.index_copy"),
    "std": (lambda x: x.std(1), "rule for aten.std"),
    "lerp": (lambda x: torch.lerp(x, x.flip(1), 0.3), "rule for aten.lerp"),
    "choice by a constant mask": (lambda x: x[:, torch.tensor([True, False, True, True])], "shape depends"),
}


class _Counter(nn.Module):
    """Multiplies its buffer through a view, so that every call is another map."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x):
        return x * self.factor.view(-1).mul_(2)


def test_a_buffer_written_through_a_view_is_refused():
    with pytest.raises(Refused, match="changes a parameter or buffer"):
        lipschitz_bound(_Counter().eval(), torch.randn(2, 4))


def test_captured_under_any_precision():
    with full_precision():
        assert lipschitz_bound(nn.Linear(4, 2), torch.zeros(1, 4)).upper > 0


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    function, words = REFUSED[name]
    with pytest.raises((Refused, InputError), match=words):
        lipschitz_bound(Op(function).eval(), torch.randn(2, 4))


def test_the_message_names_node_module_line_and_remedy():
    net = nn.Sequential(nn.Linear(4, 4), Op(torch.special.bessel_j0)).eval()
    with pytest.raises(Refused) as error:
        lipschitz_bound(net, torch.zeros(1, 4))
    text = str(error.value)
    assert "special_bessel_j0" in text
    assert "module 1" in text
    assert "lipschitz_nets.py line" in text
    assert "register_rule" in text


def test_torchscript_is_refused_and_inference_mode_is_not():
    net, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), torch.zeros(1, 3)
    with pytest.raises(Refused, match="cannot be captured"):
        lipschitz_bound(torch.jit.trace(net, x), x)
    with torch.inference_mode():
        made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
        made.load_state_dict(net.state_dict())
        assert lipschitz_bound(made, x).upper == lipschitz_bound(net, x).upper


def test_sparse_weights_are_refused():
    weight = nn.Parameter(torch.eye(3).to_sparse())
    model = Op(lambda x: torch.sparse.mm(weight, x.mT).mT)
    model.weight = weight
    with pytest.raises(Refused, match=r"sparse.*to_dense"):
        lipschitz_bound(model.eval(), torch.zeros(1, 3))


def test_a_branch_on_the_data_is_refused_in_one_sentence_and_nothing_is_printed_beside_it(capfd):
    def told(x):
        sys.stderr.write("seen")
        return x

    with pytest.raises(Refused, match="control flow depends on the data"):
        lipschitz_bound(Op(lambda x: x * (5 if x.sum() > 3 else 1)).eval(), torch.zeros(1, 4))
    assert capfd.readouterr() == ("", "")
    lipschitz_bound(Op(told).eval(), torch.zeros(1, 4))
    assert "seen" in capfd.readouterr().err
