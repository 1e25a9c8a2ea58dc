# SPDX-License-Identifier: Apache-2.0
"""Test the static schedule of loops that were written with a known schedule."""

import pytest

from tests.gfx942 import assembly_kernel
from tests.gfx942.inner_loop import inner_loop, loops, machine_code_analysis, mfma_passes
from tests.gfx942.toolchain import assemble

MFMA = "v_mfma_f32_32x32x8_bf16 v[16:31], v[4:5], v[6:7], v[16:31]"


def kernel(behind_barrier: str, before_barrier: str):
    """A loop whose waits are given: behind the barrier, and at its end."""
    lines = [
        "s_mov_b32 s20, 0",
        ".Lagain:",
        "s_barrier",
        behind_barrier,
        *[MFMA] * 8,
        "s_nop 2",
        before_barrier,
        "s_add_i32 s20, s20, 1",
        "s_cmp_lt_i32 s20, 5",
        "s_cbranch_scc1 .Lagain",
    ]
    return assemble(assembly_kernel.HEAD + "\n".join(lines) + assembly_kernel.TAIL, "loop")


def test_passes():
    assert mfma_passes("v_mfma_f32_32x32x8_bf16") == 8 and mfma_passes("v_mfma_f32_16x16x16_f16") == 4
    with pytest.raises(ValueError, match="4x4x4"):
        mfma_passes("v_mfma_f32_4x4x4_16b_bf16")


@pytest.mark.parametrize(
    ("behind", "before", "waits"),
    [
        ("s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(0) lgkmcnt(0)", 1),
        ("s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(3)", 1),
        ("s_waitcnt lgkmcnt(3)", "s_waitcnt vmcnt(0) lgkmcnt(0)", 0),
        ("s_waitcnt vmcnt(7) lgkmcnt(1)", "s_waitcnt lgkmcnt(0)", 0),
    ],
)
def test_loop(behind, before, waits):
    loop = inner_loop(kernel(behind, before), "snippets")
    assert len(loop.named("v_mfma")) == 8 and loop.mfma_passes == 64
    assert loop.other_slots == 9  # barrier, two waits, s_nop 2 as three, addition, comparison, branch
    assert loop.passes_per_slot == pytest.approx(64 / 9)
    assert [wait.split(": ")[1] for wait in loop.full_waits_after_barriers()] == [behind] * waits
    assert loop.instructions[-1].target == loop.instructions[0].pc
    assert loop.instructions[0].opcode == "s_barrier" and loop.text().count("\n") == len(loop.instructions) - 1


def test_waits_are_looked_for_round_the_back_edge():
    """The barrier stands at the end of the loop, the wait at its start."""
    lines = [
        "s_mov_b32 s20, 0",
        ".Lagain:",
        "s_waitcnt vmcnt(0)",
        MFMA,
        "s_add_i32 s20, s20, 1",
        "s_cmp_lt_i32 s20, 5",
        "s_barrier",
        "s_cbranch_scc1 .Lagain",
    ]
    path = assemble(assembly_kernel.HEAD + "\n".join(lines) + assembly_kernel.TAIL, "loop")
    assert len(inner_loop(path, "snippets").full_waits_after_barriers()) == 1


def test_the_loop_with_most_matrix_work_is_chosen():
    def loop(label, body):
        return [
            "s_mov_b32 s20, 0",
            f".L{label}:",
            *body,
            "s_add_i32 s20, s20, 1",
            "s_cmp_lt_i32 s20, 5",
            f"s_cbranch_scc1 .L{label}",
        ]

    lines = (
        loop("first", [MFMA])
        + ["s_mov_b32 s21, 0", ".Louter:"]
        + loop("second", [MFMA, MFMA])
        + ["s_add_i32 s21, s21, 1", "s_cmp_lt_i32 s21, 5", "s_cbranch_scc1 .Louter"]
        + loop("third", ["s_nop 0"] * 40)
    )
    path = assemble(assembly_kernel.HEAD + "\n".join(lines) + assembly_kernel.TAIL, "loop")
    # the outer loop is no innermost one
    assert [len(found.named("v_mfma")) for found in loops(path, "snippets")] == [1, 2, 0]
    assert inner_loop(path, "snippets").mfma_passes == 16


def test_machine_code_analysis_is_bound_by_the_matrix_pipe():
    report = machine_code_analysis(inner_loop(kernel("s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(0)"), "snippets"))
    assert report.block_throughput == 64.0  # eight instructions of eight passes
    assert report.cycles_an_iteration >= 64.0


def test_without_a_loop():
    path = assemble(assembly_kernel.HEAD + "s_nop 0" + assembly_kernel.TAIL, "loop")
    assert loops(path, "snippets") == []
    with pytest.raises(ValueError, match="snippets has no loop"):
        inner_loop(path, "snippets")
    with pytest.raises(ValueError, match="no kernel 'absent'"):
        loops(path, "absent")
