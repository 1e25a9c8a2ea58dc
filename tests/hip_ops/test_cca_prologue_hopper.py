# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the CCA prologue as an H100 would run them, compiled without one: how many programs a multiprocessor holds, and how data moves in them.

A loop that kept its addresses in registers once cost the forward 40 % of its time, for one program a multiprocessor instead of two; nothing but a
GPU noticed.
"""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
SHARED_MEMORY, RESERVED, REGISTERS = 233_472, 1024, 65_536  # of a multiprocessor of sm_90; of these the system's, a program
ZAYA = {"HEADS": 8, "GROUPS": 2, "D": 128, "ROTARY": 64, "DELAYED": 128, "HAS_ROPE": True}


def compiled_for_hopper(which: str, **constexprs):
    """The kernel `which` for ZAYA1's heads in bf16, and the Launch it is compiled for."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hip_ops.triton_kernels import cca_prologue, cca_prologue_backward, cca_prologue_forward, cca_prologue_rows

    chosen = cca_prologue.launch(which, 128, 10, 2, processors=132, warp_size=32)
    kernel = getattr(cca_prologue_forward if which == "forward" else cca_prologue_backward, f"cca_prologue_{which}_kernel")
    constants = ZAYA | {"BLOCK": chosen.block, "IN": chosen.part, "OUT": chosen.part, "ZERO_BLOCK": chosen.zero_block, "INPUTS": 128} | constexprs
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: "i64" if name.startswith("by_") else "i32" for name in kernel.arg_names if name in cca_prologue_rows.SIZES or name.endswith("_stride")}
    types |= {"eps": "fp32", "starts": "*u8"} | dict.fromkeys(("rope", "inverse_norm", "partial", "partial_zero"), "*fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
    divisible = [name for name, kind in signature.items() if kind not in ("constexpr", "fp32") and name not in cca_prologue_rows.SIZES]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants,
                       attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible})  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": chosen.stages} | chosen.options)


def programs(compiled, folder: Path) -> tuple[int, int]:
    """Programs that a multiprocessor holds at a time, and bytes of a thread's stack, to which registers spill."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        pytest.skip("this Triton comes without cuobjdump")
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    told = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr).groups())
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * compiled.metadata.num_warps)
    return min(by_registers, SHARED_MEMORY // (compiled.metadata.shared + RESERVED)), stack


def conversions(compiled, tile: str) -> int:
    return len(re.findall(rf"ttg\.convert_layout .*-> tensor<{tile}x\w+, #blocked", compiled.asm["ttgir"]))


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_programs_of_the_forward(tmp_path, more):
    compiled = compiled_for_hopper("forward", HAS_HALO=more, HAS_STARTS=more)
    resident, stack = programs(compiled, tmp_path)
    assert resident == 2 and stack <= 64
    assert compiled.asm["ttgir"].count("ttng.warp_group_dot ") == 1, "one product a tile"
    assert conversions(compiled, "64x64") == 2, "both halves of a product move to the layout of the loads and stores, nothing else does"
    loop = compiled.asm["ttgir"].rindex("scf.for %tile")
    assert compiled.asm["ttgir"].index("ttg.local_alloc") < loop, "weights stay in shared memory"


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_programs_of_the_inputs_gradient(tmp_path, more):
    compiled = compiled_for_hopper("input", HAS_HALO=more, HAS_STARTS=more)
    resident, stack = programs(compiled, tmp_path)
    assert resident == 2 and stack == 0
    assert compiled.asm["ttgir"].count("ttng.warp_group_dot ") == 3


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True])
def test_the_weights_products_overlap(tmp_path, more):
    compiled = compiled_for_hopper("weight", HAS_HALO=more, HAS_STARTS=more)
    resident, stack = programs(compiled, tmp_path)
    assert resident == 1 and stack == 0
    assert "pendings = 3" in compiled.asm["ttgir"], "those of the tile before are on their way"
    assert compiled.asm["ptx"].count("cp.async.cg.shared.global") == 24, "16 bytes at a time: two a thread of each of four tiles, at three places"
