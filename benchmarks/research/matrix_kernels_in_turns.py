# SPDX-License-Identifier: Apache-2.0
"""Times the matrix products and norms of two trees of this project in turns on one GPU, and compares each with a
reference.

    git archive 4182294 hip_ops | tar -x -C build/old
    python3 benchmarks/research/matrix_kernels_in_turns.py --old build/old            100 s on an H200
    python3 ... --old build/old --only RMSNorm                                        60 s
    HIP_OPS_CACHE=build/cuda-cache python3 ... --old build/old --hip       also the HIP kernels, built ahead for sm_90

Three processes are kept: the old tree, the new one, and the old one again. Each round times a case in all three, one
after the other. Printed are milliseconds, new / old (the mean of the two old ones, median over the rounds), the largest
ratio of the two old ones, each tree's error relative to the reference, and whether both have the same bits. "pointers"
is the kernel for GPUs without tensor descriptors, which is also what an MI300X compiles; "no fp32 product" acts as on a
device that cannot multiply bf16 into fp32.

A norm takes 0.1 ms, of which single calls say nothing. Its time is that of a graph of 50 calls, replayed for two seconds
before the first round, so that the clocks are those of work.

--hip checks the HIP products and Newton-Schulz's start of the new tree: their numbers alone. On NVIDIA their matrix
instructions are imitated, so times say nothing about an MI300X.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENS, HIDDEN, WIDTH, CLASSES, CHUNK = 16384, 2048, 4096, 262272, 2048
SHARES = (97, 33, 30, 84, 76, 55, 45, 38, 34, 61, 64, 122, 44, 76, 68, 73)  # of experts, as in grouped_product.py


def grouped(kind: str, pointers: bool) -> tuple[Callable, Callable]:
    import torch

    from hip_ops.ops.grouped_product import reference
    from hip_ops.ops.grouped_product import triton as kernels
    from hip_ops.ops.grouped_product.configs import ANY_NVIDIA

    config = ANY_NVIDIA if pointers else None
    shares = torch.tensor(SHARES, dtype=torch.float64)
    offsets = (TOKENS * shares.cumsum(0) / shares.sum()).round().int().cuda()
    random = lambda *shape: torch.randn(shape, device="cuda").bfloat16()  # noqa: E731
    if kind == "outer":
        a, b = random(TOKENS, WIDTH), random(TOKENS, HIDDEN)
        total = torch.zeros(len(SHARES), WIDTH, HIDDEN, device="cuda")

        def written() -> torch.Tensor:
            kernels.grouped_outer_(total.fill_(1.0), a, b, offsets, True, config)
            return total

        def exact() -> torch.Tensor:
            want = torch.ones_like(total)
            reference.grouped_outer_(want, a.float(), b.float(), offsets, True)
            return want

        return lambda: kernels.grouped_outer_(total, a, b, offsets, True, config), (written, exact)
    x = random(TOKENS, HIDDEN if kind == "rows_t" else WIDTH)
    matrices = random(len(SHARES), WIDTH, HIDDEN) / HIDDEN**0.5
    matrices = matrices.mT if kind == "rows_t" else matrices
    call = lambda: kernels.grouped_rows(x, matrices, offsets, config)  # noqa: E731
    return call, (call, lambda: reference.grouped_rows(x.float(), matrices.float(), offsets))


def head(fp32_product: bool) -> tuple[Callable, tuple]:
    import torch

    from hip_ops.runtime import main_grad

    if not fp32_product:
        main_grad.fp32_product = lambda device, dtype: None
    gradient = torch.randn(CHUNK, CLASSES, device="cuda").bfloat16()
    hidden, total = torch.randn(CHUNK, HIDDEN, device="cuda").bfloat16(), torch.zeros(CLASSES, HIDDEN, device="cuda")
    call = lambda: main_grad.add_product_(total, gradient, hidden)  # noqa: E731
    return call, (lambda: main_grad.add_product_(total.fill_(1.0), gradient, hidden),
                  lambda: 1.0 + gradient.float().t() @ hidden.float())  # fmt: skip


def newton_schulz() -> tuple[Callable, tuple]:
    import torch

    import hip_ops

    x = torch.randn(4, 1024, 2048, device="cuda").bfloat16()

    def call() -> torch.Tensor:
        with hip_ops.use_kernels(newton_schulz="triton"):
            return hip_ops.newton_schulz(x)

    return call, (call, lambda: hip_ops.newton_schulz(x.double()))


def norm(scaled: bool, backward: bool) -> tuple[Callable, tuple]:
    """RMSNorm in Triton, without dispatch. Its tensors are several times as large as L2."""
    import torch

    from hip_ops.ops.rms_norm import reference
    from hip_ops.ops.rms_norm import triton as kernels

    stream = torch.float32 if scaled else torch.bfloat16
    x, dy = (torch.randn(2 * TOKENS, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    residual, upstream = (torch.randn(2 * TOKENS, HIDDEN, device="cuda").to(stream) for _ in range(2))
    *merge, weight = (torch.randn(HIDDEN, device="cuda").bfloat16() for _ in range(5))
    vectors, name = (*(merge if scaled else [None] * 4), weight), "merge_norm"
    inputs = (x, residual, *vectors, None, 1e-5)
    _, new_residual, _, rstd = reference.merge_norm(*inputs)
    if backward:
        rows = (x, residual) if scaled else (None, new_residual)
        inputs, name = (dy, upstream, *rows, None, rstd, *vectors, torch.bfloat16), "merge_norm_backward"
    call = lambda: getattr(kernels, name)(*inputs)  # noqa: E731
    return call, (lambda: call()[0], lambda: getattr(reference, name)(*inputs)[0])


def graph_of(call: Callable) -> Callable:
    """Returns a function that replays 50 calls and returns the milliseconds of one; replays them for two seconds."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()

    def timed() -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        times = (before.elapsed_time(after) for before, after in zip(events, events[1:], strict=False))
        return statistics.median(times) / CALLS

    end = time.monotonic() + WARM_SECONDS
    while time.monotonic() < end:
        timed()
    return timed


