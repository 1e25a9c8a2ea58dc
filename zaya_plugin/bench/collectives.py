# SPDX-License-Identifier: Apache-2.0
"""Measure collectives over groups of ranks, and check every element that they deliver.

A row has the fields of rccl-tests' JSON first, in its definitions: size, the bytes of the larger of a rank's two
buffers; time, microseconds of a call, the mean over calls and ranks; algBw, size over time in GB/s; busBw, algBw times
the share of `size` that a device sends in a ring; #wrong, elements with a wrong value, of all ranks. Calls follow each
other on a device's stream, as in rccl-tests. Then come Primus' columns: bytes of one rank's part, percentiles of the
slowest rank's time of each call, eff_gbps of bytes and p50_ms. No torch import at the top.
"""

import socket
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zaya_plugin.bench.probes import CHECKED_AT_ONCE, PERIOD, call_seconds
from zaya_plugin.bench.results import free_bytes

ELEMENT = 4  # bytes: collectives move fp32, as gradients do
USABLE = 0.9  # of a device's free memory, for the buffers
CALLS = {"cpu": 5, "cuda": 20}
PRIMUS_COLUMNS = (
    *("host", "world", "suite", "op", "bytes", "dtype", "repeat", "p50_ms", "p95_ms", "min_ms", "max_ms"),
    *("eff_gbps", "slowest_rank", "rank_p95_spread_ms"),
)


class Operation(NamedTuple):
    """A collective. name, redop: of rccl-tests. primus: Primus' name. whole_input, whole_output: whether a rank's buffer
    has all `size` bytes, or one part of them for each rank. in_place: they are one buffer.
    """

    name: str
    redop: str
    primus: str
    whole_input: bool
    whole_output: bool
    in_place: bool = False

    def parts(self, ranks: int) -> list[int]:
        """Return for each buffer of a rank how many of the parts it holds."""
        return [ranks if whole else 1 for whole in (self.whole_input, self.whole_output)[self.in_place :]]


OPERATIONS = {
    "all_reduce": Operation("AllReduce", "sum", "all_reduce", True, True, in_place=True),
    "reduce_scatter": Operation("ReduceScatter", "sum", "reduce_scatter", True, False),
    "all_gather": Operation("AllGather", "none", "all_gather", False, True),
    "broadcast": Operation("Broadcast", "none", "broadcast", True, True, in_place=True),
    "all_to_all": Operation("AlltoAll", "none", "alltoall", True, True),
}


def sent(op: str, ranks: int) -> float:
    """Return the bytes that a device sends in a ring, over `size`: rccl-tests' factor of busBw."""
    return 1.0 if op == "broadcast" else (1 + (op == "all_reduce")) * (ranks - 1) / ranks


@dataclass(frozen=True)
class Partition:
    """All ranks of a job in groups of `ranks`, which work at the same time. stride: distance of a group's neighbours;
    1: ranks that follow each other; otherwise one rank of each of `ranks` nodes or instances.
    """

    ranks: int
    stride: int = 1

    def group_of(self, rank: int) -> list[int]:
        """Return the ranks of the group that has `rank`."""
        block = self.ranks * self.stride
        first = rank // block * block + rank % self.stride
        return list(range(first, first + block, self.stride))

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}" + f", distance {self.stride}" * (self.stride > 1)


