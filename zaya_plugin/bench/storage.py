# SPDX-License-Identifier: Apache-2.0
"""Measure a file system: a synced write, reading it back, random reads and synced small writes; and name the network
interface behind it. No torch import at the top.

All accesses go to one file without a name, which ends with the process, also where it is killed. Before each read the
file's pages are dropped from this machine's page cache (posix_fadvise); the caches of a file server, a controller or a
drive stay, so a rate of reads is an upper bound for cold data.
"""

from __future__ import annotations

import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zaya_plugin.ground.errors import check_space, mistake

BLOCK = 2**20  # bytes of a sequential access
PAGE = 4096  # bytes of a random access
THREADS = (1, 2, 4, 8, 16, 32)  # that read at the same time, as loaders do
ROOT = Path("/")
Say = Callable[[str], None]


def quiet(text: str) -> None:
    """Print nothing."""


def written(file, size: int, say: Say = quiet) -> float:
    """Write `size` bytes and sync them; return the bytes a second, the sync included. The blocks are random, since some
    storage compresses.
    """
    blocks, begin = [os.urandom(BLOCK) for _ in range(16)], time.monotonic()
    for number in range(-(-size // BLOCK)):
        os.write(file, blocks[number % len(blocks)][: size - number * BLOCK])
        say(f"writing, {number + 1:,} of {-(-size // BLOCK):,} MiB")
    os.fsync(file)
    return size / (time.monotonic() - begin)


def read_back(file, size: int, say: Say = quiet) -> float:
    """Drop the file's pages and read it; return the bytes a second."""
    drop_pages(file, os.POSIX_FADV_SEQUENTIAL)
    os.lseek(file, 0, os.SEEK_SET)
    begin, count = time.monotonic(), 0
    while data := os.read(file, BLOCK):
        count += len(data)
        say(f"reading, {count // BLOCK:,} of {size // BLOCK:,} MiB")
    return count / (time.monotonic() - begin)


def drop_pages(file, advice: int) -> None:
    """Drop the synced pages of a file from the page cache, and set how it will be read."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(file, 0, 0, advice)


def random_reads(file, size: int, threads: int, seconds: float) -> list[float]:
    """Read random pages of the file with several threads for `seconds`; return the seconds of each read. No page is
    read twice.
    """
    drop_pages(file, os.POSIX_FADV_RANDOM)
    pages = random.Random(threads).sample(range(size // PAGE), size // PAGE)
    deadline = time.monotonic() + seconds

    def read(own: list[int]) -> list[float]:
        times, now = [], time.monotonic()
        for page in own:
            os.pread(file, PAGE, page * PAGE)
            begin, now = now, time.monotonic()
            times.append(now - begin)
            if now > deadline:
                break
        return times

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, (pages[number::threads] for number in range(threads))), [])


def synced_writes(file, size: int, seconds: float) -> list[float]:
    """Write random pages for `seconds`, each synced before the next; return the seconds of each."""
    chosen, times, block = random.Random(0), [], os.urandom(PAGE)
    deadline = time.monotonic() + seconds
    while not times or time.monotonic() < deadline:
        begin = time.monotonic()
        os.pwrite(file, block, chosen.randrange(size // PAGE) * PAGE)
        os.fsync(file)
        times.append(time.monotonic() - begin)
    return times


def measure(folder: Path, size: int, seconds: float, say: Say = quiet) -> list[dict]:
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
            rows = [{"access": "write, synced at the end", "block": BLOCK, "mb_per_s": written(file, size, say) / 1e6}]
            rows.append({"access": "read", "block": BLOCK, "mb_per_s": read_back(file, size, say) / 1e6})
            for threads in THREADS:
                say(f"random reads, {threads} threads")
                begin = time.monotonic()
                times = random_reads(file, size, threads, seconds)
                rows.append(small_accesses("random read", times, time.monotonic() - begin, threads))
            say("synced writes")
            times = synced_writes(file, size, seconds)
            return [*rows, small_accesses("random write and fsync", times, sum(times), 1)]
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise


def small_accesses(access: str, times: list[float], seconds: float, threads: int) -> dict:
    """Return the row of accesses of a page. times: of each access; seconds: of all."""
    ordered = sorted(times)
    return {
        "access": access,
        "block": PAGE,
        "threads": threads,
        "iops": len(times) / seconds,
        "mb_per_s": PAGE * len(times) / seconds / 1e6,
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        "max_ms": 1e3 * ordered[-1],
    }


def progress() -> Say:
    """Return a function that shows a text on a terminal, in the place of the one before, at most ten times a second."""
    shown = [0.0]

    def say(text: str) -> None:
        if sys.stderr.isatty() and time.monotonic() - shown[0] > 0.1:
            shown[0] = time.monotonic()
            print(f"\r\x1b[Kbench: {text}", end="", file=sys.stderr, flush=True)

    return say


def run(folder: Path, size: int, seconds: float, output: Path, command: str, commit: str | None) -> None:
    """`zaya bench storage`."""
    import torch

    from zaya_plugin.bench.results import BYTES, Column, Line, finish

    kind, network, shared = network_of(folder.absolute(), ROOT)
    rows = measure(folder, size, seconds, progress())
    reads = [row for row in rows if row["access"] == "random read"]
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    finish(
        "storage",
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
        device=torch.device("cpu"),
        command=command,
        commit=commit,
        output=output,
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


def network_of(folder: Path, root: Path) -> tuple[str, str, bool]:
    """Return the type of the file system of `folder`, the network that its accesses take ("" for a local or unknown
    file system), and whether that is the training network. root: folder with sys/ and proc/.
    """
    kind, source, options = mount_of(folder, root)
    if "@o2ib" in source:
        return kind, f"{kind} over InfiniBand (o2ib), as the collectives", True
    address = re.search(r"\baddr=([\d.]+)", options) or re.match(r"([\d.]+)[@:]", source)
    if address is None or (interface := interface_of(address[1], root)) is None:
        return kind, "", False
    shared = interface in rail_interfaces(root)
    text = f"{kind} of {address[1]} over {interface}" + ", a rail of the training network" * shared
    return kind, text, shared


def rail_interfaces(root: Path) -> set[str]:
    """Return the network interfaces of the training network's ports."""
    return {read(path) for path in (root / "sys/class/infiniband").glob("*/ports/*/gid_attrs/ndevs/0")} - {""}


def mount_of(path: Path, root: Path) -> tuple[str, str, str]:
    """Return type, source and options of the mount that holds `path`."""
    mount = ("", "", "")
    best = -1
    for line in read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point, after = left.split()[4].replace("\\040", " "), right.split()
        if len(after) == 3 and path.is_relative_to(point) and len(point) >= best:
            best, mount = len(point), (after[0], after[1], after[2])
    return mount


def interface_of(address: str, root: Path) -> str | None:
    """Return the interface of the route to an IPv4 address."""
    try:
        number = int.from_bytes(socket.inet_aton(address), "little")
    except OSError:
        return None
    routes = [line.split() for line in read(root / "proc/net/route").splitlines()[1:]]
    fitting = [(int(words[7], 16), words[0]) for words in routes if number & int(words[7], 16) == int(words[1], 16)]
    return max(fitting, key=lambda entry: entry[0].bit_count(), default=(0, None))[1]


def read(path: Path) -> str:
    """Return a file of /sys or /proc, "" where it is absent."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
