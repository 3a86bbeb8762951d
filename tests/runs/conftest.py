import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # runs_nets, also for `package.module:factory` on the command line

import runs_nets


@pytest.fixture
def net():
    return runs_nets.net()


@pytest.fixture
def xy():
    return runs_nets.data()
