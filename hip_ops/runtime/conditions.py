# SPDX-License-Identifier: Apache-2.0
"""Compares the versions of an operator with its reference on streams, in a captured graph and on a full device.

A kernel that is right on an idle device and the default stream may be wrong elsewhere: the launcher ignores the stream,
the host reads a number that a replay does not update, or a block reads LDS that another block has left behind.
`python -m hip_ops info --check` makes these comparisons; a run makes the plain ones of self_check.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hip_ops.runtime.launch import multiprocessors, on
from hip_ops.runtime.self_check import PLAIN_CALL, Condition, copied, in_turn, tensors_of

if TYPE_CHECKING:
    from hip_ops.runtime.operator import Operator

CAPTURE_CONDITION = "captured graph"
CALLS_PER_CONDITION = 2  # under a condition; they must give the same bits
CONCURRENT_CALLS = 4  # on a full device
MAX_BLAS_TILE = 256  # of a BLAS library's products
SLEEP_CYCLES = 5_000_000  # cycles, 2 to 3 ms: longer than the host takes to launch a condition's calls


class Result(NamedTuple):
    """difference: None if all examples agree, otherwise the first difference or error."""

    operator: str
    version: str
    condition: str
    difference: str | None


def check(
    operator: Operator,
    device: torch.device,
    versions: Sequence[str] | None = None,
    conditions: Sequence[Condition] | None = None,
) -> list[Result]:
    """Compare versions of `operator` with its reference on `device`, which has an index, under each condition.

    versions: by default those that run under the current selection; none where that is the reference alone. conditions:
    by default those of the device. Raises ValueError where a version requested by name is not available.
    """
    if versions is None:
        versions = [name for name in operator.running(device) if name != "reference"]
    conditions = conditions_on(device) if conditions is None else conditions
    results = []
    for version in versions:

        def candidate(*arguments, version=version):
            return operator._function_of(version)(*arguments)  # a failed import or build is a result too

        with on(device):
            texts = operator.differences(candidate, device, conditions, version)
        results += [
            Result(operator.name, version, condition.name, text)
            for condition, text in zip(conditions, texts, strict=True)
        ]
    return results


def conditions_on(device: torch.device) -> tuple[Condition, ...]:
    """Return the conditions of `device`, which must be the current one while they run; on a CPU a plain call."""
    if device.type != "cuda":
        return (PLAIN_CALL._replace(name="plain call"),)
    return (
        Condition(
            "default stream",
            CALLS_PER_CONDITION,
            lambda *work: _on_a_late_stream(torch.cuda.default_stream(device), *work),
        ),
        Condition(
            "side stream", CALLS_PER_CONDITION, lambda *work: _on_a_late_stream(torch.cuda.Stream(device), *work)
        ),
        Condition(CAPTURE_CONDITION, CALLS_PER_CONDITION, lambda *work: in_a_graph(*work, capture=_captured)),
        Condition("full device", CONCURRENT_CALLS, lambda *work: _on_a_full_device(device, *work)),
    )


def _on_a_late_stream(stream: torch.cuda.Stream, candidate: Callable, arguments: list[tuple]) -> list[list]:
    """Call the candidate on `stream`, which writes the arguments after the host has launched the calls. A kernel that
    is launched on another stream reads zeros.
    """
    held = [copied(of_call) for of_call in arguments]
    assign(held)
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        assign(held, arguments)
        calls = in_turn(candidate, held)
    torch.cuda.synchronize(stream.device)
    return calls


def in_a_graph(candidate: Callable, arguments: list[tuple], capture: Callable) -> list[list]:
    """Capture the second call with the same tensors, as training does, and replay it for each of `arguments`.

    capture(call) -> (result of the captured call, function that replays it and waits for the device).
    """
    held = copied(arguments[0])
    candidate(*held)
    result, replay = capture(lambda: candidate(*held))
    calls = []
    for of_call in arguments:
        assign(held, of_call)
        replay()
        calls.append([copied(result), list(copied(held))])
    return calls


def _captured(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    result, graph = capture(call)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return result, replay


def capture(call: Callable[[], Any]) -> tuple[Any, torch.cuda.CUDAGraph]:
    """Capture `call` on the current device without the garbage collection of torch.cuda.graph, which would take most of
    a comparison's time. Return its result, which a replay overwrites, and the graph. Raises RuntimeError where the
    capture fails; the process can then go on without a graph.

    A capture that fails leaves torch's random generator and allocator in the middle of a capture: later random numbers
    raise, and freed memory is not reused. So the generator has another state during the capture, and the allocator's
    capture is ended by this function.
    """
    torch.cuda.synchronize()
    device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    generator = torch.cuda.default_generators[device]
    seed_and_offset = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(torch.device("cuda", device)))
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = call()
            except Exception:
                with contextlib.suppress(RuntimeError):  # a second message about the same failure
                    graph.capture_end()
                raise
            graph.capture_end()
    except Exception:
        with contextlib.suppress(RuntimeError):  # capture_end has ended it
            torch._C._cuda_endAllocateToPool(device, pool)
        raise
    finally:
        generator.graphsafe_set_state(seed_and_offset)
    return result, graph


def _on_a_full_device(device: torch.device, candidate: Callable, arguments: list[tuple]) -> list[list]:
    """Call the candidate on several streams at once, during a matrix product with two blocks for every
    multiprocessor, which leaves its numbers in LDS and registers.
    """
    side = MAX_BLAS_TILE * math.ceil(math.sqrt(2 * multiprocessors(device)))
    matrix = torch.full((side, side), 1.0 / side, device=device, dtype=torch.bfloat16)
    streams = [torch.cuda.Stream(device) for _ in range(len(arguments) + 1)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(SLEEP_CYCLES)
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(streams[-1]):
        torch.mm(matrix, matrix)
    calls = []
    for stream, of_call in zip(streams, arguments, strict=False):
        with torch.cuda.stream(stream):
            calls += in_turn(candidate, [of_call])
    torch.cuda.synchronize(device)
    return calls


def assign(held: Any, values: Any = None) -> None:
    """Write the tensors in `values` to those in `held`; without `values` zeros."""
    mine = [tensor for _, tensor in tensors_of(held, "")]
    theirs = [0] * len(mine) if values is None else [tensor for _, tensor in tensors_of(values, "")]
    for to, value in zip(mine, theirs, strict=True):
        to.fill_(0) if values is None else to.copy_(value)
