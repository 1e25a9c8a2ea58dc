# SPDX-License-Identifier: Apache-2.0
"""Test the scan for missing wait states on assembly written by hand: each rule with its distance, one wait state less,
through branches both ways; files and folders; the command, which checks wide stores only. test_budgets.py scans the objects of hip_ops.
"""

import shutil
import struct

import pytest

from hip_ops import __main__ as command
from hip_ops.runtime import hazards, rocm
from tests.gfx942 import wait_states
from tests.gfx942.assembly_kernel import HEAD, TAIL
from tests.gfx942.toolchain import assemble, code_object
from tests.tool import require_tool

MATRIX = "v_mfma_f32_32x32x8_bf16 a[0:15], v[2:3], v[4:5], a[0:15]"
SMALL = "v_mfma_f32_16x16x16_bf16 v[20:23], v[2:3], v[4:5], v[20:23]"
SINGLE = "v_mfma_f32_4x4x1_16b_f32 v[20:23], v2, v3, v[20:23]"
DOUBLE = "v_mfma_f64_16x16x4_f64 v[20:27], v[2:3], v[4:5], v[20:27]"
LITTLE = "v_mfma_f64_4x4x4_4b_f64 v[20:21], v[2:3], v[4:5], v[20:21]"
# first instruction, second instruction, wait states between them: each number is that of LLVM's rule
DISTANCES = {
    "global store": ("global_store_dwordx4 v1, v[8:11], s[4:5]", "v_mov_b32 v11, 0", 2),
    "store of three dwords": ("global_store_dwordx3 v1, v[8:10], s[4:5]", "v_mov_b32 v8, 0", 2),
    "flat store": ("flat_store_dwordx4 v[2:3], v[8:11]", "v_add_f32 v9, v1, v1", 2),
    "scratch store": ("scratch_store_dwordx4 v1, v[8:11], off", "v_mov_b32 v9, 0", 2),
    "buffer store": ("buffer_store_dwordx4 v[8:11], v1, s[8:11], 0 offen", "v_mov_b32 v8, 0", 2),
    "buffer store, SGPR offset": ("buffer_store_dwordx4 v[8:11], v1, s[8:11], s2 offen", "v_mov_b32 v8, 0", 1),
    "accumulators of a store": ("global_store_dwordx4 v1, a[8:11], s[4:5]", "v_accvgpr_write_b32 a9, v1", 2),
    "wide exchange": ("global_atomic_cmpswap_x2 v[2:3], v1, v[8:11], s[4:5] sc0", "v_mov_b32 v8, 0", 2),
    "matrix result, read": (MATRIX, "v_accvgpr_read_b32 v10, a3", 11),
    "matrix result, stored": (SMALL, "global_store_dword v1, v22, s[4:5]", 7),
    "matrix result, overwritten": (SMALL, "v_mov_b32 v23, 0", 7),
    "matrix result, loaded over": (SMALL, "global_load_dword v23, v1, s[4:5]", 7),
    "matrix result, next factor": (SMALL, "v_mfma_f32_16x16x16_bf16 v[24:27], v[20:21], v[4:5], v[24:27]", 7),
    "matrix result, other addend": (SMALL, "v_mfma_f32_16x16x16_bf16 v[30:33], v[2:3], v[4:5], v[22:25]", 5),
    "matrix addend, overwritten": (
        "v_mfma_f32_32x32x8_bf16 a[0:15], v[2:3], v[4:5], a[16:31]",
        "v_accvgpr_write_b32 a17, v1",
        7,
    ),
    "fp32 product, read": (SINGLE, "v_mov_b32 v1, v20", 4),
    "fp32 product, same addend": (SINGLE, SINGLE, 2),
    "fp64 product, read": (DOUBLE, "v_mov_b32 v1, v20", 11),
    "fp64 product, stored": (DOUBLE, "global_store_dword v1, v20, s[4:5]", 18),
    "small fp64 product, overwritten": (LITTLE, "v_mov_b32 v20, 0", 6),
    "small fp64 products": (LITTLE, LITTLE, 4),
    "factor": ("v_mov_b32 v2, 0", SMALL, 2),
    "DPP": ("v_mov_b32 v2, 0", "v_mov_b32_dpp v3, v2 row_shl:1 row_mask:0xf bank_mask:0xf", 2),
    "readlane": ("v_mov_b32 v2, 0", "v_readlane_b32 s2, v2, 0", 1),
    "transcendental": ("v_rcp_f32 v2, v3", "v_add_f32 v4, v2, v2", 1),
    "part of a register": (
        "v_add_u32_sdwa v2, v3, v4 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
        "v_mov_b32 v4, v2",
        1,
    ),
    "byte of a register": ("v_cvt_sr_fp8_f32 v2, v3, v4 op_sel:[0,0,1,0]", "v_mov_b32 v4, v2", 1),
    "high byte of a register": ("v_cvt_sr_bf8_f32 v2, v3, v4 op_sel:[0,0,0,1]", "v_mov_b32 v4, v2", 1),
    "dot product": ("v_dot2_f32_f16 v2, v3, v4, v5", "v_mov_b32 v6, v2", 3),
    "comparison": ("v_cmp_gt_f32 vcc, v2, v3", "v_cndmask_b32 v4, v2, v3, vcc", 2),
    "carry": ("v_add_co_u32 v2, vcc, v3, v4", "v_addc_co_u32 v3, vcc, v5, v6, vcc", 2),
    "address": ("v_readfirstlane_b32 s4, v2", "global_load_dword v3, v1, s[4:5]", 5),
    "chosen lane": ("v_readfirstlane_b32 s2, v2", "v_readlane_b32 s3, v4, s2", 4),
    "division": ("v_div_scale_f32 v2, vcc, v3, v4, v3", "v_div_fmas_f32 v5, v6, v7, v8", 4),
    "EXEC, matrix": ("v_cmpx_gt_f32 vcc, v2, v3", SMALL, 4),
    "EXEC, DPP": ("v_cmpx_gt_f32 vcc, v2, v3", "v_mov_b32_dpp v3, v5 row_shl:1 row_mask:0xf bank_mask:0xf", 5),
    "EXEC, lane": ("v_cmpx_gt_f32 vcc, v2, v3", "v_readlane_b32 s3, v4, 0", 4),
    "M0": ("s_mov_b32 m0, s2", "global_load_lds_dword v1, s[4:5]", 1),
    "mode": ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0", "s_getreg_b32 s2, hwreg(HW_REG_MODE)", 2),
}
# gfx950's where they are other ones, and those of its own instructions
WIDE = "v_mfma_f32_32x32x16_bf16 a[0:15], v[2:5], v[6:9], a[0:15]"
WIDE_SMALL = "v_mfma_f32_16x16x32_bf16 v[20:23], v[2:5], v[6:9], v[20:23]"
LITTLE_XDL = "v_mfma_f32_4x4x4_16b_f16 v[20:23], v[2:3], v[4:5], v[20:23]"
DISTANCES_OF_GFX950 = {
    "matrix result, read": (WIDE, "v_accvgpr_read_b32 v10, a3", 12),
    "matrix result, stored": (WIDE_SMALL, "global_store_dword v1, v22, s[4:5]", 8),
    "matrix result, overwritten": (WIDE_SMALL, "v_mov_b32 v23, 0", 8),
    "matrix result, loaded over": (WIDE_SMALL, "global_load_dword v23, v1, s[4:5]", 8),
    "narrow matrix result, read": (SMALL, "v_mov_b32 v1, v20", 8),
    "matrix result, next factor": (WIDE_SMALL, "v_mfma_f32_16x16x32_bf16 v[24:27], v[20:23], v[4:7], v[24:27]", 8),
    "matrix result, other addend": (WIDE_SMALL, "v_mfma_f32_16x16x32_bf16 v[30:33], v[2:5], v[6:9], v[22:25]", 6),
    "of two passes, read": (LITTLE_XDL, "v_mov_b32 v1, v20", 5),
    "of two passes, other addend": (LITTLE_XDL, "v_mfma_f32_4x4x4_16b_f16 v[30:33], v[2:3], v[4:5], v[22:25]", 4),
    "of two passes, other addend, fp32": (LITTLE_XDL, "v_mfma_f32_4x4x1_16b_f32 v[30:33], v2, v3, v[22:25]", 3),
    "addend, overwritten": (
        "v_mfma_f32_32x32x16_bf16 a[0:15], v[2:5], v[6:9], a[16:31]",
        "v_accvgpr_write_b32 a17, v1",
        7,
    ),
    "factor": ("v_mov_b32 v5, 0", WIDE_SMALL, 2),
    "fp32 product, read": (SINGLE, "v_mov_b32 v1, v20", 4),
    "fp64 product, read": (DOUBLE, "v_mov_b32 v1, v20", 19),
    "fp64 product, overwritten": (DOUBLE, "v_mov_b32 v20, 0", 11),
    "fp64 product, stored": (DOUBLE, "global_store_dword v1, v20, s[4:5]", 18),
    "fp64 product, next factor": (DOUBLE, "v_mfma_f64_16x16x4_f64 v[30:37], v[20:21], v[4:5], v[30:37]", 19),
    "fp64 product, other addend": (DOUBLE, "v_mfma_f64_16x16x4_f64 v[30:37], v[2:3], v[4:5], v[22:29]", 17),
    "swapped rows": ("v_mov_b32 v2, 0", "v_permlane32_swap_b32 v3, v2", 2),
    "swapped rows, first register": ("v_mov_b32 v2, 0", "v_permlane16_swap_b32 v2, v3", 2),
    "EXEC, swapped rows": ("v_cmpx_gt_f32 vcc, v2, v3", "v_permlane32_swap_b32 v4, v5", 4),
    "global store": ("global_store_dwordx4 v1, v[8:11], s[4:5]", "v_permlane32_swap_b32 v2, v9", 2),
    "table of three": ("v_bitop3_b16 v2, v3, v4, v5 bitop3:0x80 op_sel:[0,0,0,1]", "v_mov_b32 v4, v2", 1),
}
ALL_DISTANCES = {"gfx942": DISTANCES, "gfx950": DISTANCES_OF_GFX950}
NO_DISTANCE = {
    "store of two dwords": ("global_store_dwordx2 v1, v[8:9], s[4:5]", "v_mov_b32 v8, 0"),
    "another register": ("global_store_dwordx4 v1, v[8:11], s[4:5]", "v_mov_b32 v12, 0"),
    "VGPR for AGPR": ("global_store_dwordx4 v1, a[8:11], s[4:5]", "v_mov_b32 v8, 0"),
    "comparison": ("global_store_dwordx4 v1, v[8:11], s[4:5]", "v_cmp_gt_f32 vcc, v8, v9"),
    "load": ("global_store_dwordx4 v1, v[8:11], s[4:5]", "global_load_dword v8, v1, s[4:5]"),
    "same sum": (MATRIX, MATRIX),
    "scalar instruction": ("v_readfirstlane_b32 s4, v2", "s_add_u32 s5, s4, s4"),
}


