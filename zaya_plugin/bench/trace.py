# SPDX-License-Identifier: Apache-2.0
"""A chrome trace of torch.profiler as three lists: what the host ran, what the device ran, and what launched it.

Plain dictionaries in, so that a trace made by hand is as good as a recorded one. Times are microseconds of the trace's clock.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

HOST = ("cpu_op", "user_annotation", "python_function")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime")


@dataclass
class HostRange:
    """An operator or annotation on a thread of the host. parent: index of the innermost range around it, -1 without one.

    forward: index of the range that created the autograd node which this one runs, -1 for all others.
    """

    name: str
    thread: object
    start: float
    end: float
    annotation: bool
    external_id: int | None = None
    sequence: int | None = None
    parent: int = -1
    forward: int = -1


@dataclass(frozen=True)
class DeviceActivity:
    """A kernel, copy or fill. launch: correlation id of the runtime call that started it."""

    name: str
    stream: object
    start: float
    end: float
    launch: int | None
    external_id: int | None


@dataclass(frozen=True)
class RuntimeCall:
    """A call of the device's runtime or driver; parent as in HostRange."""

    name: str
    start: float
    end: float
    parent: int


@dataclass
class Trace:
    """hosts are sorted by thread and start; calls by correlation id."""

    hosts: list[HostRange] = field(default_factory=list)
    device: list[DeviceActivity] = field(default_factory=list)
    calls: dict[int, RuntimeCall] = field(default_factory=dict)

    def window(self, name: str) -> tuple[float, float]:
        """Start and end of the one annotation called `name`; ValueError unless there is one."""
        found = [r for r in self.hosts if r.annotation and r.name == name]
        if len(found) != 1:
            raise ValueError(f"the trace has {len(found)} ranges called {name!r}; allowed: 1")
        return found[0].start, found[0].end


def read(path: str | Path) -> Trace:
    """Reads what torch.profiler exported, gzipped or not; ValueError where it is no such file."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt") as file:
            return parse(json.load(file, strict=False)["traceEvents"])
    except (OSError, EOFError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a chrome trace of torch.profiler ({type(error).__name__}: {error})") from error


def parse(events: Iterable[dict]) -> Trace:
    """The trace in `events`, whatever their order."""
    trace, runtime, flows = Trace(), [], []
    for event in events:
        category, phase = event.get("cat"), event.get("ph")
        if category == "fwdbwd":
            flows.append(event)
        if phase != "X" or "ts" not in event:
            continue
        start, arguments = float(event["ts"]), event.get("args", {})
        end = start + float(event.get("dur", 0))
        if category in HOST:
            trace.hosts.append(
                HostRange(
                    event["name"],
                    event.get("tid"),
                    start,
                    end,
                    category != "cpu_op",
                    arguments.get("External id"),
                    arguments.get("Sequence number"),
                )
            )
        elif category in DEVICE:
            trace.device.append(
                DeviceActivity(
                    event["name"],
                    arguments.get("stream"),
                    start,
                    end,
                    arguments.get("correlation"),
                    arguments.get("External id"),
                )
            )
        elif category in RUNTIME:
            runtime.append(
                (
                    event["name"],
                    event.get("tid"),
                    start,
                    end,
                    arguments.get("correlation"),
                    arguments.get("External id"),
                )
            )
    trace.hosts.sort(key=lambda r: (str(r.thread), r.start, -r.end))
    _nest(trace.hosts)
    _link(trace.hosts, flows)
    _place(trace, runtime)
    return trace


def _nest(hosts: list[HostRange]) -> None:
    """Finds every range's parent on its thread."""
    stack: list[int] = []
    for index, here in enumerate(hosts):
        while stack and (hosts[stack[-1]].thread != here.thread or hosts[stack[-1]].end <= here.start):
            stack.pop()
        here.parent = stack[-1] if stack else -1
        stack.append(index)


def _link(hosts: list[HostRange], flows: list[dict]) -> None:
    """Backward ranges to forward ones, along the profiler's own arrows (from (thread, start) to (thread, start))."""
    at: dict[tuple, int] = {}
    for index, here in enumerate(hosts):
        if not here.annotation:
            at[here.thread, here.start] = index
    begins = {flow["id"]: at.get((flow.get("tid"), float(flow["ts"]))) for flow in flows if flow.get("ph") == "s"}
    for flow in flows:
        if flow.get("ph") != "f":
            continue
        forward, backward = begins.get(flow["id"]), at.get((flow.get("tid"), float(flow["ts"])))
        if forward is None or backward is None:
            continue
        hosts[backward].forward = forward
        # The engine's own range around the node sums gradients for the next one; it has the node's number.
        around = hosts[backward].parent
        if around >= 0 and hosts[around].sequence is not None and hosts[around].sequence == hosts[backward].sequence:
            hosts[around].forward = forward


def _place(trace: Trace, runtime: list[tuple]) -> None:
    """Runtime calls into the ranges that they were made in; by the profiler's id where their thread has none."""
    by_id = {r.external_id: index for index, r in enumerate(trace.hosts) if r.external_id is not None}
    position, stack = 0, []
    for name, thread, start, end, correlation, external in sorted(runtime, key=lambda call: (str(call[1]), call[2])):
        while position < len(trace.hosts) and (str(trace.hosts[position].thread), trace.hosts[position].start) <= (
            str(thread),
            start,
        ):
            stack.append(position)
            position += 1
        while stack and (trace.hosts[stack[-1]].thread != thread or trace.hosts[stack[-1]].end <= start):
            stack.pop()
        parent = stack[-1] if stack else by_id.get(external, -1)
        if correlation is not None:
            trace.calls[correlation] = RuntimeCall(name, start, end, parent)
