from pathlib import Path

import pytest
import torch

import equipoise
from equipoise.core.errors import InputError
from equipoise.core.files import read_json
from equipoise.norms import spectral_norm
from equipoise_lab.bench import growth, layers, pairs
from equipoise_lab.bench import norms as bench
from equipoise_lab.bench.states import compare
from equipoise_lab.timing import peak_bytes, take_turns


def test_resnet18_has_the_shapes_of_the_paper():
    layers = {layer.name: layer for layer in bench.resnet18()}
    assert len(layers) == 20
    assert (layers["conv1"].out, layers["conv1"].kernel, layers["conv1"].size) == (64, 7, 224)
    assert layers["layer2.0.conv1"] == bench.Layer("layer2.0.conv1", 128, 64, 3, 2, 56)
    assert layers["layer4.1.conv2"] == bench.Layer("layer4.1.conv2", 512, 512, 3, 1, 7)
    assert layers["layer3.0.downsample.0"] == bench.Layer("layer3.0.downsample.0", 256, 128, 1, 2, 28)


def test_the_shapes_are_those_of_the_real_kernels():
    kernels = bench.real_kernels()
    if kernels is None:
        pytest.skip(f"{bench.DATA} is not there")
    for layer in bench.resnet18():
        if layer.name in kernels:
            assert tuple(kernels[layer.name].shape) == (layer.out, layer.channels, layer.kernel, layer.kernel)


def test_the_baselines_compute_what_they_claim():
    layer = bench.Layer("x", 6, 4, 3, 2, 10)
    K = layer.gaussian(0)
    exact = bench.svd_of_all_frequencies(K, 10)
    assert exact <= float(bench.complex_gram(K, 10)) * (1 + 1e-5) <= exact * 1.05
    bracket = spectral_norm(layer.module(K), input_size=(10, 10))
    assert bench.ryu(K, 10, 2) <= bracket.upper
    assert bench.ryu(K, 10, 2) >= 0.98 * bracket.lower


def test_sums_are_given_with_and_without_the_pointwise_layers():
    layers = (bench.Layer("a", 4, 2, 3, 1, 6), bench.Layer("b", 4, 2, 1, 2, 6))
    section = bench.convolutions({x.name: x.gaussian(0) for x in layers}, layers, "Gaussian", 1)
    rows = {row["layer"]: row for row in section.rows}
    assert list(rows) == ["a", "b", "all", "all but 1×1"]
    assert rows["all"]["svd s"] == rows["a"]["svd s"] + rows["b"]["svd s"]
    assert rows["all but 1×1"]["ours s"] == rows["a"]["ours s"]
    assert section.goals[0].ratio == rows["all"]["ours s"] / rows["all"]["svd s"]


def test_turns_are_taken_in_alternating_order():
    calls = []
    contest = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert calls == ["a", "b", "b", "a"]
    assert set(contest.seconds) == {"a", "b"}


def test_peak_memory_sees_temporaries_and_forgets_them():
    def work():
        for _ in range(5):
            torch.ones(250_000).add(1)

    assert 2_000_000 <= peak_bytes(work) < 3_000_000


def test_bench_quick(equipoise, capfd):
    ran = equipoise("bench", "norms", "--quick", "--json")
    assert ran.code == 0, ran.error
    sections = {section["title"]: section for section in ran.json["sections"]}
    assert len(sections) == 4
    assert ran.json["threads"] == torch.get_num_threads()
    for section in sections.values():
        assert section["rows"]
    memory = sections["memory of the gradient"]["rows"][0]
    assert memory["explicit MB"] < memory["autodiff MB"]


def test_bench_table(equipoise):
    ran = equipoise("bench", "norms", "--quick")
    assert ran.code == 0
    assert "thread" in ran.out
    assert "tiny.conv1" in ran.out


def test_bench_says_when_the_real_kernels_are_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))
    assert bench.real_kernels() is None
    monkeypatch.setattr(bench, "convolutions", lambda *args: None)
    first = next(bench.sections())
    assert first.rows == []
    assert "EQUIPOISE_DATA" in first.note


def measured(ratio, low, high):
    return {"x": pairs.Measured("x", ratio, low, high, ratio, 1.0, None)}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((1.0, 0.9, 1.1), (0.5, 0.4, 0.6), "faster"),
        ((1.0, 0.9, 1.1), (1.5, 1.4, 1.6), "slower"),
        ((1.0, 0.9, 1.1), (1.15, 1.05, 1.3), "no difference seen"),
    ],
)
def test_a_difference_is_one_where_the_quartiles_do_not_meet(before, after, verdict):
    (row,) = pairs.compare(measured(*before), measured(*after))
    assert row["verdict"] == verdict


def test_measurements_are_stored_and_compared(equipoise, tmp_path):
    file = tmp_path / "a.json"
    ran = equipoise(
        "bench", "all", "--quick", "--rounds", "2", "--only", "float32", "--only", "AOL", "--json", str(file)
    )
    assert ran.code == 0, ran.error
    ran = equipoise("bench", "compare", str(file), str(file), "--json")
    assert [row["verdict"] for row in ran.json["rows"]] == ["no difference seen"] * 5
    assert "thread" in ran.json["A"]
    again, both = tmp_path / "b.json", tmp_path / "both.json"
    again.write_text(file.read_text().replace("AOL", "AOL twice"))
    ran = equipoise("bench", "merge", str(file), str(again), "--json", str(both))
    assert ran.code == 0, ran.error
    assert len({row["name"] for row in read_json(both)["measured"]}) == 8
    again.write_text(file.read_text().replace('"rounds": 2', '"rounds": 3'))
    assert "measured elsewhere" in equipoise("bench", "merge", str(file), str(again)).err
    file.write_text("{}")
    assert equipoise("bench", "compare", str(file), str(file)).code == 2


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(InputError, match="no measurement"):
        next(pairs.measure(only=["nothing"]))
    with pytest.raises(InputError, match="cannot be used"):
        next(pairs.measure(device="cuda:77"))
    with pytest.raises(InputError, match="channels"):
        growth.grow("weather")


def test_growth_has_an_exponent_and_a_figure(tmp_path):
    section = growth.grow("batch", repeats=1, quick=True)
    assert [row["batch"] for row in section.rows] == [1, 2]
    assert "exponent" in section.note
    growth.draw(section, tmp_path / "batch.png")
    assert (tmp_path / "batch.png").stat().st_size > 1000


def test_a_peer_of_another_shape_is_named_and_left_out(monkeypatch):
    monkeypatch.setattr(
        layers, "PEERS", {"valid": ("torch.nn", "Conv2d", {"kernel_size": 3}), "none": ("nowhere", "X", {})}
    )
    built, missing = layers.peers(2)
    assert built == {}
    assert missing == ["valid: 16×16 pixels become 14×14, no layer to compare with", "none: not installed"]


def test_the_documented_table_is_that_of_the_stored_run():
    """The site puts it where the page names it."""
    root = Path(__file__).parents[2]
    assert "{{ stored benchmarks }}" in (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    stored = read_json(root / "lab" / "results" / "bench-amd-one-thread.json")
    assert "| dense 2000×1000 float32 / matrix_norm |" in pairs.markdown(*pairs.read(stored, "stored run"))


def test_two_states_take_turns():
    here = Path(equipoise.__file__).parents[2]
    (row,) = compare(here, here, rounds=1, only="64×64")
    assert row["ratio"] > 0
    assert row["case"] == "spectral_norm, 64×64"
