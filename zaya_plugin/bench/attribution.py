# SPDX-License-Identifier: Apache-2.0
"""Assigns every kernel of a trace to a part of the step, and every moment of the step to one part. Pure functions.

A kernel's launch lies in ranges of the host; the innermost one of these decides:
  1. a range of zaya_plugin.bench.step_parts, or an operator whose name is known (hip_ops, the optimizers, the
  accumulation of gradients), 2. a node of the backward pass: the part of the operator that created it, by the
  profiler's arrow between the two.
A kernel in none of them, such as a kernel of a replayed graph, is assigned by its own name, or to "other".
Communication is recognised by the kernel's name alone. Without kernels (on a CPU) operators take their place, each with
its own time without the operators inside it.

Overlapping activities are resolved on the time line, so that the parts add up to the step. While something computes,
the moment is shared equally among the parts that compute at once; while only communication runs, it is exposed
communication; while nothing runs, idle.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from zaya_plugin.bench.step_parts import PARTS, RANGE
from zaya_plugin.bench.trace import HostRange, Trace

COMMUNICATION = re.compile(r"^nccl|ncclDevKernel|ncclKernel|rccl|^Memcpy PtoP|^gloo:|^c10d::", re.IGNORECASE)

# Names of operators and of their backward nodes (hip_ops_...Backward; torch.library's are
# GeneratedBackwardFor_hip_ops_...).
OPERATOR_NAMES = (
    (re.compile(r"AccumulateGrad|ViewTogetherBackward"), "gradients"),
    (re.compile(r"^Optimizer\.(step|zero_grad)"), "optimizer"),
    (re.compile(r"hip_ops(::|_)add_rows_"), "embedding"),
    (re.compile(r"hip_ops(::|_)merge_norm"), "norms"),
    (re.compile(r"hip_ops(::|_)cca_prologue"), "prologue"),
    (re.compile(r"hip_ops(::|_)router_mlp"), "router"),
    (re.compile(r"hip_ops(::|_)(sort_by_expert|\w*gather_rows|weighted_swiglu|grouped_)"), "experts"),
    (re.compile(r"hip_ops(::|_)(row_statistics|overwrite_with_|finish_gradient)"), "head"),
    (re.compile(r"hip_ops(::|_)(muon_|newton_schulz)"), "optimizer"),
)
# Names of kernels whose launch lies in no known range.
KERNEL_NAMES = (
    (re.compile(r"cca_prologue|convol", re.IGNORECASE), "prologue"),
    (re.compile(r"rms_?norm|layer_?norm", re.IGNORECASE), "norms"),
    (re.compile(r"swiglu|grouped|permute_to|unpermute|quackgemm", re.IGNORECASE), "experts"),
    (re.compile(r"cross_entropy|logsumexp"), "head"),
    (re.compile(r"muon|newton_schulz|symmetric_product|adam", re.IGNORECASE), "optimizer"),
    (re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE), "attention"),
)
BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Activity:
    """A kernel or operator. part: a key of PARTS. backward: whether in a node of the backward pass. begins: 0 in a
    further stretch of the same operator, else 1."""

    name: str
    start: float
    end: float
    part: str
    backward: bool
    communicates: bool
    begins: int = 1


class Attribution:
    """The parts of the host ranges of `trace`; each is computed once."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.known: dict[int, tuple[str | None, bool]] = {-1: (None, False)}

    def of(self, index: int) -> tuple[str | None, bool]:
        """Return (part or None, whether in the backward pass) of the host range `index`."""
        chain = []
        while index not in self.known:
            chain.append(index)
            index = self.trace.hosts[index].parent
        part, backward = self.known[index]
        for inner in reversed(chain):
            host = self.trace.hosts[inner]
            backward = backward or host.name.startswith(BACKWARD) or host.forward >= 0
            part = self._own(host) or part
            self.known[inner] = part, backward
        return part, backward

    def _own(self, host: HostRange) -> str | None:
        if host.annotation and host.name.startswith(RANGE):
            part = host.name.removeprefix(RANGE)
            assert part in PARTS, host.name
            return part
        if (by_name := _by_name(host.name, OPERATOR_NAMES)) is not None:
            return by_name
        return self.of(host.forward)[0] if host.forward >= 0 else None


def _by_name(name: str, table) -> str | None:
    return next((part for pattern, part in table if pattern.search(name)), None)


