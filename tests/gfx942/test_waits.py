# SPDX-License-Identifier: Apache-2.0
"""Test the scoreboard of s_waitcnt, and the wait states behind wide stores, on handwritten sequences that must pass and
that must fail.
"""

import numpy as np
import pytest

from tests.gfx942.assembly_kernel import run_snippets
from tests.gfx942.emulator.faults import MissingWait, MissingWaitStates, UninitialisedRegister

INPUTS = np.arange(256, dtype=np.uint32).reshape(64, 4)
TWO_LOADS = "global_load_dword v8, v1, s[4:5]\n  global_load_dword v9, v1, s[4:5] offset:4\n  "
TWO_READS = "ds_write_b64 v2, v[4:5]\n  ds_read_b32 v8, v2\n  ds_read_b32 v9, v2 offset:4\n  "
PASS = {
    "loads in order": TWO_LOADS + "s_waitcnt vmcnt(1)\n  v_mov_b32 v10, v8\n  s_waitcnt vmcnt(0)\n  v_mov_b32 v10, v9",
    "a store counts too": "global_load_dword v8, v1, s[4:5]\n  global_store_dword v2, v4, s[6:7]\n  s_waitcnt vmcnt(1)\n  v_mov_b32 v10, v8",
    "LDS reads in order": TWO_READS + "s_waitcnt lgkmcnt(1)\n  v_mov_b32 v10, v8\n  s_waitcnt lgkmcnt(0)",
    "scalar load": "s_load_dword s20, s[4:5], 0x0\n  s_waitcnt lgkmcnt(0)\n  s_add_u32 s20, s20, 1",
    "both kinds": "s_load_dword s20, s[4:5], 0x0\n  "
    + TWO_READS
    + "s_waitcnt lgkmcnt(0)\n  v_mov_b32 v10, s20\n  v_mov_b32 v10, v9",
    "data of a store may be overwritten": "global_store_dword v2, v8, s[6:7]\n  v_mov_b32 v8, 1",
    "a second load to the same register": "global_load_dword v8, v1, s[4:5]\n  global_load_dword v8, v1, s[4:5] offset:4\n  s_waitcnt vmcnt(0)",
}
FAIL = {
    "no wait": ("global_load_dword v8, v1, s[4:5]\n  v_mov_b32 v10, v8", "v8 is read"),
    "the later load": (TWO_LOADS + "s_waitcnt vmcnt(1)\n  v_mov_b32 v10, v9", "v9 is read"),
    "the wrong counter": (
        "global_load_dword v8, v1, s[4:5]\n  s_waitcnt lgkmcnt(0)\n  v_mov_b32 v10, v8",
        "v8 is read",
    ),
    "as the address of a store": (
        "global_load_dword v8, v1, s[4:5]\n  global_store_dword v8, v4, s[6:7]",
        "v8 is read",
    ),
    "overwritten": ("global_load_dword v8, v1, s[4:5]\n  v_mov_b32 v8, 0", "v8 is overwritten"),
    "LDS": (TWO_READS + "s_waitcnt lgkmcnt(1)\n  v_mov_b32 v10, v9", "v9 is read"),
    "LDS permute": ("ds_bpermute_b32 v8, v2, v4\n  v_mov_b32 v10, v8", "v8 is read"),
    "scalar": ("s_load_dwordx2 s[20:21], s[4:5], 0x0\n  s_add_u32 s22, s21, 1", "s21 is read"),
    "scalar loads come in any order": (
        "s_load_dword s20, s[4:5], 0x0\n  s_load_dword s21, s[4:5], 0x4\n  s_waitcnt lgkmcnt(1)\n  s_mov_b32 s22, s20",
        "s20 is read",
    ),
    "a scalar load spoils the order of LDS": (
        TWO_READS.replace("  ds_read_b32 v9", "  s_load_dword s20, s[4:5], 0x0\n  ds_read_b32 v9")
        + "s_waitcnt lgkmcnt(1)\n  v_mov_b32 v10, v8",
        "v8 is read",
    ),
    "the next one of a wide load": ("global_load_dwordx4 v[12:15], v1, s[4:5]\n  v_mov_b32 v10, v15", "v15 is read"),
    "an accumulator": ("global_load_dword a4, v1, s[4:5]\n  v_accvgpr_read_b32 v10, a4", "a4 is read"),
}


