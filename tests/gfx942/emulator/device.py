# SPDX-License-Identifier: Apache-2.0
"""Buffers and kernel launches, as a test uses them."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.gfx942.emulator.arena import BASE, Arena
from tests.gfx942.emulator.code_object import Argument, CodeObject, KernelInfo, open_code_object
from tests.gfx942.emulator.counters import XCDS, Counters, InstructionCount
from tests.gfx942.emulator.faults import OutOfBounds, ScratchAccess, UnknownInstruction
from tests.gfx942.emulator.lds import Lds
from tests.gfx942.emulator.machine import EXEC, LANES, M0, Machine
from tests.gfx942.emulator.program import program_of
from tests.gfx942.emulator.scheduler import SCHEDULES, Scheduler
from tests.gfx942.emulator.waits import Scoreboard

LDS_LIMIT = {"gfx942": 65536, "gfx950": 163840}
WAVES_AT_ONCE = 64


class Buffer:
    """An allocation of global memory with guard space on both sides."""

    def __init__(self, arena: Arena, offset: int, shape: tuple[int, ...], dtype: np.dtype):
        self._arena, self._offset, self.shape, self.dtype = arena, offset, shape, dtype
        self.nbytes = int(np.prod(shape)) * dtype.itemsize

    @property
    def address(self) -> int:
        """As the kernel sees it, for pointer tables."""
        return BASE + self._offset

    def read(self) -> np.ndarray:
        """A copy of the contents."""
        return self._arena.bytes[self._offset : self._offset + self.nbytes].view(self.dtype).reshape(self.shape).copy()

    def write(self, array: np.ndarray) -> None:
        if array.dtype != self.dtype or array.shape != self.shape:
            raise ValueError(f"write of {array.dtype} {array.shape} to a buffer of {self.dtype} {self.shape}")
        self._arena.bytes[self._offset : self._offset + self.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )


class Device:
    """A gfx942 or gfx950 device, as a code object asks for.

    schedule: "lockstep", "serial" or "reverse", see scheduler.py. block_order: "forward", "reverse" or a sequence of
    all block ids. blocks_at_once: blocks stepped together; 1 runs block after block, None chooses about 64 waves.
    allow_cross_block: blocks may exchange data through global memory (atomics, split-K with a counter); turns
    GlobalRace off. allow_shifted_waves: a block's waves may wait at different barriers, which hardware only counts;
    Triton's ping-pong schedule shifts half of the waves by one barrier.
    """

    def __init__(
        self,
        schedule: str = "lockstep",
        block_order: str | Sequence[int] = "forward",
        blocks_at_once: int | None = None,
        allow_cross_block: bool = False,
        instruction_limit: int = 20_000_000,
        allow_shifted_waves: bool = False,
    ):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: allowed are {', '.join(SCHEDULES)}")
        self.schedule, self.block_order, self.blocks_at_once = schedule, block_order, blocks_at_once
        self.allow_cross_block, self.instruction_limit = allow_cross_block, instruction_limit
        self.allow_shifted_waves = allow_shifted_waves
        self.arena = Arena()
        self._images: dict[str, int] = {}

    def alloc(self, shape, dtype) -> Buffer:
        """Uninitialised memory: every byte is 0xff, NaN in the float formats."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        return Buffer(self.arena, self.arena.allocate(int(np.prod(shape)) * dtype.itemsize), shape, dtype)

    def put(self, array: np.ndarray) -> Buffer:
        """A copy of the array in device memory."""
        array = np.asarray(array)
        buffer = self.alloc(array.shape, array.dtype)
        buffer.write(array)
        return buffer

    def launch(self, path: str | Path, kernel: str, grid, block, args: Sequence, shared: int = 0) -> Counters:
        """Run a kernel. grid and block count blocks and threads, (x, y, z) or fewer; shared is dynamic LDS in bytes.

        args: Buffers for pointers (None is a null pointer), numpy scalars of the argument's size, Python ints and
        floats, or bytes for structures passed by value. Raises an EmulatorFault where the kernel does something wrong.
        """
        code = open_code_object(path)
        if kernel not in code.kernels:
            raise ValueError(f"{path} has no kernel {kernel!r}; it has {', '.join(sorted(code.kernels))}")
        info = code.kernels[kernel]
        grid, block = (_triple(value) for value in (grid, block))
        threads = block[0] * block[1] * block[2]
        if not 0 < threads <= info.max_threads:
            raise ValueError(f"block={block}: {kernel} takes 1 to {info.max_threads} threads a block")
        if info.scratch_size:
            raise ScratchAccess(
                f"{kernel} needs {info.scratch_size} bytes of scratch a lane: registers spill or an array is indexed "
                "dynamically"
            )
        if (info.float_mode >> 4) & 3 != 3 or info.float_mode & 3:
            raise UnknownInstruction(
                f"{kernel} starts in float mode {info.float_mode:#x}: only round to nearest even with denormals is "
                "modelled"
            )
        if info.lds_size + shared > (limit := LDS_LIMIT[code.architecture]):
            raise OutOfBounds(f"{kernel} asks for {info.lds_size} + {shared} bytes of LDS, a block has {limit}")
        counters = Counters()
        base = self._image(code)
        kernarg = self._kernarg(info, grid, block, args, shared)
        packet = self._dispatch_packet(grid, block)
        program = program_of(str(path), code, kernel)
        self.arena.begin_launch(XCDS)
        counters.begin(self.arena)
        counters.per_pc = {instruction.pc: InstructionCount(instruction.text) for instruction in program}
        waves_per_block = (threads + LANES - 1) // LANES
        order = self._order(grid[0] * grid[1] * grid[2])
        together = self.blocks_at_once or max(1, WAVES_AT_ONCE // waves_per_block)
        executed = np.zeros(len(program), np.int64)
        for start in range(0, len(order), together):
            blocks = order[start : start + together]
            machine = Machine(
                info,
                blocks,
                waves_per_block,
                self.arena,
                Lds(len(blocks), info.lds_size + shared, waves_per_block),
                counters,
                base,
            )
            machine.allow_cross_block = self.allow_cross_block
            written = _initialise(machine, info, kernarg, packet, grid, block, self.arena)
            unwritten = [n for n in range(info.vgprs) if n not in written] + [512 + n for n in range(info.agprs)]
            unwritten += [1024 + n for n in range(106) if 1024 + n not in written]
            scheduler = Scheduler(
                machine,
                program,
                Scoreboard(machine.waves, unwritten),
                self.schedule,
                self.instruction_limit,
                self.allow_shifted_waves,
            )
            scheduler.run()
            executed += scheduler.executed
        counters.blocks, counters.waves = len(order), len(order) * waves_per_block
        for instruction, count in zip(program, executed, strict=True):
            if count:
                counters.per_pc[instruction.pc].executed = int(count)
                counters.per_opcode[instruction.opcode] = counters.per_opcode.get(instruction.opcode, 0) + int(count)
        counters.end()
        return counters

    def _image(self, code: CodeObject) -> int:
        """Address at which the code object's image lies in device memory."""
        if code.path not in self._images:
            offset = self.arena.allocate(code.image.size)
            self.arena.bytes[offset : offset + code.image.size] = code.relocated(BASE + offset)
            self._images[code.path] = BASE + offset
        return self._images[code.path]

    def _order(self, blocks: int) -> np.ndarray:
        if isinstance(self.block_order, str):
            if self.block_order not in ("forward", "reverse"):
                raise ValueError(
                    f"block_order={self.block_order!r}: allowed are forward, reverse or a sequence of block ids"
                )
            return np.arange(blocks)[:: 1 if self.block_order == "forward" else -1]
        order = np.asarray(self.block_order)
        if sorted(order.tolist()) != list(range(blocks)):
            raise ValueError(f"block_order is not a permutation of {blocks} blocks")
        return order

    def _kernarg(self, info: KernelInfo, grid, block, args: Sequence, shared: int) -> int:
        visible = [argument for argument in info.arguments if not argument.kind.startswith("hidden_")]
        if len(visible) != len(args):
            raise ValueError(f"{info.name} takes {len(visible)} arguments, {len(args)} given")
        data = bytearray(max(info.kernarg_size, 64) + 64)
        for position, (argument, value) in enumerate(zip(visible, args, strict=True)):
            encoded = _encode(info.name, position, argument, value)
            data[argument.offset : argument.offset + len(encoded)] = encoded
        hidden = {"hidden_group_size": block, "hidden_block_count": grid}
        for argument in info.arguments:
            name, _, axis = argument.kind.rpartition("_")
            if name in hidden and axis in "xyz":
                struct.pack_into(
                    "<I" if argument.size == 4 else "<H", data, argument.offset, hidden[name]["xyz".index(axis)]
                )
            elif argument.kind == "hidden_grid_dims":
                struct.pack_into("<H", data, argument.offset, max(1, sum(side > 1 for side in grid)))
            elif argument.kind == "hidden_dynamic_lds_size":
                struct.pack_into("<I", data, argument.offset, shared)
        return self.put(np.frombuffer(bytes(data), np.uint8)).address

    def _dispatch_packet(self, grid, block) -> int:
        """The fields of hsa_kernel_dispatch_packet_t that code of older ABI versions reads."""
        packet = bytearray(64)
        struct.pack_into("<HHHHHHIII", packet, 0, 2, 3, *block, 0, *(g * b for g, b in zip(grid, block, strict=True)))
        return self.put(np.frombuffer(bytes(packet), np.uint8)).address


def _triple(value) -> tuple[int, int, int]:
    value = (value,) if isinstance(value, (int, np.integer)) else tuple(int(v) for v in value)
    return (*value, *(1,) * (3 - len(value)))


def _encode(kernel: str, position: int, argument: Argument, value) -> bytes:
    wrong = f"{kernel}: argument {position} has {argument.size} bytes ({argument.kind})"
    if value is None or isinstance(value, Buffer):
        encoded = struct.pack("<Q", value.address if value is not None else 0)
    elif isinstance(value, (bytes, bytearray)):
        encoded = bytes(value)
    elif isinstance(value, (np.generic, np.ndarray)):
        encoded = value.tobytes()
    elif isinstance(value, (bool, int)):
        encoded = int(value).to_bytes(argument.size, "little", signed=value < 0)
    elif isinstance(value, float):
        encoded = struct.pack({2: "<e", 4: "<f", 8: "<d"}[argument.size], value)
    else:
        raise ValueError(f"{wrong}, got a {type(value).__name__}")
    if len(encoded) != argument.size:
        raise ValueError(f"{wrong}, got {len(encoded)}: {value!r}")
    return encoded


def _initialise(m: Machine, info: KernelInfo, kernarg: int, packet: int, grid, block, arena: Arena) -> set[int]:
    """Registers that hardware sets before the first instruction; -> their numbers for the scoreboard."""
    bits, count = info.user_sgpr_bits, 0
    for bit, size, value in ((0, 4, 0), (1, 2, packet), (2, 2, 0), (3, 2, kernarg), (4, 2, 0), (5, 2, 0), (6, 1, 0)):
        if bits >> bit & 1:
            for part in range(size):
                m.scalar[count + part][:] = value >> (32 * part) & 0xFFFFFFFF
            count += size
    for word in range(info.preload_length):
        m.scalar[count + word][:] = arena.words[(kernarg - BASE) // 4 + info.preload_offset + word]
    index = info.user_sgprs
    coordinates = (m.block % grid[0], m.block // grid[0] % grid[1], m.block // (grid[0] * grid[1]))
    for wanted, coordinate in zip(info.workgroup_id, coordinates, strict=True):
        if wanted:
            m.scalar[index][:] = coordinate
            index += 1
    threads = block[0] * block[1] * block[2]
    flat = m.wave[:, None] * LANES + np.arange(LANES)
    inside = np.minimum(flat, threads - 1)
    m.vector[0][:] = inside % block[0] | inside // block[0] % block[1] << 10 | inside // (block[0] * block[1]) << 20
    m.set_active(flat < threads)
    m.scalar[M0][:] = 0xFFFFFFFF
    return {0, *(1024 + n for n in range(index)), 1024 + EXEC, 1024 + EXEC + 1}
