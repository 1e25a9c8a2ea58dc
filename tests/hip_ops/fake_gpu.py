# SPDX-License-Identifier: Apache-2.0
"""Simulates GPUs of every kind: torch's answers about them, with numbers computed on the CPU."""

import functools
from pathlib import Path
from types import SimpleNamespace

import torch

from hip_ops import errors
from hip_ops.runtime import choice, launchers, operator
from hip_ops.runtime.self_check import differences, plain_arithmetic, seeded

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class FakeGpu:
    """ROCm with `hip`, else NVIDIA. Self-checks on `GPU` run on the CPU, and torch.compile compiles nothing.

    triton: whether it is installed. capturing: whether the current stream is captured.
    """

    def __init__(self, monkeypatch, hip=None, gcn_arch_name="gfx942:sramecc+:xnack-", capability=(9, 0)):
        properties = type("Properties", (), {"gcnArchName": gcn_arch_name})
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        for context in (seeded, plain_arithmetic):
            monkeypatch.setattr(choice, context.__name__, lambda device, context=context: context(CPU))
        monkeypatch.setattr(
            choice,
            "differences",
            lambda a, b, example, _, *given, **more: differences(a, b, example, CPU, *given, **more),
        )
        monkeypatch.setattr(errors, "_warnings", set())
        monkeypatch.setattr(launchers, "_failures", {})
        found = SimpleNamespace(find_spec=lambda name: object() if self.triton else None)
        monkeypatch.setattr(choice, "importlib", SimpleNamespace(util=found))
        monkeypatch.setattr(operator, "compile_function", functools.partial)
        self.triton, self.capturing = True, False


def compiler(folder: Path, name: str, program: str) -> None:
    """Writes a compiler that runs the shell program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{program}\n")
    (folder / name).chmod(0o755)
