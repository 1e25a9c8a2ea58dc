# SPDX-License-Identifier: Apache-2.0
import errno
import io
import os
import re
import resource
import zipfile
from pathlib import Path

import pytest

from zaya_plugin.ground.errors import check_space, free_memory, message, mistake, of_the_machine, replace_unprintable


def test_a_message_names_key_value_problem_allowed_and_fix():
    text = message(
        "optim.z_loss", 1e-4, problem="requires cluster.x=true", allowed="0 with cluster.x=false", fix="optim.z_loss=0"
    )
    assert text == "optim.z_loss=0.0001: requires cluster.x=true. Allowed: 0 with cluster.x=false. Fix: optim.z_loss=0."


def test_values_are_written_as_they_are_typed():
    assert message("a", None, problem="is empty") == "a=null: is empty."
    assert message("a", True, problem="is on.") == "a=true: is on."
    assert message("data/x.bin", problem="does not exist") == "data/x.bin: does not exist."


def test_a_mistake_is_a_value_error():
    error = mistake("--output", "x", problem="exists", fix="--force")
    assert isinstance(error, ValueError) and str(error) == "--output=x: exists. Fix: --force."


def test_an_error_of_storage_names_the_path_and_the_free_space(tmp_path):
    absent = tmp_path / "absent" / "file"
    with pytest.raises(OSError) as missing:
        open(absent)
    text = of_the_machine(missing.value, tmp_path)
    assert text.startswith(f"{absent}: No such file or directory (") and text.endswith("then the same command again.")
    assert re.search(r"\([\d,]+ KiB free, [\d,]+ inodes free\)", text) or " KiB free)" in text
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError) as no_space:
        os.write(full, b"x")
    os.close(full)
    text = of_the_machine(no_space.value, tmp_path)  # full is none of these; it names no file
    assert text.startswith("storage: No space left on device, at ground/test_errors.py:")
    assert f"; the error names no file ({tmp_path}: " in text and ", /dev/shm: " in text and ", /tmp: " in text


def test_an_error_without_a_file_names_the_place_that_is_full(tmp_path, monkeypatch):
    for place in ("/dev/shm", str(tmp_path)):
        monkeypatch.setattr(os, "statvfs", lambda path, place=place: _Space(0 if str(path) == place else 10**9))
        text = of_the_machine(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
        assert text.startswith(f"{place}: No space left on device (0 KiB free") and text.count("KiB free") == 1
    monkeypatch.undo()
    shared = "unable to open shared memory object </torch_7_3> in read-write mode: No space left on device (28)"
    killed = (
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    )
    killed = RuntimeError(killed + "shared memory. Please try to raise your shared memory limit.")
    assert of_the_machine(RuntimeError(shared), tmp_path).startswith("/dev/shm: No space left on device (")
    monkeypatch.setattr(os, "statvfs", lambda path: _Space(0))
    assert of_the_machine(killed, tmp_path).startswith("/dev/shm: No space left on device (")
    monkeypatch.setattr(os, "statvfs", lambda path: _Space(10**9))
    assert of_the_machine(killed, tmp_path).startswith("data: a data loader was ended by SIGBUS: a data file became ")


class _Space:
    def __init__(self, blocks):
        self.f_bavail, self.f_frsize, self.f_files, self.f_favail = blocks, 1024, 10**6, 10**6


def test_too_many_open_files_name_the_limit_and_a_data_loader_keeps_the_path(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = of_the_machine(OSError(errno.EMFILE, "Too many open files", "x.idx"), tmp_path)
    assert text.startswith(
        f"ulimit -n={soft}: Too many open files in one process, at {os.path.abspath('x.idx')}. Fix: "
    )
    in_loader = (
        "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n"
    )
    assert of_the_machine(OSError(f"{in_loader}OSError: [Errno 24] Too many open files: 'x.idx'"), tmp_path) == text
    eio = of_the_machine(OSError(f"{in_loader}OSError: [Errno 5] Input/output error: '{tmp_path}/x.bin'"), tmp_path)
    assert eio.startswith(f"{tmp_path}/x.bin: Input/output error (")


def test_errors_of_memory_and_damaged_files_have_a_message_and_others_none(tmp_path):
    with pytest.raises(MemoryError) as memory:
        bytearray(2**62)
    assert of_the_machine(memory.value, tmp_path).startswith("memory: a rank has run out of it: ")
    (tmp_path / "archive").write_bytes(b"PK\3\4 damaged")
    with pytest.raises(zipfile.BadZipFile) as damaged:
        zipfile.ZipFile(tmp_path / "archive")
    assert "a file that was read is damaged: File is not a zip file" in of_the_machine(damaged.value, tmp_path)
    for error in (KeyError("layer"), RuntimeError("a bug"), ConnectionResetError(104, "Connection reset by peer")):
        assert of_the_machine(error, tmp_path) is None, "a traceback is needed"


def test_limits_of_processes_and_of_the_address_space_are_named(tmp_path):
    """The limits are of this process: what may be raised again afterwards is lowered."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    thread, fork = RuntimeError("can't start new thread"), compile("raise error", "lib/subprocess.py", "exec")
    assert of_the_machine(thread, tmp_path).startswith(f"ulimit -u={most}: no further process or thread could be ")
    with pytest.raises(BlockingIOError) as refused:
        exec(fork, {"error": BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")})
    assert of_the_machine(refused.value, tmp_path).startswith(f"ulimit -u={most}: no further process or thread")
    assert of_the_machine(BlockingIOError(errno.EAGAIN, "of a socket"), tmp_path) is None
    memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert of_the_machine(memory, tmp_path).startswith("memory: a rank has run out of it: [Errno 12] Cannot allocate")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**46, limits[1]))
    try:
        for error in (thread, memory, MemoryError()):
            text = of_the_machine(error, tmp_path)
            assert text.startswith(f"ulimit -v={2**36}: the address space of a process is full: ")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_every_error_about_a_file_has_a_message(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop" / "x", tmp_path / ("a" * 300), tmp_path):
        with pytest.raises(OSError) as found:
            open(path, "w")
        assert of_the_machine(found.value, tmp_path).startswith(f"{path}: {found.value.strerror} (")


def test_space_is_checked_before_the_first_byte(tmp_path):
    check_space(tmp_path / "new" / "folder", 1)
    with pytest.raises(OSError, match=r"1000000000000.00 GB more are needed") as found:
        check_space(tmp_path / "new" / "folder", 10**21)
    assert of_the_machine(found.value, tmp_path).startswith(f"{tmp_path}/new/folder: No space left on device: ")
    assert not list(tmp_path.iterdir())


def test_the_page_cache_counts_as_free_memory_and_a_containers_limit_is_the_most():
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    limits = [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    found = [path.read_text().strip() for path in limits if path.is_file()]
    assert abs(free_memory() - min([available, *(int(text) for text in found if text != "max")])) < 2**30


@pytest.mark.parametrize(
    "encoding, printed", [("ascii", b"? ?\n"), ("latin-1", b"? \xe9\n"), ("utf-8", "▁ é\n".encode())]
)
def test_a_console_gets_replacements_for_what_it_cannot_print(monkeypatch, encoding, printed):
    console = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    monkeypatch.setattr("sys.stdout", console)
    monkeypatch.setattr("sys.stderr", None)
    replace_unprintable()
    print("▁ é")
    assert console.buffer.getvalue() == printed