CALLS, REPLAYS, WARM_SECONDS = 50, 20, 2.0
NORM = "RMSNorm"
CASES = {
    "grouped rows_t": lambda: grouped("rows_t", False),
    "grouped rows": lambda: grouped("rows", False),
    "grouped outer": lambda: grouped("outer", False),
    "grouped rows_t, pointers": lambda: grouped("rows_t", True),
    "grouped rows, pointers": lambda: grouped("rows", True),
    "grouped outer, pointers": lambda: grouped("outer", True),
    "newton_schulz, triton": newton_schulz,
    "head's weight gradient": lambda: head(True),
    "head's weight gradient, no fp32 product": lambda: head(False),
    **{
        f"{NORM}, {form}, {direction}": functools.partial(norm, form == "ZAYA's", direction == "backward")
        for form in ("plain", "ZAYA's")
        for direction in ("forward", "backward")
    },
}


def error_and_bits(result, exact) -> tuple[float, str]:
    got = result()
    digest = hashlib.sha256(got.flatten()[:: max(1, got.numel() // 2**20)].double().cpu().numpy().tobytes()).hexdigest()
    want = exact().to(got.device).to(got.float().dtype)
    return ((got.float() - want).norm() / want.norm()).item(), digest


def worker() -> None:
    """Answers each line of the input, a case, with the milliseconds; the first time with error and digest too."""
    import torch
    from triton.testing import do_bench

    torch.backends.cuda.matmul.allow_tf32 = False
    name, call, timed = None, None, None
    for line in sys.stdin:
        answer = {}
        try:
            if line.strip() != name:
                name, call = line.strip(), None
                torch.manual_seed(0)
                call, compared = CASES[name]()
                answer["error"], answer["bits"] = error_and_bits(*compared)
                del compared
                torch.cuda.empty_cache()
                timed = graph_of(call) if name.startswith(NORM) else None
            answer["ms"] = timed() if timed else do_bench(call, warmup=20, rep=100, return_mode="median")
        except Exception as error:  # reported as the case's result
            answer = {"failed": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(answer), flush=True)


def check_hip() -> None:
    """Prints the errors of the new tree's HIP products and start."""
    import torch

    from hip_ops.ops.newton_schulz import hip
    from hip_ops.ops.newton_schulz.reference import normalised

    for side in (64, 128, 256):
        a, b = (torch.randn(2, rows, 168, device="cuda").half() for rows in (side + 72, side + 8))
        turned = torch.empty(2, side + 8, side + 72, device="cuda").half()
        got = hip._general(a, b, None, 1.5, 0.0, transposed=turned, tile=side)
        gram = hip._symmetric(a, a, None, 1.5, 0.0, tile=side)
        errors = [
            ((x.double() - want).norm() / want.norm()).item()
            for x, want in ((got, 1.5 * a.double() @ b.double().mT), (gram, 1.5 * a.double() @ a.double().mT))
        ]
        exact = torch.equal(turned, got.mT) and torch.equal(gram, gram.mT)
        print(f"HIP, tile {side}: error {max(errors):.2e} (a rounding to fp16: 2e-4), mirrored exactly: {exact}")
    for shape in ((3, 136, 72), (2, 35, 71)):
        x = torch.randn(shape, device="cuda").bfloat16()
        start, turned = hip._start(x, None, 1e-7, 2.0**8, torch.float16)
        want = normalised(x, None, 1e-7, 2.0**8, torch.empty_like(start))
        print(f"HIP, start of {shape}: torch's bits: {torch.equal(start, want) and torch.equal(turned, want.mT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="folder that holds the old hip_ops")
    parser.add_argument("--only", default="", help="cases whose names contain this text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=180, help="no further case is begun after this time")
    parser.add_argument("--hip", action="store_true", help="check the HIP kernels of the new tree too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker()
    started, results = time.monotonic(), {}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            env={**os.environ, "PYTHONPATH": str(tree.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tree in (options.old, ROOT, options.old)
    ]
    for case in (each for each in CASES if options.only in each):
        if time.monotonic() - started > options.seconds:
            print(f"out of time before {case}")
            break
        rounds = []
        for _ in range(options.rounds + 1):  # the first one compiles
            answers = []
            for each in workers:
                each.stdin.write(case + "\n")
                each.stdin.flush()
                answers.append(json.loads(each.stdout.readline()))
            rounds.append(answers)
        failed = [answer["failed"] for answers in rounds for answer in answers if "failed" in answer]
        if failed:
            print(f"{case}: {failed[0]}", flush=True)
            continue
        (old, new, _), rest = rounds[0], rounds[1:]
        ratio = statistics.median(2 * b["ms"] / (a["ms"] + c["ms"]) for a, b, c in rest)
        spread = max(max(a["ms"] / c["ms"], c["ms"] / a["ms"]) for a, _, c in rest)
        results[case] = {
            "old_ms": round(statistics.median(a["ms"] for a, _, _ in rest), 4),
            "new_ms": round(statistics.median(b["ms"] for _, b, _ in rest), 4),
            "new_over_old": round(ratio, 4),
            "old_over_old_at_most": round(spread, 4),
            "error_old": old["error"],
            "error_new": new["error"],
            "same_bits": old["bits"] == new["bits"],
        }
        print(f"{case:42}", "  ".join(f"{key} {value:.4g}" for key, value in results[case].items()), flush=True)
    for each in workers:
        each.stdin.close()
        each.wait()
    if options.hip:
        sys.path.insert(0, str(ROOT))
        check_hip()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
