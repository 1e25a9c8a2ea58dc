# SPDX-License-Identifier: Apache-2.0
"""Measure Muon's optimizer step over the matrices of one data-parallel rank of ZAYA1-base, and those of
torch.optim.Muon and torch foreach.

    python3 benchmarks/muon_step.py
    python3 benchmarks/muon_step.py --versions triton hip        both versions of the kernels

The matrices of all 40 layers are distributed over 8 ranks by greedy balance of Newton-Schulz cost; rank 0's share is
1.04 billion parameters. Measured on it, as medians of triton's do_bench on new random inputs: the copy bandwidth of the
device; our momentum and weight update against torch foreach, as rates of the bytes that must move; and the whole step
(momentum, Newton-Schulz, update) against torch.optim.Muon. Prints a table and one line of JSON and writes it to
benchmarks/results/<name>.json. --sweep tries sizes of chunk and grid for the two kernels instead.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import math
import sys
from pathlib import Path
from unittest import mock

import torch
from call_timing import copy_bandwidth, milliseconds
from operator_benchmark import MI300X_BYTES_PER_S
from result_record import RESULTS, described, file_part, write

import hip_ops
from hip_ops import use_kernels
from hip_ops.ops.muon import MatrixBatches, multi_tensor

LAYERS, RANKS = 40, 8
# (rows, columns) and how many of them a layer of ZAYA1-base has: experts' gate+up and down, output, query, key, two
# values, router's down-projection, its two hidden layers and its output.
MATRICES = (
    ((4096, 2048), 16),
    ((2048, 2048), 16),
    ((2048, 1024), 1),
    ((1024, 2048), 1),
    ((256, 2048), 1),
    ((128, 2048), 2),
    ((256, 2048), 1),
    ((256, 256), 2),
    ((17, 256), 1),
)
LR, WEIGHT_DECAY, MOMENTUM = 2e-4, 0.1, 0.95


def newton_schulz_flop(shape: tuple[int, int], steps: int = 5) -> int:
    """Return the operations of dense products; a multiply-add counts as two."""
    n, m = sorted(shape)
    return steps * (4 * n * n * m + 2 * n**3)


def share(rank: int = 0, layers: int = LAYERS) -> list[tuple[int, int]]:
    """Return the shapes of one rank: the costliest remaining matrix always goes to the rank with the least cost so
    far.
    """
    shapes = sorted((s for s, count in MATRICES for _ in range(count * layers)), key=newton_schulz_flop, reverse=True)
    ranks: list[tuple[int, int, list]] = [(0, i, []) for i in range(RANKS)]
    for shape in shapes:
        cost, i, mine = ranks[0]
        mine.append(shape)
        heapq.heapreplace(ranks, (cost + newton_schulz_flop(shape), i, mine))
    return next(mine for _, i, mine in ranks if i == rank)


def randoms(shapes, dtype: torch.dtype, device: torch.device, size: float) -> list[torch.Tensor]:
    return [(torch.randn(s, device=device) * size).to(dtype) for s in shapes]


class State:
    """The tensors of one rank. `lean`: all bf16, as torch.optim.Muon on a bf16 model; otherwise gradients, momentum
    and master weights are fp32, with bf16 parameters.
    """

    def __init__(self, shapes, device: torch.device, lean: bool):
        wide = torch.bfloat16 if lean else torch.float32
        self.batches = MatrixBatches(shapes, device)
        self.gradients = randoms(shapes, wide, device, 1e-3)
        self.momenta = randoms(shapes, wide, device, 1e-3)
        self.masters = None if lean else randoms(shapes, torch.float32, device, 0.02)
        self.params = randoms(shapes, torch.bfloat16, device, 0.02)
        self.updates = randoms(shapes, torch.bfloat16, device, 0.02)
        self.elements = sum(p.numel() for p in self.params)
        self.momentum_bytes = self.elements * (3 * wide.itemsize + 2)
        self.update_bytes = self.elements * (2 + (2 * 2 if lean else 2 * 4 + 2))

    def momentum(self) -> None:
        hip_ops.muon_momentum_(
            self.gradients, self.momenta, self.batches.slots, momentum=MOMENTUM, square_sums=self.batches.square_sums
        )

    def update(self, updates=None) -> None:
        hip_ops.muon_update_(updates or self.updates, self.masters, self.params, lr=LR, weight_decay=WEIGHT_DECAY)

    def newton_schulz(self) -> list[torch.Tensor]:
        return self.batches.split(
            [
                hip_ops.newton_schulz(x, square_sums=s)
                for x, s in zip(self.batches.tensors, self.batches.sums(), strict=True)
            ]
        )

    def step(self) -> None:
        self.momentum()
        self.update(self.newton_schulz())

    def foreach_momentum(self) -> None:
        torch._foreach_lerp_(self.momenta, self.gradients, 1 - MOMENTUM)
        torch._foreach_copy_(self.batches.slots, torch._foreach_lerp(self.gradients, self.momenta, MOMENTUM))

    def foreach_update(self) -> None:
        weights = self.params if self.masters is None else self.masters
        torch._foreach_mul_(weights, 1 - LR * WEIGHT_DECAY)
        for places, batch in zip(self.batches.places, self.batches.tensors, strict=True):  # one scale a shape
            alpha = -LR * 0.2 * math.sqrt(max(batch.shape[1:]))
            torch._foreach_add_([weights[i] for i in places], [self.updates[i] for i in places], alpha=alpha)
        if self.masters is not None:
            torch._foreach_copy_(self.params, self.masters)


def torch_muon(shapes, device: torch.device):
    """Return a step of torch.optim.Muon in bf16 with the same settings."""
    params = [torch.nn.Parameter(p) for p in randoms(shapes, torch.bfloat16, device, 0.02)]
    for p, gradient in zip(params, randoms(shapes, torch.bfloat16, device, 1e-3), strict=True):
        p.grad = gradient
    optimizer = torch.optim.Muon(
        params, lr=LR, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    return optimizer.step


def figures(ms: float, moved: int | None = None, copy: float | None = None) -> dict:
    found = {"ms": round(ms, 4)}
    if moved is not None:
        rate = moved / ms * 1e3
        found |= {
            "gb_per_s": round(rate / 1e9, 1),
            "of_copy": round(rate / copy, 4),
            "mi300x_prediction_ms": round(1e3 * moved / MI300X_BYTES_PER_S, 3),
        }
    return found


def measure(options, device: torch.device, shapes) -> dict:
    copy = copy_bandwidth(device)
    results: dict = {"copy_gb_per_s": round(copy / 1e9, 1)}
    for lean in (False, True):
        kind = results["bf16 state" if lean else "fp32 state"] = {}
        state = State(shapes, device, lean)
        work = {"momentum": (state.momentum, state.momentum_bytes), "update": (state.update, state.update_bytes)}
        for name in options.versions:
            with use_kernels(name):
                for part, (call, moved) in work.items():
                    kind[f"{part}, {name}"] = figures(milliseconds(call, device, options.rep), moved, copy)
        kind["momentum, torch foreach"] = figures(
            milliseconds(state.foreach_momentum, device, options.rep), state.momentum_bytes, copy
        )
        kind["update, torch foreach"] = figures(
            milliseconds(state.foreach_update, device, options.rep), state.update_bytes, copy
        )
        for name in options.versions[:1]:
            with use_kernels(name):
                kind[f"newton_schulz, {name}"] = figures(milliseconds(state.newton_schulz, device, 2 * options.rep))
                kind[f"whole step, {name}"] = figures(milliseconds(state.step, device, 2 * options.rep))
        del state, work
    step = torch_muon(shapes, device)
    results["bf16 state"]["whole step, torch.optim.Muon"] = figures(milliseconds(step, device, 2 * options.rep))
    theirs, name = results["bf16 state"]["whole step, torch.optim.Muon"]["ms"], options.versions[0]
    results["torch.optim.Muon / ours"] = {
        kind: round(theirs / results[kind][f"whole step, {name}"]["ms"], 3) for kind in ("bf16 state", "fp32 state")
    }
    return results


def sweep(options, device: torch.device, shapes) -> dict:
    """Measure both kernels at several sizes of chunk and grid and, for Triton, with several numbers of elements per
    thread.
    """
    copy, state, found = copy_bandwidth(device), State(shapes, device, lean=False), {}
    for name, chunk, blocks, tile in itertools.product(
        options.versions, (8192, 16384, 32768, 65536), (4, 16, 1024), (8, 16, 32)
    ):
        if tile != 16 and name != "triton":
            continue
        tiles = (
            mock.patch("hip_ops.ops.muon.triton.TILE_ELEMENTS", tile) if name == "triton" else contextlib.nullcontext()
        )
        with (
            mock.patch.multiple(multi_tensor, CHUNK_ELEMENTS=chunk, BLOCKS_PER_PROCESSOR=blocks),
            tiles,
            use_kernels(name),
        ):
            found[f"{name}, chunk {chunk}, {blocks} blocks a processor, {tile} elements a thread"] = {
                "momentum": figures(milliseconds(state.momentum, device, options.rep // 3), state.momentum_bytes, copy),
                "update": figures(milliseconds(state.update, device, options.rep // 3), state.update_bytes, copy),
            }
    return found


def table(results: dict) -> str:
    lines = []
    for kind, rows in results.items():
        if not isinstance(rows, dict):
            lines.append(f"{kind}: {rows}")
            continue
        for name, row in rows.items():
            cells = row if isinstance(row, dict) else {"": row}
            lines.append(f"{kind:26} {name:34} " + "  ".join(f"{key} {value}" for key, value in cells.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu only tries this script")
    parser.add_argument(
        "--versions",
        nargs="+",
        default=["triton"],
        help="versions of the operators; the first one also runs the whole step",
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide both extents of every matrix by this number, to try this script"
    )
    parser.add_argument("--rep", type=int, default=500, help="milliseconds per figure")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--name", default=None, help="name of the results file")
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = [tuple(max(1, extent // options.shrink) for extent in shape) for shape in share(layers=options.layers)]
    scope = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with scope:
        results = (sweep if options.sweep else measure)(options, device, shapes)
    record = {
        **described(options.commit, None if device.type == "cuda" else "CPU"),
        "matrices": len(shapes),
        "parameters": sum(math.prod(s) for s in shapes),
        "results": results,
    }
    print(table(results), file=sys.stderr)
    sweeping = "-sweep" if options.sweep else ""
    write(record, options.name or f"muon_step{sweeping}-{file_part(record['device'])}", options.results)


if __name__ == "__main__":
    main()
