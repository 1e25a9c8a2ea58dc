# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter of gradients inside one host by copies: each rank's part goes into its owner's window, who adds them up there.

NCCL's and RCCL's rings run on the processors that the backward pass needs, from the first hop to the last; here one pass does, over a rank's
own part and what has arrived, and copies between devices are the copy engines' (`torch.distributed._symmetric_memory` has the idea, there "low-contention
collectives"). The parts are added in the order of ranks, in fp32, and rounded once to the gradients' dtype, so the reduction repeats to the bit whatever
links do (`hip_ops.add_up_parts_`).

A piece is half a slot of the window, and the halves take turns, in every call from the first one on. Two streams, time to the right, `|` a barrier of all:

    copies to the others  |  copies 0  |  copies 1  |  copies 2  |
    sums                  |            |  sum 0     |  sum 1     |  sum 2

Between two barriers a rank copies piece k + 1 into one half of the others' windows while it adds up piece k, out of the other half of its own; it goes into
the second of them when both are done.
- What a sum reads has arrived: sum k comes behind the barrier that each rank goes into with its copies k done.
- Nothing is written that is still read: copies k + 2, into the half of k, come behind the barrier that each rank goes into with its sum k done. Copies 0 and 1
  come behind the barrier that a call starts with, into which each rank goes with all sums of its calls before done, be their pieces odd or even in number, of
  this dtype or another. So no call needs to know of the one before, nothing is counted from call to call, and a graph that holds calls can be replayed.
- Its own part a rank reads where the gradients are; its slot in its own window nobody writes or reads.
- Sum k overwrites no gradient that is still to be read: it is written where own part k was, each element by who has read it. Who waits for the call waits
  for both streams.

On NVIDIA's devices a rank's copies of a piece follow one another in one stream. Windows of other ranks are independent of this one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer
from torch import Tensor

from hip_ops import parts_sum
from zaya_plugin.parallel.shared_window import Window, open_window

SLOT_BYTES = (
    2**26
)  # zaya_plugin.plan.memory.WINDOW_SLOT; eight ranks' windows have 512 MiB, and a piece's copies should take 0.6 ms
ALIGNMENT = 256
FUNCTION = "dist_reduce_scatter_func"  # what Megatron reduces a bucket with, a name of its module

logger = logging.getLogger(__name__)