def partitions(world: int, of_node: int) -> list[Partition]:
    """Return groups within a node of every size that divides it, groups of whole nodes, and groups with one rank of
    each node or of each group of nodes.
    """
    within, nodes = (
        [divisor for divisor in range(1, number + 1) if number % divisor == 0] for number in (of_node, world // of_node)
    )
    one_a_node = [Partition(count, world // count) for count in nodes[1:] if of_node > 1]
    return [*map(Partition, within), *(Partition(of_node * count) for count in nodes[1:]), *one_a_node]


def value(index, rank):
    """Return the numbers that `rank` gives at the elements `index`; both int64 tensors or ints."""
    return index % PERIOD + rank


def expected(op: str, index, rank: int, ranks: int, part: int):
    """Return the exact result of `op` at the elements `index` of a rank's output. part: elements of one rank's part.

    fp32 holds it exactly for up to 5,000 ranks.
    """
    if op == "broadcast":
        return value(index, 0)
    if op in ("all_gather", "all_to_all"):
        return value(index % part + (rank * part if op == "all_to_all" else 0), index // part)
    place = index + rank * part if op == "reduce_scatter" else index
    return ranks * value(place, 0) + ranks * (ranks - 1) // 2


def chunks(tensor):
    """Yield the numbers of elements, and the elements, in pieces of little memory."""
    import torch

    for first in range(0, tensor.numel(), CHECKED_AT_ONCE):
        chunk = tensor[first : first + CHECKED_AT_ONCE]
        yield torch.arange(first, first + chunk.numel(), device=tensor.device), chunk


def buffers(op: str, size: int, ranks: int, device) -> tuple:
    """Return input and output of `size` bytes, fp32; one tensor where the collective has one buffer. `size` is rounded
    down to equal parts.
    """
    import torch

    operation, part = OPERATIONS[op], size // ELEMENT // ranks
    if operation.in_place:
        return (torch.empty(size // ELEMENT, device=device),) * 2
    return tuple(torch.empty(parts * part, device=device) for parts in operation.parts(ranks))


def call_of(op: str, source, target, group) -> Callable[[], object]:
    """Return the call of torch.distributed."""
    from torch import distributed

    first = distributed.get_process_group_ranks(group or distributed.group.WORLD)[0]
    return {
        "all_reduce": lambda: distributed.all_reduce(source, group=group),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(target, source, group=group),
        "all_gather": lambda: distributed.all_gather_into_tensor(target, source, group=group),
        "broadcast": lambda: distributed.broadcast(source, first, group=group),
        "all_to_all": lambda: distributed.all_to_all_single(target, source, group=group),
    }[op]


def largest_size(op: str, ranks: int, device) -> int:
    """Return the bytes of the largest `size` whose buffers fit into the memory that is free on every rank."""
    import torch
    from torch import distributed

    if device.type != "cpu":
        torch.cuda.empty_cache()
    free = free_bytes(device) / (distributed.get_world_size() if device.type == "cpu" else 1)
    least = torch.tensor(free, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return int(USABLE * least.item() * ranks / sum(OPERATIONS[op].parts(ranks)))


def measure(
    op: str,
    sizes: Iterable[int],
    device,
    partition: Partition | None = None,
    group=None,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict]:
    """Measure `op` at each of `sizes`; every rank of the default group calls it, and all get the same rows.

    partition, group: of this call and this rank; None: all ranks in one group. A size that does not fit into memory
    ends the rows with a line to `say`.
    """
    import torch
    from torch import distributed

    world = distributed.get_world_size()
    partition = partition or Partition(world)
    ranks, rank = partition.ranks, distributed.get_rank(group)
    hosts: list[str] = [""] * world
    distributed.all_gather_object(hosts, socket.gethostname())
    most, rows = largest_size(op, ranks, device), []
    for size in sizes:
        if size > most:
            say(f"{op} of {partition}: {size:,} bytes and more do not fit into the free memory ({most:,} do)")
            break
        if size // ELEMENT < ranks:
            continue
        source, target = buffers(op, size, ranks, device)
        largest = max(source.numel(), target.numel())
        for index, chunk in chunks(source):
            chunk.copy_(value(index, rank))
        call = call_of(op, source, target, group)
        call()
        results = ((piece, expected(op, index, rank, ranks, largest // ranks)) for index, piece in chunks(target))
        wrong = sum(int((piece != right).sum()) for piece, right in results)
        distributed.barrier()
        times = call_seconds(call, device, CALLS[device.type])
        mine = torch.tensor([*times, wrong], dtype=torch.float64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(world)]
        distributed.all_gather(gathered, mine)
        rows.append(row_of(op, partition, ELEMENT * largest, [other.tolist() for other in gathered], hosts))
        del source, target, call, chunk  # before the next size
    return rows


def row_of(op: str, partition: Partition, size: int, gathered: Sequence[Sequence[float]], hosts: Sequence[str]) -> dict:
    """Return a row. gathered: of every rank the seconds of its calls, and at the end its number of wrong elements."""
    import numpy

    operation = OPERATIONS[op]
    times, ranks = [values[:-1] for values in gathered], partition.ranks
    slowest = [max(of_call) for of_call in zip(*times, strict=True)]
    late = numpy.percentile(times, 95, axis=1).tolist()
    last = late.index(max(late))
    p50, p95 = numpy.percentile(slowest, (50, 95)).tolist()
    seconds = statistics.fmean(map(statistics.fmean, times))
    primus_bytes = size if operation.whole_input and operation.whole_output else size // ranks
    factor = sent(op, ranks) if op != "broadcast" else (ranks - 1) / ranks  # Primus' own
    return {
        "size": size,
        "type": "float",
        "redop": operation.redop,
        "time": 1e6 * seconds,
        "algBw": size / seconds / 1e9,
        "busBw": sent(op, ranks) * size / seconds / 1e9,
        "#wrong": int(sum(values[-1] for values in gathered)),
        "gpus": ranks,
        "name": operation.name,
        "inPlace": int(operation.in_place),
        "stride": partition.stride,
        "host": hosts[0],
        "world": ranks,
        "suite": "rccl",
        "op": operation.primus,
        "bytes": primus_bytes,
        "dtype": "float32",
        "repeat": 1,
        "p50_ms": 1e3 * p50,
        "p95_ms": 1e3 * p95,
        "min_ms": 1e3 * min(slowest),
        "max_ms": 1e3 * max(slowest),
        "eff_gbps": factor * primus_bytes / p50 / 1e9,
        "slowest_rank": f"r{last}@{hosts[last]}",
        "rank_p95_spread_ms": 1e3 * (max(late) - statistics.median(late)),
    }
