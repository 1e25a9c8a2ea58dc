# SPDX-License-Identifier: Apache-2.0
"""Holds which version of each operator a process requests.

    auto (default)   the best version that is available: hip on ROCm, triton, torch.compile of the reference, the
                     reference. On a CPU the reference.
    hip, triton, compiled, reference    that version of every operator that has it; the others as with auto

An override requests a version for the operators of one folder of hip_ops/ops by name, optional packages included
(quack, grouped_mm). A version that is requested by name, in either way, and is not available or fails its self-check
raises ValueError (not one in versions.NOT_RUN that fails). `set_kernels` and `use_kernels` in code take precedence over
HIP_OPS_KERNELS, which is "triton" or "auto,router_mlp=compiled", for example.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hip_ops.errors import mistake
from hip_ops.versions import check_selection, read_selection

ENVIRONMENT = "HIP_OPS_KERNELS"


class Request(NamedTuple):
    """A version by name, and the setting that requests it. A tuple, for speed: every call of an operator looks one
    up.
    """

    version: str
    source: str


class Selection:
    """The requested versions: `kernels` for all operators, `overrides` for single ones. names: of both settings in
    messages.
    """

    def __init__(self, kernels: str, overrides: Mapping[str, str], names=("kernels", "kernel_overrides.")):
        self._default = Request(kernels, f"{names[0]}={kernels}")
        self._requests = {name: Request(version, f"{names[1]}{name}={version}") for name, version in overrides.items()}

    def of(self, operator: str) -> Request:
        return self._requests.get(operator, self._default)


_stack: list[Selection] = []


def set_kernels(kernels: str | None = "auto", overrides: Mapping[str, str] | None = None, group: str = "") -> None:
    """Set the versions of this process; None reads HIP_OPS_KERNELS again. group: prefix of the keys in messages, such
    as "cluster.".

    Raises ValueError for unknown names.
    """
    if kernels is None and overrides:
        fix = f"put them into {ENVIRONMENT}, as in {ENVIRONMENT}=auto,router_mlp=compiled"
        raise mistake(f"{group}kernels=None", f"reads {ENVIRONMENT}", f"no {group}kernel_overrides", fix)
    check_selection(kernels or "auto", dict(overrides or {}), group)
    names = (f"{group}kernels", f"{group}kernel_overrides.")
    _stack[:] = [] if kernels is None else [Selection(kernels, overrides or {}, names)]
    _from_environment.cache_clear()


@contextlib.contextmanager
def use_kernels(kernels: str = "auto", **overrides: str) -> Iterator[None]:
    """Set the versions within a `with` block, in all threads, because autograd's threads run the backward pass."""
    check_selection(kernels, overrides)
    inner = Selection(kernels, overrides)
    _stack.append(inner)
    try:
        yield
    finally:
        if inner in _stack:  # else set_kernels was called inside, for the rest of the process
            _stack.remove(inner)


def selection() -> Selection:
    """Return the current selection."""
    return _stack[-1] if _stack else _from_environment()


@functools.cache
def _from_environment() -> Selection:
    """Read HIP_OPS_KERNELS once, because every operator's call needs it and os.environ is slow."""
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return Selection("auto", {})
    try:
        return Selection(*read_selection(text), (ENVIRONMENT, f"{ENVIRONMENT}: "))
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT}={text}: {error}") from None
