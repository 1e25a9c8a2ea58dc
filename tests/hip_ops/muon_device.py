# SPDX-License-Identifier: Apache-2.0
"""Runs gfx942 code objects of the Muon kernels - clang's of hip_ops/ops/muon/muon.hip and Triton's - on the lists of
muon_oracle in the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hip_ops.ops.muon.multi_tensor import ROW_WORDS, pack
from tests.gfx942.emulator import Buffer, Counters, Device
from tests.gfx942.triton_objects import triton_code_object
from tests.hip_ops.muon_oracle import Lists

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
BLOCKS = 3


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy().reshape(-1)


@dataclass
class Placed:
    """A tensor in device memory, `offset` elements into an allocation that ends with it."""

    buffer: Buffer
    offset: int
    like: torch.Tensor

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset * self.like.element_size()

    def read(self) -> torch.Tensor:
        raw = self.buffer.read()
        assert (raw[: self.offset].view(np.uint8) == 0xFF).all(), "elements before the tensor were written"
        values = torch.from_numpy(raw)[self.offset :]
        return (values.view(torch.bfloat16) if self.like.dtype == torch.bfloat16 else values).view(self.like.shape)


def place(device: Device, tensor: torch.Tensor, offset: int) -> Placed:
    values = numpy_of(tensor)
    array = (
        np.full(offset + values.size, -1, values.dtype)
        if values.dtype != np.float32
        else np.frombuffer(b"\xff" * 4 * (offset + values.size), np.float32).copy()
    )
    array[offset:] = values
    return Placed(device.put(array), offset, tensor)


@dataclass
class Columns:
    """Parallel lists on the device and their work table."""

    device: Device
    lists: list[list[torch.Tensor]]
    chunk_elements: int
    scales: list[float]
    offsets: list[tuple[int, ...]] | None = None
    placed: list[list[Placed]] = field(init=False)

    def __post_init__(self):
        count = len(self.lists[0])
        offsets = self.offsets or [(0,) * len(self.lists)] * count
        self.placed = [
            [place(self.device, t, offsets[i][c]) for i, t in enumerate(column)] for c, column in enumerate(self.lists)
        ]
        addresses = list(zip(*([p.address for p in column] for column in self.placed), strict=True))
        sizes = [column[0].element_size() for column in self.lists]
        data, self.chunks = pack(
            addresses, sizes, [t.numel() for t in self.lists[0]], self.scales, range(count), self.chunk_elements
        )
        self.table = self.device.put(data.numpy())
        self.chunk_rows = self.table.address + 8 * ROW_WORDS * count

    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(column[0].dtype for column in self.lists)

    def read(self, column: int) -> list[torch.Tensor]:
        return [p.read() for p in self.placed[column]]


def scalar(device: Device, value: float | None) -> Buffer | None:
    return None if value is None else device.put(np.array([value], np.float32))


def hip_momentum(
    code,
    columns: Columns,
    *,
    momentum=0.95,
    nesterov=True,
    grad_scale=None,
    found_inf=None,
    square_sums=False,
    blocks=BLOCKS,
    kernel=None,
    sums_code=None,
) -> tuple[Counters, np.ndarray | None]:
    """Counters of the main kernel, and the sums of squares. `kernel`, `sums_code`: another kernel of `code`, and where
    to sum instead.
    """
    device, count = columns.device, len(columns.lists[0])
    partials = device.alloc(columns.chunks, np.float32) if square_sums else None
    flag = scalar(device, found_inf)
    counters = device.launch(
        code,
        kernel or "ho_muon_momentum_" + "_".join(NAMES[d] for d in columns.dtypes()),
        (min(blocks, columns.chunks),),
        (256,),
        [
            columns.table,
            columns.chunk_rows,
            columns.chunks,
            columns.chunk_elements,
            scalar(device, grad_scale),
            flag,
            partials,
            momentum,
            float(np.float32(1 - momentum)),
            int(nesterov),
            1,
        ],
    )
    if not square_sums:
        return counters, None
    sums = device.put(np.full(count, 3.0, np.float32))
    device.launch(
        sums_code or code,
        "ho_muon_square_sums_kernel",
        (count,),
        (256,),
        [columns.table, columns.chunk_elements, flag, partials, sums],
    )
    return counters, sums.read()


def hip_update(
    code, columns: Columns, *, lr=0.02, lr_on_device=False, weight_decay=0.1, found_inf=None, blocks=BLOCKS, kernel=None
) -> Counters:
    device = columns.device
    return device.launch(
        code,
        kernel or "ho_muon_update_" + "_".join(NAMES[d] for d in columns.dtypes()),
        (min(blocks, columns.chunks),),
        (256,),
        [
            columns.table,
            columns.chunk_rows,
            columns.chunks,
            columns.chunk_elements,
            scalar(device, found_inf),
            scalar(device, lr if lr_on_device else None),
            0.0 if lr_on_device else lr,
            weight_decay,
        ],
    )


def _triton(function, columns: Columns, scalars: dict, constexprs: dict):
    """A kernel compiled as its launcher would: arguments that are None are compile-time constants."""
    import hip_ops.ops.muon.triton as kernels

    tile = kernels.tile_of(columns.dtypes(), 64)
    warps = tile.pop("num_warps")
    signature = {"words": "*i64", "chunk_rows": "*i32", "chunks": "i32"}
    values = {"words": columns.table, "chunk_rows": columns.chunk_rows, "chunks": np.int32(columns.chunks)}
    for name, value in scalars.items():
        if value is None:
            constexprs = constexprs | {name: None}
        else:
            signature[name], values[name] = (
                ("fp32", np.float32(value)) if isinstance(value, float) else ("*fp32", value)
            )
    constexprs = constexprs | tile | {"CHUNK": columns.chunk_elements}
    compiled = triton_code_object(function, signature, constexprs, num_warps=warps, divisible_by_16=["words"])
    return compiled, [values[name] for name in function.arg_names if name in values]


def triton_momentum(
    columns: Columns, *, momentum=0.95, nesterov=True, grad_scale=None, found_inf=None, square_sums=False, blocks=BLOCKS
):
    """As hip_momentum."""
    import hip_ops.ops.muon.triton as kernels

    device, count = columns.device, len(columns.lists[0])
    partials = device.alloc(columns.chunks, np.float32) if square_sums else None
    flag = scalar(device, found_inf)
    scalars = {
        "grad_scale": scalar(device, grad_scale),
        "found_inf": flag,
        "partials": partials,
        "momentum": momentum,
        "gradient_weight": 1 - momentum,
    }
    g, b, o = (kernels.TYPES[d] for d in columns.dtypes())
    compiled, args = _triton(
        kernels.muon_momentum_kernel, columns, scalars, dict(GRADIENT=g, MOMENTUM=b, OUTPUT=o, NESTEROV=nesterov)
    )
    counters = compiled.launch(device, (min(blocks, columns.chunks), 1, 1), args)
    if not square_sums:
        return counters, None
    sums = device.put(np.full(count, 3.0, np.float32))
    pointers = {"words": "*i64", "partials": "*fp32", "square_sums": "*fp32"} | (
        {} if flag is None else {"found_inf": "*fp32"}
    )
    constexprs = dict(CHUNK=columns.chunk_elements, BLOCK=1024) | ({"found_inf": None} if flag is None else {})
    compiled = triton_code_object(kernels.muon_square_sums_kernel, pointers, constexprs, divisible_by_16=["words"])
    compiled.launch(device, (count, 1, 1), [columns.table, *([] if flag is None else [flag]), partials, sums])
    return counters, sums.read()


def triton_update(
    columns: Columns, *, lr=0.02, lr_on_device=False, weight_decay=0.1, found_inf=None, blocks=BLOCKS
) -> Counters:
    """As hip_update."""
    import hip_ops.ops.muon.triton as kernels

    device = columns.device
    types = [kernels.TYPES[d] for d in columns.dtypes()]
    scalars = {
        "found_inf": scalar(device, found_inf),
        "lr_pointer": scalar(device, lr if lr_on_device else None),
        "lr": 0.0 if lr_on_device else lr,
        "weight_decay": weight_decay,
    }
    compiled, args = _triton(
        kernels.muon_update_kernel,
        columns,
        scalars,
        dict(UPDATE=types[0], WEIGHT=types[1], COPY=types[2] if len(types) > 2 else None),
    )
    return compiled.launch(device, (min(blocks, columns.chunks), 1, 1), args)


def momentum_columns(device: Device, lists: Lists, chunk_elements: int, offsets=None) -> Columns:
    return Columns(
        device, [lists.gradients, lists.momenta, lists.outputs], chunk_elements, [1.0] * len(lists.gradients), offsets
    )


def update_columns(
    device: Device, lists: Lists, scales, chunk_elements: int, offsets=None, with_masters=True
) -> Columns:
    columns = [lists.outputs, lists.masters, lists.params] if with_masters else [lists.outputs, lists.params]
    return Columns(device, columns, chunk_elements, list(scales), offsets)
