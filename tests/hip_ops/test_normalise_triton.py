# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that begins Newton-Schulz: torch's bits in the interpreter, and wide accesses on both platforms (no
GPU needed).
"""

import re

import pytest

from tests.gfx942.triton_objects import compiled_kernel
from tests.hip_ops.cpu_kernels import run_python

pytest.importorskip("triton")

PROGRAM = """
import torch
from hip_ops.ops.newton_schulz.reference import normalised
from hip_ops.ops.newton_schulz import triton as kernels

torch.manual_seed(2)
for shape in ((3, 70, 130), (2, 64, 64), (1, 3, 5)):
    x = torch.randn(shape) * torch.tensor([1.0, 1e-9, 1e4])[: shape[0], None, None]
    sums = x.square().sum((1, 2))
    for scale in (1.0, 2.0**-4):
        got = kernels.start_of(x, sums, 1e-7, scale, torch.empty_like(x))
        assert torch.equal(got, torch.mul(x, scale / sums.sqrt()[:, None, None].clamp_min(1e-7))), shape
        half = kernels.start_of(x, sums, 1e-7, scale, torch.empty_like(x, dtype=torch.float16))
        assert torch.equal(half, normalised(x, sums, 1e-7, scale, torch.empty_like(x, dtype=torch.float16))), shape
broken = torch.randn(2, 4, 8)
broken[0, 1, 2] = float("nan")
got = kernels.start_of(broken, broken.square().sum((1, 2)), 1e-7, 1.0, torch.empty_like(broken))
assert got[0].isnan().all() and got[1].isfinite().all()
padded = torch.zeros(2, 4, 8, dtype=torch.float16)[..., :5]  # not contiguous: torch's
got = kernels.start_of(torch.ones(2, 4, 5), torch.full((2,), 20.0), 1e-7, 1.0, padded)
assert torch.allclose(got.float(), torch.full((2, 4, 5), 20.0**-0.5), atol=1e-3)
print("right")
"""


@pytest.mark.slow
def test_in_the_interpreter():
    done = run_python(PROGRAM, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_compiled_it_reads_and_writes_16_bytes_at_a_time(target):
    import triton.language as tl

    from hip_ops.ops.newton_schulz import triton as kernels

    types = ("*bf16", "*fp32", "*fp16", "i32", "i32", "fp32", "fp32")
    compiled = compiled_kernel(
        kernels.normalise_kernel,
        ("cuda", 90, 32) if target == "cuda" else ("hip", "gfx942", 64),
        dict(zip(kernels.normalise_kernel.arg_names, types, strict=False)),
        {"DTYPE": tl.float16, "BLOCK": kernels.NORMALISE_BLOCK},
        ("x", "out", "numel"),
        num_warps=kernels.NORMALISE_WARPS,
    )
    text = compiled.asm["ptx" if target == "cuda" else "amdgcn"]
    if target == "cuda":
        assert re.search(r"ld\.global\.\S*v4\.b32", text) and re.search(r"st\.global\.v4\.b32", text)
        assert "sqrt.rn" in text and "div.rn" in text
    else:
        assert "buffer_load_dwordx4" in text or "global_load_dwordx4" in text
        assert "buffer_store_dwordx4" in text or "global_store_dwordx4" in text


@pytest.mark.parametrize("numel", [64 * 80, 33 * 65])
def test_on_gfx942_it_gives_torchs_bits(numel):
    import numpy as np
    import torch
    import triton.language as tl

    from hip_ops.ops.newton_schulz import triton as kernels
    from hip_ops.ops.newton_schulz.reference import normalised
    from tests.gfx942.emulator import Device
    from tests.gfx942.triton_objects import triton_code_object

    x = (torch.randn(2, 1, numel) * torch.tensor([1e-3, 30.0])[:, None, None]).bfloat16()
    sums = x.float().square().sum((1, 2))
    names = ("x", "square_sums", "out", "numel", "blocks", "scale", "eps")
    signature = dict(zip(names, ("*bf16", "*fp32", "*fp16", "i32", "i32", "fp32", "fp32"), strict=True))
    code = triton_code_object(
        kernels.normalise_kernel,
        signature,
        {"DTYPE": tl.float16, "BLOCK": kernels.NORMALISE_BLOCK},
        num_warps=4,
        divisible_by_16=("x", "out", "numel") if numel % 16 == 0 else ("x", "out"),
    )
    device, blocks = Device(), -(-numel // kernels.NORMALISE_BLOCK)
    given = device.put(x.view(torch.int16).numpy().view(np.uint16))
    out = device.alloc((2, numel), np.uint16)
    code.launch(
        device,
        (2 * blocks,),
        [given, device.put(sums.numpy()), out, np.int32(numel), np.int32(blocks), np.float32(0.25), np.float32(1e-7)],
    )
    got = torch.from_numpy(out.read().view(np.int16).copy()).view(torch.float16).reshape(x.shape)
    assert torch.equal(got, normalised(x, sums, 1e-7, 0.25, torch.empty_like(x, dtype=torch.float16)))
