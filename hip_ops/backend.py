# SPDX-License-Identifier: Apache-2.0
"""Which implementation of the operators runs on a device: `hip`, `triton` or `torch`.

    auto (default)   ROCm: hip where the kernels are built or can be, else triton, else torch.  NVIDIA: triton, else torch.  CPU: torch.
    hip              the kernels of csrc/: hipcc on ROCm; on NVIDIA the nvcc build and on the CPU the g++ build, both slow and for tests
    triton, torch    as they say

HIP_OPS_BACKEND names one for the process; `set_backend` and `use_backend` in code go before it. One that is asked for by name and cannot be had
raises ValueError with the reason; `auto` takes the next. The choice is made once a process and type of device, and logged once by the
logger "hip_ops".
"""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hip_ops.build import prebuilt
from hip_ops.compilers import CompilerNotFound, find_compiler
from hip_ops.library import target_of

BACKENDS = ("hip", "triton", "torch")
logger = logging.getLogger("hip_ops")


@dataclass(frozen=True)
class Choice:
    """`order`: the backends to use, best first; an operator that lacks the first takes the next. `explicit`: asked for by name."""

    order: tuple[str, ...]
    reason: str
    explicit: bool

    @property
    def backend(self) -> str:
        return self.order[0]


_asked_in_code: list[str] = []
_choices: dict[tuple[str, str], Choice] = {}


def set_backend(name: str | None) -> None:
    """Sets the backend of this process, "auto" included; None goes back to HIP_OPS_BACKEND."""
    if name is not None:
        _check(name, "set_backend(...)")
    _asked_in_code[:] = [] if name is None else [name]


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Sets the backend within a `with`. It counts for the process, other threads included (autograd's run the backward)."""
    _check(name, "use_backend(...)")
    _asked_in_code.append(name)
    try:
        yield
    finally:
        _asked_in_code.pop()


def requested() -> tuple[str, str]:
    """The name that is asked for and who asked."""
    if _asked_in_code:
        return _asked_in_code[-1], "set in code"
    name = os.environ.get("HIP_OPS_BACKEND") or "auto"
    if name == "auto":
        return name, name
    return _check(name, "HIP_OPS_BACKEND"), f"HIP_OPS_BACKEND={name}"


def _check(name: str, where: str) -> str:
    if name not in (*BACKENDS, "auto"):
        raise ValueError(f"hip_ops: {where} is {name!r}; allowed are auto, {', '.join(BACKENDS)}")
    return name


def choose(device: torch.device) -> Choice:
    """The choice for the type of `device`; raises ValueError where a backend asked for by name cannot be had."""
    name, source = requested()
    choice = _choices.get((device.type, name))
    if choice is None:
        choice = _choices[device.type, name] = _choose(device, name, source)
        logger.info("hip_ops: backend %s on %s (%s)", choice.backend, device.type, choice.reason)
    return choice


def backend_for(device: torch.device) -> str:
    return choose(device).backend


def _choose(device: torch.device, name: str, source: str) -> Choice:
    if name != "auto":
        why_not = unavailable(name, device)
        if why_not:
            raise ValueError(f"hip_ops: backend {name!r} ({source}) cannot be had on {device}: {why_not}")
        slow = name == "hip" and torch.version.hip is None
        return Choice((name,), source + ("; slow, to verify the kernels" if slow else ""), explicit=True)
    candidates = ("torch",) if device.type == "cpu" else ("triton", "torch") if torch.version.hip is None else BACKENDS
    missing = {candidate: unavailable(candidate, device) for candidate in candidates}
    order = tuple(candidate for candidate in candidates if missing[candidate] is None)
    reasons = [f"no {candidate}: {why}" for candidate, why in missing.items() if why]
    return Choice(order, "; ".join(["auto", *reasons]), explicit=False)


def unavailable(name: str, device: torch.device) -> str | None:
    """Why backend `name` cannot be had on `device`, or None. Compiles nothing."""
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed (it comes with the GPU builds of torch)"
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton compiles for GPUs (TRITON_INTERPRET=1 runs it in an interpreter)"
    if name == "hip":
        try:
            target = target_of(device)
        except ValueError as error:
            return str(error)
        try:
            find_compiler(target)
        except CompilerNotFound as error:
            if prebuilt(target) is None:
                return f"{error}; and the cache holds no library for {target} (`python -m hip_ops build` on a machine that has a compiler)"
    return None