def violations(*lines: str) -> list[hazards.Violation]:
    return wait_states.scan(assemble(HEAD + "\n".join(f"  {line}" for line in lines) + TAIL, "hazards"))


def nops(count: int) -> list[str]:
    """That many wait states; s_nop takes at most 7 + 1."""
    return [f"s_nop {min(8, count - done) - 1}" for done in range(0, count, 8)]


@pytest.fixture(scope="module")
def objects():
    """Target and case -> violations with all wait states, and with one less; one assembly for all of a target."""
    return {target: of_target(target, table) for target, table in ALL_DISTANCES.items()}


def of_target(target: str, distances: dict) -> dict:
    def functions(table):
        text = ""
        for number, (first, second, count) in enumerate(table):
            # s_nop before and behind: no case sees its neighbours
            text += "\n  ".join(["", f"case{number}:", *nops(19), first, *nops(count), second, *nops(19)])
        return wait_states.disassemble(assemble(HEAD + text + TAIL, "distances", target))

    rows = list(distances.values())
    enough = functions(rows)
    less = functions([(first, second, count - 1) for first, second, count in rows])
    found = [list(wait_states.violations(code)) for code in (enough, less)]
    return {
        name: [[one for one in part if one.function == f"case{number}"] for part in found]
        for number, name in enumerate(distances)
    }


