# SPDX-License-Identifier: Apache-2.0
"""Measure the steps of ZAYA1-base that have a goal in this project, one after the other on the devices of one node, and
print them with the goals.

    python3 benchmarks/step_table.py --devices 8 --dry-run                                   the commands
    python3 benchmarks/step_table.py --devices 8 cluster.core_attention=flash_attn_4 parallel.nccl_ub=true
                                                                                             fifteen minutes

Each row is a `zaya bench step` with random tokens, micro-batches of 4 x 4096 tokens (the last of 1 x 32,768) and the
overrides given on the command line. A row whose step.json is already in --work is not run again, so that a stopped
table can be continued. Goals are those for eight H200s, for any number of devices; memory is the memory that the
allocator has reserved, including that of graphs. Prints the table, writes <name>.json, and returns 1 if a row failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from result_record import commit_of, described, write

MEMORY = (
    "parallel.recompute_granularity=selective",
    "parallel.recompute_modules=[permute]",
    "optim.muon_momentum_dtype=bf16",
)
COMPARISON = Path(__file__).with_name("step_vs_transformers.py")
BETWEEN_DEVICES = ("parallel.nccl_ub",)  # left out of a row on one device


@dataclass(frozen=True)
class Row:
    """title; sequences per device and step; words: further overrides and options. alone: on one device. experiment
    and micro: recipe and sequences of a micro-batch.
    """

    title: str
    sequences: int
    words: tuple[str, ...]
    alone: bool = False
    experiment: str = "zaya1_base"
    micro: int = 4
    replicas: int = 1  # devices that share a sequence
    compared: bool = False  # with transformers, by step_vs_transformers.py

    def command(self, devices: int, output: Path, commit: str, overrides: Sequence[str]) -> list[str]:
        """Return the command of this row for a number of devices."""
        count = 1 if self.alone else devices
        kept = [word for word in overrides if not (self.alone and word.split("=")[0] in BETWEEN_DEVICES)]
        return [
            sys.executable,
            "-m",
            "zaya_plugin.cli",
            "bench",
            "step",
            f"experiment={self.experiment}",
            "cluster=h200_8",
            f"nproc={count}",
            f"cluster.gpus_per_node={count}",
            "cluster.numa_nodes=[]",
            "logger=none",
            f"stage.micro_batch_size={self.micro}",
            f"stage.global_batch_size={self.sequences * count // self.replicas}",
            *self.words,
            *kept,
            "--random-tokens",
            "--no-trace",
            "--steps",
            "4",
            "--commit",
            commit,
            "--output",
            str(output),
        ]


OVERLAP = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
ROWS = {
    "alone": Row("one device, forward and backward", 16, ("--forward-backward-only",), alone=True),
    "whole": Row("whole step, 65,536 tokens a device", 16, MEMORY),
    "short": Row("whole step, 16,384 tokens a device", 4, MEMORY, compared=True),
    "passes": Row("forward and backward, 65,536 tokens a device", 16, ("--forward-backward-only",)),
    "long": Row(
        "forward and backward, 32,768-token sequences, CP 2",
        4,
        ("parallel=context_2", *OVERLAP, "--forward-backward-only"),
        experiment="zaya1_base_32k",
        micro=1,
        replicas=2,
    ),
}


def compared(steps: dict[str, dict]) -> list[tuple[str, str, float, float, bool]]:
    """Return (row, quantity, value, goal, reached) of the rows that were measured; steps: step.json by row."""
    found = []

    def beside(row: str, what: str, value: float, goal: float, most: bool = False) -> None:
        found.append((row, what, value, goal, value <= goal if most else value >= goal))

    speed = {row: each["step"]["tokens_per_s_per_device"] for row, each in steps.items()}
    rate = {row: each["step"]["tflops_per_device"] for row, each in steps.items()}
    if "alone" in steps:
        beside("alone", "share of the GEMM rate", steps["alone"]["step"]["share_of_gemm"], 0.55)
    if "whole" in steps:
        beside("whole", "tokens/s a device", speed["whole"], 50_000)
        beside("whole", "communication and idle", steps["whole"]["step"]["not_computing_share"], 0.10, most=True)
        beside("whole", "GiB reserved", steps["whole"]["step"]["reserved_gib"], 90, most=True)
    if "short" in steps:
        beside("short", "tokens/s a device", speed["short"], 40_000)
        if anchor := steps["short"].get("anchor"):
            # 40k to 25.0k
            beside("short", "times transformers", speed["short"] / anchor["tokens_per_s_per_device"], 1.6)
    if "passes" in steps and "alone" in steps:
        beside("passes", "weak scaling", speed["passes"] / speed["alone"], 0.95)
    if "long" in steps and "passes" in steps:
        beside("long", "TFLOP/s of those at 4,096 tokens", rate["long"] / rate["passes"], 0.85)
    return found


def table(steps: dict[str, dict], goals: list[tuple[str, str, float, float, bool]]) -> str:
    """Return the rows and the comparison with the goals as text."""
    lines = [f"{'row':50}{'ms':>9}{'tokens/s':>10}{'TFLOP/s':>9}{'GEMM':>7}{'not computing':>15}{'GiB':>8}"]
    for row, each in steps.items():
        step = each["step"]
        lines.append(
            f"{ROWS[row].title:50}{step['ms']:9.1f}{step['tokens_per_s_per_device']:10,.0f}"
            f"{step['tflops_per_device']:9.1f}{step['share_of_gemm']:7.1%}"
            f"{step['not_computing_share']:15.1%}{step['reserved_gib']:8.1f}"
        )
    lines += ["", f"{'goal of eight H200s':50}{'':34}{'measured':>10}{'goal':>10}"]
    for row, what, value, goal, reached in goals:
        lines.append(f"{ROWS[row].title:50}{what:34}{value:10,.4g}{goal:10,.4g}  {'reached' if reached else 'missed'}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of all rows")
    parser.add_argument(
        "--devices", type=int, default=8, help="devices of this node, an even number; default: %(default)s"
    )
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"default: {' '.join(ROWS)}"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/step_table"),
        help="folder with a directory for each row; default: %(default)s",
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="step_table")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    arguments = parser.parse_intermixed_args()
    if arguments.devices < 2 or arguments.devices % 2:
        parser.error(
            f"--devices {arguments.devices}: allowed: an even number from 2 on, because two devices share a sequence "
            "in the row `long`"
        )
    commit, steps, failed = commit_of(arguments.commit), {}, []
    for row in arguments.rows:
        output = arguments.work / row
        command = ROWS[row].command(arguments.devices, output, commit, arguments.overrides)
        commands = [command, [sys.executable, str(COMPARISON), str(output)]] if ROWS[row].compared else [command]
        print(*map(shlex.join, commands), sep="\n", flush=True)
        if arguments.dry_run:
            continue
        codes = (subprocess.run(words).returncode for words in commands)
        if not (output / "step.json").is_file() and (code := next(filter(None, codes), 0)):
            failed.append(row)
            print(f"{row}: ended with {code}; its directory is {output}", file=sys.stderr, flush=True)
        if (output / "step.json").is_file():
            steps[row] = json.loads((output / "step.json").read_text())
    if arguments.dry_run:
        return 0
    goals = compared(steps)
    print(table(steps, goals), flush=True)
    device = next((each["device"] for each in steps.values()), None)
    write(
        described(commit, device)
        | {
            "devices": arguments.devices,
            "failed": failed,
            "goals": [dict(zip(("row", "what", "value", "goal", "reached"), each, strict=True)) for each in goals],
            "steps": {
                row: {
                    name: each.get(name)
                    for name in ("command", "rates", "step", "anchor", "parts", "hidden_communication_ms")
                }
                for row, each in steps.items()
            },
        },
        arguments.name,
        arguments.results,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
