# SPDX-License-Identifier: Apache-2.0
"""Gradients that a step's first micro-batch writes where later ones add, so that nobody needs to zero them before.

Megatron zeroes all gradient buffers at the start of a step, and the first micro-batch reads what was zeroed: 8 bytes an element, 15 ms of
ZAYA1-base's step on an H200 by their number. The experts' matrices are nine tenths of it, and each block of them gets its gradient from one product
(`zaya_plugin.model.experts.weight_gradients`), which can write as well as add. Such blocks are marked here, and the rest is zeroed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.distributed import DistributedDataParallel

# Implementations of graphs under which the micro-batches of a step are told apart: all of them in one graph, or none.
GRAPHS = ("none", "full_iteration")


def spare_zeroing(model_chunks: Iterable) -> None:
    """Let the gradient buffers of `model_chunks`, as DDP wraps them, be reset by `ResetRest` where they hold blocks that write first."""
    for chunk in model_chunks:
        if isinstance(chunk, DistributedDataParallel) and _tells_micro_batches_apart(chunk.config):
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                if blocks := blocks_that_write(buffer.param_index_map):
                    buffer.reset = ResetRest(buffer, blocks)


def _tells_micro_batches_apart(config) -> bool:
    """megatron-core 0.16 has graphs of single layers alone, by two switches."""
    if hasattr(config, "cuda_graph_impl"):
        return config.cuda_graph_impl in GRAPHS
    return not (getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False))


def blocks_that_write(places: dict[torch.nn.Parameter, tuple]) -> list[tuple[torch.nn.Parameter, int, int]]:
    """First matrix, start and end in the buffer of every block that lies there whole, in order and without gaps.

    places: a buffer's parameters with (start, end, bucket). A block's members have the attributes `expert_block` = (name, index) and
    `written_together`, their number.
    """
    members: dict[str, dict[int, tuple]] = {}
    for param, (start, end, _) in places.items():
        if hasattr(param, "written_together"):
            name, index = param.expert_block
            members.setdefault(name, {})[index] = (param, start, end)
    found = []
    for block in members.values():
        ordered = [block[index] for index in sorted(block)]
        whole = sorted(block) == list(range(ordered[0][0].written_together))
        if whole and all(a[2] == b[1] for a, b in zip(ordered, ordered[1:], strict=False)):
            found.append((ordered[0][0], ordered[0][1], ordered[-1][2]))
    return found


class ResetRest:
    """Takes the place of `reset` of one gradient buffer: zeroes all but `blocks`, and marks these as `main_grad_unwritten`."""

    def __init__(self, buffer, blocks: list[tuple[torch.nn.Parameter, int, int]]):
        self.buffer, self.firsts = buffer, [first for first, _, _ in blocks]
        borders = [
            0,
            *(place for _, start, end in sorted(blocks, key=lambda block: block[1]) for place in (start, end)),
            buffer.grad_data.numel(),
        ]
        self.rest = [(start, end) for start, end in zip(borders[::2], borders[1::2], strict=True) if start < end]

    def __call__(self) -> None:
        rest = [self.buffer.grad_data[start:end] for start, end in self.rest]
        if rest:
            torch._foreach_zero_(rest)
        for grad in getattr(self.buffer, "extra_main_grads", ()):
            grad.zero_()
        for first in self.firsts:
            first.main_grad_unwritten = True
