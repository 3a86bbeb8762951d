"""Files that try to run code, to fill the memory or to be something else: refused in one sentence, and nothing happens."""

import io
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.checkpoints import load_checkpoint, load_model, register_model, save_checkpoint
from equipoise.core import EquipoiseError
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn import models

CANARY = "canary-was-here"


class Function(nn.Module):
    def __init__(self, function, dense=None):
        super().__init__()
        self.function, self.dense = function, dense or nn.Identity()

    def forward(self, x, *args):
        return self.function(self.dense(x), *args)


def exported(model, *inputs, **options) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model.eval(), inputs, **options), buffer)
    return buffer.getvalue()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


@pytest.fixture(scope="module")
def plain() -> bytes:
    return exported(net(), torch.zeros(2, 3))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rewritten(data: bytes, entry: str, change) -> bytes:
    """The archive with `change(content)` applied to the entries whose name ends so."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, change(content) if info.filename.endswith(entry) else content)
    return out.getvalue()


def opened(data: bytes, **options):
    Path("file.pt2").write_bytes(data)
    return load_model("file.pt2", **options)


def edited(data: bytes, change, entry: str = "models/model.json") -> bytes:
    def rewrite(content: bytes) -> str:
        document = json.loads(content)
        change(document)
        return json.dumps(document)

    return rewritten(data, entry, rewrite)


TOUCH = f"__import__('pathlib').Path('{CANARY}').touch()"


def renamed(document, old: str, new: str) -> None:
    """Replace a name everywhere, as a writer of files would."""
    text = json.dumps(document).replace(json.dumps(old), json.dumps(new))
    document.clear()
    document.update(json.loads(text))


def called(target: str, *arguments):
    """The first operation calls this instead."""
    inputs = [{"name": "", "arg": argument, "kind": 1} for argument in arguments]
    return lambda d: d["graph_module"]["graph"]["nodes"][0].update(target=target, inputs=inputs)


#: what is written into the description of a program
DESCRIPTIONS = {
    "guard": lambda d: d["guards_code"].append(f"{TOUCH} is None"),
    "guard in a call": lambda d: d["guards_code"].append(f"L['input'].size({TOUCH})[0] == 2"),
    "name of an input": lambda d: renamed(d, "input", f"x={TOUCH}"),
    "name of a node": lambda d: renamed(d, "relu", f"relu = {TOUCH}; y"),
    "name in another script": lambda d: renamed(d, "relu", "ｒelu"),
    "name of a parameter": lambda d: renamed(d, "0.weight", f'0.x", {TOUCH}) #'),
    "dunder of a parameter": lambda d: renamed(d, "0.weight", "__class__.weight"),
    "a function as an argument": called("_operator.call", {"as_operator": "torch.os.system"}, {"as_string": f"touch {CANARY}"}),
    "anything under torch": called("torch.os.system", {"as_string": f"touch {CANARY}"}),
    "a library": called("torch.ops.load_library.default", {"as_string": "x.so"}),
    "a file": called("torch.ops.aten.from_file.default", {"as_string": "x"}),
    "a number for a type": called("torch.ops.aten.softmax.int", {"as_tensor": {"name": "input"}}, {"as_int": 0}, {"as_int": -1}),
    "no operation": called("torch.ops.aten.no_such_thing.default", {"as_int": 0}),
    "a graph as an argument": called("torch.ops.aten.relu.default", {"as_graph": {"name": TOUCH, "graph": {}}}),
    "an expression": lambda d: d["graph_module"]["graph"].update(sym_int_values={"s": {"as_expr": {"expr_str": TOUCH}}}),
    "an expression in a size": lambda d: next(iter(d["graph_module"]["graph"]["tensor_values"].values())).update(
        sizes=[{"as_expr": {"expr_str": TOUCH, "hint": None}}]
    ),
    "no graph": lambda d: d.pop("graph_module"),
}  # fmt: skip


def refused_in_a_sentence(work):
    with pytest.raises(EquipoiseError) as caught:
        work()
    assert not Path(CANARY).exists()
    assert "\n" not in str(caught.value)


def refused_or_the_same(work, expected):
    """What is not read cannot hurt: the file opens as if it were not there, or is refused in a sentence."""
    try:
        same = torch.equal(work(), expected)
    except EquipoiseError as error:
        same = "\n" not in str(error)
    assert same
    assert not Path(CANARY).exists()


#: fields that are never read
UNREAD = ("guard", "expression")


class Watch(TorchDispatchMode):
    """No kernel is called on numbers while a file is opened."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "linear" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_a_description_that_would_run_code_does_not(plain, case):
    x = torch.ones(2, 3)
    pickled = rewritten(plain, "sample_inputs/model.pt", lambda _: b"no pickle at all")

    def work():
        with Watch():
            loaded = opened(edited(pickled, DESCRIPTIONS[case]))
        return loaded.module()(x)

    if any(word in case for word in UNREAD):
        refused_or_the_same(work, net()(x))
    else:
        refused_in_a_sentence(work)


