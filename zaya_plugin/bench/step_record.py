# SPDX-License-Identifier: Apache-2.0
"""The record of a measurement as one JSON file: recipe, device, speed, and the share of each part in the traced step.

Shares are of the traced step and add up to 1. A part's `gemm_share` is the time of its operations at the measured rate
of a matrix product over its own time, `copy_share` the same of its least bytes at the measured rate of a copy;
`roofline` is the larger of the two. `activities` counts its kernels, on a CPU its operators. All work is that of one
rank. `not_computing_share` is of the steps that were timed without a profiler: the part of their time that the traced
step's computation does not fill.
"""

import itertools
import statistics
from dataclasses import asdict
from pathlib import Path

from zaya_plugin.bench import attribution, trace
from zaya_plugin.bench.attribution import resolve
from zaya_plugin.bench.options import Options
from zaya_plugin.bench.probes import Rates
from zaya_plugin.bench.results import surroundings
from zaya_plugin.bench.step_parts import PARTS, PASSES, STEP, written_first
from zaya_plugin.plan.flops import Shape, training_flops
from zaya_plugin.plan.step_source import NOT_COMPUTING, SCHEMA
from zaya_plugin.plan.step_work import work_of

KERNELS_SHOWN = 8  # of each part, the longest
WAITING = ("Synchronize", "cudaMemcpy", "hipMemcpy")  # in the names of calls that wait for the device
LAUNCHES = ("LaunchKernel", "LaunchCooperativeKernel", "GraphLaunch")


def of_rank(session, recipe, options: Options, rates: Rates, device) -> dict:
    """Return the record without its breakdown. Called on every rank; memory is that of the fullest one."""
    import torch

    args, world = session.parts.args, torch.distributed.get_world_size()
    memory = torch.tensor(session.memory_gib, device=device)
    torch.distributed.all_reduce(memory, torch.distributed.ReduceOp.MAX)
    allocated, reserved, resident = memory.tolist()
    on_cpu = device.type == "cpu"
    times = [after - before for before, after in itertools.pairwise(session.moments)]
    seconds = statistics.fmean(times)
    tokens = recipe.stage.global_batch_size * recipe.stage.seq_length
    shape = Shape.of_arguments(args)
    rate = training_flops(shape, tokens, recipe.stage.seq_length) / seconds / world
    return {
        "schema": SCHEMA,
        **surroundings(device, options.command, options.commit),
        "recipe": asdict(recipe),
        "model": asdict(shape),
        "world_size": world,
        "rates": {"gemm_tflops": rates.gemm / 1e12, "copy_tb_per_s": rates.copy / 1e12},
        "step": {
            "optimizer": options.optimizer,
            "steps": options.steps,
            "ms": 1e3 * seconds,
            "ms_median": 1e3 * statistics.median(times),
            "ms_all": [1e3 * duration for duration in times],
            "tokens": tokens,
            "micro_batches": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
            "tokens_per_s": tokens / seconds,
            "tokens_per_s_per_device": tokens / seconds / world,
            "tflops_per_device": rate / 1e12,
            "share_of_gemm": rate / rates.gemm,
            "allocated_gib": None if on_cpu else allocated,
            "reserved_gib": None if on_cpu else reserved,
            "resident_gib": resident,
        },
    }


def with_breakdown(record: dict, session, recipe, kept: Path | None) -> dict:
    """Return `record` with the parts of the traced step. kept: file of the trace, None if it is deleted."""
    traced = trace.read(session.trace)
    learned = attribution.learn(trace.read(session.reference), PASSES) if session.learned else None
    start, end = traced.window(STEP)
    on_cpu = record["step"]["allocated_gib"] is None
    activities = (
        attribution.operator_activities(traced, start, end)
        if on_cpu
        else attribution.device_activities(traced, start, end, learned)
    )
    rates, written = record["rates"], written_first(session.parts.model)
    rows = record["model"]["vocab_size"]
    work = work_of(recipe, record["world_size"], rows, record["step"]["optimizer"], written)
    shared = breakdown(activities, start, end, work, rates["gemm_tflops"] * 1e12, rates["copy_tb_per_s"] * 1e12)
    computing = sum(row["ms"] for row in shared["parts"] if row["part"] not in NOT_COMPUTING)
    return {
        **record,
        "written_first": sorted(written),
        "step": {**record["step"], "not_computing_share": max(0.0, 1 - computing / record["step"]["ms"])},
        "traced": {
            "source": "operators" if on_cpu else "kernels",
            "ms": (end - start) / 1e3,
            "host_ms": host_microseconds(traced, start, end) / 1e3,
            "launches": sum(
                any(word in call.name for word in LAUNCHES)
                for call in traced.calls.values()
                if start <= call.start < end
            ),
            "activities": sum(activity.begins for activity in activities),
            "from_graph": learned is not None,
            "trace": kept.name if kept else None,
        },
        **shared,
    }


def breakdown(activities, start: float, end: float, work: dict, gemm: float, copy: float) -> dict:
    """Return {"parts": [...], "hidden_communication_ms"} from activities in microseconds, work by part and the two
    rates.
    """
    moments, rows = resolve(activities, start, end), []
    for part, title in PARTS.items():
        forward, backward = moments.parts.get(part, (0.0, 0.0))
        ms, done = (forward + backward) / 1e3, work.get(part)
        row = {"part": part, "title": title, "ms": ms, "share": (forward + backward) / (end - start)}
        row |= {"forward_ms": forward / 1e3, "backward_ms": backward / 1e3}
        row |= dict.fromkeys(("tflop", "gb", "gemm_share", "copy_share", "roofline"))
        if done is not None and ms:
            shares = done.flops / gemm / ms * 1e3, done.bytes / copy / ms * 1e3
            row |= {"tflop": done.flops / 1e12, "gb": done.bytes / 1e9, "roofline": max(shares)}
            row |= {"gemm_share": shares[0], "copy_share": shares[1]}
        names = sorted(((time, n, count) for (p, n), (count, time) in moments.names.items() if p == part), reverse=True)
        row["activities"] = sum(count for _, _, count in names)
        row["longest"] = [
            {"name": n[:160], "count": count, "ms": time / 1e3} for time, n, count in names[:KERNELS_SHOWN]
        ]
        rows.append(row)
    return {"parts": rows, "hidden_communication_ms": moments.hidden_communication / 1e3}


def host_microseconds(traced: trace.Trace, start: float, end: float) -> float:
    """Return the time in which the host does not wait for the device in a runtime call; it includes the profiler's
    cost.
    """
    waits = sorted(
        (max(call.start, start), min(call.end, end))
        for call in traced.calls.values()
        if call.end > start
        and call.start < end
        and any(word in call.name for word in WAITING)
        and "Async" not in call.name
    )
    waited, until = 0.0, start
    for begins, ends in waits:
        waited, until = waited + max(0.0, ends - max(begins, until)), max(until, ends)
    return end - start - waited
