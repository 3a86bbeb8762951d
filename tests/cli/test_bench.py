import pytest
import torch

from equipoise.core.timing import peak_bytes, take_turns
from equipoise.lab.bench import norms as bench
from equipoise.norms import spectral_norm


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
