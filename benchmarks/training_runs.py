# SPDX-License-Identifier: Apache-2.0
"""Run `zaya train` for benchmarks that compare losses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def train(
    directory: Path, overrides: Iterable[str], program: Sequence[str] = ("-m", "zaya_plugin.cli", "train")
) -> Path:
    """Run a training in `directory` by Python's arguments `program`, unless it was finished there before; raises
    RuntimeError with the end of its output.
    """
    if not (directory / "done").is_file():
        command = [
            sys.executable,
            *program,
            *overrides,
            f"run_dir={directory}",
            "logger.wandb=false",
            "logger.tensorboard=false",
            "checkpoint.save_interval=null",
        ]
        print(" ".join(command), flush=True)
        log = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if log.returncode:
            raise RuntimeError(log.stdout[-3000:])
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)  # the last step's; gigabytes a run
        (directory / "done").touch()
    return directory


def rows(directory: Path) -> list[dict]:
    """Return the metrics that the run reported, one dictionary per step or validation."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> list[float]:
    """Return the training loss of every step."""
    return [row["loss"] for row in rows(directory) if "loss" in row]


def smooth(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and up to window - 1 values before it."""
    return [sum(part) / len(part) for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]
