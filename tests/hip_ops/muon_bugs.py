# SPDX-License-Identifier: Apache-2.0
"""Copies of the Muon kernels with one mistake each, all in one translation unit made from the shipped sources by
substitution.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.hip_ops.kernel_files import kernel_source

HEADERS = ("multi_tensor.h", "muon.h")
SKIP = "if (found_inf && *found_inf != 0.0f) return;"
# name: the kernel that is to show it, what the sources say, what they would say. Every occurrence is replaced.
BUGS = {
    "lost tail": ("momentum", "i < c.count; i += kThreads", "i < c.vectors; i += kThreads"),
    "tail mask": (
        "update",
        "c.count = row.numel - c.base < chunk_elements ? int(row.numel - c.base) : chunk_elements;",
        "c.count = chunk_elements;",
    ),
    "lost head": ("update", "if (int(threadIdx.x) < c.head)", "if (int(threadIdx.x) < 0)"),
    "vectors at a misaligned start": (
        "momentum",
        "row.head < 0 ? 0 : c.count / kWidth * kWidth",
        "row.head < 0 ? c.count : c.count / kWidth * kWidth",
    ),
    "bf16 truncation": (
        "update",
        "return float_to_bf16(value);",
        "{ ho::FloatBits x; x.value = value; return bf16(x.bits >> 16); }",
    ),
    "next chunk's tensor": (
        "momentum",
        "rows[chunk_rows[chunk]]",
        "rows[chunk_rows[chunk + 1 < chunks ? chunk + 1 : chunk]]",
    ),
    "first chunk forgotten": (
        "update",
        "int64_t(chunk - row.first_chunk) * chunk_elements",
        "int64_t(chunk) * chunk_elements",
    ),
    "grid stride off by one": ("update", "chunk += gridDim.x", "chunk += gridDim.x + 1"),
    "no skip flag": ("update", SKIP, "if (false) return;"),
    "skip flag inverted": ("momentum", SKIP, "if (found_inf && *found_inf == 0.0f) return;"),
    "output before momentum": (
        "momentum",
        "rule.output(to_float(stored), g)",
        "rule.output(to_float(M(momentum[v][i])), g)",
    ),
    "momentum weights swapped": (
        "momentum",
        "lerp(buffer, gradient, gradient_weight)",
        "lerp(gradient, buffer, gradient_weight)",
    ),
    "gradient scale ignored": (
        "momentum",
        "to_float(G(gradient[v][i])) * rule.grad_scale",
        "to_float(G(gradient[v][i]))",
    ),
    "sign": ("update", "fmaf(-step,", "fmaf(step,"),
    "coupled weight decay": (
        "update",
        "fmaf(-step, to_float(U(update[v][i])), to_float(W(weight[v][i])) * decay)",
        "fmaf(-step, to_float(U(update[v][i])) + (1.0f - decay) * to_float(W(weight[v][i])), "
        "to_float(W(weight[v][i])))",
    ),
    "scale ignored": ("update", "rate * row.scale", "rate"),
    "copy of the old weight": (
        "update",
        "copy[i] = rounded<C>(w);",
        "copy[i] = rounded<C>(to_float(W(weight[v][i])) * decay);",
    ),
    "lost barrier": ("momentum", "block_sync_lds();", ""),
    "one side of LDS": ("momentum", "side ^= 1;", ""),
}

KERNELS = {
    "momentum": """
HO_KERNEL(ho_muon_momentum_NAME, muon::kThreads)(const muon::Row* __restrict__ rows, const int32_t* __restrict__ chunk_rows, int chunks,
    int chunk_elements, const float* grad_scale, const float* found_inf, float* partials, float momentum, float gradient_weight,
    int nesterov, int ema) {
  muon::momentum_body<bf16, float, bf16>(rows, chunk_rows, chunks, chunk_elements, grad_scale, found_inf, partials, momentum,
      gradient_weight, nesterov, ema);
}
""",
    "update": """
HO_KERNEL(ho_muon_update_NAME, muon::kThreads)(const muon::Row* __restrict__ rows, const int32_t* __restrict__ chunk_rows, int chunks,
    int chunk_elements, const float* found_inf, const float* lr_pointer, float lr, float weight_decay) {
  muon::update_body<bf16, float, bf16, true>(rows, chunk_rows, chunks, chunk_elements, found_inf, lr_pointer, lr, weight_decay);
}
""",
}


def _variant(name: str, kernels: list[str], bug: str | None) -> str:
    """The two headers and some kernels in namespaces of their own."""
    shipped = "".join(kernel_source(file).read_text() for file in HEADERS)
    text = shipped if bug is None else shipped.replace(*BUGS[bug][1:])
    assert bug is None or text != shipped, f"the sources no longer say: {BUGS[bug][1]}"
    text = re.sub(r'#pragma once|#include ".*"', "", text) + "".join(
        KERNELS[kernel].replace("NAME", name) for kernel in kernels
    )
    return re.sub(r"\b(muon|multi_tensor)\b(?=::| \{|;)", rf"\1_{name}", text)


def identifier(bug: str) -> str:
    return re.sub(r"\W", "_", bug)


def write_variants(directory: Path) -> Path:
    """A source with the kernel ho_muon_<kernel>_<bug> for every bug, and both kernels without any as
    ho_muon_<kernel>_right.
    """
    path = directory / "muon_bugs.hip"
    variants = [_variant(identifier(bug), [BUGS[bug][0]], bug) for bug in BUGS]
    path.write_text('#include "portable.h"\n' + _variant("right", list(KERNELS), None) + "".join(variants))
    return path


def write_source(folder: Path, bug: str | None = None) -> Path:
    """muon.hip and its headers in `folder`, with the mistake in whichever of them it is.

    Of the variants only bf16 gradients and updates with fp32 state are kept, which compile in a third of the time.
    """
    shipped = {name: kernel_source(name).read_text() for name in (*HEADERS, "muon.hip")}
    texts = {name: text if bug is None else text.replace(*BUGS[bug][1:]) for name, text in shipped.items()}
    assert (texts == shipped) == (bug is None)
    text = re.sub(r"^MUON_(MOMENTUM|UPDATE)\((?!\w+_bf16_fp32_bf16,).*\n", "", texts["muon.hip"], flags=re.M)
    texts["muon.hip"] = re.sub(r"\b(ho_muon_(momentum|update))(_(bf16|fp32))+\b", r"\1_bf16_fp32_bf16", text)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / "muon.hip"