@pytest.mark.parametrize("name", PASS)
def test_sufficient(name):
    run_snippets([PASS[name] + "\n  s_waitcnt vmcnt(0) lgkmcnt(0)"], INPUTS)


@pytest.mark.parametrize("name", FAIL)
def test_missing(name):
    snippet, message = FAIL[name]
    with pytest.raises(MissingWait, match=message) as caught:
        run_snippets([snippet], INPUTS)
    assert (caught.value.kernel, caught.value.block, caught.value.wave) == ("snippets", 0, 0)


SPILL = (
    "v_mov_b32 v16, 0\n  v_writelane_b32 v16, s60, 3\n  s_mov_b32 s61, 7\n  v_writelane_b32 v16, s61, 4\n  s_nop 3\n  "
)


def test_an_unset_register_goes_through_a_lane():
    """A compiler's spill of a group with an unset register is no fault; its use after the reload is."""
    run_snippets(
        [SPILL + "v_readlane_b32 s62, v16, 3\n  v_readlane_b32 s63, v16, 4\n  s_load_dword s64, s[4:5], s63"], INPUTS
    )
    with pytest.raises(UninitialisedRegister, match="s62 was never written"):
        run_snippets([SPILL + "v_readlane_b32 s62, v16, 3\n  s_load_dword s64, s[4:5], s62"], INPUTS)


WIDE = "global_store_dwordx4 v1, v[12:15], s[4:5]\n  "
READY = "v_mov_b32 v12, v4\n  v_mov_b32 v13, v4\n  v_mov_b32 v14, v4\n  v_mov_b32 v15, v4\n  "
ROUND = "s_mov_b32 s20, 2\n.Lagain:\n  {head}v_mov_b32 v14, v5\n  s_nop 3\n  " + WIDE + "s_sub_u32 s20, s20, 1\n  "
ROUND += "s_cmp_lg_u32 s20, 0\n  {end}s_cbranch_scc1 .Lagain"
# enough wait states, and one less
STORES = {
    "two instructions": (WIDE + "s_nop 1\n  v_mov_b32 v15, v5", WIDE + "s_nop 0\n  v_mov_b32 v15, v5"),
    "another register": (WIDE + "v_mov_b32 v16, v5", WIDE + "v_mov_b32 v12, v5"),
    "eight bytes": ("global_store_dwordx2 v1, v[12:13], s[4:5]\n  v_mov_b32 v12, v5", WIDE + "v_mov_b32 v12, v5"),
    "a branch that is taken": (
        WIDE + "s_branch .Lthere\n  s_nop 7\n.Lthere:\n  s_nop 0\n  v_mov_b32 v12, v5",
        WIDE + "s_branch .Lthere\n  s_nop 7\n.Lthere:\n  v_mov_b32 v12, v5",
    ),
    "around a loop": (
        ROUND.format(head="", end=""),
        "s_mov_b32 s20, 2\n  s_cmp_lg_u32 s20, 0\n.Lagain:\n  v_mov_b32 v14, v5\n  s_nop 3\n  s_cmp_lg_u32 s20, 0\n  s_mov_b32 s20, 0\n  "
        + WIDE
        + "s_cbranch_scc1 .Lagain",
    ),
}


@pytest.mark.parametrize("name", STORES)
def test_data_of_a_wide_store(name):
    enough, less = STORES[name]
    run_snippets([READY + enough], INPUTS)
    with pytest.raises(MissingWaitStates, match="data of `global_store_dwordx4 .* too early") as caught:
        run_snippets([READY + less], INPUTS)
    assert caught.value.instruction.startswith("v_mov_b32") and (caught.value.block, caught.value.wave) == (0, 0)
