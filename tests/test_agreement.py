"""Networks of other origin through audit, prove, attack and report: no two outputs contradict each other."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.checkpoints import load_model
from equipoise.report import collect
from equipoise.runs import open_run

pytestmark = pytest.mark.medium

SIZE = 16


class _Block(nn.Module):
    """A residual block with batch norms, as in the ResNets of CIFAR-10."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))

    def forward(self, x):
        return torch.relu(x + self.second(self.first(x)))


def _trained(net):
    """The network after a few steps on inputs whose class is written in their brightness."""
    x, y = _data(128)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(60):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def _data(count):
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(count) % 3
    x = 0.1 * torch.rand(count, 3, SIZE, SIZE, generator=generator)
    x[torch.arange(count), y] += 0.6
    return x, y


def _exported(net, folder):
    dims = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(_trained(net), (torch.zeros(2, 3, SIZE, SIZE),), dynamic_shapes=dims)
    torch.export.save(program, folder / "m.pt2")
    return folder / "m.pt2"


def _resnet(folder):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), _Block(8), nn.AvgPool2d(SIZE), nn.Flatten(), nn.Linear(8, 3)]
    return _exported(nn.Sequential(*layers), folder)


class _GPT2(nn.Module):
    """GPT-2 on patches instead of embedded tokens."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=2, use_cache=False)
        self.patches, self.body = nn.Conv2d(3, 16, 8, 8), transformers.GPT2Model(config)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.body(inputs_embeds=tokens).last_hidden_state.mean(1))


def _gpt2(folder):
    torch.manual_seed(0)
    return _exported(_GPT2(), folder)


def _onnx(folder):
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)]
    net = _trained(nn.Sequential(*layers))
    torch.onnx.export(net, (torch.zeros(1, 3, SIZE, SIZE),), folder / "m.onnx", dynamo=True)
    return folder / "m.onnx"


def _vit(folder):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=SIZE, patch_size=8,
        num_labels=3,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder / "vit")
    return folder / "vit"


@pytest.mark.parametrize("make", [_resnet, _onnx, _vit, _gpt2], ids=["resnet", "onnx", "vit", "gpt2"])
def test_no_two_outputs_contradict_each_other(equipoise, tmp_path, make):
    source = make(tmp_path)
    x, y = _data(6)
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    run = tmp_path / "run"

    network = load_model(source, batch=1).model
    forward = network.module() if isinstance(network, torch.export.ExportedProgram) else network
    shape = () if source.suffix else ("--input-shape", f"3,{SIZE},{SIZE}")
    audit = equipoise("audit", source, *shape, "--json")
    if audit.code == 2:  # refused: then the Python interface refuses it too
        with pytest.raises(eq.Refused):
            eq.lipschitz_bound(network, x[:1])
    else:
        assert audit.code == 0, audit.err
        assert audit.json["upper"] == pytest.approx(eq.lipschitz_bound(network, x[:1]).upper, rel=1e-6)
        reported = equipoise("report", "--audit", source, *shape, "-o", tmp_path / "audit.html", "--json")
        assert reported.json["audits"][0]["log_upper"] == audit.json["log_upper"]

    ran = equipoise("prove", source, "--data", tmp_path / "data.npz", "--run", run, "--effort", "fast", "--json")
    assert ran.code in (0, 1), ran.err
    results, summary = open_run(run).results(), open_run(run).summary()
    with torch.no_grad():
        answers = torch.cat([forward(image[None]) for image in x]).argmax(1)
    right = (answers == y).numpy()
    assert summary.clean == pytest.approx(right.mean())
    for status, is_right, radius in zip(results.status, right, results.radius, strict=True):
        assert status in (("certified", "right, not certified") if is_right else ("wrong", "failed"))
        assert (radius > 0) == (status == "certified")

    radii = eq.certified_radius(network, x[:1], y[:1], effort="fast")
    assert float(radii.radius[0]) == pytest.approx(results.radius[0] if right[0] else 0.0, rel=1e-3, abs=1e-12)

    attacked = equipoise("attack", run, "--steps", 5, "--json")
    assert attacked.code in (0, 1), attacked.err
    assert attacked.json["broken"] == []
    (series,) = [s for s in collect([run]).series if s.own]
    assert float(series.results.accuracy(0.0)) == summary.accuracy[0.0]
    page = tmp_path / "report.html"
    assert equipoise("report", run, "-o", page).code == 0
    assert json.dumps(results.status.count("certified")) in page.read_text()
