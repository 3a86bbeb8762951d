"""The Ray engine on a real cluster of two workers: the table of the local engine, whatever happens to workers."""

import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import runs_nets
import runs_ray_nets
import torch
from equipoise.runs.export import to_csv
from equipoise.runs.parameters import Parameters
from equipoise.runs.rows import Item

from equipoise.core import InputError, Refused
from equipoise.runs import Execution, TaskSpec, certify, open_run
from equipoise.runs.engines import find_engine
from equipoise.runs.models import portable
from equipoise_lab.bench import runs as bench
from equipoise_lab.bench.smoothing import small_cnn

ray = pytest.importorskip("ray")

from equipoise.runs.engines import ray as ray_engine  # noqa: E402 - after the check that ray is there

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "smoothing_two_workers.py"
SETTINGS = {"sigma": 0.3, "n": 300}
WORKERS = {"engine": "ray", "workers": 2}


def table(run):
    return to_csv(run.rows, run.certificates())


def spec_of(model):
    return TaskSpec(portable(model), Parameters(sigma=0.3, num_classes=4, n0=100, n=100))


def items(count):
    x, y = runs_nets.data(count)
    return (Item(i, i, int(y[i]), x[i]) for i in range(count))


def test_a_cluster_of_our_own_comes_and_goes(tmp_path, net, xy):
    assert not ray.is_initialized()
    run = certify(net, xy, run_dir=tmp_path / "ray", **WORKERS, **SETTINGS)
    assert not ray.is_initialized()
    assert run.finished
    assert table(run) == table(certify(net, xy, run_dir=tmp_path / "local", **SETTINGS))
    assert [s["engine"] for s in run.sessions()] == ["ray"]


@pytest.fixture(scope="module")
def cluster():
    with ray_engine.local_cluster(2, 0):
        yield


@pytest.mark.parametrize("more", [{"procedure": "lvm", "noise": "float"}, {"noise": "grid"}], ids=str)
def test_the_table_of_the_local_engine_and_a_cluster_that_stays(cluster, tmp_path, net, more):
    x, y = runs_nets.data(10)
    data, settings = ((255 * x).round().clamp(0, 255) / 255, y), SETTINGS | more
    run = certify(net, data, run_dir=tmp_path / "ray", **WORKERS, **settings)
    assert ray.is_initialized()
    assert table(run) == table(certify(net, data, run_dir=tmp_path / "local", **settings))
    assert ("on the grid of step 1/255, exactly" in run.certificates().about) == (more["noise"] == "grid")


def test_killed_workers_change_nothing(cluster, tmp_path):
    """SIGKILL from inside, in the middle of an input: its inputs are done again by a fresh worker."""
    model, data = runs_ray_nets.Mortal(tmp_path, deaths=1).eval(), runs_nets.data(12)
    run = certify(model, data, run_dir=tmp_path / "ray", **WORKERS, **SETTINGS)
    assert len(list(tmp_path.glob("death-*"))) == 1, "no worker was killed"
    assert run.finished
    assert table(run) == table(certify(model, data, run_dir=tmp_path / "local", **SETTINGS))


def test_an_input_that_kills_every_worker_ends_the_run_with_a_sentence_and_loses_nothing(cluster, tmp_path):
    x, y = runs_nets.data(10)
    x[7, 0, 0, 0] = 5.0
    model = runs_ray_nets.Poisoned().eval()
    with pytest.raises(InputError, match=r"3 workers were lost on input 7 .*What is stored is kept"):
        certify(model, (x, y), run_dir=tmp_path / "a", engine="ray", **SETTINGS)
    kept = open_run(tmp_path / "a")
    assert 0 < len(kept.rows) < 10
    finished = certify(model, (x, y), run_dir=tmp_path / "a", **SETTINGS)
    assert finished.finished
    assert table(finished) == table(certify(model, (x, y), run_dir=tmp_path / "b", **SETTINGS))


def test_a_model_that_raises_is_one_sentence(cluster, tmp_path, xy):
    with pytest.raises(InputError) as caught:
        certify(runs_ray_nets.Raising().eval(), xy, run_dir=tmp_path, engine="ray", **SETTINGS)
    assert str(caught.value).startswith("the model failed on input")
    assert str(caught.value).endswith("no kernel image is available")
    assert open_run(tmp_path).rows == []


