# SPDX-License-Identifier: Apache-2.0
"""Measure a file system: a synced write, reading it back, random reads and synced small writes. No torch import at the
top.

All accesses go to one file without a name, which ends with the process, also where it is killed. Before each read the
file's pages are dropped from this machine's page cache (posix_fadvise); the caches of a file server, a controller or a
drive stay, so a rate of reads is an upper bound for cold data.
"""

import functools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zaya_plugin.ground.errors import check_space, mistake
from zaya_plugin.ground.mounts import ROOT, network_of

BLOCK = 2**20  # bytes of a sequential access
PAGE = 4096  # bytes of a random access
THREADS = (1, 2, 4, 8, 16, 32)  # that read at the same time, as loaders do
Say = Callable[[str], None]


def written(file: int, size: int) -> float:
    """Write `size` bytes and sync them; return the bytes a second, the sync included. The blocks are random, since some
    storage compresses.
    """
    blocks, begin = [os.urandom(BLOCK) for _ in range(16)], time.monotonic()
    for number in range(-(-size // BLOCK)):
        os.write(file, blocks[number % len(blocks)][: size - number * BLOCK])
    os.fsync(file)
    return size / (time.monotonic() - begin)


def read_back(file: int) -> float:
    """Drop the file's pages and read it; return the bytes a second."""
    drop_pages(file, os.POSIX_FADV_SEQUENTIAL)
    os.lseek(file, 0, os.SEEK_SET)
    begin, count = time.monotonic(), 0
    while data := os.read(file, BLOCK):
        count += len(data)
    return count / (time.monotonic() - begin)


def drop_pages(file, advice: int) -> None:
    """Drop the synced pages of a file from the page cache, and set how it will be read."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(file, 0, 0, advice)


def times_of(access: Callable[[int], object], pages: Sequence[int], seconds: float) -> list[float]:
    """Access pages one after the other for `seconds`; return the seconds of each."""
    times, last = [], time.monotonic() + seconds
    for page in pages:
        begin = time.monotonic()
        access(page * PAGE)
        times.append(time.monotonic() - begin)
        if begin > last:
            break
    return times


def random_reads(file: int, pages: Sequence[int], threads: int, seconds: float) -> list[float]:
    """Read pages with several threads, none of them twice; return the seconds of each read."""
    drop_pages(file, os.POSIX_FADV_RANDOM)
    shares = (pages[number::threads] for number in range(threads))
    with ThreadPoolExecutor(threads) as pool:
        read = functools.partial(times_of, lambda place: os.pread(file, PAGE, place), seconds=seconds)
        return sum(pool.map(read, shares), [])


def measure(folder: Path, size: int, seconds: float, say: Say) -> list[dict]:
    """Measure the file system of `folder` with a file of `size` bytes; `seconds` for each kind of random access.

    Raises:
        ValueError: no such folder. OSError, with the folder as its file: no space, or not writable.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise mistake("PATH", folder, problem=problem, allowed="a folder of the file system to measure")
    try:
        check_space(folder, size + 64 * BLOCK)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
            file = stream.fileno()
            say(f"writing {size // BLOCK:,} MiB")
            rows = [{"access": "write, synced at the end", "block": BLOCK, "mb_per_s": written(file, size) / 1e6}]
            say(f"reading {size // BLOCK:,} MiB")
            rows.append({"access": "read", "block": BLOCK, "mb_per_s": read_back(file) / 1e6})
            pages = random.Random(0).sample(range(size // PAGE), size // PAGE)
            for threads in THREADS:
                say(f"random reads, {threads} threads")
                rows.append(row_of("random read", random_reads(file, pages, threads, seconds), threads))
            say("synced writes")
            block = os.urandom(PAGE)
            times = times_of(lambda place: (os.pwrite(file, block, place), os.fsync(file)), pages, seconds)
            return [*rows, row_of("random write and fsync", times, 1)]
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise


def row_of(access: str, times: Sequence[float], threads: int) -> dict:
    """Return the row of accesses of a page by `threads`. times: seconds of each access, of all threads."""
    import numpy

    iops = threads * len(times) / sum(times)
    p50, p99 = numpy.percentile(times, (50, 99)).tolist()
    return {
        "access": access,
        "block": PAGE,
        "threads": threads,
        "iops": iops,
        "mb_per_s": PAGE * iops / 1e6,
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
        "max_ms": 1e3 * max(times),
    }


def run(options) -> None:
    """`zaya bench storage`. options: path, size and seconds as in `measure`, output, commit and command."""
    import torch

    from zaya_plugin.bench.results import BYTES, Column, Line, finish

    folder, size = options.path, options.size
    if size < BLOCK:
        raise mistake("--size", size, problem="is too small to measure", allowed="1M or more")
    kind, network, shared = network_of(folder.absolute(), ROOT)
    rows = measure(folder, size, options.seconds, lambda text: print(f"bench: {text}", file=sys.stderr, flush=True))
    reads = [row for row in rows if row["access"] == "random read"]
    finish(
        "storage",
        options,
        torch.device("cpu"),
        rows,
        (
            Column("access", "access"),
            Column("block", "block", BYTES),
            Column("threads", "threads"),
            Column("mb_per_s", "MB/s", ",.1f"),
            Column("iops", "IOPS", ",.0f"),
            Column("p50_ms", "p50 ms", ".3f"),
            Column("p99_ms", "p99 ms", ".3f"),
            Column("max_ms", "max ms", ".3f"),
        ),
        title=f"Storage, {kind or 'unknown file system'} of {folder}, a file of {size / 2**30:.3g} GiB",
        lines=[Line("random reads of 4 KiB", [row["threads"] for row in reads], [row["iops"] for row in reads])],
        x="threads",
        y="reads a second",
        more={"path": str(folder.absolute()), "file_system": kind, "network": network, "over_training_network": shared},
    )
    print(f"network: {network or 'none (a local or unknown file system)'}")
    if shared:
        print("WARNING: this path's traffic shares the training network: reads and checkpoints delay collectives")
    if kind in ("tmpfs", "ramfs"):
        print("WARNING: the path is in memory: these are no rates of a drive")
    print(
        "The page cache of this machine was dropped before reads; caches of servers, controllers and drives were not."
    )
