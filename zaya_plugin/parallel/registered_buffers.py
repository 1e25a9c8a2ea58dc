# SPDX-License-Identifier: Apache-2.0
"""Records the memory that is registered with NCCL or RCCL (parallel.nccl_ub), and takes the registrations back at the
end of a run.

NCCL aborts if memory is still registered when its communicators end. patches/megatron_nccl_allocator.py calls
`register` and `deregister` in place of Megatron's own; a run calls `end_with_release` at its start and `release` at its
end.
"""

from __future__ import annotations

import logging

import torch

from zaya_plugin.ground.errors import mistake

logger = logging.getLogger(__name__)
_registered: list[tuple] = []  # (memory pool, process group)
_ends_with_release = False


def register(group, device, pool, symmetric: bool) -> None:
    """Register the memory of `pool` with `group`; raises ValueError where NCCL or RCCL refuses it."""
    gib = sum(segment["total_size"] for segment in pool.snapshot()) / 2**30
    try:
        group._get_backend(device).register_mem_pool(pool, symm=symmetric)
    except (RuntimeError, TypeError) as refused:
        raise mistake(
            "parallel.nccl_ub",
            True,
            problem=(
                f"{gib:.2f} GiB cannot be registered with this NCCL or RCCL and torch {torch.__version__} ({refused})"
            ),
            allowed="false on this machine",
            fix="parallel.nccl_ub=false",
        ) from refused
    if (pool, group) not in _registered:
        _registered.append((pool, group))
    logger.info("registered buffers: %.2f GiB with a group of %d", gib, group.size())


def deregister(stock, pool, group) -> None:
    """Take one registration back with `stock`, Megatron's function; skip it if the run ends with `release`."""
    if (pool, group) not in _registered:
        stock(pool, group)
    elif not _ends_with_release:
        stock(pool, group)
        _registered.remove((pool, group))


def end_with_release() -> None:
    """Leave registrations to `release`: at Megatron's own end, graphs that send from that memory may still exist."""
    global _ends_with_release
    _ends_with_release = True


def release() -> None:
    """Take all registrations back, on all ranks together: after graphs are released and before the process groups
    end.
    """
    global _ends_with_release
    _ends_with_release = False
    if not _registered:
        return
    from megatron.core import nccl_allocator

    torch.cuda.synchronize()
    torch.distributed.barrier()  # other ranks read and write a rank's windows
    while _registered:
        nccl_allocator.deregister_mem_pool(*_registered[-1])
