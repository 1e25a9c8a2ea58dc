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

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf

from zaya_plugin.bench.step_parts import RANGE
from zaya_plugin.bench.trace import Trace

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
    (re.compile(r"hip_ops(::|_)(dense_product_|row_statistics|overwrite_with_|finish_gradient)"), "head"),
    (re.compile(r"hip_ops(::|_)(muon_|newton_schulz)"), "optimizer"),
)
# Names of kernels whose launch lies in no known range. quack's are the head's too, which its range tells apart.
KERNEL_NAMES = (
    (re.compile(r"cca_prologue|convol", re.IGNORECASE), "prologue"),
    (re.compile(r"rms_?norm|layer_?norm", re.IGNORECASE), "norms"),
    (re.compile(r"swiglu|grouped|permute_to|unpermute|quackgemm", re.IGNORECASE), "experts"),
    (re.compile(r"cross_entropy|logsumexp"), "head"),
    (re.compile(r"muon|newton_schulz|symmetric_product|adam", re.IGNORECASE), "optimizer"),
    (re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE), "attention"),
)
BACKWARD = "autograd::engine::evaluate_function"
EXPOSED = ("communication", False)


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


def host_parts(trace: Trace) -> Callable[[int], tuple[str | None, bool, bool]]:
    """Return the function from the index of a host's range to its part or None, and whether it is in the backward pass
    and in a collective.
    """

    @cache
    def of(index: int) -> tuple[str | None, bool, bool]:
        if index < 0:
            return None, False, False
        host = trace.hosts[index]
        part, backward, communicates = of(host.parent)
        is_range = host.annotation and host.name.startswith(RANGE)
        own = host.name.removeprefix(RANGE) if is_range else _by_name(host.name, OPERATOR_NAMES)
        part = own or host.forward >= 0 and of(host.forward)[0] or part
        backward = backward or host.forward >= 0 or host.name.startswith(BACKWARD)
        return part, backward, communicates or COMMUNICATION.search(host.name) is not None

    return of


def _by_name(name: str, table) -> str | None:
    return next((part for pattern, part in table if pattern.search(name)), None)


def device_activities(
    trace: Trace, start: float, end: float, learned: dict[str, list[tuple[str, bool]]] | None = None
) -> list[Activity]:
    """Return the activities of the device between two times, cut at them.

    learned: the result of `learn` for a trace of the same step; used for kernels that a graph launched. A graph
    launches them in the order in which they were launched one by one, so the n-th kernel of a name is the n-th there.
    """
    part_of, activities, seen = host_parts(trace), [], Counter()
    within = [(kernel, trace.calls.get(kernel.launch)) for kernel in sorted(trace.device, key=lambda one: one.start)]
    within = [(kernel, call) for kernel, call in within if kernel.end > start and kernel.start < end]
    totals = Counter(kernel.name for kernel, call in within if call and "GraphLaunch" in call.name)
    for kernel, call in within:
        known = (learned or {}).get(kernel.name) if call and "GraphLaunch" in call.name else None
        if known:
            # in proportion, if the two numbers differ by a few
            part, backward = known[seen[kernel.name] * len(known) // totals[kernel.name]]
            seen[kernel.name] += 1
        else:
            part, backward, _ = part_of(call.parent if call else -1)
        part = part or _by_name(kernel.name, KERNEL_NAMES) or "other"
        times = max(kernel.start, start), min(kernel.end, end)
        communicates = COMMUNICATION.search(kernel.name) is not None
        activities.append(Activity(kernel.name, *times, part, backward, communicates))
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
    part_of, activities, children = host_parts(trace), [], {}
    for host in trace.hosts:
        children.setdefault(host.parent, []).append(host)
    for index, host in enumerate(trace.hosts):
        if (host.annotation and not COMMUNICATION.search(host.name)) or host.name.startswith(BACKWARD):
            continue
        part, backward, communicates = part_of(index)
        inner, first = children.get(index, []), 1
        begins = accumulate((host.start, *(child.end for child in inner)), max)
        for left, right in zip(begins, (*(child.start for child in inner), host.end), strict=True):
            left, right = max(left, start), min(right, end)
            if right > left:
                activities.append(Activity(host.name, left, right, part or "other", backward, communicates, first))
                first = 0
    return activities


@dataclass(frozen=True)
class Moments:
    """Microseconds. parts: (forward, backward). names: by (part, name), the count and the summed duration."""

    parts: dict[str, tuple[float, float]]
    names: dict[tuple[str, str], tuple[int, float]]
    hidden_communication: float


def resolve(activities: Iterable[Activity], start: float, end: float) -> Moments:
    """Share out the time from `start` to `end`; all activities lie between them."""
    times, names, running, edges = Counter(), {}, Counter(), [(end, 0, EXPOSED)]
    for activity in activities:
        assert start <= activity.start <= activity.end <= end, activity
        key = EXPOSED if activity.communicates else (activity.part, activity.backward)
        edges += [(activity.start, 1, key), (activity.end, -1, key)]
        count, total = names.get((key[0], activity.name), (0, 0.0))
        names[key[0], activity.name] = count + activity.begins, total + activity.end - activity.start
    hidden, before = 0.0, start
    for moment, change, key in sorted(edges):
        if (passed := moment - before) > 0:
            computing = {part: count for part, count in running.items() if count and part != EXPOSED}
            hidden += passed * bool(computing and running[EXPOSED])
            shares = computing or {EXPOSED if running[EXPOSED] else ("idle", False): 1}
            for part, count in shares.items():
                times[part] += passed * count / sum(shares.values())
        before = moment
        running[key] += change
    return Moments({part: (times[part, False], times[part, True]) for part, _ in [*times]}, names, hidden)