def reduce_by_copies(model_chunks: Iterable, slot_bytes: int = SLOT_BYTES, timeout_minutes: float = 10) -> None:
    """Let the gradients of `model_chunks`, as DDP wraps them, be reduced by copies. All ranks call this together.

    slot_bytes: of a window for each rank that writes it, a multiple of ALIGNMENT, where no shard is smaller; timeout_minutes: until a rank on a device gives
    up waiting for the others.

    Raises:
        ValueError: the ranks are on several hosts, or their devices cannot map each other's memory.
    """
    # By ranks, not by group: experts have a group of their own where its ranks are those of the rest too. What shares a window is reduced in one order,
    # which has to be the same on all its ranks, as that of the backward pass is.
    by_ranks: dict[tuple[int, ...], list] = {}
    for chunk in model_chunks:
        assert isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if (group := bucket_group.intra_distributed_optimizer_instance_group).size() > 1:
                by_ranks.setdefault(tuple(torch.distributed.get_process_group_ranks(group)), []).append(bucket_group)
    for bucket_groups in by_ranks.values():
        group = bucket_groups[0].intra_distributed_optimizer_instance_group
        buckets = [bucket.grad_data for bucket_group in bucket_groups for bucket in bucket_group.buckets]
        largest = max(bucket.numel() * bucket.element_size() // group.size() for bucket in buckets)
        slot = min(slot_bytes, math.ceil(largest / ALIGNMENT) * ALIGNMENT)
        window = open_window(group, slot, buckets[0].device, round(timeout_minutes * 60_000))
        logger.info(
            "gradients reduced by copies: a window of %.1f MiB with a group of %d",
            window.slot_bytes * window.size / 2**20,
            window.size,
        )
        reduction = Reduction(window, buckets[0].device)
        for bucket_group in bucket_groups:
            bucket_group.start_grad_sync = StartByCopies(bucket_group, reduction)


class Reduction:
    """Reduce-scatters among the ranks of one window, one behind the other."""

    def __init__(self, window: Window, device: torch.device):
        self.window = window
        # Here and not in its first call, which may be captured in a graph: it is compared with torch first.
        self.add_up_ = parts_sum.adder_on(device)

        def stream() -> torch.cuda.Stream | None:
            # Before the blocks of the backward pass's kernels that wait for a processor: what comes late here is late on every rank.
            return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

        self.stream, self.sums = stream(), stream()
        # An xGMI device reaches each other device over a link of its own; through NVSwitch one copy has all links.
        self.lanes = [stream() for _ in range(window.size - 1)] if self.stream and torch.version.hip else []

    def __call__(self, shard: Tensor, whole: Tensor) -> Pending:
        """shard [n]: the sum over ranks of their whole[rank n : (rank + 1) n]; whole [size n], in which the shard may lie, there alone."""
        window, count = self.window, shard.numel()
        half = window.slot_bytes // (2 * whole.element_size())
        parts, mine = whole.view(window.size, count), window.slots(window.rank, whole.dtype)
        with torch.no_grad():
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream())
            with _on(self.stream):
                window.barrier()
            for number, start in enumerate(range(0, count, half)):
                piece = slice(start, min(start + half, count))
                place = slice(number % 2 * half, number % 2 * half + piece.stop - start)
                self._send(parts[:, piece], place)
                if (
                    number > 0
                ):  # until its first sum that stream is in no graph which is captured here, and nothing in a graph may wait for it
                    _after(self.stream, self.sums)
                with _on(self.stream):
                    window.barrier()
                _after(self.sums, self.stream)
                with _on(self.sums):
                    self.add_up_(shard[piece], parts[window.rank, piece], mine[:, place], window.rank)
            _after(self.stream, self.sums)
        return Pending(self.stream)

    def _send(self, parts: Tensor, place: slice) -> None:
        """Row r of `parts` to `place` in this rank's slot of rank r's window, for all other ranks; each rank begins with another one."""
        window = self.window
        for step in range(1, window.size):
            owner = (window.rank + step) % window.size
            if self.lanes:
                _after(self.lanes[step - 1], self.stream)
            with _on(self.lanes[step - 1] if self.lanes else self.stream):
                window.slots(owner, parts.dtype)[window.rank, place].copy_(parts[owner])
        for lane in self.lanes:
            _after(self.stream, lane)


def _on(stream: torch.cuda.Stream | None):
    """What is launched within goes into `stream`; on a CPU, which has none, it runs at once."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def _after(stream: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
    """What `stream` is given from now on comes behind what `other` has been given so far."""
    if stream is not None:
        stream.wait_stream(other)


class Pending:
    """What `wait` puts in front of the current stream's next work: everything that `stream` has been given so far."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self.event = stream.record_event() if stream is not None else None

    def wait(self) -> None:
        if self.event is not None:
            self.event.wait()


class StartByCopies:
    """Takes the place of `start_grad_sync` of one of Megatron's bucket groups; what it does around the collective stays."""

    def __init__(self, bucket_group, reduction: Reduction):
        self.bucket_group, self.reduction, self.start = bucket_group, reduction, bucket_group.start_grad_sync

    def __call__(self, force_all_reduce: bool | None = False) -> None:
        started: list[Pending] = []

        def reduce_scatter(shard: Tensor, whole: Tensor, op, group, async_op: bool) -> None:
            assert op == torch.distributed.ReduceOp.SUM and group.size() == self.reduction.window.size
            started.append(self.reduction(shard, whole))
            if not async_op:
                started[-1].wait()

        under_way = self.bucket_group.grad_reduce_handle is not None  # then Megatron does nothing in a run's first step
        stock = getattr(param_and_grad_buffer, FUNCTION)
        setattr(param_and_grad_buffer, FUNCTION, reduce_scatter)
        try:
            self.start(force_all_reduce=force_all_reduce)
        finally:
            setattr(param_and_grad_buffer, FUNCTION, stock)
        if not (started or force_all_reduce or under_way):
            raise RuntimeError(
                f"parallel.reduce_by_copies = True: gradients were reduced by something else than Megatron's {FUNCTION}; allowed here: False"
            )
        # Megatron's handle is of a coalescing manager that saw no collective; the buckets' sums are behind one another in one stream.
        if started and self.bucket_group.grad_reduce_handle is not None:
            self.bucket_group.grad_reduce_handle = started[-1]
