import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from equipoise.cli.norm import weight_bracket, weight_rows
from equipoise.core import InputError
from equipoise.norms import reference_norm

pytestmark = pytest.mark.medium

SKIPPED = {"fc.bias", "scale", "steps"}


@pytest.fixture
def weights(tmp_path):
    """A file with one weight of each kind."""
    torch.manual_seed(0)
    tensors = {
        "fc.weight": torch.randn(6, 9),
        "fc.bias": torch.randn(6),
        "conv.weight": torch.randn(4, 2, 3, 3),
        "line.weight": torch.randn(3, 2, 5, dtype=torch.float64),
        "volume.weight": torch.randn(2, 2, 3, 3, 3).to(torch.bfloat16),
        "half.weight": torch.randn(5, 5).half(),
        "scale": torch.tensor(2.0),
        "steps": torch.tensor([3]),
        "zero[0]": torch.zeros(3, 3),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return path, tensors


def test_every_tensor_is_listed_with_its_bracket_or_the_reason(equipoise, weights):
    path, tensors = weights
    rows = {row["name"]: row for row in equipoise("norm", path, "--json").json["weights"]}
    assert set(rows) == set(tensors)
    for name, row in rows.items():
        assert row["shape"] == list(tensors[name].shape)
        if name in SKIPPED:
            assert row["status"] == "skipped"
            assert row["note"]
        else:
            assert row["status"] == "bracket"
            assert row["lower"] <= row["upper"]
    for name in ("fc.weight", "half.weight"):
        truth = float(torch.linalg.matrix_norm(tensors[name].double(), ord=2))
        assert rows[name]["lower"] * (1 - 1e-12) <= truth <= rows[name]["upper"] * (1 + 1e-12)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("dilation", "padding"), [(1, 0), (1, 2), (2, 1)])
def test_the_upper_end_without_a_size_holds_for_every_use_of_the_weight(stride, groups, dilation, padding):
    torch.manual_seed(stride + 10 * groups)
    weight = torch.randn(4, 2, 3, 3)
    upper = weight_bracket(weight, 1e-2).upper
    layer = nn.Conv2d(2 * groups, 4, 3, stride, padding, dilation, groups, bias=False).requires_grad_(False)
    layer.weight.copy_(weight)
    assert reference_norm(layer, (2 * groups, 8, 8)) <= upper
    turned = nn.ConvTranspose2d(4, 2 * groups, 3, stride, 0, 0, groups, False, dilation).requires_grad_(False)
    turned.weight.copy_(weight)
    assert reference_norm(turned, (4, 4, 4)) <= upper


def test_a_size_is_used_where_it_fits_and_refused_where_it_does_not(equipoise, weights):
    path, tensors = weights
    ran = equipoise("norm", path, "--input-size", "8,6", "--rtol", 1e-3, "--json")
    rows = {row["name"]: row for row in ran.json["weights"]}
    assert ran.code == 2
    layer = nn.Conv2d(2, 4, 3, 1, 1, bias=False).requires_grad_(False)
    layer.weight.copy_(tensors["conv.weight"])
    truth = reference_norm(layer, (2, 8, 6))
    assert rows["conv.weight"]["lower"] <= truth * (1 + 1e-12)
    assert truth * (1 - 1e-12) <= rows["conv.weight"]["upper"] <= 1.01 * truth
    assert rows["line.weight"]["status"] == "refused"
    assert "input_size" in rows["line.weight"]["note"]


def test_displayed_numbers_are_rounded_to_the_safe_side(equipoise, tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.full((1, 1), 1 / 3, dtype=torch.float64)}, path)
    line = next(line for line in equipoise("norm", path).out.splitlines() if "F64" in line)
    lower, upper = (float(cell) for cell in line.replace("│", " ").split()[-2:])
    assert lower <= 1 / 3 <= upper


