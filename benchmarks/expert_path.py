# SPDX-License-Identifier: Apache-2.0
"""Measure top-1 permute, unpermute and weighted SwiGLU in both directions, and megatron-core, torch.compile and a plain
copy of the same bytes.

    python3 benchmarks/expert_path.py                  32,768 tokens, hidden size and expert width 2048, 16 experts,
                                                       bf16
    python3 benchmarks/expert_path.py --sweep          other tiles of the Triton kernels

Medians of triton's do_bench (which clears L2 before each call) on new random inputs larger than L2. Rates count the
bytes that must move: each row once in and once out, a padding row once out, maps and probs not at all. `operator`
includes dispatch and autograd, `kernel` is the version's function alone. Every call but SwiGLU is timed as the replay
of a captured graph, because the host takes longer to launch it than the device to run it; `host_ms` is the host's time
for one call. megatron-core is the stock `permute` and `unpermute` of its token dispatcher (not fused; with its sort,
and with a given order by its gather alone). Prints a table and one line of JSON, which it writes to
benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from call_timing import graphed, milliseconds
from compile_ahead import compile_ahead
from operator_benchmark import MI300X_BYTES_PER_S, add_options, begin, failure, finish
from torch import Tensor

import hip_ops
from hip_ops.ops.weighted_swiglu import reference

BF16 = torch.bfloat16


class Inputs:
    """Balanced random experts; a share `skipping` of the tokens belongs to no expert."""

    def __init__(self, tokens: int, hidden: int, experts: int, skipping: float, device: torch.device):
        self.experts = experts
        self.ids = torch.randint(0, experts, (tokens,), device=device)
        self.ids[torch.rand(tokens, device=device) < skipping] = experts
        self.travelling = int((self.ids < experts).sum())
        self.tokens = torch.randn(tokens, hidden, device=device).to(BF16)
        self.grad = torch.randn(tokens, hidden, device=device).to(BF16)
        self.gate_up = torch.randn(tokens, 2 * hidden, device=device).to(BF16)
        self.probs = torch.rand(tokens, device=device)
        self.order = hip_ops.sort_by_expert(self.ids, experts)
        self.routing_map = self.ids.unsqueeze(1) == torch.arange(experts, device=device)


def backward(function: Callable, arguments: list[Tensor], grads) -> Callable:
    """Return the gradients of all arguments, computed by autograd."""
    leaves = [t.detach().requires_grad_() for t in arguments]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def host_milliseconds(call: Callable, device: torch.device) -> float:
    """Return the median time over a few runs in which the host launches one call, without waiting for the device."""
    times = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            call()
        times.append(100 * (time.perf_counter() - start))
    return statistics.median(times)


def eager_swiglu(gate_up: Tensor, probs: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * probs.unsqueeze(-1)).to(gate_up.dtype)


class Figures:
    """{part: {direction: {name: figures}}}; a call that fails has its error instead of figures."""

    def __init__(self, device: torch.device, options):
        self.device, self.options, self.found = device, options, {}

    def enter(
        self, part: str, direction: str, name: str, bytes_needed: int | None, make_call: Callable[[], Callable]
    ) -> None:
        row = self.found.setdefault(part, {}).setdefault(direction, {})
        try:
            call = make_call()
            host = host_milliseconds(call, self.device)
            replayed = self.device.type == "cuda" and part != "swiglu"
            ms = milliseconds(graphed(make_call) if replayed else call, self.device, self.options.rep)
        # an anchor that is not installed or does not run on this device becomes a row of the table
        except Exception as error:
            row[name] = failure(error)
            return
        row[name] = {"ms": round(ms, 4), "host_ms": round(host, 4)}
        if bytes_needed is not None:
            rate = bytes_needed / ms * 1e3
            row[name] |= {"tb_per_s": round(rate / 1e12, 3), "of_copy": round(rate / self.options.copy, 3)}


def measure_sort(figures: Figures, i: Inputs) -> None:
    for name in dict.fromkeys([*figures.options.versions, "reference"]):
        with hip_ops.use_kernels(name):
            figures.enter("sort", "forward", name, None, lambda: lambda: hip_ops.sort_by_expert(i.ids, i.experts))


def measure_permutation(figures: Figures, i: Inputs) -> None:
    row = i.tokens.shape[1] * i.tokens.element_size()
    needed = row * (i.travelling + len(i.tokens))
    enter = figures.enter
    moved = torch.empty_like(i.tokens)
    for direction in ("forward", "backward"):
        enter(
            "permute", direction, "copy of as many rows", 2 * row * len(i.tokens), lambda: lambda: moved.copy_(i.tokens)
        )

    def both(part: str, name: str, function: Callable, argument: Tensor, grad: Tensor) -> None:
        enter(part, "forward", name, needed, lambda: lambda: function(argument))
        enter(part, "backward", name, needed, lambda: backward(function, [argument], (grad,)))

    try:
        from megatron.core.transformer.moe.moe_utils import permute, unpermute
    except ImportError as error:
        figures.found.setdefault("permute", {})["anchor"] = {"megatron-core": {"error": str(error)}}
    else:
        count, shape = i.travelling, i.tokens.shape
        rows, _, sorted_indices, *_ = permute(i.tokens, i.routing_map, num_out_tokens=count)
        both(
            "permute",
            "megatron-core with its sort",
            lambda t: permute(t, i.routing_map, num_out_tokens=count)[0],
            i.tokens,
            i.grad[:count],
        )
        both(
            "permute",
            "megatron-core, gather alone",
            lambda t: t.index_select(0, sorted_indices),
            i.tokens,
            i.grad[:count],
        )
        both("unpermute", "megatron-core", lambda r: unpermute(r, sorted_indices, shape), rows, i.grad)
    for name in figures.options.versions:
        with hip_ops.use_kernels(name):
            both("permute", f"{name}, operator", lambda t: hip_ops.permute_to_experts(t, i.order)[0], i.tokens, i.grad)
            both(
                "permute",
                f"{name}, operator with the sort",
                lambda t: hip_ops.permute_to_experts(t, hip_ops.sort_by_expert(i.ids, i.experts))[0],
                i.tokens,
                i.grad,
            )
            both(
                "unpermute", f"{name}, operator", lambda r: hip_ops.unpermute_from_experts(r, i.order), i.tokens, i.grad
            )
        if name in ("hip", "triton"):
            kernels = importlib.import_module(f"hip_ops.ops.expert_permutation.{name}")
            maps = i.order[:2]
            for part, there in (("permute", maps), ("unpermute", maps[::-1])):
                for direction, (index, inverse) in (("forward", there), ("backward", there[::-1])):
                    enter(
                        part,
                        direction,
                        f"{name}, kernel",
                        needed,
                        lambda k=kernels, index=index, inverse=inverse: (
                            lambda: k.gather_rows(i.tokens, index, inverse, None)
                        ),
                    )


def measure_swiglu(figures: Figures, i: Inputs) -> None:
    """Measure SwiGLU. Backward: the gradients alone by autograd, and together with the output, as the model's
    experts compute them.
    """
    offsets = None if i.travelling == len(i.tokens) else i.order.offsets
    element, width = i.gate_up.element_size(), i.grad.shape[1]
    needed = {
        "forward": element * width * (2 * i.travelling + len(i.grad)),
        "backward": element * width * (3 * i.travelling + 2 * len(i.grad)),
    }
    needed["backward with the output"] = needed["backward"] + element * width * len(i.grad)
    arguments, enter = [i.gate_up, i.probs], figures.enter

    def both(name: str, function: Callable) -> None:
        enter("swiglu", "forward", name, needed["forward"], lambda: lambda: function(*arguments))
        enter("swiglu", "backward", name, needed["backward"], lambda: backward(function, arguments, (i.grad,)))

    both("eager", eager_swiglu)
    if figures.device.type == "cuda":
        torch._dynamo.reset()
        both("torch.compile", torch.compile(eager_swiglu, dynamic=False))
        compiled = torch.compile(reference.weighted_swiglu_backward, dynamic=False)
        enter(
            "swiglu",
            "backward with the output",
            "torch.compile of the reference",
            needed["backward with the output"],
            lambda: lambda: compiled(i.grad, *arguments, offsets, True),
        )
    for name in figures.options.versions:
        with hip_ops.use_kernels(name):
            both(f"{name}, operator", lambda g, p: hip_ops.weighted_swiglu(g, p, offsets))
            enter(
                "swiglu",
                "backward with the output",
                f"{name}, operator",
                needed["backward with the output"],
                lambda: lambda: hip_ops.weighted_swiglu_backward(i.grad, i.gate_up, i.probs, offsets),
            )
        if name in ("hip", "triton"):
            kernels = importlib.import_module(f"hip_ops.ops.weighted_swiglu.{name}")
            enter(
                "swiglu",
                "forward",
                f"{name}, kernel",
                needed["forward"],
                lambda k=kernels: lambda: k.weighted_swiglu(*arguments, offsets),
            )
            for direction, output in (("backward", False), ("backward with the output", True)):
                enter(
                    "swiglu",
                    direction,
                    f"{name}, kernel",
                    needed[direction],
                    lambda k=kernels, output=output: (
                        lambda: k.weighted_swiglu_backward(i.grad, *arguments, offsets, output)
                    ),
                )
    for direction, count in needed.items():
        figures.found["swiglu"][direction]["MI300X, prediction"] = {"ms": round(1e3 * count / MI300X_BYTES_PER_S, 4)}


def measure(i: Inputs, device: torch.device, options) -> dict:
    figures = Figures(device, options)
    measure_sort(figures, i)
    measure_permutation(figures, i)
    measure_swiglu(figures, i)
    return figures.found


KERNELS = ("gather", "swiglu", "swiglu_backward", "swiglu_backward_with_output")


def kernel_call(kind: str, i: Inputs) -> tuple[Callable, int]:
    """Return a call of a Triton function, and the number of rows of hidden size that it moves per token."""
    from hip_ops.ops.expert_permutation import triton as expert_permutation
    from hip_ops.ops.weighted_swiglu import triton as weighted_swiglu

    if kind == "gather":
        return lambda: expert_permutation.gather_rows(i.tokens, *i.order[:2], None), 2
    if kind == "swiglu":
        return lambda: weighted_swiglu.weighted_swiglu(i.gate_up, i.probs, i.order.offsets), 3
    output = kind.endswith("output")
    return lambda: weighted_swiglu.weighted_swiglu_backward(
        i.grad, i.gate_up, i.probs, i.order.offsets, output
    ), 5 + output


def launched_as(kind: str, trial):
    """Replace the tile of the Triton kernel by `trial`."""
    from hip_ops.ops.expert_permutation import triton as expert_permutation
    from hip_ops.ops.weighted_swiglu import triton as weighted_swiglu

    module = weighted_swiglu if kind.startswith("swiglu") else expert_permutation
    return mock.patch.object(module, "launch", lambda *_, **__: trial)


def trials(kind: str, hidden: int) -> list:
    from hip_ops.ops.expert_permutation import triton as expert_permutation
    from hip_ops.ops.weighted_swiglu import triton as weighted_swiglu
    from hip_ops.runtime.launch import WARP_SIZE

    if kind.startswith("swiglu"):
        default = weighted_swiglu.launch(hidden, 2, backward="backward" in kind, warp_size=WARP_SIZE)
    else:
        default = expert_permutation.launch(hidden, 2, warp_size=WARP_SIZE)
    return [
        replace(default, rows=rows, columns=block, num_warps=warps)
        for rows, block, warps in itertools.product((1, 2, 4), (1024, 2048, 4096), (1, 2, 4, 8, 16))
        if 8 <= rows * block // (32 * warps) <= 64 and not (block > hidden or (block < 2048 and rows > 1))
    ]


def run_once(kind: str, hidden: int, trial) -> None:
    """Compiles one trial."""
    with launched_as(kind, trial):
        kernel_call(kind, Inputs(256, hidden, 16, 0.0, torch.device("cuda", 0)))[0]()


def sweep(i: Inputs, device: torch.device, options) -> dict:
    """Return the times of the Triton kernels alone, best first."""
    hidden, found = i.tokens.shape[1], {}
    compile_ahead(run_once, [(kind, hidden, trial) for kind in KERNELS for trial in trials(kind, hidden)])
    for kind in KERNELS:
        times = {}
        for trial in trials(kind, hidden):
            with launched_as(kind, trial):
                call, rows_moved = kernel_call(kind, i)
                try:
                    ms = milliseconds(call, device, options.rep)
                except Exception as error:
                    times[str(trial)] = failure(error)
                    continue
            rate = rows_moved * i.tokens.nbytes / ms * 1e3
            times[str(trial)] = {
                "ms": round(ms, 4),
                "tb_per_s": round(rate / 1e12, 3),
                "of_copy": round(rate / options.copy, 3),
            }
        found[kind] = {"best first": dict(sorted(times.items(), key=lambda item: item[1].get("ms", 1e9)))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=32768 if on_gpu else 512)
    parser.add_argument(
        "--hidden", type=int, default=2048 if on_gpu else 256, help="hidden size, and width of an expert"
    )
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument(
        "--skipping", type=float, nargs="+", default=[0.0, 0.1], help="shares of the tokens that belong to no expert"
    )
    parser.add_argument(
        "--versions",
        nargs="+",
        default=["triton", "hip"] if on_gpu else ["reference"],
        help="versions of the operators: hip, triton, compiled, reference",
    )
    add_options(parser, "expert_path")
    options = parser.parse_args()
    device = begin(options)
    results = {}
    for skipping in options.skipping[:1] if options.sweep else options.skipping:
        inputs = Inputs(options.tokens, options.hidden, options.experts, skipping, device)
        title = f"{options.tokens}x{options.hidden}, {skipping:.0%} skip"
        results[title] = (sweep if options.sweep else measure)(inputs, device, options)
    finish(options, results, (28, 24, 26, 44))


if __name__ == "__main__":
    main()
