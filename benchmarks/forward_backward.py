# SPDX-License-Identifier: Apache-2.0
"""Measure forward and backward of functions of tensors, as calls from Python and as replayed graphs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from call_timing import graphed, kernel_times, milliseconds
from operator_benchmark import failure
from torch import Tensor

DIRECTIONS = ("forward", "backward", "both")


@dataclass
class Way:
    """A function, its inputs, the gradients of its outputs, its operations by direction, and the parameters that
    also get gradients.
    """

    function: Callable
    inputs: tuple[Tensor, ...]
    upstream: tuple[Tensor, ...]
    flop: dict[str, float]
    parameters: tuple[Tensor, ...] = ()

    def outputs(self) -> tuple[Tensor, ...]:
        found = self.function(*self.inputs)
        return found if isinstance(found, tuple) else (found,)

    def clear(self) -> None:
        for tensor in (*self.inputs, *self.parameters):
            tensor.grad = None

    def calls(self) -> dict[str, Callable[[], Callable]]:
        """Return {direction: function that makes the timed call}. It uses `.backward`, not `autograd.grad`, because
        Megatron's DDP waits for gradients at parameters.
        """

        def backward() -> Callable:
            outputs = self.outputs()

            def call() -> None:
                self.clear()
                torch.autograd.backward(outputs, self.upstream, retain_graph=True)

            return call

        def both() -> None:
            self.clear()
            torch.autograd.backward(self.outputs(), self.upstream)

        return {"forward": lambda: self.outputs, "backward": backward, "both": lambda: both}


def flop(forward: float, backward: float) -> dict[str, float]:
    """Return operations by direction; backward: multiples of the forward's."""
    return dict(zip(DIRECTIONS, (forward, backward * forward, (1 + backward) * forward), strict=True))


def apart(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference relative to the norm of b."""
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def kernels(way: Way, most: int | None = None) -> dict:
    """Return the microseconds of each kernel of forward and backward, longest first; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    try:
        found = kernel_times(way.calls()["both"](), 5)
    except Exception as error:  # the figures measured before are kept
        return failure(error)
    return dict(list(found.items())[:most])


def capturable_stream(device: torch.device) -> contextlib.AbstractContextManager:
    """Run the block on a stream of its own: models in Megatron's DDP, their forward passes, and `measure`; no change
    without a GPU.

    DDP keeps autograd's nodes of its parameters, which run on the stream on which DDP was made, not on that of the
    forward pass. On the default stream, which cannot be captured, they end the capture of every backward pass.
    """
    return torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()


def cell(device: torch.device) -> str:
    """Return the name of the figure for comparisons: the replay of a graph where there are graphs."""
    return "graph_ms" if device.type == "cuda" else "ms"


def measure(ways: dict[str, Way], device: torch.device, rep: int) -> dict[str, dict]:
    """Return {direction: {name: {"ms", "graph_ms", "tflop_per_s"}}}; the rate is of the last time that is available. A
    call that fails has its error.

    Graphs are measured last, because a failed capture can leave the device unusable.
    """
    found: dict[str, dict] = {direction: {} for direction in DIRECTIONS}
    for kind in dict.fromkeys(("ms", cell(device))):
        for name, way in ways.items():
            for direction, make_call in way.calls().items():
                row = found[direction].setdefault(name, {})
                try:
                    ms = milliseconds(make_call() if kind == "ms" else graphed(make_call), device, rep)
                except Exception as error:
                    row |= failure(error)
                    continue
                print(f"{direction:9}{name:64}{kind:9}{ms:.4f}", file=sys.stderr, flush=True)
                row |= {kind: round(ms, 4), "tflop_per_s": float(f"{way.flop[direction] / ms / 1e9:.4g}")}
            way.clear()
    return found
