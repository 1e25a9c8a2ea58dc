# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that run Megatron's modules in their own process; a conftest.py imports them."""

import pytest
import torch

import zaya_plugin.patches

zaya_plugin.patches.apply()  # before any test imports megatron


@pytest.fixture(scope="session", autouse=True)
def single_rank(tmp_path_factory):
    """Megatron's model-parallel state over a single process."""
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


@pytest.fixture(autouse=True)
def seed():
    """The same random streams for every test."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
