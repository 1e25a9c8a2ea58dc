# SPDX-License-Identifier: Apache-2.0
"""Time the exchange of keys and values of a layer with a sliding window under context parallelism: by the halo and by
gathering the sequence, in turns.

    torchrun --nproc-per-node 4 benchmarks/window_exchange.py                  # ZAYA1-74B: 4 heads of 128, window 4,096
    torchrun --nproc-per-node 2 benchmarks/window_exchange.py --length 8192    # also on a CPU, over gloo

A round is `key_value_in_reach` and its backward pass, both ways equal to the bit in the keys. Written: milliseconds of
the slowest rank, median of --rounds, and the bytes that a rank receives at most in the forward pass.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from result_record import described, device_name, file_part, write

from zaya_plugin.parallel.context_exchange import key_value_in_reach
from zaya_plugin.parallel.context_order import ORDERS, ContextShard
from zaya_plugin.parallel.halo import Halo, halo

HEAD = 128


def seconds(function, device: torch.device) -> float:
    """Return how long the slowest rank takes for `function`, which all begin together."""
    dist.barrier()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    spent = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32_768, help="tokens of the sequence")
    parser.add_argument("--window", type=int, default=4_096, help="previous tokens that a token sees")
    parser.add_argument("--heads", type=int, default=4, help="of keys, and as many of values")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--name", help="of the results file")
    parser.add_argument("--commit", help="recorded; default: the checkout's")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    record = {"benchmark": "window_exchange", **described(options.commit), "ranks": size}
    record |= {"length": options.length, "window": options.window, "heads": options.heads, "rows": []}
    for order in ORDERS:
        shard = ContextShard(order, size, rank)
        shape = (options.length // size, 1, options.heads, HEAD)
        torch.manual_seed(rank)
        inputs = [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(2)]
        exchange = halo(shard, shape[0] // len(shard.chunks), options.window)
        row_bytes = 2 * options.heads * HEAD * inputs[0].element_size()
        received = {"halo": round((exchange.reach - 1) * shape[0]), "gather": options.length - shape[0]}
        times, parts = {"halo": [], "gather": []}, {}

        def one_round(way: str, inputs=inputs, shard=shard, parts=parts) -> None:
            parts[way] = key_value_in_reach(*inputs, options.window, shard, dist.group.WORLD)
            flat = [part for pair in parts[way] for part in pair]
            torch.autograd.backward(flat, [part.detach() for part in flat])

        for turn in range(3 + options.rounds):
            for way, spent in times.items():
                Halo.is_shorter = way == "halo"  # in place of the property by which a run chooses
                taken = seconds(lambda way=way: one_round(way), device)
                if turn >= 3:
                    spent.append(1e3 * taken)
        pairs = zip(parts["halo"], parts["gather"], strict=True)
        assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))
        row = {"order": order, "shorter_is": "halo" if exchange.reach < size else "gather"}
        for way, spent in times.items():
            row[way] = {"ms": round(statistics.median(spent), 3), "received_mb": received[way] * row_bytes / 1e6}
        record["rows"].append(row)
        if rank == 0:
            print(row, flush=True)
    if rank == 0:
        write(record, options.name or f"window_exchange-{size}x{file_part(device_name())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
