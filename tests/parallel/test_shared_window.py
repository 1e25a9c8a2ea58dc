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
    """Files of this process; tests that run beside this one have theirs."""
    return [path for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob(f"zaya_window_{os.getpid()}_*")]


def test_what_is_written_is_read_in_any_dtype(single_rank):  # noqa: F811
    window = open_window(torch.distributed.group.WORLD, 64, torch.device("cpu"), timeout_ms=1000)
    assert isinstance(window, HostWindow) and (window.rank, window.size, window.slot_bytes) == (0, 1, 64)
    assert not left_behind(), "the file has no name any more"
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
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ValueError,
        match=r"parallel.reduce_by_copies = True: \S+ cannot give 2,048 bytes to share .*No space.*allowed here: False",
    ):
        HostWindow(TWO, 1024)
    assert not left_behind()


def test_a_peer_s_file_that_cannot_be_had_is_an_error_too(monkeypatch):
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda paths, path, group: paths.__setitem__(slice(None), [path, "/nowhere/zaya_window"]),
    )
    with pytest.raises(ValueError, match="parallel.reduce_by_copies = True: .*nowhere/zaya_window"):
        HostWindow(TWO, 1024)
    assert not left_behind()


def test_ranks_on_several_hosts_are_refused(monkeypatch):
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda hosts, host, group: hosts.__setitem__(slice(None), ["node1", "node0"]),
    )
    with pytest.raises(
        ValueError, match="parallel.reduce_by_copies = True: allowed where .* on one host; they are on node0, node1"
    ):
        open_window(TWO, 1024, torch.device("cpu"), timeout_ms=1000)


def test_devices_that_cannot_map_each_other_are_an_error_with_its_key(monkeypatch):
    from torch.distributed import _symmetric_memory

    def refuse(*_, **__):
        raise RuntimeError("no peer access")

    monkeypatch.setattr(_symmetric_memory, "empty", refuse)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")  # so that it is as before afterwards
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    with pytest.raises(
        ValueError,
        match=r"parallel.reduce_by_copies = True: the 2 devices cannot map 2,048 bytes .*no peer access.*allowed here: False",
    ):
        SymmetricWindow(TWO, 1024, torch.device("cuda", 0), timeout_ms=1000)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1", "no multicast object is made of a window"


def test_a_barrier_on_a_device_has_an_end(monkeypatch):
    """What torch's handle is asked for; whether its kernel gives up is torch's."""
    from torch.distributed import _symmetric_memory

    asked = []

    class Handle:
        def barrier(self, channel=0, timeout_ms=0):
            asked.append((channel, timeout_ms))

    monkeypatch.setattr(_symmetric_memory, "empty", lambda *_, **__: None)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda *_: Handle())
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    window = SymmetricWindow(TWO, 1024, torch.device("cuda", 0), timeout_ms=3_600_000)
    window.barrier()
    assert asked == [(0, 3_600_000)]
    with pytest.raises(AssertionError, match="for ever"):
        SymmetricWindow(TWO, 1024, torch.device("cuda", 0), timeout_ms=0)
