# SPDX-License-Identifier: Apache-2.0
"""A writer process for tests, with this process as its rank."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import xxhash

from zaya_plugin.checkpoint import places
from zaya_plugin.checkpoint.places import Place
from zaya_plugin.checkpoint.writer import Save

CONTENT = bytes(range(256)) * 4096  # 1 MiB
WRITER = "zaya_plugin.checkpoint.writer"


class WriterProcess:
    """Start a writer whose file is `CONTENT`.

    Attributes:
        told: messages of the writer.
    """

    def __init__(self, rank: int = 0, module: str = WRITER, size: int = len(CONTENT), **environment: str):
        self.rank, self.told, self.size = rank, [], size
        memory = os.memfd_create("content")
        os.ftruncate(memory, size)
        os.pwrite(memory, CONTENT[:size], 0)
        index = "index" if rank == 0 else ""
        plan = dict(file=f"__{rank}_0.distcp", slices=[(0, size)], size=size, index=index, format="{}")
        layout = json.dumps(plan).encode()
        os.pwrite(memory, layout, size)
        mine, its = socket.socketpair()
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(its.fileno()), str(memory)],
                pass_fds=[its.fileno(), memory],
                env={**os.environ, "ZAYA_RANK_PID": str(os.getpid()), **environment},
                stderr=subprocess.PIPE,
                text=True,
            )
        os.close(memory)
        self.connection = Connection(mine.detach())
        self.ask(do="layout", size=len(layout), start=size)

    def ask(self, **request) -> None:
        """Send a request."""
        self.connection.send_bytes(json.dumps(request).encode())

    def save(self, directory: Place | Path, iteration: int, number: int = 1, world: int = 1, **changes) -> Save:
        """Ask for a checkpoint, of generation "g"."""
        save = request(directory, iteration, number, rank=self.rank, world=world, **changes)
        self.ask(do="save", save=dataclasses.asdict(save))
        return save

    def hear(self, *states: str, seconds: float = 30.0) -> dict:
        """Wait until the writer says one of `states`, and return what it says."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.connection.poll(0.05):
                told = json.loads(self.connection.recv_bytes())
                if told["state"] == "alive":
                    continue
                self.told.append(told)
                if told["state"] in states:
                    return told
        raise AssertionError(f"none of {states} within {seconds:g} s: {self.told[-5:]}")

    def end(self) -> tuple[int, str]:
        """Wait for the process. Return its exit code and stderr."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def close(self) -> None:
        """End the process, as the rank's end does."""
        self.connection.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()


def request(
    directory: Place | Path, iteration: int, number: int = 1, local: Place | Path | None = None, **changes
) -> Save:
    """Return the request of a save, of generation "g"."""
    named = dict(rank=0, world=1, facts={"run_id": "r", "generation": "g"}, keep_last=1, keep_every=None, deadline=30.0)
    return Save(
        number=number,
        iteration=iteration,
        place=places.to_text(places.at(directory)),
        local=None if local is None else places.to_text(places.at(local)),
        **named | changes,
    )


def checksum(content: bytes) -> str:
    """Return a manifest's checksum."""
    return xxhash.xxh3_128_hexdigest(content)