#: operations that write or read where their arguments say, without a check
TRUSTING = {
    "the backward of pooling": (
        lambda x, g, i: torch.ops.aten.max_pool2d_with_indices_backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, i),
        torch.rand(1, 1, 4, 4), torch.rand(1, 1, 2, 2), torch.full((1, 1, 2, 2), 10**6)),
    "pivots": (lambda a: torch.linalg.lu_solve(a, torch.full((3,), 10**6, dtype=torch.int32), a), torch.eye(3)),
    "a spectrum": (lambda x: torch.ops.aten._fft_c2r(x, [1], 0, 2**20), torch.zeros(2, 3, dtype=torch.complex64)),
    "sizes of weights": (lambda v, g: torch._weight_norm(v, g, 0), torch.ones(64, 3), torch.ones(1, 1)),
    "scales": (lambda x: torch.ops.aten.upsample_nearest1d(x, [8], 1e-30), torch.zeros(1, 1, 4)),
    "values without keys": (
        nn.functional.scaled_dot_product_attention,
        torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 64, 8)),
    "random places": (
        lambda x, u: torch.ops.aten.fractional_max_pool2d(x, [2, 2], [2, 2], u)[0],
        torch.zeros(1, 1, 4, 4), torch.full((1, 1, 2), 1e9)),
}  # fmt: skip


@pytest.mark.parametrize("case", TRUSTING)
def test_kernels_that_trust_their_arguments_are_never_called(case):
    function, *inputs = TRUSTING[case]
    data = exported(Function(function), *inputs)
    refused_in_a_sentence(lambda: opened(data))


#: programs that are read
PLAIN = {
    "attention": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), torch.randn(1, 3, 4)),
    "resizing": (nn.Sequential(nn.Upsample(scale_factor=2), nn.Upsample(size=5, mode="bilinear")), torch.randn(1, 2, 4, 4)),
    "several outputs": (Function(lambda x: torch.cat(x.split(2, 1)[::-1], 1)), torch.randn(1, 6)),
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN)
def test_ordinary_programs_are_read(case):
    model, x = PLAIN[case]
    assert torch.allclose(opened(exported(model, x)).module()(x), model.eval()(x), atol=1e-6)


def weight(**changes):
    return lambda d: d["config"]["0.weight"].update(changes)


def meta(**changes):
    return lambda d: d["config"]["0.weight"]["tensor_meta"].update(changes)


