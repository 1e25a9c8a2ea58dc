# SPDX-License-Identifier: Apache-2.0
"""Faults inside a rank: Python loads this file through a sitecustomize.py that the lab writes. Each fault happens once: the
rank that makes it writes a marker file.

ZAYA_LAB_FAULT: {"kind": ..., "step": the loss changes after this step, "marker": the file}.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "ZAYA_LAB_FAULT"
SITE = "from tests.lab import hooks\n\nhooks.install()\n"
OPEN_SOCKETS: list[socket.socket] = []  # until the process ends


def install() -> None:
    """Prepare the fault that the environment names, in a rank."""
    if VARIABLE in os.environ and "RANK" in os.environ:
        fault = json.loads(os.environ[VARIABLE])
        HOOKS[fault["kind"]](fault)


def first_time(fault: dict[str, Any]) -> bool:
    """Return whether no process has made the fault yet; this process then makes it, and writes the marker."""
    try:
        os.close(os.open(fault["marker"], os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    Path(fault["marker"]).write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
    return True


def is_mine(fault: dict[str, Any]) -> bool:
    """Return whether no other process has made the fault."""
    return not os.path.exists(fault["marker"]) or str(os.getpid()) in Path(fault["marker"]).read_text()


def take_port(fault: dict[str, Any]) -> None:
    """Listen on the port of rank 0's store before it does."""
    if os.environ["RANK"] == "0" and first_time(fault):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", int(os.environ["MASTER_PORT"])))
        listener.listen(1)
        OPEN_SOCKETS.append(listener)


def change_loss(fault: dict[str, Any]) -> None:
    """Multiply the losses: by NaN for one step, or for a spike until the process ends. Their gradient stays the
    one that the kernel of the loss relies on.
    """

    def wrap(module) -> None:
        original = module.forward_step

        def forward_step(data_iterator, model):
            losses, reduce = original(data_iterator, model)
            beat = sys.modules["zaya_plugin.training.heartbeat"]._beat
            last = beat.last if beat is not None else 0
            if os.environ["RANK"] == "1" and last >= fault["step"] and is_mine(fault):
                first_time(fault)
                losses = losses + losses.detach() * (float(fault["factor"]) - 1)
            return losses, reduce

        module.forward_step = forward_step

    after_import("zaya_plugin.hosts.adapter", wrap)


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """Call `change` with the module `name` after its import."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, module_name, path, target=None):
            if module_name != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), change(module))
            return spec

    sys.meta_path.insert(0, Finder())


HOOKS = {"port": take_port, "loss": change_loss}
