# SPDX-License-Identifier: Apache-2.0
"""The faults of the lab, one function each: it starts a run, breaks something, and returns the time of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.machine import Machine, execute
from tests.lab.stand import Stand
from tests.lab.supervised_run import PATIENCE, SAVE, Run

BREAK_AT = SAVE + 3  # step of a fault: a checkpoint is complete
CRASH, SOON, LOST, HANG = 1.0, 5.0, 10.0, 10.0  # seconds to detect; HANG: twice the step's budget of 5 s
STEPS_LATER = 2 * SAVE


@dataclass(frozen=True)
class Fault:
    """One fault and its expected result.

    text: the fault in words. inject: makes it; takes a Trial and returns the time (slurm_faults.py has another form).
    needs: means of the machine. causes: names of rules, one of which the diagnosis must name. actions: allowed first
    decisions. within: seconds to detect, None: there is nothing to detect. code: exit code of the run. quiet: no rank
    may be ended, and no attempt may begin. attempts: starts of the ranks.
    """

    name: str
    text: str
    inject: Callable[..., Any]
    needs: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    within: float | None = SOON
    code: int = 0
    quiet: bool = False
    attempts: int | None = None


FAULTS: dict[str, Fault] = {}


def fault(text: str, table: dict[str, Fault] = FAULTS, **expected: Any) -> Callable:
    """Enter a function into a table."""

    def enter(function: Callable) -> Callable:
        table[function.__name__] = Fault(function.__name__, text, function, **expected)
        return function

    return enter


class Trial:
    """One run with one fault. cleanup: is closed after it."""

    def __init__(self, stand: Stand, folder: Path, data: Path, machine: Machine):
        self.stand, self.folder, self.data, self.machine = stand, folder, data, machine
        self.cleanup = contextlib.ExitStack()
        self.run: Run | None = None

    def start(self, step: int | None = BREAK_AT, environments: dict | None = None, **options: Any) -> Run:
        """Start a run, wait for a step of it, and return it."""
        self.run = Run(self.stand, self.folder, options.pop("data", self.data), **options)
        self.run.start(environments)
        if step is not None:
            self.run.wait_step(step)
        return self.run


def send_signal(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal to a process; return the time."""
    now = time.time()
    os.kill(pid, number)
    return now


# Processes


@fault("SIGKILL of a rank", causes=("sigkill",), actions=("restart",), within=CRASH, attempts=2)
def sigkill_rank(trial: Trial) -> float:
    return send_signal(trial.start().rank_pid("n2"))


@fault(
    "SIGKILL of the process that reads a rank's data",
    causes=("dataloader_worker",),
    actions=("restart",),
    within=CRASH,
    attempts=2,
)
def sigkill_loader(trial: Trial) -> float:
    return send_signal(trial.start().loader_pid("n2"))


@fault("SIGKILL of an agent", causes=("agent_lost",), actions=("restart", "exchange"), within=LOST, attempts=2)
def sigkill_agent(trial: Trial) -> float:
    return send_signal(trial.start().agent_pid("n2"))


@fault("SIGKILL of the decider", quiet=True)
def sigkill_decider(trial: Trial) -> float:
    run = trial.start()
    now = send_signal(run.decider_pid())
    run.wait(lambda: len([row for row in run.journal() if row["kind"] == "decider"]) > 1, 20, "new decider")
    return now


@fault("SIGKILL of a rank and of the decider at once", causes=("sigkill",), actions=("restart",), attempts=2)
def sigkill_rank_and_decider(trial: Trial) -> float:
    run = trial.start()
    send_signal(run.decider_pid())
    return send_signal(run.rank_pid("n2"))


@fault("SIGKILL of all processes of a node", causes=("node_lost",), actions=("exchange",), within=LOST, attempts=2)
def sigkill_node(trial: Trial) -> float:
    run = trial.start()
    now = time.time()
    run.kill_node("n2")
    return now


@fault("SIGSTOP of a rank", causes=("hang",), actions=("restart",), within=HANG, attempts=2)
def sigstop_rank(trial: Trial) -> float:
    return send_signal(trial.start().rank_pid("n2"), signal.SIGSTOP)


