# SPDX-License-Identifier: Apache-2.0
"""Reads a chrome trace of torch.profiler into three lists: ranges of the host, activities of the device, and the calls
that launched them.

The input are plain dictionaries, so tests can write traces by hand. Times are microseconds of the trace's clock.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from zaya_plugin.ground.errors import mistake

HOST = ("cpu_op", "user_annotation", "python_function")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime")


@dataclass
class HostRange:
    """An operator or annotation on a thread of the host. parent: index of the innermost range around it, or -1.

    forward: index of the range that created the autograd node that this range runs, or -1.
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
    start: float
    end: float
    launch: int | None


@dataclass(frozen=True)
class RuntimeCall:
    """A call of the device's runtime or driver. parent: as in HostRange."""

    name: str
    start: float
    end: float
    parent: int


@dataclass
class Trace:
    """A trace. hosts: sorted by thread and start. calls: by correlation id."""

    hosts: list[HostRange] = field(default_factory=list)
    device: list[DeviceActivity] = field(default_factory=list)
    calls: dict[int, RuntimeCall] = field(default_factory=dict)

    def window(self, name: str) -> tuple[float, float]:
        """Return start and end of the annotation `name`; raises ValueError unless there is exactly one."""
        ranges = [r for r in self.hosts if r.annotation and r.name == name]
        if len(ranges) != 1:
            raise mistake("trace", problem=f"has {len(ranges)} ranges called {name!r}", allowed="1")
        return ranges[0].start, ranges[0].end


def read(path: str | Path) -> Trace:
    """Read an export of torch.profiler, gzipped or not; raises ValueError for any other file."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt") as file:
            return parse(json.load(file, strict=False)["traceEvents"])
    except (OSError, EOFError, KeyError, json.JSONDecodeError) as error:
        problem = f"not a chrome trace of torch.profiler ({type(error).__name__}: {error})"
        raise mistake(str(path), problem=problem) from error


def parse(events: Iterable[dict]) -> Trace:
    """Return the trace in `events`, which may have any order."""
    trace, runtime, flows = Trace(), [], []
    for event in events:
        category, phase = event.get("cat"), event.get("ph")
        if category == "fwdbwd":
            flows.append(event)
        if phase != "X" or "ts" not in event:
            continue
        start, arguments = float(event["ts"]), event.get("args", {})
        end, name = start + float(event.get("dur", 0)), event["name"]
        launch, external = arguments.get("correlation"), arguments.get("External id")
        if category in HOST:
            sequence = arguments.get("Sequence number")
            annotation = category != "cpu_op"
            trace.hosts.append(HostRange(name, event.get("tid"), start, end, annotation, external, sequence))
        elif category in DEVICE:
            trace.device.append(DeviceActivity(name, start, end, launch))
        elif category in RUNTIME:
            runtime.append((name, event.get("tid"), start, end, launch, external))
    trace.hosts.sort(key=lambda r: (str(r.thread), r.start, -r.end))
    _nest(trace.hosts)
    _link(trace.hosts, flows)
    _place(trace, runtime)
    return trace


def _nest(hosts: list[HostRange]) -> None:
    """Set every range's parent on its thread."""
    stack: list[int] = []
    for index, host in enumerate(hosts):
        while stack and (hosts[stack[-1]].thread != host.thread or hosts[stack[-1]].end <= host.start):
            stack.pop()
        host.parent = stack[-1] if stack else -1
        stack.append(index)


def _link(hosts: list[HostRange], flows: list[dict]) -> None:
    """Link backward ranges to forward ones by the profiler's arrows (from (thread, start) to (thread, start))."""
    at: dict[tuple, int] = {}
    for index, host in enumerate(hosts):
        if not host.annotation:
            at[host.thread, host.start] = index
    begins = {flow["id"]: at.get((flow.get("tid"), float(flow["ts"]))) for flow in flows if flow.get("ph") == "s"}
    for flow in flows:
        if flow.get("ph") != "f":
            continue
        forward, backward = begins.get(flow["id"]), at.get((flow.get("tid"), float(flow["ts"])))
        if forward is None or backward is None:
            continue
        hosts[backward].forward = forward
        # The engine's range around the node has the node's number; it sums gradients for the next node.
        around = hosts[backward].parent
        if around >= 0 and hosts[around].sequence is not None and hosts[around].sequence == hosts[backward].sequence:
            hosts[around].forward = forward


def _place(trace: Trace, runtime: list[tuple]) -> None:
    """Assign runtime calls to the ranges around them; by the profiler's id where their thread has no range."""
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
