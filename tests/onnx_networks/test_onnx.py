"""ONNX networks: every operator against onnxruntime, the files of a verification competition, hostile files."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.onnx import OnnxNetwork, known_operators, load_onnx, read_onnx
from equipoise.onnx.runtime import require_same_results

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)
IMAGE = (2, 4, 6, 5)


def numbers(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def whole(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def model(
    nodes: list[Any], shape: tuple[Any, ...], constants: dict[str, np.ndarray], opset: int, outputs: int = 1
) -> bytes:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(outputs)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return made.SerializeToString()


def one(
    kind: str, shape: tuple[int, ...], *constants: Any, opset: int = 17, outputs: int = 1, **attributes: Any
) -> bytes:
    """A graph of one node that reads x and the constants (None: left out)."""
    names = ["x", *["" if c is None else f"c{i}" for i, c in enumerate(constants)]]
    node = helper.make_node(kind, names, [f"y{i}" for i in range(outputs)], name=f"the_{kind}", **attributes)
    return model([node], shape, {f"c{i}": c for i, c in enumerate(constants) if c is not None}, opset, outputs)


UNARY = [
    "Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Exp", "Softplus", "Softsign", "HardSwish", "Floor", "Ceil", "Round", "Sign",
    "Identity", "Sin", "Cos", "Sinh", "Cosh", "Tan", "Atan", "Asinh", "Erf", "LeakyRelu", "Elu", "Celu", "Selu", "HardSigmoid",
    "ThresholdedRelu", "Reciprocal", "GlobalAveragePool", "GlobalMaxPool", "Dropout", "Transpose", "Softmax", "LogSoftmax",
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp", "Squeeze",
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
    "Log of squares": model(
        [helper.make_node("Mul", ["x", "x"], ["s"]), helper.make_node("Log", ["s"], ["l"]),
         helper.make_node("Sqrt", ["s"], ["r"]),
         helper.make_node("Sum", ["l", "r", "x"], ["y0"])], IMAGE, {}, 17),
    "Add": one("Add", IMAGE, numbers(4, 1, 1)),
    "Sub": one("Sub", IMAGE, numbers(6, 5)),
    "Mul": one("Mul", IMAGE, numbers(5)),
    "Div": one("Div", IMAGE, numbers(4, 1, 1)),
    "Min": one("Min", IMAGE, numbers(5), numbers(1)),
    "Max": one("Max", IMAGE, numbers(6, 1)),
    "Mean": one("Mean", IMAGE, numbers(6, 1), numbers(5)),
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
                         pads=[1, 0, 1, 1], output_padding=[1, 0]),
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
    "GatherElements": one("GatherElements", (3, 4), np.array([[0, -1, 2], [1, 1, 1], [3, 0, 2]], dtype=np.int64), axis=1),
    "CumSum": one("CumSum", (3, 4), np.array(1, dtype=np.int64)),
    "CumSum backwards": one("CumSum", (3, 4), np.array(-1, dtype=np.int64), exclusive=1, reverse=1),
    "GatherND": one("GatherND", (3, 4), np.array([[0, 1], [-1, 2]], dtype=np.int64)),
    "ScatterElements": one("ScatterElements", (3, 4), np.array([[0, -1]], dtype=np.int64), numbers(1, 2), axis=1),
    "ScatterElements add": one("ScatterElements", (3, 4), np.array([[0, 0]], dtype=np.int64), numbers(1, 2), axis=1,
                               reduction="add", opset=18),
    "ScatterElements max": one("ScatterElements", (3, 4), np.array([[0, 0]], dtype=np.int64), numbers(1, 2), axis=1,
                               reduction="max", opset=18),
    "Scatter": one("Scatter", (3, 4), np.array([[0, 1]], dtype=np.int64), numbers(1, 2), axis=1, opset=10),
    "ScatterND": one("ScatterND", (3, 4), np.array([[0], [2]], dtype=np.int64), numbers(2, 4)),
    "Trilu": one("Trilu", (2, 4, 4), np.array(1, dtype=np.int64), upper=1),
    "Compress": one("Compress", (3, 4), np.array([True, False, True]), axis=0),
    "GridSample": one("GridSample", IMAGE, np.float32(RNG.random((2, 3, 3, 2)) * 2 - 1)),
    "GridSample nearest": one("GridSample", IMAGE, np.float32(RNG.random((2, 3, 3, 2)) * 2 - 1), mode="nearest",
                              padding_mode="border", align_corners=1),
    "Col2Im": one("Col2Im", (1, 12, 9), whole(4, 4), whole(2, 2), opset=18),
    "Shrink": one("Shrink", (3, 4), lambd=0.3, bias=0.3),
    "Shrink hard": one("Shrink", (3, 4), lambd=0.3),
    "LRN": one("LRN", IMAGE, size=3, alpha=0.1),
    "LpNormalization": one("LpNormalization", (3, 4), axis=1),
    "RNN": one("RNN", (3, 2, 4), numbers(1, 5, 4), numbers(1, 5, 5), numbers(1, 10), hidden_size=5, outputs=2),
    "GRU": one("GRU", (3, 2, 4), numbers(2, 15, 4), numbers(2, 15, 5), numbers(2, 30), hidden_size=5, outputs=2,
               direction="bidirectional"),
    "GRU reset": one("GRU", (3, 2, 4), numbers(1, 15, 4), numbers(1, 15, 5), numbers(1, 30), hidden_size=5,
                     linear_before_reset=1, direction="reverse"),
    "LSTM": one("LSTM", (3, 2, 4), numbers(2, 20, 4), numbers(2, 20, 5), numbers(2, 40), hidden_size=5, outputs=3,
                direction="bidirectional"),
    "LSTM states": one("LSTM", (3, 2, 4), numbers(1, 20, 4), numbers(1, 20, 5), None, None, numbers(1, 2, 5),
                       numbers(1, 2, 5), hidden_size=5, outputs=3),
    "Expand": one("Expand", (3, 1), whole(2, 1, 4)),
    "Tile": one("Tile", (3, 2), whole(2, 3)),
    "Pad": one("Pad", IMAGE, whole(0, 0, 1, 2, 0, 1, 0, 1), np.array(0.5, dtype=np.float32)),
    "Pad reflect": one("Pad", IMAGE, whole(0, 0, 1, 2, 0, 0, 0, 1), mode="reflect"),
    "Pad edge": one("Pad", IMAGE, whole(0, 0, 1, 2, 0, 0, 0, 1), mode="edge"),
    "Pad-2": one("Pad", IMAGE, opset=9, pads=[0, 0, 1, 2, 0, 0, 0, 1], value=0.25),
    "DepthToSpace": one("DepthToSpace", IMAGE, blocksize=2),
    "DepthToSpace crd": one("DepthToSpace", IMAGE, blocksize=2, mode="CRD"),
    "SpaceToDepth": one("SpaceToDepth", (2, 3, 4, 6), blocksize=2),
    "Upsample": one("Upsample", IMAGE, np.array([1, 1, 2, 3], dtype=np.float32), opset=9, mode="nearest"),
    "Softmax-11": one("Softmax", IMAGE, opset=11, axis=1),
    "ReduceSum axes": one("ReduceSum", IMAGE, whole(1, -1), keepdims=0),
    "ReduceMean-11": one("ReduceMean", IMAGE, opset=11, axes=[2, 3]),
    "TopK": model([helper.make_node("TopK", ["x", "k"], ["y0", "places"], axis=1)], (3, 4), {"k": whole(2)}, 17),
    "Einsum": one("Einsum", (2, 3, 4), numbers(4, 5), equation="bij,jk->bki"),
    "Where": model([helper.make_node("Where", ["c", "x", "d"], ["y0"])], (3, 4),
                   {"c": RNG.random((3, 4)) > 0.5, "d": numbers(4)}, 17),
    "Shape": model(
        [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Gather", ["s", "zero"], ["n"]),
         helper.make_node("Unsqueeze", ["n", "first"], ["m"]), helper.make_node("Concat", ["m", "rest"], ["t"], axis=0),
         helper.make_node("Reshape", ["x", "t"], ["y0"])],
        ("batch", 4, 6, 5), {"zero": np.array(0, dtype=np.int64), "first": whole(0), "rest": whole(-1)}, 17),
    "ConstantOfShape": model(
        [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("ConstantOfShape", ["s"], ["o"], value=numpy_helper.from_array(
            np.array([2.0], dtype=np.float32))), helper.make_node("Add", ["x", "o"], ["y0"])], (3, 4), {}, 17),
}  # fmt: skip
for how in ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"):
    for mode in ("nearest", "linear", "cubic"):
        CASES[f"Resize {mode} {how}"] = one(
            "Resize",
            IMAGE,
            None,
            np.array([1, 1, 2, 1.5], dtype=np.float32),
            mode=mode,
            coordinate_transformation_mode=how,
        )


def run(data: bytes, x: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {session.get_inputs()[0].name: x}))


@pytest.mark.parametrize("name", CASES)
def test_every_operator_computes_what_onnxruntime_does(name: str) -> None:
    network = read_onnx(CASES[name])
    x = numbers(*[n if n > 1 else 2 if n == 0 else n for n in network.graph.inputs["x"]])
    expected = run(CASES[name], x)
    with torch.no_grad():
        found = network(torch.from_numpy(x))
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert np.allclose(a.numpy(), b, rtol=1e-4, atol=1e-5), np.abs(a.numpy() - b).max()


def test_every_operator_of_the_table_is_among_the_cases() -> None:
    ran = {node.op_type for data in CASES.values() for node in onnx.ModelProto.FromString(data).graph.node}
    untested = set(known_operators()) - ran
    folded = {"Constant", "EyeLike", "Size", "Range", "Cast", "CastLike", "Mod", "Equal", "Greater", "GreaterOrEqual"}
    folded |= {"Asin", "Acos", "Atanh", "Acosh", "ArgMax", "ArgMin", "ReduceLogSum", "Swish", "RMSNormalization"}
    folded |= {"Less", "LessOrEqual", "And", "Or", "Xor", "Not", "GlobalLpPool", "GroupNormalization", "Sqrt"}
    folded |= {"If", "DFT", "STFT", "HannWindow", "HammingWindow", "BlackmanWindow", "LpPool", "OneHot", "NonZero"}
    folded |= {"ReverseSequence", "ReduceProd", "MeanVarianceNormalization", "Attention"}  # see test_exported
    assert untested <= folded, sorted(untested - folded)


def deep(opset: int = 13) -> bytes:
    constants = {"w": numbers(8, 6), "b": numbers(8), "v": numbers(8, 3)}
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"]),
        helper.make_node("Gemm", ["f", "w", "b"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y0"]),
    ]
    return model(nodes, ("n", 2, 3), constants, opset)


def test_a_bound_of_an_onnx_network_is_the_bound_of_the_same_module() -> None:
    network = read_onnx(deep())
    w, b, v = (network.get_buffer(f"constant_{i}") for i in range(3))
    first, last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3, bias=False)
    with torch.no_grad():
        first.weight.copy_(w), first.bias.copy_(b), last.weight.copy_(v.T)
    plain = torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.ReLU(), last).eval()
    x = torch.randn(1, 2, 3)
    network(x)
    assert eq.lipschitz_bound(network, x).upper == pytest.approx(eq.lipschitz_bound(plain, x).upper, rel=1e-3)


def test_batches_of_any_size_run_and_double_keeps_the_numbers() -> None:
    network = read_onnx(CASES["Shape"])
    x = torch.from_numpy(numbers(3, 4, 6, 5))
    assert network(x).shape == (3, 120)
    assert network(x[:1]).shape == (1, 120)
    wide = pickle.loads(pickle.dumps(read_onnx(deep()))).double()  # as it travels to other processes
    y = torch.randn(4, 2, 3, dtype=torch.float64)
    assert wide(y).dtype == torch.float64


def outside() -> bytes:
    made = onnx.ModelProto.FromString(deep())
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../../etc/passwd"
    return bytes(made.SerializeToString())


def edited(change: Any) -> bytes:
    made = onnx.ModelProto.FromString(deep())
    change(made)
    return bytes(made.SerializeToString())


def stating(*shape: int, name: str = "y0") -> Any:
    """The file states this shape for a value."""

    def change(made: Any) -> None:
        made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
        stated = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        if name == "y0":
            made.graph.output[0].CopyFrom(stated)
        else:
            made.graph.value_info.append(stated)

    return change


def chain(length: int) -> bytes:
    names = ["x", *[f"h{i}" for i in range(length - 1)], "y0"]
    return model([helper.make_node("Relu", [a], [b]) for a, b in itertools.pairwise(names)], (1, 2), {}, 17)


REFUSED: dict[str, tuple[bytes, str]] = {
    "another output than it states": (edited(stating(2, 4)), "'y0' of the ONNX file has shape (2, 3)"),
    "another rank than it states": (edited(stating(2)), "states (2,)"),
    "another value than it states": (edited(stating(2, 9, name="h")), "'h' of the ONNX file"),
    "ten thousand nodes": (chain(10_001), "10,001 nodes"),
    "weights of a resampling": (
        one("Resize", (1, 1, 2**15), None, None, whole(1, 1, 2**15 + 1), mode="linear"),
        "the_Resize",
    ),
    "text": (b"not a model at all", "not an ONNX model"),
    "empty": (b"", "not an ONNX model"),
    "cut short": (deep()[:200], "ONNX"),
    "an unknown operator": (one("Unique", (2, 3)), "the_Unique"),
    "a foreign domain": (edited(lambda m: setattr(m.graph.node[2], "domain", "com.evil")), "com.evil"),
    "constants outside the file": (outside(), "outside the file"),
    "a constant that is too large": (
        edited(lambda m: m.graph.initializer[0].dims.__setitem__(0, 2**40)),
        "declares the shape",
    ),
    "too few numbers": (edited(lambda m: m.graph.initializer[0].dims.__setitem__(0, 9)), "cannot be read"),
    "half precision": (edited(lambda m: setattr(m.graph.initializer[0], "data_type", 10)), "element type FLOAT16"),
    "an old opset": (edited(lambda m: setattr(m.opset_import[0], "version", 6)), "version 6"),
    "a name read before it is written": (edited(lambda m: m.graph.node[1].input.__setitem__(0, "later")), "'later'"),
    "a loop": (edited(lambda m: m.graph.node[2].output.__setitem__(0, "f")), "has a value already"),
    "an attribute nobody knows": (one("Relu", (2, 3), strange=1), "'strange'"),
    "an attribute named like an input": (one("Relu", (2, 3), x=1), "'x'"),
    "an attribute of another operator": (one("Relu", (2, 3), pads=[1, 1]), "'pads'"),
    "training mode": (
        one("BatchNormalization", IMAGE, *[numbers(4)] * 3, numbers(4) ** 2, training_mode=1),
        "training mode",
    ),
    "a bomb": (one("Expand", (1, 1), whole(2**20, 2**20)), "entries"),
    "a product that is too large": (
        model(
            [helper.make_node("MatMul", ["x", "w"], ["y0"], name="the_MatMul")],
            (2**17, 1),
            {"w": numbers(1, 2**13)},
            17,
        ),
        "the_MatMul",
    ),
    "constants that grow": (
        model(
            [helper.make_node("Add", ["a", "b"], ["s"], name="the_Add"), helper.make_node("Add", ["x", "s"], ["y0"])],
            (1, 1),
            {"a": numbers(2**17, 1), "b": numbers(1, 2**13)},
            17,
        ),
        "the_Add",
    ),
    "many large results": (
        model(
            [
                helper.make_node("Expand", ["x" if not i else f"h{i}", f"s{i}"], [f"h{i + 1}"], name=f"grow_{i}")
                for i in range(7)
            ]
            + [helper.make_node("ReduceSum", ["h7"], ["y0"])],
            (1, 1),
            {f"s{i}": whole(2**14, 2**14) for i in range(7)},
            17,
        ),
        "grow_4",
    ),
    "an input that is too large": (
        edited(lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 2**40)),
        "declares",
    ),
    "a dimension that overflows": (
        edited(lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[2], "dim_value", 2**63 - 1)),
        "declares",
    ),
    "an index outside": (one("GatherND", (3, 4), np.array([[7, 0]], dtype=np.int64)), "the_GatherND"),
    "an endless sequence": (one("RNN", (2000, 1, 1), numbers(1, 1, 1), numbers(1, 1, 1), hidden_size=1), "the_RNN"),
    "a cell of another kind": (
        one("RNN", (3, 1, 1), numbers(1, 1, 1), numbers(1, 1, 1), hidden_size=1, activations=["Affine"]),
        "the_RNN",
    ),
    "a shape that depends on the data": (
        model([helper.make_node("Reshape", ["x", "x"], ["y0"], name="the_Reshape")], (2,), {}, 17),
        "the_Reshape",
    ),
    "blocks without pixels": (one("DepthToSpace", (1, 4, 2, 2), blocksize=0), "the_DepthToSpace"),
    "windows without pixels": (one("MaxPool", (1, 1, 4, 4), kernel_shape=[0, 0]), "the_MaxPool"),
    "more pieces than can be listed": (
        model([helper.make_node("Split", ["x"], [f"y{i}" for i in range(999)], name="the_Split")], (1, 3), {}, 17),
        "the_Split",
    ),
    "NaN": (
        edited(
            lambda m: m.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((8, 6), np.nan, np.float32), "w"))
        ),
        "NaN",
    ),
}


def specialized(data: bytes) -> OnnxNetwork:
    network = read_onnx(data)
    return network.specialize(*network.examples())


def test_a_network_that_differs_from_onnxruntime_is_refused() -> None:
    data, inputs = deep(), {"x": torch.zeros(1, 2, 3)}
    network = specialized(data)
    require_same_results(network, data, inputs)
    with torch.no_grad():
        network.get_buffer("constant_1").add_(0.1)
    with pytest.raises(eq.Refused, match="other results than onnxruntime"):
        require_same_results(network, data, inputs)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_one_sentence(name: str, caplog: pytest.LogCaptureFixture) -> None:
    data, words = REFUSED[name]
    with pytest.raises(eq.EquipoiseError) as caught:
        specialized(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not caplog.records  # PyTorch logs tracebacks of what it raises


def test_a_refused_operation_names_the_onnx_node() -> None:
    network = read_onnx(one("Floor", (1, 3)))
    x = torch.zeros(1, 3)
    with pytest.raises(eq.Refused, match="the_Floor"):
        eq.lipschitz_bound(network, x)


def test_flipped_bytes_end_in_a_sentence_or_a_network(tmp_path: Path) -> None:
    data = deep()
    for _ in range(150):
        mutated = bytearray(data)
        for place in RNG.integers(0, len(data), RNG.integers(1, 4)):
            mutated[place] = RNG.integers(0, 256)
        with contextlib.suppress(eq.EquipoiseError):  # anything else fails the test
            specialized(bytes(mutated))


#: what each file of the competition gives: a bound on the whole space, or on a ball
FILES = {
    "acasxu-2-1": None, "acopf-14": 1.0, "cifar-deep-kw": None, "controller-cart-pole": None, "controller-quadrotor": None,
    "lyapunov-quadrotor2d": 1.0, "malware-linear-25": None, "rul-cnn-small-20": None, "safenlp-medical": None,
    "tiny-yolo": None, "vit-ibp-3-3-8": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_the_competition_are_bounded_and_the_bound_holds(name: str, data_dir: Path) -> None:
    path = data_dir / "onnx" / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the data folder")
    network, ball = load_onnx(path), FILES[name]
    example = network.examples()[0]
    x = torch.from_numpy(numbers(*example.shape))
    assert np.allclose(run(path.read_bytes(), x.numpy())[0], network(x).numpy(), rtol=1e-4, atol=1e-4)
    if ball is not None:
        with pytest.raises(eq.Refused, match="ball"):
            eq.lipschitz_bound(network, example)
    report = eq.lipschitz_bound(network, example, ball=ball)
    jacobian = torch.func.jacrev(network.double()) if example.numel() < 100 else None
    if jacobian is not None:
        point = x.double() / max(1.0, float(x.norm())) * (ball or 1.0)
        assert float(torch.linalg.matrix_norm(jacobian(point).reshape(-1, x.numel()), 2)) <= report.upper


def test_the_command_line_audits_an_onnx_file(tmp_path: Path) -> None:
    from equipoise.cli.audit import audit_report

    path = tmp_path / "net.onnx"
    path.write_bytes(deep())
    network = load_onnx(path)
    assert audit_report(str(path), rtol=1e-3).upper == eq.lipschitz_bound(network, network.examples(), rtol=1e-3).upper
    with pytest.raises(eq.InputError, match="weights"):
        audit_report(str(path), weights=tmp_path / "w.safetensors")
