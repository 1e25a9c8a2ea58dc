# SPDX-License-Identifier: Apache-2.0
"""A rank of the checks `graph_capture` and `all_reduce`:

    python -m zaya_plugin.machines.collective_rank <all_reduce or graph_capture> <cuda or cpu> <rank> <ranks> <folder>
        [<device>]

The ranks meet through a file in the folder, so no port is needed; rank 0 writes result.json there. device: the number
of the rank's device, its rank by default; with ranks on two nodes (`zaya verify --nodes`) the two differ.
"""

import datetime
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as distributed

from zaya_plugin.bench import collectives

RESULT, MEETING = "result.json", "meeting"
CPU_SIZES, GPU_SIZES = [2**n for n in (10, 16, 20, 22)], [2**n for n in range(12, 31, 3)]
WATCHDOG_S = 3.0  # torch's watchdog of NCCL looks at its events once a second, also during a capture
REPLAYS = 3


def graph_capture(device: torch.device) -> dict:
    """Capture a multiplication, an all-reduce and an addition as one graph and replay it; on a CPU only run them.

    Capture mode and stream as in Megatron's full_cuda_graph.py. torch's watchdog has time to look at the events during
    the capture and after it.
    """
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    index = torch.arange(2**20, device=device)
    numbers = collectives.value(index, rank).float()
    total = collectives.expected("all_reduce", index, rank, ranks, index.numel()).float()
    source, held = torch.zeros_like(numbers), torch.zeros_like(numbers)

    def work() -> None:
        held.copy_(source)
        held.mul_(2)
        distributed.all_reduce(held)
        held.add_(1)

    work()  # connects the ranks
    if device.type == "cuda":
        torch.cuda.synchronize()
        distributed.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            work()
            time.sleep(WATCHDOG_S)
        work = graph.replay
    wrong = []
    for value in range(1, REPLAYS + 1):
        torch.mul(numbers, value, out=source)
        work()
        expected = 2 * value * total + 1
        differing = (held != expected).nonzero()
        if differing.numel():
            first = differing[0].item()
            wrong.append(f"replay {value}: {held[first].item()} for {expected[first].item()} at element {first:,}")
    if device.type == "cuda":
        torch.cuda.synchronize()
        time.sleep(WATCHDOG_S / 2)
        graph.reset()  # NCCL waits at its end for every graph that holds one of its kernels
    return {"wrong": wrong}


def all_reduce(device: torch.device) -> dict:
    """Return of each size bytes, ms of the slowest rank, gb_per_s that a device sends, and whether all sums are
    right.
    """
    rows = collectives.measure("all_reduce", CPU_SIZES if device.type == "cpu" else GPU_SIZES, device)
    keys = {"bytes": "size", "ms": "p50_ms", "gb_per_s": "eff_gbps"}
    return {"sizes": [{key: row[name] for key, name in keys.items()} | {"right": not row["#wrong"]} for row in rows]}


def main(argv: list[str]) -> int:
    part, kind, rank, ranks, folder = argv[0], argv[1], int(argv[2]), int(argv[3]), Path(argv[4])
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(argv[5]) if len(argv) > 5 else rank)
    if kind != "cpu":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if kind == "cpu" else "nccl",
        store=distributed.FileStore(str(folder / MEETING), ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    result = {"graph_capture": graph_capture, "all_reduce": all_reduce}[part](device)
    if rank == 0:
        (folder / RESULT).write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
