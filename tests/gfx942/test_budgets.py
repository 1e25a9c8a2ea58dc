# SPDX-License-Identifier: Apache-2.0
"""Test that every kernel of hip_ops stays within its row of budgets.toml and lacks no wait states, and that the checks
can fail.
"""

import ctypes
import re
from collections import Counter
from dataclasses import replace

import pytest

from hip_ops.runtime import hazards
from hip_ops.runtime.build import kernel_sources
from tests.gfx942 import budgets, wait_states
from tests.gfx942.toolchain import (
    COMPILED,
    TARGETS,
    WITHOUT_KERNELS,
    compiled_objects,
    host_library,
    resource_remarks,
    shipped_object,
    source_path,
)
from tests.hip_ops.kernel_files import kernel_source

FOUND = budgets.Resources(
    vgprs=100, agprs=64, sgprs=40, lds=16384, scratch=0, vgpr_spills=0, sgpr_spills=0, waves_per_simd=3
)
ROW = {
    "vgprs": 100,
    "agprs": 64,
    "sgprs": 40,
    "lds": 16384,
    "sgpr_spills": 0,
    "waves_per_simd": 3,
    "requires": ["v_mfma_f32_32x32x8_bf16"],
}
PRESENT = Counter({"v_mfma_f32_32x32x8_bf16": 16})


HOW = "if this is meant: python -m tests.gfx942.budgets --write"


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_hip_kernels_are_within_their_rows(target):
    table = {source: rows for source, rows in budgets.read_table()[target].items() if source != budgets.TRITON}
    problems = budgets.compare(table, budgets.hip_kernels(target))
    assert not problems, "\n".join([*problems, HOW])


def test_gfx950_multiplies_with_the_wide_instructions_only():
    """Each kernel of the same sources that has matrix products."""
    one, other = (budgets.read_table()[target] for target in TARGETS)
    assert one.keys() - {budgets.TRITON} == other.keys()
    wide = 0
    for source, kernels in other.items():
        assert kernels.keys() == one[source].keys()
        for name, row in kernels.items():
            if name == "ho_cca_prologue_backward_weights":  # its operands lie in LDS in rows of four
                continue
            narrow = [opcode for opcode in one[source][name]["requires"] if opcode.startswith("v_mfma")]
            expected = [opcode.replace("x8_", "x16_") for opcode in narrow]
            assert [opcode for opcode in row["requires"] if opcode.startswith("v_mfma")] == expected, name
            wide += len(narrow)
    assert wide == 18


@pytest.mark.slow  # it compiles all of Triton's kernels; tests/hip_ops runs them in the emulator
def test_triton_kernels_are_within_their_rows():
    pytest.importorskip("triton")
    rows = budgets.read_table()["gfx942"][budgets.TRITON]
    problems = budgets.compare({budgets.TRITON: rows}, budgets.triton_kernels())
    assert not problems, "\n".join([*problems, HOW])


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["clang", "triton"])
def test_no_object_lacks_wait_states(compiler):
    """Of hip_ops, by clang 19 and by the pinned Triton too. With one wait state more asked of wide stores many are
    reported, so the scan sees them.
    """
    paths = compiled_objects(kernel_sources())
    if compiler == "triton":
        pytest.importorskip("triton")
        paths += {found.path for found in budgets.triton_objects().values()}
    code = [wait_states.disassemble(path) for path in paths]
    assert [str(one) for functions in code for one in wait_states.violations(functions)] == []
    asked = [one for functions in code for one in wait_states.violations(functions, extra=1)]
    stores = sum(bool(each.stored[0]) for functions in code for part in functions.values() for each in part)
    assert all((one.needed, one.waited) == (3, 2) for one in asked), asked
    assert stores > 200 and 5 * len(asked) > stores / 2, (len(asked), stores)


PACKED, SPILL = "packed operation", "spilled tuple"


