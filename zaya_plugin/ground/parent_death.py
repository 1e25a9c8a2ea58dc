# SPDX-License-Identifier: Apache-2.0
"""End a process with the process that started it, also if that one is killed (on Linux; on other systems these
functions do nothing), and the signals upon which a run ends.

- A rank follows its launcher: torchrun, `zaya train` above it, or SLURM's slurmstepd. Without that, the ranks of a
  killed torchrun train on for ever, during the next start of the run.
- A process that a rank has spawned follows the rank. Megatron's checkpoint writers wait for requests for ever, also
  after the rank was killed (out of memory, a failed node agent, `kill -9`), with half a gigabyte each.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

# Upon these a run saves and leaves. Batch systems send the last three before a limit, to all processes of a job: SLURM
# as --signal says, LSF SIGUSR2, Grid Engine SIGUSR1 and SIGXCPU.
BATCH_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *BATCH_SIGNALS)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
RANK_PID = "ZAYA_RANK_PID"
LAUNCHER_PID = "ZAYA_LAUNCHER_PID"  # set by `zaya train` for torchrun and its ranks
# Seconds from SIGTERM to SIGKILL; torchrun's are 30,
# and `zaya export slurm` sets the variable to what it asks SLURM for.
GRACE, GRACE_SECONDS = "ZAYA_GRACE_SECONDS", 30.0
# A batch system signals all processes, and those above pass it on:
# within these seconds a signal is a copy of the first.
COPY_SECONDS = 5.0
WATCH_SECONDS = 0.5
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch/distributed/run", "torch.distributed.launch")


def on_end_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> dict[int, object]:
    """Install the handler of END_SIGNALS, and return those from before. A SIGHUP that `nohup` ignores stays ignored."""
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    for number, previous in before.items():
        if (number, previous) != (signal.SIGHUP, signal.SIG_IGN):
            signal.signal(number, handler)
    return before


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel send this process signal `number` when its parent ends (strictly: the thread that started it;
    prctl(2)).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans(adopts: bool = True) -> None:
    """Become, or cease to be, the parent of processes below this one whose own parent ends, so that this process can
    see them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts))


def adopt_children() -> None:
    """In a rank: give the processes that it spawns from now on its process id, for `follow_rank`."""
    os.environ[RANK_PID] = str(os.getpid())


def follow_rank() -> None:
    """In a process that a rank has spawned: end with the rank, also if it was killed before this call."""
    if sys.platform == "linux" and RANK_PID in os.environ:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != int(os.environ[RANK_PID]):
            os._exit(1)


def follow_launcher() -> None:
    """In a rank: end with the processes that started it, up to its launcher. When one of them ends, the rank gets
    SIGTERM, upon which it saves and leaves, and is ended GRACE_SECONDS later in any case.

    A rank whose RANK was set by hand has no launcher: a shell may end before what it started with nohup.
    """
    if sys.platform != "linux" or not (chain := _chain_to_launcher()):
        return
    if None in chain.values():
        _leave()
    die_with_parent(signal.SIGTERM)
    threading.Thread(target=_watch, args=(os.getppid(), chain), name="launcher", daemon=True).start()


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat behind the name, from the state on; empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def started(pid: int) -> int | None:
    """Return the time of a living process's start, in clock ticks since the machine's; None: there is no such process.

    A process id alone may have been given to another process since.
    """
    fields = stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def _chain_to_launcher() -> dict[int, int | None]:
    """Return the processes from this one's parent up to the launcher, with the time of their start; empty if no
    launcher has started this process. A value of None: the launcher has already ended.
    """
    launcher = int(os.environ.get(LAUNCHER_PID) or 0)
    parents = list(_ancestors())
    if launcher:
        if launcher not in parents:
            return {launcher: None}
        parents = parents[: parents.index(launcher) + 1]
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        parents = _up_to(LAUNCHERS, parents)
    elif "SLURM_PROCID" in os.environ and "SLURM_STEP_ID" in os.environ:
        parents = _up_to(("slurmstepd",), parents)
    else:
        parents = []
    return {pid: started(pid) for pid in parents}


def _up_to(names: tuple[str, ...], parents: list[int]) -> list[int]:
    """Return `parents` up to the first whose command has one of `names`; the first alone if none has."""
    for at, pid in enumerate(parents):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if any(name in command for name in names):
            return parents[: at + 1]
    return parents[:1]


def _ancestors():
    pid = os.getppid()
    while pid > 0 and (fields := stat(pid)):
        yield pid
        pid = int(fields[1])


def _watch(parent: int, chain: dict[int, int | None]) -> None:
    # The kernel's signal comes for the parent alone. The thread is for those above it, for a parent that ended before
    # the kernel was asked, and for a rank that does not react to SIGTERM, because it waits for another rank.
    while os.getppid() == parent and all(started(pid) == start for pid, start in chain.items()):
        time.sleep(WATCH_SECONDS)
    _leave()


def _leave() -> None:
    os.environ[GRACE] = str(min(GRACE_SECONDS, float(os.environ.get(GRACE) or GRACE_SECONDS)))
    print("zaya: the launcher of this rank has ended; the rank saves and leaves", file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True, file=open(os.devnull, "w"))
    os.kill(os.getpid(), signal.SIGTERM)
