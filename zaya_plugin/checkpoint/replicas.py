# SPDX-License-Identifier: Apache-2.0
"""After a load: ranks that hold the same weights must hold the same bits.

A rank that kept its initial weights, or read other ones, would train on without an error: gradients are averaged, and
the loss of the other ranks hides it (NVIDIA/Megatron-LM#6920).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from zaya_plugin.checkpoint.restore import gathered
from zaya_plugin.ground.errors import message

PIECE = 2**24  # elements hashed at once, for which 8 bytes each are taken
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(model: Sequence[torch.nn.Module], optimizer=None) -> None:
    """Compare the weights and persistent buffers of data-parallel ranks, and the optimizer's state of its instances. A
    collective.

    Raises:
        RuntimeError: on all ranks, if a tensor differs; the text names it and the ranks.
    """
    tensors: dict[ProcessGroup, dict[str, Tensor]] = {}
    for index, chunk in enumerate(model):
        for name, param in [*chunk.named_parameters(), *_persistent_buffers(chunk)]:
            dense = getattr(param, "allreduce", True)  # else a parameter of an expert
            group = (
                parallel_state.get_data_parallel_group(with_context_parallel=True)
                if dense
                else parallel_state.get_expert_data_parallel_group()
            )
            tensors.setdefault(group, {})[f"{name} of model chunk {index}" if len(model) > 1 else name] = param
    for index, inner in enumerate(getattr(optimizer, "chained_optimizers", ())):
        group = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
        if group is None or group.size() == 1 or not getattr(inner, "ddp_config", None):
            continue
        for order, state in enumerate(inner.optimizer.state.values()):
            for key, value in state.items():
                if torch.is_tensor(value):
                    tensors.setdefault(group, {})[f"{key} of parameter {order} of optimizer {index}"] = value
    mine = [text for group, named in tensors.items() for text in _differences(group, named)]
    if texts := sorted({text for texts in gathered(mine) for text in texts}):
        raise RuntimeError(
            message(
                "checkpoint",
                problem=f"after the load ranks differ in {len(texts)} tensors: {'; '.join(texts[:5])}",
                allowed="the same bits on all ranks that hold the same tensor",
                fix="load it again; if it stays so, `zaya checkpoint verify` compares the files",
            )
        )


def _persistent_buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a checkpoint holds. state_dict() does not tell: Megatron's wrappers name its keys without
    their prefix.
    """
    for path, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _differences(group: ProcessGroup, named: dict[str, Tensor]) -> list[str]:
    if group.size() == 1:
        return []
    mine = torch.stack([content_hash(tensor) for tensor in named.values()])
    hashes = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(hashes, mine, group=group)
    ranks = torch.distributed.get_process_group_ranks(group)
    return [
        f"{name} (rank {ranks[other]} and rank {ranks[0]})"
        for place, name in enumerate(named)
        for other, theirs in enumerate(hashes)
        if theirs[place] != hashes[0][place]
    ]


@torch.no_grad()
def content_hash(tensor: Tensor) -> Tensor:
    """Return an int64 scalar that depends on every bit of `tensor` and on its place, the same on every device."""
    flat = tensor.detach().reshape(-1)
    flat = flat.view(INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), PIECE):
        part = flat[start : start + PIECE].long()
        places = torch.arange(start, start + part.numel(), device=flat.device)
        # odd factors, so that a single changed element always changes the sum modulo 2^64
        total += ((places * 2 + 1) * 0x9E3779B97F4A7 * (part + 1)).sum()
    return total
