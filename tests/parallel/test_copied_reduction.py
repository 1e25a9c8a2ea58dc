# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter by copies: ranks as threads that share windows, against sums written out; what it does inside Megatron's DDP; how many windows it opens.

tests/parallel/test_copied_reduction_streams.py has the order of its streams on a device.
"""

import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import zaya_plugin.patches

zaya_plugin.patches.apply()  # before Megatron is imported

from megatron.core.distributed import param_and_grad_buffer  # noqa: E402
from megatron.core.parallel_state import RankGenerator  # noqa: E402

from tests.parallel import copied_reduction_ranks  # noqa: E402
from tests.parallel.copied_reduction_ranks import in_order  # noqa: E402
from zaya_plugin.config.schema import ParallelConfig  # noqa: E402
from zaya_plugin.parallel import copied_reduction  # noqa: E402
from zaya_plugin.parallel.copied_reduction import Pending, Reduction, StartByCopies  # noqa: E402
from zaya_plugin.plan.flops import Shape  # noqa: E402
from zaya_plugin.plan.memory import WINDOW_SLOT, windows_bytes  # noqa: E402
from zaya_plugin.plan.parallelism import Layout  # noqa: E402

CPU = torch.device("cpu")
BASE = Shape(40, 2048, 8, 2, 128, 16, 2048, 256, 262_272)


class Threads:
    """A window of one of several threads. late: seconds of random delay around each barrier, in which a missing one would show."""

    def __init__(self, rank, memory, barrier, slot_bytes, late):
        self.rank, self.size, self.slot_bytes, self.memory, self.shared, self.late = (
            rank,
            len(memory),
            slot_bytes,
            memory,
            barrier,
            late,
        )
        self.barriers = 0

    def slots(self, owner, dtype):
        return self.memory[owner].view(dtype).view(self.size, -1)

    def barrier(self):
        self.barriers += 1
        time.sleep(random.random() * self.late)
        self.shared.wait(timeout=20)
        time.sleep(random.random() * self.late)


def windows_of(ranks, slot_bytes, late=0.0, window=Threads):
    """A window that these ranks share, as each of them has it, by rank."""
    memory = [torch.zeros(len(ranks) * slot_bytes, dtype=torch.uint8) for _ in ranks]
    barrier = threading.Barrier(len(ranks))
    return {rank: window(number, memory, barrier, slot_bytes, late) for number, rank in enumerate(ranks)}


def on_threads(size, work, *windows):
    """work(rank, a reduction in each of `windows` that the rank has) of each thread, by rank."""
    with ThreadPoolExecutor(size) as pool:
        done = [
            pool.submit(work, rank, *(Reduction(each[rank], CPU) for each in windows if rank in each))
            for rank in range(size)
        ]
        return [each.result() for each in done]


def gradients(size, count, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size * count, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, count, slot_elements", [(2, 64, 64), (4, 100, 64), (3, 1000, 96), (8, 24, 512)])
def test_each_rank_has_the_sum_of_its_part(size, count, slot_elements, dtype):
    """In pieces that do not divide the part, four times in a row, the shard in its place inside the whole."""
    rounds = [gradients(size, count, seed, dtype) for seed in (0, 1, 2, 0)]

    def work(rank, reduction):
        shards = []
        for each in rounds:
            whole = each[rank].clone()
            shard = whole[rank * count : (rank + 1) * count]
            reduction(shard, whole).wait()
            shards.append(shard.clone())
            others = torch.ones(size * count, dtype=torch.bool)
            others[rank * count : (rank + 1) * count] = False
            assert torch.equal(whole[others], each[rank][others]), "the rest of the buffer is read, not written"
        assert reduction.window.barriers == 4 * (1 + -(-count // (slot_elements // 2))), (
            "one to begin with, and one a piece of half a slot"
        )
        return shards

    found = on_threads(size, work, windows_of(range(size), slot_elements * dtype.itemsize))
    for rank in range(size):
        for number, each in enumerate(rounds):
            parts = torch.stack([whole.view(size, count)[rank] for whole in each])
            exact, magnitude = parts.double().sum(dim=0), parts.double().abs().sum(dim=0)
            rounding = (size - 1) * torch.finfo(torch.float32).eps * magnitude + torch.finfo(
                dtype
            ).eps / 2 * exact.abs()  # once, where they are of bf16
            assert ((found[rank][number].double() - exact).abs() <= rounding).all()
            assert torch.equal(found[rank][number], in_order(parts)), "one part after the other, from rank 0's on"
        assert torch.equal(found[rank][0], found[rank][3]), "the same gradients give the same bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_is_changed_on_its_way_into_the_sum(dtype):
    """Where the other ranks have nothing to add: infinities, NaN, numbers too small to be normal; -0.0, to which -0.0 is added."""
    count, tiny = 8, torch.finfo(dtype).smallest_normal / 4
    special = torch.tensor([math.inf, -math.inf, math.nan, tiny, -tiny, torch.finfo(dtype).max, 1.0, -0.0]).to(dtype)

    def work(rank, reduction):
        whole = torch.stack(
            [special if owner == rank else torch.full((count,), -0.0, dtype=dtype) for owner in range(3)]
        ).flatten()
        shard = torch.full((count,), 7.0).to(dtype)
        own_slot = reduction.window.slots(rank, dtype)[rank].fill_(math.nan)
        reduction(shard, whole).wait()
        assert own_slot.isnan().all(), "nobody writes it, and nobody reads it"
        return shard

    bits, a_number = torch.int32 if dtype is torch.float32 else torch.int16, ~special.isnan()
    for shard in on_threads(3, work, windows_of(range(3), 2 * count * dtype.itemsize)):
        assert torch.equal(shard.view(bits)[a_number], special.view(bits)[a_number]) and shard.isnan().sum() == 1


class LeftOut(Threads):
    """One barrier of a call is none."""

    def barrier(self):
        if self.barriers == self.left_out:
            self.barriers += 1
        else:
            super().barrier()


# A slot has 64 fp32: 7 pieces of which the last is short, one, 3 in another dtype, 4, 5. An odd number ends in the half that the next call begins with.
CALLS = (
    (7 * 32 - 6, torch.float32),
    (24, torch.float32),
    (3 * 64 - 42, torch.bfloat16),
    (4 * 32, torch.float32),
    (5 * 32, torch.float32),
)


@pytest.mark.parametrize("group", ["all ranks", "pairs"])
@pytest.mark.parametrize(
    "left_out",
    [None, 0, 1, 2, 3],
    ids=["every barrier", "none to begin with", "none behind piece 0", "none behind 1", "none behind 2"],
)
def test_ranks_that_run_ahead_spoil_nothing_and_would_without_a_barrier(left_out, group):
    """Four ranks, all together and two by two in turn, several calls one behind the other; one barrier is left out in the windows of `group`."""
    schedule = [(count, dtype, seed) for seed in range(6) for count, dtype in CALLS]
    ranks_of = [((0, 1, 2, 3), (rank % 2, rank % 2 + 2)) for rank in range(4)]
    given = {
        (len(ranks), rank, call): gradients(1, len(ranks) * call[0], 10 * call[2] + rank, call[1])[0]
        for call in schedule
        for rank in range(4)
        for ranks in ranks_of[rank]
    }

    def kind(name):
        return Threads if left_out is None or name != group else type("Without", (LeftOut,), {"left_out": left_out})

    late = 0.004
    every = windows_of(range(4), 64 * 4, late, kind("all ranks"))
    pairs = windows_of((0, 2), 64 * 4, late, kind("pairs")) | windows_of((1, 3), 64 * 4, late, kind("pairs"))

    def work(rank, *reductions):
        wrong = 0
        for first in range(0, len(schedule), 2):
            for reduction, ranks in zip(reductions, ranks_of[rank], strict=True):
                for call in schedule[
                    first : first + 2
                ]:  # without the other group between them, whose barriers would hold the ranks together
                    own, size = reduction.window.rank, len(ranks)
                    whole = given[size, rank, call].clone()
                    shard = whole.view(size, -1)[own]
                    reduction.window.barriers = 0
                    reduction(shard, whole).wait()
                    expected = in_order(given[size, other, call].view(size, -1)[own] for other in ranks)
                    wrong += not torch.equal(shard, expected)
        return wrong

    found = on_threads(4, work, every, pairs)
    assert sum(found) == 0 if left_out is None else sum(found) > 0


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_program_that_devices_are_tested_with_runs_on_a_cpu(tmp_path, ranks):
    """tests/gpu/test_copied_reduction.py, but for graphs: processes over gloo, windows in shared files."""
    copied_reduction_ranks.run("sums", ranks, tmp_path, "cpu")
    assert [(tmp_path / f"calls{rank}").read_text() for rank in range(ranks)] == [
        str(copied_reduction_ranks.ROUNDS)
    ] * ranks


def bucket_group(size, rank, overlap, all_reduced):
    """What `start_grad_sync` of Megatron does with its module's function, and nothing else."""
    whole = torch.arange(8.0)
    group = SimpleNamespace(grad_reduce_handle=None, whole=whole, shard=whole[4 * rank : 4 * rank + 4])

    def start_grad_sync(force_all_reduce=False):
        if force_all_reduce:
            all_reduced.append(True)
            group.grad_reduce_handle = "the manager's"
            return
        op, processes = torch.distributed.ReduceOp.SUM, SimpleNamespace(size=lambda: size)
        param_and_grad_buffer.dist_reduce_scatter_func(group.shard, whole, op=op, group=processes, async_op=overlap)
        group.grad_reduce_handle = "the manager's" if overlap else None

    group.start_grad_sync = start_grad_sync
    return group