def without_a_hazard(before: list[wait_states.Instruction], after: wait_states.Instruction) -> str | None:
    """Name the reason for which clang 19 places s_nop at this place though gfx942 has no such hazard, or return None.
    Both come from checkVALUHazards of LLVM's GCNHazardRecognizer.cpp.

    PACKED: the rule for results that are written in part (hasDstSelForwardingHazard) asks every VALU instruction with
    op_sel for the bit DST_OP_SEL of the first operand's modifiers. SIDefines.h gives OP_SEL_1 the same bit, which
    packed operations use for their op_sel_hi; they write whole registers.

    SPILL: spillSGPR of SIRegisterInfo.cpp gives the first v_writelane of a tuple of scalar registers an implicit
    definition of the tuple, and the rule for scalar results (hasVDecCoExecHazard) believes that it writes the tuple.
    """
    last = before[-1]
    op_sel_hi = re.search(r"op_sel_hi:\[(\d)", last.text)
    whole = last.name.startswith("v_pk_") or last.name == "v_fma_mix_f32"
    if whole and (op_sel_hi[1] == "1" if op_sel_hi else last.name != "v_fma_mix_f32"):
        return PACKED if last.writes & after.reads else None

    def slot(each: wait_states.Instruction) -> tuple[str, int, int]:
        """Vector register, scalar register less lane, lane: a tuple's registers lie in neighbouring lanes."""
        lane = int(each.operands[2])
        return each.operands[0], each.masks[1].bit_length() - lane, lane

    spills = [slot(each) for each in (*before[-2:], after) if each.name == after.name == "v_writelane_b32"]
    return SPILL if any(one[:2] == spills[-1][:2] and one[2] < spills[-1][2] for one in spills[:-1]) else None


def last_nops(code: list[wait_states.Instruction]) -> list[int]:
    """Return the place of the last s_nop of each group that is executed; those behind an end or an unconditional branch
    are not, unless a branch leads there.
    """
    found, reached, targets = [], True, {each.target for each in code}
    for place, each in enumerate(code[:-1]):
        reached = reached or each.pc in targets
        if each.name == "s_nop" and code[place + 1].name != "s_nop" and reached:
            found.append(place)
        if each.name != "s_nop":
            reached = each.name not in ("s_endpgm", "s_branch")
    return found


# An `asm volatile("" : "+v"(x))`, of which no instruction is left. LLVM 22 takes it for one that writes x in part and puts
# a wait state before the next VALU instruction with x (checkVALUHazards, isInlineAsm).
ASSEMBLY, WITH_ASSEMBLY = "empty assembly", ("cca_prologue_backward", "symmetric_product", "vocabulary_exponentials")
TAKEN_AWAY = {
    "gfx942": {"violation": 1550, "violation behind a branch": 5, PACKED: 115, SPILL: 3},
    "gfx950": {"violation": 1549, "violation behind a branch": 5, PACKED: 125, SPILL: 3, ASSEMBLY: 76},
}


@pytest.mark.slow  # it tests the scan; tests/gfx942/test_hazards.py does so for each rule
@pytest.mark.parametrize("target", TARGETS)
def test_wait_states_that_are_taken_away_are_detected(target):
    """One less at each group of s_nop that clang 19 placed in all objects is detected by the scan, or has one of the
    reasons in TAKEN_AWAY that are no hazard. The numbers change with the kernels' code; that none is missed does not. The same of
    what clang 22 placed in the objects that ship for gfx950.
    """
    found, rules = Counter(), Counter()
    sources = kernel_sources()
    shipped = (shipped_object(source, target) for source in sources if source.stem != WITHOUT_KERNELS)
    for path in compiled_objects(sources) if target == "gfx942" else shipped:
        for code in wait_states.disassemble(path).values():
            for place in last_nops(code):
                start = max(0, place - 24)
                part = [replace(each, target=None) for each in code[start : place + 25]]
                part[place - start].wait_states -= 1
                if broken := {one.rule for one in wait_states.violations({"part": part})}:
                    rules.update(broken)
                    found["violation"] += 1
                elif reason := without_a_hazard(code[start:place], code[place + 1]):
                    found[reason] += 1
                else:  # the first instruction may be behind a branch
                    code[place].wait_states -= 1
                    broken = list(wait_states.violations({"function": code}))
                    code[place].wait_states += 1
                    assembly = target == "gfx950" and path.name.startswith(WITH_ASSEMBLY) and code[place + 1].valu
                    if not broken and assembly and code[place].wait_states == 1:
                        found[ASSEMBLY] += 1
                        continue
                    assert broken, (path.stem, *map(str, code[place - 8 : place + 2]))
                    found["violation behind a branch"] += 1
    assert found == TAKEN_AWAY[target]
    assert rules[hazards.WIDE_STORE.name] >= 40 and rules[wait_states.SOFT_CLAUSE] >= 40 and len(rules) >= 5, rules


