# SPDX-License-Identifier: Apache-2.0
"""A gfx942 kernel written by hand around a list of instructions, to compare their values with numpy's.

Every lane loads four dwords into v4..v7. Each snippet leaves its result in v8 (and v9); a store follows. One kernel
holds all snippets, so that a table of a hundred opcodes costs one assembly and one launch.
"""

from collections.abc import Sequence

import numpy as np

from tests.gfx942.emulator import Device
from tests.gfx942.toolchain import ARCH, assemble

HEAD = """
.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
.text
.globl snippets
.p2align 8
.type snippets,@function
snippets:
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_waitcnt lgkmcnt(0)
  v_lshlrev_b32_e32 v1, 4, v0
  v_lshlrev_b32_e32 v2, 3, v0
  global_load_dwordx4 v[4:7], v1, s[4:5]
  s_waitcnt vmcnt(0)
"""
_STORE = """
  global_store_dwordx2 v2, v[8:9], s[6:7]
  s_add_u32 s6, s6, 512
  s_addc_u32 s7, s7, 0
"""
TAIL = """
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel snippets
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_kernarg_size 16
  .amdhsa_group_segment_fixed_size 4096
  .amdhsa_next_free_vgpr 128
  .amdhsa_accum_offset 64
  .amdhsa_next_free_sgpr 96
  .amdhsa_float_denorm_mode_32 3
  .amdhsa_float_denorm_mode_16_64 3
  .amdhsa_system_vgpr_workitem_id 0
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: snippets
    .symbol: snippets.kd
    .kernarg_segment_size: 16
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 4096
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .sgpr_count: 96
    .sgpr_spill_count: 0
    .vgpr_count: 128
    .vgpr_spill_count: 0
    .agpr_count: 64
    .max_flat_workgroup_size: 64
    .args:
      - {.address_space: global, .offset: 0, .size: 8, .value_kind: global_buffer}
      - {.address_space: global, .offset: 8, .size: 8, .value_kind: global_buffer}
...
.end_amdgpu_metadata
"""


def run_snippets(snippets: Sequence[str], inputs: np.ndarray, target: str = ARCH) -> np.ndarray:
    """inputs uint32 [64, 4] -> results uint32 [snippets, 64, 2]; the second dword is 0 where a snippet does not write
    v9.
    """
    assert inputs.shape == (64, 4) and inputs.dtype == np.uint32
    body = "".join(f"  v_mov_b32 v8, 0\n  v_mov_b32 v9, 0\n  {snippet}\n{_STORE}" for snippet in snippets)
    path = assemble(HEAD + body + TAIL, "snippets", target)
    device = Device()
    source, target = device.put(inputs), device.alloc((len(snippets), 64, 2), np.uint32)
    device.launch(path, "snippets", 1, 64, [source, target])
    return target.read()
