# SPDX-License-Identifier: Apache-2.0
"""Ranks that reduce by copies, in processes of their own, on devices or on a CPU: `copied_reduction_ranks <what> <rank> <ranks> <folder> <cuda or cpu>`.

sums: reductions in two groups in turn, two of each without a pause, on late and early ranks, five rounds, and on devices ten more from one CUDA graph with
other numbers. Each rank holds its shards to sums that it makes itself on the CPU: of the parts in the order of their ranks, one by one, in fp32, rounded once.
They are equal to the last bit (the sign of a zero aside). A rank's slot in its own window holds NaN, which nobody reads.
alone: rank 0 waits at a barrier to which rank 1 does not come, and that has to be an error in its time.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch

from zaya_plugin import patches

ROOT = Path(__file__).resolve().parents[2]
SLOT = 2**20  # bytes; a piece has half of them
ROUNDS, REPLAYS = 5, 10
# Elements of a shard: 5 and 3 pieces, the last ones short. An odd number ends in the half that the next call begins with.
SHARDS = ((4 * 2**17 + 1016, torch.float32), (2 * 2**18 + 520, torch.bfloat16))
BUCKETS = 2  # in each group


class Late:
    """`window` of a rank that comes late to barriers, and leaves them late."""

    def __init__(self, window, device: torch.device, draw: random.Random):
        self.window, self.device, self.draw = window, device, draw
        self.rank, self.size, self.slot_bytes, self.slots = window.rank, window.size, window.slot_bytes, window.slots

    def barrier(self) -> None:
        sleep(self.device, self.draw.random())
        self.window.barrier()
        sleep(self.device, self.draw.random())


def sleep(device: torch.device, milliseconds: float) -> None:
    """Of the current stream on a device, about: clocks of 2 GHz."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * 2e6))
    else:
        time.sleep(milliseconds * 1e-3)


def given(call: int, bucket: int, rank: int, size: int) -> torch.Tensor:
    """[size, elements of a shard], what `rank` has for each rank of its group in a call. An infinity and a NaN too."""
    count, dtype = SHARDS[bucket // BUCKETS]
    generator = torch.Generator().manual_seed(1000 * call + 10 * bucket + rank)
    values = torch.randn(size, count, generator=generator).to(dtype)
    values[:, call], values[:, 100 + call] = (torch.inf, torch.nan) if rank == call % size else (1.0, -1.0)
    return values


def in_order(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors of one dtype: the first, the second to it, and so on, in fp32, rounded once."""
    first, *others = parts
    total = first.float()
    for each in others:
        total = total + each.float()
    return total.to(first.dtype)


def expected(call: int, bucket: int, rank: int, size: int) -> torch.Tensor:
    """What the rank's shard has to be."""
    return in_order(given(call, bucket, other, size)[rank] for other in range(size))


def groups_of(rank: int, ranks: int) -> list:
    """All ranks, and every second one; two ranks have a second group of both, as experts have."""
    subsets = [list(range(ranks))] if ranks == 2 else [list(range(first, ranks, 2)) for first in range(2)]
    made = [torch.distributed.new_group(subset) for subset in subsets]
    return [
        torch.distributed.group.WORLD,
        next(group for group, subset in zip(made, subsets, strict=True) if rank in subset),
    ]


def sums(rank: int, ranks: int, folder: Path, device: torch.device) -> None:
    from zaya_plugin.parallel.copied_reduction import Reduction
    from zaya_plugin.parallel.shared_window import open_window

    draw, reductions, buffers = random.Random(rank), [], []
    for group, (count, dtype) in zip(groups_of(rank, ranks), SHARDS, strict=True):
        window = open_window(group, SLOT, device, timeout_ms=30_000)
        window.slots(window.rank, dtype)[window.rank].fill_(torch.nan)
        assert count * dtype.itemsize > 2 * SLOT / 2 and count * dtype.itemsize % (SLOT / 2), (
            "several pieces, the last one short"
        )
        reductions += [Reduction(Late(window, device, draw), device)] * BUCKETS
        buffers += [torch.empty(group.size(), count, dtype=dtype, device=device) for _ in range(BUCKETS)]
    places = [(each.window.rank, each.window.size) for each in reductions]

    def fill(call: int) -> None:
        for number, (buffer, (own, size)) in enumerate(zip(buffers, places, strict=True)):
            buffer.copy_(given(call, number, own, size))

    def reduce() -> None:
        started = []
        for number, (reduction, buffer, (own, _)) in enumerate(zip(reductions, buffers, places, strict=True)):
            if number % BUCKETS == 0:
                sleep(device, 3 * draw.random())
            started.append(reduction(buffer[own], buffer.view(-1)))
        for each in started:
            each.wait()

    def check(call: int) -> None:
        for number, (buffer, (own, size)) in enumerate(zip(buffers, places, strict=True)):
            found, right = buffer[own].cpu(), expected(call, number, own, size)
            no_number = right.isnan()
            assert no_number.sum() == 1 and torch.equal(found.isnan(), no_number), (
                f"call {call}, bucket {number}: NaN elsewhere"
            )
            differ = int((found[~no_number] != right[~no_number]).sum())
            assert differ == 0, f"call {call}, bucket {number}: {differ} of {found.numel()} elements differ"

    for call in range(ROUNDS):
        fill(call)
        reduce()
        check(call)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # as Megatron captures
            reduce()
        for call in range(ROUNDS, ROUNDS + REPLAYS):
            fill(call)
            graph.replay()
            check(call)
    (folder / f"calls{rank}").write_text(str(call + 1))


def alone(rank: int, ranks: int, folder: Path, device: torch.device) -> None:
    from zaya_plugin.parallel.shared_window import open_window

    window = open_window(torch.distributed.group.WORLD, 1024, device, timeout_ms=2000)
    window.barrier()
    torch.cuda.synchronize()
    if rank:
        while not (folder / "error").exists():  # its memory is there until then
            time.sleep(0.1)
        os._exit(0)
    start = time.monotonic()
    window.barrier()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        (folder / "error").write_text(f"{time.monotonic() - start:.1f} s: {error}")
        os._exit(0)  # the device's context is gone
    raise AssertionError("a barrier without the others was passed")


def main(what: str, rank: int, ranks: int, folder: Path, kind: str) -> None:
    patches.apply_torch()
    patches.apply()
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = torch.distributed.FileStore(str(folder / "store"), ranks)
    backend = "nccl" if kind == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    {"sums": sums, "alone": alone}[what](rank, ranks, folder, device)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(what: str, ranks: int, folder: Path, kind: str, seconds: float = 120) -> None:
    """Start the ranks and wait for them; fails with what each wrote, if one does or if it is not done in `seconds`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    environment |= {"OMP_NUM_THREADS": "1"} | ({} if kind == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes, deadline = [], time.monotonic() + seconds
    try:
        for rank, log in enumerate(logs):
            command = [
                sys.executable,
                "-m",
                "tests.parallel.copied_reduction_ranks",
                what,
                str(rank),
                str(ranks),
                str(folder),
                kind,
            ]
            with open(log, "w") as output:
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
        while (
            None in (codes := [process.poll() for process in processes])
            and not any(codes)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, f"{codes} after {seconds} s at most\n" + "\n".join(
        f"{log.name}: {log.read_text()[-2000:]}" for log in logs
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
