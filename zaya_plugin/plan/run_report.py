# SPDX-License-Identifier: Apache-2.0
"""The report of `zaya plan run`. No torch import."""

from __future__ import annotations

from zaya_plugin.plan.prediction import Prediction
from zaya_plugin.plan.recipe_plan import GIB


def step_lines(result: Prediction) -> list[str]:
    """Return a predicted step as a table."""
    lines = [
        f"{result.parameters:,} parameters, {result.active:,} of them active for a token, without the embedding",
        f"a step of {result.tokens:,} tokens in {result.micro_batches} "
        f"micro-batch{'es' if result.micro_batches > 1 else ''} a rank, {result.flops / 1e12:,.0f} TFLOP, on "
        f"{result.devices} devices of {result.cluster}",
    ]
    if result.memory:
        lines.append(f"memory of the fullest rank: {result.memory.total / GIB:.1f} GiB (prediction)")
        lines += [f"  {size / GIB:8.2f}  {name}" for name, size in result.memory.components.items()]
    if not result.seconds:
        return [*lines, f"step time: not predicted. {result.reason}"]
    rate = result.flops / result.seconds / result.devices
    lines += [
        f"PREDICTION from {result.source['device']}, commit {result.source['commit']}: {1e3 * result.seconds:,.1f} ms a "
        f"step, {result.tokens_per_second:,.0f} tokens/s a device, {rate / 1e12:.4g} TFLOP/s, {rate / result.gemm:.1%} of "
        "the GEMM rate",
        f"  error: {result.error}",
        f"  rates: {result.gemm / 1e12:.4g} TFLOP/s in a matrix product, {result.copy / 1e12:.3g} TB/s in a copy "
        f"({result.sources})",
        f"  {'part':22}{'ms':>9}{'share':>8}{'TFLOP':>10}{'GB':>10}{'roofline':>9}",
    ]
    for row in result.parts:
        roofline = "" if row["roofline"] is None else f"{row['roofline']:.0%}"
        lines.append(
            "  "
            f"{row['title']:22}{row['ms']:9.2f}{row['ms'] / 1e3 / result.seconds:8.1%}"
            f"{row['tflop']:10.3g}{row['gb']:10.3g}{roofline:>9}"
        )
    for name, link in result.communication.items():
        share = link["exposed_ms"] / 1e3 / result.seconds
        lines.append(f"  {'exposed ' + name:22}{link['exposed_ms']:9.2f}{share:8.1%}   of {link['ms']:.1f} ms")
    lines.append(
        f"Not included: idle time, which is the host's ({1e3 * result.idle:.1f} ms of the record's traced step)."
        if result.idle
        else "Not included: the host's time between kernels, where a step is not a graph."
    )
    return lines
