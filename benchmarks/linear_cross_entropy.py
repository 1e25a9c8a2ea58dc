# SPDX-License-Identifier: Apache-2.0
"""Measure the tied head with its cross-entropy, forward and backward: time and peak memory, compared with
torch.compile, Apple's CCE and Liger.

    python3 benchmarks/linear_cross_entropy.py                 8192 tokens x 2048 x 262,272 classes, bf16
    python3 benchmarks/linear_cross_entropy.py --sweep         launches of the two Triton kernels on one chunk

`hip_ops` adds the weight's gradient to an fp32 main gradient, as in training; the others compute a bf16 gradient, and
would need another pass of 4 GB to add it. `promised` computes the gradients in the forward pass, `recomputed` computes
the logits twice. `parts` are the products and kernels of one chunk, and their sum over all chunks. Medians of triton's
do_bench; `extra_gib` is the peak memory of one call beyond its inputs. `error`: of the gradient of hidden against fp64,
for the first tokens, relative to its norm, and the largest in ULP of bf16 at the size of its terms. The anchors are
measured where they can be imported (cut_cross_entropy, liger_kernel). Prints a table and one line of JSON, which it
writes to benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from call_timing import milliseconds
from operator_benchmark import MI300X_BYTES_PER_S, add_options, begin, failure, finish
from torch import Tensor

import hip_ops
from hip_ops import use_kernels
from hip_ops.ops.dense_product import dense_product_
from hip_ops.ops.linear_cross_entropy import reference
from hip_ops.ops.linear_cross_entropy.passes import (
    finish_gradient,
    overwrite_with_exponentials,
    overwrite_with_gradient,
    parts_for,
    row_statistics,
)
from hip_ops.saved_bytes import chunk_for, parts_of_exponentials

BF16 = torch.bfloat16
MI300X_FLOPS_PER_S = 600e12  # of large products, as in recipes/cluster/mi300x_8.yaml; for predictions
EXACT_TOKENS = 128


class Inputs:
    """Logits of about unit size; every other token has a label with a probability near 1; a tenth of the tokens is
    masked.
    """

    def __init__(self, tokens: int, h: int, classes: int, device: torch.device):
        self.hidden = torch.randn(tokens, h, device=device).to(BF16).requires_grad_()
        self.weight = (torch.randn(classes, h, device=device) / h**0.5).to(BF16).requires_grad_()
        self.labels = torch.randint(classes, (tokens,), device=device)
        with torch.no_grad():
            self.hidden[::2] += 14 * self.weight[self.labels[::2]]
        self.mask = (torch.rand(tokens, device=device) < 0.9).float()
        self.main_grad = torch.zeros(classes, h, device=device)


def fused(i: Inputs, *, promise: bool) -> tuple[Tensor, ...]:
    losses = hip_ops.linear_cross_entropy(
        i.hidden, i.weight, i.labels, promised_grad=i.mask if promise else None, main_grad=i.main_grad
    )
    return torch.autograd.grad(losses, i.hidden, i.mask)


def by_autograd(losses: Callable) -> Callable[[Inputs], tuple[Tensor, ...]]:
    return lambda i: torch.autograd.grad(losses(i.hidden, i.weight, i.labels), (i.hidden, i.weight), i.mask)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none")


def cut_cross_entropy() -> Callable:
    from cut_cross_entropy import linear_cross_entropy

    # without the filter of small gradients, for exact results
    return by_autograd(lambda h, w, y: linear_cross_entropy(h, w, y, reduction="none", filter_eps=None))


def liger() -> Callable:
    """Return a function that computes the gradients of the sum of all losses; Liger takes no mask."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda i: torch.autograd.grad(
        liger_fused_linear_cross_entropy(i.hidden, i.weight, i.labels, reduction="sum"), (i.hidden, i.weight)
    )


def error_of(d_hidden: Tensor, i: Inputs) -> dict:
    """Return the errors of the first tokens against fp64 from exact logits."""
    x, w, first = i.hidden.detach()[:EXACT_TOKENS].double(), i.weight.detach().double(), slice(0, EXACT_TOKENS)
    p = (x @ w.t()).softmax(-1)
    p.scatter_add_(1, i.labels[first, None], -torch.ones_like(x[:, :1]))
    p *= i.mask[first, None]
    want, terms = p @ w, p.abs() @ w.abs()
    error = d_hidden[:EXACT_TOKENS].double() - want
    return {
        "relative": float(f"{(error.norm() / want.norm()).item():.3g}"),
        "max_ulp": round((error.abs() / (terms + 1e-30) * 2**8).max().item(), 2),
    }


def peak_gib(call: Callable, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)