WEIGHTS = {
    "pickled": weight(use_pickle=True),
    "an opaque object": weight(path_name="opaque_obj_0"),
    "a path": weight(path_name="../constants/weight_0"),
    "numbers that are not there": weight(path_name="weight_77"),
    "beyond the end": meta(storage_offset={"as_int": 10**6}),
    "a negative stride": meta(strides=[{"as_int": -1}, {"as_int": 1}]),
    "as large as memory": meta(sizes=[{"as_int": 10**6}] * 2, strides=[{"as_int": 0}] * 2),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_are_views_of_what_is_stored(plain, case):
    refused_in_a_sentence(lambda: opened(edited(plain, WEIGHTS[case], "weights_config.json")))


def repeated(x):
    """‖f‖ = √5·‖W‖: what a rule takes from the shapes that the nodes state."""
    return x.repeat(1, 5).mean(1, keepdim=True) * torch.ones(1, 3)


def stated(name: str, axis: int, size: int):
    return lambda d: d["graph_module"]["graph"]["tensor_values"][name]["sizes"][axis].update(as_int=size)


STATED = {
    "one number where twenty are": stated("repeat", 1, 1),
    "a batch inside": stated("linear", 0, 64),
    "another input": stated("x", 1, 400),
    "another type": lambda d: d["graph_module"]["graph"]["tensor_values"]["linear"].update(dtype=8),
}


@pytest.mark.parametrize("case", STATED)
def test_shapes_that_the_nodes_do_not_have_are_no_ground_for_a_bound(case):
    data = exported(Function(repeated, nn.Linear(4, 4)), torch.zeros(1, 4))
    upper = lipschitz_bound(opened(data).model).upper
    assert upper > 0
    bad = edited(data, STATED[case])
    refused_or_the_same(lambda: torch.tensor(lipschitz_bound(opened(bad).model).upper), torch.tensor(upper))


BOMBS = {
    "a constant": lambda x: x + torch.ones(60_000, 60_000).sum() * 0,
    "numbers in a row": lambda x: x + torch.arange(3 * 10**9)[:4],
    "products": lambda x: x + (torch.ones(40_000, 2) @ torch.ones(2, 40_000)).sum() * 0,
    "an expansion": lambda x: (x[:, :1].expand(1, 10**10) + 1)[:, :4],
}


@pytest.mark.parametrize("case", BOMBS)
def test_programs_that_fill_the_memory_are_refused_before_they_do(case):
    data = exported(Function(BOMBS[case], nn.Linear(4, 4)), torch.zeros(1, 4))
    with pytest.raises(EquipoiseError, match="GiB at once"):
        lipschitz_bound(opened(data).model)


class Reshaping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return self.layer(x.reshape(2 * x.shape[0], 3)).reshape(x.shape[0], 8)


@pytest.fixture(scope="module")
def dynamic() -> bytes:
    return exported(Reshaping(), torch.zeros(5, 2, 3), dynamic_shapes=({0: torch.export.Dim("batch")},))


@pytest.mark.parametrize("batch", [1, 7])
def test_a_dynamic_batch_is_fixed_and_its_expressions_are_never_evaluated(dynamic, batch):
    loaded = opened(dynamic, batch=batch)
    assert loaded.input_shape == (2, 3)
    x = torch.randn(batch, 2, 3)
    assert torch.equal(loaded.module()(x), Reshaping()(x))


def symbols(text):
    """Put this where the sizes are written."""

    def change(d):
        for item in d["graph_module"]["graph"]["sym_int_values"].values():
            item["as_expr"]["expr_str"] = text

    return change


def limits(least, most=None):
    limit = {"min_val": least, "max_val": most}
    return lambda d: d.update(range_constraints=dict.fromkeys(d["range_constraints"], limit))


SYMBOLS = {
    "code": symbols(TOUCH),
    "code as an argument": symbols(f"Mul(Integer(2), {TOUCH})"),
    "another symbol": symbols("Symbol('s1000', integer=True)"),
    "a symbol that is code": lambda d: d.update(range_constraints={TOUCH: {"min_val": 0}}),
    "a huge power": symbols("Pow(Integer(10), Integer(1000000000))"),
    "a method": symbols("Symbol('s77').__class__"),
    "wrong sizes": symbols("Integer(3)"),
    "an empty range": limits(5, 3),
    "a batch that fills the memory": limits(10**10),
    "no graph": lambda d: d.update(graph_module={"graph": []}),
}


@pytest.mark.parametrize("case", SYMBOLS)
def test_expressions_are_never_evaluated(dynamic, case):
    x = torch.randn(3, 2, 3)
    refused_or_the_same(lambda: opened(edited(dynamic, SYMBOLS[case]), batch=3).module()(x), Reshaping()(x))


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_checkpoint(tmp_path / "net", models.build("mlp", widths=[4], in_features=3), models.factory("mlp"),
                           {"widths": [4], "in_features": 3}, (3,))  # fmt: skip


def rewrite_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")


def config(**changes) -> str:
    whole = {"factory": models.factory("mlp"), "arguments": {"widths": [4], "in_features": 3}, "input_shape": [3]}
    return json.dumps({**whole, **changes})


COMMAND = {"spec": "os:system", "arguments": {"command": f"touch {CANARY}"}}
CONFIGS = {
    "any command": config(factory="equipoise.checkpoints:load_factory", arguments=COMMAND),
    "any file": config(factory="equipoise.core.files:atomic_write", arguments={"path": CANARY, "content": "x"}),
    "another name of the table": config(factory="equipoise.nn.models:build", arguments={"name": "mlp"}),
    "a full-width letter": config(factory="equipoise.nn.models:ｍlp"),
    "a huge width": config(arguments={"widths": [2**30], "in_features": 2**30}),
    "many layers": config(arguments={"widths": [30000] * 4000, "in_features": 3}),
    "many small layers": config(factory=models.factory("sll"), arguments={"depth": 2400, "channels": 4, "hidden": 16}),
    "a huge number": config(arguments={"widths": [10**400], "in_features": 3}),
    "an argument it has not": config(arguments={"no_such": 1}),
    "dunder argument": config(arguments={"__class__": 1}),
    "a text for a number": config(arguments={"widths": "os:system"}),
    "twice": '{"factory": "equipoise.nn.models:mlp", "factory": "equipoise.nn.models:cnn"}',
    "deep": "[" * 100_000 + "]" * 100_000,
    "nothing": "",
    "a strange shape": config(input_shape=["os", -1]),
    "a huge shape": config(input_shape=[10**30]),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_names_registered_models_with_plain_arguments(folder, case):
    rewrite_config(folder, CONFIGS[case])
    refused_in_a_sentence(lambda: load_checkpoint(folder))


def test_a_changed_checkpoint_is_noticed(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"input_shape"', '"dropout_": 0,\n  "input_shape"'))
    with pytest.raises(EquipoiseError, match="changed after it was written"):
        load_checkpoint(folder)
    (folder / "config.json").write_text(text)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-3] ^= 4
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(EquipoiseError, match="digest"):
        load_checkpoint(folder)
    os.truncate(folder / "config.json", 5 * 10**9)
    with pytest.raises(EquipoiseError, match="longer than"):
        load_checkpoint(folder)
    for name in ("config.json", "model.safetensors"):
        for make in (lambda path: path.symlink_to("/dev/zero"), os.mkfifo):
            (folder / name).unlink()
            make(folder / name)
            with pytest.raises(EquipoiseError, match="not a regular file"):
                load_checkpoint(folder)
        (folder / name).unlink()
        rewrite_config(folder, config())  # by hand, without a digest


HEADERS = {
    "too long": (2**62).to_bytes(8, "little") + b"{}",
    "no JSON": (2).to_bytes(8, "little") + b"xx",
    "a name twice": (lambda h: len(h).to_bytes(8, "little") + h)(b'{"a":{},"a":{}}'),
    "empty": b"",
    "offsets beyond the end": (lambda h: len(h).to_bytes(8, "little") + h)(
        b'{"0.weight":{"dtype":"F32","shape":[4,3],"data_offsets":[0,48]}}'
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_weights_file_is_one_sentence(folder, case):
    rewrite_config(folder, config())
    (folder / "model.safetensors").write_bytes(HEADERS[case])
    with pytest.raises(EquipoiseError):
        load_checkpoint(folder)


def test_half_precision_and_quantised_weights(folder):
    """Half precision is exact in float32; eight bits are another network; programs in half precision are refused."""
    rewrite_config(folder, config())
    weights = load_checkpoint(folder)[0].state_dict()
    for dtype in (torch.float16, torch.bfloat16):
        save_file({k: v.to(dtype) for k, v in weights.items()}, folder / "model.safetensors")
        assert {p.dtype for p in load_checkpoint(folder)[0].parameters()} == {torch.float32}
    save_file({k: v.to(torch.int8) for k, v in weights.items()}, folder / "model.safetensors")
    with pytest.raises(EquipoiseError, match="quantised weights are not read"):
        load_checkpoint(folder)
    for dtype in (torch.float16, torch.bfloat16):
        torch.export.save(torch.export.export(net().to(dtype), (torch.zeros(2, 3, dtype=dtype),)), "half.pt2")
        with pytest.raises(EquipoiseError, match=r"export model\.float\(\)"):
            load_model("half.pt2")


def test_own_models_are_registered_or_come_with_an_installed_package(tmp_path, install):
    """An entry point is loaded when a file names it, and not before."""
    model, folder = nn.Linear(3, 2).eval(), tmp_path / "own"
    with pytest.raises(EquipoiseError, match="no registered model"):
        save_checkpoint(folder, model, "tests-linear")
    register_model("tests-linear", lambda width=3: nn.Linear(width, 2))
    save_checkpoint(folder, model, "tests-linear", {"width": 3})
    assert torch.equal(load_checkpoint(folder)[0](torch.ones(1, 3)), model(torch.ones(1, 3)))

    source = f"from pathlib import Path\nfrom torch import nn\nPath('{CANARY}').touch()\ndef linear(): return nn.Linear(3, 2)\n"
    install("other_models", source, "models", {"other-linear": "linear", "other-bad": "gone"})
    for name, words in (("other_models:linear", "no registered model"), ("other-bad", "failed with")):
        assert not Path(CANARY).exists()
        rewrite_config(folder, json.dumps({"factory": name}))
        with pytest.raises(EquipoiseError, match=words):
            load_checkpoint(folder)
    rewrite_config(folder, json.dumps({"factory": "other-linear"}))
    assert isinstance(load_checkpoint(folder)[0], nn.Linear)
