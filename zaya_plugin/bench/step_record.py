# SPDX-License-Identifier: Apache-2.0
"""The record of a measurement as one JSON file: recipe, device, speed, and the share of each part in the traced step.

Shares are of the traced step and add up to 1. A part's `gemm_share` is the time of its operations at the measured rate
of a matrix product over its own time, `copy_share` the same of its least bytes at the measured rate of a copy;
`roofline` is the larger of the two. All work is that of one rank. `not_computing_share` is of the steps that were timed
without a profiler: the part of their time that the traced step's computation does not fill.
"""

from __future__ import annotations

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
from zaya_plugin.plan.step_work import OptimizerShare, Rank, step_work

KERNELS_SHOWN = 8  # of each part, the longest
WAITING = ("Synchronize", "cudaMemcpy", "hipMemcpy")  # in the names of calls that wait for the device
LAUNCHES = ("LaunchKernel", "LaunchCooperativeKernel", "GraphLaunch")


def of_rank(session, recipe, options: Options, rates: Rates, device) -> dict:
    """Return the record without its breakdown. Called on every rank; memory is that of the fullest one."""
    import torch

    args, measured = session.parts.args, session.measured
    world = torch.distributed.get_world_size()
    memory = torch.tensor(
        [value or 0.0 for value in (measured.allocated_gib, measured.reserved_gib, measured.resident_gib)],
        device=device,
    )
    torch.distributed.all_reduce(memory, torch.distributed.ReduceOp.MAX)
    allocated, reserved, resident = memory.tolist()
    on_cpu = device.type == "cpu"
    tokens = recipe.stage.global_batch_size * recipe.stage.seq_length
    shape, seconds = Shape.of_arguments(args), measured.mean_seconds
    flops = training_flops(shape, tokens, recipe.stage.seq_length)
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
            "ms_median": 1e3 * measured.median_seconds,
            "ms_all": [1e3 * duration for duration in measured.seconds],
            "tokens": tokens,
            "micro_batches": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
            "tokens_per_s": tokens / seconds,
            "tokens_per_s_per_device": tokens / seconds / world,
            "tflops_per_device": flops / seconds / world / 1e12,
            "share_of_gemm": flops / seconds / world / rates.gemm,
            "allocated_gib": None if on_cpu else allocated,
            "reserved_gib": None if on_cpu else reserved,
            "resident_gib": resident,
        },
        "anchor": None,
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
    rates, work = record["rates"], work_of(session, recipe.optim)
    shared = breakdown(activities, start, end, work, rates["gemm_tflops"] * 1e12, rates["copy_tb_per_s"] * 1e12)
    computing = sum(row["ms"] for row in shared["parts"] if row["part"] not in NOT_COMPUTING)
    return {
        **record,
        "written_first": sorted(written_first(session.parts.model)),
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
    moments, whole = resolve(activities, start, end), end - start
    rows = []
    for part, title in PARTS.items():
        forward, backward = moments.parts.get(part, (0.0, 0.0))
        seconds = (forward + backward) / 1e6
        done = work.get(part)
        share = {"tflop": None, "gb": None, "gemm_share": None, "copy_share": None, "roofline": None}
        if done is not None and seconds:
            against = done.flops / seconds / gemm, done.bytes / seconds / copy
            share = dict(
                tflop=done.flops / 1e12,
                gb=done.bytes / 1e9,
                gemm_share=against[0],
                copy_share=against[1],
                roofline=max(against),
            )
        names = sorted(((n, *moments.names[p, n]) for p, n in moments.names if p == part), key=lambda item: -item[2])
        rows.append(
            {
                "part": part,
                "title": title,
                "ms": 1e3 * seconds,
                "share": (forward + backward) / whole,
                "forward_ms": forward / 1e3,
                "backward_ms": backward / 1e3,
                **share,
                "longest": [
                    {"name": name[:160], "count": count, "ms": time / 1e3}
                    for name, count, time in names[:KERNELS_SHOWN]
                ],
            }
        )
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
        waited += max(0.0, ends - max(begins, until))
        until = max(until, ends)
    return end - start - waited


def work_of(session, optim) -> dict:
    """Return the work of this rank by part, from the model that ran. optim: the recipe's group."""
    from megatron.core import parallel_state

    from zaya_plugin.model.layer import ZayaTransformerLayer

    parts = session.parts
    args = parts.args
    modules = [module for chunk in parts.model for module in chunk.modules()]
    data_ranks = parallel_state.get_data_parallel_world_size()
    samples = args.global_batch_size // data_ranks
    rank = Rank(
        layers=sum(isinstance(module, ZayaTransformerLayer) for module in modules),
        tokens=samples * args.seq_length // (args.context_parallel_size * args.tensor_model_parallel_size),
        micro_batches=samples // args.micro_batch_size,
        experts=args.num_experts // args.expert_model_parallel_size,
        embedding=any(getattr(module, "pre_process", False) for module in modules),
        head=any(getattr(module, "post_process", False) for module in modules),
        activation_bytes=2 if args.bf16 else 4,
        stream_bytes=4 if args.bf16 is False or args.residual_in_fp32 else 2,
        accumulated=session.accumulated,
        written=written_first(parts.model),
        tensor=args.tensor_model_parallel_size,
    )
    return step_work(
        Shape.of_arguments(args),
        args.seq_length,
        rank,
        _optimizer_share(parts, args, optim) if session.options.optimizer else None,
    )


def _optimizer_share(parts, args, optim):
    from megatron.core import parallel_state

    from hip_ops.newton_schulz_form import newton_schulz_flops
    from zaya_plugin.optim.parameter_role import role_of

    muon = adamw = operations = 0.0
    experts, dense = (
        parallel_state.get_expert_data_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )
    for chunk in parts.model:
        for parameter in chunk.parameters():
            ranks = (
                (dense if getattr(parameter, "allreduce", True) else experts) if args.use_distributed_optimizer else 1
            )
            matrices = role_of(parameter).matrices
            if matrices is None:
                adamw += parameter.numel() / ranks
            else:
                muon += parameter.numel() / ranks
                flops = newton_schulz_flops(*matrices[1:], optim.muon_steps, optim.muon_dtype == "bf16")
                operations += matrices[0] * flops / ranks
    return OptimizerShare(muon, adamw, 2 if optim.muon_momentum_dtype == "bf16" else 4, operations)
