# SPDX-License-Identifier: Apache-2.0
"""Measure the experts' matrix products on an accelerator: the versions of hip_ops.grouped_product and a loop of cuBLAS
products that knows the loads.

    python3 benchmarks/grouped_product.py                       32,768 and 16,384 tokens, 16 experts,
                                                                2048 -> 2 x 2048 -> 2048, bf16
    python3 benchmarks/grouped_product.py --tokens 32768 --loads late --compile

Loads are those of two layers of `make demo`, at step 40 (before balancing has settled; one expert has almost no tokens)
and at step 90, and equal ones. Weight gradients are added to fp32 blocks, and the time of the addition is included;
`loop` passes its borders from the host, which training cannot do. `experts` is the model's whole function, forward and
backward with DDP's main gradients and hip_ops' SwiGLU, on a hot device: seconds of repetitions in turn. `projections`
is the weight gradient of attention's four input projections and its output projection. TFLOP/s count multiply-adds of
existing rows only. Medians of triton's do_bench. Prints a table and one line of JSON, which it writes to
benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable

import torch
from call_timing import milliseconds
from operator_benchmark import add_options, begin, finish
from torch import Tensor

BF16 = torch.bfloat16
LOADS = {  # shares of the experts, in thousandths
    # step 90, layer 4: entropy 0.973 of the largest
    "late": (97, 33, 30, 84, 76, 55, 45, 38, 34, 61, 64, 122, 44, 76, 68, 73),
    "early": (11, 56, 126, 59, 18, 52, 54, 149, 23, 193, 57, 10, 67, 0, 69, 56),  # step 40, layer 1: 0.883
    "even": (1,) * 16,
}


def offsets_of(load: str, tokens: int, device) -> Tensor:
    shares = torch.tensor(LOADS[load], dtype=torch.float64)
    return (tokens * shares.cumsum(0) / shares.sum()).round().int().to(device)


class Products:
    """The six products of the experts with all their operands; `make` returns the calls of one implementation."""

    def __init__(self, tokens: int, hidden: int, width: int, load: str, device: torch.device):
        self.offsets = offsets_of(load, tokens, device)
        experts = len(self.offsets)

        def random(*shape, scale=1.0):
            return (scale * torch.randn(shape, device=device)).to(BF16)

        self.x, self.grad_y, self.inner = random(tokens, hidden), random(tokens, hidden), random(tokens, width)
        self.grad_gate_up = random(tokens, 2 * width)
        self.fc1, self.fc2 = (
            random(experts, 2 * width, hidden, scale=hidden**-0.5),
            random(experts, hidden, width, scale=width**-0.5),
        )
        self.main1 = torch.zeros(self.fc1.shape, device=device)
        self.main2 = torch.zeros(self.fc2.shape, device=device)
        self.multiply_adds = {"fc1": tokens * hidden * 2 * width, "fc2": tokens * hidden * width}

    def make(self, rows: Callable, outer: Callable) -> dict[tuple[str, str], Callable]:
        return {
            ("forward", "fc1"): lambda: rows(self.x, self.fc1.mT, self.offsets),
            ("forward", "fc2"): lambda: rows(self.inner, self.fc2.mT, self.offsets),
            ("dgrad", "fc2"): lambda: rows(self.grad_y, self.fc2, self.offsets),
            ("dgrad", "fc1"): lambda: rows(self.grad_gate_up, self.fc1, self.offsets),
            ("wgrad", "fc2"): lambda: outer(self.main2, self.grad_y, self.inner, self.offsets),
            ("wgrad", "fc1"): lambda: outer(self.main1, self.grad_gate_up, self.x, self.offsets),
        }


def available_versions(device: torch.device) -> list[str]:
    """Return the versions of hip_ops.grouped_product that pass their self-checks on `device`."""
    from hip_ops import use_kernels, warm_up
    from hip_ops.ops import grouped_product
    from hip_ops.versions import VERSIONS

    found = []
    for name in VERSIONS["grouped_product"]:
        try:
            with use_kernels(grouped_product=name):
                warm_up(device, (grouped_product._rows, grouped_product._outer))
        except ValueError as error:
            print(error, file=sys.stderr)
        else:
            found.append(name)
    return found


def implementations(products: Products) -> dict[str, tuple[Callable, Callable]]:
    from hip_ops.runtime.main_grad import add_product_

    found = {}
    for name in available_versions(products.x.device):
        module = importlib.import_module(f"hip_ops.ops.grouped_product.{name}")
        found[name] = module.grouped_rows, functools.partial(module.grouped_outer_, accumulate=True)
    ends = products.offsets.tolist()
    borders = list(enumerate(zip([0, *ends[:-1]], ends, strict=True)))

    def loop_rows(x, matrices, offsets):
        out = x.new_empty(len(x), matrices.shape[2])
        for expert, (start, end) in borders:
            torch.mm(x[start:end], matrices[expert], out=out[start:end])
        return out

    def loop_outer(total, a, b, offsets):
        for expert, (start, end) in borders:
            add_product_(total[expert], a[start:end], b[start:end])

    return {**found, "loop": (loop_rows, loop_outer)}


def compiled(rows: Callable, outer: Callable) -> tuple[Callable, Callable]:
    return torch.compile(rows, dynamic=False, mode="max-autotune-no-cudagraphs"), torch.compile(outer, dynamic=False)


def rates(products: Products, calls: dict, device: torch.device, rep: int) -> dict:
    """Return the milliseconds of each product, and the TFLOP/s of forward, dgrad, wgrad and both gradients together."""
    ms = {key: milliseconds(call, device, rep) for key, call in calls.items()}
    flops = {key: 2 * products.multiply_adds[key[1]] for key in calls}

    def rate(*parts):
        keys = [key for key in calls if key[0] in parts]
        return round(sum(flops[key] for key in keys) / sum(ms[key] for key in keys) / 1e9)

    figures = {
        "forward": rate("forward"),
        "dgrad": rate("dgrad"),
        "wgrad": rate("wgrad"),
        "backward": rate("dgrad", "wgrad"),
    }
    return {**figures, "ms": {" ".join(key): round(value, 4) for key, value in ms.items()}}


def whole_experts(products: Products, names: list[str], device: torch.device, seconds: float) -> dict:
    """Return median milliseconds and TFLOP/s of forward and backward of ExpertMLP; all versions `names` run in turn
    on a hot device.
    """
    from triton.testing import do_bench

    from hip_ops import use_kernels
    from zaya_plugin.model.experts import ExpertMLP

    experts, tokens = len(products.offsets), len(products.x)
    matrices = []
    for block, main in ((products.fc1, products.main1), (products.fc2, products.main2)):
        for matrix, total in zip(block, main, strict=True):
            weight = torch.nn.Parameter(matrix)
            weight.main_grad, weight.grad_added_to_main_grad = total, False
            weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
            matrices.append(weight)
    x, weights = products.x.detach().requires_grad_(), torch.rand(tokens, device=device, requires_grad=True)

    def run(name):
        x.grad = weights.grad = None
        with use_kernels(grouped_product=name):
            ExpertMLP.apply(x, weights, products.offsets, experts, None, 1.0, *matrices).backward(products.grad_y)

    share, times = max(1, int(1000 * seconds / 4 / len(names))), {name: [] for name in names}
    for _ in range(4):  # the first time warms up
        for name in names:
            times[name].append(do_bench(lambda name=name: run(name), warmup=5, rep=share, return_mode="median"))
    flops = 6 * sum(products.multiply_adds.values())
    return {
        name: {"ms": round(sorted(each[1:])[1], 3), "TFLOP/s": round(flops / sorted(each[1:])[1] / 1e9)}
        for name, each in times.items()
    }


def projections(tokens: int, hidden: int, device: torch.device, rep: int) -> dict:
    """Return the milliseconds of the weight gradients of attention's projections: by autograd and DDP with one
    product each, and as the model computes them.
    """
    from hip_ops.runtime.main_grad import add_product_, add_products_

    sizes = {"input": (1024, 256, 128, 128), "output": (hidden,)}
    found = {}
    for name, rows in sizes.items():
        columns = hidden if name == "input" else 1024
        a, b = (
            torch.randn(tokens, sum(rows), device=device).to(BF16),
            torch.randn(tokens, columns, device=device).to(BF16),
        )
        totals = [torch.zeros(size, columns, device=device) for size in rows]

        def autograd(a=a, b=b, totals=totals, rows=rows):
            for total, part in zip(totals, (a.t() @ b).split(rows), strict=True):
                total.add_(part)

        def pieces(a=a, b=b, totals=totals, rows=rows):
            for total, part in zip(totals, a.split(rows, dim=1), strict=True):
                add_product_(total, part, b)

        ways = {
            "autograd and DDP": autograd,
            "a product each": pieces,
            "model": lambda a=a, b=b, totals=totals: add_products_(totals, a, b),
        }
        found[name] = {way: round(milliseconds(call, device, rep), 4) for way, call in ways.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "grouped_product", sweep=False)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 16384])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["late", "early"])
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also measure torch.compile of grouped_mm with max-autotune, which takes a minute",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=4.0,
        help="seconds for the whole function on a hot device; 0: do not measure it",
    )
    parser.set_defaults(rep=100)
    options = parser.parse_args()
    device = begin(options)
    results: dict = {}
    for tokens in options.tokens:
        for load in options.loads:
            products = Products(tokens, options.hidden, options.width, load, device)
            part = results.setdefault(f"{tokens} {load}", {})
            ways = implementations(products)
            if options.compile:
                ways["grouped_mm compiled"] = compiled(*ways["grouped_mm"])
            for name, functions in ways.items():
                try:
                    part[name] = rates(products, products.make(*functions), device, options.rep)
                except Exception as error:  # the other figures are still measured
                    part[name] = {
                        "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
                    }
            if options.seconds and device.type == "cuda":
                names = ["auto", *(name for name in ways if name in ("grouped_mm", "triton"))]
                part["experts"] = whole_experts(products, names, device, options.seconds)
            del products
        results[f"{tokens} projections"] = projections(tokens, options.hidden, device, options.rep)
    finish(options, results, (20, 16))


if __name__ == "__main__":
    main()
