"""The example package in `examples/plugin`: installed as its own pyproject says, every entry point is found and used."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PLUGIN = Path(__file__).resolve().parents[1] / "examples" / "plugin"

USED = """
import torch
from torch import nn
import equipoise as eq
from equipoise_lab.experiments.runner import find
from equipoise_holder.layers import HolderConv2d
from equipoise_holder.rules import Bent

torch.manual_seed(0)
for scale in (1e-20, 1e20):
    layer = HolderConv2d(4, 6, 3, 2, padding=1, groups=2)
    layer.parametrizations.weight.original.data.mul_(scale)
    assert eq.spectral_norm(layer, input_size=(8, 8), rtol=1e-3).lower <= 1
net = nn.Sequential(nn.Linear(6, 6), Bent(), nn.Linear(6, 2)).eval()
upper = eq.lipschitz_bound(net, torch.zeros(1, 6)).upper
a, b = torch.randn(2, 2000, 6)
with torch.no_grad():
    assert float(((net(a) - net(b)).norm(dim=1) / (a - b).norm(dim=1)).max()) <= upper
votes = eq.smoothing.certify_counts([60, 20, 12, 5, 3], [6000, 2000, 1200, 500, 300], sigma=0.5, procedure="two-rivals")
assert int(votes.buckets) == 4 and float(votes.radius) > 0
assert find("holder-gap").title.startswith("Hölder")
print("used")
"""


@pytest.fixture
def installed(tmp_path):
    """What `pip install` would leave: the package on the path and its entry points in a dist-info."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"equipoise_holder-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = {g: e for g, e in project["entry-points"].items() if g.startswith("equipoise.")}
    assert set(groups) == {f"equipoise.{g}" for g in ("rules", "procedures", "experiments")}
    text = "".join(f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups.items())
    (info / "entry_points.txt").write_text(text)
    return [str(PLUGIN / "src"), str(tmp_path)]


@pytest.mark.slow  # a process of its own; each entry point has a quick test in its room
def test_every_part_is_found_and_used(installed, tmp_path):
    path = os.pathsep.join([*installed, *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-c", USED],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "used\n"