@fault(
    "a rank in state D that SIGKILL does not end (frozen)",
    needs=("freezer",),
    causes=("hang", "unkillable"),
    actions=("restart", "exchange"),
    within=HANG,
    attempts=2,
)
def unkillable_rank(trial: Trial) -> float:
    run = trial.start()
    group = trial.cleanup.enter_context(trial.stand.cgroup("freezer", run.rank_pid("n2")))
    now = time.time()
    (group / "freezer.state").write_text("FROZEN")
    return now


@fault(
    "a kill by the kernel: the rank's cgroup runs out of memory",
    needs=("memory", "kernel_log"),
    causes=("oom_kill",),
    actions=("restart",),
    within=CRASH,
    attempts=2,
)
def out_of_memory(trial: Trial) -> float:
    run = trial.start(kernel_log=Path("/dev/kmsg"))
    now = time.time()
    # memory of the rank is charged to its former group; new memory is refused. The limit is set before the rank joins:
    # the kernel refuses one below what a group holds
    trial.cleanup.enter_context(trial.stand.cgroup("memory", run.rank_pid("n2"), limit_in_bytes="64k"))
    return now


@fault("the port of the ranks' store is taken", causes=("port_in_use",), actions=("restart",), within=15.0, attempts=2)
def port_taken(trial: Trial) -> float:
    trial.start(step=None, hook={"kind": "port"})
    trial.run.wait(trial.run.marker.exists, 60, "taken port")
    return trial.run.marker.stat().st_mtime


# Network


@fault("link down for 2 s", needs=("network",), causes=("link_down", "link_flap"), actions=("ride",), attempts=1)
def link_flap(trial: Trial) -> float:
    trial.start()
    now = time.time()
    trial.stand.link("n2", up=False)
    time.sleep(2.0)
    trial.stand.link("n2", up=True)
    return now


@fault(
    "link down for good",
    needs=("network",),
    causes=("node_lost", "link_down"),
    actions=("exchange",),
    within=LOST,
    attempts=2,
)
def link_loss(trial: Trial) -> float:
    trial.start()
    now = time.time()
    trial.stand.link("n2", up=False)
    trial.cleanup.callback(trial.stand.link, "n2", up=True)
    return now


@fault("10 % of the packets are lost for 6 s", needs=("network", "nft"), causes=("packets_lost",), quiet=True)
def packet_loss(trial: Trial) -> float:
    trial.start()
    nft, inside = trial.machine.nft, ("ip", "netns", "exec", trial.stand.namespace("n2"))
    rules = "add table inet lab; add chain inet lab in { type filter hook input priority 0; }; "
    rules += "add rule inet lab in numgen random mod 100 < 10 drop"
    now = time.time()
    nft.run(*inside, nft.program("nft"), rules)
    time.sleep(6.0)
    nft.run(*inside, nft.program("nft"), "delete table inet lab")
    return now


@fault("a rank with two fifths of a core", needs=("cpu",), causes=("slow_rank",), within=HANG, quiet=True)
def slow_rank(trial: Trial) -> float:
    run = trial.start()
    now = time.time()
    with trial.stand.cgroup("cpu", run.rank_pid("n2"), cfs_period_us=100_000, cfs_quota_us=40_000):
        time.sleep(12.0)
    return now


# Lines of the kernel


def feed(trial: Trial, *lines: str) -> float:
    """Start a run, and add lines to the kernel's messages of its second node."""
    run = trial.start()
    now = time.time()
    run.kernel("n2", *lines)
    return now


@fault("kernel: an uncorrectable memory error", causes=("ras_ue", "ras_ue_block"), actions=("exchange",), attempts=2)
def kernel_ecc(trial: Trial) -> float:
    return feed(
        trial,
        "amdgpu 0000:dd:00.0: amdgpu: socket: 4, die: 0, 1 new uncorrectable hardware errors detected in umc block",
    )


@fault("kernel: poison was consumed", causes=("poison_consumed",), actions=("exchange",), attempts=2)
def kernel_ras(trial: Trial) -> float:
    return feed(trial, "amdgpu 0000:dd:00.0: amdgpu: {14}poison is consumed by client 12, kick off gpu reset flow")


