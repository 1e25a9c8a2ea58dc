# SPDX-License-Identifier: Apache-2.0
"""Counts what this rank sends: every collective and every send that reaches torch.distributed, by kind and tensor
size.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Share of the whole tensor that a rank of n sends under a ring algorithm, and which argument is the whole tensor.
RING = {
    "_allgather_base_": (lambda n: (n - 1) / n, 0),
    "_reduce_scatter_base_": (lambda n: (n - 1) / n, 1),
    "allreduce_": (lambda n: 2 * (n - 1) / n, 0),
}
COALESCED = {  # several tensors in one call, as Megatron's buckets
    "allgather_into_tensor_coalesced_": "_allgather_base_",
    "reduce_scatter_tensor_coalesced_": "_reduce_scatter_base_",
    "allreduce_coalesced_": "allreduce_",
}


class Traffic(TorchDispatchMode):
    """While it is entered, `sent` counts bytes by (kind, bytes of the rank's message); take_step() hands over and
    resets.

    An all-to-all counts the rows that leave this rank.
    """

    def __init__(self):
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._note(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, args) -> None:
        kind = COALESCED.get(kind, kind)
        if kind == "send":
            self._add(kind, sum(tensor.nbytes for tensor in args[0]))
        elif kind == "alltoall_base_":
            group = torch.distributed.ProcessGroup.unbox(args[2])
            rows, counts = args[1], args[4]
            counts = counts or [len(rows) // group.size()] * group.size()
            leaving = sum(count for rank, count in enumerate(counts) if rank != group.rank())
            self._add(kind, leaving * rows[0].nbytes if len(rows) else 0)
        elif kind in RING:
            share, whole = RING[kind]
            tensors = args[whole] if isinstance(args[whole], (list, tuple)) else [args[whole]]
            size = next(a for a in args if isinstance(a, torch.ScriptObject))
            size = torch.distributed.ProcessGroup.unbox(size).size()
            self._add(kind, share(size) * sum(tensor.nbytes for tensor in tensors))

    def _add(self, kind: str, sent: float) -> None:
        if sent:
            self.sent[kind, int(sent)] += int(sent)

    def take_step(self) -> dict[tuple[str, int], int]:
        """What was sent since the last call."""
        sent, self.sent = dict(self.sent), Counter()
        return sent
