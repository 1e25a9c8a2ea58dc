# SPDX-License-Identifier: Apache-2.0
"""The operators, the versions that each has, best first, and which of them a process requests. Needs no torch: recipes
are checked against it.

A new version is one name in this table and one file `hip_ops/ops/<operator>/<name>.py` with functions named like those
of reference.py. `compiled` is torch.compile of the reference and needs no file. Every operator also has the version
`reference`.

A request is

    auto (default)   the best version that is available (runtime/choice.py): hip on ROCm, triton, torch.compile of the
                     reference, the reference. On a CPU the reference.
    hip, triton, compiled, reference    that version of every operator that has it; the others as with auto

An override requests a version for the operators of one folder of hip_ops/ops by name, optional packages included
(quack, grouped_mm). A version that is requested by name, in either way, and is not available or fails its self-check
raises ValueError (not one in NOT_RUN that fails). `set_kernels` and `use_kernels` in code take precedence over
HIP_OPS_KERNELS, which is "triton" or "auto,router_mlp=compiled", for example.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hip_ops.errors import mistake

VERSIONS = {
    "rms_norm": ("hip", "triton", "compiled"),
    "cca_prologue": ("hip", "triton", "compiled"),
    "router_mlp": ("triton", "compiled"),
    "expert_permutation": ("hip", "triton", "compiled"),
    "weighted_swiglu": ("hip", "triton", "compiled"),
    "grouped_product": ("quack", "triton", "grouped_mm", "aiter"),
    "dense_product": ("quack",),
    "newton_schulz": ("hip", "quack", "triton"),
    "muon": ("hip", "triton"),
    "linear_cross_entropy": ("hip", "triton", "compiled"),
    "embedding_gradient": ("hip", "triton"),
    "gradient_addition": ("hip", "compiled"),
}
# Versions that multiply 16-bit matrices only: calls in fp32 run another version. For newton_schulz its argument `dtype`
# counts.
NO_FP32 = {
    "cca_prologue": ("hip",),
    "router_mlp": ("triton",),
    "grouped_product": ("quack", "triton", "grouped_mm", "aiter"),
    "dense_product": ("quack",),
    "newton_schulz": ("hip", "quack", "triton"),
}
# Versions that this project has run on no device. Of hip_ops' operators only a request by name takes them (core
# attention's auto takes aiter after its check); one that fails its self-check is skipped with a warning there too,
# because the request could not know it.
NOT_RUN = ("aiter",)
# Versions that may sum in another order at every call. All others give the same bits, which the self-check compares.
ANY_ORDER = ("aiter",)
ENVIRONMENT = "HIP_OPS_KERNELS"
KERNELS = ("auto", "hip", "triton", "compiled", "reference")  # what can be requested for all operators


def check_selection(kernels: str, overrides: dict[str, str], group: str = "") -> None:
    """Raise ValueError for unknown names. group: the prefix of both keys in messages, such as "cluster."."""
    if kernels not in KERNELS:
        raise mistake(f"{group}kernels={kernels}", "no such version", ", ".join(KERNELS), f"{group}kernels=auto")
    for operator, version in overrides.items():
        key = f"{group}kernel_overrides.{operator}"
        if operator not in VERSIONS:
            raise mistake(f"{key}={version}", "no such operator", ", ".join(VERSIONS), "remove it")
        allowed = ("auto", *VERSIONS[operator], "reference")
        if version not in allowed:
            raise mistake(f"{key}={version}", "no such version", ", ".join(allowed), f"{key}=auto")


def read_selection(text: str) -> tuple[str, dict[str, str]]:
    """Return the version for all operators and those for single ones in a text such as `auto,router_mlp=compiled`.
    Raises ValueError for unknown names."""
    kernels, *entries = (part.strip() for part in text.split(","))
    overrides = dict(entry.partition("=")[::2] for entry in entries)
    check_selection(kernels, overrides)
    return kernels, overrides


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
