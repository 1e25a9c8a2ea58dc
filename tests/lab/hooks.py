# SPDX-License-Identifier: Apache-2.0
"""Faults inside a rank, for the lab alone: Python loads this through a sitecustomize.py that the lab writes, and ranks
of other runs never do. Each fault comes once: a file of the lab says that it was.

ZAYA_LAB_FAULT: {"kind": ..., "step": the last finished step from which on, "once": the file}.
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
KEPT: list[Any] = []  # what must live as long as the process


def install() -> None:
    """Prepare the fault that the environment names, in a rank."""
    if VARIABLE in os.environ and "RANK" in os.environ:
        fault = json.loads(os.environ[VARIABLE])
        HOOKS[fault["kind"]](fault)


def first_time(fault: dict[str, Any]) -> bool:
    """Whether the fault did not come yet; this process is then the one that makes it."""
    try:
        os.close(os.open(fault["once"], os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    Path(fault["once"]).write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
    return True


def is_mine(fault: dict[str, Any]) -> bool:
    """Whether this process makes the fault."""
    return not os.path.exists(fault["once"]) or str(os.getpid()) in Path(fault["once"]).read_text()


def take_port(fault: dict[str, Any]) -> None:
    """Listen on the port of rank 0's store before it does."""
    if os.environ["RANK"] == "0" and first_time(fault):
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", int(os.environ["MASTER_PORT"])))
        taken.listen(1)
        KEPT.append(taken)


def change_loss(fault: dict[str, Any]) -> None:
    """Multiply the losses: by NaN for one step, or for a spike until the process ends. Their gradient stays what the
    kernel of the loss was promised.
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
    """Call `change` with the module `name` once it was imported."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, wanted, path, target=None):
            if wanted != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), change(module))
            return spec

    sys.meta_path.insert(0, Finder())


HOOKS = {"port": take_port, "loss": change_loss}
