# SPDX-License-Identifier: Apache-2.0
"""A rank of zaya_plugin.machines.collective_rank with a fault, which ZAYA_TEST_FAULT names."""

import os
import sys
import time

import torch
import torch.distributed as distributed

from zaya_plugin.machines import collective_rank

FAULT, RANK = os.environ["ZAYA_TEST_FAULT"], int(sys.argv[3])


def halves_swapped(tensor: torch.Tensor, *positional, **named) -> None:
    """Every sum is right, but rank 0 finds it in the other half, as from a chunk's wrong offset."""
    all_reduce(tensor, *positional, **named)
    if RANK == 0 and tensor.numel() > 2:
        tensor.copy_(tensor.roll(tensor.numel() // 2))


all_reduce = distributed.all_reduce
if FAULT == "hang" and RANK == 1:
    time.sleep(600)
if FAULT == "abort" and RANK == 1:
    print("watchdog thread terminated with exception: operation not permitted on a capturing stream", flush=True)
    os.abort()
if FAULT == "swap":
    distributed.all_reduce = halves_swapped
sys.exit(collective_rank.main(sys.argv[1:]))