def device_activities(
    trace: Trace, start: float, end: float, learned: dict[str, list[tuple[str, bool]]] | None = None
) -> list[Activity]:
    """Return the activities of the device between two times, cut at them.

    learned: the result of `learn` for a trace of the same step; used for kernels that a graph launched. A graph
    launches them in the order in which they were launched one by one, so the n-th kernel of a name is the n-th there.
    """
    attribution, activities = Attribution(trace), []
    within = [
        kernel
        for kernel in sorted(trace.device, key=lambda kernel: kernel.start)
        if kernel.end > start and kernel.start < end
    ]
    replayed = [kernel for kernel in within if "GraphLaunch" in getattr(trace.calls.get(kernel.launch), "name", "")]
    totals, seen = Counter(kernel.name for kernel in replayed), Counter()
    from_graph = set(map(id, replayed)) if learned else set()
    for kernel in within:
        known = learned.get(kernel.name) if id(kernel) in from_graph else None
        if known:
            # in proportion, if the two numbers differ by a few
            part, backward = known[seen[kernel.name] * len(known) // totals[kernel.name]]
            seen[kernel.name] += 1
        else:
            call = trace.calls.get(kernel.launch)
            part, backward = attribution.of(call.parent) if call is not None else (None, False)
        part = part or _by_name(kernel.name, KERNEL_NAMES) or "other"
        communicates = COMMUNICATION.search(kernel.name) is not None
        activities.append(
            Activity(kernel.name, max(kernel.start, start), min(kernel.end, end), part, backward, communicates)
        )
    return activities


def learn(trace: Trace, window: str) -> dict[str, list[tuple[str, bool]]]:
    """Return (part, backward) of the kernels that were launched in the range `window`, by name, in order."""
    start, end = trace.window(window)
    launched = {number for number, call in trace.calls.items() if start <= call.start < end}
    inside = replace(trace, device=[kernel for kernel in trace.device if kernel.launch in launched])
    by_name: dict[str, list[tuple[str, bool]]] = {}
    for activity in device_activities(inside, -inf, inf):
        by_name.setdefault(activity.name, []).append((activity.part, activity.backward))
    return by_name


def operator_activities(trace: Trace, start: float, end: float) -> list[Activity]:
    """Return the operators on the host between two times: one activity for each stretch in which an operator is the
    innermost range.
    """
    attribution, activities = Attribution(trace), []
    children: dict[int, list[int]] = {}
    for index, host in enumerate(trace.hosts):
        children.setdefault(host.parent, []).append(index)
    for index, host in enumerate(trace.hosts):
        if (host.annotation and not COMMUNICATION.search(host.name)) or host.name.startswith(BACKWARD):
            continue
        part, backward = attribution.of(index)
        communicates = _communicates(trace, index)
        begins, first = host.start, 1
        for inner in (*children.get(index, ()), None):
            ends = host.end if inner is None else trace.hosts[inner].start
            left, right = max(begins, start), min(ends, end)
            if right > left:
                activities.append(Activity(host.name, left, right, part or "other", backward, communicates, first))
                first = 0
            if inner is not None:
                begins = max(begins, trace.hosts[inner].end)
    return activities


def _communicates(trace: Trace, index: int) -> bool:
    while index >= 0:
        if COMMUNICATION.search(trace.hosts[index].name):
            return True
        index = trace.hosts[index].parent
    return False


@dataclass(frozen=True)
class Moments:
    """Microseconds. parts: (forward, backward). names: by (part, name), the count and the summed duration."""

    parts: dict[str, tuple[float, float]]
    names: dict[tuple[str, str], tuple[int, float]]
    hidden_communication: float


def resolve(activities: Iterable[Activity], start: float, end: float) -> Moments:
    """Share out the time from `start` to `end`; all activities lie between them."""
    times: dict[tuple[str, bool], float] = {}
    names: dict[tuple[str, str], tuple[int, float]] = {}
    edges = []
    for activity in activities:
        assert start <= activity.start <= activity.end <= end, activity
        key = ("communication", False) if activity.communicates else (activity.part, activity.backward)
        edges += [(activity.start, 1, key), (activity.end, -1, key)]
        count, total = names.get((key[0], activity.name), (0, 0.0))
        names[key[0], activity.name] = count + activity.begins, total + activity.end - activity.start
    running: Counter = Counter()
    communicating, hidden, before = 0, 0.0, start
    for moment, change, key in (*sorted(edges, key=lambda edge: edge[:2]), (end, 0, None)):
        if (passed := moment - before) > 0:
            computing = sum(running.values())
            if computing:
                hidden += passed * (communicating > 0)
                for candidate, count in running.items():
                    times[candidate] = times.get(candidate, 0.0) + passed * count / computing
            else:
                alone = ("communication" if communicating else "idle", False)
                times[alone] = times.get(alone, 0.0) + passed
        before = moment
        if key is None:
            continue
        if key[0] == "communication":
            communicating += change
        else:
            running[key] += change
    parts: dict[str, tuple[float, float]] = {}
    for (part, backward), time in times.items():
        forward_time, backward_time = parts.get(part, (0.0, 0.0))
        parts[part] = (forward_time, backward_time + time) if backward else (forward_time + time, backward_time)
    return Moments(parts, names, hidden)
