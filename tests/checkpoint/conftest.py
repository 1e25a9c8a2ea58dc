# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of checkpoints."""

import pytest

from tests.checkpoint.storages import Disk, Memory


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of this process alone."""
    import torch

    if torch.distributed.is_initialized():  # by a test file before this one
        assert torch.distributed.get_world_size() == 1
        yield
        return
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(params=[Disk, Memory], ids=["posix", "memory"])
def storage(request, tmp_path):
    """The storages under which checkpoints are tested. The path of a socket has at most 107 bytes."""
    made = request.param(tmp_path)
    yield made
    made.close()