@pytest.mark.parametrize("overlap", [True, False])
def test_megatron_s_collective_is_replaced_for_the_call_alone(overlap, monkeypatch):
    stock = param_and_grad_buffer.dist_reduce_scatter_func
    reduced, waited = [], []
    monkeypatch.setattr(Pending, "wait", lambda self: waited.append(self))

    class Noted(Reduction):
        def __call__(self, shard, whole):
            reduced.append((shard, whole))
            return Pending(None)

    reduction = Noted(SimpleNamespace(size=2, rank=1), CPU)
    group = bucket_group(2, 1, overlap, all_reduced := [])
    start = StartByCopies(group, reduction)
    start()
    assert len(reduced) == 1 and reduced[0][0] is group.shard and reduced[0][1] is group.whole
    assert isinstance(group.grad_reduce_handle, Pending) if overlap else group.grad_reduce_handle is None
    assert len(waited) == (0 if overlap else 1)
    assert param_and_grad_buffer.dist_reduce_scatter_func is stock
    start(force_all_reduce=True)
    assert all_reduced and group.grad_reduce_handle == "the manager's" and len(reduced) == 1


def test_gradients_that_something_else_reduced_are_an_error_and_those_under_way_are_not():
    """As where a host brings a `start_grad_sync` of its own; and as in a run's first step, where Megatron returns at once."""
    group = SimpleNamespace(start_grad_sync=lambda force_all_reduce: None, grad_reduce_handle=None)
    start = StartByCopies(group, None)
    with pytest.raises(
        RuntimeError,
        match="parallel.reduce_by_copies = True: gradients were reduced by something else .*allowed here: False",
    ):
        start()
    start(force_all_reduce=True)
    group.grad_reduce_handle = "under way"
    start()
    assert group.grad_reduce_handle == "under way"


