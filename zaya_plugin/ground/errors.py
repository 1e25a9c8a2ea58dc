# SPDX-License-Identifier: Apache-2.0
"""The one form of a message about a user's mistake: what was given, what is wrong, what is allowed, what to type
instead.
"""

import contextlib
import difflib
import errno
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable

# The signal by which Aegis asks a rank for the stacks of its threads. SIGUSR1 and SIGUSR2 are those of batch systems.
STACKS_SIGNAL = signal.SIGRTMIN + 5

_NO_VALUE = object()
LONGEST_SHOWN = 1000  # characters of key and value in a message


class RunEndedError(RuntimeError):
    """Training cannot go on, and the message says all that a user needs: it is shown without a traceback, with exit
    code 1, or that of `exit_code`.
    """

    exit_code = 1


class NotFiniteError(RunEndedError):
    """A loss or gradients are infinite or NaN."""


def message(key: str, value: object = _NO_VALUE, *, problem: str, allowed: str = "", fix: str = "") -> str:
    """Return `<key>=<value>: <problem>. Allowed: <allowed>. Fix: <fix>.`

    `key` is a recipe key, an option such as --output, or a file; without `value` it stands alone. `allowed` lists
    values or states the condition with its current values. `fix` is what to type. Parts that are empty are left out.
    """
    subject = key if value is _NO_VALUE else f"{key}={as_typed(value)}"
    if len(subject) > LONGEST_SHOWN:
        subject = f"{subject[: LONGEST_SHOWN // 2]}... ({len(subject):,} characters)"
    parts = [f"{subject}: {problem}", f"Allowed: {allowed}" if allowed else "", f"Fix: {fix}" if fix else ""]
    return " ".join(part if part.endswith("...") else f"{part.rstrip('.')}." for part in parts if part)


def mistake(key: str, value: object = _NO_VALUE, *, problem: str, allowed: str = "", fix: str = "") -> ValueError:
    """Return the ValueError with `message`'s text, for `raise mistake(...)`. Commands print the text without a
    traceback.
    """
    return ValueError(message(key, value, problem=problem, allowed=allowed, fix=fix))


def without_advice(problem: str) -> str:
    """Return the first sentence of a message: key, value and what is wrong."""
    return re.split(r"\.? (?:Allowed|Fix): |\n", problem, maxsplit=1)[0].rstrip(".")


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that `name` was most probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(name.lower(), names, n=1)), None)


def check_utf8(key: str, *text: str) -> None:
    """Raise ValueError if the word of a command line `key`, or the `text` given for it,
    holds bytes that are not UTF-8.
    """
    if any("\udc80" <= character <= "\udcff" for character in (*text, key)[0]):
        raise mistake(
            key, *text, problem="holds bytes that are not UTF-8", allowed="text in UTF-8", fix="type it in UTF-8"
        )


