# SPDX-License-Identifier: Apache-2.0
"""Registered buffers with a process group and memory pools that only write down what is asked of them; tests/gpu has NCCL's."""

import contextlib
import os

import pytest
import torch

from zaya_plugin.patches import megatron_nccl_allocator as patch


class Pool:
    def snapshot(self):
        return []


class Group:
    """mem_allocator, and calls in their order."""

    def __init__(self):
        self.calls = []
        self.mem_allocator = object()

    def _get_backend(self, device):
        return self

    def register_mem_pool(self, pool, symm=False):
        self.calls.append(("register", pool, symm))

    def deregister_mem_pool(self, pool):
        self.calls.append(("deregister", pool))


@pytest.fixture
def allocator(monkeypatch):
    """megatron.core.nccl_allocator with the patch, undone afterwards."""
    from megatron.core import nccl_allocator

    for name in ("_allocator", "_build_nccl_allocator", "init", "nccl_mem", "deregister_mem_pool"):
        monkeypatch.setattr(nccl_allocator, name, getattr(nccl_allocator, name))
    monkeypatch.setattr(patch, "_registered", [])
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.install()
    return nccl_allocator


def test_the_memory_is_torch_s_and_the_environment_is_left_alone(allocator, monkeypatch):
    group = Group()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_group", lambda: group)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda memory: ("pool of", memory))
    before = dict(os.environ)
    allocator.init()
    assert allocator.create_nccl_mem_pool(symmetric=True) == ("pool of", group.mem_allocator)
    assert dict(os.environ) == before


def test_what_was_registered_is_taken_back_once(allocator, monkeypatch):
    pools, group = (Pool(), Pool()), Group()
    for pool in pools:
        with allocator.nccl_mem(pool, group=group, symmetric=True):
            pass
        monkeypatch.setattr(pool, "snapshot", lambda: ["a segment"])
    assert group.calls == [("register", pools[0], True), ("register", pools[1], True)]
    allocator.deregister_mem_pool(pools[0], group)  # as Megatron does at an exit condition
    patch.release()
    patch.release()
    assert group.calls[2:] == [("deregister", pools[0]), ("deregister", pools[1])]
