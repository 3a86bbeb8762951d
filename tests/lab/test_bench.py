import pytest
import torch

import equipoise as eq
from equipoise.core.files import read_json
from equipoise.norms import spectral_norm
from equipoise_lab.bench import bundles, growth, layers, pairs
from equipoise_lab.bench import norms as bench
from equipoise_lab.timing import peak_bytes


def test_the_baselines_compute_what_they_claim():
    layer = bench.Layer("x", 6, 4, 3, 2, 10)
    K = layer.gaussian(0)
    exact = bench.svd_of_all_frequencies(K, 10)
    assert exact <= float(bench.complex_gram(K, 10)) * (1 + 1e-5) <= exact * 1.05
    bracket = spectral_norm(layer.module(K), input_size=(10, 10))
    assert bench.ryu(K, 10, 2) <= bracket.upper
    assert bench.ryu(K, 10, 2) >= 0.98 * bracket.lower


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


def test_a_folder_without_the_library_is_no_state(equipoise, tmp_path):
    ran = equipoise("bench", "states", tmp_path)
    assert (ran.code, "has no src/equipoise" in ran.err) == (2, True)


def measured(ratio, low, high):
    return {"x": pairs.Measured("x", ratio, low, high, ratio, 1.0, None)}


@pytest.mark.parametrize(("before", "after", "verdict"), [
    ((1.0, 0.9, 1.1), (0.5, 0.4, 0.6), "faster"),
    ((1.0, 0.9, 1.1), (1.5, 1.4, 1.6), "slower"),
    ((1.0, 0.9, 1.1), (1.15, 1.05, 1.3), "no difference seen"),
])  # fmt: skip
def test_a_difference_is_one_where_the_quartiles_do_not_meet(before, after, verdict):
    (row,) = pairs.compare(measured(*before), measured(*after))
    assert row["verdict"] == verdict


def test_measurements_are_stored_and_compared(equipoise, tmp_path):
    file = tmp_path / "a.json"
    ran = equipoise("bench", "all", "--quick", "--rounds", 2, "--only", "float32", "--only", "AOL", "--json", file)
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


def test_costs_of_growing_batches_have_an_exponent():
    section = growth.grow("batch", repeats=1, quick=True)
    assert [row["batch"] for row in section.rows] == [1, 2]
    assert "exponent" in section.note


def test_quick_sections_hold_every_layer():
    costs, whole, profile = layers.sections(quick=True)
    assert [row["network"] for row in whole.rows] == ["plain", *layers.NETWORKS]
    assert all(row["train ratio"] > 0 for row in whole.rows)
    names = [row["layer"] for row in costs.rows]
    assert names[: 1 + len(layers.LAYERS)] == ["nn.Conv2d", *layers.LAYERS]
    assert all(row["train ratio"] > 0 and row["eval ratio"] > 0 for row in costs.rows[: 1 + len(layers.LAYERS)])
    exports = {row["layer"]: row["export"] for row in costs.rows if "export" in row}
    assert all(exports[name] == "Conv2d" for name in ("SN", "AOL", "SR t=2", "RKO", "BCOP"))
    assert len(profile.rows) == 9
    assert costs.to_dict()["goals"] == []


def test_gram_iteration_bounds_norms_and_certifies_no_more_than_the_checker(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(512, 6).sign() + 0.1 * torch.randn(512, 6)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    model = bundles.train((6, 16, 16, 4), x, y, epsilon=0.1, epochs=20)
    for weight in model.parameters():
        exact = float(torch.linalg.matrix_norm(weight.detach().double(), 2))
        assert exact * (1 - 1e-12) <= float(bundles.gram_norm(weight.detach(), 10)) <= exact * 1.01
    claims = eq.certificates.write(model, x, y, tmp_path, epsilons=[0.1])
    (checked,) = claims["radii"]["certified"].values()
    coarse = bundles.gram_certified(model, x, y, 0.1, 4)
    assert 0 < coarse <= checked
    assert coarse <= bundles.gram_certified(model, x, y, 0.1, 10) <= checked
