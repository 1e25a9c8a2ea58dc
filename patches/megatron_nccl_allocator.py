# SPDX-License-Identifier: Apache-2.0
"""megatron.core.nccl_allocator: the memory of DDP's buffers under --use-nccl-ub (parallel.nccl_ub).

Stock, every rank compiles a C++ extension against nccl.h when it starts, sets NCCL_NVLS_ENABLE=1 whatever the environment said, goes on with a warning where
NCCL refuses the memory, and takes registrations back only where the run ends by an exit condition; NCCL aborts on what is registered when its communicators end.
Here the memory is that of torch's own allocator for NCCL and RCCL, the environment is left alone, a refusal ends the run, and `release` takes everything back.
"""

from __future__ import annotations

import logging

from zaya_plugin import compat
from zaya_plugin.patches.registry import Patch

logger = logging.getLogger(__name__)
_registered: list[tuple] = []  # (memory pool, process group)
_ends_with_release = False


def install() -> None:
    import torch
    from megatron.core import nccl_allocator

    stock = nccl_allocator.deregister_mem_pool

    def build() -> None:
        group = torch.distributed.distributed_c10d._get_default_group()
        nccl_allocator._allocator = group._get_backend(torch.device("cuda", torch.cuda.current_device())).mem_allocator

    def deregister(pool, group) -> None:
        if (pool, group) not in _registered:
            stock(pool, group)
        elif not _ends_with_release:
            stock(pool, group)
            _registered.remove((pool, group))

    class Memory(nccl_allocator.nccl_mem):
        def __exit__(self, *error) -> None:
            try:
                if self.group is not None and error[0] is None:
                    _register(self.group, self.device, self.pool, self.symmetric)
            finally:
                self.mem_context.__exit__(*error)

    nccl_allocator._build_nccl_allocator = nccl_allocator.init = build
    nccl_allocator.deregister_mem_pool = deregister
    nccl_allocator.nccl_mem = Memory


def _register(group, device, pool, symmetric: bool) -> None:
    import torch

    gib = sum(segment["total_size"] for segment in pool.snapshot()) / 2**30
    try:
        group._get_backend(device).register_mem_pool(pool, symm=symmetric)
    except (RuntimeError, TypeError) as refused:
        raise ValueError(
            f"parallel.nccl_ub = True: {gib:.2f} GiB cannot be registered with this NCCL or RCCL and torch {torch.__version__} ({refused}); allowed here: False"
        ) from refused
    if (pool, group) not in _registered:
        _registered.append((pool, group))
    logger.info("registered buffers: %.2f GiB with a group of %d", gib, group.size())


def end_with_release() -> None:
    """For a run that calls `release`: Megatron's own end leaves registrations alone, behind which graphs that send from that memory may still be."""
    global _ends_with_release
    _ends_with_release = True


def release() -> None:
    """Take the registrations back, on all ranks together: after graphs were given up, before the process groups end."""
    global _ends_with_release
    _ends_with_release = False
    if not _registered:
        return
    import torch
    from megatron.core import nccl_allocator

    torch.cuda.synchronize()
    torch.distributed.barrier()  # a rank's windows are read and written by the others
    while _registered:
        nccl_allocator.deregister_mem_pool(*_registered[-1])


PATCH = Patch(
    symbol="megatron.core.nccl_allocator.nccl_mem",
    also=(
        "megatron.core.nccl_allocator._build_nccl_allocator",
        "megatron.core.nccl_allocator.deregister_mem_pool",
        "megatron.core.nccl_allocator.init",
    ),
    scope="always",
    wanted=lambda: compat.at_least("0.19.0rc0"),  # the names that are changed are those of 0.19
    reason="registered buffers: no extension is compiled at start, NCCL_NVLS_ENABLE stays what it was, and `zaya train` takes them back at its end",
    install=install,
)
