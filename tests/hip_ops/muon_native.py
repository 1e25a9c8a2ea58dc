# SPDX-License-Identifier: Apache-2.0
"""Calls the launchers of hip_ops/ops/muon/muon.hip, built for the CPU, on lists of tensors with any chunk size and grid
(the operators fix both).
"""

from __future__ import annotations

import torch

from hip_ops.ops.muon.multi_tensor import pack
from tests.hip_ops.cpu_kernels import CpuKernels


def table_of(columns, scales, chunk_elements: int) -> tuple[torch.Tensor, int]:
    addresses = list(zip(*([t.data_ptr() for t in column] for column in columns), strict=True))
    sizes = [column[0].element_size() for column in columns]
    return pack(addresses, sizes, [t.numel() for t in columns[0]], scales, range(len(scales)), chunk_elements)


def momentum(
    kernels: CpuKernels,
    lists,
    *,
    momentum=0.95,
    nesterov=True,
    grad_scale=None,
    found_inf=None,
    square_sums=None,
    chunk_elements=4096,
    blocks=3,
) -> int:
    columns = [lists.gradients, lists.momenta, lists.outputs]
    table, chunks = table_of(columns, [1.0] * len(columns[0]), chunk_elements)
    partials = None if square_sums is None else torch.full((chunks,), float("nan"))
    return kernels.ho_muon_momentum(
        table,
        len(columns[0]),
        chunks,
        chunk_elements,
        blocks,
        *(c[0].element_size() for c in columns),
        grad_scale,
        found_inf,
        partials,
        square_sums,
        momentum,
        1 - momentum,
        nesterov,
        True,
        None,
    )


def update(
    kernels: CpuKernels,
    lists,
    *,
    scales,
    lr=0.02,
    lr_tensor=None,
    weight_decay=0.1,
    found_inf=None,
    chunk_elements=4096,
    blocks=3,
) -> int:
    columns = [lists.outputs, lists.masters, lists.params]
    table, chunks = table_of(columns, scales, chunk_elements)
    return kernels.ho_muon_update(
        table,
        len(scales),
        chunks,
        chunk_elements,
        blocks,
        *(c[0].element_size() for c in columns),
        found_inf,
        lr_tensor,
        lr,
        weight_decay,
        None,
    )