# tools.ship compiles all of them, and tests/hip_ops/test_shipped.py fails where it did not run after a change.
@pytest.mark.parametrize(
    "source",
    [pytest.param(path.stem, marks=[] if path.stem == "muon" else pytest.mark.slow) for path in kernel_sources()],
)
def test_host_side_compiles_and_links(source):
    library = ctypes.CDLL(str(host_library(source)))
    launchers = re.findall(r"^HO_EXPORT int (\w+)\(", source_path(source).read_text(), re.M)
    assert launchers and all(hasattr(library, name) for name in launchers)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(path.stem, marks=[] if path.stem in COMPILED else pytest.mark.slow)
        for path in kernel_sources()
        if path.stem != WITHOUT_KERNELS
    ],
)
def test_occupancy_agrees_with_the_compiler(source):
    remarks = resource_remarks(source)
    for name, (found, _) in budgets.kernels_of(kernel_source(f"{source}.hip")).items():
        assert found.waves_per_simd == remarks[name]["Occupancy [waves/SIMD]"], name
        assert found.scratch == remarks[name]["ScratchSize [bytes/lane]"], name


def test_a_kernel_within_its_row_passes():
    assert budgets.violations(FOUND, ROW, PRESENT) == []


@pytest.mark.parametrize(
    "change",
    [
        {"vgprs": 101},
        {"agprs": 65},
        {"sgprs": 41},
        {"lds": 16385},
        {"scratch": 4},
        {"vgpr_spills": 1},
        {"sgpr_spills": 1},
        {"waves_per_simd": 2},
    ],
)
def test_each_limit_can_break(change):
    found = budgets.violations(replace(FOUND, **change), ROW, PRESENT)
    assert len(found) == 1 and next(iter(change)) in found[0]


def test_a_lost_instruction_breaks():
    assert budgets.violations(FOUND, ROW, Counter()) == ["v_mfma_f32_32x32x8_bf16 is missing"]


def test_rows_and_kernels_must_match():
    found = {"muon": {"ho_a": (FOUND, PRESENT)}}
    assert budgets.compare({"muon": {"ho_a": ROW}}, found) == []
    assert budgets.compare({}, found) == ["muon: kernel ho_a has no row"]
    assert budgets.compare({"muon": {"ho_a": ROW, "ho_b": ROW}}, found) == ["muon: row ho_b has no kernel"]
    assert budgets.compare({"gone": {"ho_b": ROW}}, {}) == ["gone: row ho_b has no kernel"]


def test_rendered_table_reads_back_and_keeps_requirements(tmp_path):
    found = {"muon": {"ho_a": (FOUND, Counter({"v_mfma_f32_32x32x8_bf16": 1, "ds_read_b128": 2}))}}
    path = tmp_path / "budgets.toml"
    path.write_text(budgets.render({"gfx950": found}, {}))
    table = budgets.read_table(path)["gfx950"]
    assert table["muon"]["ho_a"]["requires"] == ["v_mfma_f32_32x32x8_bf16", "ds_read_b128"]
    assert budgets.compare(table, found) == []
    kept = budgets.render({"gfx950": found}, {"gfx950": {"muon": {"ho_a": {"requires": ["global_load_dwordx4"]}}}})
    path.write_text(kept)
    table = budgets.read_table(path)["gfx950"]
    assert budgets.compare(table, found) == ["muon: ho_a: global_load_dwordx4 is missing"]
