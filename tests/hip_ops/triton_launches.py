# SPDX-License-Identifier: Apache-2.0
"""Records which Triton kernels calls would compile for a GPU that is not there: nothing is compiled or launched."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import pytest
import torch

# Triton's target, the device number under which it keeps kernels, and the processors of an H200, an MI300X and an
# MI355X.
TARGETS = {
    "sm_90": (("cuda", 90, 32), 90, 132),
    "gfx942": (("hip", "gfx942", 64), 94, 304),
    "gfx950": (("hip", "gfx950", 64), 95, 256),
}


class Driver:
    """Triton's driver of a device that is not there."""

    def __init__(self, target, number: int):
        self.target, self.number = target, number

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device=None) -> int:
        return 0


@contextlib.contextmanager
def recorded_kernels(name: str) -> Iterator[Callable[[Callable, Iterable[tuple]], set[tuple[str, str]]]]:
    """Yields kernels(version, calls): the kernels, each with what Triton compiles it for, that a Triton version
    launches on the device `name` with the arguments of `calls`, which lie on the CPU.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    target, number, _ = TARGETS[name]
    seen = set()

    def not_compiled(key, repr, fn, compile, is_manual_warmup, already_compiled) -> bool:
        seen.add((fn.name.rpartition(".")[2], key))
        return True

    def kernels(version: Callable, calls: Iterable[tuple]) -> set[tuple[str, str]]:
        seen.clear()
        with torch.no_grad():
            for arguments in calls:
                version(*arguments)
        return set(seen)

    with launched_as_on(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", Driver(GPUTarget(*target), number))
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", not_compiled)
        yield kernels


@contextlib.contextmanager
def launched_as_on(name: str) -> Iterator[None]:
    """Within the block the Triton versions choose tiles and grids for tensors on the CPU as on the device `name`."""
    from hip_ops.ops.grouped_product import triton as grouped

    target, _, processors = TARGETS[name]
    amd = target[0] == "hip"
    modules = [module for name, module in sys.modules.items() if name.startswith("hip_ops.")]
    with _forgotten_choices(modules), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.1" if amd else None)
        here = {
            "multiprocessors": lambda device: processors,
            "XCDS": 8 if amd else 1,
            "AMD": amd,
            "WARP_SIZE": target[2],
        }
        for module in modules:
            for attribute in here.keys() & vars(module).keys():
                patch.setattr(module, attribute, here[attribute])
        patch.setattr(grouped, "table_part", lambda device: name)
        yield


@contextlib.contextmanager
def _forgotten_choices(modules: list[ModuleType]) -> Iterator[None]:
    """Launch choices are cached without their device, which never changes elsewhere."""
    caches = [each for module in modules for each in vars(module).values() if hasattr(each, "cache_clear")]
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()