def test_an_error_inside_leaves_megatron_s_function():
    stock = param_and_grad_buffer.dist_reduce_scatter_func

    def fail(force_all_reduce=False):
        raise RuntimeError("a broken link")

    start = StartByCopies(SimpleNamespace(start_grad_sync=fail, grad_reduce_handle=None), None)
    with pytest.raises(RuntimeError, match="a broken link"):
        start()
    assert param_and_grad_buffer.dist_reduce_scatter_func is stock


def test_the_memory_plan_knows_the_size_of_a_slot():
    assert copied_reduction.SLOT_BYTES == WINDOW_SLOT == 2**20 * ParallelConfig().reduce_by_copies_mib
    assert 2**20 % copied_reduction.ALIGNMENT == 0


class Ranks:
    """A process group of these ranks, as far as `reduce_by_copies` looks."""

    def __init__(self, *ranks):
        self.ranks, self.size = ranks, lambda: len(ranks)


def bucket_group_of(group, *counts):
    """A bucket group of Megatron with fp32 buckets of so many elements, as far as `reduce_by_copies` looks."""
    buckets = [SimpleNamespace(grad_data=torch.zeros(count)) for count in counts]
    return SimpleNamespace(intra_distributed_optimizer_instance_group=group, buckets=buckets, start_grad_sync="stock")