def entry(make: Callable[[], Callable], i: Inputs, device: torch.device, options, *, exact: bool = True) -> dict:
    """Return time, memory and error of one implementation; one that fails has its error message."""
    try:
        run = make()
        d_hidden = run(i)[0]
        found = {
            "ms": round(milliseconds(lambda: run(i), device, options.rep), 3),
            "extra_gib": peak_gib(lambda: run(i), device),
        }
        if exact:
            found["error"] = error_of(d_hidden, i)
        found["tflops"] = round(6 * i.hidden.numel() * len(i.weight) / found["ms"] / 1e9, 1)
        return found
    except Exception as error:  # an anchor that is not installed or does not run becomes a row of the table
        return failure(error)
    finally:
        i.main_grad.zero_()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def parts(i: Inputs, device: torch.device, options) -> dict:
    """Measure the products and kernels of one chunk alone."""
    tokens, classes = len(i.hidden), len(i.weight)
    chunk = options.chunk or chunk_for(tokens, classes, 2)
    x, w, y, mask = i.hidden.detach()[:chunk], i.weight.detach(), i.labels[:chunk], i.mask[:chunk]
    buffer, d_hidden, product = (
        x.new_empty(chunk, classes),
        torch.empty_like(x),
        torch.empty_like(x, dtype=torch.float32),
    )
    dense_product_(buffer, x, w.t())
    number = parts_for(buffer)
    normalizer, _ = reference.combined(row_statistics(buffer, y, 0, number))
    exponential_parts = parts_of_exponentials(classes)
    statistics = overwrite_with_exponentials(buffer, y, 0, exponential_parts)
    factors = torch.rand(chunk, 1, device=device)
    promised = {
        "logits": lambda: dense_product_(buffer, x, w.t()),
        "exponentials": lambda: overwrite_with_exponentials(buffer, y, 0, exponential_parts),
        "finish": lambda: finish_gradient(buffer, y, 0, statistics, 0, exponential_parts, mask, 0.0),
        "gradient of hidden": lambda: torch.mul(dense_product_(product, buffer, w), factors, out=d_hidden),
        "scaled hidden": lambda: torch.mul(x, factors, out=d_hidden),
        "main gradient +=": lambda: dense_product_(i.main_grad, buffer.t(), x, accumulate=True),
    }
    recomputed = {
        "statistics": lambda: row_statistics(buffer, y, 0, number),
        "combined": lambda: reference.losses(*reference.combined(torch.zeros(number, 3, chunk, device=device)), 0.0),
        "gradient": lambda: overwrite_with_gradient(buffer, y, 0, normalizer, mask, 0.0),
    }
    found, moved = {}, {"statistics": buffer.nbytes, "gradient": 2 * buffer.nbytes, "exponentials": 2 * buffer.nbytes}
    for name, call in (promised | recomputed).items():
        if name == "gradient of hidden":  # operands as in training: the previous kernels have run on their own output
            dense_product_(buffer, x, w.t())
            finish_gradient(
                buffer,
                y,
                0,
                overwrite_with_exponentials(buffer, y, 0, exponential_parts),
                0,
                exponential_parts,
                mask,
                0.0,
            )
        ms = milliseconds(call, device, options.rep)
        found[name] = {"ms": round(ms, 4)} | (
            {"of_copy": round(moved[name] / ms * 1e3 / options.copy, 3)} if name in moved else {}
        )
    i.main_grad.zero_()
    total = sum(found[name]["ms"] for name in promised) * tokens / chunk
    return found | {f"promised, sum over chunks of {chunk}": {"ms": round(total, 3)}}


def prediction(i: Inputs, chunk: int) -> dict:
    """Predict the time on an MI300X, from products at 600 TFLOP/s and bytes at 4.33 TB/s; not measured."""
    flops = 6 * i.hidden.numel() * len(i.weight)
    passes = 2 * 2 * len(i.hidden) * len(i.weight)
    return {
        "ms": round(1e3 * (flops / MI300X_FLOPS_PER_S + passes / MI300X_BYTES_PER_S), 2),
        "chunk": chunk,
        "note": "prediction",
    }


def embedding(i: Inputs, device: torch.device, options) -> dict:
    """Measure the addition of the embedding's rows to the main gradient: as the model does it, by index_put_, and
    through a dense bf16 gradient.
    """
    total, h = i.main_grad, i.hidden.shape[1]
    rows, found = torch.randn(2 * len(i.hidden), h, device=device).to(BF16), {}
    every = torch.randint(len(i.weight), (len(rows),), device=device)
    half = torch.where(torch.rand(len(rows), device=device) < 0.5, 0, every)

    def dense(ids: Tensor) -> None:
        total.add_(torch.ops.aten.embedding_dense_backward(rows, ids, len(total), -1, False))

    for ids, name in ((every, "random ids"), (half, "half of one id")):
        ways = {
            "as the model": lambda ids=ids: hip_ops.add_rows_(total, ids, rows),
            "dense": lambda ids=ids: dense(ids),
            "index_put_": lambda ids=ids: total.index_put_((ids,), rows.float(), accumulate=True),
        }
        found |= {
            f"{name}, {way}": {"ms": round(milliseconds(call, device, options.rep), 4)} for way, call in ways.items()
        }
    total.zero_()
    return found


