# SPDX-License-Identifier: Apache-2.0
"""Formats a record of zaya_plugin.bench.step_record: a table for the terminal, and a picture of the parts."""

from zaya_plugin.bench.results import Column, table
from zaya_plugin.pictures.content import Bars, Page, Panel

# Colours of the parts (Okabe and Ito's palette for the colour-blind, and two greys).
COLOURS = {
    "embedding": "#999933",
    "norms": "#56b4e9",
    "projections": "#0072b2",
    "prologue": "#009e73",
    "attention": "#44aa99",
    "router": "#cc79a7",
    "experts": "#d55e00",
    "head": "#e69f00",
    "gradients": "#aa4499",
    "optimizer": "#882255",
    "other": "#bbbbbb",
    "communication": "#661100",
    "idle": "#eeeeee",
}
COLUMNS = (
    Column("title", "part"),
    Column("ms", "ms", ".2f"),
    Column("share", "share", ".1%"),
    Column("forward_ms", "forward", ".2f"),
    Column("backward_ms", "backward", ".2f"),
    Column("tflop", "TFLOP", ".3g"),
    Column("gb", "GB", ".3g"),
    Column("gemm_share", "GEMM", ".0%"),
    Column("copy_share", "copy", ".0%"),
    Column("roofline", "roofline", ".0%"),
)


def text(record: dict) -> str:
    """Return the report."""
    traced, parts = record["traced"], record["parts"]
    whole = {"title": "sum, one traced step", **{key: sum(row[key] for row in parts) for key in ("ms", "share")}}
    on_host = (
        "No device: the parts are times of operators on the host, without the operators inside them; idle is the time "
        "between operators."
    )
    lines = [
        *("", *_step(record), ""),
        *([on_host] if traced["source"] == "operators" else []),
        table([*parts, whole], COLUMNS),
        f"The traced step took {traced['ms']:.1f} ms, without the profiler steps take {record['step']['ms']:.1f} ms; "
        f"the host worked {traced['host_ms']:.1f} ms "
        f"of it (with the profiler's cost); {traced['launches']} launches, {traced['activities']} {traced['source']}"
        + ("; kernels of the graph are assigned as in the step before its capture" if traced["from_graph"] else "")
        + f"; computation leaves {record['step']['not_computing_share']:.1%} of an untraced step to exposed "
        "communication and idle"
        + f"; communication hidden under computation {record['hidden_communication_ms']:.1f} ms.",
        "GEMM and copy: operations and least bytes against the measured rates; roofline: the larger of the two.",
    ]
    return "\n".join(lines)


def _step(record: dict) -> list[str]:
    step, rates = record["step"], record["rates"]
    memory = f"{step['resident_gib']:.2f} GiB resident"
    if step["allocated_gib"] is not None:
        memory = f"peak memory {step['allocated_gib']:.1f} GiB allocated, {step['reserved_gib']:.1f} reserved"
    what = "a step" if step["optimizer"] else "a forward and backward pass (no optimizer)"
    return [
        f"{record['device']}, {record['world_size']} rank{'s' if record['world_size'] > 1 else ''}, commit "
        f"{record['commit'] or 'unknown'}",
        f"{what} of {step['tokens']} tokens in {step['micro_batches']} "
        f"micro-batch{'es' if step['micro_batches'] > 1 else ''} a rank: {step['ms']:.1f} ms, "
        f"{step['tokens_per_s_per_device']:,.0f} tokens/s a device, {step['tflops_per_device']:.4g} TFLOP/s, "
        f"{step['share_of_gemm']:.1%} of the GEMM rate; {memory}",
        f"measured rates: matrix product {rates['gemm_tflops']:.4g} TFLOP/s, copy {rates['copy_tb_per_s']:.3g} TB/s",
    ]


def picture(record: dict) -> Page:
    """Return the content of a picture: a bar for each part of the step, one after the other."""
    bars, at = [], 0.0
    for row in record["parts"]:
        label = f"{row['title']} {row['ms']:.1f} ms, {row['share']:.1%}"
        bars.append(Bars(label, [at], [at + row["ms"]], [label], [COLOURS[row["part"]]]))
        at += row["ms"]
    step = record["step"]
    ranks = f"{record['world_size']} rank{'s' if record['world_size'] > 1 else ''}"
    speed = f"{step['ms']:.1f} ms a step, {step['tokens_per_s_per_device']:,.0f} tokens/s a device"
    rows = [one.row for one in bars]
    panel = Panel("One traced step by part", "ms", [*bars], rows=rows, zooms=False, wide=True)
    return Page(title=f"{record['device']}, {ranks}: {speed}", panels=[panel])