@pytest.mark.parametrize("target, name", [(target, name) for target, table in ALL_DISTANCES.items() for name in table])
def test_each_distance(objects, target, name):
    first, second, count = ALL_DISTANCES[target][name]
    enough, less = objects[target][name]
    assert enough == []
    assert [(found.needed, found.waited) for found in less] == [(count, count - 1)]
    assert str(less[0]).endswith(")") and f"{count} are needed" in str(less[0])


@pytest.mark.parametrize("name", NO_DISTANCE)
def test_no_distance(name):
    assert violations(*NO_DISTANCE[name]) == []


LOADS = ("global_load_dword v8, v[8:9], off", "global_load_dword v10, v[12:13], off")
CLAUSES = {
    "own address": LOADS,
    "address of the next": ("global_load_dword v9, v[2:3], off", "global_load_dword v4, v[8:9], off"),
    "address of the one before": ("global_load_dword v4, v[8:9], off", "global_load_dword v9, v[2:3], off"),
    "data of a store": ("global_load_dword v4, v1, s[4:5]", "global_store_dword v1, v4, s[4:5]"),
    "flat and buffer": ("flat_load_dword v2, v[2:3]", "buffer_load_dword v4, v1, s[8:11], 0 offen"),
    "scalar": ("s_load_dword s8, s[4:5], 0x0", "s_load_dwordx2 s[4:5], s[6:7], 0x10"),
}


