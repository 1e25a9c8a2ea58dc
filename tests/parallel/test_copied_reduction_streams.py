# SPDX-License-Identifier: Apache-2.0
"""The order of a reduction's streams on devices, without one: what ranks put into their streams is carried out in any order that streams, waits and barriers
leave open, drawn at random. Each wait and each barrier that is left out has to show in the sums. No stream waits for one that a capture would not have yet."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zaya_plugin.patches

zaya_plugin.patches.apply()  # before Megatron is imported

from tests.parallel.copied_reduction_ranks import in_order  # noqa: E402
from zaya_plugin.parallel.copied_reduction import Reduction  # noqa: E402

SLOT = 64  # elements, so that a piece has 32
COUNTS = (7 * 32 - 6, 24, 3 * 32, 4 * 32 - 1, 5 * 32)  # of a rank's part, call by call; mostly an odd number of pieces


class Devices:
    """Streams of all ranks, and what they were given in order: functions that return whether they could be carried out."""

    def __init__(self, left_out=None):
        self.streams, self.current, self.left_out = [], None, left_out

    def stream(self, role):
        self.streams.append(Stream(self, role))
        return self.streams[-1]

    def run(self, seed):
        """Carry everything out. A stream runs ahead of the others as far as it can, until another one is drawn, which is often or rarely."""
        draw = random.Random(seed)
        often, order = draw.choice((0.02, 0.2, 1.0)), list(self.streams)
        stuck = 0
        while waiting := [stream for stream in order if stream.done < len(stream.given)]:
            if draw.random() < often:
                draw.shuffle(order)
            done = next((stream for stream in waiting if stream.given[stream.done]()), None)
            if done is not None:
                done.done += 1
            stuck = 0 if done is not None else stuck + 1
            assert stuck < 2, (
                "all wait for each other"
            )  # the first round may have been the arrival of the last rank at a barrier


class Stream:
    """What Reduction and Pending ask of torch.cuda.Stream."""

    def __init__(self, devices, role):
        self.devices, self.role, self.given, self.done = devices, role, [], 0
        self.captured = role == "main"  # a stream gets into a graph by waiting for one that is in it

    def wait_stream(self, other):
        if (self.role, other.role) != self.devices.left_out:
            assert other.captured or self.devices.left_out is not None, (
                f"{self.role} waits for {other.role}, which is in no graph: an error in a capture"
            )
            self.captured = True
            Event(other).put_into(self)

    def record_event(self):
        return Event(self)

    def __enter__(self):
        self.before, self.devices.current = self.devices.current, self

    def __exit__(self, *error):
        self.devices.current = self.before


class Event:
    def __init__(self, stream):
        self.stream, self.count = stream, len(stream.given)

    def put_into(self, stream):
        stream.given.append(lambda: self.stream.done >= self.count)

    def wait(self):
        if self.stream.devices.left_out != "wait":
            self.put_into(self.stream.devices.current)


class Window:
    """shared: {(name of the group, number of the barrier): ranks that have arrived}."""

    def __init__(self, devices, name, rank, memory, shared):
        self.rank, self.size, self.slot_bytes, self.memory = rank, len(memory), memory[0].numel() // len(memory), memory
        self.devices, self.name, self.shared, self.barriers, self.in_call = devices, name, shared, 0, 0

    def slots(self, owner, dtype):
        return self.memory[owner].view(dtype).view(self.size, -1)

    def barrier(self):
        left_out, self.in_call = self.in_call == self.devices.left_out, self.in_call + 1
        if left_out:
            return
        arrived, self.barriers = self.shared.setdefault((self.name, self.barriers), set()), self.barriers + 1

        def arrive():
            arrived.add(self.rank)
            return len(arrived) == self.size

        self.devices.current.given.append(arrive)


class Deferred(TorchDispatchMode):
    """Whatever writes goes into the current stream."""

    def __init__(self, devices):
        super().__init__()
        self.devices = devices

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)

        def carry_out():
            func(*args, **kwargs)
            return True

        self.devices.current.given.append(carry_out)
        return kwargs.get("out", args[0]) if func._schema.returns else None  # operators of hip_ops return nothing


def sums_of(monkeypatch, seed, size, lanes, left_out=None):
    """(found, expected) of all ranks, groups and calls: all ranks and, of four, pairs too, each call in both before the next one. lanes: as with HIP."""
    devices = Devices(left_out)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: devices.current)
    shared, results, keep = {}, [], []
    ranks_of = {rank: [tuple(range(size)), (rank % 2, rank % 2 + 2)][: 2 if size == 4 else 1] for rank in range(size)}
    memory = {
        ranks: [torch.full((len(ranks) * SLOT * 4,), 127, dtype=torch.uint8) for _ in ranks]
        for both in ranks_of.values()
        for ranks in both
    }
    generator = torch.Generator().manual_seed(seed)
    given = {
        (ranks, call): torch.randn(len(ranks), len(ranks), count, generator=generator)
        for ranks in memory
        for call, count in enumerate(COUNTS)
    }  # from, to
    for rank in range(size):
        main, reductions = devices.stream("main"), []
        for ranks in ranks_of[rank]:
            reduction = Reduction(Window(devices, ranks, ranks.index(rank), memory[ranks], shared), torch.device("cpu"))
            reduction.stream, reduction.sums = devices.stream("copies"), devices.stream("sums")
            reduction.lanes = [devices.stream("lane") for _ in range(len(ranks) - 1)] if lanes else []
            reductions.append((reduction, ranks, torch.zeros(len(ranks) * max(COUNTS))))
        with Deferred(devices), main:
            for call, count in enumerate(COUNTS):
                started = []
                for reduction, ranks, buffer in reductions:  # a buffer is filled anew for each call, as gradients are
                    whole, own = buffer[: len(ranks) * count], reduction.window.rank
                    shard = whole.view(len(ranks), count)[own]
                    whole.copy_(given[ranks, call][own].flatten())
                    reduction.window.in_call = 0
                    for stream in (reduction.stream, reduction.sums, *reduction.lanes):
                        stream.captured = False  # each call might be the first of a graph
                    started.append((reduction(shard, whole), shard, own, ranks))
                for pending, shard, own, ranks in started:
                    pending.wait()
                    results.append((torch.empty(count), in_order(given[ranks, call][:, own])))
                    results[-1][0].copy_(shard)
                keep.append(started)
    devices.run(seed)
    return results


def wrong(results):
    return sum(not torch.equal(found, expected) for found, expected in results)


@pytest.mark.parametrize("size, lanes", [(2, False), (3, True), (4, False), (4, True), (8, False)])
def test_any_order_that_is_left_open_gives_the_sums(monkeypatch, size, lanes):
    for seed in range(12):
        results = sums_of(monkeypatch, seed, size, lanes)
        assert len(results) == size * len(COUNTS) * (2 if size == 4 else 1) and wrong(results) == 0


@pytest.mark.parametrize(
    "left_out",
    [
        0,
        1,
        2,
        3,
        "wait",
        ("copies", "main"),
        ("sums", "copies"),
        ("copies", "sums"),
        ("lane", "copies"),
        ("copies", "lane"),
    ],
    ids=lambda value: (
        " behind ".join(value) if isinstance(value, tuple) else f"barrier {value}" if isinstance(value, int) else value
    ),
)
def test_each_barrier_and_each_wait_is_needed(monkeypatch, left_out):
    assert any(wrong(sums_of(monkeypatch, seed, 4, "lane" in str(left_out), left_out)) for seed in range(12))
