# SPDX-License-Identifier: Apache-2.0
"""Measure the versions of hip_ops.cca_prologue and transformers' modules: CCA between projections and attention,
forward and backward.

    python3 benchmarks/cca_prologue.py                        4 sequences of 4096 tokens, ZAYA1's heads
    python3 benchmarks/cca_prologue.py --sweep --rep 60       other tiles and grids of each Triton kernel, and the best
                                                              of each together; a minute

Medians of triton's do_bench (which clears L2 before each call) on new random inputs; the copy bandwidth of the device
is measured in the same run. Rates count the bytes that must move: forward projected in, query, key and value out;
backward their gradients and the queries' and keys' projections in, projected's gradient out. `operator` includes
dispatch and autograd, `kernels` is the version's function alone, and `in a graph` leaves out the host. transformers'
modules get projections that slice the given tensor, so that no time contains a matrix product of the projections.
Prints a table, and one line of JSON, which it writes to benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
from call_timing import graphed, kernel_times, milliseconds
from compile_ahead import compile_ahead
from operator_benchmark import MI300X_BYTES_PER_S, add_options, begin, failure, finish
from torch import Tensor, nn

import hip_ops
from hip_ops import use_kernels
from hip_ops.ops.cca_prologue import reference
from hip_ops.ops.cca_prologue.triton import HeadLaunch

HEADS, GROUPS, D, ROTARY = 8, 2, 128, 64
CHANNELS, VALUES = (HEADS + GROUPS) * D, GROUPS * D


class Inputs:
    def __init__(self, batch: int, rows: int, device: torch.device):
        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).bfloat16()

        self.batch, self.rows = batch, rows
        self.projected = random(rows, batch, CHANNELS + VALUES)
        self.parameters = (
            random(CHANNELS, 1, 2),
            random(CHANNELS, scale=0.3),
            random(CHANNELS, D, 2, scale=(2 * D) ** -0.5),
            random(CHANNELS, scale=0.3),
            torch.tensor([0.9, 1.3], device=device).bfloat16(),
        )
        half = torch.arange(rows, device=device)[:, None, None, None] * 1e4 ** (
            -torch.arange(ROTARY // 2, device=device) * 2 / ROTARY
        )
        self.angles = torch.cat((half, half), dim=-1)  # [s, 1, 1, r]
        self.rope = hip_ops.rope_table(self.angles)
        self.upstream = tuple(random(rows, batch, count, D) for count in (HEADS, GROUPS, GROUPS))

    @property
    def arguments(self) -> tuple:
        """Return the arguments of the versions' functions."""
        return (self.projected, *self.parameters, self.rope, None, None, None, GROUPS, VALUES // 2)

    @property
    def leaves(self) -> list[Tensor]:
        return [t.detach().requires_grad_() for t in (self.projected, *self.parameters)]

    def bytes(self, direction: str) -> int:
        width = CHANNELS + VALUES
        return 2 * self.rows * self.batch * (2 * width if direction == "forward" else 2 * width + CHANNELS)


def operator(inputs: Inputs) -> Callable:
    return lambda projected, *parameters: hip_ops.cca_prologue(projected, *parameters, inputs.rope, query_groups=GROUPS)


class Slice(nn.Module):
    """Replaces a projection: returns its channels of the projected tensor."""

    def __init__(self, start: int, size: int):
        super().__init__()
        self.start, self.size = start, size

    def forward(self, projected: Tensor) -> Tensor:
        return projected[..., self.start : self.start + self.size]


def of_transformers(inputs: Inputs) -> Callable:
    """Return a function of ZayaCCAProjection, ZayaQKNorm and apply_rotary_pos_emb; batch first, as in transformers."""
    zaya = importlib.import_module("transformers.models.zaya.modeling_zaya")
    from torch.func import functional_call
    from transformers import ZayaConfig

    width = CHANNELS + VALUES
    config = ZayaConfig(hidden_size=width, num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=D)
    device, dtype = inputs.projected.device, inputs.projected.dtype
    projection = zaya.ZayaCCAProjection(config, 0).to(device, dtype)
    starts = (0, HEADS * D, CHANNELS, CHANNELS + VALUES // 2, width)
    for name, start, end in zip(
        ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed"), starts, starts[1:], strict=False
    ):
        setattr(projection, name, Slice(start, end - start))
    norm = zaya.ZayaQKNorm(config).to(device, dtype)
    angles = inputs.angles[:, 0].transpose(0, 1)  # [1, s, r]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    names = ("conv_qk_depthwise.weight", "conv_qk_depthwise.bias", "conv_qk_grouped.weight", "conv_qk_grouped.bias")

    def function(projected, *parameters):
        by_batch = projected.transpose(0, 1)
        query, key, value = functional_call(projection, dict(zip(names, parameters[:4], strict=True)), (by_batch, None))
        query, key = functional_call(norm, {"temp": parameters[4]}, (query, key))
        query, key = zaya.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
        return tuple(x.transpose(0, 1) for x in (query, key, value))

    return function


def kernels(name: str, inputs: Inputs) -> dict[str, Callable]:
    """Return forward and backward of version `name`, without dispatch and autograd."""
    module = importlib.import_module(f"hip_ops.ops.cca_prologue.{name}")
    query, key, _, inverse_norm = module.cca_prologue(*inputs.arguments)
    *tensors, groups, delayed = inputs.arguments
    return {
        "forward": lambda: module.cca_prologue(*inputs.arguments),
        "backward": lambda: module.cca_prologue_backward(
            *inputs.upstream, *tensors, query, key, inverse_norm, groups, delayed
        ),
    }


def difference(function: Callable, inputs: Inputs) -> float:
    """Return the largest distance of a query from the fp32 reference's, relative to the largest query. It shows that
    the timed call computes the right result.
    """
    few = Inputs(2, 256, inputs.projected.device)
    floats = (few.projected.float(), *(p.float() for p in few.parameters))
    exact = reference.cca_prologue(*floats, *few.arguments[len(floats) :])[0]
    return ((function(few)(few.projected, *few.parameters)[0] - exact).abs().max() / exact.abs().max()).item()


def measure(batch: int, rows: int, device: torch.device, options) -> dict:
    """Return {"forward": {name: figures}, "backward": ...}; a version that fails has its error instead of figures."""
    inputs = Inputs(batch, rows, device)
    found: dict[str, dict] = {"forward": {}, "backward": {}}

    def enter(direction: str, name: str, make_call: Callable[[], Callable]) -> None:
        try:
            ms = milliseconds(make_call(), device, options.rep)
        # an anchor that is not installed or does not run on this device becomes a row of the table
        except Exception as error:
            found[direction][name] = failure(error)
            return
        rate = inputs.bytes(direction) / ms * 1e3
        print(direction, name, round(ms, 4), file=sys.stderr, flush=True)
        found[direction][name] = {
            "ms": round(ms, 4),
            "tb_per_s": round(rate / 1e12, 3),
            "of_copy": round(rate / options.copy, 3),
        }

    def both(name: str, make: Callable[[], Callable]) -> None:
        def backward() -> Callable:
            leaves = inputs.leaves
            outputs = make()(*leaves)
            return lambda: torch.autograd.grad(outputs, leaves, inputs.upstream, retain_graph=True)

        def forward() -> Callable:
            function, leaves = make(), inputs.leaves
            return lambda: function(*leaves)

        enter("forward", name, forward)
        enter("backward", name, backward)

    errors = {}
    for name in options.versions:
        with use_kernels(name):
            both(f"{name}, operator", lambda: operator(inputs))
            with contextlib.suppress(Exception):
                errors[name] = round(difference(operator, inputs), 5)
        if name in ("hip", "triton"):
            for direction in found:
                enter(
                    direction,
                    f"{name}, kernels",
                    lambda name=name, direction=direction: kernels(name, inputs)[direction],
                )
                if device.type == "cuda":
                    enter(
                        direction,
                        f"{name}, kernels in a graph",
                        lambda name=name, direction=direction: graphed(lambda: kernels(name, inputs)[direction]),
                    )
    if not options.no_anchors:
        both("transformers, eager", lambda: of_transformers(inputs))
        if device.type == "cuda":
            torch._dynamo.reset()
            with contextlib.suppress(ImportError):
                compiled = torch.compile(of_transformers(inputs), dynamic=False)
            both("transformers, torch.compile", lambda: compiled)
    summary = {"largest distance from fp32, of the largest": errors}
    for direction, figures in found.items():
        mine, theirs = (
            figures.get(name, {}).get("ms")
            for name in (f"{options.versions[0]}, operator", "transformers, torch.compile")
        )
        if mine and theirs:
            summary[f"transformers compiled / ours, {direction}"] = round(theirs / mine, 3)
        summary[f"mi300x prediction ms, {direction}"] = round(1e3 * inputs.bytes(direction) / MI300X_BYTES_PER_S, 4)
    return {**found, "summary": summary}


KERNELS = ("forward", "norm", "input", "weight")


@contextlib.contextmanager
def launched_as(**chosen: HeadLaunch):
    """Replace the launch of the named Triton kernels."""
    from hip_ops.ops.cca_prologue import triton as module

    others = module.launch
    with mock.patch.object(
        module, "launch", lambda name, *a, **k: chosen[name] if name in chosen else others(name, *a, **k)
    ):
        yield


def trials(kernel: str, processors: int) -> list[HeadLaunch]:
    """Return the launcher's choice and other launches. `programs` of each part of a head are chosen so that all are
    resident at once, or in a given number of rounds.
    """
    from hip_ops.ops.cca_prologue.triton import launch
    from hip_ops.runtime.launch import WARP_SIZE

    def resident(count: float, part: int = D) -> int:
        return max(1, int(processors * count * part / ((HEADS + GROUPS) * D)))

    default = launch(kernel, D, HEADS + GROUPS, 2, processors=processors, warp_size=WARP_SIZE)
    if kernel in ("forward", "input"):
        others = [
            replace(default, stages=1),
            HeadLaunch(64, D, 8, processors, stages=2),
            HeadLaunch(128, D, 8, processors),
        ]
    elif kernel == "norm":
        others = [
            HeadLaunch(block, D, warps, processors * count // (HEADS + GROUPS + 1), stages=stages)
            for block, warps, count, stages in (
                (32, 8, 4, 1),
                (32, 4, 6, 1),
                (16, 4, 6, 1),
                (16, 4, 10, 1),
                (32, 8, 3, 3),
            )
        ]
    else:
        others = [
            replace(default, stages=4),
            replace(default, stages=2),
            replace(default, rows=64),
            replace(default, rows=64, stages=2),
            replace(default, programs=resident(2)),
            HeadLaunch(32, 64, 4, resident(2, 64), stages=3, zero_rows=32, inputs=32),
        ]
    return [default, *others]


def kernel_alone(kernel: str, inputs: Inputs) -> Callable:
    """Return the call that is timed: for the backward pass all launches, whose sum shows which kernel gains."""
    return kernels("triton", inputs)["forward" if kernel == "forward" else "backward"]


def run_once(kernel: str, trial: HeadLaunch) -> None:
    """Compiles one trial."""
    inputs = Inputs(1, 256, torch.device("cuda", 0))
    with launched_as(**{kernel: trial}):
        kernel_alone(kernel, inputs)()


def as_run(kernel: str, trial: HeadLaunch, inputs: Inputs) -> HeadLaunch:
    """Return `trial` with the stages that fitted into shared memory when it ran; the launch does not change those of
    the norm kernel.
    """
    from hip_ops.ops.cca_prologue import triton as module

    projected, *parameters, rope, halo, value_halo, starts, groups, delayed = inputs.arguments
    call = (projected, parameters[2], rope, halo, value_halo, starts, groups, delayed)
    plan = module._plan_for(kernel != "forward", *call)
    return trial if kernel == "norm" else replace(trial, stages=plan.keywords[kernel]["num_stages"])


def sweep(batch: int, rows: int, device: torch.device, options) -> dict:
    """Return the times of Triton's forward or backward with one kernel launched differently, best first, and of the
    best launches together.
    """
    inputs, found, best = Inputs(batch, rows, device), {}, {}
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = {kernel: trials(kernel, processors) for kernel in options.only}
    compile_ahead(
        run_once,
        [(kernel, replace(trial, programs=trial.programs and 1)) for kernel, each in wanted.items() for trial in each],
    )
    for kernel, each in wanted.items():
        times: dict[HeadLaunch, float] = {}
        found[kernel] = {}
        for trial in each:
            with launched_as(**{kernel: trial}):
                try:
                    ms = milliseconds(graphed(lambda kernel=kernel: kernel_alone(kernel, inputs)), device, options.rep)
                    ran = as_run(kernel, trial, inputs)
                except Exception as error:  # too much shared memory, for example
                    found[kernel][str(trial)] = failure(error)
                    continue
            times[ran] = min(ms, times.get(ran, ms))
            print(kernel, ran, round(ms, 4), "as chosen" if trial is each[0] else "", file=sys.stderr, flush=True)
        best[kernel] = min(times, key=times.__getitem__)
        found[kernel] = {
            str(ran): {"ms": round(times[ran], 4)} for ran in sorted(times, key=times.__getitem__)
        } | found[kernel]
    with launched_as(**best):
        for direction, call in kernels("triton", inputs).items():
            found["together"] = found.get("together", {}) | {
                direction: {"ms": round(milliseconds(graphed(lambda call=call: call), device, options.rep), 4)}
            }
    for kernel, chosen in best.items():
        print("best:", kernel, chosen, file=sys.stderr)
    print("together:", found["together"], file=sys.stderr, flush=True)
    return found


def parts(batch: int, rows: int, device: torch.device) -> dict:
    """Return the microseconds of each kernel of forward and backward."""
    calls = kernels("triton", Inputs(batch, rows, device)).values()
    return {kernel: {"us": us} for kernel, us in kernel_times(lambda: [call() for call in calls]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shapes", nargs="+", default=["4x4096"] if on_gpu else ["2x64"], help="micro batch x rows")
    parser.add_argument(
        "--versions",
        nargs="+",
        default=["triton", "compiled"] if on_gpu else ["reference"],
        help="versions of the operator; the first one is compared with transformers",
    )
    add_options(parser, "cca_prologue")
    parser.add_argument("--no-anchors", action="store_true", help="only hip_ops")
    parser.add_argument("--only", nargs="+", default=KERNELS, choices=KERNELS, help="kernels that the sweep measures")
    options = parser.parse_args()
    device = begin(options)
    results = {}
    for shape in options.shapes:
        batch, rows = map(int, shape.split("x"))
        results[shape] = (sweep if options.sweep else measure)(batch, rows, device, options)
        if on_gpu and not options.sweep and "triton" in options.versions:
            results[shape]["parts"] = parts(batch, rows, device)
            print(results[shape]["parts"], file=sys.stderr, flush=True)
    finish(options, results, (12, 10, 42))


if __name__ == "__main__":
    main()