def measure(i: Inputs, device: torch.device, options) -> dict:
    found: dict = {"hip_ops": {}, "anchors": {}}
    for name in options.versions:
        with use_kernels(name):
            for promise in (True, False):
                title = f"{name}, {'promised' if promise else 'recomputed'}"
                found["hip_ops"][title] = entry(
                    lambda promise=promise: lambda i: fused(i, promise=promise), i, device, options
                )
            found[f"parts, {name}"] = parts(i, device, options)
    found["hip_ops"]["MI300X"] = prediction(i, chunk_for(len(i.hidden), len(i.weight), 2))
    found["embedding, twice the tokens"] = embedding(i, device, options)
    if options.anchors:
        found["anchors"]["torch.compile"] = entry(
            lambda: by_autograd(torch.compile(plain, dynamic=False)), i, device, options
        )
        found["anchors"]["cut_cross_entropy"] = entry(cut_cross_entropy, i, device, options)
        found["anchors"]["liger"] = entry(liger, i, device, options, exact=False)
    return found


def sweep_exponentials(logits: Tensor, labels: Tensor, device: torch.device, options) -> dict:
    """Measure the kernel of exponentials with other part sizes than the operator's."""
    from hip_ops.ops.linear_cross_entropy import triton as kernels

    found = {}
    for block, warps in itertools.product((1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16)):
        if not 8 <= block // (32 * warps) <= 128:
            continue
        with mock.patch.object(kernels, "tile", lambda *_, block=block, warps=warps: (block, warps)):
            number = -(-logits.shape[1] // block)
            ms = milliseconds(
                lambda number=number: kernels.overwrite_with_exponentials(logits, labels, 0, number),
                device,
                options.rep,
            )
        found[f"block {block}, {warps} warps, parts {number}"] = {
            "ms": round(ms, 4),
            "of_copy": round(2 * logits.nbytes / ms * 1e3 / options.copy, 3),
        }
        logits.normal_()
    return found


def sweep(i: Inputs, device: torch.device, options) -> dict:
    """Measure both Triton kernels on one chunk, best first."""
    from hip_ops.ops.linear_cross_entropy import triton as kernels

    chunk, classes = options.chunk or chunk_for(len(i.hidden), len(i.weight), 2), len(i.weight)
    logits, y, mask = torch.randn(chunk, classes, device=device, dtype=BF16), i.labels[:chunk], i.mask[:chunk]
    normalizer, _ = reference.combined(kernels.row_statistics(logits, y, 0, 1))
    results: dict = {"statistics": {}, "gradient": {}, "exponentials": sweep_exponentials(logits, y, device, options)}
    for kind, lanes, warps, number in itertools.product(
        ("statistics", "gradient"), (128, 256, 512, 1024), (4, 8, 16), (1, 2, 4, 8, 16)
    ):
        if not 1 <= lanes // (32 * warps) <= 4:
            continue
        launch = kernels.StepTile(lanes, 8, warps)
        with (
            mock.patch.object(kernels, "launch", lambda *_, launch=launch: launch),
            mock.patch.object(kernels, "parts_of_gradient", lambda _, number=number: number),
        ):
            run = {
                "statistics": lambda number=number: kernels.row_statistics(logits, y, 0, number),
                "gradient": lambda: kernels.overwrite_with_gradient(logits, y, 0, normalizer, mask, 0.0),
            }[kind]
            try:
                ms = milliseconds(run, device, options.rep)
            except Exception as error:
                results[kind][str((launch, number))] = failure(error)
                continue
        moved = logits.nbytes * (1 if kind == "statistics" else 2)
        results[kind][f"{launch}, parts {number}"] = {
            "ms": round(ms, 4),
            "of_copy": round(moved / ms * 1e3 / options.copy, 3),
        }
        if kind == "gradient":
            logits.normal_()
    return {
        kind: dict(sorted(times.items(), key=lambda item: item[1].get("ms", 1e9))) for kind, times in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=8192 if on_gpu else 64)
    parser.add_argument("--hidden", type=int, default=2048 if on_gpu else 64)
    parser.add_argument("--classes", type=int, default=262272 if on_gpu else 1000)
    parser.add_argument("--chunk", type=int, help="tokens of a chunk, for the parts and --sweep")
    parser.add_argument(
        "--versions",
        nargs="+",
        default=["triton"] if on_gpu else ["reference"],
        help="versions of the operator: hip, triton, compiled, reference",
    )
    parser.add_argument("--no-anchors", dest="anchors", action="store_false")
    add_options(parser, "linear_cross_entropy")
    options = parser.parse_args()
    device = begin(options)
    inputs = Inputs(options.tokens, options.hidden, options.classes, device)
    title = f"{options.tokens}x{options.hidden}x{options.classes}"
    finish(options, {title: (sweep if options.sweep else measure)(inputs, device, options)}, (24, 28, 34))


if __name__ == "__main__":
    main()
