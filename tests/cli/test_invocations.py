"""Command lines as people mistype them and as programs break them: one sentence, never a traceback."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from equipoise.checkpoints import save_checkpoint
from equipoise.cli import app
from equipoise.nn import models

RECIPE = """\
model: {factory: 'equipoise.nn.models:mlp', arguments: {widths: [4]}}
data: {path: digits, limit: 32, test_limit: 16}
epochs: 1
metrics: {bound: false}
"""
OWN = """
import torch
def make():
    return torch.nn.Linear(3, 2)
def rows():
    return [{"a": torch.zeros(3), "b": i % 2, "c": "x"} for i in range(3)]
"""
#: command lines that work and are quick, or are refused at once; none that is long without one of its words
VALID = [
    "norm w.safetensors --rtol 0.1 --input-size 4,4 --json",
    "audit net --json",
    "audit net --rtol 0.1 --ball 1 --html out.html",
    "train recipe.yaml --set seed=1 --run-dir trained --cpu --json",
    "train --list --json",
    "certify net --data data.npz --sigma 0.5 --n 20 --set n0=10 --limit 2 --run run --json",
    "derive run --alpha 0.1 --procedure cohen --epsilon 0,0.5 --json",
    "export run out.csv --json",
    "certify net --data data.npz --sigma 0.5 --n 20 --set n0=10 --limit 2 --run named --json",
    "certify net --data alone.npz --sigma 0.5 --n 20 --set n0=10 --run unlabelled",
    'certify own:make --data own:rows --set columns=["a","b"] --sigma 0.5 --n 20 --set n0=10 --run mine --json',
    "certify pixels.pt2 --data photos --set size=[4,4] --mean 0.5 --std 2 --sigma 0.5 --n 20 --set n0=10 --run seen --json",
    "predict run --data data.npz --n 20 --alpha 0.1 --limit 2 --json",
    "predict seen --data photos --n 20",
    "norm parts --only a.* --json",
    "certify net --data data.npz --sigma 0.5 --n 20 --set target_radius=0.1 --shard 1/2 --run early",
    "merge run other -o joined",
    "attack run --epsilon 0.1 --steps 2 --limit 2 --json",
    "curvature net --data data.npz --limit 4 --seed 1 --json",
    "report run -o page.html",
    "reproduce --list --json",
    "reproduce dense-convergence --plan --dry-run --scale desk --seed 1 -o results --json",
    "reproduce -o results --page page.md",
    "selfcheck --minutes 0 --json",
    "selfcheck networks --minutes 0 --seed 3",
    "bench compare bench.json bench.json",
    "audit net.onnx --chain multipliers --html out.html",
    "audit own:make --input-shape 3 --weights w.safetensors",
    "prove net --data data.npz --norm linf --effort fast --seconds 1 --limit 1 --run sure",
    "train recipe.yaml --plan --json",
    "train recipe.yaml --from net --method sr --run-dir further",
    "scoreboard --data digits --small --minutes 0 --families bcop --losses la --seeds 1 --plan -o board --json",
    "report run sure --audit net -o page.html --json",
]
#: what takes the place of a word; no large counts, which would only take long
WORDS = [
    "", "-1", "0", "nan", "inf", "-inf", "1e999", "1e300", "0.5.1", "x", "ü", "--", "-", "---", "--no-such", "..", "/",
    "/dev/null", "nowhere", "a:b", "sys:exit", "os:getcwd", "torch.nn:Linear", ",", "1,2,,", "[]", "{}", "x" * 3000, "run", "net",
    "net.onnx", "bench.json", "empty", "folder.pt2", "folder.npz", "text.onnx", "sure",
    "data.npz", "alone.npz", "names.txt", "photos", "parts", "pixels.pt2", "own:rows",
    "recipe.yaml", "w.safetensors", "digits#no", "softmax:0", "auto", "ray", "cuda:77", "meta", "True", "'", '"',
    "\\", "\n", "%s", "$HOME", "*",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invocations")
    torch.manual_seed(0)
    arguments = {"in_features": 3, "widths": [4], "num_classes": 2}
    save_checkpoint(folder / "net", models.build("mlp", **arguments), "equipoise.nn.models:mlp", arguments, (3,))
    save_file({"w": torch.eye(3), "k": torch.ones(1, 1, 3, 3)}, folder / "w.safetensors")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "own.py").write_text(OWN)
    (folder / "parts").mkdir()
    for part in "ab":
        save_file({f"{part}.w": torch.eye(3)}, folder / "parts" / f"{part}.safetensors")
    (folder / "photos").mkdir()
    for i in range(3):
        Image.fromarray(np.full((5, 5), 60 * i, np.uint8)).save(folder / "photos" / f"{i}.png")
    pixels = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(
        torch.export.export(pixels, (torch.zeros(2, 1, 4, 4),), dynamic_shapes=shapes), folder / "pixels.pt2"
    )
    torch.onnx.export(pixels, (torch.zeros(1, 1, 4, 4),), folder / "net.onnx", dynamo=False)
    (folder / "bench.json").write_text('{"rows": []}')
    (folder / "empty").touch()
    (folder / "text.onnx").write_text("text")
    for name in ("folder.pt2", "folder.npz"):
        (folder / name).mkdir()
    np.savez(folder / "alone.npz", x=np.zeros((3, 3), np.float32))
    np.savez(folder / "data.npz", x=np.random.default_rng(0).random((4, 3), np.float32), y=np.array([0, 1, 0, 1]))
    return folder


def mutated(chance: random.Random) -> list[str]:
    words = chance.choice(VALID).split()
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(1, len(words)) if len(words) > 1 else 0
        how = chance.randrange(6)
        if how == 0:
            del words[at]
        elif how == 1:
            words.insert(at, words[at])
        elif how == 2:
            words.insert(at, chance.choice(WORDS))
        elif how == 3:
            other = chance.randrange(1, len(words)) if len(words) > 1 else 0
            words[at], words[other] = words[other], words[at]
        else:
            words[at] = chance.choice(WORDS)
        words = words or ["norm"]
    return words


def invoke(words: list[str]):
    wanted = next((word for word in words if not word.startswith("-")), "")
    return CliRunner().invoke(app.build(wanted=wanted), words)


def check(words: list[str]) -> None:
    done = invoke(words)
    quiet = done.exception is None or isinstance(done.exception, SystemExit)
    assert quiet, (words, repr(done.exception))
    assert done.exit_code in (0, 1, 2), words
    assert "Traceback" not in done.output, words
    if done.exit_code == 2 and "--json" in words and done.stdout:
        assert "error" in json.loads(done.stdout), words


def test_documents_have_the_keys_of_the_reference(place, monkeypatch):
    """What `--json` prints, command by command, beside the table of the site."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "hooks"))
    from commands import JSON

    monkeypatch.chdir(place)
    documented = {name: ", ".join(keys).split(", ") for names, keys in JSON.items() for name in names.split(", ")}
    lines = {line.split()[0]: line.split() for line in reversed(VALID) if line.split()[0] in documented}
    missing = set(documented) - set(lines)
    assert not missing
    last = ("derive", "attack", "predict", "report")  # they read the runs of the others
    for name in [*sorted(set(lines) - {*last, "merge"}), *last]:
        ran = invoke([word for word in lines[name] if word != "--json"] + ["--json"])
        assert sorted(json.loads(ran.stdout)) == sorted(documented[name]), (name, ran.stderr)


@pytest.mark.medium
@pytest.mark.parametrize("block", range(6))
def test_broken_command_lines_are_sentences(place, monkeypatch, block):
    monkeypatch.chdir(place)
    chance = random.Random(f"invocations {block}")
    for _ in range(10):
        check(mutated(chance))
