# SPDX-License-Identifier: Apache-2.0
"""megatron.core.nccl_allocator: takes the memory of DDP's buffers under --use-nccl-ub (parallel.nccl_ub) from torch's
allocator for NCCL and RCCL.

Stock, every rank compiles a C++ extension against nccl.h when it starts, sets NCCL_NVLS_ENABLE=1 over any value in the
environment, continues with a warning where NCCL refuses the memory, and takes registrations back only where the run
ends by an exit condition; NCCL aborts if memory is still registered when its communicators end. With the patch the
environment is not changed, a refusal ends the run, and zaya_plugin/parallel/registered_buffers.py records registrations
and takes them back.
"""

from zaya_plugin import compat
from zaya_plugin.ground.errors import mistake
from zaya_plugin.patches.registry import MEGATRON, Patch


def torch_allocator(_):
    def build() -> None:
        import torch
        from megatron.core import nccl_allocator

        group = torch.distributed.distributed_c10d._get_default_group()
        backend = group._get_backend(torch.device("cuda", torch.cuda.current_device()))
        try:
            nccl_allocator._allocator = backend.mem_allocator
        except RuntimeError as error:  # torch's check: NCCL is older than 2.19, or the device has no multicast
            raise mistake(
                "parallel.nccl_ub",
                True,
                problem=f"torch has no NCCL memory for this device ({error})",
                allowed="false on this machine",
                fix="parallel.nccl_ub=false",
            ) from error

    return build


def deregister(stock):
    from zaya_plugin.parallel import registered_buffers

    return lambda pool, group: registered_buffers.deregister(stock, pool, group)


def memory(stock):
    from zaya_plugin.parallel import registered_buffers

    class Memory(stock):
        def __exit__(self, *error) -> None:
            try:
                if self.group is not None and error[0] is None:
                    registered_buffers.register(self.group, self.device, self.pool, self.symmetric)
            finally:
                self.mem_context.__exit__(*error)

    return Memory


PATCH = Patch(
    symbol="megatron.core.nccl_allocator.nccl_mem",
    make=memory,
    also={
        "megatron.core.nccl_allocator._build_nccl_allocator": torch_allocator,
        "megatron.core.nccl_allocator.init": torch_allocator,
        "megatron.core.nccl_allocator.deregister_mem_pool": deregister,
    },
    scope="always",
    condition=lambda: compat.at_least("0.19.0rc0"),  # the names that are changed are those of 0.19
    reason=(
        "registered buffers: no extension is compiled at start, NCCL_NVLS_ENABLE keeps its value, and `zaya train` "
        "takes them back at its end"
    ),
    upstream=MEGATRON + "core/nccl_allocator.py",
    until="Megatron uses torch's allocator for NCCL and deregisters buffers before its groups end",
)
