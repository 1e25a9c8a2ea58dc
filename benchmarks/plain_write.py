# SPDX-License-Identifier: Apache-2.0
"""Write host memory to a file as `dd` would: sequentially, in pieces, then fsync. Imports no torch.

`python -m benchmarks.plain_write <memory> <bytes> <file>`: <memory> is a descriptor. Prints the seconds of the write
and those of xxh3_128 over the same bytes, which is taken afterwards. The measure of what a disk can take, for
benchmarks/checkpoint_stall.py.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time

import xxhash

from zaya_plugin.checkpoint.direct_file import PIECE
from zaya_plugin.checkpoint.writer import NICE
from zaya_plugin.ground.parent_death import follow_rank


def main(argv: list[str]) -> None:
    follow_rank()
    os.nice(NICE)
    size = int(argv[1])
    memory = memoryview(mmap.mmap(int(argv[0]), size, prot=mmap.PROT_READ))
    pieces = [memory[start : start + PIECE] for start in range(0, size, PIECE)]
    begun = time.perf_counter()
    descriptor = os.open(argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for piece in pieces:
        while piece:
            piece = piece[os.write(descriptor, piece) :]
    os.fsync(descriptor)
    os.close(descriptor)
    written = time.perf_counter()
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    print(json.dumps({"write": written - begun, "checksum": time.perf_counter() - written}))


if __name__ == "__main__":
    main(sys.argv[1:])
