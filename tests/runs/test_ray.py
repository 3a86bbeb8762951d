"""The Ray engine on a real cluster of two workers: the table of the local engine, whatever happens to workers."""

import pickle
import runpy
import sys
from pathlib import Path

import pytest
import runs_nets
import torch
from runs_nets import table

from equipoise.core import InputError, Refused
from equipoise.runs import Settings, certify, open_run, prepare
from equipoise.runs.workers import RayWorker

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.medium]
EXAMPLE = Path(__file__).parents[2] / "examples" / "smoothing_two_workers.py"
SETTINGS = {"sigma": 0.3, "n": 300}
WORKERS = {"workers": 2}


def test_a_cluster_of_our_own_comes_and_goes(tmp_path, net, xy):
    assert not ray.is_initialized()
    run = certify(net, xy, run_dir=tmp_path / "ray", **WORKERS, **SETTINGS)
    assert not ray.is_initialized()
    assert run.finished
    assert table(run) == table(certify(net, xy, run_dir=tmp_path / "local", **SETTINGS))


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.parametrize("more", [{"procedure": "lvm", "noise": "float"}, {"noise": "grid"}], ids=str)
def test_the_table_of_the_local_engine_and_a_cluster_that_stays(cluster, tmp_path, net, more):
    x, y = runs_nets.data(10)
    data, settings = ((255 * x).round().clamp(0, 255) / 255, y), SETTINGS | more
    program = torch.export.export(net, (torch.rand(100, *runs_nets.SHAPE),))
    local = table(certify(net, data, run_dir=tmp_path / "local", **settings))
    for name, model in {"module": net, "program": program}.items():
        assert table(certify(model, data, run_dir=tmp_path / name, **WORKERS, **settings)) == local
    assert ray.is_initialized()


def test_killed_workers_change_nothing(cluster, tmp_path):
    """SIGKILL from inside, in the middle of an input: its inputs are done again by a fresh worker."""
    model, data = runs_nets.Mortal(tmp_path, deaths=1).eval(), runs_nets.data(12)
    run = certify(model, data, run_dir=tmp_path / "ray", **WORKERS, **SETTINGS)
    assert len(list(tmp_path.glob("death-*"))) == 1, "no worker was killed"
    assert table(run) == table(certify(model, data, run_dir=tmp_path / "local", **SETTINGS))


def test_an_input_that_kills_every_worker_ends_the_run_with_a_sentence_and_loses_nothing(cluster, tmp_path):
    x, y = runs_nets.data(10)
    x[7, 0, 0, 0] = 5.0
    model = runs_nets.Poisoned().eval()
    with pytest.raises(InputError, match="what is stored is kept"):
        certify(model, (x, y), run_dir=tmp_path / "a", workers=1, **SETTINGS)
    assert 0 < len(open_run(tmp_path / "a").rows) < 10
    finished = certify(model, (x, y), run_dir=tmp_path / "a", **SETTINGS)
    assert table(finished) == table(certify(model, (x, y), run_dir=tmp_path / "b", **SETTINGS))


def test_an_interruption_or_an_error_leaves_a_run_that_continues(cluster, tmp_path, net, xy):
    def interrupt(row, done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify(net, xy, run_dir=tmp_path / "a", progress=interrupt, workers=1, **SETTINGS)
    assert len(open_run(tmp_path / "a").rows) == 4
    run = certify(net, xy, run_dir=tmp_path / "a", workers=1, **SETTINGS)
    assert table(run) == table(certify(net, xy, run_dir=tmp_path / "local", **SETTINGS))
    with pytest.raises(InputError, match=r"^the model on input"):
        certify(runs_nets.Raising().eval(), xy, run_dir=tmp_path / "b", workers=1, **SETTINGS)
    assert open_run(tmp_path / "b").rows == []


def test_the_example_runs_on_two_workers(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "40/40" in capsys.readouterr().out


def test_ray_is_missing(monkeypatch, tmp_path, net, xy):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"this needs ray: pip install 'equipoise\[ray\]'"):
        certify(net, xy, run_dir=tmp_path / "a", **WORKERS, **SETTINGS)


def test_other_software_or_code_on_a_worker_is_refused(net, xy):
    spec = prepare(net, xy, Settings.of("sampled", {"sigma": 0.3})).spec
    with pytest.raises(Refused, match=r"a worker has torch .* instead of 0\.0"):
        RayWorker(pickle.dumps(spec), [], {"torch": "0.0"})
    with pytest.raises(Refused, match=r"a worker has code sha256:.* instead of sha256:other"):
        RayWorker(pickle.dumps(spec), [], {"code": "sha256:other"})
