# SPDX-License-Identifier: Apache-2.0
"""Compare context parallelism at 32,768 tokens with data parallelism at 4,096: the same model, ranks and tokens per
step, by `zaya train`.

    python3 benchmarks/long_context.py --data data/corpus --layers 16        # two GPUs of one host

Each run is a real training run of ZAYA1-base's width (vocabulary padded to 262,272) with a trace of two steps on rank
0. Printed and written: tokens and model TFLOP per second and GPU (medians), memory, and the time of communication in
the traced steps, in all and alone (with no other kernel at that time), by collective and message size; the boundary
exchange is the smallest all-gather and reduce-scatter of the context-parallel run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from result_record import RESULTS, described, device_name, write

SKIPPED_STEPS = 4  # compilation and warm clocks


def train(options, name: str, *overrides: str) -> Path:
    run_dir = options.work / name
    command = [
        sys.executable,
        "-m",
        "zaya_plugin.cli",
        "train",
        "experiment=zaya1_base",
        f"cluster={options.cluster}",
        f"nproc={options.ranks}",
        f"optim={options.optim}",
        f"data.path={options.data}",
        f"run_dir={run_dir}",
        f"model.num_layers={options.layers}",
        "model.make_vocab_size_divisible_by=262272",
        f"stage.train_iters={options.steps}",
        "stage.eval_iters=0",
        "optim.lr_warmup_iters=2",
        "checkpoint.save_interval=null",
        "checkpoint.keep_last=0",
        "logger.wandb=false",
        "logger.tensorboard=false",
        "profile.enabled=true",
        f"profile.step_start={options.steps - 2}",
        f"profile.step_end={options.steps}",
        *overrides,
        *options.overrides,
    ]
    print(shlex.join(command[2:]), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-5000:])
    return run_dir


def covered(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the disjoint union of the intervals, ascending."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def communication(trace: Path) -> dict:
    """Return the milliseconds of the traced window by kind of kernel, from a torch.profiler trace."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in kernels]
    messages: dict[str, list[float]] = defaultdict(list)
    nccl, rest = [], []
    for event, span in zip(kernels, spans, strict=True):
        if "nccl" in event["name"].lower():
            nccl.append(span)
            args = event.get("args", {})
            messages[
                f"{args.get('Collective name', event['name'][:40])} of {args.get('In msg nelems', '?')} elements"
            ].append(event["dur"] / 1e3)
        else:
            rest.append(span)
    window = max(end for _, end in spans) - min(start for start, _ in spans)
    busy, compute, talk = length(covered(spans)), length(covered(rest)), length(covered(nccl))
    sizes = {
        name: {"count": len(times), "ms": round(sum(times), 3)}
        for name, times in sorted(messages.items(), key=lambda item: -sum(item[1]))
    }
    return {
        "window_ms": round(window / 1e3, 2),
        "idle_share": round(1 - busy / window, 4),
        "communication_share": round(talk / window, 4),
        "exposed_communication_share": round((busy - compute) / window, 4),
        "messages": sizes,
    }


def figures(run_dir: Path, ranks: int) -> dict:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "loss" in r]
    timed = rows[SKIPPED_STEPS:-2]  # the last two are traced
    found = {
        "tokens_per_s_and_gpu": round(statistics.median(r["tokens_per_s"] for r in timed) / ranks, 1),
        "tflops_per_gpu": round(statistics.median(r["tflops_per_device"] for r in timed), 1),
        "memory_gib": round(max(r["memory_gib"] for r in rows), 1),
        "losses": [round(r["loss"], 4) for r in rows],
    }
    traces = sorted(run_dir.rglob("rank-0*.json.gz"))
    return found | ({"trace": communication(traces[-1])} if traces else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cluster", default="h200_8")
    parser.add_argument("--optim", default="muon")
    parser.add_argument("--order", default="zigzag", choices=("zigzag", "contiguous"))
    parser.add_argument("--long", type=int, default=32768)
    parser.add_argument("--short", type=int, default=4096)
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--work", type=Path, default=Path("runs/long_context"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--name", default="long_context")
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    options = parser.parse_args()
    micro = options.long // options.short // options.ranks
    common = ("stage.rotary_base=1000000",)
    runs = {
        "data_parallel": train(
            options,
            "data_parallel",
            f"stage.seq_length={options.short}",
            f"stage.micro_batch_size={micro}",
            f"stage.global_batch_size={micro * options.ranks}",
            *common,
        ),
        "context_parallel": train(
            options,
            "context_parallel",
            f"stage.seq_length={options.long}",
            "stage.micro_batch_size=1",
            "stage.global_batch_size=1",
            f"parallel.context_parallel_size={options.ranks}",
            f"parallel.context_parallel_order={options.order}",
            *common,
        ),
    }
    results = {name: figures(run_dir, options.ranks) for name, run_dir in runs.items()}
    ratio = results["context_parallel"]["tflops_per_gpu"] / results["data_parallel"]["tflops_per_gpu"]
    record = {
        **described(options.commit, f"{options.ranks} x {device_name()}"),
        "tokens_a_step": options.long,
        "rate_at_long_over_short_by_model_flops": round(ratio, 4),
        "results": results,
    }
    write(record, options.name, options.results)


if __name__ == "__main__":
    main()
