# SPDX-License-Identifier: Apache-2.0
"""One line a step that fits a terminal."""

from __future__ import annotations

import math
import shutil
from typing import Any


def step_line(row: dict[str, Any], width: int | None = None) -> str:
    """The console line of a metrics row; fields that do not fit `width` columns (the terminal's) are left out, the
    less important ones first. Units: s a step, tokens/s of the whole job, GiB of one rank."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    last = str(row["last_step"])
    # (importance, text): printed in this order, dropped by descending importance number
    parts = [
        (0, f"step {row['step']:>{len(last)}}/{last}"),
        (0, f"loss {row['loss']:.4f}" if row["loss"] is not None else "loss -"),
        (1, f"lr {row['lr']:.2e}" if row["lr"] is not None else None),
        (1, f"grad {row['grad_norm']:.2f}" if row["grad_norm"] is not None else None),
        (0, f"{_short(row['tokens_per_s'])} tok/s"),
        (
            2,
            f"mfu {100 * row['mfu']:.1f}%"
            if row.get("mfu") is not None
            else f"{_short(row['tflops_per_device'] * 1e12)}F/s",
        ),
        (3, f"load {row['expert_imbalance']:.2f}x" if row.get("expert_imbalance") is not None else None),
        (4, f"H {row['router_entropy']:.2f}" if row.get("router_entropy") is not None else None),
        (5, f"{row['memory_gib']:.1f} GiB"),
        (2, f"eta {_clock(row['eta_s'])}"),
        (0, "SKIPPED" if row["skipped"] else None),
    ]
    parts = [part for part in parts if part[1]]
    while len(parts) > 1 and len("  ".join(text for _, text in parts)) > width - 1:
        parts.remove(max(parts, key=lambda part: part[0]))
    return "  ".join(text for _, text in parts)


def summary(losses: list[float], validation: list[float], seconds: float, run_dir: str) -> str:
    """What a run came to: its loss curve in one line of blocks, the last validation loss, where the numbers lie."""
    text = f"{len(losses)} steps in {_clock(seconds)}  loss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}"
    if validation:
        text += f"  validation {validation[-1]:.3f}"
    return f"{text}\neverything is in {run_dir}: metrics.jsonl, checkpoints/, tensorboard/, wandb/, logs/"


def sparkline(values: list[float], width: int = 40) -> str:
    """`values` as at most `width` blocks of eight heights, each the mean of its stretch; x where that is no finite number."""
    width = min(width, len(values))
    means = []
    for i in range(width):
        stretch = values[i * len(values) // width : (i + 1) * len(values) // width]
        means.append(sum(stretch) / len(stretch))
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(
        "▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (high - low or 1))] if math.isfinite(mean) else "x" for mean in means
    )


def _short(value: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