def test_an_interruption_leaves_a_run_that_continues(cluster, tmp_path, net):
    data = runs_nets.data(12)

    def interrupt(row, done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify(net, data, run_dir=tmp_path / "a", progress=interrupt, engine="ray", **SETTINGS)
    assert len(open_run(tmp_path / "a").rows) == 4
    run = certify(net, data, run_dir=tmp_path / "a", engine="ray", **SETTINGS)
    assert table(run) == table(certify(net, data, run_dir=tmp_path / "local", **SETTINGS))


def test_inputs_are_pulled_only_as_fast_as_they_are_worked_off(cluster, net):
    pulled, ahead, seen = 0, 0, set()

    def counted():
        nonlocal pulled
        for item in items(30):
            pulled += 1
            yield item

    for done, row in enumerate(ray_engine.run(spec_of(net), counted(), Execution(1))):
        seen.add(row.id)
        ahead = max(ahead, pulled - done)
    assert seen == set(range(30))
    assert ahead <= ray_engine.AHEAD + 1


def test_closing_stops_the_workers(cluster, net):
    rows = ray_engine.run(spec_of(net), items(1000), Execution(1))
    next(rows)
    rows.close()
    deadline = time.monotonic() + 60  # a worker that lives on would hold its CPU
    while ray.available_resources().get("CPU", 0) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(ray_engine.run(spec_of(net), items(0), Execution(2))) == []


def test_workers_use_one_thread(cluster):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (row,) = ray_engine.run(spec_of(runs_ray_nets.Threads().eval()), items(1), Execution(1))
    finally:
        torch.set_num_threads(before)
    assert row.estimation.tolist() == [100, 0, 0, 0]


def test_more_workers_than_the_cluster_has_room_for_and_nan_is_a_recorded_failure(cluster, tmp_path, xy):
    model, x, y = runs_nets.Sometimes(6.0).eval(), xy[0].clone(), xy[1]
    x[:, 0, 0, 0], x[2, 0, 0, 0] = 0.2, 9.0
    run = certify(model, (x, y), run_dir=tmp_path / "ray", engine="ray", workers=3, **SETTINGS)
    assert run.finished
    assert list(run.failures) == [2]
    assert table(run) == table(certify(model, (x, y), run_dir=tmp_path / "local", **SETTINGS))


def test_no_room_at_all_is_said(cluster, net, monkeypatch):
    monkeypatch.setattr(ray_engine, "START_SECONDS", 0.0)
    team = ray_engine.Team(ray_engine.pack(spec_of(net)), "cpu", Execution(1))
    team.kind = ray.remote(ray_engine.Member).options(num_cpus=1000)
    ray.kill(team.seats[0].actor)
    team.seats = [team._hire()]
    with pytest.raises(InputError, match=r"no worker has started .* the cluster has 2 CPUs and 0 GPUs"):
        list(team.rows(items(1)))
    team.dismiss()


def test_another_address_than_the_connected_one_is_refused(cluster, net):
    with pytest.raises(InputError, match=r"already connected to the Ray cluster at 127\.0\.0\.1:"):
        next(ray_engine.run(spec_of(net), items(1), Execution(1, "10.0.0.1:6379")))


def test_an_exported_program(cluster, tmp_path, net, xy):
    program = torch.export.export(net, (torch.rand(100, *runs_nets.SHAPE),))
    run = certify(program, xy, run_dir=tmp_path / "ray", engine="ray", **SETTINGS)
    assert table(run) == table(certify(program, xy, run_dir=tmp_path / "local", **SETTINGS))


def test_the_example_runs_on_two_workers(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "40/40" in said
    assert "stored in runs/two-workers" in said


@pytest.mark.slow
def test_the_benchmark_of_two_workers_against_one(cluster):
    row = bench.ray_row(1, make=small_cnn, shape=(1, 28, 28), inputs=3, n=100)
    assert row["goal"] == "≥ 1.6"
    assert row["ratio"] == pytest.approx(row["ours"] / row["baseline"])


# ---- without a cluster --------------------------------------------------------------------------------------------


def test_ray_is_missing(monkeypatch, tmp_path, net, xy):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "equipoise.runs.engines.ray")
    with pytest.raises(InputError, match=r"needs ray: pip install 'equipoise\[ray\]'"):
        find_engine("ray", Execution(2))
    with pytest.raises(InputError, match="needs ray"):
        certify(net, xy, run_dir=tmp_path / "a", **WORKERS, **SETTINGS)
    assert not (tmp_path / "a").exists()


def test_nobody_at_the_address_is_said_at_once(net):
    with pytest.raises(InputError, match=r"cannot join the Ray cluster at 127\.0\.0\.1:1: .*refused"):
        ray_engine._join("127.0.0.1:1")


def test_a_model_that_cannot_travel_is_one_sentence(net):
    net.hook = (i for i in range(3))
    with pytest.raises(InputError, match=r"cannot be sent to other processes .*\.pt2"):
        ray_engine.pack(spec_of(net))


def test_other_software_on_a_worker_is_refused(net):
    member = ray_engine.Member()
    with pytest.raises(Refused, match=r"a worker has torch .* instead of 0\.0"):
        member.build(ray_engine.pack(spec_of(net)), [], {"torch": "0.0"})


def test_other_code_of_the_model_on_a_worker_is_refused(net):
    spec = spec_of(net)
    ray_engine.require_same_code(spec)
    with pytest.raises(Refused, match="code of runs_nets:Net differs"):
        ray_engine.require_same_code(replace(spec, model=replace(spec.model, hash="sha256:other")))