@fault("kernel: an uncorrectable PCIe error", causes=("pcie_aer_fatal",), actions=("exchange",), attempts=2)
def kernel_aer(trial: Trial) -> float:
    return feed(
        trial,
        "pcieport 0000:00:01.1: AER: Uncorrected (Fatal) error received: 0000:01:00.0",
        "pcieport 0000:00:01.1: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)",
    )


@fault("kernel: a link goes down and comes back", causes=("ionic_link",), actions=("ride",), attempts=1)
def kernel_link(trial: Trial) -> float:
    now = feed(trial, "ionic 0000:61:00.0 enp97s0: Link down")
    time.sleep(2.0)
    trial.run.kernel("n2", "ionic 0000:61:00.0 enp97s0: Link up - 400 Gbps")
    return now


@fault(
    "kernel: a ring time-out, and the rank ends by SIGABRT",
    causes=("ring_timeout",),
    actions=("restart",),
    within=CRASH,
    attempts=2,
)
def kernel_ring(trial: Trial) -> float:
    line = "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, signaled seq=16060, emitted seq=16062"
    feed(trial, line)
    time.sleep(1.0)
    return send_signal(trial.run.rank_pid("n2"), signal.SIGABRT)


@fault("kernel: lines that look like failures and are none", within=None, quiet=True)
def near_misses(trial: Trial) -> float:
    return feed(
        trial,
        "amdgpu 0000:dd:00.0: amdgpu: 0 uncorrectable hardware errors detected in total in umc block",
        "amdgpu 0000:dd:00.0: amdgpu: no uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:dd:00.0: amdgpu: 1 correctable hardware errors detected in total in gfx block, no user action "
        "is needed.",
        "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx timeout, but soft recovered",
        "amdgpu 0000:dd:00.0: amdgpu: bad page 0x1234 reserved successfully",
        "pcieport 0000:00:01.1: AER: aer_cor_status: 0x00002000, aer_cor_mask: 0x00000000",
        "pcieport 0000:00:01.1: AER: aer_uncor_status: 0x00000000, aer_uncor_mask: 0x00180000",
        "ionic 0000:61:00.0 enp97s0: Link up - 400 Gbps",
        "amdgpu 0000:dd:00.0: amdgpu: GPU is not throttled",
    )


# Storage


def checkpoints_at(trial: Trial, point: Path, **options: Any) -> Run:
    """Start a run with its checkpoints in `point`."""
    return trial.start(words=[f"checkpoint.path={point / 'checkpoints'}"], **options)


def full(trial: Trial, options: str, fill: Callable[[Path], Path]) -> float:
    """Fill the file system of the checkpoints, and free it after the first symptom or alert."""
    point = trial.cleanup.enter_context(trial.stand.tmpfs(trial.folder / "mount", options))
    run = checkpoints_at(trial, point)
    ballast = fill(point)
    now = time.time()
    run.wait(lambda: any(row["kind"] in ("symptom", "alert") for row in run.journal(now)), 40, "symptom")
    time.sleep(1.0)
    shutil.rmtree(ballast)
    return now


