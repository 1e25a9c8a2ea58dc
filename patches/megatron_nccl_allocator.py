# SPDX-License-Identifier: Apache-2.0
"""megatron.core.nccl_allocator: the memory of DDP's buffers under --use-nccl-ub (parallel.nccl_ub).

Stock, every rank compiles a C++ extension against nccl.h when it starts, sets NCCL_NVLS_ENABLE=1 whatever the environment said, and takes the
registrations back only where the run ends by an exit condition; NCCL aborts on what is registered when its communicators end.
Here the memory is that of torch's own allocator for NCCL and RCCL, the environment is left alone, and `release` takes every registration back.
"""

from __future__ import annotations

from packaging.version import Version

from zaya_plugin import compat
from zaya_plugin.patches.registry import Patch

_registered: list[tuple] = []  # (memory pool, process group)


def install() -> None:
    import torch
    from megatron.core import nccl_allocator

    stock = nccl_allocator.deregister_mem_pool

    def build() -> None:
        group = torch.distributed.distributed_c10d._get_default_group()
        nccl_allocator._allocator = group._get_backend(torch.device("cuda", torch.cuda.current_device())).mem_allocator

    def deregister(pool, group) -> None:
        if (pool, group) in _registered:
            _registered.remove((pool, group))
        stock(pool, group)

    class Memory(nccl_allocator.nccl_mem):
        def __exit__(self, *error) -> None:
            super().__exit__(*error)
            if self.group is not None and (self.pool, self.group) not in _registered:
                _registered.append((self.pool, self.group))

    nccl_allocator._build_nccl_allocator = nccl_allocator.init = build
    nccl_allocator.deregister_mem_pool = deregister
    nccl_allocator.nccl_mem = Memory


def release() -> None:
    """Take the registrations back, on all ranks: before the process groups end, and after the graphs that send from that memory were given up."""
    from megatron.core import nccl_allocator

    for pool, group in reversed(_registered[:]):
        nccl_allocator.deregister_mem_pool(pool, group)


PATCH = Patch(
    symbol="megatron.core.nccl_allocator.nccl_mem",
    scope="always",
    wanted=lambda: compat.core_version() >= Version("0.19.0rc0"),  # the names that are changed are those of 0.19
    reason="registered buffers: no extension is compiled at start, NCCL_NVLS_ENABLE stays what it was, and a run that ends by itself does not abort in NCCL",
    install=install,
)
