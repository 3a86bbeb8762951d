"""Valid files of every kind the library reads, and how each is opened: what `equipoise selfcheck files` damages.

A subject makes its files in a folder and opens them again, giving a text that is equal exactly when the result is. `guarded`
subjects carry digests or checksums: an accident to them is noticed or changes nothing. The others (data, logs, recipes, bare
weights) have none; there another result is allowed, since it has another fingerprint or is plain text of the user.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equipoise.checkpoints import load_model, save_checkpoint
from equipoise.cli.norm import weight_rows
from equipoise.core import guarded
from equipoise.core.errors import EquipoiseError
from equipoise.core.files import Digest, digest_document
from equipoise.data import load_dataset
from equipoise.runs import AttackRow, certify, open_run
from equipoise.smoothing import read_log
from equipoise.train.journal import STATE, Position, claim, read_state, save_state

#: the inputs that networks are run on
PROBE = torch.linspace(-1, 1, 6).reshape(2, 3)


@dataclass(frozen=True)
class Subject:
    """A kind of file: how it is made, opened, and whether an accident to it must be noticed."""

    make: Callable[[Path], None]
    open: Callable[[Path], str]
    guarded: bool = True


def _network() -> nn.Module:
    from equipoise.nn.models import build

    torch.manual_seed(0)
    return build("mlp", in_features=3, widths=[4], num_classes=3).eval()


def _answer(source: str) -> str:
    loaded = load_model(source, batch=len(PROBE))
    with torch.no_grad():
        logits = guarded(lambda: loaded.module()(PROBE), "the network")
    return f"{Digest('answer').add('logits', logits)} {loaded.input_shape}"


def make_checkpoint(folder: Path) -> None:
    """A checkpoint directory."""
    arguments = {"in_features": 3, "widths": [4], "num_classes": 3}
    save_checkpoint(folder / "net", _network(), "equipoise.nn.models:mlp", arguments, (3,))


def make_program(folder: Path) -> None:
    """An exported program."""
    torch.export.save(torch.export.export(_network(), (PROBE,)), str(folder / "net.pt2"))


def make_dynamic(folder: Path) -> None:
    """An exported program whose batch is dynamic."""
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(_network(), (torch.cat([PROBE, PROBE]),), dynamic_shapes=shapes)
    torch.export.save(program, str(folder / "net.pt2"))


def make_run(folder: Path) -> None:
    """A certification run with attacks stored beside it."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(4, 3, generator=generator), torch.tensor([0, 1, 2, 0])
    settings: dict[str, Any] = {
        "sigma": 0.3,
        "n0": 10,
        "n": 40,
        "procedure": "lvm",
        "map": "softmax:1.0",
        "lipschitz": 3.0,
    }
    run = certify(_network(), (x, y), run_dir=folder / "run", **settings)
    run.add_attacks([AttackRow(id=i, epsilon=0.5, success=i == 1, distance=0.25) for i in (0, 1)])


def open_run_of(folder: Path) -> str:
    """Everything a report reads of a run."""
    run = open_run(folder / "run")
    derived = run.certificates()
    summary = run.summary().to_dict()
    summary.pop("seconds")
    plain = [
        run.ids,
        run.labels.tolist(),
        derived.prediction.tolist(),
        derived.radius.tolist(),
        summary,
    ]
    return digest_document([plain, [a.model_dump() for a in run.attacks()]])


def make_state(folder: Path) -> None:
    """A training state and its metrics."""
    with contextlib.ExitStack() as stack:
        claim(folder / "run", {"recipe": {}}, stack)
    history = [{"epoch": epoch, "accuracy": 0.5 + epoch / 10} for epoch in (1, 2)]
    position = Position(epoch=2, batch=0, step=7, history=history)
    save_state(folder / "run", {"model": _network().state_dict()}, position)


def open_state(folder: Path) -> str:
    """The tensors and the position."""
    state, position = read_state(folder / "run" / STATE)
    digest = Digest("state")
    for name in sorted(state["model"]):
        digest.add(name, state["model"][name])
    return f"{digest} {position}"


def make_data(folder: Path) -> None:
    """Arrays and bare weights."""
    from safetensors.torch import save_file

    pixels = (np.arange(2 * 3 * 32 * 32) % 251).astype(np.uint8)
    np.savez(folder / "a.npz", x=pixels.reshape(2, 3, 32, 32)[:, :, :4, :4], y=np.array([0, 1]))
    save_file({"w": torch.eye(3), "k": torch.ones(2, 1, 3, 3)}, folder / "w.safetensors")


def open_data(folder: Path) -> str:
    """Fingerprints and norms; each file is opened even where one before it is refused."""
    return _each(
        lambda: load_dataset(folder / "a.npz", layout="NCHW").fingerprint(),
        lambda: str(list(weight_rows(folder / "w.safetensors"))),
    )


def _each(*openers: Callable[[], str]) -> str:
    """All results; the first refusal is raised after everything was tried."""
    results, refusals = [], []
    for opener in openers:
        try:
            results.append(opener())
        except EquipoiseError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    return " ".join(results)


RECIPE = """\
name: example
model: {factory: 'equipoise.nn.models:mlp', arguments: {widths: [8]}}
data: {path: digits, limit: 64}
epochs: 1
optimizer: {lr: 1e-2}
projections: [{kind: norm, p: .inf}]
"""
LOG = "idx\tlabel\tpredict\tradius\tcorrect\ttime\n0\t1\t1\t0.25\t1\t0:00:01\n1\t2\t-1\t0.0\t0\t0:00:01\n"


def make_texts(folder: Path) -> None:
    """A recipe and a published log."""
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "log.tsv").write_text(LOG, encoding="utf-8")


def open_texts(folder: Path) -> str:
    """The recipe with its defaults, the model it names built, and the figures of the log."""
    from equipoise.checkpoints.builders import build_registered
    from equipoise.train import read_recipe

    def recipe() -> str:
        parsed = read_recipe(folder / "recipe.yaml")
        if parsed.model.factory.startswith("equipoise.nn.models:"):
            build_registered(
                parsed.model.factory, parsed.model.arguments, "the recipe", 10**6, 2000
            )
        return json.dumps(parsed.to_dict())

    return _each(recipe, lambda: str(read_log(folder / "log.tsv").average_radius()))


def make_onnx(folder: Path) -> None:
    """A small ONNX network."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((4, 3), np.float32), "w")
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    shapes = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, k]) for n, k in (("x", 3), ("y", 4))
    ]
    graph = helper.make_graph(nodes, "net", shapes[:1], shapes[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, str(folder / "net.onnx"))


#: what is damaged; a new format is a new row
SUBJECTS: dict[str, Subject] = {
    "checkpoint": Subject(make_checkpoint, lambda folder: _answer(str(folder / "net"))),
    "program": Subject(make_program, lambda folder: _answer(str(folder / "net.pt2"))),
    "dynamic program": Subject(make_dynamic, lambda folder: _answer(str(folder / "net.pt2"))),
    "run": Subject(make_run, open_run_of, guarded=False),
    "state": Subject(make_state, open_state),
    "data": Subject(make_data, open_data, guarded=False),
    "texts": Subject(make_texts, open_texts, guarded=False),
    "onnx": Subject(make_onnx, lambda folder: _answer(str(folder / "net.onnx")), guarded=False),
}