def chunk_of(dense, experts):
    return SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=True),
        bucket_groups=dense,
        expert_parallel_bucket_groups=experts,
    )


@pytest.fixture
def opened(monkeypatch):
    """(group, bytes of a slot) of the windows that are opened, in order, all with a timeout of ten minutes; none is really."""
    found = []

    def open_window(group, slot_bytes, device, timeout_ms):
        assert timeout_ms == 600_000
        found.append((group, slot_bytes))
        return SimpleNamespace(size=group.size(), rank=0, slot_bytes=slot_bytes)

    monkeypatch.setattr(copied_reduction, "open_window", open_window)
    monkeypatch.setattr(copied_reduction, "DistributedDataParallel", SimpleNamespace)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: list(group.ranks))
    return found


def test_a_slot_is_no_larger_than_the_largest_shard(opened):
    two, one = Ranks(0, 1), Ranks(0)
    first, second, alone = bucket_group_of(two, 100, 4000), bucket_group_of(two, 10), bucket_group_of(one, 9999)
    copied_reduction.reduce_by_copies([chunk_of([first, second], [alone])])
    copied_reduction.reduce_by_copies([chunk_of([first, second], [alone])], slot_bytes=512)
    assert opened == [(two, 8192), (two, 512)], "4000 fp32 elements over two ranks, in steps of 256 bytes"
    assert (
        isinstance(first.start_grad_sync, StartByCopies)
        and first.start_grad_sync.reduction is second.start_grad_sync.reduction
    )
    assert alone.start_grad_sync == "stock"


def test_a_window_is_of_ranks_not_of_their_group(opened, caplog):
    """Experts have a group of their own, of the same ranks or of others; an order of ranks is another window too, for slots are by rank in the group."""
    dense, same, fewer, turned = Ranks(0, 1, 2, 3), Ranks(0, 1, 2, 3), Ranks(0, 2), Ranks(1, 0, 2, 3)
    groups = [bucket_group_of(group, 1024) for group in (dense, same, fewer, turned)]
    with caplog.at_level("INFO"):
        copied_reduction.reduce_by_copies([chunk_of(groups[:1], groups[1:2]), chunk_of([], groups[2:])])
    assert opened == [(dense, 1024), (fewer, 2048), (turned, 1024)]
    reductions = [each.start_grad_sync.reduction for each in groups]
    assert reductions[0] is reductions[1] and len(set(map(id, reductions))) == 3
    assert caplog.text.count("gradients reduced by copies: a window of 0.0 MiB with a group of 4") == 2


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("expert", [1, 2, 4, 8])
@pytest.mark.parametrize("context, pipeline", [(1, 1), (2, 1), (1, 2)])
def test_the_memory_plan_has_as_many_windows_as_there_are_sets_of_ranks(tensor, expert, context, pipeline):
    """Megatron's groups of 16 ranks: `dp-cp` of what is no expert; of experts, which are never cut, every e-th rank of a stage."""
    stage = 16 // pipeline
    whole = RankGenerator(
        tp=tensor, ep=1, dp=stage // (tensor * context), pp=pipeline, cp=context, order="tp-cp-ep-dp-pp"
    ).get_ranks("dp-cp")
    experts = RankGenerator(tp=1, ep=expert, dp=stage // expert, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp").get_ranks(
        "dp"
    )
    layout = Layout(
        data=stage // (tensor * context), context=context, tensor=tensor, expert=expert, pipeline=pipeline, copies=True
    )
    for rank in range(16):
        sets = {tuple(group) for groups in (whole, experts) for group in groups if rank in group}
        planned = sum(windows_bytes(BASE, layout).values()) / WINDOW_SLOT  # a slot for each rank of each window
        assert planned == sum(len(ranks) for ranks in sets if len(ranks) > 1)
