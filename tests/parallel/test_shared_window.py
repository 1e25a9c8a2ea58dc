# SPDX-License-Identifier: Apache-2.0
"""Windows on a CPU: what a rank writes the owner reads, nothing stays in the folder, and a full disk is an error with its name."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.megatron_rank import single_rank  # noqa: F401
from zaya_plugin.parallel import shared_window
from zaya_plugin.parallel.shared_window import HostWindow, SymmetricWindow, open_window

TWO = SimpleNamespace(rank=lambda: 1, size=lambda: 2)


def left_behind():
    return [path for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("zaya_window_*")]


def test_what_is_written_is_read_in_any_dtype(single_rank):  # noqa: F811
    before = left_behind()
    window = open_window(torch.distributed.group.WORLD, 64, torch.device("cpu"))
    assert isinstance(window, HostWindow) and (window.rank, window.size, window.slot_bytes) == (0, 1, 64)
    assert left_behind() == before, "the file has no name any more"
    window.slots(0, torch.float32)[0].copy_(torch.arange(16.0))
    window.barrier()
    assert window.slots(0, torch.float32).shape == (1, 16) and window.slots(0, torch.bfloat16).shape == (1, 32)
    assert torch.equal(window.slots(0, torch.float32)[0], torch.arange(16.0))


def test_two_mappings_of_a_file_are_one_memory(tmp_path):
    path = tmp_path / "window"
    path.write_bytes(bytes(64))
    one, other = shared_window._mapped(str(path)), shared_window._mapped(str(path))
    one.view(torch.float32)[3] = 7.0
    assert other.view(torch.float32)[3] == 7.0


def test_a_full_disk_is_said_and_leaves_no_file(monkeypatch):
    before = left_behind()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"parallel.reduce_by_copies = True: \S+ has no 2,048 bytes left .*No space.*allowed here: False"):
        HostWindow(TWO, 1024)
    assert left_behind() == before


def test_devices_that_cannot_map_each_other_are_an_error_with_its_key(monkeypatch):
    from torch.distributed import _symmetric_memory

    def refuse(*_, **__):
        raise RuntimeError("no peer access")

    monkeypatch.setattr(_symmetric_memory, "empty", refuse)
    with pytest.raises(ValueError, match=r"parallel.reduce_by_copies = True: the 2 devices cannot map 2,048 bytes .*no peer access.*allowed here: False"):
        SymmetricWindow(TWO, 1024, torch.device("cuda", 0))
