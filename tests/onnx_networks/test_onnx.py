"""ONNX networks: every operator against onnxruntime, what exporters write, files of a verification competition, hostile files."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.onnx import OnnxNetwork, known_operators, load_onnx, read_onnx

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)
IMAGE = (2, 4, 6, 5)


def numbers(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def whole(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def scalar(value: float) -> np.ndarray:
    return np.array(value, dtype=np.float32)


def node(kind: str, *inputs: str, to: str = "y0", name: str = "", **attributes: Any) -> Any:
    return helper.make_node(kind, list(inputs), [to], name=name or f"the_{kind}_{to}", **attributes)


def model(nodes: list[Any], shape: tuple[Any, ...], opset: int = 17, outputs: int = 1, **constants: Any) -> bytes:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(outputs)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return bytes(made.SerializeToString())


def one(kind: str, shape: Any, *constants: Any, opset: int = 17, outputs: int = 1, **attributes: Any) -> bytes:
    """A graph of one node that reads x and the constants (None: left out)."""
    names = ["x", *["" if c is None else f"c{i}" for i, c in enumerate(constants)]]
    made = helper.make_node(kind, names, [f"y{i}" for i in range(outputs)], name=f"the_{kind}", **attributes)
    return model([made], shape, opset, outputs, **{f"c{i}": c for i, c in enumerate(constants) if c is not None})


def edited(data: bytes, change: Any) -> bytes:
    made = onnx.ModelProto.FromString(data)
    change(made)
    return bytes(made.SerializeToString())


def run(data: bytes, x: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {session.get_inputs()[0].name: x}))


UNARY = [
    "Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Exp", "Softplus", "Softsign", "HardSwish", "Floor", "Ceil", "Round", "Sign",
    "Identity", "Sin", "Cos", "Sinh", "Cosh", "Tan", "Atan", "Asinh", "Erf", "LeakyRelu", "Elu", "Selu", "HardSigmoid",
    "Reciprocal", "GlobalAveragePool", "GlobalMaxPool", "Dropout", "Transpose", "Softmax", "LogSoftmax",
    "ReduceSum", "ReduceProd", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSumExp", "Squeeze",
]  # fmt: skip
CASES: dict[str, bytes] = {kind: one(kind, IMAGE) for kind in UNARY}
CASES |= {
    "AveragePool padded beyond half": one(
        "AveragePool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[2, 2, 2, 2], count_include_pad=1
    ),
    "Resize to many": one(
        "Resize", (1, 1, 4), None, None, whole(1, 1, 2**20), mode="linear", coordinate_transformation_mode="asymmetric"
    ),
    "Gelu": one("Gelu", IMAGE, opset=20),
    "Gelu tanh": one("Gelu", IMAGE, opset=20, approximate="tanh"),
    "Mish": one("Mish", IMAGE, opset=18),
    "Log of squares": model([node("Mul", "x", "x", to="s"), node("Log", "s", to="l"), node("Sqrt", "s", to="r"),
                             node("Sum", "l", "r", "x")], IMAGE),
    "Add": one("Add", IMAGE, numbers(4, 1, 1)),
    "Sub": one("Sub", IMAGE, numbers(6, 5)),
    "Mul": one("Mul", IMAGE, numbers(5)),
    "Div": one("Div", IMAGE, numbers(4, 1, 1)),
    "Min": one("Min", IMAGE, numbers(5), numbers(1)),
    "Max": one("Max", IMAGE, numbers(6, 1)),
    "Pow": one("Pow", IMAGE, np.array(2.0, dtype=np.float32)),
    "Pow of a vector": one("Pow", IMAGE, np.array([1, 2, 3, 2, 1], dtype=np.float32)),
    "Clip": one("Clip", IMAGE, np.array(-0.5, dtype=np.float32), np.array(0.7, dtype=np.float32)),
    "Clip above": one("Clip", IMAGE, None, np.array(0.7, dtype=np.float32)),
    "Clip-6": one("Clip", IMAGE, opset=6 + 1, min=-0.2, max=0.3),
    "PRelu": one("PRelu", IMAGE, numbers(4, 1, 1)),
    "PRelu scalar": one("PRelu", IMAGE, numbers(1)),
    "PRelu last axis": one("PRelu", IMAGE, numbers(5)),
    "MatMul": one("MatMul", IMAGE, numbers(5, 3)),
    "Gemm": one("Gemm", (3, 4), numbers(5, 4), numbers(5), transB=1, alpha=0.5, beta=2.0),
    "Gemm plain": one("Gemm", (3, 4), numbers(4, 5)),
    "Gemm transposed": one("Gemm", (3, 4), numbers(3, 5), numbers(1, 5), transA=1),
    "Conv": one("Conv", IMAGE, numbers(6, 2, 3, 3), numbers(6), group=2, pads=[1, 0, 2, 1], strides=[2, 1], dilations=[1, 2]),
    "Conv same": one("Conv", IMAGE, numbers(6, 4, 2, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
    "Conv same lower": one("Conv", IMAGE, numbers(6, 4, 2, 3), auto_pad="SAME_LOWER"),
    "Conv 1d": one("Conv", (2, 3, 9), numbers(5, 3, 3), pads=[1, 1]),
    "Conv 3d": one("Conv", (1, 2, 4, 4, 4), numbers(3, 2, 2, 2, 2)),
    "ConvTranspose": one("ConvTranspose", IMAGE, numbers(4, 3, 3, 3), numbers(6), group=2, strides=[2, 2],
                         pads=[1, 0, 1, 0], output_padding=[1, 0]),
    "MaxPool": one("MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 0]),
    "MaxPool ceil": one("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    "MaxPool uneven": one("MaxPool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[0, 1, 1, 1], dilations=[1, 1]),
    "AveragePool": one("AveragePool", IMAGE, kernel_shape=[3, 2], pads=[1, 0, 1, 0]),
    "AveragePool counted": one("AveragePool", IMAGE, kernel_shape=[3, 2], pads=[1, 1, 0, 0], count_include_pad=1),
    "AveragePool ceil": one("AveragePool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    "BatchNormalization": one("BatchNormalization", IMAGE, numbers(4), numbers(4), numbers(4), numbers(4) ** 2 + 1),
    "BatchNormalization 2d": one("BatchNormalization", (3, 4), numbers(4), numbers(4), numbers(4), numbers(4) ** 2 + 1),
    "InstanceNormalization": one("InstanceNormalization", IMAGE, numbers(4), numbers(4)),
    "LayerNormalization": one("LayerNormalization", IMAGE, numbers(6, 5), numbers(6, 5), axis=2),
    "Flatten": one("Flatten", IMAGE, axis=2),
    "Flatten 0": one("Flatten", IMAGE, axis=0),
    "Reshape": one("Reshape", IMAGE, whole(0, -1, 10)),
    "Transpose perm": one("Transpose", IMAGE, perm=[0, 2, 3, 1]),
    "Unsqueeze": one("Unsqueeze", IMAGE, whole(0, -1)),
    "Unsqueeze-11": one("Unsqueeze", IMAGE, opset=11, axes=[1, 3]),
    "Squeeze axes": one("Squeeze", (2, 1, 3, 1), whole(-1)),
    "Slice": one("Slice", IMAGE, whole(1, -100), whole(100, -1), whole(2, 3), whole(2, 1)),
    "Slice backwards": one("Slice", IMAGE, whole(-1, 3), whole(-100, 0), whole(2, 3), whole(-1, -2)),
    "Slice-9": one("Slice", IMAGE, opset=9, starts=[1, 0], ends=[3, -1], axes=[1, 2]),
    "Split": one("Split", IMAGE, whole(1, 3), axis=1, outputs=2),
    "Split-11": one("Split", IMAGE, opset=11, axis=2, outputs=3),
    "Gather": one("Gather", IMAGE, np.array([[0, -1], [2, 1]], dtype=np.int64), axis=2),
    "Gather one": one("Gather", IMAGE, np.array(1, dtype=np.int64), axis=1),
    "Expand": one("Expand", (3, 1), whole(2, 1, 4)),
    "Tile": one("Tile", (3, 2), whole(2, 3)),
    "Pad": one("Pad", IMAGE, whole(0, 0, 1, 2, 0, 1, 0, 1), np.array(0.5, dtype=np.float32)),
    "Pad reflect": one("Pad", IMAGE, whole(0, 0, 1, 2, 0, 0, 0, 1), mode="reflect"),
    "Pad edge": one("Pad", IMAGE, whole(0, 0, 1, 2, 0, 0, 0, 1), mode="edge"),
    "Pad wrap": one("Pad", IMAGE, whole(0, 0, 1, 2, 0, 0, 0, 1), mode="wrap", opset=19),
    "GatherND": one("GatherND", (3, 4), np.array([[0, 1], [-1, 2]], dtype=np.int64)),
    "Trilu": one("Trilu", (2, 4, 4), np.array(1, dtype=np.int64)),
    "Mod": one("Mod", IMAGE, numbers(5), fmod=1),
    "Range": model([node("Range", "a", "b", "c", to="r"), node("Mul", "x", "r")], (3, 4), a=np.float32(3), b=np.float32(-1),
                   c=np.float32(-1)),
    "Pad-2": one("Pad", IMAGE, opset=9, pads=[0, 0, 1, 2, 0, 0, 0, 1], value=0.25),
    "DepthToSpace crd": one("DepthToSpace", IMAGE, blocksize=2, mode="CRD"),
    "Upsample": one("Upsample", IMAGE, np.array([1, 1, 2, 3], dtype=np.float32), opset=9, mode="nearest"),
    "Softmax-11": one("Softmax", IMAGE, opset=11, axis=1),
    "ReduceSum axes": one("ReduceSum", IMAGE, whole(1, -1), keepdims=0),
    "ReduceMean-11": one("ReduceMean", IMAGE, opset=11, axes=[2, 3]),
    "Einsum": one("Einsum", (2, 3, 4), numbers(4, 5), equation="bij,jk->bki"),
    "Where": model([node("Where", "c", "x", "d")], (3, 4), c=RNG.random((3, 4)) > 0.5, d=numbers(4)),
    "Shape": model(
        [node("Shape", "x", to="s"), node("Gather", "s", "zero", to="n"), node("Unsqueeze", "n", "first", to="m"),
         node("Concat", "m", "rest", to="t", axis=0), node("Reshape", "x", "t")],
        ("batch", 4, 6, 5), zero=whole(0)[0], first=whole(0), rest=whole(-1)),
    "ConstantOfShape": model(
        [node("Shape", "x", to="s"), node("ConstantOfShape", "s", to="o", value=numpy_helper.from_array(numbers(1))),
         node("Add", "x", "o")], (3, 4)),
}  # fmt: skip
COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")
for how, mode in itertools.product(COORDINATES, ("nearest", "linear")):
    factors = np.array([1, 1, 2, 1.5], dtype=np.float32)
    CASES[f"Resize {mode} {how}"] = one("Resize", IMAGE, None, factors, mode=mode, coordinate_transformation_mode=how)


GELU = [node("Div", "x", "root", to="a"), node("Erf", "a", to="b"), node("Add", "b", "one", to="c")]
SQUARES = [node("Pow", "x", "two", to="p"), node("ReduceMean", "p", "last", to="m"), node("Add", "m", "eps", to="e")]
#: networks as exporters write them, whose bound is compared with their slopes
WRITTEN = {
    "swish": model([node("Sigmoid", "x", to="s"), node("Mul", "x", "s")], ("n", 5), 13),
    "gelu": model([*GELU, node("Mul", "x", "c", to="d"), node("Mul", "d", "half")], ("n", 5), 13,
                  root=scalar(math.sqrt(2)), one=scalar(1), half=scalar(0.5)),
    "softplus with a threshold": model(
        [node("Softplus", "x", to="s"), node("Greater", "x", "t", to="g"), node("Where", "g", "x", "s")],
        ("n", 5), t=scalar(20)),
    "root mean square": model(
        [*SQUARES, node("Sqrt", "e", to="r"), node("Reciprocal", "r", to="i"), node("Mul", "x", "i")],
        ("n", 3, 5), 18, two=scalar(2), last=whole(-1), eps=scalar(0.1)),
}  # fmt: skip
CASES |= WRITTEN
#: operators that meet constants only, or that onnxruntime does not compare
UNTESTED = {
    "Constant", "Cast", "GreaterOrEqual", "Asin", "Acos", "Atanh", "Acosh", "Equal", "Size", "Less", "LessOrEqual",
    "And", "Or", "Not",
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_every_operator_computes_what_onnxruntime_does(name: str) -> None:
    network = read_onnx(CASES[name])
    x = numbers(*[n or 2 for n in network.graph.inputs["x"]])
    expected = run(CASES[name], x)
    with torch.no_grad():
        results = network(torch.from_numpy(x))
    results = results if isinstance(results, tuple) else (results,)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5), np.abs(ours.numpy() - theirs).max()


def test_every_operator_of_the_table_is_among_the_cases() -> None:
    ran = {made.op_type for data in CASES.values() for made in onnx.ModelProto.FromString(data).graph.node}
    assert set(known_operators()) - ran == UNTESTED


@pytest.mark.parametrize("name", WRITTEN)
def test_what_exporters_write_is_bounded(name: str) -> None:
    network = read_onnx(WRITTEN[name])
    (shape,) = network.input_shapes
    bound = eq.lipschitz_bound(network, torch.zeros(shape)).upper
    network = network.double()
    for point in torch.from_numpy(RNG.normal(size=(20, *shape))):
        jacobian = torch.func.jacrev(network)(point).reshape(-1, point.numel())
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound * (1 + 1e-9)


def deep() -> bytes:
    constants = {"w": numbers(8, 6), "b": numbers(8), "v": numbers(8, 3)}
    nodes = [
        node("Flatten", "x", to="f"), node("Gemm", "f", "w", "b", to="h", transB=1), node("Relu", "h", to="r"),
        node("MatMul", "r", "v"),
    ]  # fmt: skip
    return model(nodes, ("n", 2, 3), 13, **constants)


@pytest.mark.parametrize("how", [{"dynamo": True}, {"dynamo": False}], ids=["dynamo", "script"])
@pytest.mark.filterwarnings("ignore")
def test_a_bound_of_an_onnx_network_is_the_bound_of_the_same_module(how: dict[str, bool], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    plain = nn.Sequential(nn.Linear(20, 30), nn.SiLU(), nn.Linear(30, 9), nn.Softplus(), nn.Linear(9, 4)).eval()
    x = torch.randn(1, 20)
    torch.onnx.export(plain, (x,), str(tmp_path / "net.onnx"), verbose=False, **how)
    network = load_onnx(tmp_path / "net.onnx")
    assert torch.allclose(network(x), plain(x), atol=1e-5)
    assert eq.lipschitz_bound(network, x).upper == pytest.approx(eq.lipschitz_bound(plain, x).upper, rel=1e-3)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "ball"),
    [("acasxu-2-1", None), ("acopf-14", 1.0), ("cifar-deep-kw", None), ("controller-cart-pole", None),
     ("controller-quadrotor", None), ("lyapunov-quadrotor2d", 1.0), ("malware-linear-25", None), ("rul-cnn-small-20", None),
     ("safenlp-medical", None), ("tiny-yolo", None), ("vit-ibp-3-3-8", 1.0)],
)  # fmt: skip
def test_competition_files_have_bounds_that_hold(name: str, ball: float | None, data_dir: Path, equipoise: Any) -> None:
    path = data_dir / "onnx" / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the data folder")
    network = load_onnx(path)
    example = network.examples()[0]
    x = torch.from_numpy(numbers(*example.shape))
    assert np.allclose(run(path.read_bytes(), x.numpy())[0], network(x).numpy(), rtol=1e-4, atol=1e-4)
    if ball is not None:
        with pytest.raises(eq.Refused, match="ball"):
            eq.lipschitz_bound(network, example)
    report = eq.lipschitz_bound(network, example, ball=ball)
    audit = equipoise("audit", path, "--json", *(("--ball", ball) if ball else ()))
    assert audit.json["log_upper"] == pytest.approx(report.log_upper, rel=1e-9)
    if example.numel() < 100:
        point = x.double() / max(1.0, float(x.norm())) * (ball or 1.0)
        jacobian = torch.func.jacrev(network.double())(point)
        assert float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2)) <= report.upper


def changed(change: Any) -> bytes:
    return edited(deep(), change)


TALL, FLAT = numbers(2**17, 1), numbers(1, 2**13)
GROWING = [node("Expand", f"h{i}" if i else "x", f"s{i}", to=f"h{i + 1}", name=f"grow_{i}") for i in range(7)]
CHAIN = ["x", *[f"h{i}" for i in range(10_000)], "y0"]
BODY = helper.make_graph([node("Identity", "c", to="d")], "body", [], [])


def stating(*shape: int, name: str = "y0") -> bytes:
    """The file states this shape for a value."""

    def change(made: Any) -> None:
        made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
        del made.graph.output[:]
        stated = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("y0", None), (name, shape))]
        made.graph.output.append(stated[name == "y0"])
        made.graph.value_info.extend(stated[1:] if name != "y0" else [])

    return changed(change)


def setting(record: Any, field: str, value: Any) -> bytes:
    """The network with one field of the record that is picked out of it changed."""
    return changed(lambda made: setattr(record(made), field, value))


REFUSED: dict[str, tuple[bytes, str]] = {
    "another output than it states": (stating(2, 4), "'y0' of the ONNX file has shape (2, 3)"),
    "another value than it states": (stating(2, 9, name="h"), "'h' of the ONNX file"),
    "ten thousand nodes": (
        model([node("Relu", a, to=b) for a, b in itertools.pairwise(CHAIN)], (1, 2)), "10,001 nodes"),
    "text": (b"not a model at all", "not an ONNX model"),
    "cut short": (deep()[:200], "ONNX"),
    "an unknown operator": (one("Unique", (2, 3)), "the_Unique"),
    "a foreign domain": (setting(lambda m: m.graph.node[2], "domain", "com.evil"), "com.evil"),
    "a constant that is too large": (
        changed(lambda m: m.graph.initializer[0].dims.__setitem__(0, 2**40)), "declares the shape"),
    "too few numbers": (changed(lambda m: m.graph.initializer[0].dims.__setitem__(0, 9)), "cannot be read"),
    "half precision": (setting(lambda m: m.graph.initializer[0], "data_type", 10), "element type FLOAT16"),
    "an old opset": (setting(lambda m: m.opset_import[0], "version", 6), "version 6"),
    "a name read before it is written": (changed(lambda m: m.graph.node[1].input.__setitem__(0, "later")), "'later'"),
    "a circle": (changed(lambda m: m.graph.node[2].output.__setitem__(0, "f")), "has a value already"),
    "an attribute nobody knows": (one("Relu", (2, 3), strange=1), "'strange'"),
    "an attribute of another operator": (one("Relu", (2, 3), pads=[1, 1]), "'pads'"),
    "an input too many": (one("LayerNormalization", (2, 3), *[numbers(3)] * 3), "the_LayerNormalization"),
    "places of maxima": (one("MaxPool", (1, 1, 4), kernel_shape=[2], outputs=2), "not computed"),
    "training mode": (one("BatchNormalization", IMAGE, *[numbers(4) ** 2] * 4, training_mode=1), "training mode"),
    "a bomb": (one("Expand", (1, 1), whole(2**20, 2**20)), "entries"),
    "weights of a resampling": (one("Resize", (1, 1, 2**15), None, None, whole(1, 1, 2**15 + 1), mode="linear"), "the_Resize"),
    "a product that is too large": (model([node("MatMul", "x", "w")], TALL.shape, w=FLAT), "the_MatMul"),
    "constants that grow": (
        model([node("Add", "a", "b", to="s"), node("Mul", "x", "s")], (1, 1), a=TALL, b=FLAT), "the_Add"),
    "many large results": (
        model([*GROWING, node("ReduceSum", "h7")], (1, 1), **{f"s{i}": whole(2**14, 2**14) for i in range(7)}), "grow_4"),
    "a dimension that overflows": (
        setting(lambda m: m.graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 2**63 - 1), "declares"),
    "an index outside": (one("Gather", (3, 4), whole(7)), "the_Gather"),
    "a shape that depends on the data": (model([node("Reshape", "x", "x")], (2,)), "the_Reshape"),
    "windows without pixels": (one("MaxPool", (1, 1, 4, 4), kernel_shape=[0, 0]), "the_MaxPool"),
    "more pieces than can be listed": (one("Split", (1, 3), outputs=999), "the_Split"),
    "NaN": (model([node("Add", "x", "c")], (2,), c=np.full(2, np.nan, np.float32)), "NaN"),
    "a branch": (model([node("If", "c", then_branch=BODY, else_branch=BODY)], (2,), c=np.array(True)), "steps written out"),
}  # fmt: skip


def specialized(data: bytes) -> OnnxNetwork:
    network = read_onnx(data)
    return network.specialize(*network.examples())


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_one_sentence(name: str, caplog: pytest.LogCaptureFixture) -> None:
    data, words = REFUSED[name]
    with pytest.raises(eq.EquipoiseError) as caught:
        specialized(data)(*read_onnx(data).examples())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not caplog.records  # PyTorch logs tracebacks of what it raises


def test_a_network_that_differs_from_onnxruntime_is_refused() -> None:
    data = deep()
    network = OnnxNetwork(read_onnx(data).graph, data)
    network.specialize(*network.examples())
    other = edited(data, lambda m: m.graph.initializer[1].CopyFrom(numpy_helper.from_array(numbers(8), "b")))
    with pytest.raises(eq.Refused, match="other results than onnxruntime"):
        OnnxNetwork(read_onnx(data).graph, other).specialize(*network.examples())


def test_a_refused_operation_names_the_onnx_node() -> None:
    with pytest.raises(eq.Refused, match="the_Floor"):
        eq.lipschitz_bound(read_onnx(one("Floor", (1, 3))), torch.zeros(1, 3))


def stored_beside(folder: Path, **changes: str) -> Path:
    """A dense layer whose weight lies in weights.bin, or where `changes` say."""

    def move(made: Any) -> None:
        tensor = made.graph.initializer[0]
        (folder / "weights.bin").write_bytes(b"\0" * 4 + tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "weights.bin", "offset": "4", "length": "24", **changes}.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value

    data = edited(model([node("Gemm", "x", "w")], ("n", 3), w=numbers(3, 2)), move)
    (folder / "net.onnx").write_bytes(data)
    return folder / "net.onnx"


def test_weights_in_a_file_beside_the_network_are_read(tmp_path: Path) -> None:
    path = stored_beside(tmp_path)
    x = numbers(2, 3)
    assert np.allclose(ort.InferenceSession(str(path)).run(None, {"x": x})[0], load_onnx(path)(torch.from_numpy(x)))


@pytest.mark.parametrize(("change", "words"), [
    *[
        ({"location": name}, "only files in the folder")
        for name in ("../weights.bin", "w" * 5000, "sub\\w", "..", "")
    ],
    ({"location": "link.bin"}, "a link"),
    ({"location": "missing.bin"}, "cannot read"),
    ({"location": "folder"}, "not a regular file"),
    *[(change, "24 bytes") for change in ({"offset": "-4"}, {"offset": "1e3"}, {"length": "20"})],
    ({"offset": "8"}, "ends after 20"),
])  # fmt: skip
def test_weights_elsewhere_are_refused(tmp_path: Path, change: dict[str, str], words: str) -> None:
    (tmp_path / "link.bin").symlink_to("weights.bin")
    (tmp_path / "folder").mkdir()
    with pytest.raises(eq.EquipoiseError, match=words):
        load_onnx(stored_beside(tmp_path, **change))
