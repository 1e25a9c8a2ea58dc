# SPDX-License-Identifier: Apache-2.0
"""Finds the patches of this package, decides which of them this machine needs, and applies each once."""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zaya_plugin import compat
from zaya_plugin.patches.hooks import MEGATRON, HostChange, holder_of

__all__ = ["MEGATRON", "Patch", "apply", "apply_torch", "describe", "has_accelerator"]


@dataclass(frozen=True, kw_only=True)
class Patch(HostChange):
    """A change of one symbol that lasts for the whole process.

    Attributes:
        make: returns the new value of the symbol from the stock one. also: further symbols that change with it, each
            with its `make`.
        enter: makes the change where it is no attribute; replaces `make`.
        scope: "cpu": applied only without an accelerator; "always": on every machine.
        condition: has to hold too, such as a missing Transformer Engine.
    """

    until: str = "Megatron trains without an accelerator"
    make: Callable[[Any], Any] | None = None
    also: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    enter: Callable[[], None] | None = None
    scope: str = "cpu"
    condition: Callable[[], bool] = lambda: True

    @property
    def applies(self) -> bool:
        """Whether this machine needs the patch."""
        if self.symbol.startswith("megatron.training.") and not compat.has_training():
            return False
        return (self.scope == "always" or not has_accelerator()) and self.condition()

    def install(self) -> None:
        """Make the change."""
        if self.enter is not None:
            return self.enter()
        assert self.make is not None
        for symbol, make in {self.symbol: self.make, **self.also}.items():
            holder, name = holder_of(symbol)
            setattr(holder, name, make(getattr(holder, name)))


_installed: set[str] = set()  # symbols; installing a patch twice would wrap a wrapper


@functools.cache
def has_accelerator() -> bool:
    """Whether torch has a GPU (CUDA or ROCm). The answer is kept, since later patches change what torch.cuda
    answers.
    """
    import torch

    return torch.cuda.is_available()


@functools.cache
def describe() -> tuple[Patch, ...]:
    """Return every patch of this package in the order in which they are applied: those of torch first."""
    names = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])} - {"registry", "hooks"}
    modules = [vars(importlib.import_module(f"zaya_plugin.patches.{name}")) for name in names]
    patches = (patch for module in modules for patch in module.get("PATCHES") or (module["PATCH"],))
    return tuple(sorted(patches, key=lambda patch: (patch.package != "torch", patch.symbol)))


def apply_torch() -> None:
    """Apply the patches of torch (no Megatron import)."""
    _apply(patch for patch in describe() if patch.package == "torch")


def apply() -> None:
    """Apply every patch that this machine needs. A second call changes nothing."""
    _apply(describe())


def _apply(patches: Iterable[Patch]) -> None:
    # This imports torch and Megatron. Garbage collections take a fifth of that time and find nothing; later ones leave
    # out what was imported.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for patch in patches:
            if patch.symbol in _installed or not patch.applies:
                continue
            patch.require()
            patch.install()
            _installed.add(patch.symbol)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
