# SPDX-License-Identifier: Apache-2.0
"""Test the Triton kernels of the CCA prologue as compiled for an H100: programs per multiprocessor, and data movement.

A loop that kept its addresses in registers once made the forward pass 40 % slower, because a multiprocessor held one
program instead of two; only a GPU run showed it.
"""

import pytest

from tests.hip_ops.compiled_for_hopper import compiled_for_hopper, programs

pytest.importorskip("triton")
ZAYA = {"HEADS": 8, "GROUPS": 2, "D": 128, "ROTARY": 64, "DELAYED": 128, "HAS_ROPE": True, "VALUES": 32, "STAGES": 2}


def prologue(which: str, **constexprs):
    """The kernel `which` for ZAYA1's heads in bf16."""
    from hip_ops.ops.cca_prologue import triton as cca_prologue
    from hip_ops.ops.cca_prologue import triton_backward as cca_prologue_backward
    from hip_ops.ops.cca_prologue import triton_forward as cca_prologue_forward
    from hip_ops.ops.cca_prologue import triton_rows as cca_prologue_rows

    chosen = cca_prologue.launch(which, 128, 10, 2, processors=132, warp_size=32)
    kernel = getattr(
        cca_prologue_forward if which == "forward" else cca_prologue_backward, f"cca_prologue_{which}_kernel"
    )
    constants = (
        ZAYA
        | {"BLOCK": chosen.rows, "OUT": chosen.columns, "ZERO_BLOCK": chosen.zero_rows, "INPUTS": chosen.inputs or 128}
        | constexprs
    )
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {
        name: "i64" if name.startswith("by_") else "i32"
        for name in kernel.arg_names
        if name in cca_prologue_rows.SIZES or name.endswith("_stride")
    }
    types |= {"eps": "fp32", "starts": "*u8"} | dict.fromkeys(
        ("rope", "constant", "inverse_norm", "partial", "partial_zero"), "*fp32"
    )
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names if name not in constants}
    divisible = [name for name, kind in signature.items() if kind != "fp32" and name not in cca_prologue_rows.SIZES]
    return compiled_for_hopper(
        kernel, signature, constants, divisible, **({"num_stages": chosen.stages} | chosen.options)
    )


@pytest.mark.parametrize("which", ["forward", "input"])
@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_are_copied_ahead_of_products_with_taps(tmp_path, which, more):
    compiled = prologue(which, HAS_HALO=more, HAS_STARTS=more)
    resident, stack = programs(compiled, tmp_path)
    assert resident == 1 and stack == 0
    taps, tile = 3 * 128 * 128 * 2, 64 * 128 * 2
    needed = taps + (1 + 2 + 2 + 2) * tile  # a row's own z, or dy, is in registers before the next one is copied
    assert needed <= compiled.metadata.shared <= needed + 1024, (
        "both halves of a product move to the layout of the loads and stores in registers"
    )
    loop = compiled.asm["ttgir"].partition("scf.for %")[2]
    assert loop.count("ttng.warp_group_dot ") == 3, "three products a tile"
    before, _, end = loop.partition("scf.if")
    assert before.count("ttg.async_copy_global_to_local") == 4, "the next tile's rows, before the end of this one"
    assert "ttg.local_alloc" not in loop, "taps stay in shared memory"
    assert "tt.store" not in before and "tt.store" in end


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True])
def test_the_weights_products_overlap(tmp_path, more):
    compiled = prologue("weight", HAS_HALO=more, HAS_STARTS=more)
    resident, stack = programs(compiled, tmp_path)
    assert resident == 1 and stack == 0
    assert "pendings = 3" in compiled.asm["ttgir"], "those of the tile before are on their way"
    assert compiled.asm["ptx"].count("cp.async.cg.shared.global") == 24, (
        "16 bytes at a time: two a thread of each of four tiles, at three places"
    )
