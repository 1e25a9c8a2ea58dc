# SPDX-License-Identifier: Apache-2.0
"""The tables that `zaya plan run|fit|sizes` print. No torch import."""

from __future__ import annotations

from collections.abc import Sequence

from zaya_plugin.bench.results import Column, table
from zaya_plugin.plan import search, sizes
from zaya_plugin.plan.prediction import UNRECORDED, Prediction
from zaya_plugin.plan.recipe_plan import GIB
from zaya_plugin.plan.run_costs import RESTART_SECONDS

STEP = (
    Column("title", "part"),
    Column("ms", "ms", ",.2f"),
    Column("share", "share", ".1%"),
    Column("tflop", "TFLOP", ".3g"),
    Column("gb", "GB", ".3g"),
    Column("roofline", "roofline", ".0%"),
    Column("of", "of ms", ",.1f"),
)
STAGES = (
    Column("name", "stage"),
    Column("tokens", "tokens", ","),
    Column("seq_length", "context", ","),
    Column("steps", "steps", ","),
    Column("step", "s a step", ".3f"),
    Column("days", "days", ",.1f"),
    Column("device_hours", "GPU hours", ",.0f"),
    Column("cost", "cost", ",.0f"),
    Column("range", "failures"),
    Column("lost", "hours lost", ",.1f"),
    Column("saves", "checkpoints"),
)
RANKS = (Column("rank", "rank"), Column("groups", "place in its groups"), Column("shards", "shards"))
BUFFERS = (
    Column("name", "buffer"),
    Column("elements", "elements", ","),
    Column("buckets", "buckets"),
    Column("padding", "padding", ".1%"),
    Column("fullest", "fullest shard / mean", ".2f"),
    Column("emptiest", "emptiest", ".2f"),
    Column("muon", "most of Muon's work / mean", ".2f"),
    Column("cut", "elements of cut matrices", ","),
)
SETTINGS = (
    *(Column(name, name) for name in (*search.LAYOUTS, *search.EXCHANGES, "recomputed")),
    Column("ms", "ms", ",.1f"),
    Column("gib", "GiB", ".1f"),
    Column("mark", ""),
    Column("why", ""),
)
SIZES = (
    Column("key", "key"),
    Column("value", "value", ","),
    Column("vocabulary", "rows of the embedding", ","),
    Column("tflops", "TFLOP/s", ".0f"),
    Column("gain", "gain", "+.1%"),
    Column("parameters", "parameters", ","),
    Column("note", ""),
)
WIDTHS = (
    Column("width", "width", ","),
    Column("experts", "experts"),
    Column("active", "active parameters", ","),
    Column("tflops", "experts TFLOP/s", ".0f"),
    Column("tokens_per_second", "tokens/s a device", ",.0f"),
    *(Column(f"decode_{batch}", f"decode ms, batch {batch}", ".3f") for batch in sizes.DECODE_BATCHES),
)
FAILURES = (
    "Days and GPU hours include the time lost to failures and saves. Failures: arXiv 2407.21783 (Llama 3, H100) to "
    "machine.device_hours_per_failure (default: arXiv 2410.21680, A100); no rate of MI300Xs is published. Each loses "
    f"half of the time between checkpoints and {RESTART_SECONDS:.0f} s."
)


def step_lines(step: Prediction) -> list[str]:
    """Return a predicted step as lines."""
    batches = step.batch.micro_batches
    lines = [
        f"{step.parameters:,} parameters, {step.active:,} of them active for a token, without the embedding",
        f"a step of {step.tokens:,} tokens in {batches} micro-batch{'es' * (batches > 1)} a rank, "
        f"{step.flops / 1e12:,.0f} TFLOP, on {step.world} devices of {step.recipe.cluster.name}",
    ]
    if step.memory:
        lines.append(f"memory of the fullest rank: {step.memory.total / GIB:.1f} GiB (prediction)")
        lines += [f"  {size / GIB:8.2f}  {name}" for name, size in step.memory.components.items()]
    if not step.seconds:
        return [*lines, f"step time: not predicted. {step.reason}"]
    exposed = [
        {"title": f"exposed {name}", "ms": link["exposed_ms"], "of": link["ms"]}
        for name, link in step.communication.items()
    ]
    return [
        *lines,
        f"PREDICTION from {step.source.what['device']}, commit {step.source.what['commit']}: {1e3 * step.seconds:,.1f} ms "
        f"a step, {step.tokens_per_second:,.0f} tokens/s a device, {step.tflops:.4g} TFLOP/s, "
        f"{1e12 * step.tflops / step.gemm:.1%} of the GEMM rate",
        f"  error: {step.error}",
        f"  rates: {step.gemm / 1e12:.4g} TFLOP/s in a matrix product, {step.copy / 1e12:.3g} TB/s in a copy "
        f"({step.sources})",
        table([{**row, "share": row["ms"] / 1e3 / step.seconds} for row in (*step.parts, *exposed)], STEP),
        "Not included: waits for the host"
        + (f", {1e3 * step.source.idle:.1f} ms of the record's traced step." if step.source.idle else "."),
    ]


