# SPDX-License-Identifier: Apache-2.0
"""Finds the patch modules of this package, decides which are wanted here, applies each once, and can say so."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from zaya_plugin import compat


@dataclass(frozen=True)
class Patch:
    """One changed symbol.

    symbol: dotted path of what is changed. reason: why, for `zaya doctor`. scope: "cpu" or "always".
    package and versions: distribution and range that the change was written for. install: performs the change.
    wanted: a further condition (e.g. only when Transformer Engine is missing). also: further attributes that install changes.
    """

    symbol: str
    reason: str
    install: Callable[[], None]
    scope: str = "cpu"
    package: str = "megatron-core"
    versions: str = compat.SUPPORTED
    wanted: Callable[[], bool] = lambda: True
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The symbol, under the name that `zaya doctor` shows."""
        return self.symbol

    @property
    def fits(self) -> bool:
        """Whether the installed version of the package lies in the range."""
        return SpecifierSet(self.versions, prereleases=True).contains(self.installed)

    @property
    def installed(self) -> Version:
        """The installed version of the package."""
        return compat.core_version() if self.package == "megatron-core" else Version(metadata.version(self.package))

    @property
    def applies(self) -> bool:
        """Whether this machine needs the patch."""
        if self.symbol.startswith("megatron.training.") and not compat.has_training():
            return False
        return (self.scope == "always" or not has_accelerator()) and self.wanted()


# What this process has changed already; installing twice would wrap a wrapper.
_installed: set[str] = set()


@functools.cache
def has_accelerator() -> bool:
    """True where torch sees a GPU (CUDA or ROCm). Asked once: later patches make torch.cuda answer differently."""
    import torch

    return torch.cuda.is_available()


@functools.cache
def load() -> tuple[Patch, ...]:
    """Every patch of this package, those of torch first."""
    found = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in ("registry", "hooks"):
            found.append(importlib.import_module(f"zaya_plugin.patches.{module.name}").PATCH)
    return tuple(sorted(found, key=lambda p: (p.package != "torch", p.symbol)))


def apply_torch() -> None:
    """Apply the patches of torch (no Megatron import)."""
    _apply([p for p in load() if p.package == "torch"])


def apply() -> None:
    """Apply every patch that this machine needs. Safe to call again."""
    _apply(load())


def describe() -> list[Patch]:
    """All patches in the order they are applied; `applies` says whether this machine gets them, `reason` why."""
    return list(load())


def _apply(patches) -> None:
    for patch in patches:
        if patch.symbol in _installed or not patch.applies:
            continue
        if not patch.fits:
            raise ImportError(
                f"patch of {patch.symbol}: {patch.package} {patch.installed} is installed, "
                f"the patch is written for {patch.versions}; install a version in that range"
            )
        patch.install()
        _installed.add(patch.symbol)
