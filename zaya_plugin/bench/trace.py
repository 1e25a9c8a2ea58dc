# SPDX-License-Identifier: Apache-2.0
"""Reads a chrome trace of torch.profiler: ranges of the host, activities of the device, and the calls that launched them.

The input are plain dictionaries, so tests can write traces by hand. Times are microseconds of the trace's clock.
"""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from zaya_plugin.ground.errors import mistake

ANNOTATIONS = ("user_annotation", "python_function")
HOST = ("cpu_op", *ANNOTATIONS)
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime")


@dataclass
class HostRange:
    """An operator, an annotation or a call of the device's runtime on a thread of the host.

    parent: index of the innermost operator or annotation around it, or -1. forward: index of the range that created the
    autograd node that this range runs, or -1.
    """

    name: str
    thread: str
    start: float
    end: float
    annotation: bool = False
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


@dataclass
class Trace:
    """A trace. hosts: operators and annotations, sorted by thread and start. calls: of the runtime, by correlation id."""

    hosts: list[HostRange] = field(default_factory=list)
    device: list[DeviceActivity] = field(default_factory=list)
    calls: dict[int, HostRange] = field(default_factory=dict)

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
    trace, flows = Trace(), []
    for event in events:
        category = event.get("cat")
        if category == "fwdbwd":
            flows.append(event)
        if event.get("ph") != "X" or "ts" not in event:
            continue
        start, arguments = float(event["ts"]), event.get("args", {})
        end, launch = start + float(event.get("dur", 0)), arguments.get("correlation")
        if category in DEVICE:
            trace.device.append(DeviceActivity(event["name"], start, end, launch))
        elif category in HOST or category in RUNTIME and launch is not None:
            ids = arguments.get("External id"), arguments.get("Sequence number")
            place = HostRange(event["name"], str(event.get("tid")), start, end, category in ANNOTATIONS, *ids)
            if category in HOST:
                trace.hosts.append(place)
            else:
                trace.calls[launch] = place
    _nest(trace)
    _link(trace.hosts, flows)
    return trace


def _nest(trace: Trace) -> None:
    """Sort the host's ranges, and set the parent of each and of each call on its thread; where a call's thread has no
    range, by the profiler's id.
    """
    hosts, stack = trace.hosts, []
    hosts.sort(key=lambda r: (r.thread, r.start, -r.end))
    index_of = {id(r): index for index, r in enumerate(hosts)}
    by_id = {r.external_id: index for index, r in enumerate(hosts) if r.external_id is not None}
    for r in sorted((*hosts, *trace.calls.values()), key=lambda r: (r.thread, r.start)):  # stable: calls come last
        while stack and (hosts[stack[-1]].thread != r.thread or hosts[stack[-1]].end <= r.start):
            stack.pop()
        index = index_of.get(id(r))
        r.parent = stack[-1] if stack else by_id.get(r.external_id, -1) if index is None else -1
        if index is not None:
            stack.append(index)


def _link(hosts: list[HostRange], flows: list[dict]) -> None:
    """Link backward ranges to forward ones by the profiler's arrows (from (thread, start) to (thread, start))."""
    at: dict[tuple, int] = {}
    for index, host in enumerate(hosts):
        if not host.annotation:
            at[host.thread, host.start] = index
    begins = {flow["id"]: at.get((str(flow.get("tid")), float(flow["ts"]))) for flow in flows if flow.get("ph") == "s"}
    for flow in flows:
        if flow.get("ph") != "f":
            continue
        forward, backward = begins.get(flow["id"]), at.get((str(flow.get("tid")), float(flow["ts"])))
        if forward is None or backward is None:
            continue
        hosts[backward].forward = forward
        # The engine's range around the node has the node's number; it sums gradients for the next node.
        around = hosts[backward].parent
        if around >= 0 and hosts[around].sequence is not None and hosts[around].sequence == hosts[backward].sequence:
            hosts[around].forward = forward