@pytest.mark.parametrize("name", CLAUSES)
def test_a_soft_clause_that_a_replay_would_break(name):
    first, second = CLAUSES[name]
    (found,) = violations(first, second, "s_endpgm")
    assert (found.rule, found.needed, found.waited) == (wait_states.SOFT_CLAUSE, 1, 0)
    assert violations(first, "s_nop 0", second, "s_endpgm") == []


def test_a_soft_clause_ends_with_its_block_its_kind_and_behind_five_instructions():
    first, second = CLAUSES["address of the one before"]
    harmless = [f"global_load_dword v{number}, v[2:3], off" for number in range(20, 25)]
    assert len(violations(first, *harmless[1:], second)) == 1 and violations(first, *harmless, second) == []
    assert violations("s_cbranch_scc1 there", first, "there:", second, "s_endpgm") == []
    assert violations(first, "ds_read_b32 v30, v31", second) == []
    assert violations("s_load_dword s4, s[6:7], 0x0", "global_load_dword v2, v1, s[4:5]") == []
    assert violations(*["global_store_dword v8, v9, s[4:5]"] * 2) == []


def test_objects_that_never_replay_have_no_soft_clauses(tmp_path):
    """e_flags of code that was compiled with XNACK off."""
    path = assemble(HEAD + "\n  ".join(["", *LOADS]) + TAIL, "replay")
    content = bytearray(path.read_bytes())
    (flags,) = struct.unpack_from("<I", content, 48)
    assert flags & 0x300 == 0x100 and len(wait_states.scan(path)) == 1
    struct.pack_into("<I", content, 48, flags & ~0x300 | 0x200)
    (off := tmp_path / "off.co").write_bytes(content)
    assert wait_states.scan(off) == []


STORE, OVERWRITE = "global_store_dwordx4 v1, v[8:11], s[4:5]", "v_mov_b32 v8, 0"


@pytest.mark.parametrize("wait, count", [([], 1), (["s_nop 0"], 0)])
def test_across_a_branch(wait, count):
    """Behind a branch forward the branch itself is one wait state; the other path is long enough."""
    found = violations(STORE, "s_cbranch_scc1 there", *nops(2), OVERWRITE, "there:", *wait, OVERWRITE, "s_endpgm")
    assert len(found) == count
    assert all((one.needed, one.waited) == (2, 1) for one in found)


