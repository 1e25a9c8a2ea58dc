# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of functions of tensors, timed as called and as replayed graphs."""

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
    """A function, its inputs, the gradients of its outputs, its operations by direction, and parameters whose gradients it makes too."""

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
        """{direction: makes the call that is timed}; `.backward`, not `autograd.grad`, for Megatron's DDP waits for gradients at parameters."""

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
    """Operations by direction; backward: times the forward's."""
    return dict(zip(DIRECTIONS, (forward, backward * forward, (1 + backward) * forward), strict=True))


def apart(a: Tensor, b: Tensor) -> float:
    """Norm of the difference, of b's norm."""
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def kernels(way: Way, most: int | None = None) -> dict:
    """Microseconds of each kernel of forward and backward, the longest first; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    try:
        found = kernel_times(way.calls()["both"](), 5)
    except Exception as error:  # what was measured before is kept
        return failure(error)
    return dict(list(found.items())[:most])


def capturable_stream(device: torch.device) -> contextlib.AbstractContextManager:
    """A stream of its own for all that is within: models in Megatron's DDP, their forward passes, and `measure`; no change without a GPU.

    DDP keeps autograd's nodes of its parameters, which run on the stream that it was made on whatever the forward pass's. On the default stream, which
    cannot be captured, they end the capture of every backward pass.
    """
    return torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()


def cell(device: torch.device) -> str:
    """The figure that counts: a graph's replay, where there are graphs."""
    return "graph_ms" if device.type == "cuda" else "ms"


def measure(ways: dict[str, Way], device: torch.device, rep: int) -> dict[str, dict]:
    """{direction: {name: {"ms", "graph_ms", "tflop_per_s"}}}, the rate of the last that could be had; what fails has its error.

    Graphs come last of all, for a capture that fails can leave the device unusable.
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