def stage_lines(stages: Sequence[dict]) -> list[str]:
    """Return a table of the stages (`stage_cost`) and, of several, their sum."""
    known, rows = [stage for stage in stages if "hours" in stage], list(stages)
    if len(known) > 1:
        keys = ("tokens", "device_hours", "hours", "lost", *(["cost"] if known[0]["cost"] else []))
        rows.append({"name": "sum", **{key: sum(stage[key] for stage in known) for key in keys}})
    stored = sum(stage["saved_bytes"] * stage["kept"] for stage in stages)
    size = f"{stored / 1e12:.2f} TB" if stored >= 1e11 else f"{stored / 1e9:.1f} GB"
    storage = f"storage: {size} of checkpoints at the end, and one more while it is written"
    return [table([_stage_row(stage) for stage in rows], STAGES), *([FAILURES] if known else []), storage]


def _stage_row(stage: dict) -> dict:
    """Return a stage or the sum with the further columns of the table."""
    row = dict(stage)
    if "hours" in stage:
        row["days"] = (stage["hours"] + stage["lost"]) / 24
    if "failures" in stage:
        row["range"] = f"{stage['failures'][1]:,.1f} to {stage['failures'][0]:,.1f}"
    if "kept" in stage:
        row["saves"] = f"{stage['saved_bytes'] / 1e9:.1f} GB x {stage['kept']}"
    return row


def layout_lines(ranks: Sequence[dict], faults: Sequence[str], world: int, parameters: int) -> list[str]:
    """Return the layout of `world` ranks as lines, of ranks as zaya_plugin.hosts.rank_layout describes them."""
    verdict = f"complete: every one of {parameters:,} parameters is in exactly one shard of each instance"
    if ranks[0]["groups"]["tensor"][0] > 1:  # ranks hold parts of matrices
        verdict = "complete: every part of a rank is in exactly one shard of each instance; their sum is not compared"
    rows = []
    for rank in ranks:
        groups = ", ".join(f"{name} {place} of {size}" for name, (size, place) in rank["groups"].items() if size > 1)
        shards = (f"{row['name']} {row['shard']} of {row['shards']}" for row in rank["buffers"])
        rows.append({"rank": rank["rank"], "groups": groups or "alone", "shards": ", ".join(shards)})
    fullest = max((rank["buffers"] for rank in ranks), key=lambda buffers: sum(row["elements"] for row in buffers))
    buffers = []
    for row in fullest:
        most, least, _ = row["shard_elements"]
        mean, work = row["elements"] / row["shards"], row["muon_flops"]
        shares = {"padding": row["padding"] / row["elements"], "fullest": most / mean, "emptiest": least / mean}
        buffers.append({**row, **shares, "muon": work[0] * row["shards"] / work[3] if work[3] else None})
    return [
        f"layout of {world:,} ranks, as Megatron and the optimizer build it (torch's fake process groups, no memory):",
        table(rows, RANKS),
        table(buffers, BUFFERS),
        *(f"WRONG: {fault}" for fault in faults),
        *([] if faults else [verdict]),
    ]


def setting_lines(settings: Sequence[Prediction], goal: str) -> list[str]:
    """Return the ranking of a search as lines."""
    best, rows = settings[0], search.report(settings)
    rule = {
        "time": f"within {search.EQUAL_TIME:.1%} of the fastest",
        "memory": f"within {search.EQUAL_MEMORY:.0%} of a device's memory of the smallest",
    }[goal]
    lines = [
        f"{len(settings)} options fit; the best ({rule}) on {best.world} devices of {best.recipe.cluster.name} "
        f"(prediction, {best.error})",
        table(rows, SETTINGS),
    ]
    if any(row["mark"] for row in rows):
        lines.append(f"* no committed record of the current code has {' or '.join(UNRECORDED)} parallelism")
    return lines


def size_lines(faster: dict[str, list[dict]], widths: Sequence[dict], step: Prediction) -> list[str]:
    """Return the sizes near the recipe's and the widths of experts as lines. step: the recipe's own."""
    rows = []
    for key, (own, *near) in faster.items():
        rows.append({**own, "key": key, "gain": None, "note": None if near else "none near it is faster"})
        rows += [{**row, "key": ""} for row in near]
    for row in rows:
        row["vocabulary"] = row["vocabulary"] if row["vocabulary"] != step.shape.vocab_size else None
    return [
        f"rate of a step's matrix products on {step.recipe.machine.name}, by tiles (prediction, -12 to +21 %: "
        "docs/predictions.md)",
        table(rows, SIZES),
        f"widths of experts with the same parameters in all experts (prediction, {step.error})",
        table(widths, WIDTHS),
        f"decoding: weights and the cache of {sizes.DECODE_CONTEXT:,} tokens read once a token, no launches",
    ]