@pytest.mark.parametrize("wait, count", [([], 1), (["s_nop 0"], 0)])
def test_around_a_loop(wait, count):
    """The store at a loop's end and the write at its head."""
    found = violations("again:", *wait, OVERWRITE, *nops(4), STORE, "s_cbranch_scc1 again", *nops(4))
    assert len(found) == count
    assert all("s_cbranch" not in one.second and one.waited == 1 for one in found)


def test_an_end_is_not_passed():
    assert violations(STORE, "s_endpgm", OVERWRITE) == []


def test_a_matrix_result_that_another_takes_over():
    """As in LLVM the nearest write counts: the first sum's four passes more are over when the second's are."""
    assert violations(SMALL, SMALL, *nops(7), "v_mov_b32 v1, v20") == []
    assert len(violations(SMALL, SMALL, *nops(6), "v_mov_b32 v1, v20")) == 1


def test_passes():
    """SISchedule.td, SIDPGFX940FullSpeedModel."""
    found = {
        name: wait_states.passes(name) for name in ("v_mfma_f32_32x32x8_bf16", "v_mfma_f32_16x16x16_bf16", "v_add_f32")
    }
    assert found == {"v_mfma_f32_32x32x8_bf16": 8, "v_mfma_f32_16x16x16_bf16": 4, "v_add_f32": 0}
    sixteen = (
        "v_mfma_f32_32x32x2_f32",
        "v_mfma_f32_32x32x1_2b_f32",
        "v_mfma_f32_32x32x4_2b_f16",
        "v_mfma_i32_32x32x4_2b_i8",
    )
    eight = (
        "v_mfma_f32_16x16x4_f32",
        "v_mfma_f32_16x16x4_4b_bf16",
        "v_mfma_f32_32x32x4_xf32",
        "v_mfma_i32_32x32x16_i8",
    )
    four = (
        "v_mfma_f32_16x16x8_xf32",
        "v_mfma_i32_16x16x32_i8",
        "v_smfmac_f32_16x16x32_bf16",
        "v_mfma_f64_4x4x4_4b_f64",
    )
    assert {*map(wait_states.passes, sixteen)} == {16} and {*map(wait_states.passes, eight)} == {8}
    assert wait_states.passes(WIDE.split()[0]) == 8 and wait_states.passes(WIDE_SMALL.split()[0]) == 4
    assert [wait_states.passes(DOUBLE.split()[0], gfx950) for gfx950 in (False, True)] == [8, 16]
    assert {*map(wait_states.passes, four)} == {4} and wait_states.passes("v_smfmac_f32_32x32x16_bf16") == 8


