# SPDX-License-Identifier: Apache-2.0
"""Finds AITER (package amd-aiter, github.com/ROCm/aiter) and its functions, by version and signature.

This project has not run AITER on any device. Its calls are compared with the signatures of four releases
(tests/stand_ins/aiter-*.json, read from the sources), and each version that uses them with its reference before the
first use on a device.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from hip_ops.errors import mistake, warn_once
from hip_ops.runtime.launch import architecture

DISTRIBUTION = "amd-aiter"  # PyPI's package `aiter` is an unrelated library
READ_RELEASES = ("0.1.14.post1", "0.1.18", "0.1.19.post2", "0.1.20.post1")  # tests/stand_ins/aiter-*.json
RELEASES = f"the releases {', '.join(READ_RELEASES)}, whose sources were read"
ARCHITECTURES = ("gfx942", "gfx950")  # those for which these releases hold settings of the kernels that we use


def version_of(distribution: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed() -> str | None:
    """Return the version of the installed AITER, or None."""
    return version_of(DISTRIBUTION)


def installed_versions() -> tuple[str | None, str | None]:
    """Return the versions of AITER and of Transformer Engine, None for one that is not installed."""
    return installed(), version_of("transformer-engine")


def stale_backward(aiter: str | None, transformer_engine: str | None) -> str | None:
    """Return why AITER's attention must not train with this Transformer Engine, or None; arguments as
    `installed_versions` returns them.

    Before 2.14 Transformer Engine on ROCm loads a libmha_bwd.so of its own, with which AITER's backward pass crashed
    for heads of 128 channels on gfx942 (Primus, aiter_deepbind_patches.py).
    """
    readable = aiter and transformer_engine and re.match(r"\d", transformer_engine)
    if not readable or _release(transformer_engine) >= (2, 14):
        return None
    return f"transformer-engine {transformer_engine} with amd-aiter {aiter}"


def not_read(version: str | None) -> str | None:
    """Return why `auto` must not take this version of AITER, of which this project has not read the source, or None;
    None too for one before these, of which `missing` says so.
    """
    if version is None or version.partition("+")[0] in READ_RELEASES or _release(version) < _release(READ_RELEASES[0]):
        return None
    return f"AITER {version} is not one of {RELEASES}"


def missing(first: str) -> str | None:
    """Return why there is no AITER of version `first` or later, or None. Imports nothing of it."""
    version = installed()
    if version is None:
        return f"AITER is not installed (package {DISTRIBUTION}, github.com/ROCm/aiter)"
    if _release(version) < _release(first):
        return f"AITER {version} is older than {first}, the first release whose functions are used"
    return None


def available(device: torch.device, first: str) -> str | None:
    """Return why AITER from version `first` on is not available on `device`, or None."""
    reason = missing(first)
    if reason is None and architecture(device) not in ARCHITECTURES:
        reason = f"AITER's kernels are for {' and '.join(ARCHITECTURES)}, not for {architecture(device)}"
    if reason is None:
        text = (
            "hip_ops: aiter %s was requested. This project has not run it on any device; it is compared with the "
            "reference before its first use"
        )
        warn_once(("aiter", installed()), text, installed())
    return reason


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without post, development and local parts."""
    return tuple(int(number) for number in re.match(r"\d+(\.\d+)*", version).group().split("."))


@dataclass(frozen=True)
class Function:
    """A function of AITER, called with these arguments, all by keyword, because their order differs by release.

    A call raises ValueError where the installed release does not have the function or an argument.
    """

    module: str
    name: str
    arguments: tuple[str, ...]

    def __call__(self, **arguments: Any) -> Any:
        return self._resolved()(**arguments)

    @functools.cache  # noqa: B019  (the instances are constants of modules)
    def _resolved(self) -> Callable:
        problem = self.problem()
        if problem is not None:
            raise mistake(f"{DISTRIBUTION}={installed()}", problem, RELEASES, "request another version")
        return getattr(importlib.import_module(self.module), self.name)

    def problem(self) -> str | None:
        """Import the module and return why the function cannot be called with the arguments, or None."""
        try:
            function = getattr(importlib.import_module(self.module), self.name)
            inspect.signature(function).bind(**dict.fromkeys(self.arguments))
        except TypeError as error:
            return f"{self.module}.{self.name} does not take the arguments of this project ({error})"
        except (
            Exception
        ) as error:  # ImportError, AttributeError; OSError of a missing library; and others of the package
            return f"{self.module}.{self.name} cannot be imported ({error})"
        return None
