# SPDX-License-Identifier: Apache-2.0
"""No space left: a clear message, no half-written dataset, and the same command finishes once there is space."""

import re
import resource
import shutil
import subprocess

import pytest


@pytest.fixture
def command(corpus):
    return ["--input", corpus, "--train-bpe", 400, "--valid-fraction", 0.2, "--part-bytes", 8000, "--workers", 1]


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 200 KB and a function that makes it larger."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", path], capture_output=True).returncode != 0:
        pytest.skip("may not mount a tmpfs; test_file_size_limit goes the same way with a limit of the kernel")
    yield path, lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", path], check=True)
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("size", ["12k", "24k", "48k", "80k", "112k", "144k"])
def test_full_disk(small_disk, size, command, run, prepared, contents, capsys):
    """Disk sizes: the smallest cannot hold the tokenizer, the largest fills up while the parts are joined."""
    disk, resize = small_disk
    resize(size)
    output = disk / "out"
    assert run(*command, "--output", output) == 2
    error = capsys.readouterr().err
    assert error.startswith("zaya: ") and ": No space left on device (" in error and "Traceback" not in error
    assert f" {output} was not touched, " in error or f" {output} was not touched." in error
    assert not output.exists() and not list(disk.glob("*.lock.*")) and not list(disk.glob("**/*.part.*"))
    resize("1m")
    assert run(*command, "--output", output) == 0
    assert contents(output) == contents(prepared)
    assert [path.name for path in disk.iterdir()] == ["out"]


def test_full_disk_keeps_the_dataset_that_is_being_replaced(small_disk, command, run, contents, capsys):
    disk, resize = small_disk
    output = disk / "out"
    resize("1m")
    assert run(*command, "--output", output) == 0
    before = contents(output)
    used = shutil.disk_usage(disk).used
    resize(f"{(used + 30_000) // 1024}k")
    assert run(*command, "--output", output, "--overwrite") == 2
    assert "was not touched" in capsys.readouterr().err and contents(output) == before


@pytest.mark.parametrize("limit", [3_000, 11_000, 40_000])
def test_file_size_limit(tmp_path, limit, command, start, run, prepared, contents):
    """Like a full disk, for those who may not mount: the kernel refuses bytes past the limit (the merge writes the
    largest file).
    """
    output = tmp_path / "out"
    process = start(
        *command, "--output", output, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    _, err = process.communicate()
    assert (
        process.returncode == 2
        and re.search(r"zaya: ulimit -f=\d+: File too large.* Fix: a higher limit.*out was not touched", err)
        and "Traceback" not in err
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial"]
    assert run(*command, "--output", output) == 0
    assert contents(output) == contents(prepared)


def test_worker_that_meets_a_full_disk(small_disk, command, run, prepared, contents, capsys):
    disk, resize = small_disk
    resize("48k")
    assert run(*command, "--workers", 2, "--output", disk / "out") == 2
    assert ": No space left on device (" in capsys.readouterr().err
    resize("1m")
    assert run(*command, "--workers", 2, "--output", disk / "out") == 0
    assert contents(disk / "out") == contents(prepared)