def test_folders_and_the_command(tmp_path, capsys):
    require_tool("llvm-objdump-19")
    good = code_object("muon")
    bad = assemble(HEAD + f"  {STORE}\n  {OVERWRITE}\n" + TAIL, "hazards")
    (tmp_path / "a").mkdir()
    shutil.copy(good, tmp_path / "a" / "muon.hsaco")
    (tmp_path / "a" / "muon.json").write_text("{}")
    assert hazards.files_in(tmp_path) == [tmp_path / "a" / "muon.hsaco"]
    assert command.main(["scan", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1 files, 0 violations\n"
    of_another_rule = assemble(HEAD + f"  {SMALL}\n  v_mov_b32 v23, 0\n" + TAIL, "hazards")
    assert len(wait_states.scan(of_another_rule)) == 2 and hazards.scan(of_another_rule) == []  # result and addend
    shutil.copy(bad, tmp_path / "a" / "bad.co")
    assert command.main(["scan", str(tmp_path)]) == 1
    assert "snippets: " in (text := capsys.readouterr().out) and "2 files, 1 violations" in text
    assert command.main(["scan", str(tmp_path / "a" / "muon.json")]) == 1
    assert "holds no gfx942 or gfx950 code" in capsys.readouterr().err


@pytest.fixture
def inductor(tmp_path_factory, monkeypatch):
    """The folder of torch.compile, instead of that of the user who runs the tests."""
    folder = tmp_path_factory.mktemp("torchinductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def test_a_triton_cache(tmp_path, monkeypatch, capsys, inductor):
    """The gfx942 objects of TRITON_CACHE_DIR; those of other architectures and other files are left out."""
    require_tool("llvm-objdump-19")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert hazards.triton_cache() == tmp_path and hazards.triton_objects() == []
    (tmp_path / "KEY").mkdir()
    content = code_object("muon").read_bytes()
    (tmp_path / "KEY" / "kernel.hsaco").write_bytes(content)
    (tmp_path / "KEY" / "other.hsaco").write_bytes(content[:48] + struct.pack("<I", 0x3F) + content[52:])  # gfx90a
    (tmp_path / "KEY" / "kernel.ttir").write_text("module")
    assert hazards.triton_objects() == [tmp_path / "KEY" / "kernel.hsaco"]
    assert command.main(["scan"]) == 0 and "1 files, 0 violations" in capsys.readouterr().out
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert hazards.triton_cache() == tmp_path / ".triton" / "cache"


def test_every_folder_of_triton_is_seen(tmp_path, monkeypatch, inductor):
    """That of TRITON_CACHE_DIR, Triton's default, and one a device of torch.compile, each once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(inductor / "triton" / "0"))  # as torch.compile sets it
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    places = [inductor / "triton" / "0", inductor / "triton" / "7", tmp_path / ".triton" / "cache"]
    expected = []
    for number, place in enumerate(places):
        (place / "KEY").mkdir(parents=True)
        expected.append(
            place / "KEY" / ("triton_poi_fused_add_0.hsaco" if number else "router_mlp_forward_kernel.hsaco")
        )
        shutil.copy(code_object("muon"), expected[-1])
    assert hazards.triton_folders() == sorted(places) and hazards.triton_objects() == sorted(expected)
    assert [hazards.is_inductors(path) for path in expected] == [False, True, True]
    assert list(map(hazards.operator_of, expected)) == ["router_mlp", None, None]
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert str(hazards.inductor_cache()) == default_cache_dir()


def test_objects_inside_a_library(tmp_path):
    """An offload bundle, as hipcc and clang embed it: a count, then offset, size and name of each part."""
    require_tool("llvm-objdump-19")
    bad = assemble(HEAD + f"  {STORE}\n  {OVERWRITE}\n" + TAIL, "hazards").read_bytes()
    names = (b"host-x86_64-unknown-linux-gnu-", b"hipv4-amdgcn-amd-amdhsa--gfx942")
    header = hazards._BUNDLE + struct.pack("<Q", 2)
    start = len(header) + sum(24 + len(name) for name in names)
    header += struct.pack("<QQQ", start, 0, len(names[0])) + names[0]
    header += struct.pack("<QQQ", start, len(bad), len(names[1])) + names[1]
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF" + bytes(200) + header + bad + bytes(50))
    assert len(hazards.scan(library)) == 1


def test_the_disassembler_of_rocm_s_wheel(monkeypatch, tmp_path):
    """Without ROCm on the machine: rocm-sdk-core holds LLVM's tools in a package's folder."""
    require_tool("llvm-objdump-19")
    tools = tmp_path / "_rocm_sdk_core" / "lib" / "llvm" / "bin"
    tools.mkdir(parents=True)
    (tools / "llvm-objdump").symlink_to(hazards.objdump())
    (tmp_path / "_rocm_sdk_core" / "__init__.py").touch()
    path = code_object("muon")
    for name in ("PATH", "ROCM_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(rocm, "DEFAULT_FOLDERS", ())
    monkeypatch.syspath_prepend(tmp_path)
    hazards.objdump.cache_clear()
    try:
        assert hazards.objdump() == str(tools / "llvm-objdump") and hazards.scan(path) == []
    finally:
        hazards.objdump.cache_clear()


def test_a_missing_disassembler(monkeypatch, tmp_path, capsys):
    path = code_object("muon")
    hazards.objdump.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr(rocm, "DEFAULT_FOLDERS", ())
    try:
        assert command.main(["scan", str(path)]) == 1
        assert "no llvm-objdump of LLVM 17 or newer" in capsys.readouterr().err
    finally:
        hazards.objdump.cache_clear()