def test_names_in_a_file_do_not_move_the_cursor(equipoise, tmp_path):
    hostile = {"\x1b[2Jupper ≤ 1\r\u202e": torch.eye(2), "\x1b[8m": torch.full((2, 2), torch.nan)}
    save_file(hostile, tmp_path / "w.safetensors")
    ran = equipoise("norm", tmp_path / "w.safetensors")
    assert not {"\x1b", "\r", "\u202e"} & {*ran.out, *ran.err}
    assert r"\x1b[2J" in ran.out


def test_a_broken_tensor_is_refused_and_the_rest_goes_on(equipoise, tmp_path):
    path = tmp_path / "w.safetensors"
    bad = torch.randn(3, 3)
    bad[1, 2] = float("nan")
    save_file({"a": torch.eye(3), "b": bad, "c": torch.eye(2), "d": torch.zeros(0, 4)}, path)
    ran = equipoise("norm", path, "--json")
    assert ran.code == 2
    status = {row["name"]: row["status"] for row in ran.json["weights"]}
    assert status == {"a": "bracket", "b": "refused", "c": "bracket", "d": "refused"}
    assert ran.json["refused"] == 2
    assert "non-finite" in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_files_that_are_no_safetensors_are_one_sentence(equipoise, weights, tmp_path):
    torch.save({"w": torch.eye(2)}, tmp_path / "model.pt")
    save_file({}, tmp_path / "none.safetensors")
    contents = {"truncated": weights[0].read_bytes()[:-40], "text": b"hello", "empty": b""}
    for name, content in contents.items():
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    for name in ("model.pt", "none.safetensors", *(f"{n}.safetensors" for n in (*contents, "missing")), "."):
        ran = equipoise("norm", (tmp_path / name).resolve())
        assert (ran.code, ran.out) == (2, ""), name
        assert (tmp_path / name).resolve().name in ran.err.replace("\n", "")
        assert "Traceback" not in ran.err
        assert name != "model.pt" or "pickled" in ran.err


def test_a_model_in_several_files(equipoise, tmp_path):
    save_file({"a.weight": torch.eye(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b.weight": 2 * torch.eye(3)}, tmp_path / "model-00002-of-00002.safetensors")
    assert [row["name"] for row in equipoise("norm", tmp_path, "--json").json["weights"]] == ["a.weight", "b.weight"]
    only = equipoise("norm", tmp_path, "--json", "--only", "b.*").json
    assert [row["name"] for row in only["weights"]] == ["b.weight"]
    none = equipoise("norm", tmp_path, "--only", "c.*")
    assert none.code == 2
    assert "matches 'c.*'" in none.err


@pytest.mark.parametrize(("limit", "code"), [(1e9, 0), (1e-3, 1)])
def test_a_limit_decides_the_exit_code(equipoise, weights, limit, code):
    ran = equipoise("norm", weights[0], "--rtol", "0.1", "--fail-above", limit)
    assert ran.code == code
    assert ("larger than" in ran.err) == bool(code)


def test_an_index_names_the_parts_and_heads_get_rows(tmp_path):
    torch.manual_seed(0)
    W, V = torch.randn(8, 6), torch.randn(5, 3)
    save_file({"q": W}, tmp_path / "a.safetensors")
    save_file({"v": V}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"q": "a.safetensors", "v": "b.safetensors"}}')
    rows = {row["name"]: row for row in weight_rows(index, heads=4)}
    assert list(rows) == ["q", "q[0]", "q[1]", "q[2]", "q[3]", "v"]
    for h in range(4):
        sigma = float(torch.linalg.svdvals(W[2 * h : 2 * h + 2].double())[0])
        assert rows[f"q[{h}]"]["lower"] <= sigma * (1 + 1e-12) <= rows[f"q[{h}]"]["upper"] * (1 + 2e-12)
    for text in ('{"weight_map": {"q": "../a.safetensors"}}', '{"weight_map": {}}', "[]"):
        index.write_text(text)
        with pytest.raises(InputError, match=r"index|outside"):
            list(weight_rows(index))
