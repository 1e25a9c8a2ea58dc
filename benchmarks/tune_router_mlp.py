# SPDX-License-Identifier: Apache-2.0
"""Other launches of the router's two Triton kernels on this GPU, each checked against torch's reference and timed alone.

    python3 benchmarks/tune_router_mlp.py                    16,384 tokens of ZAYA1's router of 256 in bf16; about a minute

What is chosen today comes first (hip_ops/router_mlp/triton.py, `launch`). Times are of replayed graphs, medians of triton's do_bench, which clears L2 before each
replay, with the sum over the programs' sums behind the kernel. Prints them, best first, and writes benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from unittest import mock

import torch
from call_timing import graphed, milliseconds
from compile_ahead import compile_ahead
from operator_benchmark import add_options, begin, failure, finish
from torch import Tensor

from hip_ops.router_mlp import reference
from hip_ops.router_mlp import triton as kernels
from hip_ops.router_mlp.triton import Launch

WIDTH, CLASSES, EPS = 256, 17, 1e-5
DIRECTIONS = ("forward", "backward")
# By what a multiprocessor of sm_90 holds of them (compiled, not run): 128 to 192 rows at a time, with 12 to 24 warps.
TRIALS = (
    Launch(64, 32, 8),
    Launch(64, 32, 4),
    Launch(64, 64, 4),
    Launch(64, 64, 8, 1, 128),
    Launch(32, 32, 4),
    Launch(32, 64, 4, 2, 128),
    Launch(32, 64, 4),
    Launch(32, 64, 8),
    Launch(16, 64, 4),
    Launch(128, 64, 16),
    Launch(128, 32, 8),
)


def inputs(rows: int, width: int, device: torch.device) -> tuple[tuple, tuple[Tensor, Tensor]]:
    """Arguments of the forward kernel, and the gradients of weights and state."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16)

    matrices = [
        random(width, width, scale=width**-0.5),
        random(width),
        random(width, width, scale=width**-0.5),
        random(width),
    ]
    given = (
        random(rows, width),
        random(rows, width),
        random(width),
        random(width),
        random(width),
        *matrices,
        random(CLASSES, width, scale=2 * width**-0.5),
    )
    biases = 0.1 * torch.randn(CLASSES, generator=generator, device=device)
    return (*given, biases, None, EPS, CLASSES - 1), (
        torch.randn(rows, generator=generator, device=device),
        random(rows, width),
    )


def calls(module, given: tuple, upstream: tuple[Tensor, Tensor], kept: tuple[Tensor, ...]) -> dict[str, Callable]:
    """By direction; kept: the forward's results, which the backward of both versions reads."""
    (
        (_, previous, gamma, _, w_norm, w1, _, w2, _, w_out, _, _, eps, unweighted),
        (state, _, ids, hidden1, hidden2, logits, _),
    ) = given, kept
    backward = (
        *upstream,
        state,
        previous,
        gamma,
        hidden1,
        hidden2,
        logits,
        ids,
        w_norm,
        w1,
        w2,
        w_out,
        eps,
        unweighted,
    )
    return {"forward": lambda: module.router_mlp(*given), "backward": lambda: module.router_mlp_backward(*backward)}


def launched_as(trial: Launch):
    return mock.patch.object(kernels, "launch", lambda *_, **__: trial)


def run_once(direction: str, trial: Launch, rows: int, width: int, device: str) -> tuple[Tensor, ...]:
    """What the kernel gives with `trial`; compiles it."""
    given, upstream = inputs(rows, width, torch.device(device))
    kept = kernels.router_mlp(*given)
    with launched_as(trial):
        return calls(kernels, given, upstream, kept)[direction]()


def distance(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """The largest, of a tensor's norm."""
    pairs = [
        (a.double(), b.double()) for a, b in zip(found, wanted, strict=True) if b.is_floating_point() and b.numel()
    ]
    return max(((a - b).norm() / (b.norm() + 1e-30)).item() for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "router_mlp_launches", sweep=False)
    parser.add_argument("--tokens", type=int, default=16_384)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU: there is nothing to time")
    device = begin(options)
    given, upstream = inputs(options.tokens, WIDTH, device)
    kept = kernels.router_mlp(*given)
    wanted = {direction: call() for direction, call in calls(reference, given, upstream, kept).items()}
    today = kernels.launch(WIDTH)
    compile_ahead(run_once, [(direction, trial, 256, WIDTH, "cuda") for direction in DIRECTIONS for trial in TRIALS])
    results: dict[str, dict] = {}
    for direction in DIRECTIONS:
        rows = {}
        for trial in (today, *TRIALS):
            with launched_as(trial):
                try:
                    call = calls(kernels, given, upstream, kept)[direction]
                    rows[str(trial)] = {"distance": float(f"{distance(call(), wanted[direction]):.3g}")}
                    rows[str(trial)]["ms"] = round(
                        milliseconds(graphed(lambda call=call: call), device, options.rep), 4
                    )
                except Exception as error:  # too much shared memory, for one
                    rows[str(trial)] = failure(error)
            print(
                direction, trial, rows[str(trial)], "as chosen" if trial is today else "", file=sys.stderr, flush=True
            )
        results[direction] = dict(sorted(rows.items(), key=lambda row: row[1].get("ms", float("inf"))))
        print(f"best {direction}:", *next(iter(results[direction].items())), flush=True)
    finish(options, results, (10, 90))


if __name__ == "__main__":
    main()
