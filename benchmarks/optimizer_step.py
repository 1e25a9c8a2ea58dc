# SPDX-License-Identifier: Apache-2.0
"""Measure the optimizer step of all of ZAYA1-base on one GPU, as in training: zaya_plugin.optim.muon.MuonAdamW over
8.84 B parameters.

    python3 benchmarks/optimizer_step.py                    # an H200: needs about 130 GB

Gradients, master weights and momentum are fp32, the parameters bf16; the experts of a layer are one flat parameter, as
in Megatron's buffers. Muon takes every matrix, AdamW the embedding. Medians of whole steps, and of their parts by
events around them (with the host ahead of the device). Prints one line of JSON and writes it to
benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from unittest import mock

import torch
from muon_step import LAYERS, MATRICES, newton_schulz_flop
from result_record import RESULTS, described, file_part, write

from zaya_plugin.optim import muon as module
from zaya_plugin.optim.muon import MuonAdamW, MuonSettings, StepContext
from zaya_plugin.optim.parameter_role import ParameterRole

EMBEDDING = (262272, 2048)


def parameters(device: torch.device, layers: int, shrink: int) -> list[torch.Tensor]:
    """Return fp32 masters with gradients, tagged as zaya_plugin.optim tags the flat shards of Megatron's distributed
    optimizer.
    """
    found = []
    for _ in range(layers):
        for (m, n), count in MATRICES:
            shape = (count, m // shrink or 1, n // shrink or 1)
            flat = torch.nn.Parameter(torch.randn(math.prod(shape), device=device).mul_(0.02))
            flat.zaya_role = ParameterRole(matrices=shape)
            found.append(flat)
    found.append(torch.nn.Parameter(torch.randn(math.prod(EMBEDDING) // shrink**2, device=device).mul_(0.02)))
    for p in found:
        p.grad = torch.randn(p.shape, device=device).mul_(1e-3)
    return found


class Parts:
    """Measures the milliseconds of functions of `module` between events; one list per name."""

    def __init__(self):
        self.events: dict[str, list] = {}

    def around(self, name: str, function):
        def timed(*arguments, **keywords):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = function(*arguments, **keywords)
            end.record()
            self.events.setdefault(name, []).append((start, end))
            return result

        return timed

    def total(self) -> dict[str, float]:
        torch.cuda.synchronize()
        return {name: round(sum(a.elapsed_time(b) for a, b in pairs), 2) for name, pairs in self.events.items()}


def measure(params: list[torch.Tensor], settings: MuonSettings, steps: int) -> dict:
    optimizer = MuonAdamW(params, settings, lr=2e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    targets = {p: torch.empty_like(p, dtype=torch.bfloat16) for p in params if p is not params[-1]}
    times, (start, end) = [], (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(steps + 2):  # compiles, self-checks, captures graphs
        optimizer.begin_step(StepContext(targets=targets))
        start.record()
        optimizer.step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    parts = Parts()
    optimizer.begin_step(StepContext(targets=targets))
    with mock.patch.multiple(
        module,
        muon_momentum_=parts.around("momentum", module.muon_momentum_),
        muon_update_=parts.around("update", module.muon_update_),
        newton_schulz=parts.around("newton_schulz", module.newton_schulz),
    ):
        optimizer.step()
    return {
        "ms": round(statistics.median(times[2:]), 2),
        "all_ms": [round(t, 2) for t in times[2:]],
        "parts_ms": parts.total(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide both extents of every matrix by this number, to try this script"
    )
    parser.add_argument("--dtypes", nargs="+", default=["fp16", "bf16"], help="of Newton-Schulz")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--name", default=None, help="name of the results file")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    params = parameters(device, options.layers, options.shrink)
    results = {dtype: measure(params, MuonSettings(dtype=dtype), options.steps) for dtype in options.dtypes}
    flop = options.layers * sum(count * newton_schulz_flop(shape) for shape, count in MATRICES)
    record = {
        **described(options.commit),
        "parameters": sum(p.numel() for p in params),
        "dense_newton_schulz_tflop": round(flop / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "results": results,
    }
    write(record, options.name or f"optimizer_step-{file_part(record['device'])}", options.results)


if __name__ == "__main__":
    main()
