# SPDX-License-Identifier: Apache-2.0
"""The router's Triton kernels in Triton's interpreter (fp32 and fp16: it multiplies the bits of bf16), which mistakes the comparison catches, and what the compilers make of them for Hopper and MI300X
(no GPU needed)."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.hip_ops.cpu_kernels import run_python

triton = pytest.importorskip("triton")
SHARED_MEMORY, RESERVED, REGISTERS = 233_472, 1024, 65_536  # of a multiprocessor of sm_90; of these the system's, a program
LDS = 65_536

PROGRAM = """
import sys
from pathlib import Path
from tests.hip_ops.router_bugs import check_ties, kernels
from tests.hip_ops.router_cases import Router, check_backward, check_forward

import torch
from hip_ops.triton_kernels import router_mlp as shipped

case = Router(130, 256, 17, torch.float16)  # tiles as on a GPU
check_forward(shipped, case)
check_backward(shipped, case)
module = kernels(Path(sys.argv[1]))
cases = [Router(37, 32, 5), Router(16, 64, 17, averaged=False), Router(1, 128, 16), Router(33, 256, 17, forced=False), Router(5, 32, 9, uses_state=False),
         Router(20, 64, 33, unweighted=False), Router(0, 32, 5)]
for block, part in ((16, 16), (32, 32)):
    module.launch = lambda width, *, backward: module.Launch(block, part, 4)
    for case in cases:
        check_forward(module, case)
        check_backward(module, case)
    check_ties(module)
print("right")
"""


def test_in_the_interpreter(tmp_path):
    done = run_python(PROGRAM, str(tmp_path), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]


def test_each_bug_is_caught(tmp_path):
    from tests.hip_ops.router_bugs import BUGS

    program = "import sys; from pathlib import Path; from tests.hip_ops.router_bugs import main; main(Path(sys.argv[1]))"
    done = run_python(program, str(tmp_path), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "right source: right" in done.stdout
    assert re.findall(r"(?:caught|MISSED) (\w+)", done.stdout) == list(BUGS) and "MISSED" not in done.stdout, done.stdout[-4000:]


def compiled(which: str, target, width: int = 256, classes: int = 17, **constexprs):
    """The kernel `which` in bf16 on the tile that the launcher takes."""
    from triton.compiler import ASTSource

    from hip_ops.reference.router_mlp import columns
    from hip_ops.triton_kernels import router_mlp as kernels

    kernel = getattr(kernels, f"router_mlp_{which}_kernel")
    chosen = kernels.launch(width, backward=which == "backward", warp_size=target.warp_size)
    constants = {"HAS_PREVIOUS": True, "HAS_FORCED": False, "HAS_D_STATE": True, "R": width, "CLASSES": classes, "COLUMNS": columns(classes),
                 "BLOCK": chosen.block, "PART": chosen.part} | constexprs  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = dict.fromkeys(("biases", "weights", "d_weights", "statistics", "sums"), "*fp32") | dict.fromkeys(("ids", "forced"), "*i64")
    types |= {"rows": "i32", "unweighted": "i32", "eps": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*")] + ["rows"]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants,
                       attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned})  # fmt: skip
    return triton.compile(source, target=target, options=chosen.options)


def registers_and_stack(made, folder: Path) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        pytest.skip("this Triton comes without cuobjdump")
    file = folder / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    told = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    return tuple(map(int, re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr).groups()))


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_two_programs_share_a_multiprocessor_of_hopper(tmp_path, which):
    from triton.backends.compiler import GPUTarget

    made = compiled(which, GPUTarget("cuda", 90, 32))
    registers, stack = registers_and_stack(made, tmp_path)
    assert stack == 0
    assert 2 * -(-registers // 8) * 8 * 32 * made.metadata.num_warps <= REGISTERS
    assert 2 * (made.metadata.shared + RESERVED) <= SHARED_MEMORY
    ttgir = made.asm["ttgir"]
    assert ttgir.count("ttng.warp_group_dot ") == 3, "products on tensor cores: three of the forward, three of the backward"
    assert "ttg.async_copy_global_to_local" in ttgir and "cp.async.ca" not in made.asm["ptx"], "matrices come 16 bytes at a time, ahead of their use"


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("width, classes", [(256, 17), pytest.param(32, 5, marks=pytest.mark.slow), pytest.param(128, 64, marks=pytest.mark.slow)])
def test_fits_an_mi300x(which, width, classes):
    from triton.backends.compiler import GPUTarget

    made = compiled(which, GPUTarget("hip", "gfx942", 64), width, classes)
    assert made.metadata.shared <= LDS
    for kept in (".vgpr_spill_count", ".private_segment_fixed_size"):
        assert int(re.search(rf"{kept}: +(\d+)", made.asm["amdgcn"])[1]) == 0, kept
    assert "v_mfma_f32" in made.asm["amdgcn"]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("width, classes", [(32, 5), (64, 17), (128, 64), (256, 33)])
def test_other_routers_compile_for_hopper(tmp_path, which, width, classes):
    from triton.backends.compiler import GPUTarget

    made = compiled(which, GPUTarget("cuda", 90, 32), width, classes, HAS_PREVIOUS=False, HAS_FORCED=True, HAS_D_STATE=False)
    assert registers_and_stack(made, tmp_path)[1] <= 64 and made.metadata.shared + RESERVED <= SHARED_MEMORY
