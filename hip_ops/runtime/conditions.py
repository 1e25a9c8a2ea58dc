# SPDX-License-Identifier: Apache-2.0
"""The conditions under which the self-check calls a version: streams, a captured graph, a device that is full.

A kernel that is right on an idle device and the default stream may be wrong elsewhere: the launcher ignores the stream,
the host reads a number that a replay does not update, or a block reads LDS that another block has left behind.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from hip_ops.runtime.on_device import multiprocessors

CALLS = 2  # under a condition; they must give the same bits
CALLS_AT_ONCE = 4  # on a full device
LARGEST_TILE = 256  # of a BLAS library's products
SLEEP = 5_000_000  # cycles, 2 to 3 ms: longer than the host takes to launch a condition's calls


class Condition(NamedTuple):
    """name: in messages, empty on a CPU. calls: how often `run` calls the candidate.

    run(candidate, arguments of each call) -> [result, arguments] of each call, when the device has finished.
    """

    name: str
    calls: int
    run: Callable[[Callable, list[tuple]], list[list]]


def conditions_on(device: torch.device) -> tuple[Condition, ...]:
    """Returns the conditions of `device`, which is the current one; on a CPU a single call."""
    if device.type != "cuda":
        return (Condition("", 1, in_turn),)
    return (
        Condition("default stream", CALLS, lambda *work: _on_a_late_stream(torch.cuda.default_stream(device), *work)),
        Condition("side stream", CALLS, lambda *work: _on_a_late_stream(torch.cuda.Stream(device), *work)),
        Condition("captured graph", CALLS, lambda *work: in_a_graph(*work, capture=_capture)),
        Condition("full device", CALLS_AT_ONCE, lambda *work: _on_a_full_device(device, *work)),
    )


def in_turn(candidate: Callable, arguments: list[tuple]) -> list[list]:
    """Calls the candidate on the current stream, once for each of `arguments`."""
    return [[candidate(*each), list(each)] for each in arguments]


def _on_a_late_stream(stream: torch.cuda.Stream, candidate: Callable, arguments: list[tuple]) -> list[list]:
    """Calls the candidate on `stream`, which writes the arguments after the host has launched the calls. A kernel that
    is launched on another stream reads zeros.
    """
    held = [copied(each) for each in arguments]
    assign(held)
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        assign(held, arguments)
        calls = in_turn(candidate, held)
    torch.cuda.synchronize(stream.device)
    return calls


def in_a_graph(candidate: Callable, arguments: list[tuple], capture: Callable) -> list[list]:
    """Captures one call and replays it for each of `arguments`.

    capture(call) -> (result of the captured call, function that replays it and waits for the device).
    """
    held = copied(arguments[0])
    result, replay = capture(lambda: candidate(*held))
    calls = []
    for each in arguments:
        assign(held, each)
        replay()
        calls.append([copied(result), list(copied(held))])
    return calls


def _capture(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Captures without the garbage collection of torch.cuda.graph, which would take most of a self-check's time."""
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = call()
        except Exception:
            with contextlib.suppress(RuntimeError):  # a second message about the same failure
                graph.capture_end()
            raise
        graph.capture_end()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return result, replay


def _on_a_full_device(device: torch.device, candidate: Callable, arguments: list[tuple]) -> list[list]:
    """Calls the candidate on several streams at once, beside a matrix product with two blocks for every
    multiprocessor, which leaves its numbers in LDS and registers.
    """
    side = LARGEST_TILE * math.ceil(math.sqrt(2 * multiprocessors(device)))
    matrix = torch.full((side, side), 1.0 / side, device=device, dtype=torch.bfloat16)
    streams = [torch.cuda.Stream(device) for _ in range(len(arguments) + 1)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(SLEEP)
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(streams[-1]):
        torch.mm(matrix, matrix)
    calls = []
    for stream, each in zip(streams, arguments, strict=False):
        with torch.cuda.stream(stream):
            calls += in_turn(candidate, [each])
    torch.cuda.synchronize(device)
    return calls


def assign(held: Any, given: Any = None) -> None:
    """Writes the tensors in `given` to those in `held`, or zeros."""
    mine = [tensor for _, tensor in tensors_of(held, "")]
    theirs = [0] * len(mine) if given is None else [tensor for _, tensor in tensors_of(given, "")]
    for to, value in zip(mine, theirs, strict=True):
        to.fill_(0) if given is None else to.copy_(value)


def copied(value: Any) -> Any:
    """Copies tensors, also inside lists and tuples, with their strides, because an operator may depend on them."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return value


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in `value`, also inside lists and tuples, with their names for messages."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from tensors_of(item, f"{name}[{place}]")
