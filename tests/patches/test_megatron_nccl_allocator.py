# SPDX-License-Identifier: Apache-2.0
"""Registered buffers with a process group and memory pools that only write down what is asked of them; tests/gpu has
NCCL's.
"""

import contextlib
import importlib.util
import logging
import os
import sys

import pytest
import torch

from zaya_plugin.parallel import registered_buffers
from zaya_plugin.patches.megatron_nccl_allocator import PATCH


class Pool:
    """Empty until something was allocated in it."""

    def __init__(self):
        self.segments = []

    def snapshot(self):
        return self.segments


class Group:
    """Calls in their order; `refusal` is raised by registrations."""

    def __init__(self, refusal=None):
        self.calls, self.refusal, self.mem_allocator = [], refusal, object()

    def _get_backend(self, device):
        return self

    def size(self):
        return 4

    def register_mem_pool(self, pool, symm=False):
        if self.refusal:
            raise self.refusal
        self.calls.append(("register", pool, symm))

    def deregister_mem_pool(self, pool):
        assert ("register", pool, True) in self.calls, "torch refuses what is not registered"
        self.calls.append(("deregister", pool))


@pytest.fixture
def group():
    return Group()


@pytest.fixture
def allocator(monkeypatch, group):
    """megatron.core.nccl_allocator as it comes, and the patch: other tests in this process may have patched the module
    already.
    """
    import megatron.core

    found = importlib.util.find_spec("megatron.core.nccl_allocator")
    nccl_allocator = importlib.util.module_from_spec(found)
    found.loader.exec_module(nccl_allocator)
    monkeypatch.setattr(megatron.core, "nccl_allocator", nccl_allocator)
    monkeypatch.setitem(sys.modules, nccl_allocator.__name__, nccl_allocator)
    monkeypatch.setattr(registered_buffers, "_registered", [])
    monkeypatch.setattr(registered_buffers, "_ends_with_release", False)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: group.calls.append("synchronize"))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: group.calls.append("barrier"))
    PATCH.install()
    return nccl_allocator


def allocate(allocator, pool, group, gib=0.5):
    with allocator.nccl_mem(pool, group=group, symmetric=True):
        pool.segments.append({"total_size": int(gib * 2**30)})


def test_the_memory_is_torch_s_and_the_environment_is_left_alone(allocator, group, monkeypatch):
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_group", lambda: group)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda memory: ("pool of", memory))
    before = dict(os.environ)
    allocator.init()
    assert allocator.create_nccl_mem_pool(symmetric=True) == ("pool of", group.mem_allocator)
    assert dict(os.environ) == before


def test_what_was_registered_is_taken_back_once_behind_all_ranks(allocator, group, caplog):
    first, second, third = Pool(), Pool(), Pool()
    with caplog.at_level(logging.INFO):
        for pool in (first, second, third):
            allocate(allocator, pool, group)
        allocate(allocator, second, group, 1.0)  # again: Megatron takes the registration of before back
    assert "registered buffers: 1.50 GiB with a group of 4" in caplog.text
    made = [("register", pool, True) for pool in (first, second, third)]
    assert group.calls == [*made, ("deregister", second), ("register", second, True)]
    del group.calls[3:]
    registered_buffers.end_with_release()
    allocator.deregister_mem_pool(first, group)  # Megatron's end: a graph may still send from there
    assert group.calls == made
    registered_buffers.release()
    assert group.calls[3:] == [
        "synchronize",
        "barrier",
        ("deregister", third),
        ("deregister", second),
        ("deregister", first),
    ]
    registered_buffers.release()
    assert len(group.calls) == 8


def test_a_host_s_own_end_takes_them_back(allocator, group):
    pool = Pool()
    allocate(allocator, pool, group)
    allocator.deregister_mem_pool(pool, group)
    assert group.calls == [("register", pool, True), ("deregister", pool)]
    registered_buffers.release()
    assert len(group.calls) == 2


@pytest.mark.parametrize("refusal", [RuntimeError("no symmetric memory"), TypeError("unexpected keyword 'symm'")])
def test_a_refusal_ends_the_run_and_leaves_nothing_to_take_back(allocator, refusal):
    group = Group(refusal)
    with pytest.raises(
        ValueError, match=r"parallel.nccl_ub=true: 0.50 GiB cannot be registered .*Allowed: false on this machine"
    ):
        allocate(allocator, Pool(), group)
    registered_buffers.release()
    assert group.calls == []


def test_an_error_inside_registers_nothing(allocator, group):
    with pytest.raises(MemoryError), allocator.nccl_mem(Pool(), group=group, symmetric=True):
        raise MemoryError
    assert group.calls == [] and registered_buffers._registered == []
