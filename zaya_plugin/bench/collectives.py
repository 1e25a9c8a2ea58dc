# SPDX-License-Identifier: Apache-2.0
"""Measure collectives over groups of ranks, and check every element that they deliver.

A row has the fields of rccl-tests' JSON first, in its definitions: size, the bytes of the larger of a rank's two
buffers; time, microseconds of a call, the mean over calls and ranks; algBw, size over time in GB/s; busBw, algBw times
the share of `size` that a device sends in a ring; #wrong, elements with a wrong value, of all ranks. Calls follow each
other on a device's stream, as in rccl-tests. Then come Primus' columns: bytes of one rank's part, percentiles of the
slowest rank's time of each call, eff_gbps of bytes and p50_ms. No torch import at the top.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zaya_plugin.bench.probes import CHECKED_AT_ONCE, PERIOD, call_seconds
from zaya_plugin.bench.results import free_bytes
from zaya_plugin.config.schema import MachineConfig
from zaya_plugin.plan.expected_step import between_instances, collective_seconds

ELEMENT = 4  # bytes: collectives move fp32, as gradients do
USABLE = 0.9  # of a device's free memory, for the buffers
CALLS = {"cpu": 5, "cuda": 20}
PRIMUS_COLUMNS = (
    *("host", "world", "suite", "op", "bytes", "dtype", "repeat", "p50_ms", "p95_ms", "min_ms", "max_ms"),
    *("eff_gbps", "slowest_rank", "rank_p95_spread_ms"),
)


@dataclass(frozen=True)
class Operation:
    """A collective. name, redop: rccl-tests'. primus: Primus' name. whole_input, whole_output: whether a rank's buffer
    has all `size` bytes, or one part of them for each rank. in_place: it has one buffer.
    """

    name: str
    primus: str
    redop: str = "none"
    whole_input: bool = True
    whole_output: bool = True
    in_place: bool = False

    def sent(self, ranks: int) -> float:
        """Return the bytes that a device sends in a ring, over `size` (rccl-tests' factor of busBw)."""
        if self.name == "Broadcast":
            return 1.0
        return (2 if self.name == "AllReduce" else 1) * (ranks - 1) / ranks


OPERATIONS = {
    "all_reduce": Operation("AllReduce", "all_reduce", "sum", in_place=True),
    "reduce_scatter": Operation("ReduceScatter", "reduce_scatter", "sum", whole_output=False),
    "all_gather": Operation("AllGather", "all_gather", whole_input=False),
    "broadcast": Operation("Broadcast", "broadcast", in_place=True),
    "all_to_all": Operation("AlltoAll", "alltoall"),
}


@dataclass(frozen=True)
class Partition:
    """All ranks of a job in groups of `ranks`, which work at the same time. stride: distance of a group's neighbours;
    1: ranks that follow each other; otherwise one rank of each of `ranks` nodes or instances.
    """

    ranks: int
    stride: int = 1

    def groups(self, world: int) -> Iterator[list[int]]:
        """Yield the ranks of each group."""
        block = self.ranks * self.stride
        for first in range(0, world, block):
            for offset in range(self.stride):
                yield list(range(first + offset, first + block, self.stride))

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}" + f", distance {self.stride}" * (self.stride > 1)


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def partitions(world: int, of_node: int) -> list[Partition]:
    """Return groups within a node of every size that divides it, groups of whole nodes, and groups with one rank of
    each node or of each group of nodes.
    """
    several = divisors(world // of_node)[1:]
    within = [Partition(ranks) for ranks in divisors(of_node)]
    whole = [Partition(of_node * nodes) for nodes in several]
    return within + whole + ([Partition(nodes, world // nodes) for nodes in several] if of_node > 1 else [])


def link_rate(machine: MachineConfig, ranks: int, stride: int = 1) -> float:
    """Return the GB/s that a device of a group can send, the ceiling of busBw.

    xGMI has a link to each other device of the node, so fewer devices have fewer links. A group of whole nodes crosses
    each node's border with all its NICs; of one rank a node each has its own.
    """
    if stride > 1:
        return machine.network_gb_per_s if stride >= machine.devices_per_node else machine.link_gb_per_s
    if ranks > machine.devices_per_node:
        return min(machine.link_gb_per_s, machine.devices_per_node * machine.network_gb_per_s)
    links = (ranks - 1) / (machine.devices_per_node - 1) if (machine.name or "").startswith("MI") else 1.0
    return machine.link_gb_per_s * links


def predicted_seconds(machine: MachineConfig, operation: Operation, partition: Partition, size: int) -> float:
    """Return the time of one call by the model of `zaya bench expect` (plan/expected_step.py)."""
    if operation.name == "AllReduce" and partition.stride > 1:
        return between_instances(machine, partition.stride, partition.ranks, size)
    return collective_seconds(machine, partition.ranks, operation.sent(partition.ranks) * size)


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


def filled(tensor, of: Callable) -> None:
    """Write of(index) to the elements of `tensor` with the numbers `index`."""
    for index, chunk in _chunks(tensor):
        chunk.copy_(of(index))


def wrong_elements(tensor, of: Callable):
    """Return how many elements of `tensor` differ from of(index), as a tensor."""
    return sum((chunk != of(index)).sum() for index, chunk in _chunks(tensor))


def _chunks(tensor):
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
    count = size // ELEMENT if operation.in_place else part * ranks
    source = torch.empty(count if operation.whole_input else part, device=device)
    if operation.in_place:
        return source, source
    return source, torch.empty(count if operation.whole_output else part, device=device)


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
    operation = OPERATIONS[op]
    shares = [1.0 if whole else 1 / ranks for whole in (operation.whole_input, operation.whole_output)]
    least = torch.tensor(free, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return int(USABLE * least.item() / (shares[0] if operation.in_place else sum(shares)))


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
    operation, ranks, rank = OPERATIONS[op], partition.ranks, distributed.get_rank(group)
    hosts: list[str] = [""] * world
    distributed.all_gather_object(hosts, socket.gethostname())
    most, rows = largest_size(op, ranks, device), []
    for size in sizes:
        if size // ELEMENT < ranks:
            continue
        if size > most:
            say(f"{op} of {partition}: {size:,} bytes and more do not fit into the free memory ({most:,} do)")
            break
        source, target = buffers(op, size, ranks, device)
        part = max(source.numel(), target.numel()) // ranks
        filled(source, lambda index: value(index, rank))
        call = call_of(op, source, target, group)
        call()
        wrong = wrong_elements(target, lambda index, part=part: expected(op, index, rank, ranks, part))
        distributed.barrier()
        times = call_seconds(call, device, CALLS[device.type])
        mine = torch.tensor([*times, float(wrong)], dtype=torch.float64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(world)]
        distributed.all_gather(gathered, mine)
        nbytes = ELEMENT * max(source.numel(), target.numel())
        rows.append(row_of(operation, partition, nbytes, [other.tolist() for other in gathered], hosts))
        del source, target, call
    return rows


def row_of(
    operation: Operation, partition: Partition, size: int, gathered: Sequence[Sequence[float]], hosts: Sequence[str]
) -> dict:
    """Return a row. gathered: of every rank the seconds of its calls, and at the end its number of wrong elements."""
    times, ranks = [values[:-1] for values in gathered], partition.ranks
    slowest = [max(of_call) for of_call in zip(*times, strict=True)]
    late = [percentile(of_rank, 95) for of_rank in times]
    last = late.index(max(late))
    seconds = statistics.fmean(map(statistics.fmean, times))
    whole = operation.whole_input and operation.whole_output
    primus_bytes = size if whole else size // ranks
    factor = (2 if operation.name == "AllReduce" else 1) * (ranks - 1) / ranks  # Primus' is this for broadcast too
    p50 = percentile(slowest, 50)
    return {
        "size": size,
        "type": "float",
        "redop": operation.redop,
        "time": 1e6 * seconds,
        "algBw": size / seconds / 1e9,
        "busBw": operation.sent(ranks) * size / seconds / 1e9,
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
        "p95_ms": 1e3 * percentile(slowest, 95),
        "min_ms": 1e3 * min(slowest),
        "max_ms": 1e3 * max(slowest),
        "eff_gbps": factor * primus_bytes / p50 / 1e9,
        "slowest_rank": f"r{last}@{hosts[last]}",
        "rank_p95_spread_ms": 1e3 * (max(late) - percentile(late, 50)),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile with linear interpolation between neighbours."""
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[math.ceil(place)] - ordered[low])
