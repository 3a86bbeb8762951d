"""Every example runs in an empty folder, without a network; the first one also as a newcomer starts it: as a process."""

import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.medium

FOLDER = Path(__file__).resolve().parents[1] / "examples"

#: file → packages it needs, what its output must say
EXAMPLES = {
    "audit_your_model": ((), "certificates broken by the attack: 0"),
    "certified_resnet": ((), "exported, certificate: 0.99"),
    "onnx_controller": (("onnx", "matplotlib"), "disturbances are amplified at most"),
    "wasserstein_critic": (("matplotlib",), "in truth 1.3000"),
    "monotone_regressor": (("matplotlib",), "pairs that fall: 0 of 20000"),
    "invertible_block": (("matplotlib",), "the block is invertible"),
    "plug_and_play": (("matplotlib",), "mean square error: blurred"),
    "sklearn_classifier": (("sklearn",), "certified at 0.25:"),
    "torchmetrics_accuracy": (("torchmetrics",), "certified at 0.1: 94"),
    "lightning_training": (("lightning",), "proved constant: 1.0000"),
    "art_attack": (("art",), "certificates broken: 0"),
    "tracked_run": (("mlflow",), "logged: {'average_radius'"),
    "state_dict": ((), "in pixels: Lipschitz constant (ℓ2, everywhere) at most 0.32"),
    "autoattack_attack": (("torchattacks",), "certificates broken: 0"),
    "foolbox_attack": (("foolbox",), "certificates broken: 0"),
    "activation_decay_trainer": (("transformers", "accelerate"), "σ = 0.2: evaluation loss"),
    "guarded_trainer": (("transformers", "accelerate"), "6 steps, norms at most"),
}
AS_PROCESS, *IN_PROCESS = EXAMPLES
TEXT = ("activation_decay_trainer", "guarded_trainer")


#: loops of training that are cut short: what an example says does not depend on how well its network does
SHORTER = {"certified_resnet": ("range(70)", "range(5)"), "audit_your_model": ("range(60)", "range(20)")}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONIOENCODING": "utf-8", "MPLBACKEND": "Agg"}


def written(name, folder):
    """The file of one example in an empty folder."""
    code = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    if name in SHORTER:
        assert SHORTER[name][0] in code
        code = code.replace(*SHORTER[name])
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return folder / f"{name}.py"


def start(name, folder, **environment):
    """The finished process of one example."""
    env = {**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1", **environment}
    options = {"cwd": folder, "env": env, "capture_output": True, "encoding": "utf-8", "timeout": 500}
    return subprocess.run([sys.executable, written(name, folder).name], **options, check=False)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.text] * (n in TEXT)) for n in IN_PROCESS])
def test_example_runs(name, tmp_path, monkeypatch, capsys):
    needs, says = EXAMPLES[name]
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    file = written(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    for key, value in OFFLINE.items():
        monkeypatch.setenv(key, value)
    with torch.random.fork_rng(), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("default")  # what Python shows by itself
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", module=r"(pytorch_)?lightning")  # by what PyTorch calls outdated
        runpy.run_path(str(file), run_name="__main__")
    assert says in capsys.readouterr().out
    assert not raised, [str(each.message) for each in raised]
    if "matplotlib" in needs:
        sys.modules["matplotlib.pyplot"].close("all")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_an_example_as_a_process(tmp_path):
    done = start(AS_PROCESS, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert EXAMPLES[AS_PROCESS][1] in done.stdout
    assert "Warning" not in done.stderr, done.stderr[-2000:]


def test_smoothing_without_ray_says_so_and_goes_on(tmp_path):
    """A package that is not there: `ray` is hidden from the import system of the child."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'ray' else find(name, *rest)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = start("smoothing_two_workers", tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Ray is not installed (pip install 'equipoise[ray]'): certifying in this process instead." in done.stdout
    assert "40/40" in done.stdout


def test_every_example_is_tested_and_short():
    files = sorted(FOLDER.glob("*.py"))
    with_ray = "smoothing_two_workers"  # on the cluster of tests/runs/test_ray.py, and without Ray above
    assert [path.stem for path in files] == sorted([with_ray, *EXAMPLES])
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 90, f"{path.name} has {len(lines)} lines"
        assert "Run: python examples/" in "\n".join(lines), f"{path.name} does not say how to run it"
