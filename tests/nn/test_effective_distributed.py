"""Every layer under DistributedDataParallel: one process for all rows, two for some (slow)."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from layer_cases import inputs_for, row_id, rows
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this build of PyTorch has no gloo")
    store = tmp_path_factory.mktemp("ddp") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("case", "kind"), rows(), ids=row_id)
def test_gradients_are_those_of_the_layer(group, case, kind):
    torch.manual_seed(0)
    layer, x = case.make(kind), inputs_for(kind)
    alone = copy.deepcopy(layer)
    alone(x).square().sum().backward()
    DistributedDataParallel(layer)(x).square().sum().backward()
    for (name, p), q in zip(layer.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def _train(rank: int, store: str, folder: str) -> None:
    sys.path[:0] = [folder]
    from layer_cases import CASES  # a fresh process does not have pytest's path

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for case in CASES:
            torch.manual_seed(0)
            layer = case.make("linear")
            parallel = DistributedDataParallel(layer)
            sgd = torch.optim.SGD(parallel.parameters(), lr=0.1)
            torch.manual_seed(rank + 1)
            for _ in range(3):
                sgd.zero_grad()
                parallel(torch.randn(5, 4)).square().sum().backward()
                sgd.step()
            with torch.no_grad():
                mine = parallel.eval()(torch.ones(1, 4))
            both = [torch.zeros_like(mine) for _ in range(2)]
            dist.all_gather(both, mine)
            assert torch.equal(both[0], both[1]), case.name
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_stay_equal(tmp_path):
    folder = str(Path(__file__).parent)
    torch.multiprocessing.spawn(_train, (str(tmp_path / "store"), folder), nprocs=2, join=True)