def replace_unprintable() -> None:
    """Let stdout and stderr replace characters that they cannot encode, in place of raising an error: by "?", and in
    UTF-8, which lacks only the bytes of odd file names, by their numbers.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # none, or a stand-in
            utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="backslashreplace" if utf8 else "replace")


STORAGE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.EFBIG,
)
LIMITS = {errno.EMFILE: ("-n", resource.RLIMIT_NOFILE), errno.EFBIG: ("-f", resource.RLIMIT_FSIZE)}
FULL_DISK = 2**20  # bytes; with less free space a failure is attributed to the disk
SHARED_MEMORY = r"(?s)shared memory.*No space left|/torch_.*No space left"  # in torch's errors of a full /dev/shm
LOADER_KILLED = r"DataLoader worker .*Bus error"  # which torch ascribes to /dev/shm


def of_the_machine(error: BaseException, directory: str | os.PathLike, offline: bool = False) -> str | None:
    """Return the message about an error of storage or memory, or None if it is of another kind: a traceback is then
    needed.

    directory: of the run; it may be full where an error names no file. offline: the command runs no ranks.
    """
    if (of_storage := _of_storage(error, directory, offline)) is not None:
        return of_storage
    text = next(iter(str(error).strip().splitlines()), "")
    number, space = getattr(error, "errno", None), resource.getrlimit(resource.RLIMIT_AS)[0]
    thread = isinstance(error, RuntimeError) and "can't start new thread" in text
    memory = isinstance(error, MemoryError) or number == errno.ENOMEM or "can't allocate memory" in text
    if (memory or thread) and space != resource.RLIM_INFINITY:  # the stack of a thread counts too
        fix = "`ulimit -v $(ulimit -H -v)`, or a higher limit of the system; then the same command again"
        problem = f"the address space of a process is full: {text or type(error).__name__}"
        return message("ulimit -v", space // 1024, problem=problem, fix=fix)
    if thread or number == errno.EAGAIN and re.search(r"subprocess|popen_|process|fork", _place(error)):
        fix = "end programs of this user, or raise the limit (`ulimit -u`, of a container `--pids-limit`)"
        problem = f"no further process or thread could be started: {text}"
        return message("ulimit -u", resource.getrlimit(resource.RLIMIT_NPROC)[0], problem=problem, fix=fix)
    # torch's own exceptions are known by name, since this module imports nothing
    if type(error).__name__ == "OutOfMemoryError" or memory:
        return message(
            "memory",
            problem=f"{'this command' if offline else 'a rank'} has run out of it: {text or type(error).__name__}",
            fix="a smaller --batch-size, smaller sizes, or a machine with more memory"
            if offline
            else "a smaller stage.micro_batch_size, parallel.recompute_granularity=full, or more ranks; `--dry-run` "
            "states what a run needs",
        )
    if type(error).__name__ in ("BadZipFile", "UnpicklingError", "EOFError", "SafetensorError"):
        problem = f"a file that was read is damaged: {text or type(error).__name__}"
        return message(
            os.fspath(directory), problem=problem, fix="`zaya checkpoint verify` and `zaya data inspect` find it"
        )
    return None


def _of_storage(error: BaseException, directory: str | os.PathLike, offline: bool) -> str | None:
    number, text, path = (
        getattr(error, "errno", None),
        getattr(error, "strerror", None),
        getattr(error, "filename", None),
    )
    # Of errors in a data loader or shutil.copytree the text alone is kept; torch's of shared memory are RuntimeErrors.
    if number is None and (read := re.search(r"\[Errno (\d+)\] ([^:\n'\"]+)(?:: '(.*?)')?[\s'\")\]]*$", str(error))):
        number, text, path = int(read[1]), read[2], read[3]
    elif isinstance(error, RuntimeError) and re.search(LOADER_KILLED, str(error)) and not is_full("/dev/shm"):
        problem = "a data loader was ended by SIGBUS: a data file became shorter while it was read, its disk fails, or "
        problem += f"/dev/shm was full (now {free_space('/dev/shm')})"
        return message(
            "data", problem=problem, fix="restore the data, or data.num_workers=0; then the same command again"
        )
    elif isinstance(error, RuntimeError) and re.search(f"{SHARED_MEMORY}|{LOADER_KILLED}", str(error)):
        number, text, path = errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm"
    if not text or not (isinstance(error, (OSError, RuntimeError)) and (number in STORAGE or path is not None)):
        return None
    if number in LIMITS:
        name, limit = LIMITS[number]
        soft, hard = resource.getrlimit(limit)
        problem = f"{text} in one process" + (f", at {_absolute(path)}" if path else "")
        higher = "a higher limit of the system or container" if hard == soft else f"`ulimit {name} $(ulimit -H {name})`"
        return message(f"ulimit {name}", soft, problem=problem, fix=f"{higher}; then the same command again")
    if path is None and "multiprocessing/synchronize.py" in _place(error):  # semaphores of data loaders are files there
        path = "/dev/shm"
    if path is None and number in (errno.ENOSPC, errno.EDQUOT):
        path = next((place for place in (directory, "/dev/shm", _temporary()) if is_full(place)), None)
    fixes = {
        errno.ENOSPC: "free some space or files there",
        errno.EDQUOT: "remove files of yours there, or ask for a larger quota",
        errno.ENOENT: "restore the file, or correct the path",
        errno.ENOTDIR: "correct the path",
        errno.EISDIR: "correct the path, or remove the directory",
        errno.EIO: "look at the state of the disk or of the file server",
        errno.ESTALE: "mount the file system again",
        errno.ELOOP: "remove the link that leads to itself",
        errno.ENAMETOOLONG: "a shorter path",
        errno.ENFILE: "end programs that hold many files open",
    }
    fix = fixes.get(number, "make it readable and writable for you")
    if path is None:  # an error that names no file is of no directory in particular
        places = ", ".join(
            f"{place}: {free_space(place)}" for place in (_absolute(directory), "/dev/shm", _temporary())
        )
        problem = f"{text}, at {_place(error)}; the error names no file ({places})"
        return message("storage", problem=problem, fix="look at the place in the log; then the same command again")
    path = _absolute(path)
    if path.startswith("/dev/shm"):
        fix = "make it writable, with free space (`docker run --shm-size`), or "
        fix += "no further processes (`--workers 1`)" if offline else "data.num_workers=0"
    return message(path, problem=f"{text} ({free_space(path)})", fix=f"{fix}; then the same command again")


def _absolute(path: str | bytes | os.PathLike) -> str:
    path = os.fsdecode(path)
    with contextlib.suppress(OSError):  # the current directory was removed
        path = os.path.abspath(path)
    return path


def _temporary() -> str:
    return os.environ.get("TMPDIR") or "/tmp"


def is_full(place: str | os.PathLike) -> bool:
    """Return whether the file system of `place` has less than FULL_DISK or no inodes free; False if it cannot be asked."""
    try:
        space = os.statvfs(place)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < FULL_DISK or bool(space.f_files) and not space.f_favail


def _place(error: BaseException) -> str:
    """Return the innermost place of an error: file, line and function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "an unknown place"
    code = trace.tb_frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-2:])}:{trace.tb_lineno} ({code.co_name})"


def free_space(path: str) -> str:
    """Return the free bytes and inodes of the file system of `path`, or of its nearest parent that can be asked."""
    while True:
        try:
            file_system = os.statvfs(path)
        except OSError:
            if path == os.path.dirname(path):
                return "free space unknown"
            path = os.path.dirname(path)
        else:
            free = f"{file_system.f_bavail * file_system.f_frsize // 1024:,} KiB free"
            return free + (f", {file_system.f_favail:,} inodes free" if file_system.f_files else "")


def free_memory() -> int:
    """Return the bytes of memory that programs may still take on this machine; the page cache counts as free. The limit
    of a container is the most.
    """
    limits = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        limits = [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")] or limits
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups 2 and 1
        with contextlib.suppress(OSError, ValueError), open(f"/sys/fs/cgroup/{limit}") as file:
            limits.append(int(file.read()))
    return min(limits)


def check_space(directory: str | os.PathLike, needed: int) -> None:
    """Raise OSError if the file system of `directory`, which need not exist yet, does not have this number of bytes
    free: before the first of them is written.
    """
    place = os.path.abspath(directory)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    file_system = os.statvfs(place)
    if file_system.f_bavail * file_system.f_frsize < needed:
        raise OSError(errno.ENOSPC, f"No space left on device: {needed / 1e9:.2f} GB more are needed", str(directory))


def as_typed(value: object) -> str:
    """Write `value` as it is typed on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
