# SPDX-License-Identifier: Apache-2.0
"""The router's Triton kernels in Triton's interpreter (fp32 and fp16: it multiplies the bits of bf16), which mistakes
the comparison catches, and what the compilers make of them for Hopper and MI300X (no GPU needed).
"""

import re

import pytest

from tests.gfx942 import triton_cases
from tests.gfx942.budgets import LDS_A_CU, opcodes, resources
from tests.gfx942.toolchain import ARCH
from tests.hip_ops.compiled_for_hopper import compiled_for_hopper, programs
from tests.hip_ops.cpu_kernels import run_python

pytest.importorskip("triton")

PROGRAM = """
import sys
from pathlib import Path
from tests.hip_ops.router_bugs import check_ties, kernels
from tests.hip_ops.router_cases import Router, check_backward, check_forward

import torch
from hip_ops.ops.router_mlp import triton as shipped

case = Router(130, 256, 17, torch.float16)  # tiles as on a GPU
check_forward(shipped, case)
check_backward(shipped, case)
module = kernels(Path(sys.argv[1]))
cases = [Router(37, 32, 5), Router(16, 64, 17, averaged=False), Router(1, 128, 16), Router(33, 256, 17, forced=False),
    Router(5, 32, 9, uses_state=False),
         Router(20, 64, 33, unweighted=False), Router(0, 32, 5)]
for block, part in ((16, 16), (32, 32)):
    module.launch = lambda width, warp_size: module.Launch(block, part, 4, stages=2)
    module.parameters_launch = lambda width, warp_size: module.Launch(block, width // 2, 4, programs=2)
    for case in cases:
        check_forward(module, case)
        check_backward(module, case)
    check_ties(module)
print("right")
"""


@pytest.mark.slow  # test_router_mlp_gfx942.py runs the compiled kernels
def test_in_the_interpreter(tmp_path):
    done = run_python(PROGRAM, str(tmp_path), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]


@pytest.mark.slow  # it tests the tests
def test_each_bug_is_caught(tmp_path):
    from tests.hip_ops.router_bugs import BUGS

    program = (
        "import sys; from pathlib import Path; from tests.hip_ops.router_bugs import main; main(Path(sys.argv[1]))"
    )
    done = run_python(program, str(tmp_path), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "right source: right" in done.stdout
    assert re.findall(r"(?:caught|MISSED) (\w+)", done.stdout) == list(BUGS) and "MISSED" not in done.stdout, (
        done.stdout[-4000:]
    )


def router(which: str, width: int = 256, classes: int = 17, **constexprs):
    """The kernel `which` in bf16 on the tile that the launcher takes."""
    from hip_ops.ops.router_mlp import triton_kernels

    kernel = getattr(triton_kernels, f"router_mlp_{which}_kernel")
    chosen = triton_cases.router_launch(which, width, warp_size=32)
    constants = triton_cases.router_constants(width, classes, chosen) | constexprs
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = triton_cases.ROUTER_TYPES
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names if name not in constants}
    aligned = [name for name, kind in signature.items() if kind.startswith("*")] + ["rows"]
    return compiled_for_hopper(kernel, signature, constants, aligned, num_stages=chosen.stages, **chosen.options)


@pytest.mark.parametrize("which, resident", [("forward", 2), ("backward", 2), ("parameters", 1)])
def test_programs_share_a_multiprocessor_of_hopper(tmp_path, which, resident):
    compiled = router(which)
    assert programs(compiled, tmp_path) == (resident, 0)
    ttgir = compiled.asm["ttgir"]
    assert ttgir.count("ttng.warp_group_dot ") == 3, "products on tensor cores"
    assert "ttg.async_copy_global_to_local" in ttgir and "cp.async.ca" not in compiled.asm["ptx"], (
        "matrices come 16 bytes at a time, ahead of their use"
    )


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "backward", "parameters"])
@pytest.mark.parametrize("width, classes", [(32, 5), (128, 64)])
def test_other_routers_fit_an_mi300x(which, width, classes):
    """ZAYA1's is held to its row of tests/gfx942/budgets.toml."""
    compiled = triton_cases.router_mlp(which, width, classes)
    used = resources(compiled.path, compiled.name, compiled.shared, compiled.threads)
    assert used.lds <= LDS_A_CU[ARCH] and used.vgpr_spills == used.scratch == 0
    assert any("v_mfma_f32" in name for name in opcodes(compiled.path, compiled.name))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "backward", "parameters"])
@pytest.mark.parametrize("width, classes", [(32, 5), (64, 17), (128, 64), (256, 33)])
def test_other_routers_compile_for_hopper(tmp_path, which, width, classes):
    resident, stack = programs(
        router(which, width, classes, HAS_PREVIOUS=False, HAS_FORCED=True, HAS_D_STATE=False), tmp_path
    )
    assert resident >= 1 and stack <= 64
