# SPDX-License-Identifier: Apache-2.0
"""Runs Newton-Schulz of few small matrices as a CUDA graph, because its twenty launches take longer on the CPU than on
the GPU.

A graph belongs to a version, shape, dtype, plan and stream. It is captured at their second call, so that single calls
cost nothing extra. Calls of the self-check make no graph and do not count. Input and result are copied, because a graph
contains addresses. The most recent graphs are kept, each with the memory of one iteration.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hip_ops.ops.newton_schulz.plan import Plan
from hip_ops.runtime import self_check

MAX_BATCH_ELEMENTS = 2**24  # elements of a batch; above, the GPU takes longer than the CPU
MAX_GRAPHS = 16

_lock = threading.Lock()
_graphs: OrderedDict[tuple, _Graph | None] = OrderedDict()


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    x: Tensor
    square_sums: Tensor | None
    result: Tensor


def worthwhile(x: Tensor) -> bool:
    """Return whether to use a graph: only on NVIDIA, because HIP graphs of these kernels have not run on an MI300X."""
    return (
        x.is_cuda
        and torch.version.hip is None
        and x.numel() <= MAX_BATCH_ELEMENTS
        and not torch.cuda.is_current_stream_capturing()
        and not self_check.comparing
    )


def graphed(compute: Callable[[Tensor, Tensor | None, Plan, float], Tensor]) -> Callable:
    """Wrap `compute` with the operator's arguments, and replay a graph where that is worthwhile."""

    @functools.wraps(compute)
    def newton_schulz(x: Tensor, square_sums: Tensor | None, coefficients, form, restarts, dtype, eps: float) -> Tensor:
        plan = Plan.of(coefficients, form, restarts, dtype or torch.float16)
        if not worthwhile(x):
            return compute(x, square_sums, plan, eps)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        key = (compute, x.shape, x.dtype, x.device, plan, eps, square_sums is None, stream)
        with _lock:
            seen = key in _graphs
            entry = _graphs.pop(key, None)
            if seen and entry is None:
                entry = _capture(compute, x, square_sums, plan, eps)
            _graphs[key] = entry
            while len(_graphs) > MAX_GRAPHS:
                _graphs.popitem(last=False)
            if entry is not None:
                entry.x.copy_(x)
                if square_sums is not None:
                    entry.square_sums.copy_(square_sums)
                entry.graph.replay()
                return entry.result.clone()
        return compute(x, square_sums, plan, eps)

    return newton_schulz


def _capture(compute: Callable, x: Tensor, square_sums: Tensor | None, plan: Plan, eps: float) -> _Graph:
    held = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    sums = None if square_sums is None else square_sums.clone()
    stream = torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        compute(held, sums, plan, eps)
    torch.cuda.current_stream(x.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compute(held, sums, plan, eps)
    return _Graph(graph, held, sums, result)
