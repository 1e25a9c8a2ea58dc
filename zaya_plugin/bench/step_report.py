# SPDX-License-Identifier: Apache-2.0
"""Formats a record of zaya_plugin.bench.step_record: a table with a stacked bar for the terminal, and a picture of
the parts.
"""

from __future__ import annotations

import shutil

from zaya_plugin.pictures.content import Bars, Page, Panel

# Part -> letter and colour (Okabe and Ito's palette for the colour-blind, and two greys).
LOOKS = {
    "embedding": ("e", "#999933"),
    "norms": ("n", "#56b4e9"),
    "projections": ("p", "#0072b2"),
    "prologue": ("c", "#009e73"),
    "attention": ("a", "#44aa99"),
    "router": ("r", "#cc79a7"),
    "experts": ("x", "#d55e00"),
    "head": ("h", "#e69f00"),
    "gradients": ("g", "#aa4499"),
    "optimizer": ("o", "#882255"),
    "other": ("?", "#bbbbbb"),
    "communication": ("=", "#661100"),
    "idle": (".", "#eeeeee"),
}
STRETCHES = 5  # printed
HEAD = (
    f"{'':2}{'part':22}{'ms':>9}{'share':>8}{'forward':>9}{'backward':>9}"
    f"{'TFLOP':>10}{'GB':>10}{'GEMM':>7}{'copy':>7}{'roofline':>9}"
)


def text(record: dict, width: int | None = None) -> str:
    """Return the report. width: columns of the bar, None for the terminal's."""
    width = min(width or shutil.get_terminal_size((120, 24)).columns, 160)
    traced = record["traced"]
    lines = ["", *_step(record), ""]
    if traced["source"] == "operators":
        lines.append(
            "No device: the parts are times of operators on the host, without the operators inside them; idle is the "
            "time between operators."
        )
    lines += [bar(record["parts"], width), HEAD]
    lines += [_row(row) for row in record["parts"]]
    lines.append(
        f"{'':2}{'sum':22}{sum(row['ms'] for row in record['parts']):9.2f}"
        f"{sum(row['share'] for row in record['parts']):8.1%}   of one traced step"
    )
    lines.append(
        f"The traced step took {traced['ms']:.1f} ms, without the profiler steps take {record['step']['ms']:.1f} ms; "
        f"the host worked {traced['host_ms']:.1f} ms "
        f"of it (with the profiler's cost); {traced['launches']} launches, {traced['activities']} {traced['source']}"
        + ("; kernels of the graph are assigned as in the step before its capture" if traced["from_graph"] else "")
        + f"; computation leaves {record['step']['not_computing_share']:.1%} of an untraced step to exposed "
        "communication and idle"
        + f"; communication hidden under computation {record['hidden_communication_ms']:.1f} ms."
    )
    if record.get("not_computing"):
        without = sum(row["ms"] for row in record["parts"] if row["part"] in ("communication", "idle"))
        lines.append(f"Longest without computation, of {without:.1f} ms:")
        lines += [_stretch(stretch) for stretch in record["not_computing"][:STRETCHES]]
    lines.append(
        "GEMM and copy: operations and least bytes against the measured rates; roofline: the larger of the two."
    )
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


def _stretch(stretch: dict) -> str:
    def end(side: dict | None, otherwise: str) -> str:
        return otherwise if side is None else f"{side['part']}{' backward' if side['backward'] else ''}"

    names = ", ".join(name.split("(")[0][:60] for name in stretch["communication"][:3])
    return (
        f"{stretch['ms']:9.2f} ms at {stretch['at_ms']:8.1f}, {stretch['communication_ms']:.2f} of it "
        f"communication{f' ({names})' if names else ''}: "
        f"between {end(stretch['before'], 'the beginning')} and {end(stretch['after'], 'the end')}"
    )


def _row(row: dict) -> str:
    def cell(value, form: str, columns: int) -> str:
        return f"{'' if value is None else format(value, form):>{columns}}"

    return (
        f"{LOOKS[row['part']][0]:2}{row['title']:22}{row['ms']:9.2f}{row['share']:8.1%}"
        f"{row['forward_ms']:9.2f}{row['backward_ms']:9.2f}"
        + cell(row["tflop"], ".3g", 10)
        + cell(row["gb"], ".3g", 10)
        + cell(row["gemm_share"], ".0%", 7)
        + cell(row["copy_share"], ".0%", 7)
        + cell(row["roofline"], ".0%", 9)
    )


def bar(parts: list[dict], width: int) -> str:
    """Return `width` letters, those of each part in proportion to its share."""
    line, reached = "", 0.0
    for row in parts:
        reached += row["share"]
        line += LOOKS[row["part"]][0] * (round(width * reached) - len(line))
    return line


def anchor_text(record: dict) -> str:
    """Return the anchor's figures and the ratio."""
    anchor = record["anchor"]
    if "error" in anchor:
        return f"anchor: {anchor['what']}: {anchor['error']}"
    memory = "" if anchor["allocated_gib"] is None else f", peak memory {anchor['allocated_gib']:.1f} GiB"
    return (
        f"anchor: {anchor['what']}: {anchor['ms']:.1f} ms, {anchor['tokens_per_s_per_device']:,.0f} tokens/s a device, "
        f"{anchor['tflops_per_device']:.4g} TFLOP/s{memory}\nours / theirs: {anchor['ratio']:.3f}"
    )


def picture(record: dict) -> Page:
    """Return the content of a picture: a bar for each part of the step, one after the other."""
    bars, at = [], 0.0
    for row in record["parts"]:
        label = f"{row['title']} {row['ms']:.1f} ms, {row['share']:.1%}"
        bars.append(Bars(label, [at], [at + row["ms"]], [label], [LOOKS[row["part"]][1]]))
        at += row["ms"]
    step = record["step"]
    ranks = f"{record['world_size']} rank{'s' if record['world_size'] > 1 else ''}"
    speed = f"{step['ms']:.1f} ms a step, {step['tokens_per_s_per_device']:,.0f} tokens/s a device"
    rows = [one.row for one in bars]
    panel = Panel("One traced step by part", "ms", [*bars], rows=rows, zooms=False, wide=True)
    return Page(title=f"{record['device']}, {ranks}: {speed}", panels=[panel])
