# SPDX-License-Identifier: Apache-2.0
"""Reading the figures of step_vs_transformers.py: the training run, the ratios, the table."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path


def summary_of_training(run_dir: Path) -> dict:
    """Losses, speed and memory of the run, from its metrics.jsonl."""
    rows = [row for row in map(json.loads, (run_dir / "metrics.jsonl").open()) if "loss" in row]
    late = rows[len(rows) // 5 :]
    step_s = statistics.median(row["step_s"] for row in late)
    return {
        "steps": len(rows),
        "loss_first": rows[0]["loss"],
        "loss_last": rows[-1]["loss"],
        "losses": [round(row["loss"], 4) for row in rows],
        "step_s": round(step_s, 4),
        "tokens_per_s": round(statistics.median(row["tokens_per_s"] for row in late), 1),
        "tflops": round(statistics.median(row["tflops_per_device"] for row in late), 1),
        "peak_memory_gib": round(max(row["memory_gib"] for row in rows), 2),
        "skipped": sum(row["skipped"] for row in rows),
    }


def ratios(measured: dict) -> dict:
    """Our speed over transformers', by batch shape and at each side's best batch.

    `plain` is ours as it trains and `best` the fastest variant; `transformers` is its fastest without torch.compile,
    and `compiled` with every layer compiled.
    """

    def speeds(side: str, shape: str, wanted) -> list[tuple[float, str]]:
        results = measured[side]["results"].items()
        found = [(f[shape], name) for name, f in results if wanted(name) and f.get(shape)]
        return [(f["tokens_per_s"], f"{name} {shape}") for f, name in found if "tokens_per_s" in f]

    sides = {
        "plain": ("zaya", lambda name: name == "plain"),
        "best": ("zaya", lambda name: True),
        "transformers": ("transformers", lambda name: "compile" not in name),
        "compiled": ("transformers", lambda name: "compile" in name),
    }
    shapes = list(next(iter(measured["zaya"]["results"].values())))
    found = {}
    for title, chosen in [(shape, [shape]) for shape in shapes] + [("best batch", shapes)]:
        row = {
            key: max((x for shape in chosen for x in speeds(side, shape, wanted)), default=None)
            for key, (side, wanted) in sides.items()
        }
        for ours in ("plain", "best"):
            for theirs in ("transformers", "compiled"):
                if row[ours] and row[theirs]:
                    row[f"{ours} / {theirs}"] = round(row[ours][0] / row[theirs][0], 3)
        found[title] = row
    return found


def table(result: dict) -> str:
    """Figures a person reads first."""
    lines = [f"{'model':13}{'variant':42}{'tokens':>7}{'ms':>10}{'tokens/s':>11}{'GiB':>7}{'loss':>9}"]
    for side in ("zaya", "transformers"):
        for name, shapes in result["forward_backward"][side]["results"].items():
            for shape, f in shapes.items():
                figures = "  out of memory" if f is None else f"  {f.get('error')}"
                if f and "ms" in f:
                    figures = (
                        f"{f['ms']:>10.2f}{f['tokens_per_s']:>11.0f}{f['peak_memory_gib'] or 0:>7.1f}{f['loss']:>9.4f}"
                    )
                lines.append(f"{side:13}{name:42}{shape:>7}{figures}")
    t = result["train"]
    lines.append(
        f"{result['model']['layers']} layers, {result['model']['parameters']:,} parameters: {t['steps']} steps, loss "
        f"{t['loss_first']:.3f} -> {t['loss_last']:.3f}, {t['tokens_per_s']:.0f} tokens/s with AdamW, {t['peak_memory_gib']} GiB"
    )
    lines += [f"{shape}: {r}" for shape, r in result["ratios"].items()]
    return "\n".join(lines)


def pretty(result: dict) -> str:
    """JSON with a line for every innermost list."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found.group().split()), text) + "\n"
