# SPDX-License-Identifier: Apache-2.0
"""Which version of each operator a process asks for.

    auto (default)   the best version that is available: hip on ROCm, triton, torch.compile of the reference, the reference.
                     On a CPU the reference.
    hip, triton, compiled, reference    that version of every operator that has it; the others as with auto

An override asks for one operator's version by name, optional packages included (quack, grouped_mm). A version that is asked for
by name and is not available raises ValueError. `set_kernels` and `use_kernels` in code go before HIP_OPS_KERNELS, such as
"triton" or "auto,router_mlp=compiled".
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hip_ops.versions import check_selection

ENVIRONMENT = "HIP_OPS_KERNELS"


class Request(NamedTuple):
    """A version by name, and who asked for it. A tuple, because every call of an operator looks one up."""

    version: str
    source: str


class Selection:
    """What is asked for: `kernels` of all operators, `overrides` of single ones. source: the name of `kernels` in messages."""

    def __init__(self, kernels: str, overrides: Mapping[str, str], source: str = "kernels"):
        check_selection(kernels, dict(overrides))
        self._default = Request(kernels, f"{source}={kernels}")
        self._requests = {name: Request(each, f"kernel_overrides.{name}={each}") for name, each in overrides.items()}

    def of(self, operator: str) -> Request:
        return self._requests.get(operator, self._default)


_stack: list[Selection] = []


def set_kernels(kernels: str | None = "auto", overrides: Mapping[str, str] | None = None) -> None:
    """Sets the versions of this process; None reads HIP_OPS_KERNELS again. Raises ValueError for unknown names."""
    _stack[:] = [] if kernels is None else [Selection(kernels, overrides or {})]
    _from_environment.cache_clear()


@contextlib.contextmanager
def use_kernels(kernels: str = "auto", **overrides: str) -> Iterator[None]:
    """Sets the versions within a `with`, for the whole process: autograd's threads run the backward pass."""
    _stack.append(Selection(kernels, overrides))
    try:
        yield
    finally:
        _stack.pop()


def selection() -> Selection:
    """What is asked for now."""
    return _stack[-1] if _stack else _from_environment()


@functools.cache
def _from_environment() -> Selection:
    """Read once: an operator's call asks for it, and os.environ is slow."""
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return Selection("auto", {})
    kernels, *entries = (part.strip() for part in text.split(","))
    overrides = dict(entry.partition("=")[::2] for entry in entries)
    try:
        return Selection(kernels, overrides, ENVIRONMENT)
    except ValueError as error:
        raise ValueError(f"hip_ops: {ENVIRONMENT}={text!r}: {error}") from None
