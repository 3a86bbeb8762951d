import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.app import COMMANDS, Command, build

pytestmark = pytest.mark.medium


def test_help_lists_every_command_with_examples(equipoise):
    assert equipoise("--version").out.strip() == f"equipoise {eq.__version__}"
    ran = equipoise("--help")
    assert ran.code == 0
    assert "..." not in ran.out.partition("Examples:")[2]
    assert all(f"  {command.name} " in ran.out for command in COMMANDS)


def test_help_and_completion_do_not_wait_for_torch():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from equipoise.cli.app import COMMANDS, build\n"
        "for command in COMMANDS:\n"
        "    ran = CliRunner().invoke(build(wanted=command.name), [command.name, '--help'])\n"
        "    assert ran.exit_code == 0 and ran.stdout.count('\\n') <= 50, ran.stdout\n"
        "    assert 'Example' in ran.stdout and '--json' in ran.stdout\n"
        "    assert max(map(len, ran.stdout.splitlines())) <= 80\n"
        "    assert sum(line.startswith('  --') for line in ran.stdout.splitlines()) <= 20\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    narrow = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=narrow)
    assert done.returncode == 0, done.stderr
    line = {"_EQUIPOISE_COMPLETE": "complete_bash", "COMP_WORDS": "equipoise audit --in", "COMP_CWORD": "2"}
    command = [sys.executable, "-X", "importtime", "-m", "equipoise"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **line})
    assert done.stdout.split() == ["--input-shape"]
    assert "| torch" not in done.stderr


NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
FAILURES = {
    "input": (eq.InputError("the weight is empty"), "the weight is empty"),
    "refused": (eq.Refused("no bound"), "no bound"),
    "large": (RuntimeError(NO_MEMORY), f"this does not fit into memory ({NO_MEMORY})"),
    "bug": (KeyError("x"), None),
}


def failing_command(kind: str):
    """Raise."""
    raise FAILURES[kind][0]


def test_a_users_mistake_is_one_sentence_and_a_bug_keeps_its_traceback():
    app = build((Command("fail", __name__, "failing_command"), Command("norm", "equipoise.cli.norm", "norm")))
    for kind, (error, sentence) in FAILURES.items():
        result = CliRunner().invoke(app, ["fail", kind])
        assert result.exit_code == (2 if sentence else 1)
        assert result.stderr.strip() == f"equipoise: {sentence}" if sentence else result.exception is error


LIST = "from equipoise.cli import main; import sys; sys.argv[1:] = ['train', '--list'{}]; main()"


@pytest.mark.parametrize("more", ["", ", '--json'"])
def test_a_terminal_without_utf8_gets_its_results(more):
    code, env = LIST.format(more), {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(json.loads(ran.stdout)) > 5 if more else "?" in ran.stdout


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """The line as a shell runs it; `python -m equipoise` is the command, whether or not its script is installed."""
    words = ["bash", "-c", line.replace("equipoise", f"{sys.executable} -m equipoise")]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.parametrize("to", [">/dev/full", "| true; exit ${PIPESTATUS[0]}"])
def test_output_that_cannot_be_written_is_no_success(to):
    done = shell(f"equipoise --help {to}")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("line", ["norm --json --nope", "nrom --json", "selfcheck --json --seed -1", "norm --json"])
def test_a_mistake_in_the_command_line_is_a_document_under_json(line):
    done = shell(f"equipoise {line}")
    assert done.returncode == 2
    assert set(json.loads(done.stdout)) == {"error"}
    assert "Traceback" not in done.stderr


def test_the_library_and_the_demo_run_without_the_extras(tmp_path):
    """`pip install equipoise` brings the core dependencies; nothing else may be needed."""
    code = (
        "import sys\n"
        "extras = 'pyarrow PIL accelerate pytorch_optimizer ray plotly matplotlib onnx onnxruntime "
        "cvxpy transformers sklearn'.split()\n"
        "sys.modules.update(dict.fromkeys(extras))\n"
        "import equipoise as eq, torch\n"
        "eq.spectral_norm(torch.eye(3)); eq.nn.SRLinear(2, 2); eq.smoothing.radius_mono(0.9, 1.0)\n"
        "eq.data.load_dataset('digits')\n"
        "eq.lipschitz_bound(torch.nn.Linear(2, 2), torch.zeros(1, 2)); import equipoise.runs, equipoise.checkpoints\n"
        "from equipoise.demo import QUICK, showcase\n"
        "assert showcase('demo', QUICK).tested.broken == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "pip install equipoise[report]" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