@fault(
    "the disk of the checkpoints is full until a person frees it",
    needs=("tmpfs",),
    causes=("enospc", "disk_low"),
    actions=("restart", "watch"),
    within=SOON,
)
def disk_full(trial: Trial) -> float:
    def fill(point: Path) -> Path:
        ballast = point / "ballast"
        ballast.mkdir()
        with open(ballast / "zeros", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        return ballast

    return full(trial, "size=64m", fill)


@fault(
    "no inode is left for the checkpoints until a person frees some",
    needs=("tmpfs",),
    causes=("enospc", "disk_low"),
    actions=("restart", "watch"),
    within=SOON,
)
def inodes_full(trial: Trial) -> float:
    def fill(point: Path) -> Path:
        ballast = point / "ballast"
        ballast.mkdir()
        with contextlib.suppress(OSError):
            for number in range(10_000):
                (ballast / str(number)).touch()
        return ballast

    return full(trial, "size=256m,nr_inodes=400", fill)


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/uio.h>
static int broken(int fd) {
    const char *flag = getenv("ZAYA_LAB_EIO"), *where = getenv("ZAYA_LAB_EIO_BELOW");
    char link[64], path[4096];
    if (!flag || !where || access(flag, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strncmp(path, where, strlen(where)) == 0;
}
#define NEXT(type, name, parameters, arguments) \
    type name parameters { \
        static type (*next) parameters; \
        if (broken(fd)) { errno = EIO; return -1; } \
        if (!next) next = dlsym(RTLD_NEXT, #name); \
        return next arguments; \
    }
NEXT(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
NEXT(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
NEXT(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
NEXT(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
NEXT(int, fsync, (int fd), (fd))
NEXT(int, fdatasync, (int fd), (fd))
"""


@fault(
    "writes of one node to the checkpoints fail with EIO",
    needs=("compiler",),
    causes=("eio",),
    actions=("exchange",),
    within=SOON,
)
def eio(trial: Trial) -> float:
    trial.folder.mkdir(parents=True)
    source, shim, flag = trial.folder / "eio.c", trial.folder / "eio.so", trial.folder / "broken"
    source.write_text(SHIM)
    execute("cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl")
    point = trial.folder / "disk"
    variables = {"LD_PRELOAD": str(shim), "ZAYA_LAB_EIO": str(flag), "ZAYA_LAB_EIO_BELOW": str(point)}
    checkpoints_at(trial, point, environments={"n2": variables})
    now = time.time()
    flag.touch()
    return now


@fault(
    "the file system of the checkpoints does not answer for 20 s",
    needs=("freeze",),
    causes=("storage_stall",),
    actions=("ride",),
    attempts=1,
)
def hanging_mount(trial: Trial) -> float:
    point = trial.cleanup.enter_context(trial.stand.disk(trial.folder / "mount", 256))
    checkpoints_at(trial, point)
    now = time.time()
    execute("fsfreeze", "-f", point)
    time.sleep(20.0)
    execute("fsfreeze", "-u", point)
    return now


@fault(
    "the newest checkpoint is damaged, and a rank is killed",
    causes=("sigkill",),
    actions=("restart",),
    within=CRASH,
    attempts=2,
)
def corrupt_checkpoint(trial: Trial) -> float:
    run = trial.start(step=STEPS_LATER + 2)
    first = f"iter_{STEPS_LATER:07d}"  # or a later one: a busy machine may not let the lab look in time
    run.wait(lambda: run.checkpoint() and run.checkpoint().name >= first, PATIENCE, "checkpoint")
    largest = max((path for path in run.checkpoint().iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(b"damaged " * 64)
    return send_signal(run.rank_pid("n2"))


# The run itself


@fault("the loss of one step is NaN, once", causes=("non_finite",), actions=("rollback", "restart"), attempts=2)
def nan_loss(trial: Trial) -> float:
    return changed_loss(trial, "nan", ["guard.loss_spike=roll_back"])


@fault("the loss is 30 times as large for some steps, once", causes=("loss_spike",), actions=("rollback",), attempts=2)
def loss_spike(trial: Trial) -> float:
    return changed_loss(trial, "30", ["guard.loss_spike=roll_back", "guard.window=16"], step=STEPS_LATER + 4)


def changed_loss(trial: Trial, factor: str, words: Sequence[str], step: int = BREAK_AT) -> float:
    trial.start(step=None, words=words, hook={"kind": "loss", "factor": factor, "step": step})
    trial.run.wait(trial.run.marker.exists, 120, "fault")
    return trial.run.marker.stat().st_mtime


@fault("a recipe with a value that only the ranks can refuse", causes=("user_error", "data"), actions=("stop",), code=2)
def bad_recipe(trial: Trial) -> float:
    trial.start(step=None, data=trial.folder / "no_such_data")
    trial.run.wait(trial.run.journal, 30, "journal")
    return trial.run.start_time


@fault("a broken shard of the data", causes=("data", "user_error"), actions=("stop",), code=2)
def broken_shard(trial: Trial) -> float:
    copy = trial.folder / "data"
    shutil.copytree(trial.data, copy)
    with open(copy / "train.bin", "r+b") as file:
        file.truncate((copy / "train.bin").stat().st_size // 2)
    trial.start(step=None, data=copy)
    trial.run.wait(trial.run.journal, 30, "journal")
    return trial.run.start_time


@fault("SIGTERM to the supervisor: the ranks save and leave", causes=("ended_early",), actions=("done",), code=75)
def sigterm(trial: Trial) -> float:
    run = trial.start()
    return send_signal(run.agents["n1"].pid, signal.SIGTERM)
