# SPDX-License-Identifier: Apache-2.0
"""Storage that fails while checkpoints are looked for: a mount that hangs, one whose server is gone, files that cannot be
read. Real faults: a FUSE mount without an answering daemon, and a library before libc that lets read() fail.
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin import cli
from zaya_plugin.checkpoint import manifest, on_disk, places
from zaya_plugin.config.run_directory import iterations

MNT_DETACH = 2
FAILING_READ = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

ssize_t read(int file, void* buffer, size_t count) {
    static ssize_t (*real)(int, void*, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "read");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    const char* failing = getenv("FAILING_READ");
    if (length > 0 && failing) {
        path[length] = 0;
        if (strstr(path, failing)) {
            errno = EIO;
            return -1;
        }
    }
    return real(file, buffer, count);
}
"""


class Mount:
    """A FUSE mount whose daemon never answers; after close() it is gone, and accesses raise ENOTCONN."""

    def __init__(self, path: Path):
        path.mkdir()
        self.path, self.libc = path, ctypes.CDLL(None, use_errno=True)
        try:
            self.fuse = os.open("/dev/fuse", os.O_RDWR)
        except OSError as error:
            pytest.skip(f"no FUSE: {error}")
        options = f"fd={self.fuse},rootmode=40000,user_id=0,group_id=0".encode()
        if self.libc.mount(b"none", str(path).encode(), b"fuse", 0, options):
            os.close(self.fuse)
            pytest.skip(f"mounting needs root: {os.strerror(ctypes.get_errno())}")

    def close(self) -> None:
        if self.fuse is not None:
            os.close(self.fuse)
            self.fuse = None

    def unmount(self) -> None:
        self.close()
        assert self.libc.umount2(str(self.path).encode(), MNT_DETACH) == 0


@pytest.fixture
def mount(tmp_path):
    made = Mount(tmp_path / "mount")
    yield made
    made.unmount()


def test_a_mount_that_hangs_is_named_after_a_deadline(mount):
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"checkpoint.path={mount.path}: does not answer within 0.5 s"):
        places.require_answer(mount.path, "checkpoint.path", seconds=0.5)
    assert time.monotonic() - began < 60


def test_a_mount_whose_server_is_gone_is_not_an_empty_directory(mount, capsys):
    mount.close()
    with pytest.raises(ValueError, match=r"cannot be read \(.*: Transport endpoint is not connected\)"):
        places.require_answer(mount.path, "checkpoint.path")
    with pytest.raises(ValueError, match=f"{mount.path}: cannot be read .Transport endpoint is not connected"):
        iterations(mount.path)
    assert cli.main(["checkpoint", "list", str(mount.path)]) == 2
    assert "Transport endpoint is not connected" in capsys.readouterr().err


def test_what_is_not_there_answers(tmp_path):
    places.require_answer(tmp_path / "missing", "checkpoint.path")
    (tmp_path / "file").write_text("")
    places.require_answer(tmp_path / "file", "checkpoint.path")


def test_a_manifest_that_cannot_be_read_is_skipped_and_named(tmp_path):
    for step in (10, 20):
        pretend_checkpoint(tmp_path, step)
    directory = tmp_path / "checkpoints"
    broken = on_disk.folder(directory, 20) / manifest.NAME
    broken.unlink()
    broken.symlink_to("/proc/self/mem")  # opens, and its first byte cannot be read: EIO
    places.require_answer(directory, "checkpoint.path")
    newest, (skipped,) = on_disk.latest(directory)
    assert newest == 10 and str(broken) in skipped and "Input/output error" in skipped


@pytest.fixture(scope="module")
def failing_read(tmp_path_factory, require_tool) -> Path:
    library = tmp_path_factory.mktemp("shim") / "failing_read.so"
    source = library.with_suffix(".c")
    source.write_text(FAILING_READ)
    subprocess.run([require_tool("g++"), "-x", "c", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def test_a_file_that_cannot_be_read_is_named(tmp_path, failing_read):
    folder = tmp_path / "checkpoints" / "iter_0000010"
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_bytes(b"weights")
    manifest.write(folder, 10, {path.name: manifest.describe(path) for path in folder.iterdir()})
    environment = {**os.environ, "LD_PRELOAD": str(failing_read), "FAILING_READ": "__1_0.distcp"}
    command = [sys.executable, "-m", "zaya_plugin.cli", "checkpoint", "verify", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "iter_0000010: damaged",
        f"  {folder}/__1_0.distcp cannot be read (Input/output error)",
    ]
