"""ONNX as exporters write it: branches that are known, weights in a file beside, activations written out, signals, attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.onnx import load_onnx, read_onnx

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(1)


def numbers(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def built(nodes: list[Any], shape: tuple[Any, ...], opset: int, **constants: np.ndarray) -> Any:
    return helper.make_model(
        helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(v, k) for k, v in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=10,
    )


def node(kind: str, *inputs: str, to: str = "y", **attributes: Any) -> Any:
    return helper.make_node(kind, list(inputs), [to], name=f"{kind}_{to}", **attributes)


def whole(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def scalar(value: float) -> np.ndarray:
    return np.array(value, dtype=np.float32)


def choice(taken: bool) -> Any:
    """A branch by a comparison of sizes, each with a constant of its own under the same name."""
    graphs = {
        key: helper.make_graph(
            [helper.make_node(kind, ["x"], ["h"], name=f"inner_{kind}"), helper.make_node("Mul", ["h", "c"], ["z"])],
            key,
            [],
            [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(numbers(3), "c")],
        )
        for key, kind in (("then_branch", "Relu"), ("else_branch", "Tanh"))
    }
    return built(
        [
            node("Size", "x", to="n"),
            node("Equal", "n", "wanted", to="same"),
            helper.make_node("If", ["same"], ["y"], name="the_If", **graphs),
        ],
        (2, 3),
        17,
        wanted=np.array(6 if taken else 7, dtype=np.int64),
    )


EIGHT, ONE = whole(8, 1)
GELU = [node("Div", "x", "root", to="a"), node("Erf", "a", to="b"), node("Add", "b", "one", to="c")]
QKV = {"wq": numbers(8, 8), "wk": numbers(8, 4), "wv": numbers(8, 4)}
HEADS = [node("MatMul", "x", w, to=w[1]) for w in QKV]
NETWORKS: dict[str, Any] = {
    "a branch that is taken": choice(True),
    "the other branch": choice(False),
    "swish": built([node("Sigmoid", "x", to="s"), node("Mul", "x", "s")], ("n", 5), 13),
    "gelu": built(
        [*GELU, node("Mul", "x", "c", to="d"), node("Mul", "d", "half")],
        ("n", 5),
        13,
        root=scalar(math.sqrt(2)),
        one=scalar(1),
        half=scalar(0.5),
    ),
    "softplus with a threshold": built(
        [node("Softplus", "x", to="s"), node("Greater", "x", "t", to="g"), node("Where", "g", "x", "s")],
        ("n", 5),
        17,
        t=scalar(20),
    ),
    "root mean square": built(
        [
            node("Pow", "x", "two", to="p"),
            node("ReduceMean", "p", "last", to="m"),
            node("Add", "m", "eps", to="e"),
            node("Sqrt", "e", to="r"),
            node("Reciprocal", "r", to="i"),
            node("Mul", "x", "i"),
        ],
        ("n", 3, 5),
        18,
        two=scalar(2),
        last=whole(-1),
        eps=scalar(0.1),
    ),
    "a spectrum": built([node("DFT", "x", onesided=1, axis=1)], (2, 12, 1), 17),
    "an inverse transform": built([node("DFT", "x", "n", "a", inverse=1)], (2, 6, 3, 2), 20, n=EIGHT, a=ONE),
    "frames": built([node("STFT", "x", "step", "w", to="y")], (2, 20), 17, step=whole(4)[0], w=numbers(8)),
    "a window": built([node("HannWindow", "n", to="w"), node("Mul", "x", "w")], (2, 8), 17, n=whole(8)[0]),
    "power pooling": built([node("LpPool", "x", kernel_shape=[2, 2], strides=[2, 1], p=2)], (1, 2, 4, 5), 18),
    "one hot": built(
        [node("OneHot", "i", "d", "v", to="h"), node("MatMul", "x", "h")],
        (2, 3),
        13,
        i=whole(2, 0, -1),
        d=whole(4)[0],
        v=np.array([0, 1], dtype=np.float32),
    ),
    "nonzero entries": built(
        [node("NonZero", "m", to="p"), node("Squeeze", "p", to="q"), node("Gather", "x", "q", axis=1)],
        (2, 4),
        13,
        m=np.array([1, 0, 1, 1], dtype=np.float32),
    ),
    "reversed": built([node("ReverseSequence", "x", "n", batch_axis=0, time_axis=1)], (2, 4, 3), 10, n=whole(2, 4)),
    "a product": built([node("Tanh", "x", to="t"), node("ReduceProd", "t", axes=[1])], (2, 3), 13),
    "standardized": built([node("MeanVarianceNormalization", "x", axes=[2])], (1, 2, 6), 13),
    "attention": built([*HEADS, node("Attention", "q", "k", "v", q_num_heads=4, kv_num_heads=2)], (1, 5, 8), 23, **QKV),
    "causal attention": built(
        [*HEADS, node("Attention", "q", "k", "v", q_num_heads=2, kv_num_heads=1, is_causal=1, scale=0.3)],
        (1, 5, 8),
        23,
        **QKV,
    ),
    "masked attention": built(
        [*HEADS, node("Attention", "q", "k", "v", "m", q_num_heads=2, kv_num_heads=1)],
        (1, 3, 8),
        23,
        **QKV,
        m=np.array([[True, False, True], [True, True, False], [False, False, True]]),
    ),
}
#: those that are bounded on a ball only
BALLS = {"attention": 2.0, "causal attention": 2.0, "masked attention": 2.0}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_exporters_write_is_read_and_bounded(name: str) -> None:
    made, ball = NETWORKS[name], BALLS.get(name)
    data = made.SerializeToString()
    network = read_onnx(data)
    (shape,) = network.input_shapes
    x = numbers(*shape) * 0.5
    options = ort.SessionOptions()
    options.log_severity_level = 4
    expected = ort.InferenceSession(data, options).run(None, {"x": x})[0]
    found = network(torch.from_numpy(x))
    assert found.shape == expected.shape
    assert np.allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5), np.abs(found.numpy() - expected).max()
    if ball is not None:
        with pytest.raises(eq.Refused, match="ball"):
            eq.lipschitz_bound(network, torch.from_numpy(x))
    bound = eq.lipschitz_bound(network, torch.from_numpy(x), ball=ball).upper
    points = torch.from_numpy(RNG.normal(size=(20, *shape)))
    points = points if ball is None else points / points.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape)) * ball
    network = network.double()
    for point in points:
        jacobian = torch.func.jacrev(network)(point).reshape(-1, point.numel())
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound * (1 + 1e-9)


def test_a_decision_by_the_data_and_loops_are_refused_by_name() -> None:
    made = choice(True)
    made.graph.node[1].input[0] = "x"
    made.graph.node[1].op_type = "Less"
    made.graph.initializer[0].CopyFrom(numpy_helper.from_array(numbers(2, 3), "wanted"))
    with pytest.raises(eq.Refused, match="inner_Relu"):
        read_onnx(made.SerializeToString())(torch.zeros(2, 3))
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [helper.make_tensor_value_info(n, k, []) for n, k in (("i", TensorProto.INT64), ("c", TensorProto.BOOL))],
        [helper.make_tensor_value_info("d", TensorProto.BOOL, [])],
    )
    loop = built([helper.make_node("Loop", ["n", ""], ["y"], name="the_Loop", body=body)], (2,), 17, n=whole(3)[0])
    with pytest.raises(eq.Refused, match=r"the_Loop.*steps written out"):
        read_onnx(loop.SerializeToString())


def stored_beside(folder: Path, **changes: str) -> Path:
    """A dense layer whose weight lies in weights.bin, or where `changes` say."""
    made = built([node("Gemm", "x", "w")], ("n", 3), 17, w=numbers(3, 2))
    tensor = made.graph.initializer[0]
    (folder / "weights.bin").write_bytes(b"\0" * 4 + tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "weights.bin", "offset": "4", "length": "24", **changes}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    (folder / "net.onnx").write_bytes(made.SerializeToString())
    return folder / "net.onnx"


def test_weights_in_a_file_beside_the_network_are_read(tmp_path: Path) -> None:
    path = stored_beside(tmp_path)
    x = numbers(2, 3)
    assert np.allclose(ort.InferenceSession(str(path)).run(None, {"x": x})[0], load_onnx(path)(torch.from_numpy(x)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"location": "../weights.bin"}, "only files in the folder"),
        ({"location": "w" * 5000}, "only files in the folder"),
        ({"location": "/etc/hostname"}, "only files in the folder"),
        ({"location": "sub\\weights.bin"}, "only files in the folder"),
        ({"location": ".."}, "only files in the folder"),
        ({"location": ""}, "only files in the folder"),
        ({"location": "link.bin"}, "a link"),
        ({"location": "missing.bin"}, "cannot read"),
        ({"location": "folder"}, "not a regular file"),
        ({"location": "weights.bin\0"}, "only files in the folder"),
        ({"offset": "-4"}, "24 bytes"),
        ({"offset": "1e3"}, "24 bytes"),
        ({"offset": "99999"}, "ends after 0"),
        ({"offset": "8"}, "ends after 20"),
        ({"length": "20"}, "24 bytes"),
    ],
)
def test_weights_elsewhere_are_refused(tmp_path: Path, change: dict[str, str], words: str) -> None:
    (tmp_path / "link.bin").symlink_to("weights.bin")
    (tmp_path / "folder").mkdir()
    with pytest.raises(eq.EquipoiseError, match=words):
        load_onnx(stored_beside(tmp_path, **change))


def test_the_exporter_of_pytorch_is_read_as_it_is_by_default(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    network = nn.Sequential(nn.Linear(20, 30), nn.SiLU(), nn.Linear(30, 4)).eval()
    x = torch.randn(1, 20)
    torch.onnx.export(network, (x,), str(tmp_path / "net.onnx"), verbose=False)
    loaded = load_onnx(tmp_path / "net.onnx")
    assert torch.allclose(loaded(x), network(x), atol=1e-5)
    assert eq.lipschitz_bound(loaded, x).upper == pytest.approx(eq.lipschitz_bound(network, x).upper, rel=1e-3)
